"""Log-probs in chunks, forward and backward from the last hidden states, against a plain
cross-entropy on whole logits.

    ratio        plain seconds / our seconds. The plain side multiplies in the model's type, so that
                 its logits of bfloat16 models are rounded to bfloat16, which ours are not
    ratio_wide   the same with a plain side whose logits are float32, from float32 operands
    kept         share of the tokens whose softmax is kept for the backward; the logits of the
                 others are made twice

Seconds are those of the processor, on one thread: other processes do not count. Sides alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, linear

from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(args: argparse.Namespace) -> dict[str, object]:
    dtype = DTYPES[args.dtype]
    hidden = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_()
    weight = torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,))

    def ours() -> None:
        logp, entropy, _ = vocab_parallel_logprobs(
            hidden, weight, targets, 1.0, args.chunk, vocab_size=args.vocabulary
        )
        (logp.sum() + entropy.sum() if args.entropy else logp.sum()).backward()

    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: cross_entropy(linear(hidden, weight).float(), targets).backward(),
        "ours": ours,
    }
    if args.dtype != "float32":
        sides["wide"] = lambda: cross_entropy(
            linear(hidden.float(), weight.float()), targets
        ).backward()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.steps + 1):
        for name, side in sides.items():
            hidden.grad = weight.grad = None
            started = time.process_time()
            side()
            if turn:
                times[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    chunks = 2 if args.dtype == "float32" else 3
    found = {f"{name}_ms": round(value * 1e3, 1) for name, value in medians.items()}
    ratios = {"ratio": round(medians["plain"] / medians["ours"], 3)}
    if "wide" in medians:
        ratios["ratio_wide"] = round(medians["wide"] / medians["ours"], 3)
    return {**vars(args), **found, **ratios, "kept": min(1.0, chunks * args.chunk / args.tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--entropy", action="store_true", help="a gradient of the entropy, too")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()

"""`Policy.train_step` on packed rows whose responses share their group's prompt, against rows in
which each response has its own, on the same samples, alternating in one process.

    python examples/smollm2/prepare.py
    python benchmarks/prefix_sharing.py                    # SmolLM2-135M, 16 x 8, 55 + 23 tokens
    python benchmarks/prefix_sharing.py --prompt-tokens 4  # short prompts
    python benchmarks/prefix_sharing.py --millions 1 --prompt-tokens 8 --steps 20
    python benchmarks/prefix_sharing.py --device cuda --dtype bfloat16 --millions 600 \
        --budget 16384 --prompt-tokens 512 --response-tokens 256 --steps 5

Lengths of prompts and responses are spread evenly over the mean, by `--spread` of it to either
side. Ratio = seconds without sharing / seconds with it, medians: above 1, sharing is faster.
Seconds are the process's own CPU time on one thread by default, so that other programs on the
machine weigh little; with `--threads` above 1 or `--device cuda` they are elapsed time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import random_model
import torch
from numpy.typing import NDArray

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import MIN_SHARING, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.batch_shares import receive
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rows import TrainBatch

SMOLLM2 = Path(__file__).resolve().parents[1] / "examples/smollm2/generated/smollm2"


def samples_of(prompts: NDArray[np.int64], responses: NDArray[np.int64], vocab: int) -> TrainBatch:
    """Random tokens. prompts: [G] lengths; responses: [G, group] lengths."""
    rng = np.random.default_rng(1)
    groups = []
    for number, length in enumerate(prompts.tolist()):
        ids = tuple(rng.integers(0, vocab, length).tolist())
        prompt = Prompt(id=str(number), text="", token_ids=ids)
        groups.append(
            [
                Sample(
                    id=f"{number}-{index}",
                    prompt=prompt,
                    response_ids=rng.integers(0, vocab, tokens).astype(np.int32),
                    behavior_logprobs=np.full(tokens, -np.log(vocab), dtype=np.float32),
                    versions=np.zeros(tokens, dtype=np.int32),
                    loss_mask=np.ones(tokens, dtype=np.uint8),
                    text="",
                    finish_reason="stop",
                    reward=float(rng.integers(0, 2)),
                )
                for index, tokens in enumerate(responses[number].tolist())
            ]
        )
    return TrainBatch.of(0, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="model directory")
    parser.add_argument("--millions", type=int, choices=list(random_model.SHAPES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=55)
    parser.add_argument("--response-tokens", type=int, default=23)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=2048, help="tokens_per_micro_batch")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    alone = args.device == "cpu" and args.threads == 1
    clock = time.process_time if alone else time.perf_counter
    folder = tempfile.TemporaryDirectory()
    model = args.model
    if args.millions is not None:
        model = random_model.save(Path(folder.name), args.millions, args.dtype)
    layout = initialise(ParallelConfig(), device.install(args.device), timeout_s=300)
    policy = Policy.build(
        ModelConfig(path=model, dtype=args.dtype),
        PolicyConfig(
            sequence="packed", tokens_per_micro_batch=args.budget, recompute=args.recompute
        ),
        ObjectiveConfig(),
        (),
        layout=layout,
        temperature=1.0,
        total_steps=10**6,
    )
    vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = np.random.default_rng(0)

    def lengths(mean: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        around = round(args.spread * mean)
        return np.maximum(1, rng.integers(mean - around, mean + around + 1, shape))

    whole = samples_of(
        lengths(args.prompt_tokens, (args.prompts,)),
        lengths(args.response_tokens, (args.prompts, args.group)),
        vocab,
    )
    batches = {
        name: receive(lambda: whole, layout, sharing=sharing)
        for name, sharing in (("shared", MIN_SHARING), ("apart", None))
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    metrics: dict[str, dict[str, float]] = {}
    for step in range(args.steps + 1):
        for name, batch in batches.items():
            assert batch is not None
            started = clock()
            metrics[name] = policy.train_step(replace(batch))
            # The first step of each allocates memory.
            if step:
                seconds[name].append(clock() - started)
    trained = int(whole.samples.column("response_ids").flatten().to_numpy().size)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    print(
        json.dumps(
            {
                "prompts": args.prompts,
                "group": args.group,
                "trained_tokens": trained,
                "computed_tokens": {n: m["policy/computed_tokens"] for n, m in metrics.items()},
                "micro_batches": {n: m["policy/micro_batches"] for n, m in metrics.items()},
                "step_s": {n: round(each, 3) for n, each in median.items()},
                "trained_tokens_per_s": {n: round(trained / each) for n, each in median.items()},
                "ratio": median["apart"] / median["shared"],
                "ratios": [a / b for a, b in zip(seconds["apart"], seconds["shared"], strict=True)],
            },
            indent=2,
        )
    )
    layout.shutdown()


if __name__ == "__main__":
    main()

"""Cost of each loss, forward and backward from the last hidden states, against a plain
cross-entropy on the same logits.

The plain side makes the whole logits [N, V] and calls torch's cross-entropy; ours makes them in
chunks, twice (forward, and again for the gradient), and adds entropy, the squared probabilities and
the loss itself. Ratio = plain seconds / our seconds: 1 means that all of it is free. `logprobs` is
our log-probs with a sum in place of a loss. Sides alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_async_rl.config.losses import LossSettings
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.settings_model import built_in_names
from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Denominators, Objective
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs


def make_batch(tokens: int, sequences: int) -> TokenBatch:
    """Log-ratios of order 0.1, one group of all sequences; float32, as micro-batches are."""
    generator = torch.Generator().manual_seed(0)
    sequence = torch.arange(tokens) * sequences // tokens

    def draw(count: int = tokens) -> Tensor:
        return torch.randn(count, generator=generator)

    prox = -3.0 + 0.1 * draw()
    return TokenBatch(
        logp=prox,
        logp_prox=prox,
        logp_behavior=prox + 0.1 * draw(),
        advantages=draw(sequences)[sequence],
        mask=torch.ones(tokens),
        weights=torch.ones(tokens),
        sequence=sequence,
        sequences=sequences,
        logp_ref=prox + 0.1 * draw(),
        rewards=draw(sequences),
        lag=torch.ones(tokens, dtype=torch.int64),
        group=torch.zeros(sequences, dtype=torch.int64),
        sum_p_squared=torch.rand(tokens, generator=generator),
    )


def objectives() -> dict[str, Objective]:
    """Every registered loss in the first form that the config accepts."""
    found = {}
    for name in sorted(built_in_names(LossSettings)):
        for more in (
            {},
            {"advantage": "none"},
            {"advantage": "none", "reference": {}},
            {"proximal": "recompute"},
        ):
            try:
                found[name] = Objective(ObjectiveConfig(loss=name, **more))
                break
            except ValidationError:
                continue
        else:
            print(f"{name}: no form found, left out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,))
    batch = make_batch(args.tokens, args.sequences)
    denominators = Denominators.of(batch)

    def plain() -> None:
        torch.nn.functional.cross_entropy(
            torch.nn.functional.linear(hidden, weight), targets
        ).backward()

    def logprobs() -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            hidden, weight, targets, 1.0, args.chunk, vocab_size=args.vocabulary
        )[:2]

    def ours(objective: Objective) -> Callable[[], None]:
        method = objective._loss
        decided = (
            batch
            if method.decide is None
            else batch.replace(decided=method.decide(batch, objective.config.loss))
        )

        def run() -> None:
            logp, entropy = logprobs()
            # Log-probs of random weights mean nothing to the loss; shifted near the others, every
            # branch of it is taken.
            near = logp - logp.detach() + batch.logp_prox + 0.05
            objective.loss(
                decided.replace(logp=near, entropy=entropy), denominators
            ).parts.sum().backward()

        return run

    sides: dict[str, Callable[[], None]] = {"logprobs": lambda: logprobs()[0].sum().backward()}
    sides |= {name: ours(objective) for name, objective in objectives().items()}
    for name, run in sides.items():
        times: dict[str, list[float]] = {"plain": [], name: []}
        for turn in range(args.steps + 2):
            for key, side in (("plain", plain), (name, run)):
                hidden.grad = weight.grad = None
                started = time.perf_counter()
                side()
                if turn >= 2:
                    times[key].append(time.perf_counter() - started)
        medians = {key: statistics.median(values) for key, values in times.items()}
        row = {
            "loss": name,
            "plain_ms": round(medians["plain"] * 1e3, 1),
            "ours_ms": round(medians[name] * 1e3, 1),
        }
        print(json.dumps(row | {"ratio": round(medians["plain"] / medians[name], 3)}), flush=True)


if __name__ == "__main__":
    main()

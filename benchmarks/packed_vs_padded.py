"""`Policy.train_step` on packed rows against padded ones, on the same samples, in one process each
turn about.

Five ways to lay out a batch whose responses have geometric lengths (`--mean-response`, at most
`--response-tokens`), or lengths spread evenly over `--narrow LOW HIGH`:

packed       one row, samples end to end
padded       rows of like length share a micro-batch, as the planner cuts them
one_bucket   every row padded to the longest of the batch
fixed        as many tokens in as many samples, all of one length, padded: nothing to pad
prompt_once  packed; one sample of each group has the prompt and the others its last token: the
             least work if the samples of a group shared their prompt (they would also attend to
             it), so 1 / ratio bounds the gain of sharing

Ratio = seconds of the other / packed seconds, per trained token: above 1, packed is faster. Seconds
are the process's own CPU time: one thread, so that other programs on the machine weigh little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import random_model
import torch
from numpy.typing import NDArray

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.packing import Packed, Padded, Segments
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import TrainBatch


@dataclass(frozen=True)
class OneBucket(Padded):
    """Rows in the order of the samples, all padded to the longest of the batch."""

    longest: int = 1

    def cut(
        self, share: NDArray[np.int64], segments: Segments, budget: int
    ) -> list[tuple[int, ...]]:
        pieces = -(-len(share) // (budget // self.longest))
        return [tuple(piece.tolist()) for piece in np.array_split(share, pieces)]

    def shape(self, segments: Segments) -> tuple[int, int]:
        return max(1, len(segments.fed)), self.longest


def samples_of(
    lengths: NDArray[np.int64], prompt_tokens: int, group: int, vocab: int, *, once: bool = False
) -> TrainBatch:
    """Random tokens in groups of `group`, as far as `lengths` goes. once: only the first of a group
    has more than the prompt's last token."""
    rng = np.random.default_rng(1)
    groups = []
    for first in range(0, len(lengths), group):
        ids = tuple(rng.integers(0, vocab, prompt_tokens).tolist())
        prompt = Prompt(id=str(first), text="", token_ids=ids)
        groups.append(
            [
                Sample(
                    id=f"{first}-{index}",
                    prompt=replace(prompt, token_ids=ids[-1:]) if once and index else prompt,
                    response_ids=rng.integers(0, vocab, length).astype(np.int32),
                    behavior_logprobs=np.full(length, -np.log(vocab), dtype=np.float32),
                    versions=np.zeros(length, dtype=np.int32),
                    loss_mask=np.ones(length, dtype=np.uint8),
                    text="",
                    finish_reason="stop",
                    reward=float(rng.integers(0, 2)),
                )
                for index, length in enumerate(lengths[first : first + group].tolist())
            ]
        )
    return TrainBatch.of(0, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, choices=list(random_model.SHAPES), default=1)
    parser.add_argument("--model", type=Path, help="a model directory instead")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--mean-response", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--narrow", type=int, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--budget", type=int, default=16384, help="tokens_per_micro_batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    model = args.model or random_model.save(Path(folder.name), args.millions, "float32")
    layout = initialise(ParallelConfig(), device.install("cpu"), timeout_s=300)
    policy = Policy.build(
        ModelConfig(path=model, dtype="float32"),
        PolicyConfig(tokens_per_micro_batch=args.budget),
        ObjectiveConfig(),
        (),
        layout=layout,
        temperature=1.0,
        total_steps=10**6,
    )
    vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = np.random.default_rng(0)
    lengths = (
        np.minimum(rng.geometric(1 / args.mean_response, args.samples), args.response_tokens)
        if args.narrow is None
        else rng.integers(args.narrow[0], args.narrow[1] + 1, args.samples)
    )
    mean = round(float(lengths.mean()))

    def received(lengths: NDArray[np.int64], *, once: bool = False) -> RankBatch:
        whole = samples_of(lengths, args.prompt_tokens, args.group, vocab, once=once)
        batch = policy.receive(lambda: whole)
        assert batch is not None
        return batch

    spread, even = received(lengths), received(np.full(args.samples, mean))
    plain = policy.batcher
    ways = {
        "packed": (spread, Packed()),
        "padded": (spread, Padded()),
        "one_bucket": (spread, OneBucket(longest=int(spread.fed.max()))),
        "fixed": (even, Padded()),
        "prompt_once": (received(lengths, once=True), Packed()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    told: dict[str, dict[str, float]] = {}
    for turn in range(args.steps + 2):
        for name, (batch, sequences) in ways.items():
            policy.batcher = replace(plain, sequences=sequences)
            started = time.process_time()
            told[name] = policy.train_step(batch)
            if turn >= 2:
                seconds[name].append(time.process_time() - started)
    per_token = {
        name: statistics.median(seconds[name]) / int(batch.lengths.sum())
        for name, (batch, _) in ways.items()
    }
    print(
        json.dumps(
            {
                "samples": args.samples,
                "prompt_tokens": args.prompt_tokens,
                "response_tokens": int(lengths.sum()),
                "longest_response": int(lengths.max()),
                "distinct_lengths": len(np.unique(lengths)),
                "fixed_response": mean,
                "trained_tokens_per_cpu_s": {n: round(1 / t) for n, t in per_token.items()},
                "ratio": {n: t / per_token["packed"] for n, t in per_token.items()},
                "padding_share": {n: m["policy/padding_share"] for n, m in told.items()},
                "micro_batches": {n: m["policy/micro_batches"] for n, m in told.items()},
            },
            indent=2,
        )
    )
    layout.shutdown()


if __name__ == "__main__":
    main()

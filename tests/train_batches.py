"""Ragged train batches made with numpy, for tests of the objective and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_async_rl.policy.batch_shares import split
from megatron_async_rl.samples.columns import batch_of, samples_of
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import SampleRow, TrainBatch, rows_of
from megatron_async_rl.samples.types import Prompt, Sample

PER_TOKEN = ("response_ids", "behavior_logprobs", "versions", "loss_mask")


def columns(batch: TrainBatch) -> RankBatch:
    """Return the batch as the ranks of a run without data parallelism receive it."""
    (only,) = rank_batches(batch, 1)
    return only


def rank_batches(batch: TrainBatch, data_parallel: int, **settings) -> list[RankBatch]:
    """Return the batch as each data-parallel rank receives it."""
    numbers, tokens = split(batch, data_parallel, **settings)
    return [RankBatch.of(batch.version, numbers, own) for own in tokens]


def columns_of(samples: Sequence[Sample], version: int = 100) -> RankBatch:
    """Return a rank batch of samples, each a group of its own."""
    return columns(grouped(samples, version))


def grouped(samples: Sequence[Sample], version: int = 100) -> TrainBatch:
    """Return a train batch of samples, each a group of its own."""
    return TrainBatch.of(version, [[sample] for sample in samples])


def groups_of(batch: TrainBatch) -> list[list[Sample]]:
    """Return the samples of a batch that was made of samples, group by group."""
    groups: dict[int, list[Sample]] = {}
    places = batch.samples.column("group").to_pylist()
    for place, sample in zip(places, samples_of(batch.samples), strict=True):
        groups.setdefault(place, []).append(sample)
    return list(groups.values())


def streamed(
    batch: TrainBatch, parts: Sequence[Sequence[int]]
) -> tuple[list[TrainBatch], TrainBatch]:
    """Return the parts of a batch, each with these groups, and the batch that knows its parts."""
    groups = groups_of(batch)
    alone = [
        replace(
            TrainBatch.of(batch.version, [groups[group] for group in part]),
            parts=(number,) * len(part),
            complete=False,
        )
        for number, part in enumerate(parts)
    ]
    of_group = {group: number for number, part in enumerate(parts) for group in part}
    return alone, replace(batch, parts=tuple(of_group[group] for group in range(len(groups))))


def samples_in(batch: TrainBatch) -> list[Sample]:
    """Return all samples of a batch."""
    return samples_of(batch.samples)


def row(sample: Sample, group: int = 0) -> SampleRow:
    """Return the sample as the controller has it."""
    (only,) = rows_of(batch_of([sample], [group]))
    return only


def joined(samples: Sequence[Sample]) -> Sample:
    """Return one sample with these segments: the prompt of each but the first is a context."""
    first, *others = samples
    parts = [[getattr(first, name)] for name in PER_TOKEN]
    starts = []
    for other in others:
        starts.append(sum(map(len, parts[0])))
        ids = np.array(other.prompt.token_ids, dtype=np.int32)
        nothing = np.zeros(len(ids), dtype=np.int32)
        for part, name, context in zip(
            parts, PER_TOKEN, (ids, nothing, nothing + other.start_version, nothing), strict=True
        ):
            own = getattr(other, name)
            part += [context.astype(own.dtype), own]
    values = dict(zip(PER_TOKEN, map(np.concatenate, parts), strict=True))
    segment_starts = np.array(starts, dtype=np.int32) if starts else None
    return replace(first, segment_starts=segment_starts, **values)


def make_sample(
    prompt: Prompt,
    name: str,
    response: list[int],
    *,
    reward: float = 0.0,
    logprobs: list[float] | None = None,
    versions: list[int] | None = None,
    mask: list[int] | None = None,
    reward_error: str | None = None,
    weight: float = 1.0,
) -> Sample:
    length = len(response)
    return Sample(
        id=name,
        prompt=prompt,
        response_ids=np.array(response, dtype=np.int32),
        behavior_logprobs=np.array(
            logprobs if logprobs is not None else [-1.0] * length, dtype=np.float32
        ),
        versions=np.array(versions if versions is not None else [0] * length, dtype=np.int32),
        loss_mask=np.array(mask if mask is not None else [1] * length, dtype=np.uint8),
        text="",
        finish_reason="stop",
        reward=reward,
        reward_error=reward_error,
        weight=weight,
    )


def rewards_batch(groups: list[list[float | None]]) -> TrainBatch:
    """Return groups of one-token samples with these rewards; None is a reward that failed."""
    made = []
    for index, rewards in enumerate(groups):
        prompt = Prompt(id=f"p{index}", text="", token_ids=(1, 2))
        samples = [
            make_sample(
                prompt,
                f"p{index}-{i}",
                [3],
                reward=0.0 if r is None else r,
                reward_error="no" if r is None else None,
            )
            for i, r in enumerate(rewards)
        ]
        made.append(samples)
    return TrainBatch.of(0, made)


def ragged_batch(
    *,
    groups: int = 5,
    group_size: int = 3,
    vocabulary: int = 64,
    version: int = 3,
    seed: int = 0,
    max_prompt: int = 9,
    max_response: int = 17,
) -> TrainBatch:
    """Return random tokens, lengths, rewards, behaviour log-probs, weight versions and a few masked
    tokens; one reward failed."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(groups):
        prompt = Prompt(
            id=f"p{index}",
            text="",
            token_ids=tuple(
                int(t) for t in rng.integers(3, vocabulary, rng.integers(2, max_prompt))
            ),
        )
        samples = []
        for i in range(group_size):
            length = int(rng.integers(1, max_response))
            mask = (rng.random(length) > 0.1).astype(int)
            mask[0] = 1
            samples.append(
                make_sample(
                    prompt,
                    f"p{index}-{i}",
                    rng.integers(3, vocabulary, length).tolist(),
                    reward=float(rng.normal()),
                    logprobs=(-np.log(vocabulary) + 0.3 * rng.normal(size=length)).tolist(),
                    versions=np.sort(rng.integers(0, version + 1, length)).tolist(),
                    mask=mask.tolist(),
                    reward_error="raised" if (index, i) == (1, 1) else None,
                )
            )
        made.append(samples)
    return TrainBatch.of(version, made)

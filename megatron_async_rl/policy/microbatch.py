"""Samples -> micro-batches: which rank, which rows, which positions.

Invariants:
- the plan is a pure function of lengths, computed alike on every rank, so no rank has to be told anything;
- every sample lies in exactly one micro-batch of exactly one data-parallel rank, whole;
- rows x padded length of a micro-batch never exceeds the token budget;
- a response's last token is a target only: it predicts nothing and is not fed to the model;
- every data-parallel rank runs the same number of micro-batches (an all-masked one fills up), since the collectives of
  the schedule and of the gradient reduction are counted by micro-batch; the interleaved pipeline schedule wants a multiple of
  the pipeline's size.

Rows are right-padded: under the causal mask no real token can see the padding, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_async_rl.samples.types import Sample


class SampleTooLong(ValueError):
    """One sample alone exceeds the token budget of a micro-batch."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        super().__init__(
            f"sample {sample!r} has {tokens} tokens (prompt + response, padded), more than "
            f"policy.tokens_per_micro_batch = {budget}; raise that key to at least {tokens}, or shorten prompts or "
            "rollout.sampling.max_tokens"
        )
        self.sample, self.tokens, self.budget = sample, tokens, budget


@dataclass(frozen=True)
class Plan:
    """ranks[r]: the micro-batches of data-parallel rank r, each a tuple of sample indices; () is an all-masked one.

    padding_share: padding tokens over all tokens computed, of the whole plan.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    padding_share: float

    @property
    def micro_batches(self) -> int:
        """Per data-parallel rank; the same on all."""
        return len(self.ranks[0])


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B rows of padded length L holding N response tokens of the samples `samples` (indices into the planned list).

    tokens, position_ids: [B, L] int64. rows: [N] int64, flat index b * L + t into [B, L] of the position that predicts the
    response token, one before it. targets: [N] int64. sequence: [N] int64 in 0..B-1. mask, behavior_logprobs: [N] float32.
    versions: [N] int64. An all-masked micro-batch has samples == () and one token with mask 0.
    """

    samples: tuple[int, ...]
    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    mask: Tensor
    behavior_logprobs: Tensor
    versions: Tensor


def plan_micro_batches(
    samples: Sequence[Sample], *, data_parallel: int, budget: int, multiple: int = 1, in_groups_of: int = 1
) -> Plan:
    """Splits over ranks by tokens (longest first onto the lightest rank), then buckets each rank's samples by length.

    multiple: padded lengths are multiples of it (the tensor-parallel size under sequence parallelism). in_groups_of: so is the
    number of micro-batches of a rank (the pipeline's size with virtual stages).
    Raises SampleTooLong.
    """
    lengths = [_round_up(_fed(sample), multiple) for sample in samples]
    for sample, length in zip(samples, lengths, strict=True):
        tokens = max(sample.total_length, length)
        if tokens > budget:
            raise SampleTooLong(sample.id, tokens, budget)
    longest_first = sorted(range(len(samples)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for index in longest_first:
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += lengths[index]
    buckets = [_bucket(share, lengths, budget) for share in shares]
    count = _round_up(max(1, max(len(rank) for rank in buckets)), in_groups_of)
    ranks = tuple(tuple(rank) + ((),) * (count - len(rank)) for rank in buckets)
    computed = sum(len(rows) * lengths[rows[0]] if rows else multiple for rank in ranks for rows in rank)
    return Plan(ranks, 1.0 - sum(_fed(sample) for sample in samples) / computed)


def build_micro_batch(samples: Sequence[Sample], rows: tuple[int, ...], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Tensors of one entry of a plan made with the same `samples` and `multiple`."""
    if not rows:
        return _all_masked(device, multiple)
    chosen = [samples[index] for index in rows]
    length = _round_up(max(_fed(sample) for sample in chosen), multiple)
    tokens = np.zeros((len(chosen), length), dtype=np.int64)
    predicting = []
    for row, sample in enumerate(chosen):
        prompt = len(sample.prompt.token_ids)
        tokens[row, :prompt] = sample.prompt.token_ids
        tokens[row, prompt : _fed(sample)] = sample.response_ids[:-1]
        predicting.append(row * length + prompt - 1 + np.arange(sample.length))

    def flat(arrays: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    return MicroBatch(
        samples=rows,
        tokens=torch.from_numpy(tokens).to(device),
        position_ids=torch.arange(length, device=device).expand(len(chosen), length),
        rows=flat(predicting, torch.int64),
        targets=flat([sample.response_ids for sample in chosen], torch.int64),
        sequence=flat([np.full(sample.length, row) for row, sample in enumerate(chosen)], torch.int64),
        mask=flat([sample.loss_mask for sample in chosen], torch.float32),
        behavior_logprobs=flat([sample.behavior_logprobs for sample in chosen], torch.float32),
        versions=flat([sample.versions for sample in chosen], torch.int64),
    )


def _all_masked(device: torch.device, multiple: int) -> MicroBatch:
    return MicroBatch(
        samples=(),
        tokens=torch.zeros((1, multiple), dtype=torch.int64, device=device),
        position_ids=torch.arange(multiple, device=device).expand(1, multiple),
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        targets=torch.zeros(1, dtype=torch.int64, device=device),
        sequence=torch.zeros(1, dtype=torch.int64, device=device),
        mask=torch.zeros(1, device=device),
        behavior_logprobs=torch.zeros(1, device=device),
        versions=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _bucket(share: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cuts a share, longest first, into runs whose count times the first (longest) length stays within the budget."""
    buckets: list[list[int]] = []
    for index in share:
        if buckets and (len(buckets[-1]) + 1) * lengths[buckets[-1][0]] <= budget:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return [tuple(bucket) for bucket in buckets]


def _fed(sample: Sample) -> int:
    return sample.total_length - 1


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple

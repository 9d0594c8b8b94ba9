"""Targets of a batch: the whole batch as tensors, its minibatches, each one optimizer step, and
their parts for micro-batches.

Invariants:
- samples whose reward failed take no part: no group statistic, no denominator, no token;
- the whole batch is float64 on the CPU, in the order of the train batch, the same on every rank;
- numbers that were not precomputed are nan there, so that a method which forgot to ask for them
  cannot pass unnoticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.aggregate import Denominators
from megatron_async_rl.objectives.batch import BatchDecision, TokenBatch
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

PER_SEQUENCE = ("rewards", "score_norms")
"""Fields of a TokenBatch with one number per sequence, besides `group`, which micro-batches do not
have."""


@dataclass(frozen=True, eq=False)
class BatchTargets:
    """samples: the valid ones. whole: their tokens, in order, with rewards, proximal policy and
    advantages. metrics: of the batch, for the log."""

    samples: RankBatch
    whole: TokenBatch
    metrics: Mapping[str, float] = field(default_factory=dict)

    def select(self, rows: NDArray[np.int64]) -> BatchTargets:
        """The minibatch of these samples, whole groups. Metrics stay the batch's own."""
        if len(rows) == len(self.samples):
            return self
        tokens = torch.from_numpy(spans(self.samples.starts[rows], self.samples.lengths[rows]))
        chosen = torch.from_numpy(rows)
        samples = self.samples.select(rows)
        taken: dict[str, Any] = {
            name: value[chosen if name in (*PER_SEQUENCE, "group") else tokens]
            for name, value in _tensors(self.whole)
        }
        taken |= {"sequence": torch.from_numpy(samples.rows), "sequences": len(rows)}
        return BatchTargets(samples, TokenBatch(**taken))


@dataclass(frozen=True, eq=False)
class StepTargets:
    """One optimizer step. samples: the valid ones of its minibatch. whole: their tokens, in order.

    corrected: `whole.weights` already hold the corrections; otherwise each micro-batch computes its
    own. metrics: what was decided, for the log.
    """

    samples: RankBatch
    whole: TokenBatch
    denominators: Denominators
    corrected: bool
    metrics: Mapping[str, float]

    def part(self, rows: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> TokenBatch:
        """The tokens of the samples `rows`, in that order, as one micro-batch holds them.

        `logp` (and `logp_prox`, where it was not precomputed) is nan until the caller replaces it.
        No rows: one masked token.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        starts, lengths = self.samples.starts[chosen], self.samples.lengths[chosen]
        tokens, sequences = torch.from_numpy(spans(starts, lengths)), torch.from_numpy(chosen)

        def moved(values: Tensor) -> Tensor:
            return values.to(device=device, dtype=dtype if values.is_floating_point() else None)

        def pick(values: Tensor, index: Tensor) -> Tensor:
            return moved(values[index]) if rows else moved(torch.zeros(1, dtype=values.dtype))

        taken: dict[str, Tensor | int | BatchDecision | None] = {}
        for name, value in _tensors(self.whole):
            if name == "group":
                continue
            taken[name] = pick(value, sequences if name in PER_SEQUENCE else tokens)
        sequence = np.repeat(np.arange(len(rows)), lengths) if rows else np.zeros(1, dtype=np.int64)
        taken["sequence"] = torch.from_numpy(sequence).to(device)
        taken["sequences"] = max(len(rows), 1)
        decided = self.whole.decided
        taken["decided"] = BatchDecision(
            tokens={name: pick(value, tokens) for name, value in decided.tokens.items()},
            sequences={name: pick(value, sequences) for name, value in decided.sequences.items()},
            scalars=decided.scalars,
        )
        return TokenBatch(**taken)  # type: ignore[arg-type]


def _tensors(batch: TokenBatch) -> Iterator[tuple[str, Tensor]]:
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Tensor):
            yield each.name, value


def valid_samples(batch: RankBatch) -> RankBatch:
    """The samples that are trained on, in the batch's order.

    Raises ValueError for a reward that is not finite and not marked as failed.
    """
    strange = batch.valid & ~np.isfinite(batch.rewards)
    if strange.any():
        first = int(strange.argmax())
        raise ValueError(
            f"sample {batch.ids[first].as_py()!r} has reward {batch.rewards[first]}; a reward that"
            " is not finite must set reward_error"
        )
    return batch if batch.valid.all() else batch.select(np.flatnonzero(batch.valid))


def whole_batch(samples: RankBatch, precomputed: Mapping[str, Tensor]) -> TokenBatch:
    """[S] samples as one TokenBatch: rewards as given, advantages 0, weights the samples' own, logp
    nan where not precomputed.

    precomputed: [N] each, in the samples' order. `step_rewards` is None where no sample has any.
    """

    def exact(values: NDArray[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    sequence = torch.tensor(samples.rows)
    behavior = exact(samples.behavior_logprobs)
    unknown = torch.full_like(behavior, float("nan"))
    return TokenBatch(
        logp=precomputed["logp"].double() if "logp" in precomputed else unknown,
        logp_prox=unknown,
        logp_behavior=behavior,
        advantages=torch.zeros_like(behavior),
        mask=exact(samples.loss_mask),
        weights=exact(samples.weights)[sequence],
        sequence=sequence,
        sequences=len(samples),
        rewards=exact(samples.rewards),
        step_rewards=None if samples.step_rewards is None else exact(samples.step_rewards),
        lag=torch.tensor(samples.version - samples.versions, dtype=torch.int64),
        group=torch.tensor(samples.group),
        **{
            name: precomputed[name].double()
            for name in ("logp_ref", "sum_p_squared", "values")
            if name in precomputed
        },
    )

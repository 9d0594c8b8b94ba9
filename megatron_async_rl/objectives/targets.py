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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.aggregate import Denominators
from megatron_async_rl.objectives.batch import BatchDecision, TokenBatch, on_device
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

PER_SEQUENCE = ("rewards", "score_norms")
"""Fields of a TokenBatch with one number per sequence, besides `group`, which micro-batches do not
have."""


TargetKind = Literal["batch", "tokens", "sequences"]
"""A field of the TokenBatch, or a decision by token or by sequence."""


@dataclass(frozen=True, eq=False)
class BatchTargets:
    """samples: the valid ones. whole: their tokens, in order, with rewards, proximal policy and
    advantages. metrics: of the batch, for the log."""

    samples: RankBatch
    whole: TokenBatch
    metrics: Mapping[str, float] = field(default_factory=dict)

    def select(self, rows: NDArray[np.int64]) -> BatchTargets:
        """The minibatch of these samples, whole groups. Metrics stay the batch's own."""
        # One minibatch: no copy.
        if len(rows) == len(self.samples):
            return self
        tokens = torch.from_numpy(spans(self.samples.starts[rows], self.samples.lengths[rows]))
        chosen = torch.from_numpy(rows)
        # Whole groups in the batch's order, so that group statistics stay valid.
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
    own. metrics: the decisions, for the log.
    """

    samples: RankBatch
    whole: TokenBatch
    denominators: Denominators
    corrected: bool
    metrics: Mapping[str, float]
    # Caches: several passes of a step read the same numbers.
    _owned: dict[int, OwnedTargets] = field(default_factory=dict, init=False, repr=False)
    _placed: dict[int, OwnedTargets] = field(default_factory=dict, init=False, repr=False)

    def placed(self, owner: int, dtype: torch.dtype, device: torch.device) -> OwnedTargets:
        """`owned_by` on the device, floats in `dtype`: uploaded together, and once for all passes
        of the step."""
        if owner not in self._placed:
            self._placed[owner] = self.owned_by(owner).placed(dtype, device)
        return self._placed[owner]

    def owned_by(self, owner: int) -> OwnedTargets:
        """The step's numbers of its samples, and of the tokens of those that the data-parallel rank
        `owner` trains; on the host. Gathered at the first call."""
        if owner not in self._owned:
            self._owned[owner] = self._gathered(owner)
        return self._owned[owner]

    def _gathered(self, owner: int) -> OwnedTargets:
        whole, samples = self.whole, self.samples
        # By token: the model of this rank sees only these.
        owned = torch.from_numpy(samples.owner[samples.rows] == owner)
        kinds: dict[TargetKind, Mapping[str, Tensor]] = {
            "batch": {
                name: each for name, each in _tensors(whole) if name not in ("group", "sequence")
            },
            "tokens": whole.decided.tokens,
            "sequences": whole.decided.sequences,
        }
        numbers: dict[tuple[TargetKind, str], Tensor] = {}
        for kind, tensors in kinds.items():
            for name, each in tensors.items():
                if not _by_sequence(kind, name):
                    each = each[owned]
                # One 0 at the end, which index -1 reads for padding.
                numbers[kind, name] = torch.cat((each, each.new_zeros((1, *each.shape[1:]))))
        return OwnedTargets(numbers, whole.decided.scalars)


@dataclass(frozen=True, eq=False)
class OwnedTargets:
    """A step's numbers: those of its samples, in order, or of the tokens of one owner's, and behind
    them a 0 for padding."""

    numbers: Mapping[tuple[TargetKind, str], Tensor]
    scalars: Mapping[str, float]

    def placed(self, dtype: torch.dtype, device: torch.device) -> OwnedTargets:
        """The same on the device, floats in `dtype`, uploaded together."""
        numbers = {
            key: each.to(dtype) if each.is_floating_point() else each
            for key, each in self.numbers.items()
        }
        return OwnedTargets(on_device(numbers, device), self.scalars)

    def part(self, tokens: Tensor, samples: Tensor, sequence: Tensor) -> TokenBatch:
        """One micro-batch. tokens [N], samples [S]: int64, on the device, places among the owner's
        tokens and the step's samples; -1 is the padding of a micro-batch without samples. sequence:
        [N], the token's place in `samples`.

        `logp` (and `logp_prox`, where it was not precomputed) is nan until the caller replaces it.
        """
        taken: dict[TargetKind, dict[str, Any]] = {"batch": {}, "tokens": {}, "sequences": {}}
        for (kind, name), values in self.numbers.items():
            taken[kind][name] = values[samples if _by_sequence(kind, name) else tokens]
        taken["batch"] |= {"sequence": sequence, "sequences": len(samples)}
        decided = BatchDecision(taken["tokens"], taken["sequences"], self.scalars)
        return TokenBatch(**taken["batch"], decided=decided)


def _by_sequence(kind: TargetKind, name: str) -> bool:
    return kind == "sequences" or (kind == "batch" and name in PER_SEQUENCE)


def _tensors(batch: TokenBatch) -> Iterator[tuple[str, Tensor]]:
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Tensor):
            yield each.name, value


def valid_samples(batch: RankBatch) -> RankBatch:
    """The samples that are trained on, in the batch's order.

    Raises ValueError for a reward that is not finite and not marked as failed.
    """
    # A single nan would make every advantage of its group nan.
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
    # nan, not 0: a column that is read without being asked for must show.
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

"""Targets of an optimizer step, as whole tensors and as the parts that its micro-batches take.

Invariants:
- samples whose reward failed take no part: no group statistic, no denominator, no token;
- the whole batch is float64 on the CPU, in the order of the train batch, the same on every rank;
- numbers that were not precomputed are nan there, so that a method which forgot to ask for them
  cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.aggregate import Denominators
from megatron_async_rl.objectives.batch import PER_SEQUENCE, BatchDecision, TokenBatch, on_device
from megatron_async_rl.samples.rank_batch import RankBatch

TargetKind = Literal["batch", "tokens", "sequences"]
"""A field of the TokenBatch, or a decision by token or by sequence."""
OwnedNumbers = Mapping[tuple[TargetKind, str], Tensor]
"""Numbers of a step's samples, in order, and of the tokens of one owner's samples; a 0 for padding
follows the last of each."""


@dataclass(frozen=True, eq=False)
class StepTargets:
    """One optimizer step. samples: the valid ones of its minibatch. whole: their tokens, in order.

    corrected: `whole.weights` already hold the corrections; otherwise each micro-batch computes its
    own.
    """

    samples: RankBatch
    whole: TokenBatch
    denominators: Denominators
    corrected: bool
    # Caches: several passes of a step read the same numbers.
    _gathered: dict[int, OwnedNumbers] = field(default_factory=dict, init=False, repr=False)
    _placed: dict[int, OwnedNumbers] = field(default_factory=dict, init=False, repr=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss's decisions, for the log."""
        return self.whole.decided.scalars

    def gather(self, owner: int) -> OwnedNumbers:
        """Return the numbers that micro-batches of the data-parallel rank `owner` take theirs from,
        on the host. Called before the micro-batches run, so that none waits for it."""
        if owner not in self._gathered:
            self._gathered[owner] = self._numbers_of(owner)
        return self._gathered[owner]

    def micro_batch(
        self,
        owner: int,
        tokens: Tensor,
        samples: Tensor,
        sequence: Tensor,
        *,
        dtype: torch.dtype,
    ) -> TokenBatch:
        """Return the targets of one micro-batch on the device of `tokens`, floats in `dtype`.

        tokens: [N] int64, places among the tokens of the samples that `owner` trains. samples: [S]
        int64, places among the step's samples. -1 in both is the padding of a micro-batch without
        samples. sequence: [N] int64, each token's place in `samples`.

        `logp` (and `logp_prox`, where it was not precomputed) is nan until the caller replaces it.
        """
        if owner not in self._placed:
            # Uploaded together, and once for all passes of the step: an upload per micro-batch
            # would make the host wait for the device each time.
            self._placed[owner] = _placed(self.gather(owner), dtype, tokens.device)
        taken: dict[TargetKind, dict[str, Any]] = {"batch": {}, "tokens": {}, "sequences": {}}
        for (kind, name), values in self._placed[owner].items():
            taken[kind][name] = values[samples if _by_sequence(kind, name) else tokens]
        taken["batch"] |= {"sequence": sequence, "sequences": len(samples)}
        decided = BatchDecision(taken["tokens"], taken["sequences"], self.whole.decided.scalars)
        return TokenBatch(**taken["batch"], decided=decided)

    def _numbers_of(self, owner: int) -> OwnedNumbers:
        whole, samples = self.whole, self.samples
        # By token: the model of this rank sees only these.
        owned = torch.from_numpy(samples.owner[samples.rows] == owner)
        kinds: dict[TargetKind, Mapping[str, Tensor]] = {
            # A part of a group would have wrong statistics, so micro-batches lack `group`.
            "batch": {
                name: each for name, each in whole.tensors() if name not in ("group", "sequence")
            },
            "tokens": whole.decided.tokens,
            "sequences": whole.decided.sequences,
        }
        numbers: dict[tuple[TargetKind, str], Tensor] = {}
        for kind, tensors in kinds.items():
            for name, each in tensors.items():
                if not _by_sequence(kind, name):
                    each = each[owned]
                # The place -1 of padding reads the appended 0.
                numbers[kind, name] = torch.cat((each, each.new_zeros((1, *each.shape[1:]))))
        return numbers


def _placed(numbers: OwnedNumbers, dtype: torch.dtype, device: torch.device) -> OwnedNumbers:
    return on_device(
        {
            key: each.to(dtype) if each.is_floating_point() else each
            for key, each in numbers.items()
        },
        device,
    )


def _by_sequence(kind: TargetKind, name: str) -> bool:
    return kind == "sequences" or (kind == "batch" and name in PER_SEQUENCE)


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

"""What one optimizer step learns from: the whole batch as tensors, and its parts for micro-batches.

Invariants:
- samples whose reward failed take no part: no group statistic, no denominator, no token;
- the whole batch is float64 on the CPU, in the order of the train batch, the same on every rank;
- numbers that no survey brought are nan there, so that a method which forgot to ask for them cannot pass unnoticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_async_rl.objectives.aggregate import Denominators
from megatron_async_rl.objectives.batch import Decided, TokenBatch
from megatron_async_rl.samples.types import Sample, TrainBatch

PER_SEQUENCE = ("rewards", "score_norms")
"""Fields of a TokenBatch with one number per sequence, besides `group`, which micro-batches do not have."""


@dataclass(frozen=True, eq=False)
class StepTargets:
    """samples: the valid ones. whole: their tokens, in order. starts: [S + 1] index of each sample's first token in `whole`.

    corrected: `whole.weights` already hold the corrections; otherwise each micro-batch computes its own.
    metrics: what was decided, for the log.
    """

    samples: tuple[Sample, ...]
    whole: TokenBatch
    starts: tuple[int, ...]
    denominators: Denominators
    corrected: bool
    metrics: Mapping[str, float]

    def part(self, rows: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> TokenBatch:
        """The tokens of the samples `rows`, in that order, as one micro-batch holds them.

        `logp` (and `logp_prox`, where it was not surveyed) is nan until the caller replaces it. No rows: one masked token.
        """
        tokens = torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in rows]) if rows else torch.zeros(1).long()
        sequences = torch.tensor(list(rows) or [0])

        def moved(values: Tensor) -> Tensor:
            return values.to(device=device, dtype=dtype if values.is_floating_point() else None)

        def pick(values: Tensor, index: Tensor) -> Tensor:
            return moved(values[index]) if rows else moved(torch.zeros(1, dtype=values.dtype))

        taken: dict[str, Tensor | int | Decided | None] = {}
        for name, value in _tensors(self.whole):
            if name == "group":
                continue
            taken[name] = pick(value, sequences if name in PER_SEQUENCE else tokens)
        lengths = torch.tensor([self.starts[i + 1] - self.starts[i] for i in rows] or [1])
        taken["sequence"] = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
        taken["sequences"] = len(lengths)
        decided = self.whole.decided
        taken["decided"] = Decided(
            tokens={name: pick(value, tokens) for name, value in decided.tokens.items()},
            sequences={name: pick(value, sequences) for name, value in decided.sequences.items()},
            scalars=decided.scalars,
        )
        return TokenBatch(**taken)  # type: ignore[arg-type]


def _tensors(batch: TokenBatch) -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def valid_samples(batch: TrainBatch) -> tuple[tuple[Sample, ...], Tensor]:
    """The samples that are trained on, in the batch's order, and their group's number, [S] int64.

    Raises ValueError for a reward that is not finite and not marked as failed.
    """
    samples, groups = [], []
    for number, group in enumerate(batch.groups):
        for sample in group.samples:
            if sample.valid:
                if not np.isfinite(sample.reward):
                    raise ValueError(
                        f"sample {sample.id!r} has reward {sample.reward}; a reward that is not finite must set reward_error"
                    )
                samples.append(sample)
                groups.append(number)
    return tuple(samples), torch.tensor(groups, dtype=torch.int64)


def whole_batch(samples: Sequence[Sample], group: Tensor, version: int, surveyed: Mapping[str, Tensor]) -> TokenBatch:
    """[S] samples as one TokenBatch: rewards as given, advantages 0, weights the samples' own, logp nan where not surveyed.

    surveyed: [N] each, in the samples' order. `step_rewards` is None where no sample has any.
    """

    def flat(arrays: list[np.ndarray], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0)).to(dtype)

    lengths = torch.tensor([sample.length for sample in samples], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    behavior = flat([sample.behavior_logprobs for sample in samples])
    unknown = torch.full_like(behavior, float("nan"))
    steps = [sample.step_rewards if sample.step_rewards is not None else np.zeros(sample.length) for sample in samples]
    return TokenBatch(
        logp=surveyed["logp"].double() if "logp" in surveyed else unknown,
        logp_prox=unknown,
        logp_behavior=behavior,
        advantages=torch.zeros_like(behavior),
        mask=flat([sample.loss_mask for sample in samples]),
        weights=torch.tensor([sample.weight for sample in samples], dtype=torch.float64)[sequence],
        sequence=sequence,
        sequences=len(samples),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        step_rewards=flat(steps) if any(sample.step_rewards is not None for sample in samples) else None,
        lag=flat([version - sample.versions for sample in samples], torch.int64),
        group=group,
        **{name: surveyed[name].double() for name in ("logp_ref", "sum_p_squared", "values") if name in surveyed},
    )

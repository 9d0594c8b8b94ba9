"""A configured objective: advantages and denominators of a whole batch, then the loss of any part of it.

Invariants:
- samples whose reward failed take no part: no group statistic, no denominator, no token;
- advantages and denominators are functions of the whole optimizer-step batch, which every rank holds, so no rank
  needs another one's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.aggregate import Denominators, aggregate
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.registry import advantage_function, loss_function
from megatron_async_rl.samples.types import Sample, TrainBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import ObjectiveConfig


@dataclass(frozen=True, eq=False)
class StepTargets:
    """What one optimizer step learns from: the valid samples, their advantages [S] float64, and the denominators."""

    samples: tuple[Sample, ...]
    advantages: NDArray[np.float64]
    denominators: Denominators


class Objective:
    """Raises UnknownName on construction for a method that no registry line has."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self._advantage = advantage_function(config.advantage.name)
        self._loss = loss_function(config.loss.name)

    def targets(self, batch: TrainBatch) -> StepTargets:
        """Advantages group by group over valid samples, in the batch's order."""
        samples: list[Sample] = []
        advantages: list[NDArray[np.float64]] = []
        for group in batch.groups:
            valid = [sample for sample in group.samples if sample.valid]
            rewards = np.array([sample.reward for sample in valid], dtype=np.float64)
            if not np.all(np.isfinite(rewards)):
                bad = next(sample for sample in valid if not np.isfinite(sample.reward))
                raise ValueError(f"sample {bad.id!r} has reward {bad.reward}; a reward that is not finite must set reward_error")
            samples.extend(valid)
            advantages.append(self._advantage(rewards, self.config.advantage))
        values = np.concatenate(advantages) if advantages else np.zeros(0)
        return StepTargets(tuple(samples), values, Denominators.of(samples))

    def proximal(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        """[N]: log-probs of the policy that ratios are taken against, detached.

        `recompute` means the trainer's weights at the start of the step. A batch is consumed by one optimizer step, so
        those are the weights that `logp` was just computed with: its detached value is exact and needs no second pass.
        """
        return logp_behavior if self.config.proximal == "behavior" else logp.detach()

    def loss(self, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, TokenLoss]:
        """([S] parts of the batch's loss, to be summed; the token losses they come from)."""
        token_loss = self._loss(batch, self.config.loss)
        parts = aggregate(token_loss.loss, batch, self.config.aggregation, denominators, self.config.norm_length)
        return parts, token_loss

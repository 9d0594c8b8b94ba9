"""Refusal to go on with numbers that are infinite or not numbers: steps, weights, optimizer state.

A step whose loss or gradient is not finite is not taken (step.py). One such step may come of one
sample; several in a row come of the data or of the weights, and no later step will be better. The
weights themselves can become infinite under a learning rate that is far too high, or under moments
that were damaged on the disk.

Invariants:
- every rank decides by the same numbers, so all raise or none does;
- weights are checked before engines see them, weights and moments before a checkpoint is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.policy.anomaly import named_ids
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.step import OptimizerStep


class NonFiniteError(RuntimeError):
    """A run that cannot go on. Its checkpoints hold a state before the fault was noticed."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def refuse_nonfinite_steps(step: OptimizerStep, limit: int, *, ended: bool) -> None:
    """Raise NonFiniteError after `limit` steps in a row that were not finite; ended: also for a
    run that has made no other step."""
    in_a_row = step.nonfinite_in_a_row
    without_update = ended and step.updates == 0 and step.nonfinite > 0
    if in_a_row < limit and not without_update:
        return
    what = (
        f"{in_a_row} optimizer steps in a row, up to step {step.steps}, had a loss or a gradient"
        " that is not finite"
        if in_a_row >= limit
        else f"none of the run's {step.steps} optimizer steps had a finite loss and gradient"
    )
    ids = list(dict.fromkeys(step.nonfinite_ids))
    made = f"; made by {named_ids(ids)}" if ids else ""
    raise NonFiniteError(
        f"{what} (policy.max_nonfinite_steps: {limit}); they changed no weight{made}",
        "look at the samples in anomalies.jsonl of run.dir. If it names whole batches, the weights"
        " are at fault: lower policy.optimizer.lr, or go back to an older checkpoint",
    )


def require_finite(held: Mapping[str, Sequence[Tensor]], step: int, layout: Layout) -> None:
    """Raise NonFiniteError on every rank where a tensor on any rank is not finite. Collective over
    the world.

    held: tensors of this rank by kind; a rank may have none; the same names on every rank. step:
    the newest optimizer step."""
    counts = torch.zeros(len(held), dtype=torch.float32, device=layout.device)
    for place, tensors in enumerate(held.values()):
        for tensor in tensors:
            if tensor.numel():
                # The maximum passes on what is not a number, as it does infinity; nothing is
                # copied.
                largest = torch.linalg.vector_norm(tensor.detach(), ord=math.inf)
                counts[place] += (~torch.isfinite(largest)).to(counts)
    dist.all_reduce(counts, group=layout.world_group)
    wrong = [name for name, count in zip(held, counts.tolist(), strict=True) if count]
    if wrong:
        raise NonFiniteError(
            f"after optimizer step {step} not finite: {', '.join(wrong)}; they are neither"
            " published nor saved",
            "lower policy.optimizer.lr; the run resumes from its newest checkpoint. If it fails at"
            " the same step again, go back to an older checkpoint",
        )

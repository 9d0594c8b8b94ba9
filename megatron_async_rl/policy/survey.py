"""Per-token numbers of the whole batch, on every rank, before anything is trained: forward passes and one all-reduce.

Invariants:
- each token is computed by one rank (the last stage, tensor rank 0, of the data-parallel rank that owns its sample) and is 0 on
  the others, so a plain sum over the world completes the columns, whatever the number of micro-batches of a rank;
- columns come back as float32 on the CPU, in the order of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.microbatch import MicroBatch
from megatron_async_rl.samples.types import Sample

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Layout


class SurveyTable:
    """[C, N] float32: named columns over the response tokens of the samples, in their order."""

    def __init__(self, samples: Sequence[Sample], columns: Sequence[str], layout: Layout) -> None:
        self.columns = list(columns)
        self.layout = layout
        self.starts = list(accumulate((sample.length for sample in samples), initial=0))
        self.values = torch.zeros(len(self.columns), self.starts[-1], dtype=torch.float32, device=layout.device)

    def run(self, schedule: Schedule, micro_batches: Sequence[MicroBatch], fill: dict[str, str]) -> None:
        """One forward pass under the weights in place. fill: column -> the output (`logp`, `sum_p_squared`, ...) it takes."""
        for micro_batch, outputs in schedule.forward(micro_batches):
            if self.layout.tp_rank == 0 and micro_batch.samples:
                for row, index in enumerate(micro_batch.samples):
                    own = micro_batch.sequence == row
                    for column, output in fill.items():
                        target = self.values[self.columns.index(column), self.starts[index] : self.starts[index + 1]]
                        target.copy_(getattr(outputs, output)[own])

    def finish(self) -> dict[str, Tensor]:
        """Collective over the world: column -> [N] float32 on the CPU."""
        if self.columns:
            dist.all_reduce(self.values, group=self.layout.world_group)
        return dict(zip(self.columns, self.values.cpu(), strict=True))

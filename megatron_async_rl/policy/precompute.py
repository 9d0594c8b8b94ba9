"""Per-token numbers of the whole batch, on every rank, before anything is trained: forward passes
and one all-reduce.

    logp, sum_p_squared, values   under the weights in training
    logp_ref                      under the reference
    logp_prox                     ewma: under the average; snapshot: each token under the version
                                  that sampled it, so a response that several versions wrote is in
                                  one pass of each

Invariants:
- which passes there are, over which samples, is a pure function of the batch, so every rank makes
  the same ones;
- each token is computed by one rank (the last stage, tensor rank 0, of the data-parallel rank that
  owns its sample) and is 0 on the others, so a plain sum over the world completes the columns,
  whatever the number of micro-batches of a rank;
- columns come back as float32 on the CPU, in the order of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.microbatch import MicroBatch
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Layout
    from megatron_async_rl.policy.reference_policies import PolicyCopy, ReferencePolicies
    from megatron_async_rl.policy.routing_replay import RoutingPass

CURRENT_WEIGHTS = ("logp", "sum_p_squared", "values")
"""Columns that a pass under the weights in training brings."""


@dataclass(frozen=True)
class Precompute:
    """`column` takes the model's `output`, on tokens that `version` sampled (null: on all)."""

    column: str
    output: str
    version: int | None = None


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass. weights: null for those in training. rows: the samples it runs over, by
    number; null for all. routing: where the trainer replays its own choice of experts, the pass
    over all samples under the weights in training records it; a reference chooses its own."""

    weights: PolicyCopy | None
    fills: tuple[Precompute, ...]
    rows: tuple[int, ...] | None = None
    routing: RoutingPass = "replay"


def passes(
    columns: Sequence[str],
    samples: RankBatch,
    references: ReferencePolicies,
    *,
    record: bool = False,
) -> list[Pass]:
    """The passes that bring `columns`, those under the weights in training (which are the batch's
    version) first. record: that one records its choice of experts.

    Raises SnapshotMissing for a token whose version is not kept.
    """
    version = samples.version
    current = [Precompute(name, name) for name in columns if name in CURRENT_WEIGHTS]
    rows: tuple[int, ...] | None = None
    sampled_by: dict[int, list[int]] = {}
    if "logp_prox" in columns and references.snapshots is not None:
        for each in np.unique(samples.versions).tolist():
            sampled_by[each] = np.unique(samples.rows[samples.versions == each]).tolist()
        own = sampled_by.pop(version, None)
        if own is not None:
            rows = None if current else tuple(own)
            current.append(Precompute("logp_prox", "logp", version))
    routing: RoutingPass = "record" if record else "replay"
    found = [Pass(None, tuple(current), rows, routing)] if current else []
    if "logp_ref" in columns:
        assert references.reference is not None
        found.append(
            Pass(references.reference, (Precompute("logp_ref", "logp"),), routing="choose")
        )
    if "logp_prox" in columns and references.average is not None:
        found.append(Pass(references.average, (Precompute("logp_prox", "logp"),)))
    for each in sorted(sampled_by):
        assert references.snapshots is not None
        weights = references.snapshots.of(each, current=version)
        found.append(
            Pass(weights, (Precompute("logp_prox", "logp", each),), tuple(sampled_by[each]))
        )
    return found


class PrecomputeTable:
    """[C, N] float32: named columns over the response tokens of the samples, in their order."""

    def __init__(self, samples: RankBatch, columns: Sequence[str], layout: Layout) -> None:
        self.columns = list(columns)
        self.layout = layout
        self.samples = samples
        self.values = torch.zeros(
            len(self.columns), len(samples.rows), dtype=torch.float32, device=layout.device
        )

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        fills: Sequence[Precompute],
        rows: Sequence[int] | NDArray[np.int64] | None = None,
        routing: RoutingPass = "replay",
    ) -> None:
        """One forward pass under the weights in place. rows: the samples that the micro-batches
        number; null for all."""
        numbers = np.arange(len(self.samples)) if rows is None else np.asarray(rows)
        numbers = numbers[self.samples.owner[numbers] == self.layout.dp_rank]
        tokens = spans(self.samples.starts[numbers], self.samples.lengths[numbers])
        owned = on_device({"owned": torch.from_numpy(tokens)}, self.layout.device)["owned"]
        for micro_batch, outputs in schedule.forward(micro_batches, routing):
            if not self.layout.records_outputs or not micro_batch.samples:
                continue
            places = owned[micro_batch.owned_tokens]
            for fill in fills:
                target, output = (
                    self.values[self.columns.index(fill.column)],
                    getattr(outputs, fill.output).float(),
                )
                if fill.version is not None:
                    output = torch.where(
                        micro_batch.versions == fill.version, output, target[places]
                    )
                target[places] = output

    def finish(self) -> dict[str, Tensor]:
        """Collective over the world: column -> [N] float32 on the CPU."""
        if self.columns:
            dist.all_reduce(self.values, group=self.layout.world_group)
        return dict(zip(self.columns, self.values.cpu(), strict=True))

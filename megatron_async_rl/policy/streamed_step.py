"""The gradient of a step whose batch arrives in parts (flow.stream: groups, arXiv 2610.05935).

    part   samples --> columns, advantages, decisions --> losses with denominators of 1 --> + sums
    batch  sums --> reduce --> divide by the denominator of all parts --> gradient of the step

A group's part of the gradient depends on its own samples and on one number of the whole batch, the
denominator of the loss. Parts are therefore summed undivided, in the order in which they arrive,
and the sum is divided once.

Invariants:
- each sample of the batch is in one part, and each part is added once. The first part of a step
  clears the buffers, so the sums of a step that did not complete are discarded;
- all other numbers of a part equal those of its samples in the whole batch. `finish` compares them,
  and a loss cannot read a decision that is one number for the batch: a method that reads samples of
  other groups ends the run instead of changing the gradient;
- a part has the same owners and micro-batches alone and in its batch (batch_shares.py), so a batch
  that is added part after part later, as in a replay, makes the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.objective import Objective, StepTargets, valid_samples
from megatron_async_rl.policy.batch_shares import rows_of_parts
from megatron_async_rl.policy.batching import Batcher, MicroBatchPlan, Minibatch
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.lag0 import Lag0Table
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.references import ReferencePolicies, precompute
from megatron_async_rl.policy.step import RecordedLoss
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

EQUAL = {"rtol": 1e-9, "atol": 1e-12}
"""Tolerance between the numbers of a part alone and in its batch: rounding of float64 sums."""


class ReadsOtherGroups(ValueError):
    """A number of a sample depends on samples of other groups, so its gradient cannot be computed
    before the batch is complete."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} of a part of the batch may not be those of the whole batch: a method of"
            " `objective` reads samples of other groups, so groups cannot be streamed; set"
            " flow.stream: none, and compares_batch: True in the settings class of a plug-in"
        )


class UnknownScalars(Mapping[str, float]):
    """Numbers of a decision that describe the whole batch, which is not complete: reading one
    raises ReadsOtherGroups."""

    def __getitem__(self, name: str) -> float:
        raise ReadsOtherGroups(f"the number {name}")

    def __iter__(self) -> Iterator[str]:
        raise ReadsOtherGroups("the numbers of the loss's decision")

    def __len__(self) -> int:
        raise ReadsOtherGroups("the numbers of the loss's decision")


@dataclass(frozen=True, eq=False)
class AddedPart:
    """A part that was added. Its samples are the valid ones, and may be none. plan, columns,
    targets, table: of these samples, in their order."""

    samples: RankBatch
    plan: MicroBatchPlan
    columns: Mapping[str, Tensor]
    targets: StepTargets
    table: Lag0Table


class StreamedStep:
    """Sums over the parts of one optimizer step. Public methods are collective over the world.

    count: parts of the step so far. precompute_s, forward_backward_s: seconds of their passes.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: MegatronOptimizer,
        objective: Objective,
        references: ReferencePolicies,
        batcher: Batcher,
        layout: Layout,
    ) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._objective = objective
        self._references = references
        self._batcher = batcher
        self._layout = layout
        self.discard()

    def discard(self) -> None:
        """Forget the parts, before another step or without one."""
        self._version = -1
        self._added: list[AddedPart] = []
        self.count = 0
        self.precompute_s = self.forward_backward_s = 0.0

    def add_missing(self, batch: RankBatch) -> None:
        """Add the parts of a complete batch that were not added before it was complete."""
        if batch.version != self._version:
            self.discard()
        for rows in rows_of_parts(batch.part)[self.count :]:
            self.add(batch.select(rows))

    def add(self, part: RankBatch) -> None:
        """Add the gradient of one part to the buffers, not divided and not reduced. Raises
        SampleTooLong."""
        number = int(part.part[0])
        if number == 0:
            self.discard()
            self._version = part.version
            # Without the distributed optimizer a parameter's grad is its gradient buffer, to which
            # a backward pass would add twice.
            self._optimizer.zero_grad()
            self._schedule.clear()
        if (part.version, number) != (self._version, self.count):
            raise RuntimeError(
                f"part {number} of version {part.version} came after {self.count} parts of version"
                f" {self._version}"
            )
        self.count += 1
        samples = valid_samples(part)
        # A part of failed rewards alone adds nothing; the same on every rank.
        if len(samples):
            self._added.append(self._add(samples))

    def _add(self, samples: RankBatch) -> AddedPart:
        started = time.perf_counter()
        minibatch = self._batcher.of(samples)
        columns = precompute(
            sorted(self._objective.needs),
            samples,
            [minibatch],
            self._references,
            self._schedule,
            self._batcher,
        )
        decided = self._objective.decide(samples, self._objective.prepare(samples, columns))
        decisions = replace(decided.whole.decided, scalars=UnknownScalars())
        targets = replace(
            decided,
            whole=decided.whole.replace(decided=decisions),
            # Sums: the denominators of the batch are not known yet.
            denominators=decided.denominators.undivided,
        )
        table = Lag0Table(samples, self._layout.device)
        loss = RecordedLoss(
            self._objective,
            targets,
            table if self._layout.records_outputs else None,
            owner=self._layout.dp_rank,
        )
        precomputed = time.perf_counter()
        self._schedule.accumulate(minibatch.micro_batches, loss)
        self.precompute_s += precomputed - started
        self.forward_backward_s += time.perf_counter() - precomputed
        return AddedPart(samples, minibatch.plan, columns, targets, table)

    def _placed(self, samples: RankBatch) -> Iterator[tuple[AddedPart, NDArray[np.int64]]]:
        """Yield each part with the numbers of its samples in `samples`, the batch's valid ones."""
        rows = rows_of_parts(samples.part)
        for part, own in zip(self._added, rows, strict=True):
            # Otherwise the sum would not be the gradient of this batch.
            if not part.samples.ids.equals(samples.ids.take(own)):
                raise RuntimeError(
                    f"the parts that were added for version {samples.version} have other samples"
                    " than its batch"
                )
            yield part, own

    def columns(self, samples: RankBatch) -> dict[str, Tensor]:
        """Return the precomputed columns over the tokens of the batch, as `precompute` does."""
        found: dict[str, Tensor] = {
            name: torch.zeros(len(samples.rows), dtype=torch.float32)
            for name in self._objective.needs
        }
        for part, own in self._placed(samples):
            tokens = torch.from_numpy(spans(samples.starts[own], samples.lengths[own]))
            for name, values in part.columns.items():
                found[name][tokens] = values
        return found

    def minibatch(self, samples: RankBatch) -> Minibatch:
        """Return the batch with the plan of its parts, one after the other. It has no tensors of
        micro-batches, because they have run."""
        placed = list(self._placed(samples))
        ranks = tuple(
            tuple(
                tuple(own[list(rows)].tolist())
                for part, own in placed
                for rows in part.plan.ranks[rank]
            )
            for rank in range(self._layout.dp_size)
        )
        computed = sum(part.plan.computed for part, _ in placed)
        fed = sum(int(part.samples.fed.sum()) for part, _ in placed)
        padding = sum(part.plan.padding_share * part.plan.computed for part, _ in placed)
        shared = sum(part.plan.shared_share * int(part.samples.fed.sum()) for part, _ in placed)
        plan = MicroBatchPlan(ranks, computed, padding / computed, shared / max(fed, 1))
        return Minibatch(np.arange(len(samples)), samples, (), plan)

    def finish(self, targets: StepTargets) -> Lag0Table:
        """Reduce and divide the sums: the gradient of the whole batch is then in the buffers.
        Return the table of its samples, which is not complete. targets: of the whole batch. Raises
        ReadsOtherGroups."""
        samples = targets.samples
        divisor = targets.denominators.divisor(self._objective.config.aggregation_used)
        table = Lag0Table(samples, self._layout.device)
        for part, own in self._placed(samples):
            require_same(part.targets.whole, targets.whole, samples, own)
            table.insert(own, part.table, divisor)
        self._schedule.reduce()
        self._schedule.divide(divisor)
        return table


def require_same(
    part: TokenBatch, whole: TokenBatch, samples: RankBatch, rows: NDArray[np.int64]
) -> None:
    """Raise ReadsOtherGroups unless a part has the numbers of its samples in the whole batch."""
    sequences = torch.from_numpy(rows)
    tokens = torch.from_numpy(spans(samples.starts[rows], samples.lengths[rows]))
    selected = dict(whole.select(sequences).tensors())
    pairs = {
        # Numbers of groups and sequences count from 0 in each batch.
        name: (values, selected[name])
        for name, values in part.tensors()
        if name not in ("group", "sequence")
    }
    pairs |= {
        name: (values, whole.decided.tokens[name][tokens])
        for name, values in part.decided.tokens.items()
    }
    pairs |= {
        name: (values, whole.decided.sequences[name][sequences])
        for name, values in part.decided.sequences.items()
    }
    for name, (own, of_batch) in pairs.items():
        # Columns that nothing requested are nan in both.
        if not torch.allclose(own.double(), of_batch.double(), equal_nan=True, **EQUAL):
            raise ReadsOtherGroups(f"the {name}")

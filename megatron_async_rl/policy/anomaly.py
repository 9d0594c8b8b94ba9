"""Gradients far outside the run's own history, and numbers that are not finite: detection, search
for the cause, and the end of a run because of them.

    anomaly      |g| > 20 times the median of the last 50 steps' norms, before the controls, and
                 above the norm to which gradients are clipped: a run that has learned its data has
                 a median near 0, and noise of any size is many times that. Without clipping, |g|
                 above the largest median so far
    not finite   the loss or |g| is infinite or not a number; the step is not taken
    parameter    the parameter with the largest share of |g|^2, over all ranks' shards; for a
                 gradient that is not finite, the first parameter whose gradient is not
    samples      the smallest part of the batch found whose gradient is at least half as long as g,
                 or is not finite; samples whose own loss is not finite need no search

A gradient is the sum of its samples' gradients, so one of two halves of a batch has at least half
its length. The search halves the longer half again while this holds. It finds a single culprit
after the halvings that lead to one sample, about two passes over the batch in all; if many samples
make the gradient together, it ends with a larger part. Gradients of parts: part_gradients.py.

Invariant: all ranks decide by the same all-reduced norms.

A step whose loss or gradient is not finite is not taken (step.py). One such step may be caused by
one sample. Several in a row are caused by the data or the weights, and no later step will be
better. The weights themselves can become infinite with a learning rate that is far too high, or
with moments that were damaged on disk. Weights are therefore checked before engines get them, and
weights and moments before a checkpoint is written. Every rank decides by the same numbers, so all
ranks raise or none.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async_rl.gradients import Gradients
from megatron_async_rl.policy.forward import Consume, Schedule
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.part_gradients import (
    BuildRows,
    PartGradients,
    described_sample,
    number_or_text,
)
from megatron_async_rl.samples.rank_batch import RankBatch

log = logging.getLogger(__name__)

FACTOR = 20.0
WINDOW = 50
"""Number of steps in the median."""
ENOUGH = 5
"""Smallest number of norms for a median; fewer do not characterise a run."""
MIN_CAUSE_SHARE = 0.5
"""Share of the gradient's length that a part of the batch must have to be named as its cause."""

WHOLE = 16
"""Largest number of samples that are written with their tokens; if more make the gradient together,
none is."""

FILE = "anomalies.jsonl"


@dataclass(frozen=True)
class Spike:
    """An anomalous gradient. norm: before the controls. median: of the norms before it."""

    norm: float
    median: float


@dataclass(frozen=True)
class NotFinite:
    """A step that was not taken. loss: the batch's. norm: of its gradient."""

    loss: float
    norm: float


class NormHistory:
    """Norms of the last WINDOW gradients, including anomalous ones: if all are, they are normal for
    the run.

    clip: the norm to which gradients are clipped; null without clipping. largest_median: the
    largest one so far.
    """

    def __init__(
        self,
        values: Iterable[float] = (),
        *,
        clip: float | None = None,
        largest_median: float = 0.0,
    ) -> None:
        self._values = deque(values, maxlen=WINDOW)
        self.clip = clip
        self.largest_median = largest_median

    @property
    def values(self) -> list[float]:
        return list(self._values)

    def spike(self, norm: float) -> Spike | None:
        if len(self._values) < ENOUGH:
            return None
        median = statistics.median(self._values)
        # Clipping to a larger norm does not change the gradient, so it is not an anomaly.
        ordinary = self.clip if self.clip is not None else self.largest_median
        return Spike(norm, median) if norm > max(FACTOR * median, ordinary) else None

    def add(self, norm: float) -> None:
        """Record a norm. Zeros are ignored: they come from batches that teach nothing."""
        # A zero norm would lower the median without being a gradient.
        if norm > 0.0:
            self._values.append(norm)
            if len(self._values) >= ENOUGH:
                self.largest_median = max(self.largest_median, statistics.median(self._values))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "largest_median": self.largest_median}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = deque(state["values"], maxlen=WINDOW)
        self.largest_median = state["largest_median"]


class AnomalyReport(PartGradients):
    """Search for the causes of anomalies of one policy, and their file: one JSON object a line.

    file: null writes nothing, and then samples are not searched, either.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        layout: Layout,
        file: Path | None,
    ) -> None:
        super().__init__(schedule, model, optimizer, layout)
        self._file = file

    def write(
        self,
        found: Spike | NotFinite,
        gradients: Gradients,
        *,
        step: int,
        samples: RankBatch,
        rows: Sequence[Sequence[int]],
        build: BuildRows,
        consume: Consume,
        losses: Sequence[float] = (),
    ) -> list[str]:
        """Return the ids of the samples that the step is traced to; empty without a file.
        Collective over the world.

        rows: of `samples`, those of each of this rank's micro-batches. build, consume: a
        micro-batch of such rows, and its part of the step's loss. losses: part of each of `samples`
        in the step's loss, the same on every rank.
        """
        # First, because the search below overwrites the gradients.
        squares = self._squares_of_parameters(gradients)
        if isinstance(found, Spike):
            facts = self._of_spike(found, squares, step)
        else:
            facts = self._of_not_finite(found, squares, step)
        if self._file is None:
            return []
        culprits = [row for row, loss in enumerate(losses) if not math.isfinite(loss)]
        if isinstance(found, Spike) or not culprits:
            culprits = list(self._culprits(found.norm, len(samples), rows, build, consume))
        # Only the named ones: all tokens of a batch may not fit in addition to the model. Only the
        # owner of a sample has its tokens.
        named = sorted(set(culprits) & {row for own in rows for row in own})
        whole = len(culprits) <= WHOLE
        described = self._gathered(
            {row: described_sample(samples, row, whole=whole) for row in named}
        )
        record = {"step": step, **facts, "samples": [described[row] for row in culprits]}
        ids = [str(described[row]["id"]) for row in culprits]
        if self._layout.rank == 0:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            log.warning("step %d: made by %s; see %s", step, named_ids(ids), self._file)
        return ids

    def _of_spike(self, spike: Spike, squares: Mapping[str, float], step: int) -> dict[str, Any]:
        parameter = max(squares, key=lambda name: squares[name])
        share = squares[parameter] / sum(squares.values())
        if self._layout.rank == 0:
            log.warning(
                "step %d: gradient norm %.4g, %.0f times the median of the last steps (%.4g);"
                " %.0f %% of its square is in %s",
                step,
                spike.norm,
                spike.norm / spike.median,
                spike.median,
                100.0 * share,
                parameter,
            )
        return {
            "norm": spike.norm,
            "median": spike.median,
            "parameter": parameter,
            "share": share,
        }

    def _of_not_finite(
        self, found: NotFinite, squares: Mapping[str, float], step: int
    ) -> dict[str, Any]:
        parameters = [name for name, square in squares.items() if not math.isfinite(square)]
        if self._layout.rank == 0:
            log.warning(
                "step %d was not taken: its loss is %s and its gradient norm %s; gradients of %d of"
                " %d parameters are not finite",
                step,
                found.loss,
                found.norm,
                len(parameters),
                len(squares),
            )
        # Text, because JSON has no number for them.
        return {
            "loss": number_or_text(found.loss),
            "norm": number_or_text(found.norm),
            "parameter": parameters[0] if parameters else None,
            "parameters": len(parameters),
        }

    def _culprits(
        self,
        norm: float,
        count: int,
        rows: Sequence[Sequence[int]],
        build: BuildRows,
        consume: Consume,
    ) -> Sequence[int]:
        enough = MIN_CAUSE_SHARE * norm if math.isfinite(norm) else math.inf
        found: Sequence[int] = range(count)
        with self._preserved():
            # Every rank makes the same halves, because all norms are all-reduced.
            while len(found) > 1:
                middle = len(found) // 2
                norms = [
                    (self._norm_of(half, rows, build, consume), half)
                    for half in (found[:middle], found[middle:])
                ]
                longest, half = max(norms, key=lambda each: each[0])
                # If both halves are not finite, the cause is not a few samples.
                if not longest >= enough or all(math.isinf(each) for each, _ in norms):
                    break
                found = half
        return found


def named_ids(ids: Sequence[str]) -> str:
    """Return the first few ids, and the number of the others."""
    shown = ", ".join(ids[:4])
    return shown if len(ids) <= 4 else f"{shown} and {len(ids) - 4} others together"


class StepCounts(Protocol):
    """Counts of an optimizer's steps; see `OptimizerStep`."""

    steps: int
    updates: int
    nonfinite: int
    nonfinite_in_a_row: int
    nonfinite_ids: list[str]


class NonFiniteError(RuntimeError):
    """A run cannot continue. Its checkpoints contain a state from before the fault was noticed."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def refuse_nonfinite_steps(step: StepCounts, limit: int, *, ended: bool) -> None:
    """Raise NonFiniteError after `limit` steps in a row that were not finite; ended: also if the
    run has made no other step."""
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
    """Raise NonFiniteError on every rank if a tensor on any rank is not finite. Collective over the
    world.

    held: tensors of this rank by kind; a rank may have none; the same kinds on every rank. step:
    the newest optimizer step."""
    # One all-reduce for all kinds: every rank lists the same kinds, and counts 0 if it has no
    # tensor.
    counts = torch.zeros(len(held), dtype=torch.float32, device=layout.device)
    for place, tensors in enumerate(held.values()):
        for tensor in tensors:
            if tensor.numel():
                # Both preserve values that are not a number, without a copy.
                ends = torch.stack(torch.aminmax(tensor.detach()))
                counts[place] += (~torch.isfinite(ends)).any().to(counts)
    dist.all_reduce(counts, group=layout.world_group)
    wrong = [name for name, count in zip(held, counts.tolist(), strict=True) if count]
    if wrong:
        raise NonFiniteError(
            f"after optimizer step {step} not finite: {', '.join(wrong)}; they are neither"
            " published nor saved",
            "lower policy.optimizer.lr; the run resumes from its newest checkpoint. If it fails at"
            " the same step again, go back to an older checkpoint",
        )

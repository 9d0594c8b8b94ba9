"""Trainable parameters that have received a gradient so far.

A parameter without a gradient is not learned: it was detached from the graph, or its module is not
used. The loss looks normal.

Invariants:
- gradients are read in Megatron's buffers, after the backward pass and before controls, clipping
  and optimizer change them. A rank's buffer may hold sums of other ranks or only its own part;
  either is zero for a parameter without a gradient;
- a parameter counts once any rank has seen a non-zero element of its gradient;
- once a parameter has been seen, its gradient is not read again, so only the first steps cost more
  than a few comparisons.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_async_rl.metrics.coverage_record import CoverageRecord, write_coverage
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import whole_model_names
from megatron_async_rl.watchdog.events import note

log = logging.getLogger(__name__)

REPORT_AFTER = 5
"""Number of steps with a gradient after which the parameters without one are reported. Adapters
start at zero, and half of them get no gradient in the first step."""
HEAD = 4096
"""Number of elements that are looked at first; most gradients have a non-zero element there."""


class GradientCoverage:
    """Names of the trainable parameters that have had no gradient."""

    def __init__(self, model: PolicyModel, layout: Layout) -> None:
        self._layout = layout
        trained = {
            name: parameter
            for chunk in model.chunks
            for parameter, name in whole_model_names(model.bridge, chunk)
            if parameter.requires_grad
        }
        self._names = sorted(trained)
        self._unseen: dict[str, nn.Parameter] = trained
        """This rank's parameters whose gradient has had no non-zero element so far."""

    def add(self) -> None:
        """Look at the gradients of a step."""
        for length in (HEAD, None):
            if self._unseen:
                # One copy to the host for all parameters.
                found = torch.stack([_any(one, length) for one in self._unseen.values()]).tolist()
                named = zip(list(self._unseen.items()), found, strict=True)
                self._unseen = dict(item for item, seen in named if not seen)

    def missing(self) -> tuple[list[str], int]:
        """Return the names without a gradient, sorted, and the number of trainable parameters of
        the whole model. Collective over the world."""
        seen = [name for name in self._names if name not in self._unseen]
        every: set[str] = set()
        having: set[str] = set()
        for names, ones in self._layout.gathered((self._names, seen)):
            every.update(names)
            having.update(ones)
        return sorted(every - having), len(every)


def _any(parameter: nn.Parameter, length: int | None) -> Tensor:
    """Return True, on the device, if one of the first `length` elements of the gradient is not
    zero."""
    # DDP gives every parameter that it reduces such a buffer.
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    if gradient is None:
        return torch.zeros((), dtype=torch.bool, device=parameter.device)
    return gradient.reshape(-1)[:length].count_nonzero() > 0


class CoverageReport:
    """Report of the parameters without a gradient, once, after REPORT_AFTER steps of this process.
    folder: of the run; null writes nothing."""

    def __init__(self, coverage: GradientCoverage, layout: Layout, folder: Path | None) -> None:
        self._coverage = coverage
        self._layout = layout
        self._folder = folder
        self._left = REPORT_AFTER

    def add(self) -> None:
        """Look at the gradients of a step; does nothing after the report."""
        if self._left:
            self._coverage.add()

    def stepped(self, norm: float, step: int) -> None:
        """Count a step with a gradient of this norm, the same on every rank. Collective."""
        # A batch without anything to learn shows nothing about a parameter.
        if not self._left or not norm > 0.0:
            return
        self._left -= 1
        if self._left:
            return
        missing, trainable = self._coverage.missing()
        # Not a metric: it would depend on where a process started, and a resumed run has the
        # metrics of an undisturbed one.
        if self._layout.rank == 0:
            self._write(missing, trainable, step)

    def _write(self, missing: Iterable[str], trainable: int, step: int) -> None:
        names = list(missing)
        if names:
            shown = ", ".join(names[:4]) + ("" if len(names) <= 4 else ", ...")
            text = (
                f"step {step}: {len(names)} of {trainable} trainable parameters have had no"
                f" gradient: {shown}"
            )
            log.warning("%s", text)
            if self._folder is not None:
                note(self._folder, text)
        if self._folder is not None:
            record = CoverageRecord(step=step, trainable=trainable, parameters=tuple(names))
            try:
                write_coverage(self._folder, record)
            except OSError as error:
                # A full disk costs the record, not the run.
                log.warning("recording the parameters without a gradient: %s", error)

"""Gradients that the run's trainable parameters have received, as the ranks recorded them in
without_gradient.json. Unlike digests of weights, this also covers adapters and small parameters in
bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.coverage_record import FILE, read_coverage
from megatron_async_rl.verify.run_check import RunCheck
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, damaged, row

RECEIVED, BOUND = "gradients received", "every trainable parameter has had a gradient"
REMEDY = (
    "the named parameters are not learned: look for a detached tensor, a module that the forward"
    " pass does not use, or experts that no token reached"
)


class ReceivedGradients(RunCheck):
    """Reads without_gradient.json."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def result(self) -> Iterable[ScorecardRow]:
        try:
            found = read_coverage(self._run_dir)
        except UserError as error:
            yield damaged(RECEIVED, error, BOUND)
            return
        if found is None:
            why = (
                f"no {FILE}: fewer than five steps had a gradient, or an earlier version made the"
                " run"
            )
            yield absent(RECEIVED, why, BOUND, REMEDY)
            return
        missing = found.parameters
        value = f"{found.trainable - len(missing)} of {found.trainable} by step {found.step}"
        yield row(RECEIVED, value, BOUND, not missing, REMEDY, missing)

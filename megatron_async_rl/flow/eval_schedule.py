"""Which versions are evaluated during a run, and what is kept of each.

Invariants:
- a version is evaluated once, over stops and resumes: `means` goes into the checkpoint;
- none is left out where what is `unfinished` is waited for before a checkpoint: an evaluation of the checkpoint's own version or
  of a later one is done again by the resume, one of an older version could not be, for its weights are gone;
- version 0 and the last one are always evaluated, between them every `every`-th.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_async_rl.flow.evaluation import EvalResult


class EvalSchedule:
    """`every`: versions between evaluations, 0 for none; `steps`: the run's last version; `means`: of an earlier start."""

    def __init__(self, *, every: int, steps: int, means: Mapping[int, float]) -> None:
        self._every = every
        self._steps = steps
        self.means = dict(means)
        """Version -> mean reward; for the checkpoint."""
        self._begun: int | None = None

    def due(self, version: int) -> bool:
        """Ask it of each version once the engines hold it."""
        chosen = version in (0, self._steps) or (self._every > 0 and version % self._every == 0)
        return chosen and version not in self.means

    def begin(self, version: int) -> None:
        """The evaluation of `version` is under way from now on, until its result is recorded."""
        self._begun = version

    def unfinished(self, version: int) -> bool:
        """Whether an evaluation is under way that a resume from `version` could not repeat."""
        return self._begun is not None and self._begun < version and self._begun not in self.means

    def record(self, result: EvalResult) -> dict[str, float]:
        """Takes a result; returns its metrics, for the next line of the log."""
        self.means[result.version] = result.mean_reward
        passed = {"eval/pass@k".replace("@k", f"@{k}"): value for k, value in result.pass_at.items()}
        return {
            "eval/mean": result.mean_reward,
            "eval/version": result.version,
            "eval/truncated": result.truncated,
            "eval/seconds": result.seconds,
            **passed,
        }

    @property
    def before(self) -> float | None:
        """Mean reward before the first step; None while not measured."""
        return self.means.get(0)

    @property
    def after(self) -> float | None:
        """Mean reward after the last step; None while not measured."""
        return self.means.get(self._steps)

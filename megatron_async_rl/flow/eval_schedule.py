"""Which versions are evaluated during a run, and what is kept of each.

Invariants:
- a version is evaluated once, over stops and resumes: `means` goes into the checkpoint;
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

    def due(self, version: int) -> bool:
        """Ask it of each version once the engines hold it."""
        chosen = version in (0, self._steps) or (self._every > 0 and version % self._every == 0)
        return chosen and version not in self.means

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

"""A run directory as the report sees it: rows, status, configuration and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_async_rl.observe.activity import Activity, recent_activity
from megatron_async_rl.observe.dropped import Dropped, compare_dropped
from megatron_async_rl.observe.evaluations import Evaluations, evaluation_curves
from megatron_async_rl.observe.read import Row, read_metrics
from megatron_async_rl.observe.status import Status, read_status
from megatron_async_rl.observe.summary import Summary, span, summarise_run
from megatron_async_rl.observe.timeline import read_timeline


class ReportError(Exception):
    """The run directory holds nothing to report."""


@dataclass(frozen=True, kw_only=True)
class Record:
    run_dir: Path
    rows: list[Row]
    status: Status | None
    config: Mapping[str, Any]
    """RUN/config.yaml as it is written there; empty when there is none."""
    summary: Summary
    activity: Activity | None
    """What each process did in the last steps."""
    dropped: Dropped | None
    evaluations: Evaluations

    @property
    def supervised(self) -> bool:
        """True when nothing was sampled, so that reward and lag say nothing."""
        return not any("ratio/ess_ratio" in row or "tokens/generated" in row for row in self.rows)

    @property
    def gac(self) -> Mapping[str, Any] | None:
        """Settings of the control that judges the cosine, when the run has one; `c_low` is the one in force at the end."""
        controls = self.config.get("controls") or ()
        settings = next((control for control in controls if control.get("name") in ("gac", "matched_norm")), None)
        if settings is None or settings.get("calibrate") is None:
            return settings
        calibrated = next((row["gac/c_low"] for row in reversed(self.rows) if "gac/c_low" in row), None)
        return {**settings, "c_low": calibrated}

    @property
    def lag_bound(self) -> float | None:
        """`flow.async_ratio`: the start version of a sample is at most this many versions behind, rounded up."""
        return (self.config.get("flow") or {}).get("async_ratio")

    @property
    def headline(self) -> str:
        summary = self.summary
        parts = [
            f"{summary.steps:,} {'step' if summary.steps == 1 else 'steps'} in {span(summary.in_steps_s)}",
            f"{summary.tokens_per_s:,.0f} tokens/s",
        ]
        if summary.before is not None and summary.after is not None:
            parts.insert(0, f"held-out reward {summary.before:.3f} → {summary.after:.3f}")
        if self.status is not None and self.status.phase != "finished":
            parts.append(f"{self.status.phase} at step {self.status.step} of {self.status.steps}")
        return "   ·   ".join(parts)

    def facts(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Tables of (name, value), under their titles."""
        summary, config = self.summary, self.config
        result = [
            ("steps", f"{summary.steps:,}"),
            ("last weight version", f"{self.rows[-1]['version']}"),
            ("time in steps", span(summary.in_steps_s)),
        ]
        if summary.before is not None:
            result.append(("held-out reward before", f"{summary.before:.3f}"))
        if summary.after is not None:
            result.append(("held-out reward after", f"{summary.after:.3f}"))
        if summary.lag_mean is not None and not self.supervised:
            result.append(("lag of a token", f"mean {summary.lag_mean:.2f}, largest {summary.lag_max} versions"))
        drift = next((row["staleness/drift"] for row in reversed(self.rows) if "staleness/drift" in row), None)
        if drift is not None:
            result.append(("staleness drift, last step", f"{drift:.3g}"))
        result += [(f"gradients {name}", f"{count:,}") for name, count in summary.regimes.items()]
        counts = {"generated": summary.generated, "trained on": summary.trained}
        speed = [(f"tokens {name}", f"{count:,}") for name, count in counts.items() if count]
        speed.append(("throughput", f"{summary.tokens_per_s:,.0f} tokens/s"))
        speed.append(("time per step", f"{summary.in_steps_s / summary.steps:.2f} s"))
        speed += [(f"of it {name}", f"{share:.1%}") for name, share in summary.shares.items() if share >= 0.0005]
        if summary.busy_share is not None:
            speed.append(("engines busy", f"{summary.busy_share:.1%}"))
        if summary.alive is not None and (summary.restarts or summary.alive[0] < summary.alive[1]):
            speed.append(("engines alive", f"{summary.alive[0]} of {summary.alive[1]}, {summary.restarts} restarts"))
        tables = [("Result", result), ("Speed", speed)]
        if self.activity is not None:
            tables.append((f"The last {len(self.activity.steps)} steps", self.activity.in_words()))
        for title, keys in CONFIG_TABLES.items():
            found = [(key, _plain(value)) for key in keys if (value := _get(config, key)) is not None]
            if found:
                tables.append((title, found))
        return tables


CONFIG_TABLES = {
    "Policy": (
        "model.path",
        "model.dtype",
        "policy.device",
        "policy.parallel.ranks",
        "policy.parallel.tensor",
        "policy.parallel.pipeline",
        "policy.optimizer.lr",
        "policy.optimizer.schedule",
    ),
    "Data and rollout": (
        "rollout.engines",
        "rollout.sampling.temperature",
        "rollout.sampling.max_tokens",
        "rollout.reward.name",
        "data.train",
        "data.eval",
    ),
    "Method": (
        "objective.advantage",
        "objective.loss",
        "objective.proximal",
        "objective.aggregation",
        "controls",
        "flow.async_ratio",
        "flow.prompts_per_step",
        "flow.group_size",
        "run.seed",
    ),
}
"""The settings a reader asks for first. The rest is in RUN/config.yaml."""


def read_record(run_dir: Path) -> Record:
    """Raises ReportError when the directory is missing or no step was logged in it."""
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory; give the run.dir of a run")
    rows = read_metrics(run_dir)
    status = read_status(run_dir)
    if not rows:
        state = f"its last phase was `{status.phase}`" if status else "and no run was started in it"
        raise ReportError(f"{run_dir} has no finished step to report: metrics.jsonl is missing or empty, {state}")
    config_file = run_dir / "config.yaml"
    config = yaml.safe_load(config_file.read_text()) if config_file.exists() else {}
    return Record(
        run_dir=run_dir,
        rows=rows,
        status=status,
        config=config or {},
        summary=summarise_run(rows, status),
        activity=recent_activity(rows, read_timeline(run_dir)),
        dropped=compare_dropped(rows),
        evaluations=evaluation_curves(run_dir),
    )


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _plain(value: Any) -> str:
    """A setting in one line: a method's name first, then its settings that are set."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {_plain(setting)}" for key, setting in value.items() if key != "name" and setting is not None)
        name = str(value.get("name", ""))
        return f"{name} ({rest})" if name and rest else name or rest
    if isinstance(value, list | tuple):
        return "; ".join(_plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)

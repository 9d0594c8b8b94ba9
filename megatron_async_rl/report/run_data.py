"""A run directory as the report sees it: rows, status, configuration, and what follows from
them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, ValidationError

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.settings_model import bare_name
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.metrics.log import (
    EVAL_FILE,
    EvaluationReader,
    MetricRow,
    MetricsReader,
    number,
)
from megatron_async_rl.metrics.log import FILE as METRICS_FILE
from megatron_async_rl.metrics.status import FILE as STATUS_FILE
from megatron_async_rl.metrics.status import Status, read_status
from megatron_async_rl.metrics.timeline import FOLDER as TIMELINE_FOLDER
from megatron_async_rl.metrics.timeline import Span, TimelineReader, shares
from megatron_async_rl.report.anomalies import Anomaly, AnomalyFinder, AnomalyList
from megatron_async_rl.report.metric_rows import MetricRows
from megatron_async_rl.report.series import Evaluations, evaluation_curves
from megatron_async_rl.report.summary import (
    DroppedSummary,
    Summary,
    compare_dropped,
    span,
    summarise_run,
)
from megatron_async_rl.watchdog.events import FILE as EVENTS_FILE
from megatron_async_rl.watchdog.events import Event, read_events

WINDOW_STEPS = 12
EVENT_BYTES = 2**20
"""Number of bytes before the end from which events are read."""
HOLE_S = 60.0
HOLE_STEPS = 10
"""A step that ended later after the one before than both of these, the second in steps, came after
a stop of the run."""
PARTS = 4


class _RunControl(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    c_low: FiniteFloat | None = None
    c_high: FiniteFloat | None = None


class _Flow(BaseModel):
    async_ratio: FiniteFloat | None = None


class _Samples(BaseModel):
    keep_mib: float | None = None


class _Observe(BaseModel):
    beside: Path | None = None


class _ShownSettings(BaseModel):
    """The settings that are drawn or decided by here. The others may be those of any version."""

    flow: _Flow | None = None
    controls: list[Annotated[_RunControl, BeforeValidator(bare_name)]] | None = None
    samples: _Samples | None = None
    observe: _Observe | None = None


class ReportError(UserError):
    """The run directory holds nothing to report."""


@dataclass(frozen=True, kw_only=True)
class TimelineWindow:
    """The last steps of a run as each process spent them."""

    start: float
    """Unix seconds, as `end`."""
    end: float
    steps: Sequence[tuple[int, float]]
    """(step, when it ended); all in the window."""
    tracks: Mapping[str, Sequence[Span]]
    """The spans that touch the window, cut to it; `rank 0` first."""

    def as_text(self) -> list[tuple[str, str]]:
        """(track, activities), the longest activity first."""
        lines = []
        for track, spans in self.tracks.items():
            parts = list(shares(spans, self.start, self.end).items())[:PARTS]
            text = ", ".join(f"{_activity(*kind)} {share:.0%}" for kind, share in parts)
            lines.append((track, text))
        return lines


@dataclass(frozen=True, kw_only=True)
class RunData:
    run_dir: Path
    rows: MetricRows
    status: Status | None
    config: Mapping[str, Any]
    """RUN/config.yaml as it is written there; empty if there is none."""
    summary: Summary
    window: TimelineWindow | None
    """None if no process wrote a timeline."""
    dropped: DroppedSummary | None
    """None where nothing was dropped."""
    evaluations: Evaluations
    anomalies: Sequence[Anomaly]
    """Kept anomalies of each kind; `found`: how many there are, by kind."""
    found: Mapping[str, int]
    events: Sequence[Event]
    left_out: Sequence[str]
    """Metrics that were of another kind when they were logged."""
    beside: RunData | None = None
    """The run that `observe.beside` names; None where it names none that can be read."""

    @property
    def name(self) -> str:
        return self.run_dir.name.replace("_", " ")

    @property
    def supervised(self) -> bool:
        """True when nothing was sampled, so that reward and lag say nothing."""
        if self.status is not None and self.status.measure == "loss":
            return True
        return not (self.rows.has("ratio/ess_ratio") or self.rows.has("tokens/generated"))

    @property
    def gac(self) -> Mapping[str, Any] | None:
        """Settings of the control that judges the cosine, when the run has one; `c_low` is the one
        in force at the end."""
        controls = _ShownSettings.model_validate(self.config).controls or ()
        settings = next(
            (
                control.model_dump(exclude_unset=True)
                for control in controls
                if control.name in ("gac", "matched_norm")
            ),
            None,
        )
        if settings is None or settings.get("calibrate") is None:
            return settings
        return {**settings, "c_low": self.rows.last("gac/c_low")}

    @property
    def lag_bound(self) -> float | None:
        """`flow.async_ratio`: the start version of a sample is at most this many versions behind,
        rounded up."""
        flow = _ShownSettings.model_validate(self.config).flow
        return None if flow is None else flow.async_ratio

    @property
    def headline(self) -> str:
        summary = self.summary
        steps = "step" if summary.steps == 1 else "steps"
        parts = [
            f"{summary.steps:,} {steps} in {span(summary.in_steps_s)}",
            f"{summary.tokens_per_s:,.0f} tokens/s",
        ]
        if summary.before is not None and summary.after is not None:
            ends = f"{summary.before:.3f} → {summary.after:.3f}"
            parts.insert(0, f"held-out {summary.measure} {ends}")
        if self.status is not None and self.status.phase != "finished":
            parts.append(f"{self.status.phase} at step {self.status.step} of {self.status.steps}")
        return "   ·   ".join(parts)


class RunReader:
    """Read a run repeatedly while it continues: each line of its growing files once.

    `alone`: without the comparison run that it names.
    """

    def __init__(self, run_dir: Path, *, alone: bool = True) -> None:
        self.run_dir = run_dir
        self._alone = alone
        self._beside: RunReader | None = None
        self._begin()

    def _begin(self) -> None:
        self._metrics = MetricsReader(self.run_dir)
        self._evaluations = EvaluationReader(self.run_dir)
        self._timeline = TimelineReader(self.run_dir)
        self._finder = AnomalyFinder(self.run_dir)
        self._rows = MetricRows()
        self._anomalies = AnomalyList()
        self._evaluated: list[dict[str, Any]] = []

    def fingerprint(self) -> Hashable:
        """Changes whenever a file that `read` reads does."""
        names = (METRICS_FILE, EVAL_FILE, STATUS_FILE, EVENTS_FILE, "config.yaml")
        paths = [self.run_dir / name for name in names]
        paths += sorted((self.run_dir / TIMELINE_FOLDER).glob("*.jsonl"))
        beside = None if self._beside is None else self._beside.fingerprint()
        return (*map(_stamp, paths), beside)

    def read(self) -> RunData:
        """Raises ReportError when the directory is missing or no step was logged in it, UserError
        for a file that was damaged; a later call then begins anew."""
        try:
            return self._read()
        except UserError:
            self._begin()
            raise

    def _read(self) -> RunData:
        run_dir = self.run_dir
        if not run_dir.is_dir():
            raise ReportError.of(
                "RUN", f"{run_dir} is not a directory", "name the run.dir of a run"
            )
        self._read_lines()
        status = read_status(run_dir)
        rows = self._rows
        if not rows:
            state = (
                f"its last phase was `{status.phase}`" if status else "and no run was started in it"
            )
            raise ReportError.of(
                "RUN",
                f"{run_dir} has no finished step to report: metrics.jsonl is missing or empty,"
                f" {state}",
                "wait for the first step, or see RUN/logs",
            )
        config = read_config(run_dir)
        return RunData(
            run_dir=run_dir,
            rows=rows,
            status=status,
            config=config,
            summary=summarise_run(rows, status),
            window=timeline_window(rows.newest, self._timeline.read()),
            dropped=compare_dropped(rows),
            evaluations=evaluation_curves(self._evaluated),
            anomalies=self._anomalies.kept(),
            found=self._anomalies.counts,
            events=read_events(run_dir, EVENT_BYTES),
            left_out=sorted(self._metrics.left_out),
            beside=None if self._alone else self._read_beside(config),
        )

    def _read_lines(self) -> None:
        for news in self._metrics.blocks():
            if news.restarted:
                self._rows, self._anomalies = MetricRows(), AnomalyList()
                self._finder = AnomalyFinder(self.run_dir)
            self._rows.add(news.rows)
            self._anomalies.add(self._finder.find(news.rows))

        for evaluated, restarted in self._evaluations.blocks():
            if restarted:
                self._evaluated = []
            # Only the drawn numbers: a line has every held-out prompt's score.
            kept = ("version", "mean_reward", "loss", "pass_at")
            self._evaluated += [{key: one[key] for key in kept if key in one} for one in evaluated]
        self._evaluated.sort(key=lambda one: int(one["version"]))

    def _read_beside(self, config: Mapping[str, Any]) -> RunData | None:
        """A run is shown without it where it has gone since: `mar plan` and `mar train` refuse a
        missing one."""
        observe = _ShownSettings.model_validate(config).observe
        if observe is None or observe.beside is None:
            return None
        if self._beside is None or self._beside.run_dir != observe.beside:
            self._beside = RunReader(observe.beside)
        try:
            return self._beside.read()
        except UserError:
            return None


def read_run(run_dir: Path, *, alone: bool = True) -> RunData:
    """A run as it is now; raises as RunReader does."""
    return RunReader(run_dir, alone=alone).read()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def read_config(run_dir: Path) -> dict[str, Any]:
    """RUN/config.yaml as it is written there; empty if there is none.

    Raises ReportError when it is not a configuration.
    """
    path = run_dir / "config.yaml"
    try:
        config, _ = read_tree(path.read_text(encoding="utf-8"))
        _ShownSettings.model_validate(config)
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        fault = error.errors()[0]
        why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except (YamlFault, UnicodeDecodeError, OSError) as error:
        why = str(getattr(error, "what", error))
    else:
        return config
    what = f"is not a configuration: {why}"
    raise ReportError.of(str(path), what, "delete it; the rest can be shown without")


def timeline_window(
    rows: Sequence[MetricRow], tracks: Mapping[str, Sequence[Span]], steps: int = WINDOW_STEPS
) -> TimelineWindow | None:
    """The window of the last `steps` steps, fewer where the run was stopped in between; None if no
    process wrote a timeline."""
    ended = [
        (int(step), at)
        for row in rows
        if (step := number(row, "step")) and (at := number(row, "time")) is not None
    ]
    took = [second for row in rows if (second := number(row, "time/step_s")) is not None]
    if not ended or not took:
        return None

    hole = max(HOLE_S, HOLE_STEPS * median(took))
    shown = [ended[-1]]
    start = ended[-1][1] - took[-1]
    for step, at in reversed(ended[:-1]):
        if shown[-1][1] - at > hole:
            break
        start = at
        if len(shown) == steps:
            break
        shown.append((step, at))
        start = at - median(took)
    end = ended[-1][1]

    cut = {track: _cut(spans, start, end) for track, spans in tracks.items()}
    inside = {track: spans for track, spans in cut.items() if spans}
    if not inside or end <= start:
        return None
    return TimelineWindow(start=start, end=end, steps=shown[::-1], tracks=inside)


def _cut(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    return [
        Span(
            track=span.track,
            state=span.state,
            waiting_for=span.waiting_for,
            start=max(start, span.start),
            end=min(end, span.end),
        )
        for span in spans
        if span.end > start and span.start < end
    ]


def _activity(state: str, waiting_for: str) -> str:
    if not waiting_for:
        return state
    return (
        f"{state} for {waiting_for}" if state == "waiting" else f"{state} (waits for {waiting_for})"
    )

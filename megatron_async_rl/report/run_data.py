"""A run directory, read for the report, the dashboard and the terminal: metrics, status,
configuration, and the totals that follow from them.

Invariant: nothing here is in a run's memory, so any run can be read, also while it writes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from megatron_async_rl.metrics.timeline import FOLDER as TIMELINE_FOLDER
from megatron_async_rl.metrics.timeline import Span, TimelineReader, shares
from megatron_async_rl.report.anomalies import Anomaly, AnomalyFinder, AnomalyList
from megatron_async_rl.report.metric_rows import Evaluations, MetricRows, evaluation_curves
from megatron_async_rl.watchdog import events
from megatron_async_rl.watchdog.events import Event, Status, read_events, read_status

REGIMES = ("kept", "projected", "skipped")
"""Name of a step's regime by its code in `gac/regime`."""
IN_A_STEP = {
    "training": "time/train_s",
    "publishing": "time/publish_s",
    "waiting": "time/wait_batch_s",
}
"""Metric of the seconds that rank 0 spent in each part of a step."""
REASONS = {"flow/dropped_late": "late", "flow/dropped_equal": "of equal reward"}
"""Reason for which groups were dropped, by the metric that counts them."""
WINDOW_STEPS = 12
"""Number of last steps whose timeline is shown."""
EVENT_BYTES = 2**20
"""Number of bytes at the end of events.jsonl that are read."""
STOP_S, STOP_STEPS = 60.0, 10
"""Between two steps that are further apart than this many seconds and median steps, the run was
stopped."""
PARTS = 4
"""Number of activities shown per process."""


class _RunControl(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    c_low: FiniteFloat | None = None
    c_high: FiniteFloat | None = None


class _ShownFlow(BaseModel):
    async_ratio: FiniteFloat | None = None


class _ShownSamples(BaseModel):
    keep_mib: float | None = None


class _ShownObserve(BaseModel):
    beside: Path | None = None


class _ShownSettings(BaseModel):
    """Settings that the report uses. All others may be those of any version."""

    flow: _ShownFlow | None = None
    controls: list[Annotated[_RunControl, BeforeValidator(bare_name)]] | None = None
    samples: _ShownSamples | None = None
    observe: _ShownObserve | None = None


class ReportError(UserError):
    """The run directory holds nothing to report."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    steps: int
    in_steps_s: float
    """Sum of the steps' seconds, without start-up, evaluation, checkpoints and stops."""
    generated: int
    trained: int
    failed: int
    """Number of samples whose reward failed."""
    shares: Mapping[str, float]
    """Share of `in_steps_s` by part of a step; with `other` they sum to 1."""
    regimes: Mapping[str, int]
    """Number of steps by the decision of gradient alignment control; empty without it."""
    busy_share: float | None
    """Mean over engines and steps; None if no metric counts engines."""
    alive: tuple[int, int] | None
    """Number of engines that take requests at the end, and number of all engines."""
    restarts: int
    lag_mean: float | None
    """Mean lag in weight versions over all trained tokens."""
    lag_max: int | None
    before: float | None
    """Held-out `measure` before the first step, and `after` the last one."""
    after: float | None
    measure: str
    """`reward`, or `loss` of a supervised run."""

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second in steps: generated, or trained on in a supervised run."""
        return (self.generated or self.trained) / self.in_steps_s if self.in_steps_s > 0 else 0.0

    @property
    def lag_ends(self) -> str:
        """Mean and largest lag as text; empty if neither was logged."""
        ends = (("mean {:.2f}", self.lag_mean), ("max {}", self.lag_max))
        return ", ".join(text.format(lag) for text, lag in ends if lag is not None)


def summarise_run(rows: MetricRows, status: Status | None) -> Summary:
    in_steps = rows.total("time/step_s")
    shares = {
        name: rows.total(key) / in_steps if in_steps > 0 else 0.0 for name, key in IN_A_STEP.items()
    }
    shares["other"] = max(0.0, 1.0 - sum(shares.values())) if in_steps > 0 else 0.0
    lags, largest = rows.summed("lag/histogram"), rows.largest("lag/max")
    return Summary(
        steps=rows.total_rows,
        in_steps_s=in_steps,
        generated=int(rows.total("tokens/generated")),
        trained=int(rows.total("tokens/trained")),
        failed=int(rows.total("reward/errors")),
        shares=shares,
        regimes=_regimes(rows),
        busy_share=rows.mean("engine/busy_share"),
        alive=_alive(rows),
        restarts=int(rows.largest("engine/restarts") or 0),
        lag_mean=sum(lag * n for lag, n in enumerate(lags)) / sum(lags) if sum(lags) else None,
        lag_max=None if largest is None else int(largest),
        before=status.before if status else None,
        after=status.after if status else None,
        measure=status.measure if status else "reward",
    )


def _regimes(rows: MetricRows) -> dict[str, int]:
    """Number of optimizer steps in each regime; empty without the control.

    A line of metrics may cover several optimizer steps, so the run's own counts are used if it
    logged them, and the number of lines otherwise.
    """
    if rows.has("gac/kept"):
        keys = ("gac/kept", "gac/projected", "gac/skips")
        return {name: int(rows.last(key) or 0) for name, key in zip(REGIMES, keys, strict=True)}
    return {name: rows.codes[code] for code, name in enumerate(REGIMES)} if rows.codes else {}


def _alive(rows: MetricRows) -> tuple[int, int] | None:
    for row in reversed(rows.newest):
        if (alive := number(row, "engine/alive")) is not None:
            engines = row.get("engine/versions")
            return int(alive), len(engines) if isinstance(engines, list) else int(alive)
    return None


def span(seconds: float) -> str:
    """Format seconds as a clock: `0:07`, `12:31`, `3:05:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, kw_only=True)
class DroppedSummary:
    """Responses that were dropped, compared with those trained on."""

    responses: int
    groups: dict[str, int]
    """Number of dropped groups by reason."""
    length: float
    """Mean tokens per response; `trained_length` and both rewards are means, too."""
    trained_length: float | None
    reward: float | None
    trained_reward: float | None

    @property
    def sentence(self) -> str:
        counted = [
            f"{count:,} {'group' if count == 1 else 'groups'} {reason}"
            for reason, count in self.groups.items()
        ]
        groups = f" ({', '.join(counted)})" if counted else ""
        parts = [f"mean length {self.length:,.1f} tokens{_against(self.trained_length, ',.1f')}"]
        if self.reward is not None:
            parts.append(f"mean reward {self.reward:.3f}{_against(self.trained_reward, '.3f')}")
        were = "response was" if self.responses == 1 else "responses were"
        whose = " of those trained on" if self.trained_length is not None else ""
        return f"{self.responses:,} {were} dropped{groups}: {', '.join(parts)}{whose}"


def compare_dropped(rows: MetricRows) -> DroppedSummary | None:
    """Return None if nothing was dropped."""
    responses = int(rows.total("dropped/responses"))
    length = rows.mean("dropped/length_mean", weighted=True)
    if length is None:
        return None
    groups = {reason: count for key, reason in REASONS.items() if (count := int(rows.counted(key)))}
    return DroppedSummary(
        responses=responses,
        groups=groups,
        length=length,
        trained_length=rows.mean("response/length_mean"),
        reward=rows.mean("dropped/reward_mean", weighted=True),
        trained_reward=rows.mean("reward/mean"),
    )


def _against(trained: float | None, form: str) -> str:
    return f" against {trained:{form}}" if trained is not None else ""


@dataclass(frozen=True, kw_only=True)
class TimelineWindow:
    """Activities of each process during the last steps of a run. Times are Unix seconds."""

    start: float
    end: float
    steps: Sequence[tuple[int, float]]
    """(step, time of its end) of each step in the window."""
    tracks: Mapping[str, Sequence[Span]]
    """Spans by process, cut to the window; `rank 0` first."""

    def as_text(self) -> list[tuple[str, str]]:
        """Return (process, its activities), the longest activity first."""
        lines = []
        for track, spans in self.tracks.items():
            parts = list(shares(spans, self.start, self.end).items())[:PARTS]
            text = ", ".join(f"{_activity(*kind)} {share:.0%}" for kind, share in parts)
            lines.append((track, text))
        return lines


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything that a report shows of one run."""

    run_dir: Path
    rows: MetricRows
    status: Status | None
    config: Mapping[str, Any]
    """Tree of RUN/config.yaml; empty without the file."""
    summary: Summary
    window: TimelineWindow | None
    """None if no process wrote a timeline."""
    dropped: DroppedSummary | None
    """None if nothing was dropped."""
    evaluations: Evaluations
    anomalies: Sequence[Anomaly]
    """Kept anomalies of each kind, in order of steps."""
    found: Mapping[str, int]
    """Number of all anomalies by kind."""
    events: Sequence[Event]
    left_out: Sequence[str]
    """Metrics that are not shown because another version logged them as another kind."""
    beside: RunData | None = None
    """The run that `observe.beside` names; None if it cannot be read."""

    @property
    def name(self) -> str:
        return self.run_dir.name.replace("_", " ")

    @property
    def supervised(self) -> bool:
        """True if the run samples nothing, so that reward and lag have no meaning."""
        if self.status is not None and self.status.measure == "loss":
            return True
        return not (self.rows.has("ratio/ess_ratio") or self.rows.has("tokens/generated"))

    @property
    def gac(self) -> Mapping[str, Any] | None:
        """Settings of the control that judges the cosine, with its newest `c_low`; None without
        such a control."""
        controls = _ShownSettings.model_validate(self.config).controls or ()
        for control in controls:
            if control.name in ("gac", "matched_norm"):
                settings = control.model_dump(exclude_unset=True)
                if settings.get("calibrate") is not None:
                    settings["c_low"] = self.rows.last("gac/c_low")
                return settings
        return None

    @property
    def lag_bound(self) -> float | None:
        """Value of `flow.async_ratio`. Rounded up, it bounds the lag of a sample's first token."""
        shown = _ShownSettings.model_validate(self.config)
        return None if shown.flow is None else shown.flow.async_ratio

    @property
    def headline(self) -> str:
        """One line with the result, the steps and the speed."""
        summary = self.summary
        steps = f"{summary.steps:,} {'step' if summary.steps == 1 else 'steps'}"
        speed = f"{summary.tokens_per_s:,.0f} tokens/s"
        parts = [f"{steps} in {span(summary.in_steps_s)}", speed]
        if summary.before is not None and summary.after is not None:
            ends = f"{summary.before:.3f} → {summary.after:.3f}"
            parts.insert(0, f"held-out {summary.measure} {ends}")
        if self.status is not None and self.status.phase != "finished":
            parts.append(f"{self.status.phase} at step {self.status.step} of {self.status.steps}")
        return "   ·   ".join(parts)


class RunReader:
    """Reader of a run that may still be running; reads each line of a growing file once. `alone`:
    do not read the run that `observe.beside` names."""

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
        """Return a value that changes whenever a file that `read` reads changes."""
        names = (METRICS_FILE, EVAL_FILE, events.STATUS_FILE, events.EVENTS_FILE, "config.yaml")
        paths = [self.run_dir / name for name in names]
        paths += sorted((self.run_dir / TIMELINE_FOLDER).glob("*.jsonl"))
        beside = None if self._beside is None else self._beside.fingerprint()
        return (*map(_stamp, paths), beside)

    def read(self) -> RunData:
        """Return the run as it is now.

        Raises ReportError if the directory is missing or has no finished step, and UserError for a
        damaged file.
        """
        try:
            return self._read()
        except UserError:
            # The readers may have stopped inside a block: the next call reads everything again.
            self._begin()
            raise

    def _read(self) -> RunData:
        run_dir = self.run_dir
        if not run_dir.is_dir():
            what = f"{run_dir} is not a directory"
            raise ReportError.of("RUN", what, "name the run.dir of a run")
        self._read_lines()
        status = read_status(run_dir)
        rows = self._rows
        if not rows:
            last = f"its last phase was `{status.phase}`" if status else "no run was started in it"
            what = f"{run_dir} has no finished step to report: metrics.jsonl is missing or empty, "
            raise ReportError.of("RUN", what + last, "wait for the first step, or see RUN/logs")
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
            # Only the drawn numbers are kept: a line has the score of every held-out prompt.
            kept = ("version", "mean_reward", "loss", "pass_at")
            self._evaluated += [{key: one[key] for key in kept if key in one} for one in evaluated]
        self._evaluated.sort(key=lambda one: int(one["version"]))

    def _read_beside(self, config: Mapping[str, Any]) -> RunData | None:
        """Return the run that `observe.beside` names, or None if it was removed since the start:
        `mar plan` and `mar train` refuse a missing one."""
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
    """Read a run once; raises as `RunReader.read`."""
    return RunReader(run_dir, alone=alone).read()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the tree of RUN/config.yaml; empty without the file. Raises ReportError."""
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
    """Return the window of the last `steps` steps since the run's last stop; None if no process
    wrote a timeline."""
    ended = [
        (int(step), at)
        for row in rows
        if (step := number(row, "step")) and (at := number(row, "time")) is not None
    ]
    took = [second for row in rows if (second := number(row, "time/step_s")) is not None]
    if not ended or not took:
        return None

    stop = max(STOP_S, STOP_STEPS * median(took))
    shown = [ended[-1]]
    for one in reversed(ended[:-1]):
        # Time in which the run was stopped would shrink all bars to nothing.
        if len(shown) > steps or shown[-1][1] - one[1] > stop:
            break
        shown.append(one)
    if len(shown) > steps:
        start = shown.pop()[1]
    else:
        start = shown[-1][1] - (took[-1] if len(shown) == 1 else median(took))
    end = ended[-1][1]

    cut = {track: _cut(spans, start, end) for track, spans in tracks.items()}
    inside = {track: spans for track, spans in cut.items() if spans}
    if not inside or end <= start:
        return None
    return TimelineWindow(start=start, end=end, steps=shown[::-1], tracks=inside)


def _cut(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    return [
        replace(span, start=max(start, span.start), end=min(end, span.end))
        for span in spans
        if span.end > start and span.start < end
    ]


def _activity(state: str, waiting_for: str) -> str:
    if state == "waiting" and waiting_for:
        return f"waiting for {waiting_for}"
    return f"{state} (waits for {waiting_for})" if waiting_for else state

"""Data of a run for the report, the dashboard and the terminal: metrics, status, config, and totals
computed from them.

Invariant: the data comes only from files of the run directory, so any run can be read, even while
it is active.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, ValidationError

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.settings_model import bare_name
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.metrics.json_lines import file_stamp
from megatron_async_rl.metrics.log import (
    EVAL_FILE,
    EvaluationReader,
    MetricsReader,
    number,
)
from megatron_async_rl.metrics.log import FILE as METRICS_FILE
from megatron_async_rl.metrics.timeline import FOLDER as TIMELINE_FOLDER
from megatron_async_rl.metrics.timeline import TimelineReader
from megatron_async_rl.report.anomalies import Anomaly, AnomalyFinder, AnomalyList
from megatron_async_rl.report.metric_rows import Evaluations, MetricRows, evaluation_curves
from megatron_async_rl.report.replays import ReplayData, ReplaysReader
from megatron_async_rl.report.timeline_window import TimelineWindow, timeline_window
from megatron_async_rl.watchdog import events
from megatron_async_rl.watchdog.events import Event, Status, read_events, read_status

REGIMES = ("kept", "projected", "skipped")
"""Names of the regimes, indexed by the code in `gac/regime`."""
IN_A_STEP = {
    "training": "time/train_s",
    "publishing": "time/publish_s",
    "waiting": "time/wait_batch_s",
}
"""Part of a step -> metric of the seconds that rank 0 spent in it."""
REASONS = {"flow/dropped_late": "late", "flow/dropped_equal": "of equal reward"}
"""Metric that counts dropped groups -> reason."""
EVENT_BYTES = 2**20
"""Number of bytes at the end of events.jsonl that are read."""


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
    """Settings that the report uses. Others are not checked, because another version may have
    written the config."""

    flow: _ShownFlow | None = None
    controls: list[Annotated[_RunControl, BeforeValidator(bare_name)]] | None = None
    samples: _ShownSamples | None = None
    observe: _ShownObserve | None = None


class ReportError(UserError):
    """Error for a missing directory, a run without a finished step, or an invalid config.yaml."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Totals of a run."""

    steps: int
    in_steps_s: float
    """Total seconds of the steps, without start-up, evaluation, checkpoints and stops."""
    generated: int
    """Number of sampled response tokens. `trained`: number of trained ones."""
    trained: int
    failed: int
    """Number of samples whose reward failed."""
    shares: Mapping[str, float]
    """Part of a step -> share of `in_steps_s`. The shares, including `other`, sum to 1."""
    regimes: Mapping[str, int]
    """Decision of the gradient alignment control -> number of steps; empty without the control."""
    busy_share: float | None
    """Mean over engines and steps; None if no row has it."""
    alive: tuple[int, int] | None
    """(engines that accept requests, all engines) at the end; None if no row has it."""
    restarts: int
    lag_mean: float | None
    """Mean lag over all trained tokens in weight versions."""
    lag_max: int | None
    before: float | None
    """Held-out `measure` before the first step. `after`: after the last step."""
    after: float | None
    measure: str
    """`reward`, or `loss` for a supervised run."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled response tokens (trained ones in a supervised run) per second in steps."""
        return (self.generated or self.trained) / self.in_steps_s if self.in_steps_s > 0 else 0.0

    @property
    def lag_ends(self) -> str:
        """Mean and largest lag as text; empty if neither was logged."""
        ends = (("mean {:.2f}", self.lag_mean), ("max {}", self.lag_max))
        return ", ".join(text.format(lag) for text, lag in ends if lag is not None)


def summarise_run(rows: MetricRows, status: Status | None) -> Summary:
    """Return the totals of the rows. `status` has the held-out results."""
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
    """Return the number of optimizer steps in each regime; empty without the control."""
    # Prefer the control's own counts, because a row may cover several optimizer steps.
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
    """Comparison of the dropped responses with the trained ones."""

    responses: int
    groups: dict[str, int]
    """Reason -> number of dropped groups."""
    length: float
    """Mean length of the dropped responses in tokens. `reward`: their mean reward."""
    trained_length: float | None
    """Mean length of the trained responses in tokens. `trained_reward`: their mean reward."""
    reward: float | None
    trained_reward: float | None

    @property
    def sentence(self) -> str:
        """The comparison as text, without a full stop."""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in self.groups.items())
        groups = f" (groups: {counts})" if counts else ""
        parts = [f"mean length {self.length:,.1f} tokens{_trained(self.trained_length, ',.1f')}"]
        if self.reward is not None:
            parts.append(f"mean reward {self.reward:.3f}{_trained(self.trained_reward, '.3f')}")
        were = "response was" if self.responses == 1 else "responses were"
        return f"{self.responses:,} {were} dropped{groups}: {', '.join(parts)}"


def compare_dropped(rows: MetricRows) -> DroppedSummary | None:
    """Return the comparison of dropped and trained responses; None if none was dropped."""
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


def _trained(value: float | None, form: str) -> str:
    return f" (trained on: {value:{form}})" if value is not None else ""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data of one run for the report."""

    run_dir: Path
    rows: MetricRows
    status: Status | None
    config: Mapping[str, Any]
    """Content of RUN/config.yaml; empty without the file."""
    summary: Summary
    window: TimelineWindow | None
    """None if no process wrote a timeline."""
    dropped: DroppedSummary | None
    """None if no response was dropped."""
    evaluations: Evaluations
    anomalies: Sequence[Anomaly]
    """The first anomalies of each kind, in order of steps."""
    anomaly_counts: Mapping[str, int]
    """Kind -> number of all anomalies."""
    events: Sequence[Event]
    omitted: Sequence[str]
    """Metrics that are not shown, because another version logged them with another kind."""
    beside: RunData | None = None
    """Data of the run in `observe.beside`; None if it is not set or cannot be read."""
    replays: Sequence[ReplayData] = ()
    """The newest replays of the run, oldest first."""

    @property
    def name(self) -> str:
        return self.run_dir.name.replace("_", " ")

    @property
    def supervised(self) -> bool:
        """True if the run samples no responses, so that it has no lag."""
        if self.status is not None and self.status.measure == "loss":
            return True
        return not (self.rows.has("ratio/ess_ratio") or self.rows.has("tokens/generated"))

    @property
    def gac(self) -> Mapping[str, Any] | None:
        """Settings of the control that uses the cosine (`gac` or `matched_norm`), with a calibrated
        `c_low`; None without such a control."""
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
        """Line of text with the result, the steps and the speed."""
        summary = self.summary
        steps = f"{summary.steps:,} {'step' if summary.steps == 1 else 'steps'}"
        parts = [f"{steps} in {span(summary.in_steps_s)}", f"{summary.tokens_per_s:,.0f} tokens/s"]
        if summary.before is not None and summary.after is not None:
            ends = f"{summary.before:.3f} → {summary.after:.3f}"
            parts.insert(0, f"held-out {summary.measure} {ends}")
        if self.status is not None and self.status.phase != "finished":
            parts.append(f"{self.status.phase} at step {self.status.step} of {self.status.steps}")
        return "   ·   ".join(parts)


class RunReader:
    """Reader of a run that may still be active. Reads each line of a growing file once. `alone`: do
    not read the run in `observe.beside` and the replays of the run."""

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
        self._replays = None if self._alone else ReplaysReader(self.run_dir)

    def fingerprint(self) -> Hashable:
        """Return a value that changes when one of the files that `read` uses changes."""
        names = (METRICS_FILE, EVAL_FILE, events.STATUS_FILE, events.EVENTS_FILE, "config.yaml")
        paths = [self.run_dir / name for name in names]
        paths += sorted((self.run_dir / TIMELINE_FOLDER).glob("*.jsonl"))
        beside = None if self._beside is None else self._beside.fingerprint()
        replays = None if self._replays is None else self._replays.fingerprint()
        return (*map(file_stamp, paths), beside, replays)

    def read(self) -> RunData:
        """Return the current data of the run. Raises ReportError if the directory is missing or has
        no finished step, and UserError for a damaged file."""
        try:
            return self._read()
        except UserError:
            # The readers may have stopped inside a block: the next call must start over.
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
            last = f"its last phase was `{status.phase}`" if status else "no run was started in it"
            what = f"{run_dir} has no finished step: metrics.jsonl is missing or empty, and {last}"
            raise ReportError.of("RUN", what, "wait for the first step, or see RUN/logs")
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
            anomaly_counts=self._anomalies.counts,
            events=read_events(run_dir, EVENT_BYTES),
            omitted=sorted(self._metrics.omitted),
            beside=None if self._alone else self._read_beside(config),
            replays=() if self._replays is None else self._replays.read(),
        )

    def _read_lines(self) -> None:
        """Read the new lines of metrics and evaluations."""
        for block in self._metrics.blocks():
            if block.restarted:
                self._rows, self._anomalies = MetricRows(), AnomalyList()
                self._finder = AnomalyFinder(self.run_dir)
            self._rows.add(block.rows)
            self._anomalies.add(self._finder.find(block.rows))

        for evaluated, restarted in self._evaluations.blocks():
            if restarted:
                self._evaluated = []
            # Keep only the keys of charts, because a line has the score of every held-out prompt.
            kept = ("version", "mean_reward", "loss", "pass_at")
            self._evaluated += [{key: one[key] for key in kept if key in one} for one in evaluated]
        self._evaluated.sort(key=lambda one: int(one["version"]))

    def _read_beside(self, config: Mapping[str, Any]) -> RunData | None:
        """Return the run in `observe.beside`; None if it is not set or cannot be read. `mar plan`
        and `mar train` refuse a missing run, but it may have been removed since."""
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
    """Return the data of a run. Raises the errors of `RunReader.read`."""
    return RunReader(run_dir, alone=alone).read()


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the content of RUN/config.yaml; empty without the file. Raises ReportError for an
    invalid file."""
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
    what = f"is not a valid config: {why}"
    raise ReportError.of(str(path), what, "correct the file, or delete it to show no settings")

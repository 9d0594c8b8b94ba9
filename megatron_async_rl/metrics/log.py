"""`RUN/metrics.jsonl`: one JSON object per batch; `RUN/eval.jsonl`: one per evaluated
version, with the result of each held-out prompt. Written by rank 0 and read by all.

Invariants:
- every line is valid JSON and flushed when the call returns; steps strictly grow from line to line
  of metrics.jsonl, and a version has one line in eval.jsonl;
- a resume cuts the lines of the steps that it will repeat off the end of a file, and keeps them in
  `metrics.cut.jsonl` and `eval.cut.jsonl`. It reads no further back than it cuts;
- only keys of the catalogue are written, each with a value of its kind; the sinks (TensorBoard,
  Prometheus) get the same numbers;
- an evaluation stands in the next line of metrics.jsonl; TensorBoard has it at the version that was
  evaluated, which may be steps before;
- what a run of another version logged under a name that is of another kind here is left out by
  the reader, which names it; the rest of the line is read.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_async_rl.config.durable import digest, reading
from megatron_async_rl.config.schema import ObserveConfig
from megatron_async_rl.metrics.catalogue import METRICS, Metric, MetricsError, Value, find_metric
from megatron_async_rl.metrics.json_lines import (
    LONGEST_LINE,
    GrowingFile,
    cut_lines,
    is_kept,
    lines_backwards,
    not_a_line,
)
from megatron_async_rl.metrics.sinks import Sink
from megatron_async_rl.metrics.trackers import BackgroundSink

FILE = "metrics.jsonl"
CUT_FILE = "metrics.cut.jsonl"
EVAL_FILE = "eval.jsonl"
EVAL_CUT_FILE = "eval.cut.jsonl"
WEIGHTS = "weights"
"""Field of a line: digest of the weights that the step produced."""
SCALARS = frozenset({"number", "total"})
"""Kinds of metrics that are one number."""

MetricRow = dict[str, Value]
"""One line as it is read: `step`, `version`, `time` and the keys of the catalogue; a value that was
not finite is a float again."""


class MetricsLog:
    """Written by rank 0 alone."""

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool,
        first_step: int,
        prometheus_port: int | None = None,
        prometheus_host: str = ObserveConfig.default_of("prometheus_host"),
        trackers: Sequence[Sink] = (),
    ) -> None:
        """`first_step`: the first step this process will log. Lines from it on are cut away: they
        will be written again. `trackers`: more sinks, which are closed with the log.

        Raises UserError when `prometheus_port` of `prometheus_host` cannot be listened on.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = list(trackers)
        if prometheus_port is not None or tensorboard:
            # Their libraries take a second to load, and readers of a run need neither.
            from megatron_async_rl.metrics.sinks import Prometheus, TensorBoard

            if prometheus_port is not None:
                self._sinks.append(Prometheus(run_dir, prometheus_port, prometheus_host))
            if tensorboard:
                writer = TensorBoard(run_dir / "tensorboard", first_step)
                self._sinks.append(BackgroundSink("TensorBoard", writer))
        self._path = run_dir / FILE
        # Before the file is opened for appending, so that steps grow from line to line.
        cut_from(run_dir, first_step)
        self._next_step = first_step
        self._evaluated: dict[str, Value] = {}
        self._last: tuple[int, str] | None = None
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Mapping[str, object], weights: str = "") -> None:
        """Write the line of `step`: optimizer steps done, so also the version of the weights it
        produced. weights: digest of these weights (weights/digest.version_digest); "" for none.

        Raises MetricsError on an unknown key, on a value of another kind than the catalogue's, and
        on a step logged before.
        """
        # Two lines of one step would count twice in every sum.
        if step < self._next_step:
            raise MetricsError(
                f"{self._path}: step {step} logged after step {self._next_step - 1}; each step has"
                " one line"
            )
        now = time.time()
        # All values before the first byte: a refused value leaves no half line.
        checked = {name: _checked(name, value) for name, value in values.items()}

        line: dict[str, object] = {"step": step, "version": step, "time": round(now, 3)}
        if weights:
            line[WEIGHTS] = weights
        line |= {name: _as_json(value) for name, value in (checked | self._evaluated).items()}
        # Values that are not finite are text by now; anything else is an error of this package.
        text = json.dumps(line, allow_nan=False)
        self._file.write(text + "\n")
        # Readers follow the file while the run continues.
        self._file.flush()

        self._next_step = step + 1
        # Without the line break, which a reader strips.
        self._last = step, digest(text.encode())
        self._evaluated = {}
        for sink in self._sinks:
            # After the file, which is the record; sinks may fail.
            sink.write(step, now, checked)

    def evaluated(self, version: int, values: Mapping[str, object]) -> None:
        """Add the numbers of the held-out evaluation of `version` to the next line. Of several
        evaluations between two steps, the line has the last."""
        self._evaluated = {name: _checked(name, value) for name, value in values.items()}
        for sink in self._sinks:
            sink.write_evaluation(version, time.time(), self._evaluated)

    def sync(self) -> dict[str, Any] | None:
        """Wait until the lines are on the disk. Return step and digest of the last line of this
        process. A resume compares them to check that the log and a checkpoint belong to one run."""
        os.fsync(self._file.fileno())
        return None if self._last is None else {"step": self._last[0], "digest": self._last[1]}

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def digest_of_step(run_dir: Path, step: int) -> str | None:
    """Return the digest of the line of `step`, as `MetricsLog.sync` returned it; None without such
    a line. Reads the file from its end. Raises UserError, FileNotFoundError."""
    path = run_dir / FILE
    with reading(path), open(path, "rb") as file:
        # From the end: a resume reads no further back than its checkpoint.
        for _, line in lines_backwards(file):
            if is_kept(line, lambda entry: int(entry["step"]) <= step):
                whole = is_kept(line, lambda entry: int(entry["step"]) == step)
                return digest(line.rstrip(b"\r\n")) if whole else None
    return None


def digests_of_steps(run_dir: Path) -> dict[int, str]:
    """Return the digest of the weights that each step produced, by step; none for lines without
    one. Raises UserError as the reader does."""
    found: dict[int, str] = {}
    for lines, restarted in GrowingFile(run_dir / FILE).blocks():
        if restarted:
            found.clear()
        for place, line in lines:
            try:
                row = json.loads(line)
                if WEIGHTS in row:
                    found[int(row["step"])] = str(row[WEIGHTS])
            except (ValueError, TypeError, KeyError) as error:
                where = f"{run_dir / FILE}:{place}"
                raise not_a_line(where, "a line of metrics", error) from error
    return found


def begins_after(run_dir: Path, step: int) -> bool:
    """Return whether the file has no line of a step up to `step`, and its first line, if it has
    one, is of a later step: a run that continued from `step` without the file began it. Raises
    UserError."""
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            line = file.readline(LONGEST_LINE)
    except FileNotFoundError:
        return True
    # The first line decides, because steps grow from line to line.
    return not line or is_kept(line, lambda entry: int(entry["step"]) > step)


def cut_from(run_dir: Path, first_step: int) -> int:
    """Move the lines of `first_step` and later, and a half-written one after them, to
    metrics.cut.jsonl; return their number."""
    return cut_lines(
        run_dir / FILE, run_dir / CUT_FILE, lambda line: int(line["step"]) < first_step
    )


def cut_unreadable(run_dir: Path) -> dict[str, int]:
    """Move lines at the end that are not metrics, or not evaluations, such as a line that a crash
    cut, to metrics.cut.jsonl and eval.cut.jsonl. Return their number by file, if there are any.
    Such a line before others is damage, which readers report."""
    cut = {
        FILE: cut_from(run_dir, sys.maxsize),
        EVAL_FILE: cut_lines(
            run_dir / EVAL_FILE, run_dir / EVAL_CUT_FILE, lambda line: int(line["version"]) >= 0
        ),
    }
    return {file: count for file, count in cut.items() if count}


def number(row: MetricRow, key: str) -> float | None:
    """Return the number under `key`; None if the row has none."""
    value = row.get(key)
    # A list of counts has no single number.
    return value if isinstance(value, int | float) else None


@dataclass(frozen=True)
class NewRows:
    rows: list[MetricRow]
    restarted: bool
    """True: forget every row read before."""


class MetricsReader:
    """Reader of metrics.jsonl while it grows. `newest`: begin this many bytes before the end."""

    def __init__(self, run_dir: Path, newest: int | None = None) -> None:
        self._file = GrowingFile(run_dir / FILE, newest)
        self._metrics: dict[str, Metric | None] = {}
        """Name in a line -> its metric. A look-up costs more than the rest of reading a value."""
        self._scalars = set[str]()
        """Names of metrics that are one number."""
        self._step = 0
        """The step of the last line."""
        self.left_out = set[str]()
        """Metrics of the lines so far that were of another kind when they were written."""

    def new_rows(self) -> NewRows:
        """Return the rows written since the last call; none while the file does not exist. Suits a
        file that is followed; `blocks` reads a long one.

        Raises UserError, with file and line, for a whole line that is not an object with a step.
        """
        rows: list[MetricRow] = []
        restarted = False
        for news in self.blocks():
            if news.restarted:
                restarted = True
                # Rows before a restart belong to steps that a resume takes again.
                rows.clear()
            rows += news.rows
        return NewRows(rows, restarted)

    def blocks(self) -> Iterator[NewRows]:
        """Yield the same rows in blocks: the rows of a long run are never in memory together."""
        for lines, restarted in self._file.blocks():
            # The file was cut or replaced, so steps begin again.
            if restarted:
                self._step = 0
            yield NewRows([self._row(line, place) for place, line in lines], restarted)

    def _row(self, line: bytes, place: int) -> MetricRow:
        try:
            row: MetricRow = json.loads(line)
            # Text, and no metric: `digests_of_steps` reads it.
            row.pop(WEIGHTS, None)
            # Most values are plain numbers; a long run has millions of them.
            others = [
                (key, value)
                for key, value in row.items()
                if key not in self._scalars or (type(value) is not float and type(value) is not int)
            ]
            for key, value in others:
                read = self._value(key, value)
                if read is None:
                    del row[key]
                    self.left_out.add(key)
                else:
                    row[key] = read
            # After the values, whose errors name the metric.
            given, version = number(row, "step") or 0, int(number(row, "version") or 0)
            step = int(given)
        except (ValueError, AttributeError, OverflowError, TypeError, MetricsError) as error:
            raise not_a_line(self._file.where(place), "a line of metrics", error) from error
        if step < 1 or step != given:
            raise not_a_line(self._file.where(place), "a line of metrics", "it has no step")
        if step <= self._step:
            # Charts, totals and anomalies are of one line a step, in order.
            why = f"its step is {step}, and that of the line before it {self._step}"
            raise not_a_line(self._file.where(place), "a line of metrics", why)
        self._step = step
        row["step"], row["version"] = step, version
        return row

    def _value(self, name: str, value: Any) -> Value | None:
        """Return a value of a line; None if it has another kind than in the catalogue, as in a file
        of another version. Raises MetricsError, ValueError for a value of no kind."""
        if name not in self._metrics:
            metric = self._metrics[name] = find_metric(name)
            if metric is None or metric.kind in SCALARS:
                self._scalars.add(name)
        metric = self._metrics[name]
        # Fast path: most lists have the right kind already.
        if type(value) is list and metric is not None and metric.kind not in SCALARS:
            kinds = set(map(type, value))
            if kinds <= {int} or (kinds <= {int, float} and metric.kind == "per engine"):
                return value
        return _read(name, value, metric)


def read_metrics(run_dir: Path) -> list[MetricRow]:
    """Return every row of a run in order of steps; empty if nothing was logged. Suits runs of some
    thousand steps."""
    return MetricsReader(run_dir).new_rows().rows


def read_newest(run_dir: Path, count: int) -> list[MetricRow]:
    """Return the last `count` rows of a run in order of steps. Reads only the end of the file.
    Raises UserError."""
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            whole = (line for _, line in lines_backwards(file) if line.endswith(b"\n"))
            lines = list(itertools.islice(whole, count))
    except FileNotFoundError:
        return []
    reader = MetricsReader(run_dir)
    # Line numbers are unknown when reading from the end.
    reader._file.whole = False
    return [reader._row(line, 0) for line in reversed(lines)]


def _checked(name: str, value: object) -> Value:
    """Return the value as plain Python, of the catalogue's kind."""
    metric = find_metric(name)
    if metric is None:
        # A misspelt key would otherwise be logged and never shown.
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
        raise MetricsError(
            f"unknown metric {name!r}; the nearest one is {near[0]!r}. Metrics are listed in"
            " metrics/catalogue.py"
        )
    return metric.check(name, value)


def _as_json(value: Value) -> object:
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    # JSON has no nan or inf.
    return value if math.isfinite(value) else str(value)


def _read(name: str, value: Any, metric: Metric | None) -> Value | None:
    value = _from_json(value)
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int | float) for one in values):
        raise MetricsError(f"{name!r} is neither a number nor a list of numbers: {value!r}")
    if metric is None:
        return value
    try:
        return metric.check(name, value)
    except MetricsError:
        return None


def _from_json(value: Any) -> Any:
    """Convert a value of a line; a string is a number that was not finite."""
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


class EvalLog:
    """Writer of eval.jsonl, for rank 0 alone. `versions`: evaluated versions whose lines stay; none
    in a fresh run."""

    def __init__(self, run_dir: Path, versions: Collection[int]) -> None:
        self._path = run_dir / EVAL_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        # Later evaluations are of weights that the resumed run computes again.
        cut_lines(
            self._path, run_dir / EVAL_CUT_FILE, lambda line: int(line["version"]) in versions
        )

    def append(self, result: Mapping[str, Any]) -> None:
        """`result`: plain JSON with a `version`."""
        line = {"version": result["version"], "time": round(time.time(), 3), **result}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


class _Evaluation(BaseModel):
    """Convert the numbers of a line that are drawn; the others stay unchanged."""

    version: int
    mean_reward: float | None = None
    loss: float | None = None
    pass_at: dict[int, float | None] = {}


class EvaluationReader:
    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / EVAL_FILE)

    def blocks(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield the evaluations written since the last call in blocks, and True if earlier ones no
        longer hold. Raises UserError, with file and line, for a whole line that is not an
        evaluation."""
        for lines, restarted in self._file.blocks():
            yield [self._read(line, place) for place, line in lines], restarted

    def _read(self, line: bytes, place: int) -> dict[str, Any]:
        where = self._file.where(place)
        try:
            result: dict[str, Any] = json.loads(line)
            _Evaluation.model_validate(result)
        except ValidationError as error:
            fault = error.errors()[0]
            why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise not_a_line(where, "an evaluation", why) from error
        except ValueError as error:
            raise not_a_line(where, "an evaluation", error) from error
        return result


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run in order of versions; empty if nothing was evaluated. Raises
    UserError as the reader does."""
    lines = [line for block, _ in EvaluationReader(run_dir).blocks() for line in block]
    return sorted(lines, key=lambda line: int(line["version"]))

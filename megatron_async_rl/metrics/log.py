"""Logs of metrics. `RUN/metrics.jsonl` has one JSON object per batch. `RUN/eval.jsonl` has one per
evaluated version, with the result of each held-out prompt. Only rank 0 writes these files.

Invariants:
- every line is valid JSON and is flushed when the call returns; steps strictly increase from line
  to line of metrics.jsonl, and a version has one line in eval.jsonl;
- a resume moves the lines of the steps that it will repeat from the end of each file to
  `metrics.cut.jsonl` and `eval.cut.jsonl`. It reads no further back than the last line to keep;
- the log writes only keys of the catalogue, each with a value of its kind; the sinks (TensorBoard,
  Prometheus, trackers) receive the same numbers;
- each line has a checksum, so that a reader reports a flipped bit;
- the next line of metrics.jsonl contains an evaluation; TensorBoard shows it at the evaluated
  version, which may be several steps older;
- if another version of this package logged a value of another kind under the same name, the reader
  omits this value, reports its name and reads the rest of the line.
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
    ChecksumMismatch,
    GrowingFile,
    cut_lines,
    is_kept,
    lines_backwards,
    not_a_line,
    with_checksum,
    without_checksum,
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
"""Kinds of metrics whose value is a single number."""

MetricRow = dict[str, Value]
"""One parsed line: `step`, `version`, `time` and keys of the catalogue. Values that were not finite
are floats again."""


class MetricsLog:
    """Writer of metrics.jsonl and of the sinks, for rank 0 only."""

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
        """Open the log. `first_step`: first step that this process will log; lines of this and
        later steps are moved to metrics.cut.jsonl. `trackers`: further sinks, which the log closes.

        Raises UserError if the Prometheus server cannot listen on its port and host.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = list(trackers)
        if prometheus_port is not None or tensorboard:
            # Import late: the libraries take a second to load, and readers of a run need neither.
            from megatron_async_rl.metrics.sinks import Prometheus, TensorBoard

            if prometheus_port is not None:
                self._sinks.append(Prometheus(run_dir, prometheus_port, prometheus_host))
            if tensorboard:
                writer = TensorBoard(run_dir / "tensorboard", first_step)
                self._sinks.append(BackgroundSink("TensorBoard", writer))
        self._path = run_dir / FILE
        # Cut before the file is opened for appending, because steps must increase.
        cut_from(run_dir, first_step)
        self._next_step = first_step
        self._evaluated: dict[str, Value] = {}
        self._last: tuple[int, str] | None = None
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Mapping[str, object], weights: str = "") -> None:
        """Write the line of `step`, the number of batches trained on, which is also the version of
        the weights that the step produced. weights: digest of these weights
        (weights/digest.version_digest); "" for none.

        Raises MetricsError for an unknown key, for a value that is not of the key's kind, and for a
        step that is not above the last one.
        """
        # Every sum over the lines would count a repeated step twice.
        if step < self._next_step:
            raise MetricsError(
                f"{self._path}: step {step} logged after step {self._next_step - 1}; each step must"
                " have exactly one line"
            )
        now = time.time()
        # Check all values before writing, so that a refused value leaves no partial line.
        checked = {name: _checked(name, value) for name, value in values.items()}

        line: dict[str, object] = {"step": step, "version": step, "time": round(now, 3)}
        if weights:
            line[WEIGHTS] = weights
        line |= {name: _as_json(value) for name, value in (checked | self._evaluated).items()}
        # `_as_json` has converted values that are not finite, so json finds none.
        text = with_checksum(json.dumps(line, allow_nan=False))
        self._file.write(text + "\n")
        # Flush, because readers follow the file while the run continues.
        self._file.flush()

        self._next_step = step + 1
        # The digest excludes the line break, as in `digest_of_step`.
        self._last = step, digest(text.encode())
        self._evaluated = {}
        for sink in self._sinks:
            # Write the file first: it is the record of the run, and a sink may fail.
            sink.write(step, now, checked)

    def evaluated(self, version: int, values: Mapping[str, object]) -> None:
        """Add the numbers of the held-out evaluation of `version` to the next line. If several
        evaluations end between two steps, the line has the last one."""
        self._evaluated = {name: _checked(name, value) for name, value in values.items()}
        for sink in self._sinks:
            sink.write_evaluation(version, time.time(), self._evaluated)

    def sync(self) -> dict[str, Any] | None:
        """Wait until all lines are on disk. Return step and digest of the last line that this
        process wrote; None if it wrote none. A checkpoint stores them, so that a resume can check
        that the log and the checkpoint belong to the same run."""
        os.fsync(self._file.fileno())
        return None if self._last is None else {"step": self._last[0], "digest": self._last[1]}

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def digest_of_step(run_dir: Path, step: int) -> str | None:
    """Return the digest of the line of `step`, as `MetricsLog.sync` does; None if there is no such
    line. Raises UserError, also for a line that does not match its checksum; FileNotFoundError."""
    path = run_dir / FILE
    with reading(path), open(path, "rb") as file:
        # Read from the end, so that a resume reads no further back than its checkpoint.
        for _, line in lines_backwards(file):
            if is_kept(line, lambda entry: int(entry["step"]) <= step):
                if not is_kept(line, lambda entry: int(entry["step"]) == step):
                    return None
                try:
                    without_checksum(line)
                except ChecksumMismatch as error:
                    where = f"{path}, step {step}"
                    raise not_a_line(where, "a line of metrics", error) from error
                return digest(line.rstrip(b"\r\n"))
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
                row = json.loads(without_checksum(line))
                if WEIGHTS in row:
                    found[int(row["step"])] = str(row[WEIGHTS])
            except (ValueError, TypeError, KeyError) as error:
                where = f"{run_dir / FILE}:{place}"
                raise not_a_line(where, "a line of metrics", error) from error
    return found


def begins_after(run_dir: Path, step: int) -> bool:
    """Return True if the first line of the file is of a step after `step`, or if there is no line.
    Such a file was begun by a run that continued from `step` without the earlier file. Raises
    UserError."""
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            line = file.readline(LONGEST_LINE)
    except FileNotFoundError:
        return True
    # Steps increase from line to line, so the first line is enough.
    return not line or is_kept(line, lambda entry: int(entry["step"]) > step)


def cut_from(run_dir: Path, first_step: int) -> int:
    """Move the lines of `first_step` and later steps, and a partial line after them, to
    metrics.cut.jsonl. Return the number of moved lines."""
    return cut_lines(
        run_dir / FILE, run_dir / CUT_FILE, lambda line: int(line["step"]) < first_step
    )


def cut_unreadable(run_dir: Path) -> dict[str, int]:
    """Move invalid lines at the end of metrics.jsonl and eval.jsonl, such as a line that a crash
    truncated, to metrics.cut.jsonl and eval.cut.jsonl. Return the number of moved lines by file,
    without files that had none. An invalid line before valid ones stays; readers report it."""
    cut = {
        FILE: cut_from(run_dir, sys.maxsize),
        EVAL_FILE: cut_lines(
            run_dir / EVAL_FILE, run_dir / EVAL_CUT_FILE, lambda line: int(line["version"]) >= 0
        ),
    }
    return {file: count for file, count in cut.items() if count}


def number(row: MetricRow, key: str) -> float | None:
    """Return the number under `key`; None if the row has no such key or its value is a list."""
    value = row.get(key)
    return value if isinstance(value, int | float) else None


@dataclass(frozen=True)
class NewRows:
    """Rows that a reader has not returned before."""

    rows: list[MetricRow]
    restarted: bool
    """True if the file was cut or replaced: rows returned earlier are no longer valid."""


class MetricsReader:
    """Reader of a growing metrics.jsonl. `newest`: number of bytes before the end at which reading
    begins; None reads the whole file."""

    def __init__(self, run_dir: Path, newest: int | None = None) -> None:
        self._file = GrowingFile(run_dir / FILE, newest)
        self._metrics: dict[str, Metric | None] = {}
        """Cache: name in a line -> its metric. `find_metric` takes longer than all other work on a
        value."""
        self._scalars = set[str]()
        """Names of metrics that are single numbers."""
        self._step = 0
        """Step of the last line."""
        self.omitted = set[str]()
        """Names of omitted metrics, which had another kind when they were written."""

    def new_rows(self) -> NewRows:
        """Return the rows written since the last call; empty while the file does not exist. Use
        `blocks` to read a long file.

        Raises UserError, with file and line, for a complete line that is not an object with a step.
        """
        rows: list[MetricRow] = []
        restarted = False
        for block in self.blocks():
            if block.restarted:
                restarted = True
                # A resume repeats the steps of earlier rows.
                rows.clear()
            rows += block.rows
        return NewRows(rows, restarted)

    def blocks(self) -> Iterator[NewRows]:
        """Yield the rows of `new_rows` in blocks, so that the rows of a long run are never in
        memory all at once."""
        for lines, restarted in self._file.blocks():
            # The file was cut or replaced, so its steps may be lower than the last one.
            if restarted:
                self._step = 0
            yield NewRows([self._row(line, line_number) for line_number, line in lines], restarted)

    def _row(self, line: bytes, line_number: int) -> MetricRow:
        """Return the row of a line. Raises UserError for an invalid line."""
        try:
            row: MetricRow = json.loads(without_checksum(line))
            # Text, and no metric: `digests_of_steps` reads it.
            row.pop(WEIGHTS, None)
            # Skip plain numbers, which are valid: a long run has millions of them.
            unchecked = [
                (key, value)
                for key, value in row.items()
                if key not in self._scalars or (type(value) is not float and type(value) is not int)
            ]
            for key, value in unchecked:
                read = self._value(key, value)
                if read is None:
                    del row[key]
                    self.omitted.add(key)
                else:
                    row[key] = read
            # Check the step after the values, whose errors name the metric.
            raw_step, version = number(row, "step") or 0, int(number(row, "version") or 0)
            step = int(raw_step)
        except (ValueError, AttributeError, OverflowError, TypeError, MetricsError) as error:
            raise not_a_line(self._file.where(line_number), "a line of metrics", error) from error
        if step < 1 or step != raw_step:
            raise not_a_line(self._file.where(line_number), "a line of metrics", "it has no step")
        if step <= self._step:
            # Charts, totals and anomalies assume one line per step, in order.
            why = f"its step is {step}, but the previous line has step {self._step}"
            raise not_a_line(self._file.where(line_number), "a line of metrics", why)
        self._step = step
        row["step"], row["version"] = step, version
        return row

    def _value(self, name: str, value: Any) -> Value | None:
        """Return a parsed value; None if its kind differs from the catalogue's, as in a file of
        another version. Raises MetricsError or ValueError for an invalid value."""
        if name not in self._metrics:
            metric = self._metrics[name] = find_metric(name)
            if metric is None or metric.kind in SCALARS:
                self._scalars.add(name)
        metric = self._metrics[name]
        # Fast path: most lists are already valid.
        if type(value) is list and metric is not None and metric.kind not in SCALARS:
            kinds = set(map(type, value))
            if kinds <= {int} or (kinds <= {int, float} and metric.kind == "per engine"):
                return value
        return _read(name, value, metric)


def read_metrics(run_dir: Path) -> list[MetricRow]:
    """Return all rows of a run in order of steps; empty if nothing was logged. All rows are in
    memory, so use this function only for runs of up to a few thousand steps."""
    return MetricsReader(run_dir).new_rows().rows


def read_newest(run_dir: Path, count: int) -> list[MetricRow]:
    """Return the last `count` rows of a run in order of steps, reading only the end of the file.
    Raises UserError for an invalid line."""
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            complete = (line for _, line in lines_backwards(file) if line.endswith(b"\n"))
            lines = list(itertools.islice(complete, count))
    except FileNotFoundError:
        return []
    reader = MetricsReader(run_dir)
    # Reading from the end gives no line numbers, so error messages must omit them.
    reader._file.whole = False
    return [reader._row(line, 0) for line in reversed(lines)]


def _checked(name: str, value: object) -> Value:
    """Return the value in plain Python types. Raises MetricsError for an unknown name, and for a
    value that is not of the metric's kind."""
    metric = find_metric(name)
    if metric is None:
        # Refuse a misspelt key, because no reader would show its values.
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
        raise MetricsError(
            f"unknown metric {name!r}; the nearest one is {near[0]!r}. A method of your own names"
            " its metrics own/NAME; the package's are in metrics/catalogue.py"
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
    """Return a value with its strings converted to floats: nan, inf or -inf."""
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


class EvalLog:
    """Writer of eval.jsonl, for rank 0 only. `versions`: evaluated versions whose lines stay in the
    file; empty in a new run."""

    def __init__(self, run_dir: Path, versions: Collection[int]) -> None:
        self._path = run_dir / EVAL_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        # Remove later evaluations, because the resumed run computes those weights again.
        cut_lines(
            self._path, run_dir / EVAL_CUT_FILE, lambda line: int(line["version"]) in versions
        )

    def append(self, result: Mapping[str, Any]) -> None:
        """Append the line of one evaluation. `result`: plain JSON values with a `version`."""
        line = {"version": result["version"], "time": round(time.time(), 3), **result}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(with_checksum(json.dumps(line, allow_nan=False)) + "\n")


class _Evaluation(BaseModel):
    """Types of the keys that charts use. A line may have other keys."""

    version: int
    mean_reward: float | None = None
    loss: float | None = None
    pass_at: dict[int, float | None] = {}


class EvaluationReader:
    """Reader of a growing eval.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / EVAL_FILE)

    def blocks(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield the evaluations written since the last call in blocks, each with True if earlier
        evaluations are no longer valid. Raises UserError, with file and line, for a complete line
        that is not an evaluation."""
        for lines, restarted in self._file.blocks():
            yield [self._read(line, line_number) for line_number, line in lines], restarted

    def _read(self, line: bytes, line_number: int) -> dict[str, Any]:
        where = self._file.where(line_number)
        try:
            result: dict[str, Any] = json.loads(without_checksum(line))
            _Evaluation.model_validate(result)
        except ValidationError as error:
            fault = error.errors()[0]
            why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise not_a_line(where, "an evaluation", why) from error
        except ValueError as error:
            raise not_a_line(where, "an evaluation", error) from error
        return result


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in order of versions; empty if there are none. Raises
    UserError for an invalid line."""
    lines = [line for block, _ in EvaluationReader(run_dir).blocks() for line in block]
    return sorted(lines, key=lambda line: int(line["version"]))

"""`RUN/metrics.jsonl`: one JSON object per batch; `RUN/eval.jsonl`: one per evaluated
version, with the result of each held-out prompt. Written by rank 0 and read by all.

Invariants:
- every line is valid JSON and flushed when the call returns; steps strictly grow from line to line
  of metrics.jsonl, and a version has one line in eval.jsonl;
- a resume cuts the lines of what it will repeat, and keeps them in `metrics.cut.jsonl` and
  `eval.cut.jsonl`;
- only keys of the catalogue are written, each with a value of its kind; the sinks (TensorBoard,
  Prometheus) get the same numbers;
- an evaluation stands in the next line of metrics.jsonl; TensorBoard has it at the version that was
  evaluated, which may be steps before;
- what a run of another version logged under a name that is of another kind here is left out by
  the reader, which names it; the rest of the line is read;
- a reader reads a line once and only when it is whole; when the file is replaced (a resume cuts
  it), reading starts over and says so.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.catalogue import METRICS, MetricsError, Value, find_metric
from megatron_async_rl.metrics.trackers import BackgroundSink

if TYPE_CHECKING:
    from megatron_async_rl.metrics.sinks import Sink


FILE = "metrics.jsonl"
CUT_FILE = "metrics.cut.jsonl"
EVAL_FILE = "eval.jsonl"
EVAL_CUT_FILE = "eval.cut.jsonl"

Row = dict[str, Value]
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
        trackers: Sequence[Sink] = (),
    ) -> None:
        """`first_step`: the first step this process will log. Lines from it on are cut away: they
        will be written again. `trackers`: more sinks, which are closed with the log.

        Raises UserError when `prometheus_port` is already in use.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = list(trackers)
        if prometheus_port is not None or tensorboard:
            # Their libraries take a second to load, and whoever only reads a run needs neither.
            from megatron_async_rl.metrics.sinks import Prometheus, TensorBoard

            if prometheus_port is not None:
                self._sinks.append(Prometheus(run_dir, prometheus_port))
            if tensorboard:
                writer = TensorBoard(run_dir / "tensorboard", first_step)
                self._sinks.append(BackgroundSink("TensorBoard", writer))
        self._path = run_dir / FILE
        cut_from(run_dir, first_step)
        self._next_step = first_step
        self._evaluated: dict[str, Value] = {}
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Writes the line of `step`: optimizer steps done, so also the version of the weights it
        produced.

        Raises MetricsError on an unknown key, on a value of another kind than the catalogue's, and
        on a step logged before.
        """
        if step < self._next_step:
            raise MetricsError(
                f"{self._path}: step {step} logged after step {self._next_step - 1}; each step has"
                " one line"
            )
        now = time.time()
        checked = {name: _checked(name, value) for name, value in values.items()}

        line: dict[str, object] = {"step": step, "version": step, "time": round(now, 3)}
        line |= {name: _as_json(value) for name, value in (checked | self._evaluated).items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

        self._next_step = step + 1
        self._evaluated = {}
        for sink in self._sinks:
            sink.write(step, now, checked)

    def evaluated(self, version: int, values: Mapping[str, object]) -> None:
        """Takes the numbers of the held-out evaluation of `version`. Of several between two steps
        the line has the last."""
        self._evaluated = {name: _checked(name, value) for name, value in values.items()}
        for sink in self._sinks:
            sink.write_evaluation(version, time.time(), self._evaluated)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def cut_from(run_dir: Path, first_step: int) -> int:
    """Moves the lines of `first_step` and later, and a half-written one, to metrics.cut.jsonl;
    returns how many."""
    return cut_lines(
        run_dir / FILE, run_dir / CUT_FILE, lambda line: int(line["step"]) < first_step
    )


def cut_unreadable(run_dir: Path) -> int:
    """Moves lines that are not metrics, such as one that a crash cut in the middle, to
    metrics.cut.jsonl; returns how many."""
    return cut_from(run_dir, sys.maxsize)


def cut_lines(path: Path, aside: Path, keeps: Callable[[dict[str, Any]], bool]) -> int:
    """Moves the lines of a file of JSON objects that `keeps` refuses, and those it cannot judge, to
    the end of `aside`; returns how many.

    The lines that stay are replaced whole: a crash in here leaves the old file or the new one.
    """
    if not path.exists():
        return 0
    kept: list[str] = []
    cut: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            (kept if keeps(json.loads(line)) else cut).append(line)
        except (ValueError, KeyError, TypeError):
            cut.append(json.dumps({"unreadable": line}))

    if cut or not text.endswith("\n"):
        with open(aside, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in cut)
        write_file(path, "".join(f"{line}\n" for line in kept))
    return len(cut)


def number(row: Row, key: str) -> float | None:
    """The number under `key`; None where the row has none."""
    value = row.get(key)
    return value if isinstance(value, int | float) else None


class GrowingFile:
    """A file of lines that another process appends to; each is read once, when it is whole.

    `newest`: begin so many bytes before the end, for a file whose older lines nobody needs.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path = path
        self.line = 0
        """Lines read so far."""
        self._newest = newest
        self._inode = -1
        self._offset = 0

    def new_lines(self) -> tuple[list[bytes], bool]:
        """Lines since the last call, and True where the file was replaced or cut, so that those of
        earlier calls are to be forgotten. No lines while there is no file."""
        try:
            with open(self.path, "rb") as file:
                about = os.fstat(file.fileno())
                replaced = about.st_ino != self._inode or about.st_size < self._offset
                restarted = replaced and self._offset > 0
                if replaced:
                    self._inode, self._offset, self.line = about.st_ino, 0, 0
                    if self._newest is not None and about.st_size > self._newest:
                        file.seek(about.st_size - self._newest)
                        file.readline()
                        self._offset = file.tell()
                file.seek(self._offset)
                whole = file.read()
        except FileNotFoundError:
            restarted, self._offset = self._offset > 0, 0
            return [], restarted

        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines()
        self.line += len(lines)
        return lines, restarted


@dataclass(frozen=True)
class NewRows:
    rows: list[Row]
    restarted: bool
    """True: forget every row read before."""


class MetricsReader:
    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / FILE)
        self.left_out = set[str]()
        """Metrics of the lines so far that were of another kind when they were written."""

    def new_rows(self) -> NewRows:
        """Rows written since the last call; none while the file does not exist.

        Raises UserError, with file and line, for a whole line that is not an object with a step.
        """
        lines, restarted = self._file.new_lines()
        first = self._file.line - len(lines) + 1
        rows = [self._row(line, number) for number, line in enumerate(lines, first)]
        return NewRows(rows, restarted)

    def _row(self, line: bytes, place: int) -> Row:
        where = f"{self._file.path}:{place}"
        try:
            found = {key: _read(key, value) for key, value in json.loads(line).items()}
            row = {key: value for key, value in found.items() if value is not None}
            step, version = (int(number(row, key) or 0) for key in ("step", "version"))
        except (ValueError, AttributeError, OverflowError, TypeError, MetricsError) as error:
            raise _not(where, "a line of metrics", error) from error
        if step < 1:
            raise _not(where, "a line of metrics", "it has no step")
        self.left_out |= found.keys() - row.keys()
        return row | {"step": step, "version": version}


def read_metrics(run_dir: Path) -> list[Row]:
    """Every row of a run, in order of steps; empty when nothing was logged."""
    return MetricsReader(run_dir).new_rows().rows


def _checked(name: str, value: object) -> Value:
    """The value as plain Python, of the kind the catalogue says."""
    metric = find_metric(name)
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
        raise MetricsError(
            f"unknown metric {name!r}; the nearest one is {near[0]!r}. Metrics are listed in"
            " metrics/catalogue.py"
        )
    return metric.check(name, value)


def _as_json(value: Value) -> object:
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    return value if math.isfinite(value) else str(value)


def _read(name: str, value: Any) -> Value | None:
    """A value of a line; None where it is of another kind than the catalogue says, as of another
    version. Raises MetricsError, ValueError for what is of no kind."""
    value = _from_json(value)
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int | float) for one in values):
        raise MetricsError(f"{name!r} is neither a number nor a list of numbers: {value!r}")
    metric = find_metric(name)
    if metric is None:
        return value
    try:
        return metric.check(name, value)
    except MetricsError:
        return None


def _not(where: str, noun: str, why: object) -> UserError:
    return UserError.of(where, f"is not {noun}: {why}", "remove that line")


def _from_json(value: Any) -> Any:
    """A string is a number that was not finite."""
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


class EvalLog:
    """Written by rank 0 alone. `versions`: those whose lines are right and stay; none in a fresh
    run."""

    def __init__(self, run_dir: Path, versions: Collection[int]) -> None:
        self._path = run_dir / EVAL_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        cut_lines(
            self._path, run_dir / EVAL_CUT_FILE, lambda line: int(line["version"]) in versions
        )

    def append(self, result: Mapping[str, Any]) -> None:
        """`result`: plain JSON with a `version`."""
        line = {"version": result["version"], "time": round(time.time(), 3), **result}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


class _Evaluation(BaseModel):
    """The numbers of a line that are drawn; the others stay as they are."""

    version: int
    mean_reward: float | None = None
    loss: float | None = None
    pass_at: dict[int, float | None] = {}


class EvaluationReader:
    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / EVAL_FILE)

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """Evaluations written since the last call, and True where earlier ones are to be forgotten.
        Raises UserError, with file and line, for a whole line that is not an evaluation."""
        lines, restarted = self._file.new_lines()
        first = self._file.line - len(lines) + 1
        return [self._read(line, place) for place, line in enumerate(lines, first)], restarted

    def _read(self, line: bytes, place: int) -> dict[str, Any]:
        where = f"{self._file.path}:{place}"
        try:
            result: dict[str, Any] = json.loads(line)
            _Evaluation.model_validate(result)
        except ValidationError as error:
            fault = error.errors()[0]
            why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise _not(where, "an evaluation", why) from error
        except ValueError as error:
            raise _not(where, "an evaluation", error) from error
        return result


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run, in order of versions; empty where nothing was evaluated. Raises
    UserError as the reader does."""
    lines, _ = EvaluationReader(run_dir).new_lines()
    return sorted(lines, key=lambda line: int(line["version"]))

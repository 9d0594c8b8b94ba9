"""`RUN/metrics.jsonl`: one JSON object per optimizer step, and the same numbers in TensorBoard and for Prometheus.

Invariants:
- every line is valid JSON and flushed when `log` returns; steps strictly grow from line to line;
- a resume cuts the lines of the steps it will repeat, and keeps them in `metrics.cut.jsonl`;
- only keys of the catalogue (`keys.py`) are written, each with a value of its kind;
- an evaluation stands in the next line; TensorBoard has it at the version that was evaluated, which may be steps before.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_async_rl.observe.keys import KEYS, Kind, find_key

if TYPE_CHECKING:
    from megatron_async_rl.observe.prometheus import Prometheus
    from megatron_async_rl.observe.tensorboard import TensorBoard

FILE = "metrics.jsonl"
CUT_FILE = "metrics.cut.jsonl"

Value = float | list[int] | list[float]
"""A number, counts, or a number for each engine."""
EXPECTED: Mapping[Kind, str] = {
    "number": "a number",
    "total": "a number",
    "counts": "a list of integers",
    "doubling counts": "a list of integers",
    "per engine": "a list of numbers",
}


class MetricsError(Exception):
    """A key, a value or a step that the log cannot take."""


class MetricsLog:
    """Written by rank 0 alone."""

    def __init__(self, run_dir: Path, *, tensorboard: bool, first_step: int, prometheus_port: int | None = None) -> None:
        """`first_step`: the first step this process will log. Lines from it on are cut away: they will be written again.

        Raises MetricsError when `prometheus_port` cannot be had.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._prometheus: Prometheus | None = None
        if prometheus_port is not None:
            from megatron_async_rl.observe.prometheus import Prometheus

            self._prometheus = Prometheus(run_dir, prometheus_port)
        self._path = run_dir / FILE
        cut_from(run_dir, first_step)
        self._next_step = first_step
        self._evaluated: dict[str, Value] = {}
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            from megatron_async_rl.observe.tensorboard import TensorBoard

            self._tensorboard = TensorBoard(run_dir / "tensorboard", first_step)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Writes the line of `step`: optimizer steps done, so also the version of the weights it produced.

        Raises MetricsError on an unknown key, on a value of another kind than the catalogue's, and on a step logged before.
        """
        if step < self._next_step:
            raise MetricsError(f"{self._path}: step {step} logged after step {self._next_step - 1}; each step has one line")
        now = time.time()
        checked = {name: _checked(name, value) for name, value in values.items()}
        line: dict[str, object] = {"step": step, "version": step, "time": round(now, 3)}
        line |= {name: _as_json(value) for name, value in (checked | self._evaluated).items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._next_step = step + 1
        self._evaluated = {}
        if self._tensorboard is not None:
            self._tensorboard.write(step, now, checked)
        if self._prometheus is not None:
            self._prometheus.write(step, checked)

    def evaluated(self, version: int, values: Mapping[str, object]) -> None:
        """Of the held-out evaluation of `version`. Of several between two steps the line has the last."""
        self._evaluated = {name: _checked(name, value) for name, value in values.items()}
        if self._tensorboard is not None:
            self._tensorboard.write(version, time.time(), self._evaluated)
        if self._prometheus is not None:
            self._prometheus.evaluated(self._evaluated)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._prometheus is not None:
            self._prometheus.close()


def cut_from(run_dir: Path, first_step: int) -> int:
    """Moves the lines of `first_step` and later, and a half-written one, to metrics.cut.jsonl; returns how many.

    The lines that stay are replaced whole: a crash in here leaves the old file or the new one.
    """
    path = run_dir / FILE
    if not path.exists():
        return 0
    kept: list[str] = []
    cut: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            cut.append(json.dumps({"unreadable": line}))
            continue
        (kept if step < first_step else cut).append(line)
    if cut or not text.endswith("\n"):
        with open(run_dir / CUT_FILE, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in cut)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)
    return len(cut)


def cut_unreadable(run_dir: Path) -> int:
    """Moves lines that are not metrics, such as one that a crash cut in the middle, to metrics.cut.jsonl; returns how many."""
    return cut_from(run_dir, sys.maxsize)


def _checked(name: str, value: object) -> Value:
    """The value as plain Python, of the kind the catalogue says."""
    key = find_key(name)
    if key is None:
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.0)
        raise MetricsError(f"unknown metric {name!r}; the nearest one is {near[0]!r}. Metrics are listed in observe/keys.py")
    if key.kind in ("number", "total") and isinstance(value, Real):
        return _plain(value)
    if key.kind not in ("number", "total") and isinstance(value, Sequence) and not isinstance(value, str):
        of = Real if key.kind == "per engine" else Integral
        if all(isinstance(entry, of) for entry in value):
            return [_plain(entry) for entry in value]
    raise MetricsError(f"metric {name!r} is {EXPECTED[key.kind]}, got {type(value).__name__}: {value!r}")


def _plain(value: Real) -> float:
    return int(value) if isinstance(value, Integral) else float(value)


def _as_json(value: Value) -> object:
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    return value if math.isfinite(value) else str(value)

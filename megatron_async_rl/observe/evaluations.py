"""`RUN/eval.jsonl`: one JSON object per evaluated version, with what each held-out prompt came to.

Invariants:
- a version has one line: a resume cuts those it will evaluate again and keeps them in `eval.cut.jsonl`;
- every line is valid JSON and on disk when `append` returns.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "eval.jsonl"
CUT_FILE = "eval.cut.jsonl"


class EvalLog:
    """Written by rank 0 alone. `versions`: those whose lines are right and stay; none in a fresh run."""

    def __init__(self, run_dir: Path, versions: Collection[int]) -> None:
        self._path = run_dir / FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._cut(versions, run_dir / CUT_FILE)

    def append(self, result: Mapping[str, Any]) -> None:
        """`result`: plain JSON with a `version`."""
        line = {"version": result["version"], "time": round(time.time(), 3), **result}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _cut(self, versions: Collection[int], aside: Path) -> None:
        kept: list[str] = []
        cut: list[str] = []
        text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                version = int(json.loads(line)["version"])
            except (ValueError, KeyError, TypeError):
                cut.append(json.dumps({"unreadable": line}))
                continue
            (kept if version in versions else cut).append(line)
        if not cut and text.endswith("\n"):
            return
        with open(aside, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in cut)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, self._path)


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run, in order of versions; empty where nothing was evaluated."""
    path = run_dir / FILE
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return sorted((json.loads(line) for line in whole.splitlines()), key=lambda line: int(line["version"]))


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """A run's evaluations as curves over the versions."""

    versions: NDArray[np.int64]
    """[n], growing; empty where nothing was evaluated."""
    mean: NDArray[np.float64]
    """[n]: mean reward, nan where every reward failed."""
    pass_at: Mapping[int, NDArray[np.float64]]
    """k -> [n]: pass@k, nan for versions that were evaluated without this k."""


def evaluation_curves(run_dir: Path) -> Evaluations:
    lines = read_evaluations(run_dir)
    ks = sorted({int(k) for line in lines for k in line["pass_at"]})
    return Evaluations(
        versions=np.array([line["version"] for line in lines], dtype=np.int64),
        mean=np.array([line["mean_reward"] for line in lines], dtype=np.float64),
        pass_at={k: np.array([line["pass_at"].get(str(k)) for line in lines], dtype=np.float64) for k in ks},
    )

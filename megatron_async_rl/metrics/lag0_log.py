"""`RUN/lag0.jsonl`: differences between the log-probs of trainer and engine at lag 0, for each step
that has such tokens. `mar verify` compares them by depth, engine and version.

    {"step": 12, "tokens": [0, 0, 96, 32], "sums": [0, 0, 1e-05, 4e-06],   by depth bucket
     "ids": ["88-0", ...], "means": [1.1e-07, ...],                        by sample
     "checksum": ...}

Bucket i has the tokens with 2^i to 2^(i + 1) - 1 tokens before them. A sum or mean is "inf" if the
difference of one of its tokens is not finite. Written by rank 0. A resume moves the lines of the
steps that it will repeat to lag0.cut.jsonl.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.metrics.json_lines import cut_lines, read_lines, with_checksum

FILE = "lag0.jsonl"
CUT_FILE = "lag0.cut.jsonl"


def _difference(value: float) -> float:
    """Return a difference of an earlier version that is not a number as infinity."""
    if value < 0.0:
        raise ValueError(f"is {value}; a difference is at least 0")
    # Readers add up and compare, which is not defined for other values.
    return math.inf if math.isnan(value) else value


Nats = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_difference)]
"""Absolute difference of two log-probs; infinite if one of them is not finite."""


class Lag0Line(Strict):
    """One line of the file."""

    step: int
    tokens: tuple[int, ...]
    sums: tuple[Nats, ...]
    ids: tuple[str, ...]
    means: tuple[Nats, ...]


class Lag0Log:
    """Writer. first_step: the first step that this process will log."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        path = run_dir / FILE
        cut_lines(path, run_dir / CUT_FILE, lambda line: int(line["step"]) < first_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(
        self,
        step: int,
        tokens: Sequence[int],
        sums: Sequence[float],
        ids: Sequence[str],
        means: Sequence[float],
    ) -> None:
        """Write the line of `step`; see policy/lag0.py for the values."""
        # Four digits: the file has a number for each sample of a long run.
        line = {
            "step": step,
            "tokens": list(tokens),
            "sums": [_short(value) for value in sums],
            "ids": list(ids),
            "means": [_short(value) for value in means],
        }
        self._file.write(with_checksum(json.dumps(line, allow_nan=False)) + "\n")
        # Readers follow the file while the run continues.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _short(value: float) -> float | str:
    # JSON has no infinity. A difference that is not a number is as wrong as an infinite one.
    return float(f"{value:.4g}") if math.isfinite(value) else "inf"


def read_lag0(run_dir: Path) -> Iterator[Lag0Line]:
    """Yield the complete lines in order; none without the file. Raises UserError for another
    line."""
    return read_lines(run_dir / FILE, Lag0Line, "differences at lag 0")

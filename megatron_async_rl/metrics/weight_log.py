"""`RUN/weights.jsonl`: eight bits of each tensor's digest for every version of the weights, which
name the tensors that differ between two runs. metrics.jsonl has the digest of the whole version.

    {"step": 0, "names": ["lm_head.weight", ...], "checksum": ...}   before a process's first line
    {"step": 12, "tensors": "<base64, a byte per name>", "checksum": ...}

Written by rank 0. A resume cuts the lines of the steps that it will repeat.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import reading
from megatron_async_rl.metrics.json_lines import (
    cut_lines,
    not_a_line,
    with_checksum,
    without_checksum,
)

FILE = "weights.jsonl"
CUT_FILE = "weights.cut.jsonl"


class WeightLog:
    """Writer. first_step: the first version that this process will log; later lines are moved to
    weights.cut.jsonl."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        path = run_dir / FILE
        cut_lines(path, run_dir / CUT_FILE, lambda line: int(line["step"]) < first_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._names: list[str] = []

    def log(self, step: int, digests: Mapping[str, str]) -> None:
        """Write the line of `step`. digests: of each tensor by name."""
        names = sorted(digests)
        if names != self._names:
            self._write({"step": step, "names": names})
            self._names = names
        bits = bytes(short_digest(digests[name]) for name in names)
        self._write({"step": step, "tensors": base64.b64encode(bits).decode()})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(with_checksum(json.dumps(line)) + "\n")
        # Readers follow the file while the run continues.
        self._file.flush()


def short_digest(digest: str) -> int:
    """Return eight bits of a tensor's digest."""
    return hashlib.blake2b(digest.encode(), digest_size=1).digest()[0]


def tensors_of_step(run_dir: Path, step: int) -> dict[str, int]:
    """Return eight bits of each tensor's digest after `step`, by name; none without such a line.
    Raises UserError for a line that is not of this file."""
    for found, names, bits in WeightLines(run_dir):
        if found == step:
            return dict(zip(names, bits, strict=True))
    return {}


class WeightLines:
    """Iterable of (step, names, eight bits of each tensor) of every complete line, in order."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE

    def __iter__(self) -> Iterator[tuple[int, list[str], bytes]]:
        """Raises UserError for a line that is not of this file."""
        names: list[str] = []
        for place, line in _lines(self._path):
            try:
                if "names" in line:
                    names = [str(name) for name in line["names"]]
                    continue
                step, bits = int(line["step"]), base64.b64decode(line["tensors"])
                if len(bits) != len(names):
                    raise ValueError(f"{len(bits)} digests of {len(names)} tensors")
            except (KeyError, TypeError, ValueError) as error:
                where = f"{self._path}:{place}"
                raise not_a_line(where, "digests of tensors", error) from error
            yield step, names, bits


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with reading(path), open(path, "rb") as file:
            for place, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # being written
                    return
                try:
                    yield place, dict(json.loads(without_checksum(line)))
                except (TypeError, ValueError) as error:
                    raise not_a_line(f"{path}:{place}", "digests of tensors", error) from error
    except FileNotFoundError:
        return

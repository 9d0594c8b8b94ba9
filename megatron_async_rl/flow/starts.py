"""`RUN/starts.jsonl`: one line for each start of a run, with everything that decides its steps.

A step was made by the last line, in the order of the file, of an earlier step: a resume repeats
steps after its checkpoint, and the lines of starts that made these before are no longer used.

Invariant: a damaged line is reported, because each line has a checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import digest, reading
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.metrics.json_lines import cut_lines, read_line, with_checksum

FILE = "starts.jsonl"
CUT_FILE = "starts.cut.jsonl"


class Start(Strict):
    """One start of a run."""

    step: int
    """Steps made before it."""
    time: float
    """Unix seconds."""
    config: str
    """Digest of `config.yaml` at the start. A later start with other settings renames that file to
    `config.N.yaml`."""
    device: str
    """Kind of the ranks' device, and its name on a GPU, or the instructions of a CPU that torch
    uses."""
    ranks: int
    nodes: int = 1
    """Number of machines with ranks."""
    layout: Mapping[str, Any]
    """Values of policy.parallel."""
    threads: int
    """Threads of torch on a rank: they decide the order in which a CPU adds numbers."""
    software: Mapping[str, str]
    """Version of each package, and a digest of this package's files."""
    weights: str
    """Digest of the weights with which it began (weights/digest.version_digest)."""
    data: Mapping[str, Any]
    """Digests of the prompts."""
    code: Mapping[str, str]
    """Digests of the Python files that the configuration names, such as a reward's."""


def record_start(run_dir: Path, start: Start) -> None:
    """Append a line, and wait until it is on the disk. A last line that a crash cut is moved to
    starts.cut.jsonl."""
    cut_lines(run_dir / FILE, run_dir / CUT_FILE, lambda _: True)
    with open(run_dir / FILE, "a", encoding="utf-8") as file:
        line = json.dumps(start.model_dump(mode="json"), allow_nan=False)
        file.write(with_checksum(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_starts(run_dir: Path) -> list[Start]:
    """Return the lines, in order; none without the file. A last line that a crash cut is left out.
    Raises UserError."""
    path = run_dir / FILE
    try:
        with reading(path):
            text = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        found.append(read_line(line, f"{path}:{number}", Start, "a start of a run"))
    return found


def start_of_step(starts: list[Start], step: int) -> Start | None:
    """Return the start that made an optimizer step; None if no line is that old."""
    return next((start for start in reversed(starts) if start.step < step), None)


def config_of(run_dir: Path, start: Start) -> Path:
    """Return the file with a start's configuration. Raises UserError if it is gone."""
    for path in (run_dir / "config.yaml", *sorted(run_dir.glob("config.*.yaml"))):
        if path.is_file():
            with reading(path):
                if digest(path.read_bytes()) == start.config:
                    return path
    raise UserError.of(
        "config.yaml",
        f"no file in {run_dir} is the configuration of the start at step {start.step}",
        "restore config.yaml and config.N.yaml from a copy",
    )

"""`RUN/loads.jsonl`: the digest of the weights in an engine's memory, for each version that the
engine loaded. `mar verify` compares it with the trainer's digest in metrics.jsonl and starts.jsonl.

    {"version": 3, "engine": 0, "digest": "0f1e2d3c4b5a6978", "tensors": 22, "time": 1790000000.0,
     "checksum": ...}

Written by the controller before the engine may sample. A resume moves the lines of the versions
that it will load again to loads.cut.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_async_rl.config.settings_model import Strict
from megatron_async_rl.metrics.json_lines import cut_lines, read_lines, with_checksum

FILE = "loads.jsonl"
CUT_FILE = "loads.cut.jsonl"


class WeightLoad(Strict):
    """One version as an engine loaded it. digest: weights/digest.version_digest of the tensors in
    its memory; tensors: their number; time: Unix seconds."""

    version: int
    engine: int
    digest: str
    tensors: int
    time: float


class LoadLog:
    """Writer of the file. The first version that it records is the one with which the run
    starts."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._begun = False

    def record(self, version: int, engine: int, digest: str, tensors: int) -> None:
        path = self._run_dir / FILE
        if not self._begun:
            # A resume loads the version of its checkpoint first: lines from there on are of steps
            # that it repeats.
            cut_lines(path, self._run_dir / CUT_FILE, lambda line: int(line["version"]) < version)
            self._begun = True
        load = WeightLoad(
            version=version,
            engine=engine,
            digest=digest,
            tensors=tensors,
            time=round(time.time(), 3),
        )
        with open(path, "a", encoding="utf-8") as file:
            file.write(with_checksum(json.dumps(load.model_dump())) + "\n")


def read_loads(run_dir: Path) -> Iterator[WeightLoad]:
    """Yield the complete lines in order; none without the file. Raises UserError for another
    line."""
    return read_lines(run_dir / FILE, WeightLoad, "a load of weights")

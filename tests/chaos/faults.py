"""Faults of a live run: signals to its processes, full and unwritable folders, damaged files."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.starts import read_starts
from megatron_async_rl.metrics.log import read_metrics
from megatron_async_rl.metrics.weight_log import WeightLines
from tests.chaos.live_run import LiveRun

PROCESSES: Mapping[str, str] = {
    "engine core": r"engine-0|EngineCore",
    "engine actor": r"engine-0",
    "controller": r"controller",
    "reward supervisor": r"[Rr]eward|engine-0",
    "reward worker": r"[Rr]eward",
    "rank 0": r"rank 0",
    "rank 1": r"rank 1",
    "torchrun": r"torchrun",
    "launcher": r"mar train|launcher|in use",
    "raylet": r"raylet",
    "GCS": r"GCS|gcs|raylet",
    "fork server of ranks": r"fork|server|rank",
    "fork server of engines": r"fork|server|engine",
}
"""Kind of process -> pattern of a message that names it."""

TOLERATED = {"reward worker", "launcher", "fork server of ranks", "fork server of engines"}
"""Processes whose loss a run may survive without a message: the run loses nothing with them."""

DAMAGED: Mapping[str, str] = {
    "newest samples": "samples/samples-*.segment",
    "newest outcomes": "samples/outcomes-*.segment",
    "checkpoint block": "checkpoint/{latest}/sharded/*",
    "checkpoint state": "checkpoint/{latest}/state.pt",
    "checkpoint buffer": "checkpoint/{latest}/buffer.arrow",
    "about.json": "checkpoint/{latest}/about.json",
    "latest": "checkpoint/latest",
    "metrics.jsonl": "metrics.jsonl",
    "status.json": "status.json",
    "starts.jsonl": "starts.jsonl",
    "weights.jsonl": "weights.jsonl",
    "logmark.json": "logmark.json",
    "config.yaml": "config.yaml",
}
"""Name of a file -> its place in the run directory."""

FOLDERS = {"run directory": "", "checkpoint": "checkpoint", "samples": "samples"}

MOMENTS = ("start", "step", "step", "checkpoint")


@dataclass(frozen=True)
class ProcessFault:
    """SIGKILL or SIGSTOP of one process at a moment of the run."""

    process: str
    number: signal.Signals
    moment: str

    @property
    def kind(self) -> str:
        return f"{self.number.name} of {self.process}"

    @property
    def names(self) -> str:
        return PROCESSES[self.process]

    def inject(self, run: LiveRun) -> bool:
        found = run.find(self.process)
        if found is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            found.send_signal(self.number)
            return True
        return False


@dataclass(frozen=True)
class DiskFault:
    """A folder of the run directory that takes no more files. `full`: its file system has no space
    left; otherwise its entries cannot change."""

    folder: str
    full: bool
    moment: str

    @property
    def kind(self) -> str:
        return "full disk" if self.full else f"unwritable {self.folder}"

    @property
    def names(self) -> str:
        return r"space|full" if self.full else r"not permitted|denied|cannot be (used|written)"

    @contextlib.contextmanager
    def held(self, run: LiveRun) -> Iterator[None]:
        """Hold the fault until the block ends."""
        place = run.directory / FOLDERS[self.folder]
        if self.full:
            ballast = run.directory / "ballast"
            with open(ballast, "wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
                    file.flush()
            try:
                yield
            finally:
                ballast.unlink()
            return
        place.mkdir(exist_ok=True)  # a checkpoint folder is made with the first checkpoint
        subprocess.run(["chattr", "+i", place], check=True)
        try:
            yield
        finally:
            subprocess.run(["chattr", "-i", place], check=True)


@dataclass(frozen=True)
class DamageFault:
    """A changed file, between two starts."""

    file: str
    flip: bool

    @property
    def kind(self) -> str:
        return f"{'flipped bit in' if self.flip else 'truncated'} {self.file}"

    def path(self, run: LiveRun) -> Path | None:
        latest = run.directory / "checkpoint" / "latest"
        name = latest.read_text().strip() if latest.exists() else ""
        found = sorted(run.directory.glob(DAMAGED[self.file].format(latest=name)))
        found = [path for path in found if path.is_file() and path.stat().st_size > 8]
        return found[-1] if found else None

    def apply(self, path: Path, chance: random.Random) -> None:
        content = bytearray(path.read_bytes())
        if self.flip:
            bit = chance.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
        else:
            del content[chance.randrange(len(content)) :]
        path.write_bytes(content)

    def reported_by_readers(self, run: LiveRun) -> bool:
        """Return True if reading the run's records reports the damage."""
        readers: dict[str, Callable[[], object]] = {
            "metrics.jsonl": lambda: read_metrics(run.directory),
            "starts.jsonl": lambda: read_starts(run.directory),
            "weights.jsonl": lambda: list(WeightLines(run.directory)),
        }
        try:
            readers.get(self.file, int)()
        except (UserError, ValueError):
            return True
        return False


Fault = ProcessFault | DiskFault | DamageFault


def draw(chance: random.Random, kinds: str = "") -> Fault:
    """Return a fault. kinds: part of the kind's name, if only some are wanted."""
    while True:
        layer = chance.choices(["process", "disk", "damage"], [0.6, 0.1, 0.3])[0]
        fault: Fault
        if layer == "process":
            number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            fault = ProcessFault(chance.choice(list(PROCESSES)), number, chance.choice(MOMENTS))
        elif layer == "disk":
            full = chance.random() < 0.4
            folder = "run directory" if full else chance.choice(list(FOLDERS))
            fault = DiskFault(folder, full, chance.choice(["step", "checkpoint"]))
        else:
            fault = DamageFault(chance.choice(list(DAMAGED)), chance.random() < 0.5)
        if kinds in fault.kind:
            return fault

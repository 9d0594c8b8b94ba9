"""One run of `mar train` under test: its command, its processes, its files, and what it leaves.

Only processes that descend from the run's own launchers are ever signalled. What a run leaves is
attributed to it by its own temporary folder, run ids and process ids, because other runs may use
the machine at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY
from tests.vllm_process import core_of

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
STALL_S = 90.0
"""watchdog.timeout_s of the runs."""
UNRESPONSIVE_S = 30.0
HUNG_S = 480.0
"""Seconds without an end or progress after which a run counts as hung: more than any of its own
limits."""
REWARD = '''"""Reward of the chaos runs, which runs in a process of its own."""


def score(prompt, response, **fields):
    return float(len(set(response)) % 3)
'''


class LiveRun:
    """A run in `folder`, started again and again by the same command. `text`: output of all
    starts."""

    def __init__(self, folder: Path, seed: int, steps: int, model: Path | None) -> None:
        self.folder = folder
        self.directory = folder / "run"
        self.steps = steps
        self.starts = 0
        self.text = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._known: dict[int, float] = {}
        """Processes of this run so far: id -> time of their start."""
        self._ids = set[str]()
        self._digits = set[str]()
        """Digits in the names of the run's temporary folders."""
        self._tmp = folder / "tmp"
        self._tmp.mkdir(parents=True)
        prepare = runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"]
        prepare(folder, seed=0)
        (folder / "chaos_reward.py").write_text(REWARD)
        tree: dict[str, Any] = {
            "run": {"dir": "run", "steps": steps, "seed": seed},
            "model": {"path": str(model or "model"), "dtype": "float32"},
            "data": {"train": "train.jsonl"},
            "flow": {"prompts_per_step": 8, "group_size": 4, "async_ratio": 2},
            "rollout": {
                "sampling": {"max_tokens": 6},
                "reward": {"name": "chaos_reward:score"},
                "kv_cache_gib": 0.1,
                "unresponsive_s": UNRESPONSIVE_S,
                "start_timeout_s": 240,
                "restarts_per_hour": 50,
            },
            "policy": {
                "device": "cpu",
                "parallel": {"ranks": 2, "tensor": 2},
                "optimizer": {"lr": 1e-4},
            },
            "objective": {"loss": "ppo_clip"},
            "checkpoint": {"every": 2, "keep": 2},
            "watchdog": {"timeout_s": STALL_S},
            "observe": {"tensorboard": False},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))

    # The command

    def start(self) -> None:
        self.starts += 1
        own = {"TMPDIR": str(self._tmp), "RAY_TMPDIR": str(self._tmp), "PYTHONPATH": str(ROOT)}
        with open(self.output_file, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_async_rl", "train", "config.yaml"],
                cwd=self.folder,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output_file(self) -> Path:
        return self.folder / f"output_{self.starts}.log"

    def output(self) -> str:
        """Output of this start."""
        return self.output_file.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Exit code of this start; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def wait(self, done: Callable[[], object], limit_s: float = HUNG_S) -> bool:
        """Wait until `done()` or the launcher's end. Return False after `limit_s` seconds without
        a new step."""
        since, steps = time.monotonic(), self.step
        while not done() and self.code is None:
            self.observe()
            if self.step > steps:
                since, steps = time.monotonic(), self.step
            if time.monotonic() - since > limit_s:
                return False
            time.sleep(POLL_S)
        return True

    # Files

    @property
    def step(self) -> int:
        return max((row.get("step", 0) for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.directory / "metrics.jsonl")

    def events(self) -> list[str]:
        return [str(row.get("text")) for row in _lines(self.directory / "events.jsonl")]

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.directory / "status.json").read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    # Processes

    def observe(self) -> None:
        """Note which processes and temporary folders belong to this run."""
        self._digits |= {path.name[4:] for path in self._tmp.glob("mar-????????")}
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                if one.pid not in self._known:
                    self._know(one)

    def _know(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            identity = process.environ().get(RUN_ID_VARIABLE)
            if identity:
                self._ids.add(identity)
                self._known[process.pid] = process.create_time()

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of all starts, without launchers."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(RUN_ID_VARIABLE) in self._ids:
                    self._known[process.pid] = process.create_time()
                    found.append(process)
        return found

    def find(self, kind: str) -> psutil.Process | None:
        """Return the process of a kind; None if there is none now."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error, OSError, ValueError, AssertionError, KeyError):
            if kind == "launcher":
                return psutil.Process(self.process.pid)
            if kind == "engine core":
                return self._own(core_of(self.directory / "logs" / "engine-0.log").pid)
            watched = {"engine actor": "engine-0"}.get(kind, kind)
            state = self.directory / "watch" / f"{watched}.json"
            if state.exists():
                return self._own(int(json.loads(state.read_text())["pid"]))
            pattern = re.compile(COMMANDS[kind])
            found = [one for one in self.processes() if pattern.search(" ".join(one.cmdline()))]
            found.sort(key=psutil.Process.create_time)
            # Forks of a server have its command line; workers begin after their supervisor.
            return found[-1 if kind == "reward worker" else 0] if found else None
        return None

    def _own(self, pid: int) -> psutil.Process:
        process = psutil.Process(pid)
        # A process id in a file may have been given to another process since.
        if process.environ().get(RUN_ID_VARIABLE) not in self._ids:
            raise psutil.NoSuchProcess(pid)
        return process

    def end(self) -> None:
        """End everything that this run started."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    # What it leaves

    def left_processes(self, grace_s: float = 60.0) -> list[str]:
        """Return the processes that still live `grace_s` seconds after the launcher has ended."""
        deadline = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(one.cmdline())[:80] or one.name() for one in left]

    def left_files(self) -> list[str]:
        """Return temporary files and shared memory of this run."""
        folders = [path.name for path in self._tmp.glob("*mar-*")]
        pids = {str(pid) for pid in self._known}
        shared = [
            path.name
            for path in SHARED_MEMORY.iterdir()
            if any(digits in path.name for digits in self._digits)
            or any(number in pids for number in re.findall(r"_(\d+)_", path.name))
        ]
        partial = [path.name for path in self.directory.rglob("*.partial")]
        unfinished = [path.name for path in self.directory.glob("checkpoint/unfinished_*")]
        return folders + shared + partial + unfinished


COMMANDS = {
    "torchrun": r"megatron_async_rl\.launch\.torchrun",
    "raylet": r"/raylet/raylet ",
    "GCS": r"/gcs/gcs_server ",
    "reward supervisor": r"rollout\.isolation",
    "reward worker": r"rollout\.isolation",
    "fork server of ranks": r"fork_server .* megatron_async_rl\.train",
    "fork server of engines": r"fork_server .*engine_imports",
}
"""Kind of process -> pattern of its command line, for those without a file in RUN/watch."""


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows

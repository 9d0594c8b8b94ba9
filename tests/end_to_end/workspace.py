"""A folder with the arithmetic example, the `mar` command in it, and the processes of its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "MEGATRON_ASYNC_RL_RUN_ID"


@dataclass
class Workspace:
    """A folder with the example's model and data, a reward of its own, and configs written into
    it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def config(self, name: str, **changes: Any) -> Path:
        tree: dict[str, Any] = {
            "run": {"dir": f"runs/{name}", "steps": 4},
            "model": {"path": "model", "dtype": "float32"},
            "data": {"train": "train.jsonl"},
            "flow": {"prompts_per_step": 4, "group_size": 4, "async_ratio": 1},
            "rollout": {
                "sampling": {"max_tokens": 6},
                "reward": {"name": "arithmetic"},
                "kv_cache_gib": 0.25,
            },
            "policy": {"parallel": {"ranks": 2, "tensor": 2}, "optimizer": {"lr": 1e-3}},
            "controls": ["gac"],
            "watchdog": {"timeout_s": 120},
        }
        for section, values in changes.items():
            tree[section] = (
                {**tree.get(section, {}), **values} if isinstance(values, dict) else values
            )
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def start(self, *args: str, named: str = "") -> subprocess.Popen[str]:
        """`named`: this machine's name for the command alone; needs `unshare`."""
        command = [sys.executable, "-m", "megatron_async_rl", *args]
        if named:
            rename = ["unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"', named]
            command = [*rename, *command]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def mar(self, *args: str, timeout: float = 900, named: str = "") -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*args, named=named)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            pytest.fail(f"mar {' '.join(args)} took over {timeout:g} s:\n{output}")
        return process.returncode, output

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def started_by(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process that belongs to the run of `process`, wherever it hangs in the process tree."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []  # it has ended
    ids = {identity for identity in map(run_id, children) if identity}
    return [other for other in psutil.process_iter() if run_id(other) in ids]


def listening(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """Addresses at which the processes accept connections or datagrams, with the process of
    each."""
    found: dict[tuple[str, int], str] = {}
    for process in processes:
        try:
            name = " ".join(process.cmdline())[:200]
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (
                    one.status == psutil.CONN_NONE and one.laddr
                ):
                    found[one.laddr.ip, one.laddr.port] = name
        except psutil.NoSuchProcess:
            continue
    return found


def run_id(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN_ID)
    except psutil.Error:
        return None


def alive(processes: list[psutil.Process]) -> list[str]:
    return [
        process.name()
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def wait_until(
    done: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 900
) -> None:
    deadline = time.monotonic() + timeout
    while True:
        over = process.poll() is not None or time.monotonic() > deadline
        if done():
            return
        if over:
            process.terminate()
            output, _ = process.communicate()
            pytest.fail(f"the run ended or hung before what the test waits for:\n{output}")
        time.sleep(0.1)

"""The arithmetic example, written afresh, the `mar` command on it, and the runs that several files
look at. All files share one folder, so names of runs are given once."""

from __future__ import annotations

import json
import os
import runpy
import signal
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
LOOP_STEPS = 40
SYNCHRONOUS_STEPS = 5
HELD_OUT = 12
"""Prompts that the synchronous run evaluates on."""
PER_PROMPT = 3
"""Samples of each of them."""

REWARD = '''
import time
import zlib
from pathlib import Path

HERE = Path(__file__).parent


def varied(prompt, response):
    """Another number for every other response, never 0: nothing to learn, always something to learn from."""
    return 0.5 + zlib.crc32(response.encode()) / 2**32


def flaky(prompt, response):
    """Exact match, except that it raises on some answers and is not a number on others."""
    last = prompt.fields["answer"][-1]
    if last == "3":
        raise ValueError("three is not supported")
    if last == "7":
        return float("nan")
    return float(response.strip() == prompt.fields["answer"]) + 0.1 * len(response)


def until_broken(prompt, response):
    if (HERE / "broken").exists():
        raise ValueError("it is broken")
    return varied(prompt, response)


def until_stuck(prompt, response):
    while (HERE / "stuck").exists():
        time.sleep(3600)
    return varied(prompt, response)
'''


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

    def start(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megatron_async_rl", *args]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def mar(self, *args: str, timeout: float = 300) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*args)
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
    children = psutil.Process(process.pid).children(recursive=True)
    ids = {identity for identity in map(run_id, children) if identity}
    return [other for other in psutil.process_iter() if run_id(other) in ids]


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
    done: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 240
) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            output, _ = process.communicate()
            pytest.fail(f"the run ended or hung before what the test waits for:\n{output}")
        time.sleep(0.1)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](folder, seed=0)
    (folder / "flaky_reward.py").write_text(REWARD)
    return Workspace(folder)


@pytest.fixture(scope="session")
def interrupted(workspace: Workspace) -> dict[str, object]:
    """A run at async_ratio 2 with a reward that fails now and then, stopped by Ctrl-C on the way
    and started again."""
    config = workspace.config(
        "loop",
        run={"dir": "runs/loop", "steps": LOOP_STEPS},
        flow={"async_ratio": 2},
        rollout={"reward": {"name": "flaky_reward:flaky", "on_error": "drop"}},
        data={"eval": "few.jsonl"},
        eval={"samples_per_prompt": 2},
    )
    (workspace.folder / "few.jsonl").write_text(
        "".join((workspace.folder / "eval.jsonl").read_text().splitlines(keepends=True)[:8])
    )
    process = workspace.start("train", str(config))
    wait_until(lambda: len(workspace.metrics("loop")) >= 4, process)
    processes = started_by(process)
    process.send_signal(signal.SIGINT)
    stopped, _ = process.communicate(timeout=120)
    left = alive(processes)
    at_stop = len(workspace.metrics("loop"))
    code, finished = workspace.mar("train", str(config))
    return {
        "stop_code": process.returncode,
        "stop_output": stopped,
        "processes": len(processes),
        "left": left,
        "at_stop": at_stop,
        "code": code,
        "output": finished,
        "rows": workspace.metrics("loop"),
        "run": workspace.folder / "runs" / "loop",
    }


@pytest.fixture(scope="session")
def converted(workspace: Workspace, interrupted: dict[str, object]) -> Path:
    """The checkpoint of that run as `mar convert` writes it."""
    out = workspace.folder / "converted"
    code, output = workspace.mar("convert", f"{interrupted['run']}/checkpoint", str(out))
    assert code == 0, output
    return out


@pytest.fixture(scope="session")
def synchronous(workspace: Workspace, converted: Path) -> Path:
    """A run that waits for each batch, from the converted model, with an engine that evaluates
    beside it."""
    lines = (workspace.folder / "eval.jsonl").read_text().splitlines(keepends=True)
    (workspace.folder / "held_out.jsonl").write_text("".join(lines[:HELD_OUT]))
    config = workspace.config(
        "synchronous",
        run={"dir": "runs/synchronous", "steps": SYNCHRONOUS_STEPS},
        flow={"async_ratio": 0},
        model={"path": converted.name},
        # Every step must move the weights, also when the model has come to give a prompt one answer
        # only: no baseline.
        rollout={"reward": {"name": "flaky_reward:varied"}},
        objective={"advantage": "none"},
        data={"eval": "held_out.jsonl"},
        eval={
            "every": 2,
            "engines": 1,
            "samples_per_prompt": PER_PROMPT,
            "pass_at": [1, 2],
            "pass_reward": 1.0,
        },
    )
    code, output = workspace.mar("train", str(config))
    assert code == 0, output
    return workspace.folder / "runs" / "synchronous"

"""Runs of the arithmetic example over machines (machines.py), started by the real launcher."""

from __future__ import annotations

import json
import runpy
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.end_to_end.workspace import alive, started_by
from tests.network.machines import ROOT, Machines, machines, obstacle

LIMIT_S = 900.0
GRACE_S = 60.0
"""Time for processes that Ray ends after its launcher has ended."""


@dataclass
class Run:
    """One run. `directory`: RUN; `settings`: of the launcher, on every machine."""

    machines: Machines
    config: Path
    directory: Path
    settings: dict[str, str]
    launchers: list[subprocess.Popen[str]]
    """Launchers by machine; the last one of a restarted machine."""

    def start(self, number: int) -> subprocess.Popen[str]:
        return self.machines.start(number, self.config, **self.settings)

    def metrics(self) -> list[dict[str, Any]]:
        file = self.directory / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def states_of(self, *names: str) -> dict[str, dict[str, Any]]:
        """The states of these processes, once all of them are there."""
        files = {name: self.directory / "watch" / f"{name}.json" for name in names}
        self.wait_until(lambda: all(file.exists() for file in files.values()))
        return {name: json.loads(file.read_text()) for name, file in files.items()}

    def wait_until(self, condition: Callable[[], bool], *, over: tuple[int, ...] = ()) -> None:
        """`over`: machines whose launchers may have ended."""
        deadline = time.monotonic() + LIMIT_S
        running = [one for number, one in enumerate(self.launchers) if number not in over]
        while not condition():
            assert all(one.poll() is None for one in running), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def wait_for_steps(self, count: int, *, over: tuple[int, ...] = ()) -> None:
        self.wait_until(lambda: len(self.metrics()) >= count, over=over)

    def end(self) -> tuple[list[int], list[str]]:
        """The launchers' exit codes once all have ended, and the names of processes that are left
        over."""
        processes = [process for one in self.launchers for process in started_by(one)]
        codes = [launcher.wait(timeout=LIMIT_S) for launcher in self.launchers]
        _, living = psutil.wait_procs(processes, timeout=GRACE_S)
        return codes, alive(living)

    def said(self) -> str:
        return "\n".join(
            f"--- {name}\n{self.machines.said(number)[-3000:]}"
            for number, name in enumerate(self.machines.names)
        )


@contextmanager
def run_over(
    count: int,
    *,
    trainers: int,
    settings: Mapping[str, str] | None = None,
    hosts: Mapping[str, str] | None = None,
    **changes: Any,
) -> Iterator[Run]:
    """The arithmetic example in a folder of its own, with `changes` of its config by section, over
    machines (`run_config`)."""
    tree: dict[str, Any] = {
        "run": {"dir": "run", "steps": 3},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "flow": {"prompts_per_step": 8, "group_size": 4, "async_ratio": 2},
        "rollout": {
            "sampling": {"max_tokens": 6},
            "reward": {"name": "arithmetic"},
            "kv_cache_gib": 0.1,
        },
        "policy": {"parallel": {"ranks": 2, "tensor": 2}, "optimizer": {"lr": 1e-4}},
        "objective": {"loss": "ppo_clip"},
    }
    if trainers < count:
        tree["weights"] = {"transport": "relay"}
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](
            folder, seed=0
        )
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(tree))
        with run_config(
            config, folder / "run", count, trainers=trainers, settings=settings, hosts=hosts
        ) as run:
            yield run


@contextmanager
def run_config(
    config: Path,
    directory: Path,
    count: int,
    *,
    trainers: int,
    settings: Mapping[str, str] | None = None,
    hosts: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """A run over `count` machines; the first `trainers` have its ranks, and the others engines
    alone. All have the config's folder. `settings`: more of the launcher's; `hosts`: wrong
    addresses of machines, by name. Skips the test where there can be no machines."""
    if why := obstacle():
        pytest.skip(why)
    with machines(config.parent, count, hosts or {}) as made:
        launched_with = {"TRAINER_NODES": str(trainers), **(settings or {})}
        run = Run(made, config, directory, launched_with, [])
        run.launchers += [run.start(number) for number in range(count)]
        yield run

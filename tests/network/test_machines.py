"""Runs over machines with a network between them, started by the real launcher: `make network-tests`.
Needs root, and Debian's iproute2."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.network.machines import ROOT, Machines, machines

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, ip and unshare: machines are network namespaces",
)
STEPS = 200
"""More than a run makes while a test looks."""
ENGINES_ALONE = {"TRAINER_NODES": "1"}
"""Of the second machine."""


@pytest.fixture
def two() -> Iterator[Machines]:
    # Not in /tmp, of which each machine has its own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](
            Path(folder), seed=0
        )
        with machines(Path(folder), 2) as two:
            yield two


def written(two: Machines, **changes: Any) -> Path:
    tree: dict[str, Any] = {
        "run": {"dir": "run", "steps": 6},
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
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    file = two.folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def metrics(two: Machines) -> list[dict[str, Any]]:
    file = two.folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def host(two: Machines, process: str) -> str:
    return str(json.loads((two.folder / "run" / "watch" / f"{process}.json").read_text())["host"])


def ended(two: Machines, *processes: subprocess.Popen[str]) -> list[int]:
    codes = [process.wait(timeout=900) for process in processes]
    print(*(two.said(number)[-3000:] for number in range(len(two.names))))
    return codes


def wait_until(
    two: Machines, condition: Callable[[], bool], *running: subprocess.Popen[str]
) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert all(process.poll() is None for process in running), two.said(0)[-3000:]
        assert time.monotonic() < deadline, two.said(0)[-3000:]
        time.sleep(0.1)


def test_engines_of_another_machine_get_their_weights_over_the_network(two: Machines) -> None:
    config = written(two, weights={"transport": "relay"})
    engines = two.start(1, config, **ENGINES_ALONE)
    trainer = two.start(0, config, **ENGINES_ALONE)
    wait_until(two, lambda: len(metrics(two)) >= 1, trainer, engines)
    assert (host(two, "rank 0"), host(two, "engine-0")) == ("node0", "node1")
    assert ended(two, trainer, engines) == [0, 0]
    rows = metrics(two)
    assert len(rows) == 6
    assert rows[-1]["weights/relay_bytes"] > 0
    assert "machine 0's Ray has ended, and with it the work of machine 1" in two.said(1)


def test_tensor_parallel_ranks_are_divided_over_the_machines(two: Machines) -> None:
    config = written(two)
    nodes = [two.start(number, config) for number in (0, 1)]
    wait_until(two, lambda: len(metrics(two)) >= 1, *nodes)
    assert (host(two, "rank 0"), host(two, "rank 1")) == ("node0", "node1")
    assert ended(two, *nodes) == [0, 0]
    assert len(metrics(two)) == 6


def test_a_machine_that_is_cut_off_costs_its_engines_and_not_the_run(two: Machines) -> None:
    config = written(
        two,
        run={"dir": "run", "steps": 100000},
        checkpoint={"every": 0},
        rollout={
            "sampling": {"max_tokens": 6},
            "reward": {"name": "arithmetic"},
            "kv_cache_gib": 0.1,
            "engines": 2,
            "unresponsive_s": 15,
        },
        weights={"transport": "relay"},
    )
    two.start(1, config, **ENGINES_ALONE)
    trainer = two.start(0, config, **ENGINES_ALONE)
    wait_until(two, lambda: len(metrics(two)) >= 3, trainer)
    lost = next(name for name in ("engine-0", "engine-1") if host(two, name) == "node1")
    two.cut(1)
    wait_until(
        two, lambda: f"{lost} is lost and its prompts are asked again" in two.said(0), trainer
    )
    after = len(metrics(two)) + 10
    wait_until(two, lambda: len(metrics(two)) >= after, trainer)
    trainer.terminate()
    assert ended(two, trainer) == [130]


def test_a_machine_that_dies_and_comes_again_goes_on_from_the_checkpoint(two: Machines) -> None:
    config = written(
        two,
        run={"dir": "run", "steps": STEPS},
        checkpoint={"every": 5},
        watchdog={"timeout_s": 90},
    )
    zero, one = (two.start(number, config) for number in (0, 1))
    wait_until(two, lambda: len(metrics(two)) > 5, zero, one)
    two.kill("node1")
    one.wait(timeout=900)
    wait_until(two, lambda: "starts the run again from its last checkpoint" in two.said(0), zero)
    again = two.start(1, config)
    assert ended(two, zero, again) == [0, 0]
    steps = [row["step"] for row in metrics(two)]
    assert steps == list(range(1, STEPS + 1))

"""A run over two machines, imitated on one: each a launcher, a host name and half of the ranks,
with one run directory."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.end_to_end.conftest import ROOT, Workspace, alive, started_by, wait_until
from tests.ports import free_ports

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]

TIMEOUT_S = 10
STEPS = 3
RENAMED = "import socket\n\nsocket.gethostname = lambda: 'second'\n"
PROCESSES = ("rank 0", "rank 1", "controller", "engine-0", "engine-0 EngineCore")


@dataclass
class Ended:
    """A run over two nodes. `states`: of its processes while it ran; `left`: names of those that
    still live."""

    codes: list[int]
    said: list[str]
    states: dict[str, dict[str, Any]]
    left: list[str]
    directory: Path


@pytest.fixture(scope="module")
def machines(workspace: Workspace) -> list[Workspace]:
    renamed = workspace.folder / "renamed"
    renamed.mkdir()
    (renamed / "sitecustomize.py").write_text(RENAMED)
    first = {"GLOO_SOCKET_IFNAME": "lo"}
    return [
        replace(workspace, environment=first | {"PYTHONPATH": path})
        for path in (str(ROOT), f"{renamed}:{ROOT}")
    ]


@contextmanager
def ray_on_both(machines: list[Workspace]) -> Iterator[str]:
    """The address of a cluster with a node on each machine."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2", env_vars=machines[1].environment)
        yield cluster.address
    finally:
        cluster.shutdown()


def run(machines: list[Workspace], name: str, stopped: str | None = None) -> Ended:
    """A run to its end, in which the process `stopped` is stopped after a step."""
    config = machines[0].config(
        name,
        run={"dir": f"runs/{name}", "steps": STEPS if stopped is None else 100000},
        rollout={"unresponsive_s": TIMEOUT_S - 2},
        checkpoint={"every": 0},
        watchdog={"timeout_s": TIMEOUT_S},
    )
    directory = machines[0].folder / "runs" / name
    (port,) = free_ports(1)
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}"]
    nodes = [
        machine.start("train", str(config), *options, f"--node-rank={rank}")
        for rank, machine in enumerate(machines)
    ]
    files = {name: directory / "watch" / f"{name}.json" for name in PROCESSES}
    wait_until(lambda: all(file.exists() for file in files.values()), nodes[0])
    states = {name: json.loads(file.read_text()) for name, file in files.items()}
    processes = [process for node in nodes for process in started_by(node)]
    if stopped is not None:
        wait_until(lambda: len(machines[0].metrics(name)) >= 1, nodes[0])
        psutil.Process(states[stopped]["pid"]).send_signal(signal.SIGSTOP)
    said = [node.communicate(timeout=120)[0] for node in nodes]
    return Ended([node.returncode for node in nodes], said, states, alive(processes), directory)


@pytest.fixture(scope="module")
def runs(machines: list[Workspace]) -> Iterator[dict[str, Future[Ended]]]:
    """Both at once: most of their time is imports and waiting."""
    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(run, machines, "stopped", "rank 1")
        with ray_on_both(machines) as address:
            joining = replace(
                machines[0], environment=machines[0].environment | {"RAY_ADDRESS": address}
            )
            whole = pool.submit(run, [joining, machines[1]], "whole")
            yield {"whole": whole, "stopped": stopped}


def test_a_run_over_two_nodes_ends_well_on_both(runs: dict[str, Future[Ended]]) -> None:
    ended = runs["whole"].result(timeout=300)
    assert ended.codes == [0, 0], ended.said
    assert len((ended.directory / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert ended.left == []


def test_ranks_are_divided_and_what_shares_memory_with_rank_0_is_on_its_node(
    runs: dict[str, Future[Ended]],
) -> None:
    hosts = {
        name: state["host"] for name, state in runs["whole"].result(timeout=300).states.items()
    }
    assert hosts.pop("rank 1") == "second"
    assert set(hosts.values()) == {socket.gethostname()}


def test_a_rank_that_stops_on_one_node_ends_the_run_on_both_and_is_named(
    runs: dict[str, Future[Ended]],
) -> None:
    ended = runs["stopped"].result(timeout=300)
    assert ended.codes == [1, 1], ended.said
    pid = ended.states["rank 1"]["pid"]
    for said in ended.said:
        assert f"The run failed: Stalled: Nothing moved for {TIMEOUT_S} s" in said
        assert f"rank 1 (pid {pid} on second) is stopped (T)" in said
        for name in PROCESSES:
            assert (
                f"\n{name} (pid {ended.states[name]['pid']} on {ended.states[name]['host']}): "
                in said
            )
        assert " waits for " in said
        assert "on another machine" not in said
        assert "Traceback" not in said
        assert len(said[said.rfind("The run failed:") :].splitlines()) < 60
    assert json.loads((ended.directory / "status.json").read_text())["phase"] == "failed"
    stacks = (ended.directory / "stall.txt").read_text().partition("\nStacks\n")[2]
    assert stacks.count("most recent call first") >= len(PROCESSES) - 1
    assert ended.left == []

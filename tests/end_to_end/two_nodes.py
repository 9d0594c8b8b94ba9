"""Runs over two machines, imitated on one: each a launcher, a host name and half of the ranks, with
one run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.end_to_end.workspace import ROOT, Workspace, alive, started_by, wait_until
from tests.ports import free_ports

RENAMED = "import socket\n\nsocket.gethostname = lambda: 'second'\n"
PROCESSES = ("rank 0", "rank 1", "controller", "engine-0", "engine-0 EngineCore")
RELAY = "relay-0"


@dataclass
class Ended:
    """A run over two nodes. `states`: of its processes while it ran; `left`: names of those that
    still live."""

    codes: list[int]
    said: list[str]
    states: dict[str, dict[str, Any]]
    left: list[str]
    directory: Path


def machines_of(workspace: Workspace) -> list[Workspace]:
    """The folder as each of the two machines sees it; what it holds can be imported on both."""
    renamed = workspace.folder / "renamed"
    renamed.mkdir(exist_ok=True)
    (renamed / "sitecustomize.py").write_text(RENAMED)
    first = {"GLOO_SOCKET_IFNAME": "lo"}
    return [
        replace(workspace, environment=first | {"PYTHONPATH": path})
        for path in (f"{ROOT}:{workspace.folder}", f"{renamed}:{ROOT}:{workspace.folder}")
    ]


@contextmanager
def ray_on_both(machines: Sequence[Workspace]) -> Iterator[list[Workspace]]:
    """The machines, of which the first joins a cluster with a node on each. The nodes know nothing
    of the run: neither the package nor the folder can be imported there."""
    from ray.cluster_utils import Cluster

    first, second = (machine.environment for machine in machines)
    bare = [
        node
        | {"PYTHONPATH": node["PYTHONPATH"].removesuffix(machines[0].environment["PYTHONPATH"])}
        for node in (first, second)
    ]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "env_vars": bare[0]})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2", env_vars=bare[1])
        first = first | {"RAY_ADDRESS": cluster.address}
        yield [replace(machines[0], environment=first), machines[1]]
    finally:
        cluster.shutdown()


def run_on(
    machines: Sequence[Workspace],
    config: Path,
    killed: str,
) -> Ended:
    """A run to its end, in which the process `killed` is killed after a step; rewards that wait for
    the removal of the file `hold` go on then. `config` is called as its run."""
    name = config.stem
    directory = machines[0].folder / "runs" / name
    (port,) = free_ports(1)
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}"]
    nodes = [
        machine.start("train", str(config), *options, f"--node-rank={rank}")
        for rank, machine in enumerate(machines)
    ]
    files = {name: directory / "watch" / f"{name}.json" for name in (*PROCESSES, killed)}
    wait_until(lambda: all(file.exists() for file in files.values()), nodes[0])
    states = {name: json.loads(file.read_text()) for name, file in files.items()}
    processes = [process for node in nodes for process in started_by(node)]
    wait_until(lambda: len(machines[0].metrics(name)) >= 1, nodes[0])
    psutil.Process(states[killed]["pid"]).kill()
    (machines[0].folder / "hold").unlink(missing_ok=True)
    said = [node.communicate(timeout=900)[0] for node in nodes]
    return Ended([node.returncode for node in nodes], said, states, alive(processes), directory)

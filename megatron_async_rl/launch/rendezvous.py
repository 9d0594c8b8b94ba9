"""The machines of one run: how their launchers find each other and see that they fit.

    node 0: prepares the directory, shows the id of this start --> node n: shows the same id --> all
    are there: the ranks start

They meet in the run's directory, which all of them see, and through node 0's endpoint (peers.py).

Invariants:
- no rank starts before the launcher of every node is there, with the same config, the same number
  of nodes and the same software, and within reach;
- what an earlier start left in the directory is not taken for node 0: its state must be seen to
  change.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from pathlib import Path

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.peers import (
    POLL_S,
    Nodes,
    NodesError,
    PeerNodes,
    Unreached,
    refused,
)
from megatron_async_rl.rollout.cluster import software, unlike
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.progress_monitor import LAUNCHER, ProcessState, read_states

_START, _NODES, _SOFTWARE, _UNREACHED = "start", "nodes", "software", "unreached"


def rendezvous(nodes: Nodes, config: Config, timeout_s: float, peers: PeerNodes) -> str:
    """Begins the launcher's heartbeat and waits for those of the other nodes. Returns the id of
    this start, the same on all.

    Node 0 has prepared the run's directory. Raises NodesError.
    """
    run_dir = config.run.dir
    if nodes.count > 1:
        versions = json.dumps(software())
        watch.fact(_SOFTWARE, lambda: versions)
    watch.fact(_NODES, lambda: nodes.count)
    start = uuid.uuid4().hex if nodes.rank == 0 else _find(nodes, config, timeout_s, peers)
    watch.fact(_START, lambda: start)
    if nodes.rank > 0:
        _meet(nodes, run_dir, timeout_s, peers)
    watch.start(run_dir, f"{LAUNCHER}{nodes.rank}")
    if nodes.rank == 0:
        _await_others(nodes, run_dir, start, timeout_s, peers)
    return start


def _meet(nodes: Nodes, run_dir: Path, timeout_s: float, peers: PeerNodes) -> None:
    """The ranks of this node and those of node 0 will reach each other."""
    try:
        with watch.doing("wait", "node 0 to try the addresses", timeout_s):
            peers.greet(timeout_s)
    except Unreached as error:
        # Node 0 hears nothing from here, and still reads the directory.
        message = str(error)
        watch.fact(_UNREACHED, lambda: message)
        watch.start(run_dir, f"{LAUNCHER}{nodes.rank}")
        raise


def _await_others(
    nodes: Nodes, run_dir: Path, start: str, timeout_s: float, peers: PeerNodes
) -> None:
    deadline = time.monotonic() + timeout_s
    with watch.doing("wait", "the other nodes", timeout_s):
        while missing := [
            number for number in range(1, nodes.count) if not _has_joined(run_dir, number, start)
        ]:
            if (error := peers.refusal()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise NodesError.of(
                    f"{_names(missing)} of {nodes.count}",
                    f"timed out after {timeout_s:g} s",
                    "run the same command there, with a --node-rank of its own; all nodes must see"
                    f" {run_dir}",
                )
            time.sleep(POLL_S)


def _find(nodes: Nodes, config: Config, timeout_s: float, peers: PeerNodes) -> str:
    """The id of node 0's start, which is like this one."""
    run_dir = config.run.dir
    deadline = time.monotonic() + timeout_s
    times = set[float]()
    with watch.doing("wait", "node 0", timeout_s):
        while (zero := _launcher(run_dir, 0)) is None or len(times | {zero.time}) < 2:
            times |= {zero.time} if zero is not None else set()
            if (error := peers.refusal()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise NodesError.of(
                    "node 0",
                    f"timed out after {timeout_s:g} s",
                    f"run the same command there, with --node-rank 0; all nodes must see {run_dir}",
                )
            time.sleep(POLL_S)
    if zero.facts[_NODES] != nodes.count:
        raise NodesError.of(
            "--nnodes",
            f"{nodes.count} here, {zero.facts[_NODES]} on node 0 ({zero.host})",
            "give all nodes the same --nnodes",
        )
    if differs := unlike(software(), json.loads(str(zero.facts.get(_SOFTWARE, "{}")))):
        raise NodesError.of(
            f"node {nodes.rank} ({socket.gethostname()})",
            f"has other versions than node 0 ({zero.host}): {differs}",
            "install the same environment on all nodes",
        )
    remote, local = (run_dir / "config.yaml").read_text(encoding="utf-8"), dump(config)
    if remote != local:
        lines = zip(remote.splitlines(), local.splitlines(), strict=False)
        there, here = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
        raise NodesError.of(
            "CONFIG",
            f"differs from that of node 0 ({zero.host}): `{here.strip()}` here, `{there.strip()}`"
            " there",
            "give all nodes the same config and the same overrides",
        )
    return str(zero.facts[_START])


def _has_joined(run_dir: Path, number: int, start: str) -> bool:
    """Raises NodesError if it reports that it cannot reach node 0."""
    launcher = _launcher(run_dir, number)
    if launcher is None or launcher.facts.get(_START) != start:
        return False
    if (message := launcher.facts.get(_UNREACHED)) is not None:
        raise refused(number, launcher.host, str(message))
    return True


def _launcher(run_dir: Path, number: int) -> ProcessState | None:
    return next(
        (state for state in read_states(run_dir) if state.name == f"{LAUNCHER}{number}"), None
    )


def _names(numbers: list[int]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))

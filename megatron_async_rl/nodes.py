"""The machines of one run, and how their launchers find each other: in the run's directory, which all of them see.

    node 0: prepares the directory, shows the id of this start --> node n: shows the same id --> all are there: the ranks start

Invariants:
- no rank starts before the launcher of every node is there, with the same config and the same number of nodes;
- what an earlier start left in the directory is not taken for node 0: its state must be seen to change.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.schema import Config
from megatron_async_rl.observe import watch
from megatron_async_rl.observe.movement import LAUNCHER, ProcessState, read_states

POLL_S = 0.25
_START, _NODES = "start", "nodes"


class NodesError(Exception):
    """The nodes do not fit each other or the config, or one did not come."""


@dataclass(frozen=True)
class Nodes:
    """`count` machines, each with the same number of ranks. This one is number `rank`; `endpoint` (host:port) is on number 0."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""

    def __post_init__(self) -> None:
        """Raises NodesError for what cannot be."""
        host, _, port = self.endpoint.rpartition(":")
        if self.rank >= self.count:
            raise NodesError(f"--node-rank {self.rank}: of {self.count} nodes (--nnodes), the last is number {self.count - 1}")
        if self.count > 1 and not (host and port.isdecimal()):
            given = self.endpoint or "is missing"
            raise NodesError(
                f"--rdzv-endpoint {given}\n  fix: name node 0 as the others reach it and a free port on it, HOST:PORT"
            )

    @property
    def host(self) -> str:
        """Of the endpoint; an IPv6 address without its brackets."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def torchrun(self, ranks: int, start: str) -> list[str]:
        """Its arguments for this node's share of the ranks; `start`: the id that `meet` returned."""
        share = f"--nproc-per-node={ranks // self.count}"
        if self.count == 1:
            return ["--standalone", share]
        host, _, port = self.endpoint.rpartition(":")
        there = [f"--master-addr={host}", f"--master-port={port}", f"--rdzv-id={start}"]
        return [f"--nnodes={self.count}", f"--node-rank={self.rank}", *there, share]


def meet(nodes: Nodes, config: Config, timeout_s: float, refusal: Callable[[], str | None]) -> str:
    """Begins the launcher's heartbeat and waits for those of the other nodes. Returns the id of this start, the same on all.

    Node 0 has prepared the run's directory. `refusal`: which node does not start, and why (refusals.py). Raises NodesError.
    """
    run_dir = config.run.dir
    start = uuid.uuid4().hex if nodes.rank == 0 else _join(nodes, config, timeout_s, refusal)
    watch.fact(_START, lambda: start)
    watch.fact(_NODES, lambda: nodes.count)
    watch.start(run_dir, f"{LAUNCHER}{nodes.rank}")
    if nodes.rank == 0:
        _await_others(nodes, run_dir, start, timeout_s, refusal)
    return start


def _await_others(nodes: Nodes, run_dir: Path, start: str, timeout_s: float, refusal: Callable[[], str | None]) -> None:
    deadline = time.monotonic() + timeout_s
    with watch.doing("wait", "the other nodes", timeout_s):
        while missing := [number for number in range(1, nodes.count) if not _has_joined(run_dir, number, start)]:
            if (said := refusal()) is not None:
                raise NodesError(said)
            if time.monotonic() > deadline:
                raise NodesError(
                    f"{_names(missing)} of {nodes.count} did not come within {timeout_s:g} s\n"
                    f"  fix: run the same command there, with a --node-rank of its own; all nodes must see {run_dir}"
                )
            time.sleep(POLL_S)


def _join(nodes: Nodes, config: Config, timeout_s: float, refusal: Callable[[], str | None]) -> str:
    """The id of node 0's start."""
    run_dir = config.run.dir
    deadline = time.monotonic() + timeout_s
    times = set[float]()
    with watch.doing("wait", "node 0", timeout_s):
        while (zero := _launcher(run_dir, 0)) is None or len(times | {zero.time}) < 2:
            times |= {zero.time} if zero is not None else set()
            if (said := refusal()) is not None:
                raise NodesError(said)
            if time.monotonic() > deadline:
                raise NodesError(
                    f"node 0 did not come within {timeout_s:g} s\n"
                    f"  fix: run the same command there, with --node-rank 0; all nodes must see {run_dir}"
                )
            time.sleep(POLL_S)
    if zero.facts[_NODES] != nodes.count:
        raise NodesError(f"--nnodes {nodes.count}, but node 0 ({zero.host}) was started with --nnodes {zero.facts[_NODES]}")
    theirs, ours = (run_dir / "config.yaml").read_text(), dump(config)
    if theirs != ours:
        lines = zip(theirs.splitlines(), ours.splitlines(), strict=False)
        there, here = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
        raise NodesError(
            f"another config than that of node 0 ({zero.host}): `{here.strip()}` here, `{there.strip()}` there\n"
            "  fix: give all nodes the same config and the same overrides"
        )
    return str(zero.facts[_START])


def _has_joined(run_dir: Path, number: int, start: str) -> bool:
    launcher = _launcher(run_dir, number)
    return launcher is not None and launcher.facts.get(_START) == start


def _launcher(run_dir: Path, number: int) -> ProcessState | None:
    return next((state for state in read_states(run_dir) if state.name == f"{LAUNCHER}{number}"), None)


def _names(numbers: list[int]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))

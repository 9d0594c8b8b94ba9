"""The machines of one run: how their launchers find each other, and how one that does not start
tells the others why.

    node 0: prepares the directory, shows the id of this start --> node n: shows the same id --> all
    are there: the ranks start

    node n does not start: n --why--> 0, which ends and names n
    node 0 does not start: 0 --why--> all that wait for it

They meet in the run's directory, which all of them see. Why a node does not start goes through node
0's endpoint: a node that cannot read its config, or does not see the file system, does not know the
directory.

Invariants:
- no rank starts before the launcher of every node is there, with the same config and the same
  number of nodes;
- what an earlier start left in the directory is not taken for node 0: its state must be seen to
  change;
- node 0 listens from its first moment on, and gives the port back before its ranks start: they need
  it;
- a node that does not start ends at the latest TELL_S after it said so to its user, heard or not;
- what a stranger sends to the port is not taken for a node's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.progress_monitor import LAUNCHER, ProcessState, read_states

POLL_S = 0.1
TELL_S = 10.0
"""Nodes are started within about so long of each other, by a scheduler; by hand, who comes later
sees the message itself."""
CONNECT_S = 1.0
_LONGEST = 2**16
"""Bytes of a message."""
_START, _NODES = "start", "nodes"


class NodesError(UserError):
    """The nodes do not fit each other or the config, or one is missing."""


Refusal = Callable[[], NodesError | None]
"""Returns the error of another node that does not start, once it is known."""


@dataclass(frozen=True)
class Nodes:
    """`count` machines, each with the same number of ranks. This one is number `rank`; `endpoint`
    (host:port) is on number 0."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""

    def __post_init__(self) -> None:
        """Raises NodesError for a rank or an endpoint that cannot be used."""
        host, _, port = self.endpoint.rpartition(":")
        if self.rank >= self.count:
            raise NodesError.of(
                "--node-rank",
                f"{self.rank}, but the last of {self.count} nodes (--nnodes) is number"
                f" {self.count - 1}",
                "number the nodes from 0",
            )
        if self.count > 1 and not (host and port.isdecimal()):
            raise NodesError.of(
                "--rdzv-endpoint",
                f"{self.endpoint!r} is not HOST:PORT" if self.endpoint else "is missing",
                "name node 0 as the others reach it and a free port on it, HOST:PORT",
            )

    @property
    def host(self) -> str:
        """Host of the endpoint; an IPv6 address without its brackets."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def torchrun(self, ranks: int, start: str) -> list[str]:
        """Its arguments for this node's share of the ranks; `start`: the id that `rendezvous`
        returned."""
        share = f"--nproc-per-node={ranks // self.count}"
        if self.count == 1:
            return ["--standalone", share]
        host, _, port = self.endpoint.rpartition(":")
        there = [f"--master-addr={host}", f"--master-port={port}", f"--rdzv-id={start}"]
        return [f"--nnodes={self.count}", f"--node-rank={self.rank}", *there, share]


def rendezvous(nodes: Nodes, config: Config, timeout_s: float, refusal: Refusal) -> str:
    """Begins the launcher's heartbeat and waits for those of the other nodes. Returns the id of
    this start, the same on all.

    Node 0 has prepared the run's directory. `refusal`: that of PeerNodes. Raises NodesError.
    """
    run_dir = config.run.dir
    start = uuid.uuid4().hex if nodes.rank == 0 else _join(nodes, config, timeout_s, refusal)
    watch.fact(_START, lambda: start)
    watch.fact(_NODES, lambda: nodes.count)
    watch.start(run_dir, f"{LAUNCHER}{nodes.rank}")
    if nodes.rank == 0:
        _await_others(nodes, run_dir, start, timeout_s, refusal)
    return start


def _await_others(
    nodes: Nodes, run_dir: Path, start: str, timeout_s: float, refusal: Refusal
) -> None:
    deadline = time.monotonic() + timeout_s
    with watch.doing("wait", "the other nodes", timeout_s):
        while missing := [
            number for number in range(1, nodes.count) if not _has_joined(run_dir, number, start)
        ]:
            if (error := refusal()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise NodesError.of(
                    f"{_names(missing)} of {nodes.count}",
                    f"timed out after {timeout_s:g} s",
                    "run the same command there, with a --node-rank of its own; all nodes must see"
                    f" {run_dir}",
                )
            time.sleep(POLL_S)


def _join(nodes: Nodes, config: Config, timeout_s: float, refusal: Refusal) -> str:
    """The id of node 0's start."""
    run_dir = config.run.dir
    deadline = time.monotonic() + timeout_s
    times = set[float]()
    with watch.doing("wait", "node 0", timeout_s):
        while (zero := _launcher(run_dir, 0)) is None or len(times | {zero.time}) < 2:
            times |= {zero.time} if zero is not None else set()
            if (error := refusal()) is not None:
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
    theirs, ours = (run_dir / "config.yaml").read_text(), dump(config)
    if theirs != ours:
        lines = zip(theirs.splitlines(), ours.splitlines(), strict=False)
        there, here = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
        raise NodesError.of(
            "CONFIG",
            f"differs from that of node 0 ({zero.host}): `{here.strip()}` here, `{there.strip()}`"
            " there",
            "give all nodes the same config and the same overrides",
        )
    return str(zero.facts[_START])


def _has_joined(run_dir: Path, number: int, start: str) -> bool:
    launcher = _launcher(run_dir, number)
    return launcher is not None and launcher.facts.get(_START) == start


def _launcher(run_dir: Path, number: int) -> ProcessState | None:
    return next(
        (state for state in read_states(run_dir) if state.name == f"{LAUNCHER}{number}"), None
    )


def _names(numbers: list[int]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))


class PeerNodes:
    """The nodes beside this one, until their ranks start. A single node has none."""

    def __init__(self, nodes: Nodes) -> None:
        """Raises NodesError where node 0 cannot listen on the port of its endpoint."""
        self._nodes = nodes
        self._listener = _listen(nodes) if nodes.count > 1 and nodes.rank == 0 else None
        self._connections: list[_Connection] = []
        self._untold = nodes.count - 1 if nodes.rank == 0 else 1

    def refusal(self) -> NodesError | None:
        """The error of a node that does not start, if one sent it; blocks for CONNECT_S at most."""
        self._reach()
        for connection in self._connections:
            if (said := connection.read()) is not None:
                self._untold -= 1
                self._connections.remove(connection)  # nobody reads there any more
                connection.close()
                return said
        self._connections = [connection for connection in self._connections if not connection.ended]
        return None

    def refuse(self, why: str, within_s: float = TELL_S) -> None:
        """Tells the others that this node does not start: those that are there, and who comes
        `within_s` seconds."""
        deadline = time.monotonic() + within_s
        message = (
            json.dumps(
                {"node": self._nodes.rank, "host": socket.gethostname(), "why": why}
            ).encode()
            + b"\n"
        )
        told = 0
        with watch.doing(
            "wait", "the other nodes, to tell them that this one does not start", within_s
        ):
            while told < self._untold:
                self._reach()
                told += sum(connection.send(message) for connection in self._connections)
                self._hang_up()
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        self.close()

    def close(self) -> None:
        """Gives the port back. From now on nobody is heard or told."""
        self._hang_up()
        if self._listener is not None:
            self._listener.close()
        self._listener, self._untold = None, 0

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _reach(self) -> None:
        """Node 0: takes who has called. The others: call node 0, once it is there."""
        with contextlib.suppress(OSError):
            if self._listener is not None:
                while True:
                    self._connections.append(_Connection(self._listener.accept()[0]))
            elif self._nodes.rank > 0 and not self._connections:
                self._connections.append(
                    _Connection(
                        socket.create_connection((self._nodes.host, self._nodes.port), CONNECT_S)
                    )
                )


class _Connection:
    """A connection, read without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._got = b""
        self.ended = False

    def read(self) -> NodesError | None:
        """The error that the node at the other end sent, once it is whole."""
        try:
            while not self.ended and len(self._got) < _LONGEST:
                got = self._connection.recv(4096)
                self._got += got
                self.ended = not got
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        line, newline, _ = self._got.partition(b"\n")
        return _error(line) if newline else None

    def send(self, message: bytes) -> bool:
        """True if it went out; a short text always fits the kernel's buffer."""
        try:
            self._connection.sendall(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._connection.close()


def _listen(nodes: Nodes) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", nodes.port), family=family, backlog=nodes.count, dualstack_ipv6=both
        )
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise NodesError.of(
            "--rdzv-endpoint",
            f"port {nodes.port} is already in use on this machine"
            if in_use
            else f"this machine cannot listen on port {nodes.port}: {error}",
            "name a free port",
        ) from error
    listener.setblocking(False)
    return listener


def _error(line: bytes) -> NodesError | None:
    try:
        message = json.loads(line)
        node, host, why = int(message["node"]), str(message["host"]), str(message["why"])
    except (ValueError, LookupError, TypeError):
        return None
    indented = why.replace("\n", "\n    ")
    return NodesError.of(
        f"node {node} ({host})",
        f"does not start:\n    {indented}",
        "correct it there, then start all nodes again",
    )

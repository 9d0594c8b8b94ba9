"""Why a node does not start, told at once to the nodes that wait for it, through node 0's endpoint.

    node n does not start: n --why--> 0, which ends and names n          node 0 does not: 0 --why--> all that wait for it

The run's directory would not do: a node that cannot read its config, or does not see the file system, does not know it.

Invariants:
- node 0 listens from its first moment on, and gives the port back before its ranks start: they need it;
- a node that does not start ends at the latest TELL_S after it said so to its user, heard or not;
- what a stranger sends to the port is not taken for a node's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

from megatron_async_rl.nodes import Nodes, NodesError
from megatron_async_rl.observe import watch

TELL_S = 10.0
"""Nodes are started within about so long of each other, by a scheduler; by hand, who comes later sees the message itself."""
POLL_S = 0.1
CONNECT_S = 1.0
_LONGEST = 2**16
"""Bytes of a message."""


class Others:
    """The nodes beside this one, until their ranks start. Of a single node: nobody."""

    def __init__(self, nodes: Nodes) -> None:
        """Raises NodesError where node 0 cannot have the port of its endpoint."""
        self._nodes = nodes
        self._listener = _listen(nodes) if nodes.count > 1 and nodes.rank == 0 else None
        self._lines: list[_Line] = []
        self._untold = nodes.count - 1 if nodes.rank == 0 else 1

    def refusal(self) -> str | None:
        """Which node does not start, and why, if one has said so; blocks for CONNECT_S at most."""
        self._reach()
        for line in self._lines:
            if (said := line.read()) is not None:
                self._untold -= 1
                self._lines.remove(line)  # nobody reads there any more
                line.close()
                return said
        self._lines = [line for line in self._lines if not line.ended]
        return None

    def refuse(self, why: str, within_s: float = TELL_S) -> None:
        """Tells the others that this node does not start: those that are there, and who comes `within_s` seconds."""
        deadline = time.monotonic() + within_s
        message = json.dumps({"node": self._nodes.rank, "host": socket.gethostname(), "why": why}).encode() + b"\n"
        told = 0
        with watch.doing("wait", "the other nodes, to tell them that this one does not start", within_s):
            while told < self._untold:
                self._reach()
                told += sum(line.send(message) for line in self._lines)
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
        for line in self._lines:
            line.close()
        self._lines = []

    def _reach(self) -> None:
        """Node 0: takes who has called. The others: call node 0, once it is there."""
        with contextlib.suppress(OSError):
            if self._listener is not None:
                while True:
                    self._lines.append(_Line(self._listener.accept()[0]))
            elif self._nodes.rank > 0 and not self._lines:
                self._lines.append(_Line(socket.create_connection((self._nodes.host, self._nodes.port), CONNECT_S)))


class _Line:
    """A connection, read without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._got = b""
        self.ended = False

    def read(self) -> str | None:
        """What the node at the other end said, once it is whole."""
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
        return _said(line) if newline else None

    def send(self, message: bytes) -> bool:
        """Whether it went out; a short text always fits the kernel's buffer."""
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
        listener = socket.create_server(("", nodes.port), family=family, backlog=nodes.count, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise NodesError(
            f"--rdzv-endpoint {nodes.endpoint}: port {nodes.port} cannot be had on this machine: {error}\n  fix: name a free port"
        ) from error
    listener.setblocking(False)
    return listener


def _said(line: bytes) -> str | None:
    try:
        message = json.loads(line)
        node, host, why = int(message["node"]), str(message["host"]), str(message["why"])
    except (ValueError, LookupError, TypeError):
        return None
    indented = why.replace("\n", "\n  ")
    return f"node {node} ({host}) does not start. It said:\n  {indented}"

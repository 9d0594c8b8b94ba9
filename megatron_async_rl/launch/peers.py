"""The machines of one run and the connections between their launchers, until the ranks start.

    node n does not start: n --why--> 0, which ends and names n
    node 0 does not start: 0 --why--> all that wait for it
    node n is ready: n --address of its ranks--> 0, which tries it --address of its own--> n, which
    tries that

They go through node 0's endpoint: a node that cannot read its config, or does not see the file
system, does not know the run's directory.

Invariants:
- node 0 listens from its first moment on, and gives the port back before its ranks start: they need
  it;
- a node that does not start ends at most TELL_S after it reported so to its user, whether or not
  the others heard it;
- no rank starts on a node that node 0 does not reach, or that does not reach node 0, by the
  addresses that the ranks will give each other;
- what a stranger sends to the port is not taken for a node's;
- nothing listens at an address that node 0's endpoint and the ranks do not need.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog import watch

POLL_S = 0.1
TELL_S = 10.0
"""Nodes are started within about so long of each other, by a scheduler; by hand, who comes later
sees the message itself."""
CONNECT_S = 1.0
REACH_S = 10.0
"""Longest wait for a connection to a node that is known to be there."""
INTERFACE = "GLOO_SOCKET_IFNAME"
RENDEZVOUS = "bound"
"""Name of the rendezvous of torchrun.py in torchrun's registry."""
STRANGERS = 128
"""Limit of the connections at node 0 besides the nodes' own; the oldest are closed."""
LOOPBACK = "127.0.0.1"
_LONGEST = 2**16
"""Bytes of a message."""


class NodesError(UserError):
    """The nodes do not fit each other or the config, or one is missing."""


class Unreached(NodesError):
    """This node does not reach node 0's endpoint, so that it cannot tell it either."""


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

    def torchrun(self, ranks: int, start: str, address: str = LOOPBACK) -> list[str]:
        """Return torchrun's arguments for this node's share of the ranks.

        `start`: the id that `rendezvous` returned. `address`: of node 0, as this node reaches it;
        on node 0 the address at which its store listens.
        """
        host = f"[{address}]" if ":" in address else address
        return [
            f"--nnodes={self.count}",
            f"--nproc-per-node={ranks // self.count}",
            f"--rdzv-backend={RENDEZVOUS}",
            f"--rdzv-endpoint={host}:{self.port if self.count > 1 else 0}",
            f"--rdzv-conf=rank={self.rank}",
            f"--rdzv-id={start}",
        ]


class PeerNodes:
    """The other nodes, until their ranks start. A single node has none."""

    def __init__(self, nodes: Nodes) -> None:
        """Raises NodesError where node 0 cannot listen at its endpoint."""
        self._nodes = nodes
        first = nodes.count > 1 and nodes.rank == 0
        self.address = listening_address(nodes) if first else nodes.host or LOOPBACK
        """Address of node 0: on node 0 an IP address of this machine."""
        self._listener = _listen(nodes, self.address) if first else None
        self._ranks: socket.socket | None = None
        """Listens where the ranks of this node will, for others to try the address."""
        self._connections: list[_PeerConnection] = []
        self._unreached = ""
        self._unnotified = nodes.count - 1 if nodes.rank == 0 else 1

    def refusal(self) -> NodesError | None:
        """The error of a node that does not start, if one sent it; blocks for CONNECT_S at most.
        Node 0 also tries the addresses of those that are ready, up to REACH_S each: raises
        NodesError."""
        self._reach()
        for connection in list(self._connections):
            message = connection.read()
            if "why" in message:
                self._unnotified -= 1
                self._connections.remove(connection)  # the peer no longer reads
                connection.close()
                return refused(message["node"], message["host"], message["why"])
            if "address" in message and self._nodes.rank == 0:
                self._try(message, f"node {message['node']} ({message['host']})")
                connection.send(self._hello(connection))
        self._connections = [connection for connection in self._connections if not connection.ended]
        return None

    def greet(self, timeout_s: float) -> None:
        """On a node other than 0, with node 0 there: returns once each of the two has reached the
        address of the other's ranks. Raises NodesError, Unreached where node 0 hears nothing."""
        deadline, connect_by = time.monotonic() + timeout_s, time.monotonic() + REACH_S
        greeted: _PeerConnection | None = None
        while True:
            self._reach()
            for connection in self._connections:
                message = connection.read()
                if "why" in message:
                    raise refused(message["node"], message["host"], message["why"])
                if "address" in message:
                    self._try(message, f"node 0 ({message['host']})")
                    return
                if connection is not greeted and connection.send(self._hello(connection)):
                    greeted = connection
            self._connections = [one for one in self._connections if not one.ended]
            if self._connections:
                connect_by = time.monotonic() + REACH_S
            if time.monotonic() > min(deadline, connect_by):
                raise Unreached.of(
                    "--rdzv-endpoint",
                    f"node {self._nodes.rank} ({socket.gethostname()}) does not reach node 0 at"
                    f" {self._nodes.endpoint}: {self._unreached or 'no answer'}",
                    "name node 0 by an address that the other nodes reach (MASTER_ADDR), and open"
                    " that port (MASTER_PORT) between them",
                )
            time.sleep(POLL_S)

    def refuse(self, why: str, within_s: float = TELL_S) -> None:
        """Tells the others that this node does not start: those that are there, and who comes
        `within_s` seconds."""
        deadline, message, notified = time.monotonic() + within_s, self._message(why=why), 0
        with watch.doing(
            "wait", "the other nodes, to tell them that this one does not start", within_s
        ):
            while notified < self._unnotified:
                self._reach()
                notified += sum(connection.send(message) for connection in self._connections)
                self._hang_up()
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        self.close()

    def close(self) -> None:
        """Gives the port back. Stop sending and receiving."""
        self._hang_up()
        for listener in (self._listener, self._ranks):
            if listener is not None:
                listener.close()
        self._listener, self._ranks, self._unnotified = None, None, 0

    def _hello(self, connection: _PeerConnection) -> bytes:
        """The message to a peer: the address at which this node's ranks will listen, and the
        network interface of the connection."""
        if self._ranks is None:
            address = rank_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._ranks = socket.create_server(
                (address, 0), family=family, backlog=self._nodes.count
            )
        return self._message(
            address=list(self._ranks.getsockname()[:2]), interface=connection.interface
        )

    def _try(self, hello: dict[str, Any], whose: str) -> None:
        """Raises NodesError where the ranks here will not reach those of the other."""
        host, port = hello["address"]
        try:
            socket.create_connection((host, port), REACH_S).close()
        except OSError as error:
            loopback = ipaddress.ip_address(host).is_loopback
            detail = ", which is every machine's own address" if loopback else ""
            raise NodesError.of(
                whose,
                f"its ranks will listen at {host}{detail}, and node {self._nodes.rank}"
                f" ({socket.gethostname()}) does not reach that: {error}",
                f"set {INTERFACE} there to the network that all nodes have (such as"
                f" {hello['interface']}), and NCCL_SOCKET_IFNAME on GPUs; open all ports in it",
            ) from error

    def _message(self, **content: object) -> bytes:
        own = {"node": self._nodes.rank, "host": socket.gethostname()}
        return json.dumps(own | content).encode() + b"\n"

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _reach(self) -> None:
        """Node 0: takes who has called. The others: call node 0, once it is there."""
        try:
            if self._listener is not None:
                while True:
                    self._connections.append(_PeerConnection(self._listener.accept()[0]))
                    if len(self._connections) > STRANGERS + self._nodes.count:
                        # A node whose connection this was calls again.
                        self._connections.pop(0).close()
            elif self._nodes.rank > 0 and not self._connections:
                self._connections.append(
                    _PeerConnection(
                        socket.create_connection((self._nodes.host, self._nodes.port), CONNECT_S)
                    )
                )
        except OSError as error:
            self._unreached = str(error)


class _PeerConnection:
    """A connection, read without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._got = b""
        self.ended = False

    @property
    def interface(self) -> str:
        """Name of this machine's network interface that carries the connection."""
        here = self._connection.getsockname()[0].removeprefix("::ffff:")
        return next(
            (
                name
                for name, addresses in psutil.net_if_addrs().items()
                if here in (one.address for one in addresses)
            ),
            here,
        )

    def read(self) -> dict[str, Any]:
        """The next message of the node at the other end, once it is whole; else nothing."""
        try:
            while not self.ended and len(self._got) < _LONGEST:
                got = self._connection.recv(4096)
                self._got += got
                self.ended = not got
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        line, newline, rest = self._got.partition(b"\n")
        if not newline:
            return {}
        self._got = rest
        return _message(line)

    def send(self, message: bytes) -> bool:
        """True if it went out; a short text always fits the kernel's buffer."""
        try:
            self._connection.sendall(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._connection.close()


def rank_address() -> str:
    """The address that ranks of this machine give to the others, by gloo's rule: that of the
    interface in GLOO_SOCKET_IFNAME, else the first that this machine's name has. Raises
    NodesError."""
    if names := os.environ.get(INTERFACE):
        interfaces = psutil.net_if_addrs()
        of_internet = (socket.AF_INET, socket.AF_INET6)
        for name in names.split(","):
            for one in interfaces.get(name, ()):
                if one.family in of_internet:
                    return one.address.partition("%")[0]
        raise NodesError.of(
            INTERFACE,
            f"{names} is not an interface of {socket.gethostname()} with an address",
            f"set it there to one of: {', '.join(interfaces)}",
        )
    return next(_own_addresses(socket.gethostname()), LOOPBACK)


def listening_address(nodes: Nodes) -> str:
    """Return the address at which node 0 accepts the other nodes: that of its endpoint where it is
    one of this machine, else that of its ranks. Raises NodesError where the others cannot reach
    it."""
    named = list(_own_addresses(nodes.host))
    outward = [address for address in named if not ipaddress.ip_address(address).is_loopback]
    if outward:
        return outward[0]
    if nodes.host in ("localhost", *named):
        return named[0]
    # The endpoint's name is this machine's for the others alone: forwarded, or, as Debian writes
    # /etc/hosts, a loopback address here.
    address = rank_address()
    if named and ipaddress.ip_address(address).is_loopback:
        raise NodesError.of(
            "--rdzv-endpoint",
            f"{nodes.host} is {named[0]} on this machine, which is every machine's own address",
            f"name node 0 by its number in the network that all nodes have (MASTER_ADDR), or set"
            f" {INTERFACE} here to the interface of that network",
        )
    return address


def _own_addresses(host: str) -> Iterator[str]:
    """Addresses of `host` that are this machine's."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as tried:
                tried.bind((address[0], 0))
                yield str(address[0])


def _listen(nodes: Nodes, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, nodes.port), family=family, backlog=nodes.count)
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise NodesError.of(
            "--rdzv-endpoint",
            f"port {nodes.port} is already in use on this machine"
            if in_use
            else f"this machine cannot listen on port {nodes.port} of {address}: {error}",
            "name a free port",
        ) from error
    listener.setblocking(False)
    return listener


def _message(line: bytes) -> dict[str, Any]:
    """A node's message; empty for anything else."""
    try:
        message = json.loads(line)
        found = {"node": int(message["node"]), "host": str(message["host"])}
        if "why" in message:
            return found | {"why": str(message["why"])}
        host, port = message["address"]
        address = (str(ipaddress.ip_address(host)), int(port))
        return found | {"address": address, "interface": str(message["interface"])}
    except (ValueError, LookupError, TypeError):
        return {}


def refused(node: int, host: str, why: str) -> NodesError:
    indented = why.replace("\n", "\n    ")
    return NodesError.of(
        f"node {node} ({host})",
        f"does not start:\n    {indented}",
        "correct it there, then start all nodes again",
    )

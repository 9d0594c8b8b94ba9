"""The machines of one run, and the addresses at which they reach each other.

Invariant: an address belongs to this machine and is chosen by gloo's rule, so the launchers test
the addresses that the ranks will use.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from megatron_async_rl.config.problem import UserError

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


class NodesError(UserError):
    """The nodes do not fit each other or the config, or a node is missing."""


@dataclass(frozen=True)
class Nodes:
    """Number of machines, each with the same number of ranks, and the number of this machine,
    `rank`. `endpoint` (host:port) is on machine 0."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""

    def __post_init__(self) -> None:
        """Raise NodesError for a rank or an endpoint that cannot be used."""
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


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with `address`."""
    here = address.removeprefix("::ffff:")
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, every in interfaces if here in (one.address for one in every)), here
    )


def rank_address() -> str:
    """Return the address under which other machines reach the ranks of this one, by gloo's rule:
    the address of the interface in GLOO_SOCKET_IFNAME, else the first address of this machine's
    name. Raises NodesError."""
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
    """Return the address at which node 0 accepts the other nodes: the address of its endpoint if it
    belongs to this machine, else the address of its ranks. Raises NodesError if the others cannot
    reach it."""
    named = list(_own_addresses(nodes.host))
    outward = [address for address in named if not ipaddress.ip_address(address).is_loopback]
    if outward:
        return outward[0]
    if nodes.host in ("localhost", *named):
        return named[0]
    # Only for other machines is the endpoint's name an address of this one: it is forwarded, or
    # /etc/hosts maps it to a loopback address here, as Debian does.
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
    """Yield the addresses of `host` that belong to this machine."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as tried:
                tried.bind((address[0], 0))
                yield str(address[0])

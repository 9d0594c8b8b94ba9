"""torchrun with a store that listens at one address: `python -m megatron_async_rl.launch.torchrun`.

torchrun's own rendezvous opens its store at all addresses of the machine. With `--standalone` its
agent also unpickles values of the store, so anyone who reaches the port can run code as the run's
user. This rendezvous is torchrun's static one, which unpickles nothing, and node 0 serves its store
from a socket that the launcher has opened and this process inherits.

Invariants:
- the store listens only at the address of `--rdzv-endpoint`, the address of the launcher's socket;
- ranks use the store of node 0's torchrun and open none.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import Store, run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_async_rl.launch.rendezvous import RENDEZVOUS
from megatron_async_rl.watchdog import preloaded
from megatron_async_rl.weights.bound_store import serve_store


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, whose store takes over a listening socket."""

    _store: Store | None

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Read `rank`, `timeout` and, on node 0, `descriptor` (of the socket) from --rdzv-conf."""
        host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        config = parameters.config
        super().__init__(
            host.strip("[]"),
            port,
            int(config["rank"]),
            parameters.max_nodes,
            parameters.run_id,
            int(config["timeout"]),
        )
        self._descriptor = int(config.get("descriptor", -1))

    def get_backend(self) -> str:
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        # Only node 0 has the store; torch calls this method again for each restart.
        if self.rank == 0 and self._store is None:
            listener = socket.socket(fileno=self._descriptor)
            self._store = serve_store(listener, self.timeout, clients=self.world_size)
        return super().next_rendezvous()


def _start_rank(
    handler: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]
) -> preloaded.Process | subprocess.Popen[bytes]:
    """Start a rank from the server of ranks, or like torchrun if there is no server."""
    arguments, address = command[1:], preloaded.address_of("ranks")
    rank = None
    if command[0] == sys.executable:  # not where torchrun binds it to a NUMA node
        rank = preloaded.start(address, arguments, environment, (0, 1, 2), new_session=True)
    return rank or _start_interpreter(handler, tuple(command), dict(environment))


_start_interpreter = SubprocessHandler._popen


def main(given: Sequence[str]) -> None:
    # torch has no hook for the start of a rank.
    SubprocessHandler._popen = _start_rank
    rendezvous_handler_registry.register(RENDEZVOUS, BoundRendezvous)
    run.main(list(given))


if __name__ == "__main__":
    main(sys.argv[1:])

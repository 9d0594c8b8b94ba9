"""A torch store that listens at one address.

Invariant: a `TCPStore` server of this package listens at the address that it is given. torch's own
server listens at all addresses of the machine, whatever its `host_name` is, and serves every
client.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def serve_store(
    address: str, port: int, timeout: timedelta, *, clients: int | None = None
) -> TCPStore:
    """Return a store whose server listens at `address` alone, an IP address of this machine.

    `port`: 0 takes a free one. `clients`: number of members to wait for, this one included; None
    waits for none. Raises OSError where this machine cannot listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=128)
    free_port = listener.getsockname()[1]
    # torch closes the descriptor with the store, and opens no socket of its own.
    return TCPStore(
        address,
        free_port,
        clients,
        is_master=True,
        timeout=timeout,
        wait_for_workers=clients is not None,
        master_listen_fd=listener.detach(),
    )

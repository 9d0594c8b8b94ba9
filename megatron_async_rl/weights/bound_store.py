"""A torch store that listens at one address.

Invariants:
- a `TCPStore` server of this package listens only at the address of its socket. torch's own server
  listens at all addresses of the machine, whatever its `host_name` is, and serves every client;
- importing this module does not load torch: `mar train` listens before it needs torch.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens only at `address`, an IP address of this machine.

    `port`: 0 for a free port. Raises OSError if this machine cannot listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def serve_store(listener: socket.socket, timeout: timedelta, *, clients: int | None = None) -> Any:
    """Return a `TCPStore` whose server owns `listener` from now on.

    `timeout`: limit of a wait for a key. `clients`: number of members to wait for, including this
    one; None waits for none.
    """
    from torch.distributed import TCPStore

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        clients,
        is_master=True,
        timeout=timeout,
        wait_for_workers=clients is not None,
        # torch closes the descriptor with the store, and opens no other socket.
        master_listen_fd=listener.detach(),
        # The other backend reads in one blocking thread: half a message would block all clients.
        use_libuv=True,
    )

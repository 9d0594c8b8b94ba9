"""Ports for processes that need theirs before they start, and stores in which ranks meet."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def rank_stores(count: int) -> Sequence[TCPStore]:
    """Return servers of torch's store, each on a port that the kernel chose, in which ranks meet
    with TORCHELASTIC_USE_AGENT_STORE, as under torchrun. The caller keeps them until the ranks have
    ended. A port that was only found to be free could be taken before a rank listens on it."""
    from torch.distributed import TCPStore

    return [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]


def free_ports(count: int) -> list[int]:
    """Return ports below the range of outgoing connections, so that no connection uses one before
    its process starts."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().randrange(15000, 30000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("", port))
                found.append(port)
    return found

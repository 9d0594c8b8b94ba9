"""Ports for processes that need theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket


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

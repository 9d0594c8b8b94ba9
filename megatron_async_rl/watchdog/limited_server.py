"""A threaded server that a stranger cannot exhaust: a mix-in for `socketserver`.

Invariants:
- a connection that has not been admitted uses one of `slots` threads and descriptors; there are
  never more, however many clients connect;
- a new connection has priority over an idle one: if all slots are in use, the oldest is closed;
- a connection that is not admitted within `admission_s` is closed, however often it sends a byte;
- an admitted connection uses no slot and has no such limit, because it belongs to the run.
"""

from __future__ import annotations

import contextlib
import math
import socket
import socketserver
import threading
import time
from typing import Any

CUT_S = 1.0
"""Longest wait for the thread of a connection that was closed."""


class LimitedThreads(socketserver.ThreadingMixIn):
    """Mix-in that precedes a `socketserver.TCPServer` in the list of bases."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that the kernel queues until they are accepted. With socketserver's 5, a few
    simultaneous strangers would make all other connections wait for a retransmission."""
    slots = 64
    admission_s = math.inf

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._free = threading.Semaphore(self.slots)
        self._unadmitted: dict[socket.socket, float] = {}
        """Connections and their times, oldest first."""
        self._lock = threading.Lock()
        super().__init__(*arguments, **named)

    def admit(self, request: socket.socket) -> None:
        """Free the slot of a connection that has proved to belong to the run."""
        with self._lock:
            held = self._unadmitted.pop(request, None)
        if held is not None:
            self._free.release()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._cut_before(math.inf, maximum=1)
            if not self._free.acquire(timeout=CUT_S):
                self.shutdown_request(request)  # type: ignore[attr-defined]
                return
        with self._lock:
            self._unadmitted[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started that could free the slot
            self.admit(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.admit(request)

    def service_actions(self) -> None:
        """Close late connections; `serve_forever` calls this twice a second."""
        super().service_actions()  # type: ignore[misc]
        self._cut_before(time.monotonic() - self.admission_s)

    def _cut_before(self, moment: float, maximum: int | None = None) -> None:
        """Close connections made before `moment`, the oldest first; their threads then end."""
        with self._lock:
            late = [one for one, since in self._unadmitted.items() if since < moment][:maximum]
            for one in late:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

"""Server of the staged weights on rank 0's machine, for the agents of other machines (`relay.py`),
over TCP. Loads no torch, because the controller runs it.

    agent ---------------- connects ----------------> server
          <--------- nonce, 32 random bytes ---------
          -- HMAC-SHA256(key, nonce + request), request: version, bucket, first byte -->
          <------ number of bytes that follow, or a refusal -
          <-------------- the bytes (sendfile) -------------

Invariants:
- no byte of a file is sent before the request has proved the run's key. The key itself is never
  sent over this connection, and a nonce is valid for one request. Bytes are not encrypted;
- only buckets of versions whose slot rank 0 does not write are served (`stage`, `release`);
- a connection that has not proved the key uses one of `_RelayTcpServer.slots` threads for at most
  ADMISSION_S, so strangers exhaust neither threads nor descriptors (watchdog/limited_server.py);
- a connection that has proved the key has a separate thread and a limit on each wait for its peer,
  so a stalled connection is closed.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_async_rl.watchdog.limited_server import LimitedThreads
from megatron_async_rl.weights.manifest import BucketRef, Manifest

log = logging.getLogger(__name__)

NONCE_BYTES = 32
_REQUEST = struct.Struct(">qqq")
"""Version, bucket, first byte."""
_ANSWER = struct.Struct(">qI")
"""Number of bytes that follow; or -1, and the length of the reason that follows instead."""
_MAC_BYTES = 32
ADMISSION_S = 10.0
"""Longest time between a connection and its proof of the key."""


class RelayFailed(RuntimeError):
    """A version did not reach a machine; the message gives the reason. Retrying the same request
    would fail again."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a server and the key that it requires, a secret of the run."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class RelayServer:
    """Server of staged versions, at a free port of `host`, from its construction on. `silence_s`:
    longest wait for a peer.

    Raises OSError if `host` is not an address of this machine.
    """

    def __init__(self, host: str, silence_s: float) -> None:
        self._staged: dict[int, Sequence[BucketRef]] = {}
        self._server = _RelayTcpServer(host, self, silence_s)
        self.address = Address(
            host=host, port=self._server.server_address[1], key=secrets.token_bytes(32)
        )
        threading.Thread(
            target=self._server.serve_forever, name="relay server", daemon=True
        ).start()

    def stage(self, version: int, manifest: Manifest) -> None:
        """Serve `version` from now on."""
        # Replaced, never changed, because threads of connections read it without a lock.
        self._staged = {**self._staged, version: manifest.buckets}

    def release(self, version: int) -> None:
        """Stop serving versions before `version`, whose slot rank 0 may overwrite."""
        self._staged = {held: refs for held, refs in self._staged.items() if held >= version}

    def close(self) -> None:
        """Accept no more connections; open ones end with their bucket."""
        self._server.shutdown()
        self._server.server_close()

    def find(self, version: int, bucket: int, first: int) -> BucketRef:
        """Return the requested bucket, which has a byte `first`. Raises RelayFailed if it does not
        exist."""
        # Read once, because `stage` and `release` replace it from the controller's thread.
        staged = self._staged
        if version not in staged:
            there = ", ".join(map(str, sorted(staged))) or "none"
            raise RelayFailed(f"version {version} is not staged; staged: {there}")
        if not 0 <= bucket < len(staged[version]):
            raise RelayFailed(f"version {version} has {len(staged[version])} buckets, no {bucket}")
        ref = staged[version][bucket]
        if not 0 <= first < ref.size:
            raise RelayFailed(f"bucket {bucket} has {ref.size} bytes, no byte {first}")
        return ref


class _RelayTcpServer(LimitedThreads, socketserver.TCPServer):
    admission_s = ADMISSION_S
    request_queue_size = 128

    def __init__(self, host: str, relay: RelayServer, silence_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.relay = relay
        self.silence_s = silence_s
        super().__init__((host, 0), _RelayConnection)

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("the relay's connection to %s failed", client_address)


class _RelayConnection(socketserver.BaseRequestHandler):
    request: socket.socket
    server: _RelayTcpServer

    def handle(self) -> None:
        self.request.settimeout(self.server.silence_s)
        try:
            self._serve()
        except OSError as error:  # the agent reports what it could not get, and retries
            log.info("the relay's connection to %s broke: %s", self.client_address, error)

    def _serve(self) -> None:
        # A new nonce for each connection, so that a recorded request cannot be replayed.
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.request.sendall(nonce)
        mac = _exactly(self.request, _MAC_BYTES)
        requested = _exactly(self.request, _REQUEST.size)
        # In constant time: an early stop would reveal how much of the proof matches.
        if not hmac.compare_digest(mac, _mac(self.server.relay.address.key, nonce, requested)):
            log.warning("%s requested weights with another key", self.client_address)
            self._refuse("the key is not this run's")
            return
        # From here on the connection counts as the run's own.
        self.server.admit(self.request)

        version, bucket, first = _REQUEST.unpack(requested)
        try:
            ref = self.server.relay.find(version, bucket, first)
        except RelayFailed as error:
            self._refuse(str(error))
            return
        with open(ref.path, "rb") as file:
            # The open file, not the path, because a slot may be replaced by one of another size.
            size = os.fstat(file.fileno()).st_size
            if size != ref.size:
                self._refuse(f"{ref.path} holds {size} bytes, its manifest has {ref.size}")
                return
            self.request.sendall(_ANSWER.pack(size - first, 0))
            # From the page cache to the socket, without a copy in this process.
            self.request.sendfile(file, first, size - first)

    def _refuse(self, reason: str) -> None:
        text = reason.encode()
        self.request.sendall(_ANSWER.pack(-1, len(text)) + text)


def requested(
    address: Address, version: int, bucket: int, first: int, *, silence_s: float
) -> tuple[socket.socket, int]:
    """Return a connection that continues with the bytes of a bucket from `first` on, and their
    number. `silence_s`: longest wait for a byte, also on that connection.

    Raises RelayFailed with the server's reason if it refuses, and OSError if the connection breaks
    or nothing arrives.
    """
    connection = socket.create_connection((address.host, address.port), timeout=silence_s)
    try:
        nonce = _exactly(connection, NONCE_BYTES)
        request = _REQUEST.pack(version, bucket, first)
        connection.sendall(_mac(address.key, nonce, request) + request)
        count, length = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
        if count < 0:
            reason = _exactly(connection, length).decode(errors="replace")
            raise RelayFailed(f"the weights' server at {address} refused: {reason}")
    except BaseException:
        connection.close()
        raise
    return connection, count


def _mac(key: bytes, nonce: bytes, request: bytes) -> bytes:
    return hmac.digest(key, nonce + request, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes. Raises ConnectionError if the peer ends before."""
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise ConnectionError(f"the peer closed after {len(found)} of {count} bytes")
        found += piece
    return found

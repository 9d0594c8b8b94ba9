"""Files that a later start depends on: replaced whole, on disk before their name is, and digested.

Invariants:
- a file has its old content or its new content, also after a crash or a power failure: the new
  content is synced under another name, renamed, and the folder is synced;
- a folder that is written under another name is synced with everything in it before `publish`
  renames it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Buffer
from pathlib import Path

from blake3 import blake3

PARTIAL = ".partial"
"""Suffix of the name that a file has until it is whole."""
DIGEST_BYTES = 16
READ_BYTES = 2**24


def write_file(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` durably. Raises OSError, and then leaves the old file."""
    # Threads and launchers of several machines may write the same file at the same time.
    writer = f"{socket.gethostname()}.{threading.get_native_id()}"
    partial = path.with_name(f"{path.name}.{writer}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def publish(unfinished: Path, final: Path) -> None:
    """Rename a finished folder to a name that does not exist yet, after all of it is on disk."""
    for folder, _, files in os.walk(unfinished):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    os.rename(unfinished, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Digest:
    """BLAKE3 digest of bytes that come in pieces."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add(self, content: Buffer) -> None:
        self._hash.update(content)

    @property
    def text(self) -> str:
        """The digest so far, 32 hexadecimal digits."""
        return self._hash.hexdigest(length=DIGEST_BYTES)


def digest(content: Buffer) -> str:
    """`Digest.text` of `content`."""
    whole = Digest()
    whole.add(content)
    return whole.text


def file_digest(path: Path) -> str:
    """`digest` of a file's content, which is read in pieces. Raises OSError."""
    whole = Digest()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            whole.add(piece)
    return whole.text

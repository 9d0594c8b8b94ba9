"""Files that a later start depends on: atomic durable writes, digests, and reading with errors
that name the file.

Invariants:
- a file has its old content or its new content, also after a crash or a power failure: the new
  content is synced under another name, renamed, and the folder is synced;
- a folder that is written under another name is synced with everything in it before `publish`
  renames it;
- reading distinguishes an absent file, whose meaning the caller decides, from an unreadable one
  (a folder of that name, no permission, a loop of links), which raises UserError with its path.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Buffer, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from megatron_async_rl.config.problem import UserError

PARTIAL = ".partial"
"""Suffix of the name that a file has until it is whole."""
DIGEST_BYTES = 16
READ_BYTES = 2**24


def write_file(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` durably. Raises OSError, and then leaves the old file."""
    # Threads and launchers of several machines may write the same file at the same time.
    writer = f"{socket.gethostname()}.{threading.get_native_id()}"
    # In the same folder: a rename is atomic within one file system only.
    partial = path.with_name(f"{path.name}.{writer}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Content before name: after a power failure the name must not point to an empty file.
            os.fsync(file.fileno())
        os.replace(partial, path)
    # Also on Ctrl-C: a partial file would be taken for another writer's.
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The rename itself is a change of the folder.
    sync(path.parent)


def publish(unfinished: Path, final: Path) -> None:
    """Rename a finished folder to a name that does not exist yet, after all of it is on disk."""
    # In any order: the rename comes after all of it.
    for folder, _, files in os.walk(unfinished):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    os.rename(unfinished, final)
    # Only now does a crash leave the folder under its final name.
    sync(final.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Linux also syncs folders, opened for reading, this way.
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


FIX = "restore it from a copy, or give this user permission to read it"


def unreadable(path: Path, error: OSError | UnicodeDecodeError, fix: str = FIX) -> UserError:
    """Return the error for a file that is there and cannot be read."""
    return UserError.of(str(path), f"cannot be read: {reason(error)}", fix)


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return what is wrong with a file, without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    # strerror lacks the path, which the caller names.
    return error.strerror or str(error)


@contextmanager
def reading(path: Path, fix: str = FIX) -> Iterator[None]:
    """Turn an OSError of reading `path` into the UserError for it. FileNotFoundError passes."""
    try:
        yield
    # Absence has a meaning of its own for every caller.
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, fix) from error


def require_folder(folder: Path, fix: str) -> bool:
    """Return whether `folder` is there. Raises UserError for anything else under its name: a file,
    a link to nothing, a folder that may not be listed."""
    try:
        with os.scandir(folder):
            # A folder that may be listed may still hide what is in it.
            # Listing needs read permission, reading a file in it needs execute permission.
            os.stat(f"{folder}/.")
            return True
    except FileNotFoundError:
        # A link to nothing is a mistake, not an absent folder.
        if not folder.is_symlink():
            return False
        what = f"is a link to {os.readlink(folder)}, which is not there"
    except OSError as error:
        what = f"cannot be read as a folder: {reason(error)}"
    raise UserError.of(str(folder), what, fix)

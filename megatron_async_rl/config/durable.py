"""Files that a later start depends on: atomic durable writes, digests, and reads whose errors name
the file.

Invariants:
- a file has its old content or its new content, also after a crash or a power failure: the new
  content is written and synced under another name, the file is renamed, and the folder is synced;
- `publish` syncs a folder and everything in it before it renames the folder to its final name;
- reading distinguishes an absent file, which the caller interprets, from an unreadable file (a
  folder of that name, no permission, a loop of links), which raises UserError with its path.
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
"""Suffix of the name of a file that is not complete yet."""
DIGEST_BYTES = 16
READ_BYTES = 2**24


def write_file(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` durably. Raises OSError; the old file then stays unchanged."""
    # Threads, and launchers on several machines, may write the same file at the same time.
    writer = f"{socket.gethostname()}.{threading.get_native_id()}"
    # Write in the same folder: a rename is atomic only within one file system.
    partial = path.with_name(f"{path.name}.{writer}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Sync the content before the rename: otherwise a power failure may leave an empty file
            # under the final name.
            os.fsync(file.fileno())
        os.replace(partial, path)
    # Clean up on Ctrl-C, too: a left-over file looks like the file of another writer.
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # A write to a full disk fails without the name of the file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    # The rename changes the folder, so the folder needs a sync of its own.
    sync(path.parent)


def publish(unfinished: Path, final: Path) -> None:
    """Sync a complete folder to disk, and then rename it to `final`, which must not exist."""
    # The order of the syncs does not matter, because the rename follows all of them.
    for folder, _, files in os.walk(unfinished):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    os.rename(unfinished, final)
    # After this sync the new name survives a crash.
    sync(final.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Linux also syncs a folder that is opened for reading.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Digest:
    """Incremental BLAKE3 digest."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add(self, content: Buffer) -> None:
        self._hash.update(content)

    @property
    def text(self) -> str:
        """Digest of the bytes so far, as 32 hexadecimal digits."""
        return self._hash.hexdigest(length=DIGEST_BYTES)


def digest(content: Buffer) -> str:
    """Return `Digest.text` of `content`."""
    whole = Digest()
    whole.add(content)
    return whole.text


def file_digest(path: Path) -> str:
    """Return the `digest` of a file's content, which is read in pieces. Raises OSError."""
    whole = Digest()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            whole.add(piece)
    return whole.text


FIX = "restore it from a copy, or give this user permission to read it"


def unreadable(path: Path, error: OSError | UnicodeDecodeError, fix: str = FIX) -> UserError:
    """Return the error for a file that exists but cannot be read."""
    return UserError.of(str(path), f"cannot be read: {reason(error)}", fix)


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a file cannot be read, without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    # strerror has no path: the caller names the file.
    return error.strerror or str(error)


@contextmanager
def reading(path: Path, fix: str = FIX) -> Iterator[None]:
    """Convert an OSError while `path` is read into a UserError. FileNotFoundError propagates."""
    try:
        yield
    # Each caller interprets an absent file in its own way.
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, fix) from error


def require_folder(folder: Path, fix: str) -> bool:
    """Return True if `folder` exists and False if nothing has its name. Raises UserError for a
    file, a broken link, and a folder that cannot be listed or entered."""
    try:
        with os.scandir(folder):
            # Listing needs read permission; reading a file in the folder needs execute permission,
            # which this call checks.
            os.stat(f"{folder}/.")
            return True
    except FileNotFoundError:
        # A broken link is a mistake, not an absent folder.
        if not folder.is_symlink():
            return False
        what = f"is a link to {os.readlink(folder)}, which does not exist"
    except OSError as error:
        what = f"cannot be read as a folder: {reason(error)}"
    raise UserError.of(str(folder), what, fix)

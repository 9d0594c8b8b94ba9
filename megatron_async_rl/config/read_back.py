"""Files that an earlier command left, read back: an unreadable file is a UserError, with the file's
name and what to do.

Invariant: an absent file is not unreadable. Callers decide what absence means; everything else (a
folder in the file's place, no permission, a loop of links, a stale file handle) raises UserError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_async_rl.config.problem import UserError

FIX = "restore it from a copy, or give this user permission to read it"


def unreadable(path: Path, error: OSError | UnicodeDecodeError, fix: str = FIX) -> UserError:
    """Return the error for a file that is there and cannot be read."""
    return UserError.of(str(path), f"cannot be read: {reason(error)}", fix)


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return what is wrong with a file, without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return error.strerror or str(error)


@contextmanager
def reading(path: Path, fix: str = FIX) -> Iterator[None]:
    """Turn an OSError of reading `path` into the UserError for it. FileNotFoundError passes."""
    try:
        yield
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
            os.stat(f"{folder}/.")
            return True
    except FileNotFoundError:
        if not folder.is_symlink():
            return False
        what = f"is a link to {os.readlink(folder)}, which is not there"
    except OSError as error:
        what = f"cannot be read as a folder: {reason(error)}"
    raise UserError.of(str(folder), what, fix)

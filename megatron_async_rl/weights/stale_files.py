"""Finds weights that a killed run left behind in shared memory. Loads no torch: the launchers call
it, that of a machine of engines as `python -m megatron_async_rl.weights.stale_files`.

Invariant: a file whose writer lives is left alone; the writer holds an exclusive `flock` on it
(`shared_memory.py`).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mar-weights-"
"""Start of the names of bucket files."""


def remove_stale(directory: Path) -> list[Path]:
    """Delete the bucket files of dead processes in `directory`; returns what was deleted. Live ones
    are left alone."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)
    return removed


if __name__ == "__main__":
    remove_stale(SHARED_MEMORY)

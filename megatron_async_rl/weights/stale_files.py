"""Finds what killed processes left behind in shared memory. Loads no torch: the launchers call it,
the one of a rollout node as `python -m megatron_async_rl.weights.stale_files`, which also
removes the folders of killed runs.

Invariants:
- a file whose writer lives is left alone; the writer of weights holds an exclusive `flock` on them
  (`shared_memory.py`), a run one on behalf of its other files (watchdog/run_folder.py);
- OpenMP names a file after its process and never uses it again: that of a dead process is of no
  use.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from megatron_async_rl.watchdog import run_folder
from megatron_async_rl.watchdog.processes import condition
from megatron_async_rl.watchdog.run_folder import remove_stale_folders, remove_stale_shared_memory

SHARED_MEMORY = run_folder.SHARED_MEMORY
PREFIX = "mar-weights-"
"""Start of the names of bucket files."""
_OPENMP = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_(\d+)")
"""Process and user."""


def remove_stale(directory: Path) -> list[Path]:
    """Delete the files of dead processes in `directory`; return what was deleted."""
    removed = remove_stale_shared_memory(directory)
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, another user's, or no file
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:
            pass  # its writer lives, or it is another user's
        finally:
            os.close(descriptor)
    for path in sorted(directory.iterdir()):
        matched = _OPENMP.fullmatch(path.name)
        if matched is None or int(matched.group(2)) != os.getuid():
            continue
        try:
            if condition(int(matched.group(1)), path.stat().st_mtime) is None:
                path.unlink()
                removed.append(path)
        except OSError:  # gone meanwhile, or another user's in spite of its name
            continue
    return removed


if __name__ == "__main__":
    remove_stale(SHARED_MEMORY)
    remove_stale_folders()

"""One run at a time in a run's directory, and one study in its runs' folder.

Invariant: the directory is locked before anything in it is changed, and until the launcher and its
ranks have ended, however they end: the kernel releases the lock, and torchrun holds it together
with the launcher. A file system without locks (Lustre can be mounted so) makes this the user's
responsibility, and a message reports it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import condition
from megatron_async_rl.watchdog.progress_monitor import write_whole

log = logging.getLogger(__name__)

FILE = "lock"
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
FIX = "free space there or correct its permissions, or choose another run.dir"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunDirectoryError(UserError):
    """The run directory cannot be used for this config."""

    @classmethod
    def at(cls, run_dir: Path, what: str, fix: str) -> Self:
        return cls.of("run.dir", f"{run_dir} {what}", fix)


@contextmanager
def lock_run_dir(
    run_dir: Path, *, command: str = "mar train", key: str = "run.dir"
) -> Iterator[int]:
    """Lock `run_dir` (created if missing) for `command`, which read it from `key`. Yields the
    descriptor of the lock, which other processes may inherit.

    Raises RunDirectoryError if another run has it, OSError if it cannot be written to.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # Not truncated on opening, so that the holder's name stays readable.
    descriptor = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            what, fix = _holder(descriptor, command, key)
            raise RunDirectoryError.of(key, f"{run_dir} {what}", fix) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s: no locks there (%s), so that a second run in it would not be noticed",
                run_dir,
                error.strerror,
            )
        # Only the holder writes its name.
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        yield descriptor
    finally:
        # The lock lasts until the last process with the descriptor ends.
        os.close(descriptor)


def refuse_taken(run_dir: Path) -> None:
    """Raise RunDirectoryError while another run has `run_dir`, and if `run_dir` is a file. Changes
    nothing there."""
    if run_dir.is_file():
        raise RunDirectoryError.at(
            run_dir, "is a file", "name a directory, or a path without a file"
        )
    try:
        descriptor = os.open(run_dir / FILE, os.O_RDWR)
    except OSError:  # no run has been there; `lock_run_dir` reports other errors
        return
    try:
        _lock(descriptor)
    except BlockingIOError:
        what, fix = _holder(descriptor, "mar train", "run.dir")
        raise RunDirectoryError.at(run_dir, what, fix) from None
    except OSError:
        return
    finally:
        os.close(descriptor)


def request_engines(run_dir: Path, count: int) -> None:
    """Request this number of training engines of the run in `run_dir`; the run notes the result.

    Raises RunDirectoryError if no run is active there, or if its engines cannot join or leave.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise RunDirectoryError.at(run_dir, "has no config.yaml: it is not a run", "name a run.dir")
    # The run's own copy, which describes the running engines.
    rollout = load(config_file).rollout
    if rollout is None or rollout.placement == "colocated":
        why = "has no engines" if rollout is None else "has engines on the policy's devices"
        fix = "only engines with devices of their own join and leave (rollout.placement)"
        raise RunDirectoryError.at(run_dir, why, fix)
    if not is_taken(run_dir):
        fix = "set rollout.engines, and start it"
        raise RunDirectoryError.at(run_dir, "is not running: no run would read it", fix)
    with usable(run_dir):
        write_whole(run_dir / watch.ENGINES, str(count))


def _lock(descriptor: int) -> None:
    """Lock the open file. Raises BlockingIOError while a run holds it, and other OSErrors."""
    # `is_taken` of another process holds the lock for a moment.
    for wait_s in (0.05, 0.1, 0.2, None):
        try:
            # flock belongs to the open file, so children that inherit it hold the lock, too.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait_s is None:
                raise
            time.sleep(wait_s)
        else:
            return


def is_taken(run_dir: Path) -> bool:
    """Return True while a run has the directory, and if the file system has no locks."""
    try:
        with open(run_dir / FILE, "rb") as lock:
            # Shared, so that two readers do not mistake each other for a run.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def concerns(error: OSError, run_dir: Path) -> bool:
    """Return True for an error of a disk, of a file in `run_dir`, or of a folder above it. A failed
    write names no file."""
    if error.filename is None:
        return error.errno in _OF_DISK
    file, own = Path(os.fsdecode(error.filename)).absolute(), run_dir.absolute()
    # A folder above the run may have been removed.
    return own == file or own in file.parents or file in own.parents


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """Turn an OSError of the run's directory into a RunDirectoryError."""
    try:
        yield
    except OSError as error:
        if not concerns(error, run_dir):
            raise
        what = f"{error.filename or run_dir}: {error.strerror or error}"
        raise RunDirectoryError.of("run.dir", what, FIX) from error


def _holder(descriptor: int, command: str, key: str) -> tuple[str, str]:
    """Return (what, fix) about the process that holds the lock, from its entry in the file."""
    pid, _, host = os.read(descriptor, 300).decode(errors="replace").strip().partition(" ")

    # The launcher has ended, and its ranks still hold the lock.
    if host == socket.gethostname() and pid.isdecimal() and condition(int(pid)) is None:
        rest = "its runs continue" if key == "runs" else "its ranks stop after their step"
        what = f"is in use: `{command}` (pid {pid}) was killed, and {rest}"
        return what, f"try again when they have ended, or choose another {key}"

    what = f"is in use: `{command}` runs in it (pid {pid} on {host})"
    fix = f"stop that one (kill -INT {pid}) or choose another {key}"
    if host != socket.gethostname() and key == "run.dir":
        fix += "; if that machine belongs to this run, give each its own --node-rank (NODE_RANK)"
    return what, fix

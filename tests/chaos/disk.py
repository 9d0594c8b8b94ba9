"""A disk that fails as the test chooses: it is full, or the process dies at one of its operations.

Every operation that the sample log, the checkpoint, metrics.jsonl and events.jsonl make counts:
creating a file, writing, syncing, renaming and deleting. After the process has died no operation
takes effect, as after SIGKILL: no cleanup runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_async_rl.metrics import log as metrics_log
from megatron_async_rl.samples import frames
from megatron_async_rl.watchdog import events


class Crash(BaseException):
    """Simulated SIGKILL. Not an Exception, so that no code of the package handles it."""


class FaultyDisk:
    """`operations`: number of operations so far. `full`: writes fail with ENOSPC."""

    def __init__(self, chance: random.Random) -> None:
        self.operations = 0
        self.full = False
        self.refused = 0
        """Number of operations that failed because the disk was full."""
        self._chance = chance
        self._crash_at: int | None = None
        self._dead = False
        self._files: list[Any] = []
        """Opened for writing. A process that dies here does not close them."""
        self.on_death: Callable[[], object] = lambda: None

    def start(self, crash_at: int | None) -> None:
        """Begin the life of a process, which dies at operation number `crash_at` of it."""
        self._dead, self.full = False, False
        self._crash_at = None if crash_at is None else self.operations + crash_at

    def die(self) -> None:
        """End the process: nothing that it does reaches the disk any more."""
        self._dead = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for module in (frames, metrics_log, events):
                held.enter_context(mock.patch.object(module, "open", self._open(open), create=True))
            for name in ("fsync", "replace", "rename"):
                held.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
            held.enter_context(mock.patch.object(Path, "unlink", self._unlink()))
            held.callback(self._close_files)
            yield

    def _close_files(self) -> None:
        """Close what the dead processes left open, or a later test has the warnings. Buffers are
        empty: `write` flushes."""
        for file in self._files:
            file.close()
        self._files.clear()

    def _reach(self, *, writes: bool = False) -> None:
        """Count one operation. Raises Crash, or OSError if it `writes` to a full disk."""
        if self._dead:
            raise Crash("dead")
        self.operations += 1
        if self.operations == self._crash_at:
            self._dead = True
            self.on_death()
            raise Crash(f"at operation {self.operations} of the disk")
        if writes and self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Operations

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode.startswith("r"):
                return real(path, mode, *arguments, **options)
            self._reach(writes=True)
            self._files.append(real(path, mode, *arguments, **options))
            return _FaultyFile(self, self._files[-1])

        return opened

    def write(self, file: Any, content: Any) -> int:
        try:
            self._reach(writes=True)
        except BaseException:
            # A kill and a full disk may leave a part of what was being written.
            if self._crash_at == self.operations or self.full:
                file.write(content[: self._chance.randrange(len(content) + 1)])
                file.flush()
            raise
        count = int(file.write(content))
        # Not later: a dead process writes no buffers.
        file.flush()
        return count

    def change(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._reach()
        return call(*arguments)

    def _fsync(self, descriptor: int) -> None:
        # Not synced: the machine does not lose power, and a sync takes most of a history's time.
        self._reach(writes=stat.S_ISREG(os.fstat(descriptor).st_mode))

    def _replace(self, source: Any, target: Any, real: Any = os.replace) -> None:
        self._reach()
        real(source, target)

    def _rename(self, source: Any, target: Any, real: Any = os.rename) -> None:
        self._reach()
        real(source, target)

    def _unlink(self) -> Callable[..., None]:
        real = Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            self._reach()
            real(path, missing_ok=missing_ok)

        return unlink


class _FaultyFile:
    """File that is open for writing."""

    def __init__(self, disk: FaultyDisk, file: Any) -> None:
        self._disk, self._file = disk, file

    def write(self, content: Any) -> int:
        return self._disk.write(self._file, content)

    def truncate(self, size: int) -> int:
        return int(self._disk.change(self._file.truncate, size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

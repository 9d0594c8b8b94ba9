"""The temporary folder of a run on one machine: Ray's session, vLLM's sockets, and all other files
that its processes put into TMPDIR. Its name also marks the files that they create in /dev/shm by
`multiprocessing`.

Invariants:
- a run leaves nothing in the machine's temporary folder and in /dev/shm: its own files are removed
  at its end, and the files of a killed run are removed when this user's next run starts here;
- folders in use are not touched: the owner holds a lock on a file in the folder, and on one in
  /dev/shm, and passes the descriptors to processes that may outlive it. Process ids are not used,
  because containers may share either. A folder without that file does not belong to this package;
- programs of another user, which cannot pass through a run's folder, have a folder next to it
  (`public_folder`) with the same locks and names;
- the folder's path is short enough for Ray's sockets. If TMPDIR is too long, a link in /tmp leads
  to it;
- a file in /dev/shm whose writer lives is not touched: the writer of weights holds an exclusive
  `flock` on them (weights/shared_memory.py). OpenMP names a file after its process and never uses
  it again, so the file of a dead process is garbage.

`python -m megatron_async_rl.watchdog.run_folder`, which launchers of rollout nodes call, removes
the files of killed runs. It loads no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import getpass
import multiprocessing
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog.processes import condition

VARIABLE = "MEGATRON_ASYNC_RL_FOLDER"
"""Environment variable: the folder, for the processes of the run on this machine."""
LOCK = ".megatron_async_rl"
SHARED_MEMORY = Path("/dev/shm")
SHORT = Path("/tmp")
"""Folder of the links."""
LONGEST_SOCKET = 107
"""Longest path of a Unix socket, in bytes."""
_OF_RAY = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket in the folder, with the largest process id."""
LONGEST = LONGEST_SOCKET - len(_OF_RAY)
"""Longest path of the folder, in bytes."""
_NAME = re.compile(r"mar-[0-9a-f]{8}")
_OF_VLLM = "vllm_dist_"
_SHARED_LOCK = "mar-run-"
_SHARED = re.compile(r"(?:sem\.m([0-9a-f]{8})-\w+|m([0-9a-f]{8})[0-9a-f]{4}|mar-run-([0-9a-f]{8}))")
"""Semaphores, memory and the lock of a run in /dev/shm, with the run's eight digits."""
WEIGHTS_PREFIX = "mar-weights-"
"""Prefix of the names of files with weights (weights/shared_memory.py)."""
_OPENMP = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_(\d+)")
"""Patterns of a name: process and user."""


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run. `path`: the path that processes use, which may be a link to `place`.
    `locks`: descriptors that protect the folder, and the run's files in /dev/shm, as long as a
    process has them."""

    path: Path
    place: Path
    locks: tuple[int, ...]

    def set_in(self, environment: MutableMapping[str, str]) -> None:
        """Make the processes of `environment` use the folder."""
        # Outside the folder, because the next run can use what torch has compiled.
        user = re.sub(r"\W", "_", _user())
        cache = str(self.place.parent / f"torchinductor_{user}")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        environment.update(dict.fromkeys(("TMPDIR", "RAY_TMPDIR", VARIABLE), str(self.path)))

    def remove(self) -> None:
        if self.path != self.place:
            self.path.unlink(missing_ok=True)
        _remove_folder(self.place)
        for lock in self.locks:
            os.close(lock)
        remove_stale_shared_memory(SHARED_MEMORY)


@contextlib.contextmanager
def run_folder() -> Iterator[RunFolder]:
    """Make a run's folder on this machine, and remove the folders of killed runs of this user.

    Raises UserError if TMPDIR (or RAY_TMPDIR) cannot be used.
    """
    folder = _make()
    try:
        yield folder
    finally:
        folder.remove()
        remove_stale_folders()  # of engines on a Ray that already ran


def use_run_folder() -> None:
    """Make a folder for a process that no launcher of this machine started. The folder is removed
    when the process ends. For other processes, do nothing. Raises UserError."""
    if VARIABLE in os.environ:
        return
    folder = _make()
    atexit.register(_remove_own, folder, os.getpid())
    folder.set_in(os.environ)
    tempfile.tempdir = None  # Python has cached TMPDIR


def _remove_own(folder: RunFolder, owner: int) -> None:
    if os.getpid() == owner:  # a fork inherits the exit handlers
        folder.remove()


@functools.cache
def public_folder(base: Path) -> Path:
    """Make a folder in `base` that every user may pass through and only this one may list. It is
    removed when this process ends; after a kill, at the end of its run or with the next start."""
    remove_stale_folders()
    place, lock = _new_folder(base, secrets.token_hex(4))
    place.chmod(0o711)
    atexit.register(_remove_own, RunFolder(place, place, (lock,)), os.getpid())
    return place


def remove_tree(folder: Path) -> None:
    """Remove a folder, even if a program nested it deeper than Python's recursion limit, or removed
    the owner's permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def name_shared_memory() -> None:
    """Mark the objects that this process and its children create by `multiprocessing` in /dev/shm
    with the run's name, because a process that is killed removes nothing. Without a run's folder,
    nothing changes."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    prefix = f"/m{Path(folder).name.removeprefix('mar-')}"
    # Both are private to Python, which adds four digits to a prefix of ten characters.
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]


def remove_stale_shared_memory(directory: Path) -> list[Path]:
    """Remove the files of `multiprocessing` that this user's killed runs left; return them."""
    files: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*m*")):
        if (matched := _SHARED.fullmatch(path.name)) is not None:
            files.setdefault(next(filter(None, matched.groups())), []).append(path)
    removed = []
    for digits, paths in files.items():
        lock = directory / f"{_SHARED_LOCK}{digits}"
        with _unlocked(lock) as stale:
            # The lock is removed last, because files without one do not count as this package's.
            for path in sorted(paths, key=lambda one: one == lock) if stale else ():
                with contextlib.suppress(OSError):  # removed meanwhile
                    path.unlink()
                    removed.append(path)
    return removed


def remove_stale(directory: Path) -> list[Path]:
    """Delete the files of dead processes in `directory`; return the deleted files."""
    removed = remove_stale_shared_memory(directory)
    for path in sorted(directory.glob(f"{WEIGHTS_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # deleted meanwhile, another user's, or not a file
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


@contextlib.contextmanager
def _unlocked(lock: Path) -> Iterator[bool]:
    """Yield True if the lock exists and is free; the body then holds it."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not of this package, or another user's
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or on a file system without locks
        stale = False
    else:
        stale = True
    try:
        yield stale
    finally:
        os.close(descriptor)


def remove_stale_folders() -> list[Path]:
    """Remove the folders of this user's killed runs; return the removed files."""
    removed = []
    for base in dict.fromkeys((_base(), SHORT)):
        for path in _named(base):
            linked = os.path.islink(path)
            # Unlike Path.resolve, this does not raise for another user's circular link.
            place = Path(os.path.realpath(path)) if linked else path
            if _remove_if_stale(place):
                removed.append(place)
            if linked and _leads_nowhere(path):
                with contextlib.suppress(OSError):  # another user's
                    path.unlink()
    return removed


def _leads_nowhere(link: Path) -> bool:
    """Return True only if the link certainly has no target: links of other users may lead to
    folders that this user cannot read."""
    try:
        os.stat(link)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _named(base: Path) -> list[Path]:
    try:
        return sorted(path for path in base.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []


def _remove_if_stale(place: Path) -> bool:
    with _unlocked(place / LOCK) as stale:
        if stale:
            _remove_folder(place)
        return stale


def _remove_folder(place: Path) -> None:
    # vLLM names its CPU workers' shared memory after a file that it creates here.
    for file in place.glob(f"{_OF_VLLM}*"):
        for shared in SHARED_MEMORY.glob(f"{file.name}-*"):
            with contextlib.suppress(OSError):  # another user's
                shared.unlink()
    remove_tree(place)


def _base() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()


def _make() -> RunFolder:
    remove_stale_folders()
    remove_stale_shared_memory(SHARED_MEMORY)
    base, digits = _base(), secrets.token_hex(4)
    try:
        base.mkdir(parents=True, exist_ok=True)
        place, lock = _new_folder(base, digits)
    except OSError as error:
        raise _unusable(
            f"{base} cannot hold a run's temporary files: {error.strerror or error}",
            "name a folder of this machine that you may write to",
        ) from error
    locks = [lock]
    with contextlib.suppress(OSError):  # without /dev/shm, nothing is left there
        locks.append(_lock(SHARED_MEMORY / f"{_SHARED_LOCK}{digits}"))
    folder = RunFolder(place, place, tuple(locks))
    if len(os.fsencode(place)) <= LONGEST:
        return folder
    link = SHORT / place.name
    try:
        link.symlink_to(place)
    except OSError as error:
        folder.remove()
        raise _unusable(
            f"{base} is too long for the paths of Ray's sockets ({len(os.fsencode(base))} bytes),"
            f" and no link to it can be made in {SHORT}: {error.strerror or error}",
            f"name a folder of at most {LONGEST - len('/mar-00000000')} bytes",
        ) from error
    return RunFolder(link, place, folder.locks)


def _new_folder(base: Path, digits: str) -> tuple[Path, int]:
    """Make a folder that counts as live as long as a process has the descriptor."""
    # Renamed once it is locked; before, another start would mistake it for a killed run's.
    new = Path(tempfile.mkdtemp(prefix=".mar-", dir=base))
    lock = _lock(new / LOCK)
    return new.rename(base / f"mar-{digits}"), lock


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # without locks, no folder ever counts as stale
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _unusable(what: str, fix: str) -> UserError:
    key = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    return UserError.of(key, what, fix)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return str(os.getuid())


if __name__ == "__main__":
    remove_stale(SHARED_MEMORY)
    remove_stale_folders()

"""Events, failures and status of a run, passed on in files.

`RUN/events.jsonl`: events that a user should know although the run continued, such as a restarted
engine. `RUN/watch/<process>.failure`: the error that ended a process, as one JSON object.
`RUN/status.json`: the current phase of the run, in one small file that rank 0 replaces whole; the
launcher writes the last status if rank 0 died before it could.

This package's own errors are identified by their class, and their text is never parsed:
`consequence` is true for an error that only reports another process's end, `timed_out` for a wait
that exceeded its deadline, and `fix` is the advice. Only errors of other packages (torch, Ray,
vLLM), which have no such fields, are identified by their text.

Invariants:
- an event is one JSON object per line, `time` (Unix seconds) and `text`; lines are only appended;
- the failure of a run is the earliest of the most serious kind: a cause, else an exceeded deadline,
  else a consequence;
- a reader sees the previous status or the next one, never a half of either.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from errno import ENOMEM
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatron_async_rl.config.durable import reading, unreadable, write_file
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog.host_memory import MemoryKind
from megatron_async_rl.watchdog.logs import DEADLINE, PRIMARY, SECONDARY, judge
from megatron_async_rl.watchdog.progress_monitor import FOLDER, write_whole
from megatron_async_rl.watchdog.watch import DeadlineExceeded, this_process

EVENTS_FILE = "events.jsonl"
STATUS_FILE = "status.json"
FINAL = ("stopped", "finished", "failed")
"""Final phases of a run."""
PACKAGE_PREFIX = "megatron_async_rl."
_CONSEQUENCES = (
    ConnectionError,
    EOFError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
)
_HOST_MEMORY_OUT = re.compile(
    r"can(?:'|no)t allocate memory|low on memory|std::bad_alloc|(?<![A-Za-z])MemoryError",
    re.IGNORECASE,
)
_DEVICE_MEMORY_OUT = re.compile(
    r"out of memory|no available memory|free memory on device", re.IGNORECASE
)
_FOREIGN_TIMEOUT = re.compile(
    r"time[ds]? ?-?out|d(?:o|oes|id) not answer|no answer|unresponsive", re.IGNORECASE
)


@dataclass(frozen=True)
class Event:
    time: float
    """Unix seconds."""
    text: str


def note(run_dir: Path, text: str) -> None:
    """Append a line, which the launcher shows."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / EVENTS_FILE, "a", encoding="utf-8") as file:
        # One write in append mode, so that the kernel does not mix lines of several processes.
        file.write(json.dumps({"time": round(time.time(), 3), "text": text}) + "\n")


def read_events(run_dir: Path, newest: int | None = None) -> list[Event]:
    """Return all complete lines in order, without lines that a crash left incomplete. `newest`:
    limit to this many bytes at the end. Raises UserError for a file that cannot be read."""
    path = run_dir / EVENTS_FILE
    try:
        with reading(path), open(path, "rb") as file:
            if newest is not None and path.stat().st_size > newest:
                file.seek(-newest, os.SEEK_END)
                # The first line may be incomplete.
                file.readline()
            return _parse(file.read())
    except FileNotFoundError:
        return []


class EventReader:
    """Reader of the events that are added after its creation."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS_FILE
        # Earlier starts have shown their events.
        self._position = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> list[str]:
        """Return the texts of the complete lines since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            # A line without its end is still being written.
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return [event.text for event in _parse(whole + newline)]


def _parse(content: bytes) -> list[Event]:
    events = []
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            events.append(Event(float(entry["time"]), str(entry["text"])))
        except (ValueError, KeyError, TypeError):
            continue
    return events


@dataclass(frozen=True, kw_only=True)
class Failure:
    process: str
    what: str
    """`Type: message`."""
    where: str
    """File with the details."""
    fix: str = ""
    kind: int
    """PRIMARY: a cause; DEADLINE: an exceeded deadline; SECONDARY: a consequence."""
    time: float
    """Unix seconds."""


def failure_of(error: BaseException, where: Path) -> Failure:
    """Return the fields of `error`, which ends this process."""
    return Failure(
        process=this_process(),
        what=described(error),
        where=str(where),
        fix=str(getattr(error, "fix", "")),
        kind=_kind(error),
        time=time.time(),
    )


def described(error: BaseException) -> str:
    """Return `Type: message`, and where it happened. For a process that a signal ended, return its
    name and the signal."""
    if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # as Ray handles it
        return f"{this_process()} (pid {os.getpid()}) was ended by SIGTERM"
    return f"{type(error).__name__}: {with_notes(error)}"


def with_notes(error: BaseException) -> str:
    """Return the message, with the notes that were added to the error after its first line."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    first, newline, rest = str(error).partition("\n")
    return f"{first}{notes}{newline}{rest}"


def record_failure(run_dir: Path, failure: Failure) -> None:
    """Record the failure. Never raises: on a full disk the launcher reads the logs instead."""
    path = run_dir / FOLDER / f"{failure.process.replace('/', '_')}.failure"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole, because the launcher may read at any moment.
        write_whole(path, json.dumps(asdict(failure)))
    except OSError:
        return


def first_failure(run_dir: Path) -> Failure | None:
    """Return the failure of the run; None if no process recorded one."""
    failures = []
    for path in sorted((run_dir / FOLDER).glob("*.failure")):
        try:
            failures.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    # Kinds are ordered by seriousness: a cause precedes its consequences, whatever their times.
    return min(failures, key=lambda failure: (failure.kind, failure.time), default=None)


def timed_out(error: BaseException) -> bool:
    """Return True if `error` or its cause is an exceeded deadline."""
    return any(
        isinstance(one, TimeoutError)
        or bool(getattr(one, "timed_out", False))
        # Only errors of other packages are judged by their text.
        or (not _is_ours(one) and _FOREIGN_TIMEOUT.search(f"{type(one).__name__}: {one}"))
        for one in _chain(error)
    )


def out_of_memory(error: BaseException) -> MemoryKind | None:
    """Return the kind of memory that ran out, if `error` or its cause reports this: a device's,
    from torch's own error or from a text of vLLM or CUDA; a host's, from Python's, torch's or
    Ray's."""
    return next(filter(None, map(_memory_out, _chain(error))), None)


def _memory_out(error: BaseException) -> MemoryKind | None:
    known: MemoryKind | None = getattr(error, "out_of_memory", None)
    if known is not None or _is_ours(error):
        return known
    # Ray also has an OutOfMemoryError, for host memory.
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM):
        return "host"
    # By name, because importing torch or Ray here would cost every process seconds.
    if type(error).__name__ == "OutOfMemoryError":
        return "host" if type(error).__module__.startswith("ray.") else "device"
    # torch and vLLM raise these for CUDA's errors.
    if not isinstance(error, RuntimeError | ValueError):
        return None
    if _HOST_MEMORY_OUT.search(str(error)):
        return "host"
    return "device" if _DEVICE_MEMORY_OUT.search(str(error)) else None


def _kind(error: BaseException) -> int:
    # The end of another process appears as a closed connection.
    if getattr(error, "consequence", False) or isinstance(error, _CONSEQUENCES):
        return SECONDARY
    if isinstance(error, DeadlineExceeded):
        return DEADLINE
    if _is_ours(error):
        return PRIMARY
    first_line = str(error).partition("\n")[0]
    return judge(f"{type(error).__module__}.{type(error).__qualname__}: {first_line}")[0]


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith(PACKAGE_PREFIX)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    # Chains may be circular.
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Content of `status.json`."""

    phase: str
    """`starting`, `evaluating`, `training`, `checkpointing`, `exporting`, `stopping`, `stopped`,
    `finished` or `failed`."""
    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps in the whole run."""
    time: float
    """Unix seconds of the moment it was written."""
    detail: str = ""
    before: float | None = None
    """Held-out mean reward, or loss, before the first step; None while not measured."""
    after: float | None = None
    """Held-out mean reward, or loss, after the last step; None while not measured."""
    measure: Literal["reward", "loss"] = "reward"
    """Quantity of `before` and `after`."""
    error: str | None = None
    log: str | None = None
    """The file that has the rest of `error`."""
    checkpoint: str | None = None
    """The checkpoint that `checkpoint/latest` named, empty before the first: a resume without the
    folder can distinguish a lost one from none. None in a file of an earlier version."""


_STATUS = TypeAdapter(Status)
_STATUS_FIX = "delete it, or choose another run.dir"


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the status of the run in `run_dir` (made if missing)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # A sync may wait for a checkpoint that is being written, and a step must not. A later start
    # depends only on how the run ended.
    write = write_file if status.phase in FINAL else write_whole
    write(run_dir / STATUS_FILE, json.dumps(asdict(status)) + "\n")


def read_status(run_dir: Path) -> Status | None:
    """Return the last status written; None before the first.

    Raises UserError when the file cannot be read or is not a status (another program's, or another
    version's).
    """
    path = run_dir / STATUS_FILE
    try:
        # Another version's status is refused by name instead of read in part.
        return _STATUS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error, _STATUS_FIX) from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError.of(
            "run.dir",
            f"{path} is not a run's status ({f'{where}: ' if where else ''}{fault['msg']})",
            _STATUS_FIX,
        ) from error

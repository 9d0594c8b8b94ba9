"""Process output in files, and the cause of a failure found in them.

Rules for choosing a cause:
- a process may log exceptions that it survives; its last error is what ended it;
- when one process of a run dies, the others fail, too, because a connection closed: such secondary
  failures, and the launcher's summary of them, count only if there is no better candidate;
- among several candidates of the same kind, the file that stopped growing first wins, and in it the
  earliest line.

Invariant: only the last MAX_BYTES of a file and the first MAX_CHARACTERS of a line are read, so a
process that runs for weeks, or writes a tensor into one line, does not cost its reader memory.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_BLOCK = 64 * 1024
MAX_BYTES = 8 * 2**20
MAX_CHARACTERS = 2000

# Ordered by seriousness: `min` over kinds finds the cause.
PRIMARY, KILLED, DEADLINE, SECONDARY = range(4)

# Prefixes of a process's lines: colours, Ray's actor and pid, torchrun's rank, vLLM's level and
# place.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ORIGIN = re.compile(r"^((?:\[(?:rank|default)?\d+\]:|\([^()\n]*pid=\d+[^()\n]*\)) ?)*")
_LEVEL = re.compile(r"^(?:ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:.,]+ \[[^\]]+\] ?")
_GROUP_BAR = re.compile(r"^ +\| ?")

_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:\([\w.]+\))?)(?:: ?(.*))?$")
_KILLED = re.compile(
    r"Signal \d+ \(SIG(?:KILL|SEGV|ABRT|BUS|ILL|FPE)\) received by PID|Fatal Python error:"
    r" |terminate called after throwing"
    r"|Failed to connect to GCS within"
)

_SIGNALLED = re.compile(r"Signal \d+ \(SIG[A-Z]+\) received by PID")
"""Lines of torchrun's list. Any signal counts for the root cause; SIGTERM does not count for the
others, because torchrun sends it itself."""
_RANK = re.compile(r" *rank +: \d+")
_ROOT_CAUSE = "Root Cause (first observed failure)"
"""Beginning of the root cause in torchrun's list of failed ranks, after the other ranks."""

_SECONDARY_TYPES = re.compile(
    r"(?:^|\.)(?:ChildFailedError|SignalException|ProcessDied|ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError"
    r"|OwnerDiedError|EngineDeadError|KeyboardInterrupt|SystemExit|RankZeroFailed|CancelledError|GeneratorExit"
    r"|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|EOFError"
    r"|DistBackendError|DistNetworkError)$"
)
_DEADLINE_TYPES = {"DeadlineExceeded", "GetTimeoutError"}
"""The second is Ray's, from which the first is raised with the name of the wait."""
_SECONDARY_MESSAGES = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|Connection"
    r" refused|[Gg]loo.*(?:Timed out|timeout)"
    r"|closed by remote|remote process exited|NCCL (?:communicator was aborted|Error 6)|Engine core"
    r" initialization failed"
    r"|Application timeout caused pair closure|Socket Timeout|failed to recv, got 0"
    r" bytes|EngineCore encountered an issue",
)


@dataclass(frozen=True)
class Cause:
    message: str
    file: Path
    line: int
    """Number of the line, from 1."""
    kind: int
    """PRIMARY, KILLED, DEADLINE or SECONDARY."""


@dataclass(frozen=True)
class _Candidate:
    kind: int
    message: str
    line: int


def log_package_to(path: Path) -> None:
    """Append the package's log records to `path`, from INFO on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package_log = logging.getLogger("megatron_async_rl")
    package_log.addHandler(handler)
    package_log.setLevel(logging.INFO)


def redirect_output(path: Path) -> None:
    """Redirect this process's standard output and error to the end of `path`, line by line.

    Works on the file descriptors, so output of C++ libraries and child processes goes there, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Buffered output belongs to the old file.
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # Descriptors, not sys.stdout, because NCCL and vLLM's C++ write past Python.
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(  # noqa: SIM115 - open until the process ends
        1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stderr = open(  # noqa: SIM115 - open until the process ends
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def tail(path: Path, lines: int) -> list[str]:
    """Return the last `lines` lines of a file, without reading the rest of it."""
    text, _ = _ending(path)
    return [_short(line) for line in text.splitlines()[-lines:]] if lines > 0 else []


def _short(line: str) -> str:
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} ..."


def _ending(path: Path) -> tuple[str, int]:
    """Return the end of a file, and the number of bytes before it."""
    with open(path, "rb") as file:
        # Only the end of a file can contain the error that ended its process.
        before = max(0, file.seek(0, os.SEEK_END) - MAX_BYTES)
        file.seek(before)
        return file.read(MAX_BYTES).decode("utf-8", errors="replace"), before


def _lines_in(path: Path, size: int) -> int:
    """Return the number of lines in the first `size` bytes of a file."""
    lines = 0
    with open(path, "rb") as file:
        while size and (block := file.read(min(_BLOCK, size))):
            lines, size = lines + block.count(b"\n"), size - len(block)
    return lines


def find_cause(log_dir: Path, name: str = "*.log") -> Cause | None:
    """Return the most probable cause of a failure among the files of `log_dir` called `name`; None
    if none contains a failure."""
    found: list[tuple[int, float, Path, _Candidate]] = []
    for path in sorted(log_dir.glob(name)):
        text, before = _ending(path)
        fell_silent = path.stat().st_mtime
        candidates = _candidates(text)
        # Line numbers are those of the whole file; without a candidate nothing is counted.
        earlier = _lines_in(path, before) if candidates else 0
        found += [
            (one.kind, fell_silent, path, replace(one, line=one.line + earlier))
            for one in candidates
        ]
    if not found:
        return None
    _, _, path, candidate = min(
        found, key=lambda item: (item[0], item[1], str(item[2]), item[3].line)
    )
    return Cause(candidate.message, path, candidate.line, candidate.kind)


def survived(cause: Cause) -> bool:
    """Return True if the process that wrote the failure continued its work."""
    text, before = _ending(cause.file)
    lines = [_short(line) for line in text.splitlines()]
    at = cause.line - _lines_in(cause.file, before)
    # The line is no longer in the part that is read, because the process continued to write.
    if not 0 < at <= len(lines):
        return False
    origin = _split_origin(lines[at - 1])[0]
    return any(
        _split_origin(line)[0] == origin and " INFO " in line and "[shutdown]" not in line
        for line in lines[at:]
    )


def _candidates(text: str) -> list[_Candidate]:
    """Return one candidate for each process that writes to a file, the last of its best kind, and a
    launcher's report of killed processes."""
    streams: dict[str, list[str]] = {}
    numbers: dict[str, list[int]] = {}
    found: list[_Candidate] = []
    rank, root = "", False
    for number, raw in enumerate(text.splitlines(), start=1):
        # Several processes may share a file; each is a separate stream.
        origin, line = _split_origin(_short(raw))
        streams.setdefault(origin, []).append(line)
        numbers.setdefault(origin, []).append(number)
        if (matched := _RANK.match(line)) is not None:
            rank = matched.group(0).split()[-1]
        if _ROOT_CAUSE in line:
            found.clear()  # the earlier ones are consequences of this death
            root = True
        if _KILLED.search(line) or (root and _SIGNALLED.search(line)):
            message = line.rpartition("traceback : ")[2].strip()
            found.append(_Candidate(KILLED, f"rank {rank}: {message}" if rank else message, number))
    for origin, lines in streams.items():
        failures = [
            _Candidate(kind, message, numbers[origin][at]) for kind, message, at in _failures(lines)
        ]
        if failures:
            best = min(failure.kind for failure in failures)
            # The last of the best kind, because the process survived earlier ones.
            found.append([failure for failure in failures if failure.kind == best][-1])
    return found


def _split_origin(raw: str) -> tuple[str, str]:
    line = _COLOUR.sub("", raw)
    matched = _ORIGIN.match(line)
    origin = matched.group(0) if matched else ""
    return origin.strip(), _GROUP_BAR.sub("", _LEVEL.sub("", line[len(origin) :]), count=1)


def _failures(lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """Yield (kind, message, index of the exception line), one for each chain of tracebacks and one
    for the program's last output."""
    chain: tuple[int, str, int] | None = None
    for at, line in enumerate(lines):
        if _TRACEBACK not in line:
            continue
        end = _exception_line(lines, at + 1)
        if end is None:
            continue
        before = lines[max(0, at - 2) : at]
        kind, message = judge(lines[end])
        # Python prints these from destructors, at the end of any process.
        if any(line.startswith("Exception ignored in") for line in before):
            kind = SECONDARY
        if chain is not None and not any(line.startswith(_CHAIN) for line in before):
            yield chain
            chain = None
        # In a chain, the last exception of the most serious kind ended the process.
        if chain is None or kind <= chain[0]:
            chain = (kind, message, end)
    if chain is not None:
        yield chain


def _exception_line(lines: list[str], at: int) -> int | None:
    """Return the index of the line that names the exception, after the indented frames; in a Ray
    error, of the line that names the remote exception."""
    while at < len(lines) and (lines[at].startswith(" ") or not _EXCEPTION.match(lines[at])):
        if _TRACEBACK in lines[at]:
            return None
        at += 1
    if at >= len(lines):
        return None
    # Ray prints the remote traceback inside its own.
    if lines[at].startswith("ray.exceptions.RayTaskError"):
        return _exception_line(lines, at + 1) or at
    return at


def judge(line: str) -> tuple[int, str]:
    """Return (kind, `Type: message`) of a line that names an exception, `module.Type: message`."""
    matched = _EXCEPTION.match(line)
    name = matched.group(1) if matched else line
    short = name.split("(")[0].rpartition(".")[2]
    message = f"{short}: {matched.group(2)}" if matched and matched.group(2) else short
    if _SECONDARY_TYPES.search(name) or _SECONDARY_MESSAGES.search(line):
        return SECONDARY, message
    return (DEADLINE if short in _DEADLINE_TYPES else PRIMARY), message

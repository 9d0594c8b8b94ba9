"""End of a run: the signals that stop it, the cause of a failure, the message to the user, and the
final status."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog import stall
from megatron_async_rl.watchdog.events import (
    FINAL,
    Failure,
    Status,
    described,
    first_failure,
    read_status,
    record_failure,
    write_status,
)
from megatron_async_rl.watchdog.host_memory import kernel_shortage
from megatron_async_rl.watchdog.logs import KILLED, PRIMARY, SECONDARY, find_cause, tail

FULL_BYTES = 2**20
"""Free bytes below which a process may have failed to write its error message."""
INTERRUPTED = 130
LAST_LINES = 100
"""Number of last lines of torchrun's log; more than its final traceback has."""
_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_SIGKILLED = re.compile(r"\(SIGKILL\) received by PID (\d+)")


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield the numbers of the signals so far: SIGINT, SIGTERM and the first SIGHUP. They are
    collected for the launcher's loop, because an exception could interrupt a redraw or the run's
    end.

    A closed terminal may send several SIGHUPs, and writing to it fails, so the output then goes to
    /dev/null. If SIGHUP is ignored (nohup), it stays ignored.
    """
    seen: list[int] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def collect(number: int, _: object) -> None:
        # A closing terminal sends SIGHUP to the group and to the leader.
        if number != signal.SIGHUP or not seen:
            seen.append(number)
        if number == signal.SIGHUP:
            for terminal in terminals:
                # Writes to a closed terminal fail, and would end the launcher.
                os.dup2(nowhere, terminal)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    earlier = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(nowhere)


def torchrun_failure(process: subprocess.Popen[bytes], log: Path) -> Failure | None:
    """Return the failure of torchrun if a signal ended it; its ranks only report that they were
    ended."""
    if process.returncode is None or process.returncode == 0:
        return None
    if process.returncode < 0:
        # Popen's return code for a death by a signal.
        number = -process.returncode
    else:  # signals other than SIGKILL: torchrun ends its ranks, then itself by an exception
        reported = _SIGNALLED.findall("\n".join(tail(log, LAST_LINES)))
        if not reported:
            return None
        number = int(reported[-1])
    return Failure(
        process="launcher",
        what=f"torchrun (pid {process.pid}), which holds the ranks, was ended by {_name(number)}",
        where=str(log),
        kind=PRIMARY,
        time=time.time(),
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def record_end(
    run_dir: Path,
    steps: int,
    node: int,
    exit_code: int,
    earlier: Status | None,
    error: BaseException | None,
    interrupts: Sequence[int],
) -> None:
    """Write the final status, unless rank 0 has written a more detailed one. `earlier`: status of
    the previous start; `error`: the launcher's own error."""
    status = read_status(run_dir)
    # Rank 0 recorded the end itself, unless the status is still that of the previous start.
    over = status is not None and status.phase in FINAL and status != earlier
    # The launcher of another node knows less than rank 0.
    if exit_code == 0 or (over and (exit_code == INTERRUPTED or node > 0)):
        return
    last = status or Status(phase="", step=0, steps=steps, time=0.0)
    me = f"mar train (pid {os.getpid()})"
    if exit_code == INTERRUPTED:
        # Several signals may have arrived before the end.
        names = ", ".join(_name(number) for number in interrupts)
        ended = replace(last, phase="stopped", detail=f"{me} received {names} and ended the run")
        if last.phase in FINAL:  # nothing has begun: the status is that of the previous start
            return
    elif error is not None:
        ended = replace(last, phase="failed", error=f"{me}: {described(error)}", log=None)
    else:
        message, place = _cause(run_dir)
        ended = replace(last, phase="failed", error=message, log=place)
    # Written last, because readers treat a final phase as the end of all processes.
    write_status(run_dir, replace(ended, time=time.time()))


def record_stall(run_dir: Path, stall_found: stall.Stall) -> None:
    last = read_status(run_dir) or Status(phase="starting", step=0, steps=0, time=0.0)
    log, now = str(run_dir / stall.FILE), time.time()
    write_status(run_dir, replace(last, phase="failed", time=now, error=stall_found.error, log=log))
    # A consequence: the cause is the end of another machine.
    kind = SECONDARY if stall_found.consequence else PRIMARY
    failure = Failure(process="launcher", what=stall_found.error, where=log, kind=kind, time=now)
    record_failure(run_dir, failure)


def _cause(run_dir: Path) -> tuple[str, str]:
    """Return the cause of a failure, and its file. Rank 0's own report is the most complete, unless
    the death of another process ended rank 0."""
    failure = first_failure(run_dir)
    cause = None
    if failure is None or failure.kind != PRIMARY:
        cause = find_cause(run_dir / "logs")
    # A log may contain a cause that no process could report before it died.
    if cause is not None and (failure is None or cause.kind < failure.kind):
        kernel = None
        # torchrun names the signal, and the kernel sends only SIGKILL.
        if cause.kind == KILLED and (killed := _SIGKILLED.search(cause.message)) is not None:
            kernel = kernel_shortage([int(killed[1])], used=False)
        message = cause.message if kernel is None else f"{cause.message}\n  {kernel.message}"
        return message, f"{cause.file}:{cause.line}"
    if failure is None:
        return "no process left a message", str(run_dir / "logs")
    fix = f"\n  fix: {failure.fix}" if failure.fix else ""
    return failure.what + fix, failure.where


def print_plain(console: Console, text: object) -> None:
    """Print text without markup: paths may contain brackets, and users copy whole lines."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _checkpoint(run_dir: Path) -> str:
    """Return the name of the newest checkpoint that the status names; empty if there is none."""
    try:
        status = read_status(run_dir)
    except UserError:  # the next start reports the damaged file
        return ""
    return "" if status is None else status.checkpoint or ""


def explain_failure(run_dir: Path, console: Console) -> None:
    """Show the cause and its file; if a wait missed its deadline, also show who waited for what."""
    message, place = _cause(run_dir)
    console.print("[red bold]The run failed:[/] ", end="")
    print_plain(console, message)
    print_plain(console, f"Log: {place}")
    if checkpoint := _checkpoint(run_dir):
        text = f"The same command resumes from {checkpoint}, once the cause is removed."
        print_plain(console, text)
    # On a full disk the real cause may be missing from the logs.
    if shutil.disk_usage(run_dir).free < FULL_BYTES:
        text = (
            f"The file system that holds {run_dir} is full, and logs may lack their last lines.\n "
            " fix: free space there"
        )
        print_plain(console, text)
    picture = stall.read_summary(run_dir)
    if picture is not None:
        print_plain(console, f"\nWho waited for what (stacks: {run_dir / stall.FILE}):")
        print_plain(console, picture)

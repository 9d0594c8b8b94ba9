"""Signals that stop a run, collected for the launcher's loop instead of raised in the middle of a
redraw or of the run's end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[list[int]]:
    """The numbers of the signals so far: SIGINT, SIGTERM and the first SIGHUP.

    A closed terminal may send several SIGHUPs, and what it is sent then fails: nothing is written
    to it any more. Where SIGHUP is ignored (nohup) it stays so.
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

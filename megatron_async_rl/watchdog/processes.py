"""The processes of a run on this machine: each carries the run's id in its environment, wherever it
hangs in the process tree."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

RUN_ID_VARIABLE = "MEGATRON_ASYNC_RL_RUN_ID"
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)
_CLOCK_SLACK_S = 2.0


def of_run(run_id: str) -> list[psutil.Process]:
    """Every process of this user with the run's id, but for this one."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id
        except _GONE:
            return False

    return [process for process in psutil.process_iter() if belongs(process)]


def condition(pid: int, written_at: float | None = None) -> str | None:
    """The kernel's word for the process: `sleeping`, `stopped`, `disk-sleep`, ...; None when it is
    gone.

    `written_at`: Unix seconds when it was certainly alive; a process that began later only has its
    number.
    """
    try:
        process = psutil.Process(pid)
        if written_at is not None and process.create_time() > written_at + _CLOCK_SLACK_S:
            return None
        status = str(process.status())
    except psutil.Error:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status


def handles(pid: int, number: signal.Signals) -> bool:
    """True when the process has a handler for the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(caught, 16) >> (number - 1) & 1)

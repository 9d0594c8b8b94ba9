"""Commands that a script runs one after another, such as the trainings of an example."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_async_rl.launch.ending import INTERRUPTED, deferred_signals

POLL_S = 0.25


def run_in_foreground(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a command until it ends. The command receives each signal (Ctrl-C, SIGTERM, SIGHUP) that
    this process receives, and this process waits for it, so a run saves a checkpoint first.

    Raises SystemExit with the command's exit code if it failed, and with 130 if a signal arrived.
    """
    with deferred_signals() as received:
        # In a session of its own, the command receives a Ctrl-C once: from this process. With a
        # second one, `mar train` would stop without a checkpoint.
        process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True)
        forwarded = 0
        while True:
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                # One signal per round: two pending signals may arrive as one.
                if forwarded < len(received):
                    process.send_signal(received[forwarded])
                    forwarded += 1
    if code:
        # A negative code is the number of the signal that ended the command.
        raise SystemExit(code if code > 0 else 128 - code)
    if received:
        raise SystemExit(INTERRUPTED)

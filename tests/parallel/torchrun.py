"""Starts ranks with torchrun on this machine and waits for them; a failure shows the end of their log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    nproc: int, script: str | Path, args: Sequence[str | Path] = (), timeout: float = 180.0, env: dict[str, str] | None = None
) -> str:
    """Runs `script` (a file, or a module name) on `nproc` ranks; returns their output, raises AssertionError if any fails."""
    program = ["-m", script] if isinstance(script, str) and not script.endswith(".py") else [str(script)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), *program]
    process = subprocess.Popen(
        [*command, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{nproc} ranks of {script} did not finish within {timeout} s:\n{_end(output)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{nproc} ranks of {script} exited with {process.returncode}:\n{_end(output)}"
    return output


def _end(output: str) -> str:
    """The last lines of the ranks, without torchrun's own report of their death."""
    return output.partition("torch/distributed/elastic/multiprocessing/api.py")[0][-6000:] or output[-6000:]

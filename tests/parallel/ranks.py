"""Starts ranks on this machine and waits for them; a failure shows the end of what they wrote.

    tests --> a server that has imported Megatron (once) --> fork --> rank 0, rank 1, ...

Ranks find each other by the variables that torchrun sets, and are processes as under torchrun, with
one exception: each would import Megatron there, which takes seconds where most programs of these
tests take less. Runs of `mar train` use torchrun itself. The workers of pytest-xdist share
one server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from pathlib import Path

import psutil

from tests.ports import rank_stores

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.preloaded"])
SERVER = "MAR_TESTS_FORK_SERVER"
"""Variable with the process and the address of the server that the controller of pytest-xdist has
started."""


def serve_workers() -> None:
    """Start the server of all workers of pytest-xdist; call it before they start."""
    forkserver.ensure_running()
    started = forkserver._forkserver
    os.environ[SERVER] = f"{started._forkserver_pid} {started._forkserver_address}"


class _Client(forkserver.ForkServer):
    """Client of a server that another process started."""

    def use(self, server: str) -> None:
        pid, self._forkserver_address = server.split(" ", 1)
        self._server = int(pid)
        # The server ends when no process holds the write end of its pipe, which the other process
        # does. The protocol also sends that end to each fork; these receive a file in its place.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)

    def ensure_running(self) -> None:
        """Start a server of this process's own if the other has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(self._server).status() != psutil.STATUS_ZOMBIE:
                return
        os.close(self._forkserver_alive_fd)
        self._forkserver_address = self._forkserver_alive_fd = None
        self.__class__ = forkserver.ForkServer
        self.ensure_running()


if SERVER in os.environ:
    forkserver._forkserver.__class__ = _Client
    forkserver._forkserver.use(os.environ[SERVER])


def run_ranks(
    nproc: int, program: str, args: Sequence[str | Path] = (), timeout: float = 900.0
) -> str:
    """Runs `program` (a module's name) on `nproc` ranks; returns their output, raises
    AssertionError if any fails."""
    (store,) = rank_stores(1)
    world = {
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return _run(
        program,
        args,
        [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)],
        timeout,
    )


def run_alone(program: str, args: Sequence[str | Path] = (), timeout: float = 900.0) -> str:
    """Run one process without ranks; see `run_ranks`."""
    return _run(program, args, [{}], timeout)


def _run(
    program: str, args: Sequence[str | Path], variables: Sequence[dict[str, object]], timeout: float
) -> str:
    with tempfile.TemporaryDirectory(prefix="mar-ranks-") as folder:
        log = Path(folder) / "output"
        log.touch()
        ranks = [
            FORKS.Process(
                target=_be,
                args=(program, [str(arg) for arg in args], environment, log),
                daemon=True,
            )
            for environment in variables
        ]
        for rank in ranks:
            rank.start()
        try:
            ended = _wait(ranks, timeout)
            codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        output = log.read_text(errors="replace")
    assert ended, (
        f"{len(ranks)} processes of {program} did not finish within {timeout} s:\n{output[-6000:]}"
    )
    assert not codes, f"{len(ranks)} processes of {program}: exit codes {codes}:\n{output[-6000:]}"
    return output


def _wait(ranks: Sequence[multiprocessing.process.BaseProcess], timeout: float) -> bool:
    """Until all have ended or one has failed, which the others would wait for. False when that took
    too long."""
    deadline = time.monotonic() + timeout
    running = list(ranks)
    while running:
        if not connection.wait(
            [rank.sentinel for rank in running], max(0.0, deadline - time.monotonic())
        ):
            return False
        if any(rank.exitcode for rank in running):
            return True
        running = [rank for rank in running if rank.exitcode is None]
    return True


def _be(program: str, args: list[str], environment: dict[str, object], log: Path) -> None:
    """A forked process's whole life."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(2)  # A crash leaves its stacks in the output.
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv = [program, *args]
    runpy.run_module(program, run_name="__main__", alter_sys=True)

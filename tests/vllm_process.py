"""vLLM's own processes of an engine, found by its log, because a search through all processes of a
busy machine can miss them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil


def core_of(log: Path) -> psutil.Process:
    """Return vLLM's core, which writes its process id in each line; a restarted engine begins a new
    log. Raises psutil.NoSuchProcess."""
    return _named("EngineCore", log)


def actor_of(log: Path) -> psutil.Process:
    """Return the engine's actor. Raises psutil.NoSuchProcess."""
    return _named("MainProcess", log)


def _named(name: str, log: Path) -> psutil.Process:
    numbers = re.findall(rf"\({name} pid=(\d+)\)", log.read_text())
    assert numbers, f"no {name} has written to {log}"
    return psutil.Process(int(numbers[-1]))


def workers_of(log: Path) -> list[psutil.Process]:
    """Return the tensor-parallel workers that `core_of` started, by rank. Raises
    psutil.NoSuchProcess."""
    numbers = dict(re.findall(r"\(Worker_TP(\d+) pid=(\d+)\)", log.read_text()))
    return [psutil.Process(int(numbers[rank])) for rank in sorted(numbers)]

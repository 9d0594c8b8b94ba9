"""vLLM's own process of an engine, found by its log: looking through all processes of a busy
machine was seen to miss it."""

from __future__ import annotations

import re
from pathlib import Path

import psutil


def core_of(log: Path) -> psutil.Process:
    """It gives its number in each line; an engine that is started anew begins a new log. Raises
    psutil.NoSuchProcess."""
    numbers = re.findall(r"\(EngineCore pid=(\d+)\)", log.read_text())
    assert numbers, f"no vLLM process has written to {log}"
    return psutil.Process(int(numbers[-1]))

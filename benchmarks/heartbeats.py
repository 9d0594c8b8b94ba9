"""Cost of one look at the run's progress, and the bytes it reads, with many processes: state files
of `--ranks` ranks and `--engines` engines (each with vLLM's process), eight to a machine, whose
contents are those of a run.

Prints processor time of one look: of the process that looks for its machine (the aggregator, which
also publishes), and of any other on it. Both happen once a second.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from megatron_async_rl.watchdog import progress_monitor
from megatron_async_rl.watchdog.progress_monitor import FOLDER, ProgressMonitor

A_MACHINE = 8


def names(ranks: int, engines: int) -> dict[str, list[str]]:
    """Processes by machine."""
    trainers = [f"rank {rank}" for rank in range(ranks)]
    rollout = [name for n in range(engines) for name in (f"engine-{n}", f"engine-{n} EngineCore")]
    placed: dict[str, list[str]] = {}
    for kind, every, share in (("t", trainers, A_MACHINE), ("e", rollout, 2 * A_MACHINE)):
        for number, name in enumerate(every):
            placed.setdefault(f"{kind}{number // share}", []).append(name)
    for host in [host for host in placed if host[0] == "t"]:
        placed[host].append(f"launcher {host[1:]}")
    placed["t0"].append("controller")
    return placed


def beat(folder: Path, placed: dict[str, list[str]], count: int) -> None:
    for host, processes in placed.items():
        for pid, name in enumerate(processes):
            state = {
                "name": name,
                "pid": pid,
                "host": host,
                "time": float(count),
                "activities": [
                    {"kind": "wait", "name": "the batch", "since_s": 0.5, "deadline_s": 600.0}
                ],
                "progress": {"loop": [count, 0.1], "steps": [count, 0.1], "phases": [2, 100.0]},
                "facts": {"engine": "running, version 12, 320 responses running"},
            }
            (folder / f"{name}.json").write_text(json.dumps(state), encoding="utf-8")


def monitor_on(host: str, run_dir: Path) -> ProgressMonitor:
    with patch.object(socket, "gethostname", lambda: host):
        return ProgressMonitor(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--beats", type=int, default=5)
    arguments = parser.parse_args()
    placed = names(arguments.ranks, arguments.engines)
    figures: dict[str, list[float]] = {"aggregator_ms": [], "other_ms": []}
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        (run_dir / FOLDER).mkdir()
        beat(run_dir / FOLDER, placed, 0)
        trainers = [host for host in placed if host[0] == "t"]
        aggregators = [monitor_on(host, run_dir) for host in trainers]
        other = monitor_on(trainers[0], run_dir)
        for count in range(1, arguments.beats + 1):
            beat(run_dir / FOLDER, placed, count)
            for key, monitors in (("aggregator_ms", aggregators), ("other_ms", [other])):
                for monitor in monitors:
                    began = time.process_time()
                    monitor.look()
                    if count > 1:  # the first finds no summaries yet
                        figures[key].append((time.process_time() - began) * 1e3)
        seen = len(aggregators[0].states)
    settings = vars(arguments) | {"processes": sum(map(len, placed.values())), "seen": seen}
    medians = {key: statistics.median(values) for key, values in figures.items()}
    print(
        json.dumps({"settings": settings, "stale_s": progress_monitor.STALE_S, **medians}, indent=2)
    )


if __name__ == "__main__":
    main()

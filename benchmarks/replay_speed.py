"""Speed of `mar replay`, relative to the trainer of the run that it repeats.

The demo runs, and then its replay, which must end with identical bits. Seconds of the steps after
the first five; the fastest tenth of them, because other work on the machine slows the others:

    run_train_s    the run's own work in a step, without waits for samples: it distributes the
                   batch, trains and publishes; its engines share the machine
    replay_step_s  the replay's whole step, with the wait for its batch
    against_run    run_train_s / replay_step_s
    own_share      the share of the replay's step that is the same work, which is also its speed
                   relative to the trainer alone; the rest waits for the log
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 5
OWN = ("distribute_s", "train_s", "publish_s")


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][SKIPPED:]


def fastest(rows: list[dict[str, float]], *names: str) -> float:
    times = [sum(row[f"time/{name}"] for name in names) for row in rows]
    return statistics.quantiles(times, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the demo's warm start (hf)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the run")
    args = parser.parse_args()
    mar = (sys.executable, "-m", "megatron_async_rl")
    with tempfile.TemporaryDirectory() as made:
        run_dir = Path(made) / "run"
        settings = [f"run.dir={run_dir}", f"model.path={args.model}", f"run.steps={args.steps}"]
        config = str(ROOT / "examples/arithmetic_cpu.yaml")
        subprocess.run(
            [*mar, "train", config, *settings, *args.overrides],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        began = time.monotonic()
        # The reason of a replay that differs is on stderr, which the terminal shows.
        done = subprocess.run(
            [*mar, "replay", str(run_dir)], check=True, stdout=subprocess.PIPE, text=True
        )
        wall_s = time.monotonic() - began
        of_run, here = steps_of(run_dir), steps_of(run_dir / "replays" / "1")
        own, replayed = fastest(here, *OWN), fastest(here, "step_s")
        trained = fastest(of_run, *OWN)
        result: dict[str, Any] = {
            "cores": os.cpu_count(),
            "result": done.stdout.splitlines()[-1],
            "run_train_s": trained,
            "run_step_s": fastest(of_run, "step_s"),
            "replay_step_s": replayed,
            "replay_wall_s": wall_s,
            "against_run": trained / replayed,
            "own_share": own / replayed,
        }
        rounded = {
            name: float(f"{one:.3g}") if isinstance(one, float) else one
            for name, one in result.items()
        }
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()

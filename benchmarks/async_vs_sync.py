"""Wall time per step, asynchronous against synchronous, each side on a core of its own: the
achieved share of the possible overlap.

Runs of one configuration: synchronous (`async_ratio: 0`), and asynchronous at each of `--ratios`.
The trainer rank runs on core 0, the engine's processes on core 1. The synchronous run gives T_gen
(waiting for the batch, the weights' delivery included) and T_train; no overlap can be faster than
max(T_gen, T_train), so

    bound = (T_gen + T_train) / max(T_gen, T_train)
    share of the bound = (step_sync / step_async) / bound
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("EngineCore", "RolloutEngine")


def run(
    folder: Path, ratio: float, args: argparse.Namespace, *, stream: str = "none"
) -> dict[str, float]:
    """Means over the steps after `--warm`, in seconds, and the engine's busy share."""
    name = f"alpha_{ratio:g}_{stream}"
    config = {
        "run": {"dir": f"runs/{name}", "steps": args.steps},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "flow": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "async_ratio": ratio,
            "stream": stream,
        },
        "rollout": {
            "sampling": {"max_tokens": args.max_tokens},
            "reward": {"name": "arithmetic"},
            "kv_cache_gib": 0.5,
            "max_concurrent": args.concurrent,
        },
        "policy": {"optimizer": {"lr": 1e-6}},
        "observe": {"tensorboard": False},
        "checkpoint": {"every": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_async_rl", "train", str(path)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    while process.poll() is None:
        pin(process.pid)
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(process.communicate()[0])
    rows = [
        json.loads(line)
        for line in (folder / "runs" / name / "metrics.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ][args.warm :]
    # Medians of parts, and the mean step by the clock: batches come in sequence, and a part
    # that waits shows in the next.
    steps = [row["time/step_s"] for row in rows]
    return {
        "step_s": (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1),
        "wait_s": statistics.median(row["time/wait_batch_s"] for row in rows),
        "train_s": statistics.median(row["time/train_s"] for row in rows),
        "publish_s": statistics.median(row["time/publish_s"] for row in rows),
        "median_step_s": statistics.median(steps),
        "engine_busy": statistics.mean(row["engine/busy_share"] for row in rows),
        "tokens_per_step": statistics.mean(row["tokens/trained"] for row in rows),
        "lag": statistics.mean(row["lag/mean"] for row in rows),
        "length_max": statistics.mean(row["response/length_max"] for row in rows),
        "parts": statistics.mean(row.get("flow/parts", 1) for row in rows),
    }


def pin(pid: int) -> None:
    """Trainer on core 0, engine on core 1; Ray's own processes and the controller go where there is
    time."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                core = (
                    1
                    if any(part in line for part in ENGINE)
                    else 0
                    if "megatron_async_rl.train" in line
                    else None
                )
                if core is not None and process.cpu_affinity() != [core]:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, {core})


def parser_of_runs(description: str | None, concurrent: int) -> argparse.ArgumentParser:
    """Return a parser of the arguments that `run` reads, except `max_tokens`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=concurrent)
    return parser


def main() -> None:
    parser = parser_of_runs(__doc__, concurrent=256)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 2.0])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The arithmetic example, afresh: an untrained model answers at full length.
        runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](
            folder, seed=0
        )
        sync = run(folder, 0.0, args)
        generate, train = sync["wait_s"], sync["train_s"]
        bound = (sync["step_s"]) / max(generate, sync["step_s"] - generate)
        result: dict[str, object] = {
            "synchronous": sync,
            "T_gen_s": generate,
            "T_train_s": train,
            "bound": round(bound, 3),
        }
        for ratio in args.ratios:
            asynchronous = run(folder, ratio, args)
            speed_up = sync["step_s"] / asynchronous["step_s"]
            result[f"async_ratio {ratio:g}"] = {
                **asynchronous,
                "speed_up": speed_up,
                "share_of_bound": speed_up / bound,
            }
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

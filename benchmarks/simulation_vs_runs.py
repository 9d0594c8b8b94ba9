"""Runs of one config at several `async_ratio`s against what `mar simulate` predicts for all of them
from some.

The runs alternate, `--rounds` times, as the machine may be at something else;
those that are in FOLDER already are taken as they are. Predicted and measured: seconds of a step,
the speed-up over the first ratio, the share of the time in which the engine samples, and the start
lags. The first fifth of the steps does not count, nor do the last ones, after which nothing more is
admitted. `--store` keeps the calibration and what was measured, for tests/unit/test_simulate.py.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async_rl.config.load import load
from megatron_async_rl.metrics.log import read_metrics
from megatron_async_rl.metrics.timeline import read_timeline, shares
from megatron_async_rl.samples.segments import read_table
from megatron_async_rl.simulate.calibrate import calibrate
from megatron_async_rl.simulate.choose import ahead
from megatron_async_rl.simulate.rates import SimulationRates
from megatron_async_rl.simulate.simulation import simulate
from megatron_async_rl.watchdog.events import read_status

SEEDS = 3
GROUPS = 200
"""Stored, so that the file is small."""


def measured(run: Path, ratio: float) -> dict[str, Any]:
    rows: list[Any] = read_metrics(run)
    rows = rows[len(rows) // 5 : len(rows) - math.ceil(ratio) - 1]
    since, until = rows[0]["time"], rows[-1]["time"]
    tracks = read_timeline(run)
    engine, trainer = (
        sum(
            share
            for (state, _), share in shares(tracks[track], since, until).items()
            if state in of
        )
        for track, of in (("engine-0", {"busy"}), ("rank 0", {"training", "publishing"}))
    )
    outcomes = read_table(run, "outcomes").to_pylist()
    steps = {(o["id"], o["finished_at"]): o["step"] for o in outcomes if o["outcome"] == "trained"}
    samples = read_table(run, "samples").select(["id", "finished_at", "versions"]).to_pylist()
    lags = [
        step - 1 - one["versions"][0]
        for one in samples
        if rows[0]["step"]
        < (step := steps.get((one["id"], one["finished_at"]), 0))
        <= rows[-1]["step"]
    ]
    return {
        "step_s": (until - since) / (len(rows) - 1),
        "engine_busy": engine,
        "trainer_busy": trainer,
        "lags": (np.bincount(lags, minlength=math.ceil(ratio) + 1) / len(lags)).tolist(),
    }


def predicted(config: Any, ratio: float, rates: SimulationRates, lengths: Any) -> dict[str, Any]:
    flow = ahead(config, ratio).flow
    outcomes = [
        simulate(flow, config.rollout, rates, lengths, steps=40, seed=seed) for seed in range(SEEDS)
    ]
    found: dict[str, Any] = {
        key: float(np.mean([getattr(outcome, key) for outcome in outcomes]))
        for key in ("step_s", "engine_busy", "trainer_busy")
    }
    lags = np.zeros(math.ceil(ratio) + 1)
    for outcome in outcomes:
        lags[: len(outcome.lags)] += np.array(outcome.lags) / SEEDS
    return found | {"lags": lags.tolist()}


def mean_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.mean([one[key] for one in rounds], axis=0).tolist() for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--calibrate", type=float, nargs="+", default=[0.0, 1.0], help="ratios of those runs"
    )
    parser.add_argument("--cores", type=int, help="that trainer and engine share")
    parser.add_argument("--store", type=Path)
    args = parser.parse_args()
    if missing := set(args.calibrate) - set(args.ratios):
        parser.error(f"--calibrate: {sorted(missing)} are not among --ratios")
    found: dict[float, list[dict[str, Any]]] = {ratio: [] for ratio in args.ratios}
    for number in range(args.rounds):
        for ratio in args.ratios:
            run = args.folder / f"alpha_{ratio:g}_{number}"
            # An interrupted run is resumed: its first steps alone would be another measurement.
            status = read_status(run)
            if status is None or status.phase != "finished":
                wanted = [*args.overrides, f"flow.async_ratio={ratio:g}", f"run.dir={run}"]
                command = [sys.executable, "-m", "megatron_async_rl", "train", str(args.config)]
                subprocess.run([*command, *wanted], check=True)
            found[ratio].append(measured(run, ratio))

    config = load(args.config, args.overrides)
    result: dict[str, Any] = {"ratios": {}}
    runs = [
        args.folder / f"alpha_{ratio:g}_{number}"
        for ratio in args.calibrate
        for number in range(args.rounds)
    ]
    calibration = calibrate(runs, args.cores)
    rates, first = calibration.rates_of(config), dict[str, float]()
    for ratio in args.ratios:
        both = {
            "measured": mean_of(found[ratio]),
            "predicted": predicted(config, ratio, rates, calibration.lengths),
        }
        for name, one in both.items():
            first.setdefault(name, one["step_s"])
            one["speed_up"] = first[name] / one["step_s"]
        result["ratios"][f"{ratio:g}"] = both
    print(calibration.as_text())
    print(json.dumps(result["ratios"], indent=1))
    if args.store is not None:
        stored = {
            "rates": asdict(rates),
            "groups": calibration.lengths.groups[-GROUPS:],
            "prompts": calibration.lengths.prompts[-GROUPS:],
            "measured": {key: one["measured"] for key, one in result["ratios"].items()},
        }
        args.store.write_text(json.dumps(stored) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

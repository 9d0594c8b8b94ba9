"""Draw the demo's reward curve with and without its control (600 x 300 pixels, SVG).

    python examples/arithmetic/curve.py

draws `curve.svg` from `curve.csv`, both next to this file: the reward of the training batches as a
moving average, and held-out accuracy as diamonds. `curve.csv` has the rewards of two runs of the
demo from the same warm-up, and names the commands that made them. After running these commands,

    python examples/arithmetic/curve.py --from runs/arithmetic_cpu runs/without_control

writes both files again.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_async_rl.metrics.log import read_evaluations, read_metrics
from megatron_async_rl.report.panel import COLOURS

HERE = Path(__file__).resolve().parent
TRAINING, HELD_OUT = "training", "held-out"
RUNS = {"with displacement control": COLOURS["blue"], "without": COLOURS["red"]}
WINDOW = 10
"""Number of steps in the moving average."""
COMMANDS = """\
# make demo                                            # run.seed 1234, data of seed 0
# mar train examples/arithmetic_cpu.yaml run.dir=runs/without_control \\
#     'controls=[{name: gac, c_low: 0.999}]'           # the same model and seeds
# python examples/arithmetic/curve.py --from runs/arithmetic_cpu runs/without_control
# Samples are up to 4 versions old. Which ones depends on the machine, so no two runs are equal.
"""

Rewards = dict[tuple[str, str], dict[int, float]]
"""(Run, `training` or `held-out`) -> optimizer step -> mean reward."""


def rewards_of(run_dirs: tuple[Path, Path]) -> Rewards:
    """Return the rewards of a run with and of one without the control. Raise UserError for a folder
    that is not a run."""
    found: Rewards = {}
    for name, folder in zip(RUNS, run_dirs, strict=True):
        rows, evaluations = read_metrics(folder), read_evaluations(folder)
        found[name, TRAINING] = {row["step"]: row["reward/mean"] for row in rows}
        found[name, HELD_OUT] = {one["version"]: one["mean_reward"] for one in evaluations}
    return found


def write(rewards: Rewards, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(COMMANDS)
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("run", "reward", "step", "mean"))
        for (run, kind), means in rewards.items():
            rows.writerows((run, kind, step, f"{mean:.5g}") for step, mean in means.items())


def read(path: Path) -> Rewards:
    found: Rewards = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(_without_comments(file)):
            means = found.setdefault((row["run"], row["reward"]), {})
            means[int(row["step"])] = float(row["mean"])
    return found


def _without_comments(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if not line.startswith("#"))


def draw(rewards: Rewards, path: Path) -> None:
    """Write the figure to `path`."""
    # SVG counts 72 points per inch and browsers 96 pixels: 600 x 300.
    figure = Figure(figsize=(6.25, 3.125), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for name, colour in RUNS.items():
        means = np.array(list(rewards[name, TRAINING].values()))
        average = np.convolve(means, np.full(WINDOW, 1 / WINDOW), mode="valid")
        axes.plot(np.arange(WINDOW, len(means) + 1), average, color=colour, label=name)
        held_out = rewards[name, HELD_OUT]
        axes.plot(list(held_out), list(held_out.values()), "D", color=colour, ms=5, clip_on=False)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("accuracy")
    axes.set_title(
        f"Sums of one and two digits: training ({WINDOW}-step mean) and held-out (diamonds)",
        loc="left",
        fontsize=8.5,
    )
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    # Without a date and with these ids, the same numbers give the same file.
    with rc_context({"svg.hashsalt": "curve"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs = ("WITH_CONTROL", "WITHOUT")
    parser.add_argument("--from", nargs=2, type=Path, metavar=runs, dest="runs")
    if (given := parser.parse_args().runs) is not None:
        write(rewards_of((given[0].resolve(), given[1].resolve())), HERE / "curve.csv")
        print(f"wrote {HERE / 'curve.csv'}")
    draw(read(HERE / "curve.csv"), HERE / "curve.svg")
    print(f"wrote {HERE / 'curve.svg'}")


if __name__ == "__main__":
    main()

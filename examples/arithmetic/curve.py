"""Draw the demo's reward curve with and without its control (600 x 300 pixels, SVG).

    make demo
    python examples/arithmetic/curve.py runs/arithmetic_cpu

compares the run with `without_control/` beside this file (see keep_run.py) and writes `curve.svg`
there: the reward of the training batches as a moving average, and held-out accuracy as diamonds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_async_rl.metrics.log import read_evaluations, read_metrics
from megatron_async_rl.report.panel import COLOURS

HERE = Path(__file__).resolve().parent
WINDOW = 10
"""Number of steps in the moving average."""


def draw(run_dir: Path, path: Path) -> None:
    """Write the figure to `path`. Raise UserError if `run_dir` is not a run."""
    # SVG counts 72 points per inch and browsers 96 pixels: 600 x 300.
    figure = Figure(figsize=(6.25, 3.125), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for folder, name, colour in (
        (run_dir, "with displacement control", COLOURS["blue"]),
        (HERE / "without_control", "without", COLOURS["red"]),
    ):
        rows = read_metrics(folder)
        rewards = np.array([row["reward/mean"] for row in rows])
        average = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), mode="valid")
        axes.plot(np.arange(WINDOW, len(rewards) + 1), average, color=colour, label=name)
        evaluations = read_evaluations(folder)
        versions = [one["version"] for one in evaluations]
        held_out = [one["mean_reward"] for one in evaluations]
        axes.plot(versions, held_out, "D", color=colour, markersize=5, clip_on=False)
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
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    draw(parser.parse_args().run.resolve(), HERE / "curve.svg")
    print(f"wrote {HERE / 'curve.svg'}")


if __name__ == "__main__":
    main()

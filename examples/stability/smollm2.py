"""The figure and the tables of docs/real_stability.md from the CSV of the grid smollm2.yaml, so
that no number in them is written by hand.

    python results.py collect smollm2.yaml --out results/smollm2
    python smollm2.py

The figure has a panel for each learning rate and a line for each method, the mean over its seeds;
the dotted line is the synchronous run at that rate. The same CSV gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from figures import COLOURS, make_figure
from measures import Row, read_csv

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "smollm2"
PAGE = HERE.parents[1] / "docs" / "real_stability.md"
FIGURE = "real_stability.svg"
BEGIN = "<!-- from results/smollm2: python examples/stability/smollm2.py -->"
BEGIN_SEEDS = "<!-- seeds, from results/smollm2: python examples/stability/smollm2.py -->"
END = "<!-- end -->"
NAMES = {
    "none": "no correction",
    "gac": "GAC",
    "ppo_clip": "PPO's clip",
    "tis": "sequence TIS",
    "m2po": "M2PO",
    "tis_displacement": "TIS with `displacement`",
}
SYNCHRONOUS, OLD = "s0", "s16"
EARLY = 24
"""Last evaluation that every run of several seeds has, those that were cut short too."""


def table(rows: Sequence[Row], curves: Sequence[Row]) -> str:
    """Return a Markdown table with a row for each lag, rate and method that has runs."""
    lines = [
        "| lag | rate | method | seeds | final | area | collapsed | cosine | divergence | ESS |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        if row["area"]:
            cells.setdefault((row["lag"], float(row["lr"]), row["method"]), []).append(row)
    order = list(NAMES)
    lags = sorted({lag for lag, _, _ in cells}, key=lambda lag: int(lag[1:]))
    for lag, rate, method in sorted(
        cells, key=lambda cell: (lags.index(cell[0]), cell[1], order.index(cell[2]))
    ):
        found = cells[lag, rate, method]
        names = {row["run"] for row in found}
        points = [point for point in curves if point["run"] in names]
        means = [_mean(found, key) for key in ("final", "area")]
        collapsed = sum(int(row["collapsed"]) for row in found)
        signs = [_mean(found, "cosine"), _mean(points, "kl"), _mean(points, "ess_ratio")]
        lines.append(
            f"| {lag[1:]} | {rate:g} | {NAMES[method]} | {len(found)} | "
            + " | ".join(f"{value:.2f}" for value in means)
            + f" | {collapsed or 'no'} | "
            + " | ".join(f"{value:.2g}" for value in signs)
            + " |"
        )
    return "\n".join(lines)


def seeds_table(rows: Sequence[Row], curves: Sequence[Row]) -> str:
    """Return a Markdown table with a row for each rate and method at lag 16 that has several seeds
    at the evaluation EARLY, and the values of the seeds in their order."""
    lines = [
        "| rate | method | right answers | cosine | divergence |",
        "| --- | --- | --- | --- | --- |",
    ]
    at = {point["run"]: point for point in curves if int(point["step"]) == EARLY}
    for rate in sorted({float(row["lr"]) for row in rows}):
        for method, name in NAMES.items():
            cell = sorted(
                (row["seed"], row["run"])
                for row in rows
                if (row["lag"], float(row["lr"]), row["method"]) == (OLD, rate, method)
                and row["run"] in at
            )
            if len(cell) < 2:
                continue
            columns = (
                ", ".join(f"{float(at[run][key]):.2f}" for _, run in cell)
                for key in ("accuracy", "cosine", "kl")
            )
            lines.append(f"| {rate:g} | {name} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(float(row[key]) for row in rows if row[key])


def draw(rows: Sequence[Row], curves: Sequence[Row], path: Path) -> None:
    rates = sorted({float(row["lr"]) for row in rows})
    figure, panels = make_figure(
        [f"right answers at lag 16, learning rate {rate:g}" for rate in rates]
    )
    for panel, rate in zip(panels, rates, strict=True):
        for index, (method, name) in enumerate(NAMES.items()):
            label = name.replace("`", "")
            _line(panel, rows, curves, OLD, rate, method, color=COLOURS[index], label=label)
        style = {"color": "#1f2933", "linestyle": ":", "label": "no correction, lag 0"}
        _line(panel, rows, curves, SYNCHRONOUS, rate, "none", **style)
        panel.set_xlabel("optimizer step")
        panel.set_ylim(0, 0.7)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def _line(
    panel: mpl.axes.Axes,
    rows: Sequence[Row],
    curves: Sequence[Row],
    lag: str,
    rate: float,
    method: str,
    **style: str,
) -> None:
    names = {
        row["run"]
        for row in rows
        if (row["lag"], row["method"], float(row["lr"])) == (lag, method, rate) and row["area"]
    }
    at: dict[int, list[float]] = {}
    for point in curves:
        if point["run"] in names:
            at.setdefault(int(point["step"]), []).append(float(point["accuracy"]))
    if at:
        panel.plot(list(at), [fmean(values) for values in at.values()], **style)


def filled(page: str, rows: Sequence[Row], curves: Sequence[Row]) -> str:
    """Return the page with its tables replaced."""
    for begin, lines in (
        (BEGIN, table(rows, curves)),
        (BEGIN_SEEDS, seeds_table(rows, curves)),
    ):
        before, rest = page.split(begin)
        _, after = rest.split(END, 1)
        page = f"{before}{begin}\n{lines}\n{END}{after}"
    return page


def main() -> None:
    rows, curves = (read_csv(RESULTS / name) for name in ("runs.csv", "curves.csv"))
    draw(rows, curves, PAGE.with_name(FIGURE))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, rows, curves), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Tables and figures of a stability study from its runs.

    python results.py collect GRID... --out FOLDER
    python results.py choose FOLDER GRID --sweep SWEEP... [--fixed SWEEP...] > FRESH_GRID
    python results.py choose FOLDER GRID --sweep SWEEP... --ties > TIES_GRID
    python results.py show FOLDER
    python results.py page FOLDER

`collect` reads the runs of the grids and writes (measures.py)
- runs.csv     one row per run: its settings by axis, learning rate, steps, and its measures
- curves.csv   one row per run and evaluation: held-out accuracy, and the means since the evaluation
               before of cosine, ESS ratio, entropy and reward trained on
`choose` prints a grid that runs each method at its best learning rate on fresh seeds, or a grid
that separates near ties (choose.py). `show` writes tables.md (tables.py, questions.py) and figures
(figures.py) from the CSV, the same bytes for the same CSV. `page` writes docs/stability.md
(page.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from choose import fresh_grid, ties_grid
from figures import write_figures
from measures import collect, read_csv
from page import PAGE, page
from tables import tables

from megatron_async_rl.config.problem import UserError


def show(folder: Path) -> None:
    rows, curves = (read_csv(folder / name) for name in ("runs.csv", "curves.csv"))
    (folder / "tables.md").write_text(tables(rows, curves), encoding="utf-8")
    write_figures(rows, curves, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("grids", nargs="+", type=Path, metavar="GRID")
    collecting.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    choosing = commands.add_parser("choose")
    choosing.add_argument("folder", type=Path, metavar="FOLDER")
    choosing.add_argument("grid", type=Path, metavar="GRID")
    for name, required in (("--sweep", True), ("--fixed", False)):
        choosing.add_argument(
            name, action="extend", nargs="+", default=[], required=required, metavar="SWEEP"
        )
    choosing.add_argument("--ties", action="store_true")
    for name in ("show", "page"):
        commands.add_parser(name).add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except UserError as error:
        parser.exit(2, f"{error}\n")


def run(arguments: argparse.Namespace) -> None:
    if arguments.command == "collect":
        collect(arguments.grids, arguments.out)
    elif arguments.command == "show":
        show(arguments.folder)
    elif arguments.command == "page":
        PAGE.write_text(page(arguments.folder), encoding="utf-8")
    elif not (rows := read_csv(arguments.folder / "runs.csv")):
        raise UserError.of("FOLDER", f"{arguments.folder}: no run has begun", "collect again")
    elif arguments.ties:
        print(ties_grid(rows, arguments.grid, arguments.sweep), end="")
    else:
        print(fresh_grid(rows, arguments.grid, arguments.sweep, arguments.fixed), end="")


if __name__ == "__main__":
    main()

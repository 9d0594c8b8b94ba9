"""The grids that follow a scan over learning rates, by the rules of PLAN.md.

- ties: the two best rates of a method that are within NEAR_TIE, on the second seed, in the folder
  of the scan
- fresh: each method of the sweeps named, at its rate of largest mean area, on the seeds that
  decide, in a folder of their own; sweeps that are `fixed` take all of their rates. Next to each
  control stands its null `matched_lr`, at the control's rate and the mean update norm that it had
  there; the norm is in the name, so that another norm is another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measures import Row
from questions import MATCHED_LR
from rates import FRESH, Group, Measured, by_group, group_axes, near_tie, plateau, scanned

from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.yaml_tree import read_tree, write

TIE_SEED = "seed2"
MATCHED = (
    *("gac", "displacement", "ess_lr", "clip_gac", "clip_displacement"),
    *("tis_displacement", "tis_spared", "clip_spared"),
)
"""Controls whose null is the learning rate that gives the same mean update norm."""


def ties_grid(rows: Sequence[Row], scan: Path, sweeps: Sequence[str]) -> str:
    """YAML of the grid that parts near ties, for the folder of `scan`; no sweeps where there are
    none."""
    tree, _ = read_tree(scan.read_text(encoding="utf-8"))
    tree["axes"]["seed"] = {TIE_SEED: {"run.seed": int(TIE_SEED.removeprefix("seed"))}}
    tree["sweeps"] = {
        "-".join(group): {
            **settings_of(group, rows),
            "rate": [one.runs[0]["rate"] for one in tied],
            "seed": [TIE_SEED],
        }
        for group, rates in asked(rows, scan, sweeps).items()
        if (tied := near_tie(rates))
    }
    return f"# The near ties of {scan.name}, written by results.py choose --ties.\n" + write(tree)


def fresh_grid(
    rows: Sequence[Row], scan: Path, sweeps: Sequence[str], fixed: Sequence[str] = ()
) -> str:
    """YAML of the grid of fresh seeds, for the folder of `scan`."""
    tree, _ = read_tree(scan.read_text(encoding="utf-8"))
    runs_of(read_grid(scan), fixed)  # knows them
    given = tree["sweeps"]
    methods = dict(tree["axes"].get("method", {}))
    tree["axes"]["seed"] = {name: {"run.seed": int(name.removeprefix("seed"))} for name in FRESH}
    tree["runs"] = f"{tree['runs']}-fresh"
    tree["sweeps"] = written = {name: {**given[name], "seed": list(FRESH)} for name in fixed}
    notes = []
    for group, rates in asked(rows, scan, sweeps).items():
        best = plateau(rates)[0]
        name = "-".join(group)
        written[name] = settings = {
            **settings_of(group, rows),
            "rate": [best.runs[0]["rate"]],
            "seed": list(FRESH),
        }
        if tied := near_tie(rates):
            notes.append(f"# {name}: a near tie, run choose --ties first: {in_words(tied)}")
        if missing := sum(one.missing for one in rates):
            notes.append(f"# {name}: chosen while {missing} of its runs are missing")
        method = settings.get("method", [""])[0]
        if method in MATCHED and best.values("update_norm"):
            norm = float(f"{best.mean('update_norm'):.4g}")
            null = f"{MATCHED_LR}{method}_at_{norm:g}"
            control = {"name": "matched_lr", "target_update_norm": norm}
            tree["axes"]["method"][null] = {**methods[method], "controls": [control]}
            written[f"{name}-matched_lr"] = {**settings, "method": [null]}
    head = f"# The seeds that decide after {scan.name}, written by results.py choose.\n"
    return head + "".join(f"{note}\n" for note in notes) + write(tree)


def asked(rows: Sequence[Row], scan: Path, sweeps: Sequence[str]) -> dict[Group, list[Measured]]:
    """The groups of the scan's `sweeps`, with all of their rates; raises UserError for a sweep that
    the scan does not have."""
    axes = group_axes(rows)
    wanted = {
        tuple(run.settings[axis] for axis in axes) for run in runs_of(read_grid(scan), sweeps)
    }
    return {group: rates for group, rates in by_group(scanned(rows)).items() if group in wanted}


def settings_of(group: Group, rows: Sequence[Row]) -> dict[str, Any]:
    return {axis: [value] for axis, value in zip(group_axes(rows), group, strict=True)}


def in_words(rates: Sequence[Measured]) -> str:
    return ", ".join(f"{one.lr:g} {one.area:.3f}" for one in rates)

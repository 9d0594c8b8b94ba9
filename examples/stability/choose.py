"""The grid of fresh seeds that follows a scan over learning rates, by the rule of PLAN.md.

Each group of runs that share all settings but rate and seed, and was run at several rates, gets one
sweep: its rate of largest mean area, on the fresh seeds. Beside each GAC run stands its null
`matched_lr`, at GAC's rate and the mean update norm that GAC had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from results import Measured, Row, axes_of, measured, plateau

from megatron_async_rl.config.load import read_tree, write

SEEDS = (11, 12, 13, 14, 15)
NEAR_TIE = 0.02
"""Of the areas of the two best rates: then the scan wants its second seed."""


def fresh_grid(rows: Sequence[Row], scan: Path) -> str:
    """The YAML of the grid, which belongs into the folder of `scan`: its relative paths are those
    of that file."""
    tree, _ = read_tree(scan.read_text(encoding="utf-8"))
    axes = [axis for axis in axes_of(rows) if axis not in ("rate", "seed")]
    tree["axes"]["seed"] = {f"seed{seed}": {"run.seed": seed} for seed in SEEDS}
    tree["runs"] = f"{tree['runs']}-fresh"
    tree["sweeps"] = sweeps = {}
    ties = []
    for group, together in groupby(measured(rows), key=lambda one: one.group):
        rates = [one for one in together if one.runs]
        if len(rates) < 2:
            continue
        best = plateau(rates)[0]
        name = "-".join(group)
        chosen: dict[str, Any] = {axis: [value] for axis, value in zip(axes, group, strict=True)}
        chosen["rate"] = [best.runs[0]["rate"]]
        sweeps[name] = chosen
        if near_tie(rates):
            ties.append(
                f"# The two best rates of {name} are within {NEAR_TIE:g}: {in_words(rates)}"
            )
        if chosen.get("method") == ["gac"] and best.values("update_norm"):
            null = f"matched_lr_{name}"
            control = {
                "name": "matched_lr",
                "target_update_norm": round(best.mean("update_norm"), 6),
            }
            tree["axes"]["method"][null] = {"controls": [control]}
            sweeps[f"{name}-matched_lr"] = {**chosen, "method": [null]}
    head = f"# The fresh seeds after {scan.name}, written by results.py choose.\n"
    return head + "".join(f"{tie}\n" for tie in ties) + write(tree)


def near_tie(rates: Sequence[Measured]) -> bool:
    first, second = sorted((one.mean("area") for one in rates), reverse=True)[:2]
    return first - second < NEAR_TIE and len(rates[0].runs) < 2


def in_words(rates: Sequence[Measured]) -> str:
    return ", ".join(f"{one.lr:g} {one.mean('area'):.3f}" for one in rates)

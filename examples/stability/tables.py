"""Tables of a study from its CSV, as Markdown: the same text for the same CSV."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from measures import Row
from questions import LOSSES, MARGIN, MIN_GAIN, P_VALUE, verdicts
from rates import PLATEAU, by_group, fresh, group_axes, measured, plateau, scanned

REACHED = 0.8
"""Accuracy to which the time is counted."""


def tables(rows: Sequence[Row], curves: Sequence[Row] = ()) -> str:
    if not rows:
        return "No run has begun.\n"
    states = [row["state"] for row in rows]
    hours = sum(float(row["wall_seconds"] or 0) for row in rows) / 3600
    kinds = [f"{states.count(kind)} {kind}" for kind in ("finished", "failed")]
    kinds += [
        f"{states.count(kind)} {kind}" for kind in ("diverged", "unfinished") if kind in states
    ]
    # Runs that `mar study` did not start have no record of their duration.
    lasted = f"; {hours:.1f} hours of runs" if hours else ""
    lines = [f"{len(rows)} runs, {', '.join(kinds)}{lasted}.", ""]
    lines += settings("Every setting", scanned(rows))
    lines += settings("Every setting, on the seeds that decide", fresh(rows))
    lines += best_rates(scanned(rows))
    lines += widths(scanned(rows))
    lines += questions(rows)
    lines += times(rows, curves)
    return "\n".join(lines[:-1]) + "\n"


def settings(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    columns = ("lr", "seeds", "final", "area", "collapsed", "cosine", "s/step")
    lines = [
        f"## {title}",
        "",
        "Mean ± standard deviation over the seeds.",
        "",
        *_header(*group_axes(rows), *columns),
    ]
    for one in measured(rows):
        per_step = [
            float(run["seconds"]) / float(run["steps"])
            for run in one.runs
            if run["state"] == "finished"
        ]
        cells = [one.seeds, one.in_words("final"), one.in_words("area"), str(one.collapsed)]
        cells += [one.in_words("cosine", 2), f"{fmean(per_step):.2f}" if per_step else "–"]
        lines.append(_line(*one.group, f"{one.lr:g}", *cells))
    return [*lines, ""]


def best_rates(rows: Sequence[Row]) -> list[str]:
    groups = by_group(rows)
    if not groups:
        return []
    lines = [
        "## Each method at its best learning rate, and its plateau",
        "",
        f"Plateau: the rates next to the best whose area is at least {PLATEAU:g} of its, none of"
        " whose runs is missing; width is highest over lowest. Collapse: the lowest rate at which"
        " at least half of the seeds collapsed.",
        "",
        *_header(
            *group_axes(rows), "rates", "best lr", "seeds", "area", "final", "width", "collapse"
        ),
    ]
    for group, rates in groups.items():
        best, width, collapse = plateau(rates)
        cells = [str(len(rates)), f"{best.lr:g}", best.seeds]
        cells += [best.in_words("area"), best.in_words("final"), f"{width:.3g}"]
        lines.append(_line(*group, *cells, "none" if collapse is None else f"{collapse:g}"))
    return [*lines, ""]


def widths(rows: Sequence[Row]) -> list[str]:
    """Plateaus of the second round's variants, next to those of the losses that they are to
    widen."""
    groups = by_group(rows)
    if not groups or "method" not in (axes := group_axes(rows)):
        return []
    method, lines = axes.index("method"), []
    for group, rates in groups.items():
        loss = LOSSES.get(group[method])
        beside = groups.get((*group[:method], loss or "", *group[method + 1 :]))
        if loss is None or beside is None:
            continue
        best, own, _ = plateau(beside)
        width = plateau(rates, by=best.area)[1]
        lines.append(_line(*group, f"{width:.3g}", loss, f"{own:.3g}"))
    if not lines:
        return []
    return [
        "## Plateaus measured by the loss alone",
        "",
        f"The rates whose area is at least {PLATEAU:g} of the largest that the loss alone has.",
        "",
        *_header(*axes, "width", "loss", "width of the loss"),
        *lines,
        "",
    ]


def questions(rows: Sequence[Row]) -> list[str]:
    found = verdicts(rows)
    if not found:
        return []
    lines = [
        "## The questions of PLAN.md, on the seeds that decide",
        "",
        f"`>`: area larger by at least {MIN_GAIN:g}. `≥`: not worse by {MARGIN:g}, one-sided."
        f" `≠`: different. Each by exact permutation, p < {P_VALUE:g} after Holm's correction over"
        " the comparisons of its question at its setting.",
        "",
        *_header("question", "setting", "comparison", "of", "difference", "p", "p (Holm)", "holds"),
    ]
    for one, corrected, verdict in found:
        numbers = ["–"] * 3
        if corrected is not None:
            numbers = [f"{one.difference:+.3f}", f"{one.p:.3f}", f"{corrected:.3f}"]
        lines.append(_line(one.family, one.where, one.words, one.measure, *numbers, verdict))
    return [*lines, ""]


def seconds_to_reach(curves: Sequence[Row]) -> dict[str, float]:
    """Run -> seconds in steps up to its first evaluation of at least `REACHED`; none for a run that
    never had one."""
    reached: dict[str, float] = {}
    for point in curves:
        if float(point["accuracy"] or 0) >= REACHED:
            reached.setdefault(point["run"], float(point["seconds"]))
    return reached


def times(rows: Sequence[Row], curves: Sequence[Row]) -> list[str]:
    """Runs alone and runs side by side disturb each other, and are never averaged together."""
    reached = seconds_to_reach(curves)
    if not reached:
        return []
    axes = group_axes(rows)
    cells: dict[tuple[str, ...], list[float | None]] = {}
    for row in rows:
        if row["state"] in ("finished", "diverged"):
            place = (*(row[axis] for axis in axes), f"{float(row['lr']):g}", row["jobs"] or "?")
            cells.setdefault(place, []).append(reached.get(row["run"]))
    lines = [
        f"## Seconds in steps to accuracy {REACHED:g}, by runs at a time",
        "",
        "Mean over the seeds that reached it.",
        "",
        *_header(*axes, "lr", "jobs", "reached", "seconds"),
    ]
    for place, found in cells.items():
        known = [one for one in found if one is not None]
        if known:
            lines.append(_line(*place, f"{len(known)} of {len(found)}", f"{fmean(known):.0f}"))
    return [*lines, ""]


def _header(*cells: str) -> list[str]:
    return [_line(*cells), _line(*("---" for _ in cells))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

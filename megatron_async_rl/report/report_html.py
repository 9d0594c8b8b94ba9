"""The report's page: one HTML file that needs no other and no network.

The first screen has the reward and the numbers a reader asks for first; then what went wrong, the
panels, the tables and, folded, the configuration. Long paths wrap. Without its script the page
lacks only what the pointer shows."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_async_rl.metrics.log import number
from megatron_async_rl.report.anomalies import GRAVE, KINDS, steps_in_words
from megatron_async_rl.report.charts import COLOURS, POINTS, TRACK_HEIGHT, to_svg
from megatron_async_rl.report.panel import STEPS, Panel
from megatron_async_rl.report.run_data import RunData
from megatron_async_rl.report.series import Floats, column, thin
from megatron_async_rl.report.summary import span

DETAILS = 4
"""Shown of one kind of anomaly."""
EVENTS = 12
"""Shown, the newest."""
FOOTER = (
    "Thin lines are the logged values, wide ones their moving average; of long runs each curve shows"
    " its extremes. Every value is in metrics.jsonl and TensorBoard's files in the run's directory."
)
FIRST_SHARE = 10
"""The reward at the start and at the end is the mean over a tenth of the steps each."""


def write_page(
    run: RunData, panels: Sequence[Panel], path: Path, sections: Sequence[str] = ()
) -> None:
    """`sections`: HTML of others, between the panels and the tables."""
    first, *rest = panels
    parts = {
        "TITLE": html.escape(run.run_dir.name),
        "PHASE": _phase(run),
        "WHERE": html.escape(str(run.run_dir)),
        "ERROR": _error(run),
        "FIRST": figure_of(first, "p0"),
        "NUMBERS": _numbers(run),
        "WRONG": _wrong(run),
        "PANELS": "\n".join(figure_of(panel, f"p{i}") for i, panel in enumerate(rest, start=1)),
        "SECTIONS": "\n".join(sections),
        "TABLES": _tables(run),
        "CONFIG": _config(run),
        "FOOTER": FOOTER,
    }
    fill_page(parts, path)


def fill_page(parts: Mapping[str, str], path: Path) -> None:
    """The template with `parts`, HTML by the name of its place; a place without one stays empty."""
    template = files("megatron_async_rl.report").joinpath("page.html").read_text(encoding="utf-8")
    light = "".join(f"  --{name}: {value};\n" for name, value in COLOURS.items())
    filled = {"LIGHT": light, **parts}
    # In one pass, so that a run's own text is never taken for a place in the template.
    page = re.sub(r"@([A-Z]+)@", lambda place: filled.get(place[1], ""), template)
    path.write_text(page, encoding="utf-8")


def _phase(run: RunData) -> str:
    if run.status is None:
        return ""
    at = (
        ""
        if run.status.phase == "finished"
        else f" at step {run.status.step} of {run.status.steps}"
    )
    phase = html.escape(run.status.phase)
    return f'<span class="phase {phase}">{phase}{at}</span>'


def _error(run: RunData) -> str:
    if run.status is None or not run.status.error:
        return ""
    log = f"\n{run.status.log}" if run.status.log else ""
    return f'<section class="card error">{html.escape(run.status.error + log)}</section>'


def _numbers(run: RunData) -> str:
    """The headline numbers as tiles."""
    summary = run.summary
    tiles: list[tuple[str, str, str]] = []
    """(number, what it is, class)."""
    if summary.before is not None and summary.after is not None:
        change = summary.after - summary.before
        tone = "better" if change > 0 else "worse" if change < 0 else ""
        number_ = (
            f'{summary.before:.3f} → {summary.after:.3f} <span class="{tone}">{change:+.3f}</span>'
        )
        tiles.append((number_, "held-out reward, before and after", "whole"))
    elif summary.before is not None:
        tiles.append((f"{summary.before:.3f}", "held-out reward before the first step", "whole"))
    if not run.supervised and (trained := _ends(column(run.rows, "reward/mean")[1])) is not None:
        tiles.append(
            (
                f"{trained[0]:.3f} → {trained[1]:.3f}",
                "reward trained on, first and last tenth",
                "whole",
            )
        )
    if run.supervised and (losses := _ends(column(run.rows, "policy/loss")[1])) is not None:
        tiles.append((f"{losses[0]:.4g} → {losses[1]:.4g}", "loss, first and last tenth", "whole"))

    planned = f" of {run.status.steps:,}" if run.status and run.status.steps > summary.steps else ""
    tiles.append((f"{summary.steps:,}{planned}", "steps", ""))
    tiles.append((span(summary.in_steps_s), "in steps", ""))
    tiles.append((f"{summary.tokens_per_s:,.0f}", "tokens/s", ""))
    tiles.append((f"{summary.in_steps_s / summary.steps:.2f} s", "per step", ""))
    if summary.lag_mean is not None and not run.supervised:
        tiles.append((f"{summary.lag_mean:.2f}", f"mean lag, max {summary.lag_max}", ""))
    if summary.busy_share is not None:
        tiles.append((f"{summary.busy_share:.0%}", "engines busy", ""))
    wrong = sum(anomaly.kind in GRAVE for anomaly in run.anomalies)
    tone = "worse" if wrong else "better"
    noted = len(run.anomalies) - wrong
    also = f", {noted:,} notes" if noted else ""
    words = "anomaly" if wrong == 1 else "anomalies"
    tiles.append(
        (
            f'<span class="{tone}">{wrong or "No"}</span> {words}',
            f"found in the metrics{also}",
            "whole",
        )
    )
    return "".join(
        f'<div class="{style}"><b>{value}</b><small>{html.escape(name)}</small></div>'
        for value, name, style in tiles
    )


def _ends(values: Floats) -> tuple[float, float] | None:
    """Mean of the first and of the last finite values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    share = max(1, len(finite) // FIRST_SHARE)
    return float(finite[:share].mean()), float(finite[-share:].mean())


def _wrong(run: RunData) -> str:
    """A table of the marks on the curves, then the events that the run noted."""
    rows = []
    for kind, (title, colour) in KINDS.items():
        found = [anomaly for anomaly in run.anomalies if anomaly.kind == kind]
        if not found:
            continue
        steps = steps_in_words([anomaly.step for anomaly in found])
        steps = (
            steps
            if len(steps) <= 60
            else f"{len(found):,} steps, {steps[:48].rpartition(',')[0]}, …"
        )
        details = [f"step {one.step}: {one.detail}" for one in found[:DETAILS]]
        more = [f"and {len(found) - DETAILS:,} more"] if len(found) > DETAILS else []
        rows.append(
            f'<tr><td><i class="dot" style="border-top-color:var(--{colour})"></i>'
            f"{html.escape(title)}</td><td>{html.escape(steps)}</td>"
            f"<td>{'<br>'.join(map(html.escape, details + more))}</td></tr>"
        )
    dropped = f"<p>{html.escape(run.dropped.sentence)}.</p>" if run.dropped else ""
    events = "".join(f"<li>{html.escape(event.text)}</li>" for event in run.events[-EVENTS:])
    noted = f"<h2>Noted during the run</h2><ul>{events}</ul>" if events else ""
    if not rows and not dropped and not noted:
        return ""
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    title = "<h2>What went wrong, or was dropped</h2>"
    return f'<section class="card wrong">{title}{table}{dropped}{noted}</section>'


def figure_of(panel: Panel, name: str) -> str:
    """The panel as a figure of the page; `name` tells its parts from those of the others."""
    legend = "".join(
        f'<span><i class="{"dashed" if dashed else ""}" style="border-color:var(--{colour})"></i>'
        f"{html.escape(text)}</span>"
        for text, colour, dashed in panel.legend
    )
    sizes = {"narrow": (400, 250), "broad": (800, 385)} if panel.wide else {"": (400, 236)}
    if panel.kind == "bars":
        height = 66 + TRACK_HEIGHT * len(panel.categories)
        sizes = {"narrow": (400, height), "broad": (1240, height)}
    drawings = []
    for style, (width, height) in sizes.items():
        svg, frame = to_svg(panel, f"{name}{style}", width, height)
        data = html.escape(json.dumps(_pointed(panel, frame), separators=(",", ":")), quote=True)
        drawings.append(f'<div class="{style}" data-panel="{data}">{svg}</div>')
    wide = ' class="wide"' if panel.wide else ""
    return (
        f"<figure{wide}><figcaption><b>{html.escape(panel.title)}</b>"
        f"<span>{html.escape(panel.unit)}</span></figcaption>"
        f'<div class="legend">{legend}</div>{"".join(drawings)}</figure>'
    )


def _pointed(panel: Panel, frame: Sequence[float]) -> dict[str, Any]:
    """The data that the script shows under the pointer."""
    data: dict[str, Any] = {"f": [round(float(value), 3) for value in frame]}
    data["x"] = "step" if panel.x_label == STEPS else panel.x_label
    data["share"] = panel.form == "share"
    if panel.categories:
        data["k"] = list(panel.categories)
    if panel.kind == "bars":
        data["b"] = [
            [bar.row, round(bar.start, 3), round(bar.length, 3), panel.bar_names[bar.colour]]
            for bar in panel.bars
        ]
        return data
    curves = []
    for curve in panel.curves:
        x, y = thin(curve.x, curve.y, POINTS)
        if np.isfinite(y).any():
            values = [float(f"{value:.5g}") if np.isfinite(value) else None for value in y]
            consecutive = bool((np.diff(x) == 1).all())
            steps = int(x[0]) if consecutive else [float(f"{place:.6g}") for place in x]
            curves.append([curve.name, curve.colour, steps, values])
    data["c"] = curves
    data["m"] = [
        [mark.step, mark.colour, f"{KINDS[mark.kind][0]}: {mark.detail}"] for mark in panel.marks
    ][:POINTS]
    return data


def _tables(run: RunData) -> str:
    return "\n".join(
        f'<section class="card"><h2>{html.escape(title)}</h2>{_table(facts)}</section>'
        for title, facts in tables_of(run)
    )


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts
    )
    return f"<table>{rows}</table>"


def tables_of(run: RunData) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of (name, value), under their titles."""
    summary = run.summary
    result = [
        ("steps", f"{summary.steps:,}"),
        ("last weight version", f"{run.rows[-1]['version']}"),
        ("time in steps", span(summary.in_steps_s)),
    ]
    if summary.before is not None:
        result.append(("held-out reward before", f"{summary.before:.3f}"))
    if summary.after is not None:
        result.append(("held-out reward after", f"{summary.after:.3f}"))
    if summary.lag_mean is not None and not run.supervised:
        lag = f"mean {summary.lag_mean:.2f}, max {summary.lag_max} versions"
        result.append(("lag of a token", lag))
    drift = next(
        (
            value
            for row in reversed(run.rows)
            if (value := number(row, "staleness/drift")) is not None
        ),
        None,
    )
    if drift is not None:
        result.append(("staleness drift, last step", f"{drift:.3g}"))
    result += [(f"gradients {name}", f"{count:,}") for name, count in summary.regimes.items()]

    counts = {"generated": summary.generated, "trained on": summary.trained}
    speed = [(f"tokens {name}", f"{count:,}") for name, count in counts.items() if count]
    speed.append(("throughput", f"{summary.tokens_per_s:,.0f} tokens/s"))
    speed.append(("time per step", f"{summary.in_steps_s / summary.steps:.2f} s"))
    speed += [
        (f"of it {name}", f"{share:.1%}")
        for name, share in summary.shares.items()
        if share >= 0.0005
    ]
    if summary.busy_share is not None:
        speed.append(("engines busy", f"{summary.busy_share:.1%}"))
    if summary.alive is not None and (summary.restarts or summary.alive[0] < summary.alive[1]):
        alive = f"{summary.alive[0]} of {summary.alive[1]}, {summary.restarts} restarts"
        speed.append(("engines alive", alive))

    tables = [("Result", result), ("Speed", speed)]
    if run.window is not None:
        tables.append((f"The last {len(run.window.steps)} steps", run.window.in_words()))
    return tables


def _config(run: RunData) -> str:
    """Folded: every setting by its dotted key, as RUN/config.yaml has it."""
    if not run.config:
        return (
            '<section class="card"><h2>Configuration</h2><p>The run directory holds no config.yaml:'
            " its settings, the bound of the lag and thresholds are not shown.</p></section>"
        )
    text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True, width=100)
    return (
        '<details class="card"><summary>Configuration</summary>'
        f"<pre>{html.escape(text)}</pre></details>"
    )

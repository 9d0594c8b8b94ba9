"""Page of a run. The report writes it once, as a single HTML file that needs no network; the
dashboard serves it and keeps it up to date.

    RunData -> parts (HTML by placeholder in page.html)  -+
            -> panels (JSON, drawn by page.js)           -+-> as_html (report), as_state (dashboard)

The first screen shows the reward and the key figures. Anomalies, panels, tables and the folded
config follow.

Invariant: every part escapes the text of a run, and a browser executes only the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from megatron_async_rl.config.yaml_tree import write
from megatron_async_rl.metrics.log import number
from megatron_async_rl.report.anomalies import GRAVE, KINDS, steps_text
from megatron_async_rl.report.metric_rows import Floats
from megatron_async_rl.report.panel import COLOURS, Panel
from megatron_async_rl.report.panels import panels_of
from megatron_async_rl.report.run_data import RunData, span
from megatron_async_rl.report.scorecard_section import scorecard_section
from megatron_async_rl.watchdog.events import Status

DETAILS = 4
"""Maximum number of anomalies of one kind with a description."""
EVENTS = 12
"""Maximum number of events; the page shows the newest."""
FOOTER = (
    "Thin lines are logged values, and wide lines their moving averages. In a long run, a curve"
    " shows the extremes of each interval of steps. metrics.jsonl and TensorBoard's files in the"
    " run directory contain all values."
)
FIRST_SHARE = 10
"""Number of equal parts of a run. The first and the last reward are means over one part."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of the page, for a file or for the dashboard."""

    parts: Mapping[str, str]
    """Placeholder in page.html -> HTML; other placeholders stay empty."""
    panels: Sequence[Panel] = ()
    """Panels in order; the first is the main one."""

    def as_html(self, live: str = "") -> str:
        """Return the whole page. `live`: view that the script requests from the dashboard; empty in
        a file."""
        style, script = _asset("page.css"), _asset("page.js")
        # The policy permits the page's script by its digest, so no injected script runs.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        places = {
            "POLICY": "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
            f" script-src 'sha256-{digest}'; connect-src {"'self'" if live else "'none'"};"
            " base-uri 'none'; form-action 'none'",
            "LIGHT": "".join(f"  --{name}: {value};\n" for name, value in COLOURS.items()),
            "STYLE": style,
            "SCRIPT": script,
            "LIVE": html.escape(live),
            # Without `<`, the text of a run cannot end the script element or open a comment in it.
            "DATA": _compact(self.drawn()).replace("<", "\\u003c"),
            **self.parts,
        }
        # Replace all placeholders in one pass, so that text of a run is never taken for one.
        return re.sub(r"@([A-Z]+)@", lambda place: places.get(place[1], ""), _asset("page.html"))

    def drawn(self) -> list[dict[str, Any]]:
        """Return the panels as JSON for page.js."""
        return [panel.as_json() for panel in self.panels]

    def as_state(self) -> tuple[bytes, str]:
        """Return (JSON with `parts`, `panels` and `tag`, the tag). The tag is a digest of the
        content."""
        content = _compact({"parts": self.parts, "panels": self.drawn()})
        # With a digest, equal states have equal tags, even after a restart of the server.
        tag = hashlib.sha256(content.encode()).hexdigest()[:16]
        return f'{{"tag":"{tag}",{content[1:]}'.encode(), tag


@cache
def _asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("megatron_async_rl.report").joinpath(name).read_text(encoding="utf-8")


def _compact(value: Any) -> str:
    # A browser's JSON parser refuses NaN, so the value must not contain any.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def page_of(run: RunData, samples: str = "") -> Page:
    """Return the page of a run. `samples`: HTML to show between panels and tables."""
    where = str(run.run_dir)
    # Show the time of the newest step, because the status of a killed run remains `training`.
    if (ended := number(run.rows[-1], "time")) is not None:
        where += f" · newest step {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(ended))}"
    parts = {
        **head(run.run_dir.name, where, run.status),
        "NUMBERS": _numbers(run),
        "WRONG": _wrong(run) + scorecard_section(run.run_dir),
        "SAMPLES": samples,
        "TABLES": _tables(run),
        "CONFIG": config_part(run.config),
        "FOOTER": FOOTER,
    }
    return Page(parts=parts, panels=panels_of(run))


def head(title: str, where: str, status: Status | None) -> dict[str, str]:
    """Return the parts of the head: title, path, phase and error."""
    phase = error = ""
    if status is not None:
        name = html.escape(status.phase)
        # A finished run is always at its last step, so its step is not shown.
        at = "" if status.phase == "finished" else f" at step {status.step} of {status.steps}"
        phase = f'<span class="phase {name}">{name}{at}</span>'
        if status.error:
            log = f"\n{status.log}" if status.log else ""
            error = problem(status.error + log)
    where = html.escape(where)
    return {"TITLE": html.escape(title), "WHERE": where, "PHASE": phase, "ERROR": error}


def problem(text: str) -> str:
    """Return HTML of an error message."""
    return f'<section class="card error">{html.escape(text)}</section>'


def _numbers(run: RunData) -> str:
    """Return HTML of the key figures."""
    summary = run.summary
    tiles: list[tuple[str, str, str]] = []
    """(HTML of the figure, label, CSS class) of each tile."""
    if summary.before is not None and summary.after is not None:
        change = summary.after - summary.before
        # For a loss, a decrease is an improvement.
        gain = -change if summary.measure == "loss" else change
        tone = "better" if gain > 0 else "worse" if gain < 0 else ""
        figure = (
            f'{summary.before:.3f} → {summary.after:.3f} <span class="{tone}">{change:+.3f}</span>'
        )
        tiles.append((figure, f"held-out {summary.measure}, before and after", "whole"))
    elif summary.before is not None:
        label = f"held-out {summary.measure} before the first step"
        tiles.append((f"{summary.before:.3f}", label, "whole"))
    if not run.supervised and (trained := _ends(run.rows.finite("reward/mean"))) is not None:
        tiles.append(
            (
                f"{trained[0]:.3f} → {trained[1]:.3f}",
                "reward trained on, first and last tenth",
                "whole",
            )
        )
    if run.supervised and (losses := _ends(run.rows.finite("policy/loss"))) is not None:
        tiles.append((f"{losses[0]:.4g} → {losses[1]:.4g}", "loss, first and last tenth", "whole"))

    # Show the planned number of steps only while steps are missing.
    planned = f" of {run.status.steps:,}" if run.status and run.status.steps > summary.steps else ""
    tiles.append((f"{summary.steps:,}{planned}", "steps", ""))
    tiles.append((span(summary.in_steps_s), "in steps", ""))
    tiles.append((f"{summary.tokens_per_s:,.0f}", "tokens/s", ""))
    tiles.append((f"{summary.in_steps_s / summary.steps:.2f} s", "per step", ""))
    if summary.lag_mean is not None and not run.supervised:
        largest = "" if summary.lag_max is None else f", max {summary.lag_max}"
        tiles.append((f"{summary.lag_mean:.2f}", f"mean lag{largest}", ""))
    if summary.busy_share is not None:
        tiles.append((f"{summary.busy_share:.0%}", "engines busy", ""))
    # Only the kinds in GRAVE count as anomalies; the others, such as drops and resumes, are notes.
    grave = sum(count for kind, count in run.anomaly_counts.items() if kind in GRAVE)
    tone = "worse" if grave else "better"
    notes = sum(run.anomaly_counts.values()) - grave
    also = f", {notes:,} {'note' if notes == 1 else 'notes'}" if notes else ""
    noun = "anomaly" if grave == 1 else "anomalies"
    tiles.append(
        (
            f'<span class="{tone}">{grave or "No"}</span> {noun}',
            f"in the metrics{also}",
            "whole",
        )
    )
    return "".join(
        f'<div class="{style}"><b>{value}</b><small>{html.escape(name)}</small></div>'
        for value, name, style in tiles
    )


def _ends(finite: Floats) -> tuple[float, float] | None:
    """Return the means of the first and of the last part of the values; None without values."""
    if not len(finite):
        return None
    # Use at least one value of a short run.
    share = max(1, len(finite) // FIRST_SHARE)
    return float(finite[:share].mean()), float(finite[-share:].mean())


def _wrong(run: RunData) -> str:
    """Return HTML of a table of the anomalies, gravest kind first, and of the run's events; empty
    without any."""
    rows = []
    for kind, (title, colour) in KINDS.items():
        anomalies = [anomaly for anomaly in run.anomalies if anomaly.kind == kind]
        if not anomalies:
            continue
        count = run.anomaly_counts[kind]
        steps = steps_text([anomaly.step for anomaly in anomalies])
        steps = (
            steps
            if len(steps) <= 60
            # Truncate at a comma, so that every number is complete.
            else f"{count:,} steps, {steps[:48].rpartition(',')[0]}, …"
        )
        details = [f"step {one.step}: {one.detail}" for one in anomalies[:DETAILS]]
        more = [f"and {count - DETAILS:,} more"] if count > DETAILS else []
        rows.append(
            f'<tr><td><i class="dot" style="border-top-color:var(--{colour})"></i>'
            f"{html.escape(title)}</td><td>{html.escape(steps)}</td>"
            f"<td>{'<br>'.join(map(html.escape, details + more))}</td></tr>"
        )
    # Escape the texts of events and anomalies, because they contain ids from the data.
    dropped = f"<p>{html.escape(run.dropped.sentence)}.</p>" if run.dropped else ""
    events = "".join(f"<li>{html.escape(event.text)}</li>" for event in run.events[-EVENTS:])
    listed = f"<h2>Events</h2><ul>{events}</ul>" if events else ""
    if not rows and not dropped and not listed:
        return ""
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    # No heading stands above nothing: a run may have events alone.
    title = "<h2>Anomalies and dropped responses</h2>" if table or dropped else ""
    return f'<section class="card wrong">{title}{table}{dropped}{listed}</section>'


def _tables(run: RunData) -> str:
    """Return HTML of all tables."""
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
    """Return the title and the rows, as (name, value), of each table."""
    summary = run.summary
    result = [
        ("steps", f"{summary.steps:,}"),
        ("last weight version", f"{run.rows[-1]['version']}"),
        ("time in steps", span(summary.in_steps_s)),
    ]
    if summary.before is not None:
        result.append((f"held-out {summary.measure} before", f"{summary.before:.3f}"))
    if summary.after is not None:
        result.append((f"held-out {summary.measure} after", f"{summary.after:.3f}"))
    if summary.lag_ends and not run.supervised:
        result.append(("lag of a token", f"{summary.lag_ends} versions"))
    drift = run.rows.last("staleness/drift")
    if drift is not None:
        result.append(("staleness drift, last step", f"{drift:.3g}"))
    if summary.failed:
        result.append(("rewards that failed", f"{summary.failed:,}"))
    if run.omitted:
        result.append(("metrics of another version, not shown", ", ".join(run.omitted)))
    result += [(f"gradients {name}", f"{count:,}") for name, count in summary.regimes.items()]

    counts = {"generated": summary.generated, "trained on": summary.trained}
    speed = [(f"tokens {name}", f"{count:,}") for name, count in counts.items() if count]
    speed.append(("throughput", f"{summary.tokens_per_s:,.0f} tokens/s"))
    speed.append(("time per step", f"{summary.in_steps_s / summary.steps:.2f} s"))
    speed += [
        (f"share of the time: {name}", f"{share:.1%}")
        for name, share in summary.shares.items()
        # A smaller share would be displayed as 0.0%.
        if share >= 0.0005
    ]
    if summary.busy_share is not None:
        speed.append(("engines busy", f"{summary.busy_share:.1%}"))
    if summary.alive is not None and (summary.restarts or summary.alive[0] < summary.alive[1]):
        alive = f"{summary.alive[0]} of {summary.alive[1]}, {summary.restarts} restarts"
        speed.append(("engines alive", alive))

    tables = [("Result", result), ("Speed", speed)]
    if run.replays:
        tables.append(("Replays", [(one.name, one.summary) for one in run.replays]))
    if run.window is not None:
        tables.append((f"The last {len(run.window.steps)} steps", run.window.as_text()))
    return tables


def config_part(config: Mapping[str, Any]) -> str:
    """Return HTML with all settings of RUN/config.yaml, folded."""
    if not config:
        return (
            '<section class="card"><h2>Configuration</h2><p>The run directory has no config.yaml,'
            " so the page shows no settings, no bound of the lag and no thresholds.</p></section>"
        )
    # Use the package's YAML writer, so that the text is a valid config.
    text = write(dict(config))
    return (
        '<details class="card"><summary>Configuration</summary>'
        f"<pre>{html.escape(text)}</pre></details>"
    )

"""The page of a run. The report writes it once, as one HTML file that needs no network; the
dashboard serves it and keeps it up to date.

    RunData -> parts (HTML by place in page.html)  -+
            -> panels (JSON, drawn by page.js)     -+-> as_html (report), as_state (dashboard)

The first screen has the reward and the headline numbers. Anomalies, panels, tables and the folded
configuration follow.

Invariant: every part escapes the text of a run, and no script but the page's own may run.
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
from megatron_async_rl.watchdog.events import Status

DETAILS = 4
"""Number of anomalies of one kind that are described."""
EVENTS = 12
"""Number of newest events that are shown."""
FOOTER = (
    "Thin lines are the logged values, wide ones their moving average; of long runs each curve"
    " shows its extremes. Every value is in metrics.jsonl and TensorBoard's files in the run's"
    " directory."
)
FIRST_SHARE = 10
"""Number of equal parts of a run. The first and the last reward are the means of one part."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of the page, for a file or for the dashboard."""

    parts: Mapping[str, str]
    """HTML by the name of its place in page.html; other places stay empty."""
    panels: Sequence[Panel] = ()
    """Panels in order; the first is the main one."""

    def as_html(self, live: str = "") -> str:
        """Return the whole page. `live` is the view that the script requests from the dashboard;
        empty in a file."""
        style, script = _asset("page.css"), _asset("page.js")
        # The policy permits the page's script by its digest, so injected script never runs.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        places = {
            "POLICY": "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
            f" script-src 'sha256-{digest}'; connect-src {"'self'" if live else "'none'"};"
            " base-uri 'none'; form-action 'none'",
            "LIGHT": "".join(f"  --{name}: {value};\n" for name, value in COLOURS.items()),
            "STYLE": style,
            "SCRIPT": script,
            "LIVE": html.escape(live),
            # Without `<`, no text of a run can end the script element or open a comment in it.
            "DATA": _compact(self.drawn()).replace("<", "\\u003c"),
            **self.parts,
        }
        # In one pass: text of a run that looks like a place must not be replaced.
        return re.sub(r"@([A-Z]+)@", lambda place: places.get(place[1], ""), _asset("page.html"))

    def drawn(self) -> list[dict[str, Any]]:
        """Return the panels as page.js reads them."""
        return [panel.as_json() for panel in self.panels]

    def as_state(self) -> tuple[bytes, str]:
        """Return JSON of `parts`, `panels` and a `tag` that changes with them; and the tag."""
        content = _compact({"parts": self.parts, "panels": self.drawn()})
        # A digest of the content: equal states have equal tags, also after a restart of the server.
        tag = hashlib.sha256(content.encode()).hexdigest()[:16]
        return f'{{"tag":"{tag}",{content[1:]}'.encode(), tag


@cache
def _asset(name: str) -> str:
    return files("megatron_async_rl.report").joinpath(name).read_text(encoding="utf-8")


def _compact(value: Any) -> str:
    # allow_nan=False: a browser's JSON parser refuses NaN.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def page_of(run: RunData, samples: str = "") -> Page:
    """Return the page of a run. `samples` is HTML, shown between panels and tables."""
    where = str(run.run_dir)
    # The status of a killed run stays `training`: only the time shows it.
    if (ended := number(run.rows[-1], "time")) is not None:
        where += f" · newest step {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(ended))}"
    parts = {
        **head(run.run_dir.name, where, run.status),
        "NUMBERS": _numbers(run),
        "WRONG": _wrong(run),
        "SAMPLES": samples,
        "TABLES": _tables(run),
        "CONFIG": config_part(run.config),
        "FOOTER": FOOTER,
    }
    return Page(parts=parts, panels=panels_of(run))


def head(title: str, where: str, status: Status | None) -> dict[str, str]:
    """Return the parts of the head: title, place, phase and error."""
    phase = error = ""
    if status is not None:
        name = html.escape(status.phase)
        # A finished run is at its last step, which needs no mention.
        at = "" if status.phase == "finished" else f" at step {status.step} of {status.steps}"
        phase = f'<span class="phase {name}">{name}{at}</span>'
        if status.error:
            log = f"\n{status.log}" if status.log else ""
            error = problem(status.error + log)
    where = html.escape(where)
    return {"TITLE": html.escape(title), "WHERE": where, "PHASE": phase, "ERROR": error}


def problem(text: str) -> str:
    return f'<section class="card error">{html.escape(text)}</section>'


def _numbers(run: RunData) -> str:
    """Return the headline numbers as tiles."""
    summary = run.summary
    tiles: list[tuple[str, str, str]] = []
    """(number, label, class)."""
    if summary.before is not None and summary.after is not None:
        change = summary.after - summary.before
        # A smaller loss is better, a larger reward is better.
        gain = -change if summary.measure == "loss" else change
        tone = "better" if gain > 0 else "worse" if gain < 0 else ""
        number_ = (
            f'{summary.before:.3f} → {summary.after:.3f} <span class="{tone}">{change:+.3f}</span>'
        )
        tiles.append((number_, f"held-out {summary.measure}, before and after", "whole"))
    elif summary.before is not None:
        what = f"held-out {summary.measure} before the first step"
        tiles.append((f"{summary.before:.3f}", what, "whole"))
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

    # The plan is shown only while steps are missing.
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
    # Only grave kinds count as anomalies; skips, drops and resumes are notes.
    wrong = sum(count for kind, count in run.found.items() if kind in GRAVE)
    tone = "worse" if wrong else "better"
    noted = sum(run.found.values()) - wrong
    also = f", {noted:,} notes" if noted else ""
    noun = "anomaly" if wrong == 1 else "anomalies"
    tiles.append(
        (
            f'<span class="{tone}">{wrong or "No"}</span> {noun}',
            f"found in the metrics{also}",
            "whole",
        )
    )
    return "".join(
        f'<div class="{style}"><b>{value}</b><small>{html.escape(name)}</small></div>'
        for value, name, style in tiles
    )


def _ends(finite: Floats) -> tuple[float, float] | None:
    """Return the means of the first and the last values; None without values."""
    if not len(finite):
        return None
    # At least one value of a short run.
    share = max(1, len(finite) // FIRST_SHARE)
    return float(finite[:share].mean()), float(finite[-share:].mean())


def _wrong(run: RunData) -> str:
    """Return a table of the anomalies, and the events that the run noted."""
    rows = []
    for kind, (title, colour) in KINDS.items():
        # KINDS is sorted by gravity, and so is the table.
        found = [anomaly for anomaly in run.anomalies if anomaly.kind == kind]
        if not found:
            continue
        steps = steps_text([anomaly.step for anomaly in found])
        steps = (
            steps
            if len(steps) <= 60
            # Cut at a comma, so that no step's number is cut.
            else f"{run.found[kind]:,} steps, {steps[:48].rpartition(',')[0]}, …"
        )
        details = [f"step {one.step}: {one.detail}" for one in found[:DETAILS]]
        count = run.found[kind]
        more = [f"and {count - DETAILS:,} more"] if count > DETAILS else []
        rows.append(
            f'<tr><td><i class="dot" style="border-top-color:var(--{colour})"></i>'
            f"{html.escape(title)}</td><td>{html.escape(steps)}</td>"
            f"<td>{'<br>'.join(map(html.escape, details + more))}</td></tr>"
        )
    # Texts of events and anomalies contain ids from the data: always escaped.
    dropped = f"<p>{html.escape(run.dropped.sentence)}.</p>" if run.dropped else ""
    events = "".join(f"<li>{html.escape(event.text)}</li>" for event in run.events[-EVENTS:])
    noted = f"<h2>Noted during the run</h2><ul>{events}</ul>" if events else ""
    if not rows and not dropped and not noted:
        return ""
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    title = "<h2>What went wrong, or was dropped</h2>"
    return f'<section class="card wrong">{title}{table}{dropped}{noted}</section>'


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
    """Return (title, rows of (name, value)) of each table."""
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
    # The last value: drift of the whole run has no meaning as a mean.
    drift = run.rows.last("staleness/drift")
    if drift is not None:
        result.append(("staleness drift, last step", f"{drift:.3g}"))
    if summary.failed:
        result.append(("rewards that failed", f"{summary.failed:,}"))
    if run.left_out:
        result.append(("not shown, logged by another version", ", ".join(run.left_out)))
    result += [(f"gradients {name}", f"{count:,}") for name, count in summary.regimes.items()]

    counts = {"generated": summary.generated, "trained on": summary.trained}
    speed = [(f"tokens {name}", f"{count:,}") for name, count in counts.items() if count]
    speed.append(("throughput", f"{summary.tokens_per_s:,.0f} tokens/s"))
    speed.append(("time per step", f"{summary.in_steps_s / summary.steps:.2f} s"))
    speed += [
        (f"of it {name}", f"{share:.1%}")
        for name, share in summary.shares.items()
        # Smaller shares would be shown as 0.0 %.
        if share >= 0.0005
    ]
    if summary.busy_share is not None:
        speed.append(("engines busy", f"{summary.busy_share:.1%}"))
    if summary.alive is not None and (summary.restarts or summary.alive[0] < summary.alive[1]):
        alive = f"{summary.alive[0]} of {summary.alive[1]}, {summary.restarts} restarts"
        speed.append(("engines alive", alive))

    tables = [("Result", result), ("Speed", speed)]
    if run.window is not None:
        tables.append((f"The last {len(run.window.steps)} steps", run.window.as_text()))
    return tables


def config_part(config: Mapping[str, Any]) -> str:
    """Return all settings of RUN/config.yaml, folded."""
    if not config:
        return (
            '<section class="card"><h2>Configuration</h2><p>The run directory holds no config.yaml:'
            " its settings, the bound of the lag and thresholds are not shown.</p></section>"
        )
    # Written by the package's own YAML writer, so that the text can be used as a config.
    text = write(dict(config))
    return (
        '<details class="card"><summary>Configuration</summary>'
        f"<pre>{html.escape(text)}</pre></details>"
    )

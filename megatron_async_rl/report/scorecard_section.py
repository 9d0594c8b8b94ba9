"""Panel with the scorecard that `mar verify` wrote to RUN/verify.json.

Invariant: every text is escaped, and the verdict is a word, so that it does not depend on colours.
"""

from __future__ import annotations

import html
import json
import time
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatron_async_rl.config.settings_model import Strict

FILE = "verify.json"
SHOWN_DETAILS = 5


class _StoredRow(Strict):
    name: str
    value: str
    bound: str
    verdict: Literal["passed", "failed", "absent"]
    remedy: str
    details: list[str]


class _Card(Strict):
    subject: str
    verdict: str
    notes: list[str]
    rows: list[_StoredRow]


_CARD = TypeAdapter(_Card)


def scorecard_section(run_dir: Path) -> str:
    """Return HTML of the scorecard; empty if the run was not verified."""
    path = run_dir / FILE
    try:
        card = _CARD.validate_json(path.read_bytes())
        checked = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(path.stat().st_mtime))
    except FileNotFoundError:
        return ""
    except (OSError, ValidationError, json.JSONDecodeError) as error:
        why = html.escape(str(error).splitlines()[0])
        text = f"{FILE} is not a scorecard ({why}): run <code>mar verify RUN</code> again."
        return f'<section class="card wrong"><h2>Verification</h2><p>{text}</p></section>'
    failed = sum(row.verdict == "failed" for row in card.rows)
    absent = sum(row.verdict == "absent" for row in card.rows)
    passed = len(card.rows) - failed - absent
    title = f"Verification: {passed} passed, {failed} failed, {absent} absent"
    # Failed rows first: a reader must not search for them.
    order = {"failed": 0, "absent": 2}
    rows = "".join(
        _row(row) for row in sorted(card.rows, key=lambda row: order.get(row.verdict, 1))
    )
    head = "<tr><th>check</th><th>verdict</th><th>value</th><th>bound</th></tr>"
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in card.notes)
    return (
        f'<details class="card scorecard"{" open" if failed else ""}><summary>{title}</summary>'
        f"<p>mar verify, {html.escape(checked)}</p>{notes}<table>{head}{rows}</table></details>"
    )


def _row(row: _StoredRow) -> str:
    value, verdict = html.escape(row.value), html.escape(row.verdict)
    if row.verdict == "failed":
        verdict = '<b class="worse">FAILED</b>'
        lines = [*row.details[:SHOWN_DETAILS], f"remedy: {row.remedy}"]
        value = "<br>".join([value, *map(html.escape, lines)])
    return (
        f"<tr><td>{html.escape(row.name)}</td><td>{verdict}</td><td>{value}</td>"
        f"<td>{html.escape(row.bound)}</td></tr>"
    )

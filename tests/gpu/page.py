"""`python -m tests.gpu.page`: generates the part of docs/gpu.md that depends on a run on a GPU,
from docs/gpu.json.

The record is that of the newest run of `make gpu-tests`, or null without a run, which the page
states.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "gpu.json"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN = "<!-- from gpu.json: python -m tests.gpu.page -->\n"
END = "<!-- end -->\n"
NEVER = "**Not run on a GPU yet.** There are no measurements."

Record = dict[str, Any] | None
"""date, device, cuda, versions, commit, seconds; cut: tests left out because the time ran out;
tests: `file::name` -> passed, failed and skipped (numbers of parameters), seconds and reasons;
figures: test, name, value, unit, against, and at_most or at_least."""


def write(record: Record) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), record))


def page(text: str, record: Record) -> str:
    """Return the page with the part between its two marks generated again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_run(record)) + "\n" + END + after


def _run(record: Record) -> Iterator[str]:
    yield "## Run on a GPU\n"
    if record is None:
        yield NEVER + "\n"
        return
    versions = ", ".join(f"{part} {found}" for part, found in record["versions"].items())
    commit = f" at {record['commit']}" if record["commit"] else ""
    about = (
        f"{record['date']}{commit}, one {record['device']}, CUDA {record['cuda']}, in"
        f" {record['seconds']:.0f} s. {versions}."
    )
    yield textwrap.fill(about, 100, break_on_hyphens=False) + "\n"
    if record["cut"]:
        yield f"**Not complete**: time ran out before {record['cut']} of the tests started.\n"
    yield "| test | checks | outcome |\n| --- | --- | --- |"
    for test, found in record["tests"].items():
        file, _, name = test.partition("::")
        yield f"| `{file}` | {in_words(name)} | {_outcome(found)} |"
    if not record["figures"]:
        return
    yield "\n| figure | measured | required | compared with |\n| --- | --- | --- | --- |"
    for each in record["figures"]:
        yield (
            f"| {each['name']} | {_number(each['value'])} {each['unit']} | {_bound(each)} |"
            f" {each['against']} |"
        )


def in_words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _outcome(found: dict[str, Any]) -> str:
    counts = [f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped") if found[kind]]
    reasons = f" ({'; '.join(found['reasons'])})" if found["reasons"] else ""
    return (", ".join(counts) + reasons).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:.4g}"


def _bound(each: dict[str, Any]) -> str:
    words = {"at_most": "at most", "at_least": "at least"}
    return ", ".join(f"{word} {_number(each[key])}" for key, word in words.items() if key in each)


if __name__ == "__main__":
    write(json.loads(RECORD.read_text()))

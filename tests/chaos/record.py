"""Record of injected faults, which several sessions continue, and the table of its counts.

`benchmarks/chaos.jsonl` has one line for each range of component histories and one for each process
fault, by seed. A seed that was run again replaces its older line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.chaos.invariants import Violation

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.jsonl"
COLUMNS = ("lost", "duplicated", "beyond", "silent", "hung", "unnamed", "left over")
"""Counts that should be zero; see docs in CONTRIBUTING.md."""

Layer = Literal["component", "process", "link", "run"]
"""`link`: over two machines. `run`: the end of a run after its faults."""


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """Faults of the seeds `first` to `last`. `tried`: number of faults by kind. `found`: number of
    violations by column. `details`: the violations as text."""

    layer: Layer
    first: int
    last: int
    date: str
    command: str
    tried: Mapping[str, int]
    found: Mapping[str, int]
    details: Sequence[str] = ()
    seconds: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)


def counts(violations: Iterable[Violation]) -> dict[str, int]:
    return dict(Counter(one.kind for one in violations))


def append(record: FaultRecord, file: Path = FILE) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(record), sort_keys=True) + "\n")


def read(file: Path = FILE) -> list[FaultRecord]:
    """Return the newest record of every seed, in the order of the file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records = [FaultRecord(**json.loads(line)) for line in lines]
    seen: set[tuple[str, int]] = set()
    kept = []
    for record in reversed(records):
        seeds = {(record.layer, seed) for seed in range(record.first, record.last + 1)}
        # A range that a newer one covers in part stays: its other seeds were run only there.
        if seeds - seen:
            kept.append(record)
        seen |= seeds
    return kept[::-1]


def next_seed(layer: Layer, file: Path = FILE) -> int:
    """Return the first seed after all recorded ones."""
    return max((one.last + 1 for one in read(file) if one.layer == layer), default=1)


def table(records: Sequence[FaultRecord]) -> str:
    """Return the counts as a Markdown table: one row for each kind of process fault, and one for
    all faults of the component histories, whose violations have no single cause."""
    rows: dict[str, Counter[str]] = {}
    for record in records:
        if record.layer in ("process", "link"):
            for kind, count in record.tried.items():
                row = rows.setdefault(kind, Counter())
                row["tried"] += count
                row.update(record.found)
    rows = dict(sorted(rows.items()))
    components = [one for one in records if one.layer == "component"]
    if components:
        total: Counter[str] = Counter()
        for record in components:
            total["tried"] += sum(record.tried.values())
            total.update(record.found)
        histories = sum(one.last + 1 - one.first for one in components)
        rows = {f"{histories:,} component histories, all faults": total, **rows}
    if len(rows) > 1:
        rows["all faults"] = sum(rows.values(), Counter())
    # The end of a run is checked once, after several faults.
    for record in records:
        if record.layer == "run":
            row = rows.setdefault(next(iter(record.tried)), Counter())
            row.update({"tried": 1, **record.found})
    names = ("tried", *COLUMNS)
    lines = [f"| fault | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for kind, row in rows.items():
        lines.append(f"| {kind} | {' | '.join(f'{row[name]:,}' for name in names)} |")
    return "\n".join(lines)


def component_kinds(records: Sequence[FaultRecord]) -> str:
    """Return the numbers of the component histories' faults by kind."""
    tried: Counter[str] = Counter()
    for record in records:
        if record.layer == "component":
            tried.update(record.tried)
    return ", ".join(f"{kind} {count:,}" for kind, count in tried.most_common())

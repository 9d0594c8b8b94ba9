"""Invariants of a run, proved from its sample log alone.

`broken` reads the two tables of `RUN/samples/` and returns a Violation for every statement that
they contradict. It shares no code with the scheduler, and repeats in its own words what
`tests/sample_history.py` proves, so that an error in one of them is found by the other:

- outcomes are numbered from 0 without a gap and without repetition;
- each step consumed `prompts_per_step` groups and trained `group_size` samples of each;
- no sample trained twice, and no request was answered by two samples that trained;
- a sample that trained is in the log;
- no sample is older than the staleness bound when it trains, and none is of the future;
- groups are numbered without a gap, each was admitted, and each has exactly one end, or waits;
- a dropped group has one row, with a reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.samples.frames import FOLDER, SegmentBroken, numbers_in
from megatron_async_rl.samples.segments import read_table
from tests.sample_history import HistoryBroken, account

ViolationKind = Literal["lost", "duplicated", "beyond", "silent", "hung", "unnamed", "left over"]


@dataclass(frozen=True)
class Violation:
    kind: ViolationKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class FlowLaw:
    """Settings of a run that its log must obey. `steps`: number of steps that trained."""

    steps: int
    prompts_per_step: int
    group_size: int
    async_ratio: float
    fresh_steps: int = 0
    exact: bool = False
    """True if all tokens of a sample come from one version."""
    replay: bool = False
    """True if steps may train again on samples of earlier groups."""


def broken(
    run_dir: Path, law: FlowLaw, *, waiting: Collection[int] | None = None, position: int = 0
) -> list[Violation]:
    """Return what the log contradicts. `waiting`: groups in the newest checkpoint's buffer, if
    known. `position`: number of outcomes that the checkpoint counts."""
    try:
        whole = numbers_in(run_dir / FOLDER)[:1] in ([], [0])
        outcomes = read_table(run_dir, "outcomes").sort_by("seq").to_pylist()
        samples = read_table(run_dir, "samples").to_pylist()
    except SegmentBroken as error:
        return [Violation("lost", f"{error.path.name} {error.what}")]
    found = _numbers([row["seq"] for row in outcomes], position, whole=whole)
    rows = [row for row in outcomes if row["outcome"] != "repeated"]
    found += _batches(rows, law, whole=whole)
    found += _samples(rows, {(one["id"], one["finished_at"]): one for one in samples}, law, whole)
    found += _groups(rows, law, waiting, whole=whole)
    try:
        account(run_dir, buffer=waiting, replay=law.replay, position=position)
    except HistoryBroken as error:
        # A contradiction that the checks above do not see, too.
        found += [Violation("lost", f"account: {fault}") for fault in error.faults]
    return found


def _numbers(seqs: Sequence[int], position: int, *, whole: bool) -> list[Violation]:
    first = 0 if whole else min(seqs, default=0)
    end = max([position, *(seq + 1 for seq in seqs)])
    counts = Counter(seqs)
    missing = [seq for seq in range(first, end) if seq not in counts]
    twice = [seq for seq, count in counts.items() if count > 1]
    found = []
    if missing:
        text = f"{len(missing)} outcomes are missing, from number {missing[0]} on"
        found.append(Violation("lost", text))
    if twice:
        found.append(Violation("duplicated", f"{len(twice)} outcomes share numbers, as {twice[0]}"))
    return found


def _batches(rows: Sequence[Mapping[str, Any]], law: FlowLaw, *, whole: bool) -> list[Violation]:
    consumed = Counter(row["step"] for row in rows if row["outcome"] == "consumed")
    trained = Counter(row["step"] for row in rows if row["outcome"] == "trained")
    # The first step that is left of a log whose oldest segments were deleted may be incomplete.
    first = 1 if whole else min(consumed, default=law.steps) + 1
    found = []
    for step in sorted({*range(first, law.steps + 1), *consumed, *trained}):
        if step < first:
            continue
        expected = law.prompts_per_step if step <= law.steps else 0
        for what, count, due in (
            ("groups", consumed[step], expected),
            ("samples", trained[step], expected * law.group_size),
        ):
            if count != due:
                kind: ViolationKind = "lost" if count < due else "duplicated"
                found.append(Violation(kind, f"step {step} has {count} {what} instead of {due}"))
    return found


def _samples(
    rows: Sequence[Mapping[str, Any]],
    samples: Mapping[tuple[str, float], Mapping[str, Any]],
    law: FlowLaw,
    whole: bool,
) -> list[Violation]:
    found: list[Violation] = []
    consumed = {row["group"]: row["step"] for row in rows if row["outcome"] == "consumed"}
    seen: dict[str, int] = {}
    bound = math.ceil(law.async_ratio)
    for row in rows:
        if row["outcome"] != "trained":
            continue
        name, step = row["id"], row["step"]
        if not law.replay and name in seen:
            text = f"sample {name} trains in steps {seen[name]} and {step}"
            found.append(Violation("duplicated", text))
        seen[name] = step
        sample = samples.get((name, row["finished_at"]))
        if sample is None:
            if whole:
                found.append(Violation("lost", f"sample {name} of step {step} is not in the log"))
            continue
        # A stored response trains again at any age: only a group's own step is bound.
        if law.replay and consumed.get(row["group"]) != step:
            continue
        version, start = step - 1, min(sample["versions"])
        allowed = bound if start >= law.fresh_steps else 0
        if version - start > allowed:
            text = f"sample {name} trains version {version} with tokens of version {start}"
            found.append(Violation("beyond", f"{text}; the bound is {allowed}"))
        if max(sample["versions"]) > version:
            text = f"sample {name} trains version {version} with newer tokens"
            found.append(Violation("beyond", text))
        if law.exact and start != max(sample["versions"]):
            text = f"sample {name} has tokens of several versions; exact_lag permits one"
            found.append(Violation("beyond", text))
    return found


def _groups(
    rows: Sequence[Mapping[str, Any]],
    law: FlowLaw,
    waiting: Collection[int] | None,
    *,
    whole: bool,
) -> list[Violation]:
    of_groups = [row for row in rows if row["id"] is None and row["group"] >= 0]
    admitted = {row["group"] for row in of_groups if row["outcome"] == "admitted"}
    ends: dict[int, list[str]] = {}
    for row in of_groups:
        if row["outcome"] in ("consumed", "dropped"):
            ends.setdefault(row["group"], []).append(row["outcome"])
    found = [
        Violation("duplicated", f"group {group} ends {len(own)} times: {', '.join(own)}")
        for group, own in ends.items()
        if len(own) > 1
    ]
    found += [
        Violation("lost", f"group {row['group']} is dropped without a reason")
        for row in of_groups
        if row["outcome"] == "dropped" and not row["reason"]
    ]
    if whole:
        numbered = range(max([-1, *admitted, *ends]) + 1)
        found += [
            Violation("lost", f"group {group} was never admitted")
            for group in numbered
            if group not in admitted
        ]
        if waiting is not None:
            open_groups = admitted - ends.keys()
            found += [
                Violation("lost", f"group {group} has no end and does not wait")
                for group in sorted(open_groups - set(waiting))
            ]
    if waiting is not None:
        found += [
            Violation("duplicated", f"group {group} waits after its end")
            for group in sorted(ends.keys() & set(waiting))
        ]
    return found

"""Proof, from the sample log alone, that every group and every sample of a run is accounted for.

    admitted --+--> consumed at one step, with the samples that trained
               +--> dropped, with a reason, and its finished samples with it
               +--> still in the buffer

`account` reads the log, and raises HistoryBroken with every statement that the log contradicts:

- outcomes are numbered without repetition and without a gap, up to the checkpoint's position;
- an outcome of a sample has its sample;
- a group ends at most once, and only after it was admitted; nothing admits it again afterwards;
- the samples of a step belong to the groups that the step consumed, the same number to each (with
  replay, only their number is fixed);
- a sample that was dropped belongs to a group that was dropped, for the same reason;
- every finished training sample has an outcome, belongs to a group that is still in the buffer, or
  was lost in a crash.

A log whose oldest segments were deleted is checked as far back as it reaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_async_rl.samples.frames import FOLDER, lost_end, segments_in
from megatron_async_rl.samples.segments import gaps_in, read_entries, read_table


class HistoryBroken(ValueError):
    """The log contradicts itself, or the buffer. `faults`: one sentence each."""

    def __init__(self, faults: Collection[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, kw_only=True)
class History:
    """End of every group of a run."""

    consumed: dict[int, int]
    """Group -> optimizer step."""
    dropped: dict[int, str]
    """Group -> reason."""
    waiting: frozenset[int]
    """Groups in the buffer."""


def account(
    run_dir: Path,
    *,
    buffer: Collection[int] | None = None,
    replay: bool = False,
    position: int = 0,
) -> History:
    """Return the outcome of every group. `buffer`: the waiting groups, if known. `replay`: steps
    may train on samples of other groups. `position`: number of outcomes that a checkpoint counts,
    if known. It and the log's mark (frames.py) reveal that the newest segments were deleted.
    Raises HistoryBroken, SegmentBroken."""
    segments = segments_in(run_dir / FOLDER)
    # Without the first segment, missing admissions are not a fault.
    whole = not segments or segments[0] == 0
    faults: list[str] = []
    admitted: set[int] = set()
    consumed: dict[int, int] = {}
    dropped: dict[int, str] = {}
    trained: dict[int, Counter[int]] = {}
    left_out: list[tuple[int, str, str | None]] = []
    subjects: dict[tuple[str, float], int] = {}
    last = -1
    if (lost := lost_end(run_dir)) is not None:
        faults.append(lost)

    # By number: resumed runs append to older segments.
    outcomes = read_table(run_dir, "outcomes").sort_by("seq")
    gaps = gaps_in([outcomes["seq"].to_numpy()], first=0 if whole else None, end=position)
    if gaps:
        faults.append(f"outcomes {gaps} are missing")
    for row in outcomes.to_pylist():
        seq, group, outcome, step = row["seq"], row["group"], row["outcome"], row["step"]
        if seq == last:
            faults.append(f"two outcomes have the number {seq}")
        last = seq
        # An evaluation that was repeated: its row keeps its number but no longer counts.
        if outcome == "repeated":
            continue
        if row["id"] is not None:
            subjects[row["id"], row["finished_at"]] = seq
            if outcome == "trained":
                trained.setdefault(step, Counter())[group] += 1
            elif outcome == "dropped":
                left_out.append((group, row["id"], row["reason"]))
            continue
        # A group ends once, so the later outcome is the fault.
        if group in consumed or group in dropped:
            faults.append(f"group {group} is {outcome} (outcome {seq}) after it has ended")
        elif outcome == "admitted":
            admitted.add(group)
        elif group not in admitted and whole:
            faults.append(f"group {group} is {outcome} and was never admitted")
        if outcome == "consumed":
            consumed[group] = step
        elif outcome == "dropped":
            if not row["reason"]:
                faults.append(f"group {group} is dropped without a reason")
            dropped[group] = row["reason"]

    faults += _steps(consumed, trained, replay=replay, whole=whole)
    for group, name, reason in left_out:
        if dropped.get(group, None if whole else reason) != reason:
            faults.append(f"sample {name} is dropped ({reason}) and its group is not")
    waiting = frozenset(admitted - consumed.keys() - dropped.keys())
    for entry in read_entries(run_dir):
        # The subjects that remain have an outcome and no sample.
        subjects.pop((entry.id, entry.finished_at), None)
        if entry.group >= 0 and entry.state == "waiting" and entry.group not in waiting:
            if replay and entry.group in consumed:  # it is in the store, or has left it
                continue
            if whole or entry.group in admitted:
                faults.append(f"sample {entry.id} waits, and its group does not")
    if whole:  # else it may have gone with the oldest segments
        faults += [
            f"outcome {seq} is of sample {name}, which is missing"
            for (name, _), seq in subjects.items()
        ]
    # The checkpoint's buffer is a second source for the waiting groups.
    if buffer is not None and waiting != set(buffer):
        unknown, gone = sorted(set(buffer) - waiting), sorted(waiting - set(buffer))
        faults.append(f"groups {unknown} wait and the log does not have them; {gone} the reverse")
    if faults:
        raise HistoryBroken(faults)
    return History(consumed=consumed, dropped=dropped, waiting=waiting)


def _steps(
    consumed: dict[int, int], trained: dict[int, Counter[int]], *, replay: bool, whole: bool
) -> list[str]:
    faults = []
    groups_of: dict[int, set[int]] = {}
    for group, step in consumed.items():
        groups_of.setdefault(step, set()).add(group)
    for step in sorted(groups_of.keys() | trained.keys()):
        groups, samples = groups_of.get(step, set()), trained.get(step, Counter())
        if not whole and (not groups or not samples):
            continue  # cut at the oldest segment
        if replay:
            if not groups or samples.total() % len(groups):
                faults.append(
                    f"step {step} trains {samples.total()} samples for {len(groups)} groups"
                )
        elif samples.keys() != groups or len(set(samples.values())) != 1:
            faults.append(
                f"step {step} consumes groups {sorted(groups)} and trains samples of"
                f" {dict(sorted(samples.items()))}"
            )
    return faults

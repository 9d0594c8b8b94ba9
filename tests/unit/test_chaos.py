"""Driver of faults: its histories hold, and each of its invariants fails on a doctored log."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.samples.columns import LOGGED
from megatron_async_rl.samples.frames import (
    FOLDER,
    HEADER_BYTES,
    FrameWriter,
    path_of,
    replace_whole,
)
from megatron_async_rl.samples.segments import OUTCOMES, payload_of, read_table
from tests.chaos import faults, histories, record
from tests.chaos.campaign import remove_repeated
from tests.chaos.disk import Crash, FaultyDisk
from tests.chaos.faults import DamageFault
from tests.chaos.histories import ComponentHistory, draw_settings, run_history
from tests.chaos.invariants import FlowLaw, ViolationKind, broken
from tests.chaos.record import FaultRecord
from tests.thorough import thorough
from tests.unit.flow_setup import flow

Rows = list[dict[str, Any]]
STEPS = 5
LAW = FlowLaw(steps=STEPS, prompts_per_step=2, group_size=2, async_ratio=1.0)


@pytest.mark.parametrize(
    "first", [1, pytest.param(101, marks=thorough), pytest.param(201, marks=thorough)]
)
def test_histories_with_crashes_and_losses_keep_every_invariant(first: int) -> None:
    results = [run_history(seed) for seed in range(first, first + 4)]
    assert {one.seed: one.violations for one in results if one.violations} == {}
    assert sum(sum(one.tried.values()) for one in results) > 4
    assert any(one.lives > 1 for one in results)


def test_a_history_is_a_function_of_its_seed() -> None:
    once, again = run_history(7), run_history(7)
    assert (once.tried, once.lives) == (again.tried, again.lives)
    assert run_history(8).tried != once.tried


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose log holds, with dropped groups, in one segment."""
    folder = tmp_path_factory.mktemp("calm")
    settings = replace(
        draw_settings(random.Random(0)),
        flow=flow(2, 1.0, dynamic_sampling=True),
        steps=STEPS,
        fresh_steps=0,
        engines=1,
        evaluators=0,
        evaluate=0,
        failing=0.0,
        segment_bytes=2**26,
        keep_bytes=2**31,
        whole=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories, "FAULTY_LIVES", 0)
        result = ComponentHistory(3, folder / "run", settings).run()
    assert not result.violations
    assert result.lives == 1
    return folder / "run"


def of(rows: Rows, outcome: str, group: int) -> Rows:
    return [row for row in rows if row["outcome"] == outcome and row["group"] == group]


def without(rows: Rows, *gone: dict[str, Any]) -> None:
    """Remove rows, and number the others again."""
    rows[:] = [row for row in rows if row not in gone]
    for number, row in enumerate(rows):
        row["seq"] = number


def again(rows: Rows, row: dict[str, Any], **changes: Any) -> None:
    rows.append({**row, "seq": len(rows), **changes})


def trained_again(rows: Rows) -> None:
    """Step 3 trains sample 0-0 instead of its first one."""
    first, later = of(rows, "trained", 0)[0], of(rows, "trained", 6)[0]
    later |= {name: first[name] for name in ("id", "finished_at", "group")}


def versions_of(rows: Rows, name: str, version: int) -> None:
    row = next(row for row in rows if row["id"] == name)
    row["versions"] = [version] * len(row["versions"])


DOCTORED: dict[str, Callable[[Rows, Rows], object]] = {
    "lost: 1 outcomes are missing, from number 6 on": lambda rows, _: rows.pop(6),
    "duplicated: 1 outcomes share numbers, as 4": lambda rows, _: rows[5].update(seq=4),
    "lost: step 2 has 3 samples instead of 4": lambda rows, _: without(
        rows, of(rows, "trained", 4)[0]
    ),
    "duplicated: step 2 has 5 samples instead of 4": lambda rows, _: again(
        rows, of(rows, "trained", 4)[0], id="4-2"
    ),
    "lost: step 2 has 1 groups instead of 2": lambda rows, _: without(
        rows, *of(rows, "consumed", 4)
    ),
    "duplicated: step 6 has 1 groups instead of 0": lambda rows, _: again(
        rows, of(rows, "consumed", 11)[0], group=1, step=6
    ),
    "duplicated: sample 0-0 trains in steps 1 and 3": lambda rows, _: trained_again(rows),
    "lost: sample 8-1 of step 4 is not in the log": lambda _, samples: samples.remove(
        next(row for row in samples if row["id"] == "8-1")
    ),
    "beyond: sample 9-0 trains version 3 with tokens of version 1; the bound is 1": (
        lambda _, samples: versions_of(samples, "9-0", 1)
    ),
    "beyond: sample 9-0 trains version 3 with newer tokens": (
        lambda _, samples: versions_of(samples, "9-0", 4)
    ),
    "duplicated: group 0 ends 2 times: consumed, dropped": lambda rows, _: again(
        rows, of(rows, "dropped", 1)[0], group=0
    ),
    "duplicated: group 1 ends 2 times: dropped, dropped": lambda rows, _: again(
        rows, of(rows, "dropped", 1)[0]
    ),
    "lost: group 1 is dropped without a reason": lambda rows, _: of(rows, "dropped", 1)[0].update(
        reason=None
    ),
    "lost: group 1 was never admitted": lambda rows, _: without(rows, *of(rows, "admitted", 1)),
    "lost: group 1 has no end and does not wait": lambda rows, _: without(
        rows, *of(rows, "dropped", 1)
    ),
}
"""Violation -> a change of the outcomes and samples that causes it."""


@pytest.mark.parametrize("violation", DOCTORED)
def test_each_invariant_fails_on_a_doctored_log(calm: Path, tmp_path: Path, violation: str) -> None:
    shutil.copytree(calm / FOLDER, tmp_path / FOLDER)
    outcomes, samples = (read_table(calm, name).to_pylist() for name in ("outcomes", "samples"))
    position = len(outcomes)
    assert broken(tmp_path, LAW, waiting=[], position=position) == []
    DOCTORED[violation](outcomes, samples)
    for table, rows, schema in (("outcomes", outcomes, OUTCOMES), ("samples", samples, LOGGED)):
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        replace_whole(path_of(tmp_path / FOLDER, table, 0), [payload_of(batch)])
    assert violation in map(str, broken(tmp_path, LAW, waiting=[], position=position))


def test_a_group_in_the_buffer_that_has_ended_is_a_violation(calm: Path) -> None:
    found = map(str, broken(calm, LAW, waiting=[3]))
    assert "duplicated: group 3 waits after its end" in found


def test_exact_lag_permits_one_version_per_sample(calm: Path) -> None:
    found = map(str, broken(calm, replace(LAW, exact=True), waiting=[]))
    assert "beyond: sample 8-0 has tokens of several versions; exact_lag permits one" in found


def test_fresh_steps_permit_no_lag(calm: Path) -> None:
    found = list(map(str, broken(calm, replace(LAW, fresh_steps=STEPS), waiting=[])))
    assert "beyond: sample 4-0 trains version 1 with tokens of version 0; the bound is 0" in found


def test_a_batch_that_the_trainer_did_not_get_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "FAULTY_LIVES", 0)
    history = ComponentHistory(9, tmp_path / "run")
    judge = history._judge

    def after_a_change() -> None:
        history.ledger[2] = history.ledger[1]
        judge()

    history._judge = after_a_change  # type: ignore[method-assign]
    found = list(map(str, history.run().violations))
    assert found == ["lost: the log has another batch of step 2"]


def test_nothing_reaches_the_disk_of_a_dead_process(tmp_path: Path) -> None:
    disk = FaultyDisk(random.Random(0))
    path = tmp_path / "a.open"
    with disk.installed():
        disk.start(crash_at=2)
        writer = FrameWriter(path)
        with pytest.raises(Crash):
            writer.write(b"content")
        torn = path.read_bytes()
        for call in (writer.sync, writer.abandon, path.unlink):
            with pytest.raises(Crash):
                call()
    assert path.read_bytes() == torn
    assert len(torn) < HEADER_BYTES + len(b"content")


def test_the_record_accumulates_and_counts_each_seed_once(tmp_path: Path) -> None:
    file = tmp_path / "chaos.jsonl"
    assert record.next_seed("component", file) == 1

    def add(first: int, last: int, tried: int, lost: int = 0, **more: Any) -> None:
        what = {"layer": "component", "date": "", "command": "", **more}
        own = FaultRecord(
            first=first, last=last, tried={"stop": tried}, found={"lost": lost}, **what
        )
        record.append(own, file)

    add(1, 10, tried=99, lost=2)
    add(1, 10, tried=5)
    add(11, 20, tried=3)
    add(1, 1, tried=1, layer="process")
    assert record.next_seed("component", file) == 21
    lines = record.table(record.read(file)).splitlines()
    assert lines[2].startswith("| 20 component histories, all faults | 8 | 0 |")
    assert lines[3].startswith("| stop | 1 | 0 |")
    assert lines[4].startswith("| all faults | 9 | 0 |")


def test_a_fault_of_a_live_run_is_a_function_of_its_seed() -> None:
    drawn = [faults.draw(random.Random(seed)) for seed in range(400)]
    assert drawn == [faults.draw(random.Random(seed)) for seed in range(400)]
    kinds = {fault.kind for fault in drawn}
    for process in faults.PROCESSES:
        assert {f"SIGKILL of {process}", f"SIGSTOP of {process}"} <= kinds
    for file in faults.DAMAGED:
        assert {f"flipped bit in {file}", f"truncated {file}"} <= kinds
    assert "full disk" in kinds
    assert {f"unwritable {folder}" for folder in faults.FOLDERS} <= kinds
    assert faults.draw(random.Random(0), "SIGSTOP of rank").kind.startswith("SIGSTOP of rank")


def test_damage_changes_one_bit_or_the_length(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for seed, flip in itertools.product(range(20), (True, False)):
        file.write_bytes(bytes(64))
        DamageFault("latest", flip).apply(file, random.Random(seed))
        content = file.read_bytes()
        bits = sum(byte.bit_count() for byte in content)
        assert (len(content), bits) == (64, 1) if flip else len(content) < 64


def test_a_repaired_file_does_not_repeat_the_numbers_of_a_later_start(tmp_path: Path) -> None:
    def start(position: int, rows: int) -> None:
        log = SampleLogWriter(tmp_path, SamplesConfig())
        log.begin(position)
        for group in range(position, position + rows):
            log.admitted(group, 1)
        log.close()

    def groups() -> list[int]:
        return sorted(read_table(tmp_path, "outcomes")["group"].to_pylist())

    start(0, 10)
    damaged = path_of(tmp_path / FOLDER, "outcomes", 0)
    intact = damaged.read_bytes()
    damaged.write_bytes(intact[:-20])
    start(8, 4)
    damaged.write_bytes(intact)
    assert groups() == [*range(8), 8, 8, 9, 9, 10, 11]
    remove_repeated(damaged)
    assert groups() == list(range(12))
    remove_repeated(path_of(tmp_path / FOLDER, "outcomes", 1))
    assert groups() == list(range(12))


def test_each_column_of_the_record_is_a_kind_of_violation() -> None:
    assert get_args(ViolationKind) == record.COLUMNS
    assert set(faults.PROCESSES) >= faults.TOLERATED

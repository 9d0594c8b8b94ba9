"""Batches of past steps, read from the sample log: complete, or an error that names what is missing
and what can still be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow import log_retention
from megatron_async_rl.flow.log_retention import make_room
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.samples import recorded as recorded_module
from megatron_async_rl.samples.frames import (
    FOLDER,
    TABLES,
    SegmentBroken,
    TableName,
    file_of,
    numbers_in,
    replace_whole,
)
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches
from megatron_async_rl.samples.segments import OUTCOMES, payload_of, read_batches, read_table
from tests.logged_samples import GROUP, STEPS, logged_run, row, sample

STEPS_OF_A_START = 2
STARTS = 3


def log_of(run_dir: Path, position: int = 0, **settings: bool) -> SampleLogWriter:
    log = SampleLogWriter(run_dir, SamplesConfig(**settings))
    log.begin(position)
    return log


def run_of_several_segments(run_dir: Path) -> Path:
    """Write a run that was resumed twice: a segment for each start, with two steps. The samples of
    a start's first step finished in the start before."""
    position = 0
    for start in range(STARTS):
        log = log_of(run_dir, position)
        first = STEPS_OF_A_START * start
        for group in range(first, first + STEPS_OF_A_START):
            log.admitted(group + 1, group + 1)
            for k in range(GROUP):
                log.finished(row(sample(group + 1, k), group + 1))
            if group == 0:
                log.admitted(0, 1)
                for k in range(GROUP):
                    log.finished(row(sample(0, k), 0))
            log.trained([group], [[row(sample(group, k), group) for k in range(GROUP)]], group + 1)
        log.close()
        position = log.position
    return run_dir


def remove(run_dir: Path, segment: int) -> None:
    for table in TABLES:
        path = file_of(run_dir / FOLDER, table, segment)
        assert path is not None
        path.unlink()


def test_batches_cross_the_segments_of_several_starts(tmp_path: Path) -> None:
    recorded = RecordedBatches(run_of_several_segments(tmp_path))
    assert recorded.last_step == STEPS_OF_A_START * STARTS
    for step in range(1, recorded.last_step + 1):
        batch = recorded.batch(step)
        assert batch.version == step - 1
        ids = [f"{step - 1}-{k}" for k in range(GROUP)]
        assert batch.samples["id"].to_pylist() == ids
        assert batch.samples["group"].to_pylist() == [0] * GROUP
        assert batch.samples["reward"].to_pylist() == [step - 1 + k / 10 for k in range(GROUP)]


def test_a_sample_that_was_written_again_has_its_newest_row(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.admitted(0, 1)
    first = sample(0, 0)
    log.finished(row(first))
    log.finished(row(replace(first, reward=9.0)))
    log.trained([0], [[row(first)]], 1)
    log.close()
    assert RecordedBatches(tmp_path).batch(1).samples["reward"].to_pylist() == [9.0]


def test_a_deleted_beginning_is_named_with_the_first_step_that_can_be_read(tmp_path: Path) -> None:
    run_dir = run_of_several_segments(tmp_path)
    remove(run_dir, 0)
    recorded = RecordedBatches(run_dir)
    with pytest.raises(NotRecorded, match=r"no batch of step 1: its segment was deleted"):
        recorded.batch(1)
    # The samples of step 3 finished before its start.
    lacking = "lacks 4 of the 4 samples of step 3, such as 2-0: older segments were deleted"
    with pytest.raises(NotRecorded, match=lacking):
        recorded.batch(3)
    assert recorded.batch(4).samples["id"].to_pylist()[0] == "3-0"


def test_a_step_behind_the_end_is_refused(tmp_path: Path) -> None:
    recorded = RecordedBatches(logged_run(tmp_path))
    with pytest.raises(NotRecorded, match=rf"no batch of step {STEPS + 1}$"):
        recorded.batch(STEPS + 1)


def test_a_start_whose_steps_were_repeated_hides_no_other_step(tmp_path: Path) -> None:
    """A run that was killed before its next checkpoint leaves a segment whose outcomes a resume
    removes."""
    log = log_of(tmp_path)
    for group in range(3):
        write_step(log, group)
    log.close()
    position = log.position
    killed = log_of(tmp_path, position)
    write_step(killed, 3)
    killed.close()
    resumed = log_of(tmp_path, position)
    for group in range(3, 6):
        write_step(resumed, group)
    resumed.close()
    assert numbers_in(tmp_path / FOLDER) == [0, 1, 2]
    recorded = RecordedBatches(tmp_path)
    for step in range(1, 7):
        assert recorded.batch(step).samples["id"].to_pylist()[0] == f"{step - 1}-0"
    checkpoint(tmp_path, 1)
    make_room(tmp_path, keep=2**20, added=2**20, async_ratio=0.0)
    assert numbers_in(tmp_path / FOLDER) == [0, 1, 2]
    assert RecordedBatches(tmp_path).batch(2).version == 1


def write_step(log: SampleLogWriter, group: int) -> None:
    log.admitted(group, group + 1)
    samples = [row(sample(group, k), group) for k in range(GROUP)]
    for one in samples:
        log.finished(one)
    log.trained([group], [samples], group + 1)


def test_a_gap_in_the_outcomes_of_a_step_is_named(tmp_path: Path) -> None:
    run_dir = logged_run(tmp_path)
    folder = run_dir / FOLDER
    table = pa.Table.from_batches([one for _, one in read_batches(folder, "outcomes", 0)])
    at = [place for place, seq in enumerate(table["outcome"].to_pylist()) if seq == "trained"][5]
    lost = table["seq"][at].as_py()
    kept = pa.concat_tables([table.slice(0, at), table.slice(at + 1)]).combine_chunks()
    path = file_of(folder, "outcomes", 0)
    assert path is not None
    replace_whole(path, map(payload_of, kept.to_batches()))
    recorded = RecordedBatches(run_dir)
    with pytest.raises(NotRecorded, match=rf"lacks outcomes {lost} to {lost} of step 2"):
        recorded.batch(2)
    assert len(recorded.batch(1).samples) == GROUP


def test_a_step_without_its_consumed_groups_is_named(tmp_path: Path) -> None:
    run_dir = logged_run(tmp_path)
    folder = run_dir / FOLDER
    table = pa.Table.from_batches([one for _, one in read_batches(folder, "outcomes", 0)])
    # Numbers without a gap, as of a log whose outcomes of groups are lost from its beginning.
    kept = table.filter(pc.not_equal(table["outcome"], "consumed")).sort_by("seq")
    numbers = pa.array(range(len(kept)), pa.int64())
    kept = kept.set_column(kept.schema.get_field_index("seq"), kept.schema.field("seq"), numbers)
    path = file_of(folder, "outcomes", 0)
    assert path is not None
    replace_whole(path, map(payload_of, kept.combine_chunks().to_batches()))
    with pytest.raises(NotRecorded, match="lacks the consumed groups of step 2"):
        RecordedBatches(run_dir).batch(2)


@pytest.mark.parametrize("table", ["samples", "outcomes"])
def test_damage_concerns_only_the_steps_of_its_segment(tmp_path: Path, table: TableName) -> None:
    run_dir = run_of_several_segments(tmp_path)
    path = file_of(run_dir / FOLDER, table, 1)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    recorded = RecordedBatches(run_dir)
    assert len(recorded.batch(1).samples) == GROUP
    with pytest.raises(SegmentBroken, match=f"{table}-000001"):
        recorded.batch(4)
    assert len(recorded.batch(6).samples) == GROUP


def test_logs_of_earlier_versions_and_runs_without_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=r"has no log of its samples"):
        RecordedBatches(tmp_path)
    run_dir = logged_run(tmp_path)
    folder = run_dir / FOLDER
    earlier = [one.drop_columns(["place"]) for _, one in read_batches(folder, "outcomes", 0)]
    path = file_of(folder, "outcomes", 0)
    assert path is not None
    replace_whole(path, map(payload_of, earlier))
    (found,) = {one.schema for _, one in read_batches(folder, "outcomes", 0)}
    assert found.equals(OUTCOMES)
    with pytest.raises(NotRecorded, match="written by an earlier version"):
        RecordedBatches(run_dir).batch(1)


def checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoint" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text("{}")


@pytest.mark.parametrize(
    ("saved", "async_ratio", "kept"),
    [
        ((), 0.0, []),  # nothing could be replayed
        ((4, 5), 0.0, [1, 2]),  # step 5 begins the last segment, and may begin the one before
        ((5,), 0.0, [2]),
        ((5,), 2.0, [1, 2]),  # samples of step 6 may be two steps old
        ((2,), 9.0, [0, 1, 2]),
    ],
)
def test_segments_stay_that_the_oldest_checkpoint_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: tuple[int, ...],
    async_ratio: float,
    kept: list[int],
) -> None:
    run_of_several_segments(tmp_path)
    for step in saved:
        checkpoint(tmp_path, step)
    monkeypatch.setattr(log_retention, "MAX_EXCESS", 10**9)
    note = make_room(tmp_path, keep=1, added=1, async_ratio=async_ratio)
    assert numbers_in(tmp_path / FOLDER) == kept
    assert (note is not None) == bool(kept)
    if kept:
        assert "more than samples.keep_mib: 0" in str(note)
        recorded = RecordedBatches(tmp_path)
        for step in range(saved[0] + 1, recorded.last_step + 1):
            assert len(recorded.batch(step).samples) == GROUP


def test_a_damaged_log_keeps_no_segment_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_retention, "MAX_EXCESS", 10**9)
    run_of_several_segments(tmp_path)
    checkpoint(tmp_path, 2)
    lacking = file_of(tmp_path / FOLDER, "samples", 1)
    assert lacking is not None
    lacking.unlink()
    assert make_room(tmp_path, keep=1, added=1, async_ratio=9.0) is None
    assert numbers_in(tmp_path / FOLDER) == []


def test_a_log_never_exceeds_a_multiple_of_its_limit(tmp_path: Path) -> None:
    run_of_several_segments(tmp_path)
    checkpoint(tmp_path, 2)
    size = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
    assert make_room(tmp_path, keep=-(-size // 4), added=1, async_ratio=9.0) is not None
    assert make_room(tmp_path, keep=size // 8, added=1, async_ratio=9.0) is not None
    assert 0 not in numbers_in(tmp_path / FOLDER)


def test_nothing_is_deleted_from_a_log_that_fits(tmp_path: Path) -> None:
    run_of_several_segments(tmp_path)
    assert make_room(tmp_path, keep=2**20, added=1, async_ratio=0.0) is None
    assert numbers_in(tmp_path / FOLDER) == [0, 1, 2]


def test_a_run_notes_once_that_its_log_is_larger_than_requested(tmp_path: Path) -> None:
    run_of_several_segments(tmp_path)
    checkpoint(tmp_path, 2)
    log = SampleLogWriter(tmp_path, SamplesConfig(keep_mib=2, segment_mib=1), async_ratio=9.0)
    log._keep = 2**18
    log._segment_size = 2**19
    log.begin(10**6)
    for group in (100, 101):
        log.admitted(group, group)
        log.flush()
        log._close_segment(log._segment)
    log.close()
    notes = (tmp_path / "events.jsonl").read_text()
    assert notes.count("more than samples.keep_mib") == 1
    assert numbers_in(tmp_path / FOLDER)[:3] == [0, 1, 2]


def test_experts_are_in_a_batch_only_if_the_log_has_them(tmp_path: Path) -> None:
    for number, kept in enumerate((False, True)):
        run_dir = tmp_path / str(number)
        log = log_of(run_dir, experts=kept)
        log.admitted(0, 1)
        one = replace(sample(0, 0), routed_experts=b"\x01\x02\x03")
        log.finished(row(one))
        log.trained([0], [[row(one)]], 1)
        log.close()
        recorded = RecordedBatches(run_dir)
        assert recorded.has_experts() == kept
        expected = [one.routed_experts if kept else None]
        assert recorded.batch(1).samples["routed_experts"].to_pylist() == expected
        table = read_table(run_dir, "samples")
        assert table["id"].to_pylist() == [one.id]
        assert ("routed_experts" in table.column_names) == kept
        assert not kept or table["routed_experts"].to_pylist() == expected


def test_only_the_newest_batches_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_module, "CACHED_BATCHES", 2)
    recorded = RecordedBatches(run_of_several_segments(tmp_path))
    for step in [*range(1, recorded.last_step + 1), 1]:
        assert recorded.batch(step).samples["id"].to_pylist()[0] == f"{step - 1}-0"
        assert 1 <= len(recorded._batches) <= 2


def test_consecutive_steps_read_each_segment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[tuple[str, int]] = Counter()

    def counted(
        folder: Path, table: TableName, segment: int, *columns: Any, **wanted: Any
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        if not wanted:
            read[table, segment] += 1
        return read_batches(folder, table, segment, *columns, **wanted)

    recorded = RecordedBatches(run_of_several_segments(tmp_path))
    assert recorded.last_step == STARTS * STEPS_OF_A_START
    recorded.batch(1)
    monkeypatch.setattr(recorded_module, "read_batches", counted)
    for step in range(1, recorded.last_step + 1):
        assert len(recorded.batch(step).samples) == GROUP
    assert max(read.values()) == 1
    assert read.keys() == {(table, segment) for table in TABLES for segment in range(STARTS)} - {
        ("outcomes", 0),
        ("samples", 0),
    }

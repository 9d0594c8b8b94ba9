"""The sample log: every finished sample once, with what became of it, through crashes and full
disks."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow import sample_log
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import DataState
from megatron_async_rl.flow.sample_log import SampleLog, SampleLogWriter, open_sample_log
from megatron_async_rl.report import sample_browser
from megatron_async_rl.report.sample_browser import SampleBrowser
from megatron_async_rl.report.samples import SampleQuery, choose, newest_trained, samples_section
from megatron_async_rl.samples.columns import NUMERIC, batch_of
from megatron_async_rl.samples.frames import (
    CLOSED,
    FOLDER,
    HEADER_BYTES,
    MARK_FILE,
    OPEN,
    LogMark,
    SegmentBroken,
    TableName,
    lost_end,
    path_of,
    read_mark,
    segments_in,
)
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.segments import load, read_batches, read_entries, read_table
from megatron_async_rl.samples.types import Prompt, Sample
from megatron_async_rl.simulate.calibrate import _read_samples
from tests.parallel.ranks import FORKS
from tests.sample_history import account
from tests.thorough import examples
from tests.train_batches import row
from tests.unit.fake_engine import FakeEngine
from tests.unit.flow_setup import TrainedGroup, controller_of, flow, position, run, stage, train

PROMPT = Prompt(id="p0", text="1+1=", token_ids=(5, 6), fields={"answer": "2"})
CLOCK = itertools.count(1)


def sample(group: int, k: int = 0, *, length: int = 3, reward: float = 0.5) -> Sample:
    chance = np.random.default_rng(group)
    return Sample(
        id=f"{group}-{k}",
        prompt=PROMPT,
        response_ids=chance.integers(0, 2**31 - 1, length, dtype=np.int32),
        behavior_logprobs=-chance.random(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.uint8),
        text="2",
        finish_reason="stop",
        reward=reward,
        finished_at=float(next(CLOCK)),
    )


def begun(run_dir: Path, position: int = 0, **settings: int) -> SampleLogWriter:
    log = SampleLogWriter(run_dir, SamplesConfig(**settings))
    log.begin(position)
    return log


def train_on(log: SampleLog, samples: list[SampleRow], step: int) -> None:
    """A step that consumes the groups of `samples`, each the only one of its group."""
    groups = sorted({int(one.id.partition("-")[0]) for one in samples})
    batch = [[one for one in samples if int(one.id.partition("-")[0]) == group] for group in groups]
    log.trained(groups, batch, step)


def admitted(log: SampleLog, *groups: int) -> None:
    for group in groups:
        log.admitted(group, 1)


def states(run_dir: Path) -> dict[tuple[str, float], tuple[str, tuple[int, ...], str | None]]:
    entries = list(read_entries(run_dir))
    found = {(e.id, e.finished_at): (e.state, e.steps, e.reason) for e in entries}
    assert len(found) == len(entries), "a sample stands there once"
    return found


def key(one: Sample) -> tuple[str, float]:
    return one.id, one.finished_at


def test_every_finished_sample_is_there_with_what_became_of_it(tmp_path: Path) -> None:
    trained, dropped, waiting, asked = (sample(i) for i in range(4))
    log = begun(tmp_path)
    admitted(log, 0, 1, 2)
    for one in (trained, dropped, waiting):
        log.finished(row(one, int(one.id[0])))
    log.dropped(row(dropped), 7, "late")
    train_on(log, [row(trained)], 7)
    log.evaluated([(PROMPT, [row(replace(asked, id="-1-0"), -1)])], 6)
    log.flush()
    assert states(tmp_path) == {
        key(trained): ("trained", (7,), None),
        key(dropped): ("dropped", (7,), "late"),
        key(waiting): ("waiting", (), None),
        ("-1-0", asked.finished_at): ("evaluated", (6,), None),
    }, "a running run's log can be read"
    log.close()

    loaded = load(tmp_path, [e for e in read_entries(tmp_path) if e.id == "0-0"])
    [(entry, again)] = loaded
    assert entry.group == 0
    np.testing.assert_array_equal(again.response_ids, trained.response_ids)
    np.testing.assert_array_equal(again.behavior_logprobs, trained.behavior_logprobs)
    newest = newest_trained(tmp_path)
    assert newest is not None
    assert newest.id == trained.id
    assert (again.prompt, again.reward) == (PROMPT, 0.5)


def test_entries_come_newest_first_over_batches_and_segments(tmp_path: Path) -> None:
    for first in (0, 4):
        log = begun(tmp_path)
        for group in range(first, first + 4):
            log.finished(row(sample(group), group))
            if group % 2:
                log.flush()
        log.close()
    assert segments_in(tmp_path / FOLDER) == [0, 1]
    assert [entry.group for entry in read_entries(tmp_path)] == [7, 6, 5, 4, 3, 2, 1, 0]
    chosen = [e for e in read_entries(tmp_path) if e.group in (1, 2, 6)]
    assert [one.id for _, one in load(tmp_path, chosen)] == ["6-0", "2-0", "1-0"]


def test_a_response_that_trains_again_names_all_its_steps(tmp_path: Path) -> None:
    first = sample(0)
    log = begun(tmp_path)
    log.finished(row(first, 0))
    train_on(log, [row(first)], 1)
    train_on(log, [row(first).renamed("0-0@4.0"), row(first).renamed("0-0@4.1")], 5)
    log.close()
    assert states(tmp_path) == {key(first): ("trained", (1, 5), None)}


# Crashes


def test_a_sample_that_a_resumed_run_wrote_again_is_read_once_with_its_newest_reward(
    tmp_path: Path,
) -> None:
    """The reward of its group came after the checkpoint. All readers are tested."""
    again, other = sample(0, reward=0.25), sample(1, reward=0.5)
    log = begun(tmp_path)
    for one in (again, other):
        log.finished(row(one))
    log.close()
    log = begun(tmp_path)
    for reward in (0.625, 0.75):  # two crashes, and one segment
        log.finished(row(replace(again, reward=reward)))
    train_on(log, [row(one) for one in (again, other)], 1)
    log.close()

    entries = list(read_entries(tmp_path))
    assert [(e.id, e.reward, e.state) for e in entries] == [
        ("0-0", 0.75, "trained"),
        ("1-0", 0.5, "trained"),
    ]
    assert [one.reward for _, one in load(tmp_path, entries)] == [0.75, 0.5]
    table = read_table(tmp_path, "samples")
    assert (table["id"].to_pylist(), table["reward"].to_pylist()) == (["1-0", "0-0"], [0.5, 0.75])
    step = choose(tmp_path, SampleQuery(step=1))
    assert [(one.id, one.reward) for _, one in step.samples] == [("0-0", 0.75), ("1-0", 0.5)]
    page = samples_section(tmp_path)
    assert (page.count("sample 0-0"), page.count("reward 0.25")) == (1, 0)
    shown = SampleBrowser(tmp_path).answer({"order": "best"})
    assert shown["message"] == "2 of 2 samples"
    assert "reward 0.75" in shown["html"]


def test_a_file_cut_anywhere_while_it_is_open_shows_the_whole_batches_before(
    tmp_path: Path,
) -> None:
    log = begun(tmp_path)
    admitted(log, 0, 1, 2)
    for group in range(3):
        log.finished(row(sample(group), group))
        log.flush()
    path = path_of(tmp_path / FOLDER, "samples", 0, OPEN)
    content = path.read_bytes()
    log.close()
    path_of(tmp_path / FOLDER, "samples", 0).unlink()
    (tmp_path / MARK_FILE).unlink()  # nothing was synced
    seen = []
    for length in [*range(0, len(content), 61), len(content)]:
        for zeros in (0, 8192):  # what power loss may leave of a tail
            path.write_bytes(content[:length] + bytes(zeros if length == len(content) else 0))
            read = read_batches(tmp_path / FOLDER, "samples", 0)
            ids = [one for _, batch in read for one in batch.column("id").to_pylist()]
            assert ids == ["0-0", "1-0", "2-0"][: len(ids)]
            assert len(list(read_entries(tmp_path))) == len(ids)
            seen.append(len(ids))
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 3}


def test_a_resume_forgets_what_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    before, kept, lost = sample(0), sample(1), sample(2)
    log = begun(tmp_path)
    for one in (before, kept):
        log.finished(row(one, 0))
    train_on(log, [row(before)], 1)
    position = log.position
    log.finished(row(lost, 2))
    train_on(log, [row(kept)], 2)
    log.dropped(row(lost), 2, "equal")
    log.flush()  # and then the process is killed

    resumed = begun(tmp_path, position)
    again = sample(2)
    resumed.finished(row(again, 2))
    train_on(resumed, [row(again)], 2)
    train_on(resumed, [row(kept)], 3)
    resumed.close()
    assert states(tmp_path) == {
        key(before): ("trained", (1,), None),
        key(kept): ("trained", (3,), None),
        key(lost): ("repeated", (), None),
        key(again): ("trained", (2,), None),
    }


def test_a_resume_replaces_only_files_that_it_changes(tmp_path: Path) -> None:
    early, late = sample(0), sample(1)
    positions = []
    for step, one in enumerate((early, late), start=1):
        log = begun(tmp_path, positions[-1] if positions else 0)
        log.finished(row(one, step - 1))
        train_on(log, [row(one)], step)
        log.close()
        positions.append(log.position)

    def files() -> list[int]:
        # A replaced file is another inode.
        return [path.stat().st_ino for path in sorted((tmp_path / FOLDER).glob("outcomes-*"))]

    before = files()
    begun(tmp_path, positions[1]).close()
    assert files() == before
    begun(tmp_path, positions[0]).close()
    assert files()[0] == before[0]
    assert files()[1] != before[1]
    assert states(tmp_path) == {key(early): ("trained", (1,), None), key(late): ("lost", (), None)}


def test_a_page_shows_lost_samples_as_lost_although_old_segments_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = begun(tmp_path)
    admitted(log, 2, 5)
    for group in (1, 3, 5):
        log.finished(row(sample(group), group))
    log.close()
    outcomes = sample_browser.Outcomes
    monkeypatch.setattr(
        sample_browser, "Outcomes", lambda **given: outcomes(**given | {"whole": False})
    )
    browser = SampleBrowser(tmp_path)
    shown = {one.id: one.state for one in browser._entries(browser._samples())}
    # The row of group 1 may be in a removed segment; that of group 3 would be newer than 2's.
    assert shown == {"1-0": "waiting", "3-0": "lost", "5-0": "waiting"}


def test_a_resume_without_a_checkpoint_forgets_every_outcome(tmp_path: Path) -> None:
    one = sample(0)
    log = begun(tmp_path)
    log.finished(row(one, 0))
    train_on(log, [row(one)], 1)
    log.close()
    begun(tmp_path, 0).close()
    assert states(tmp_path) == {key(one): ("lost", (), None)}, "nothing has admitted its group"


def test_a_resume_keeps_a_damaged_file_as_it_is_and_names_it(tmp_path: Path) -> None:
    """Outcomes of repeated steps must go from the others."""
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    train_on(log, [row(sample(0))], 1)
    log.close()
    broken = path_of(tmp_path / FOLDER, "outcomes", 0)
    log = begun(tmp_path, log.position)
    one = sample(1)
    log.finished(row(one, 1))
    train_on(log, [row(one)], 1)
    log.close()
    for damaged in (bytes(100), flipped(broken.read_bytes(), 300), broken.read_bytes()[:-1]):
        broken.write_bytes(damaged)
        begun(tmp_path, 0).close()
        assert broken.read_bytes() == damaged
        assert f"{broken} is damaged" in events(tmp_path)[-1]
    left = [b.num_rows for _, b in read_batches(tmp_path / FOLDER, "outcomes", 1)]
    assert left in ([], [0])


def test_a_resume_notes_a_flipped_bit_in_the_newest_samples(tmp_path: Path) -> None:
    for group in range(2):
        log = begun(tmp_path, group)
        admitted(log, group)
        log.finished(row(sample(group), group))
        log.close()
    path = path_of(tmp_path / FOLDER, "samples", 1)
    damaged = flipped(path.read_bytes(), 900)
    path.write_bytes(damaged)
    begun(tmp_path, 2).close()
    assert path.read_bytes() == damaged
    assert f"{path} is damaged" in events(tmp_path)[-1]


def test_a_resume_cuts_the_torn_tail_off_and_closes_the_file(tmp_path: Path) -> None:
    log = begun(tmp_path)
    admitted(log, 0, 1)
    log.finished(row(sample(0), 0))
    log.flush()
    whole = path_of(tmp_path / FOLDER, "samples", 0, OPEN).read_bytes()
    mark = (tmp_path / MARK_FILE).read_bytes()
    log.finished(row(sample(1), 1))
    log.flush()
    path = path_of(tmp_path / FOLDER, "samples", 0, OPEN)
    killed = path.read_bytes()[:-1]
    log.close()
    path_of(tmp_path / FOLDER, "samples", 0).unlink()
    path.write_bytes(killed)
    (tmp_path / MARK_FILE).write_bytes(mark)
    begun(tmp_path, log.position).close()
    closed = path_of(tmp_path / FOLDER, "samples", 0).read_bytes()
    assert not path.exists()
    assert closed[: len(whole)] == whole
    assert len(closed) == len(whole) + HEADER_BYTES, "the end mark"
    assert [entry.id for entry in read_entries(tmp_path)] == ["0-0"]


def test_what_a_checkpoint_counts_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    log = begun(tmp_path)
    admitted(log, 0)
    log.finished(row(sample(0), 0))
    log.flush()
    names = [name for name in synced if not name.startswith(MARK_FILE)]
    rows = ["samples-000000.open", "outcomes-000000.open"]
    assert names == [FOLDER, *rows, tmp_path.name], "names, then rows, then the mark"
    assert synced.index(rows[1]) < len(synced) - 2 == _place_of_mark(synced)
    synced.clear()
    log.close()
    files = ["samples-000000", "outcomes-000000"]
    closed = [name for one in files for name in (f"{one}.open", FOLDER)]
    assert [*synced[:4], synced[-1]] == [*closed, tmp_path.name]
    assert _place_of_mark(synced) == 4
    assert sorted(path.stem for path in (tmp_path / FOLDER).glob("*.segment")) == sorted(files)


def _place_of_mark(synced: list[str]) -> int:
    (place,) = (at for at, name in enumerate(synced) if name.startswith(MARK_FILE))
    return place


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("closed", [True, False])
def test_a_flipped_bit_or_a_cut_is_damage_or_changes_nothing(tmp_path: Path, closed: bool) -> None:
    """Only the cut tail of an open file is not damage: what is before it is whole."""
    log = begun(tmp_path)
    for group in range(3):
        one = sample(group)
        admitted(log, group)
        log.finished(row(one, group))
        train_on(log, [row(one)], group + 1)
        log.flush()
    folder, ending = tmp_path / FOLDER, CLOSED if closed else OPEN
    opened = {path: path.read_bytes() for path in folder.iterdir()}
    log.close()
    if not closed:
        for path in [*folder.iterdir()]:
            path.unlink()
        for path, content in opened.items():
            path.write_bytes(content)
        (tmp_path / MARK_FILE).unlink()  # nothing was synced
    right = everything(tmp_path)

    for table in ("samples", "outcomes"):
        path = path_of(folder, table, 0, ending)  # type: ignore[arg-type]
        content = path.read_bytes()
        bits = range(0, 8 * len(content), 8 * len(content) // examples(150, 40) + 1)
        for bit in (
            *bits,
            *range(8 * HEADER_BYTES),
            *range(8 * len(content) - 200, 8 * len(content)),
        ):
            path.write_bytes(flipped(content, bit))
            with pytest.raises(SegmentBroken, match="is damaged"):
                everything(tmp_path)
        for length in range(0, len(content), len(content) // examples(50, 20) + 1):
            path.write_bytes(content[:length])
            if closed:
                with pytest.raises(SegmentBroken, match="before its end mark"):
                    everything(tmp_path)
            else:
                assert (
                    everything(tmp_path)[table] == right[table][: len(everything(tmp_path)[table])]
                )
        path.write_bytes(content)
    assert everything(tmp_path) == right


def everything(run_dir: Path) -> dict[str, list[object]]:
    entries = list(read_entries(run_dir))
    loaded = [one.response_ids.tolist() for _, one in load(run_dir, entries)]
    assert len(loaded) == len(entries)
    return {
        table: read_table(run_dir, table).to_pylist()  # type: ignore[arg-type]
        for table in ("samples", "outcomes")
    }


def killed_after(run_dir: Path, synced: int, more: int) -> bytes:
    """A log as a kill leaves it after `synced` batches of a checkpoint and `more` later ones;
    return the content of its samples."""
    log = begun(run_dir)
    for group in range(synced + more):
        log.finished(row(sample(group), group))
        admitted(log, group)
        log.flush()
        if group == synced - 1:
            mark = (run_dir / MARK_FILE).read_bytes()
    kept = {path: path.read_bytes() for path in (run_dir / FOLDER).iterdir()}
    log.close()
    for path, content in kept.items():
        path.with_suffix(CLOSED).unlink()
        path.write_bytes(content)
    (run_dir / MARK_FILE).write_bytes(mark)
    return kept[path_of(run_dir / FOLDER, "samples", 0, OPEN)]


def frames_of(content: bytes) -> list[int]:
    """Start of each frame, and the end of the last one."""
    places = [0]
    while places[-1] < len(content):
        length = int.from_bytes(content[places[-1] + 8 : places[-1] + 16], "little")
        places.append(places[-1] + HEADER_BYTES + length)
    return places


def test_zeros_at_the_end_of_an_open_file_are_a_torn_tail_and_elsewhere_damage(
    tmp_path: Path,
) -> None:
    content = killed_after(tmp_path, 1, 2)
    path = path_of(tmp_path / FOLDER, "samples", 0, OPEN)
    starts = frames_of(content)
    assert len(starts) == 4
    # From anywhere within what was not synced, also from within a header, and in two frames at
    # once.
    for start in (
        *range(starts[1], starts[1] + HEADER_BYTES),
        *range(starts[1], starts[3] - 8, 37),
    ):
        path.write_bytes(content[:start] + bytes(len(content) - start))
        whole = sum(end <= start for end in starts[1:])
        assert len(list(read_entries(tmp_path))) == whole, start
    for start in (starts[1], starts[1] + 11, starts[1] + HEADER_BYTES, starts[1] + 100):
        path.write_bytes(content[:start] + bytes(starts[2] - start) + content[starts[2] :])
        with pytest.raises(SegmentBroken, match="is damaged"):
            list(read_entries(tmp_path))
    for start in (0, 11, 100, starts[1] - 9):  # a checkpoint counts it
        path.write_bytes(content[:start] + bytes(len(content) - start))
        with pytest.raises(SegmentBroken, match="it ends after 0 batches and had 1"):
            list(read_entries(tmp_path))
    path.write_bytes(content[: starts[1] + 50] + bytes(len(content) - starts[1] - 50))
    begun(tmp_path, 3).close()
    closed = path_of(tmp_path / FOLDER, "samples", 0).read_bytes()
    assert (closed[: starts[1]], len(closed)) == (content[: starts[1]], starts[1] + HEADER_BYTES)
    assert [one.id for one in read_entries(tmp_path)] == ["0-0"]


@pytest.mark.parametrize("table", ["samples", "outcomes"])
def test_a_closed_file_that_is_renamed_open_and_cut_is_damaged(
    tmp_path: Path, table: TableName
) -> None:
    segments_of_one_group(tmp_path, 2)
    closed = path_of(tmp_path / FOLDER, table, 1)
    opened = path_of(tmp_path / FOLDER, table, 1, OPEN)
    content = closed.read_bytes()
    everything(tmp_path)
    closed.rename(opened)
    everything(tmp_path)  # all of it is there
    for length in (len(content) - 1, len(content) - HEADER_BYTES, 100, 0):
        opened.write_bytes(content[:length])
        for read in (lambda: read_table(tmp_path, table), lambda: list(read_entries(tmp_path))):
            with pytest.raises(SegmentBroken, match=f"{opened.name}.*is damaged"):
                read()
        with pytest.raises(UserError, match=f"{opened.name}\n  is damaged"):
            SampleBrowser(tmp_path).answer({})
    opened.write_bytes(content[:100])
    begun(tmp_path, 6).close()
    assert opened.read_bytes() == content[:100], "it is not closed as if it were whole"
    assert f"{opened} is damaged: it ends after 0 batches and had 1" in events(tmp_path)[0]


def test_a_log_that_ends_before_its_mark_is_noticed_without_a_checkpoint(tmp_path: Path) -> None:
    segments_of_one_group(tmp_path, 3)
    assert lost_end(tmp_path) is None
    assert choose(tmp_path, SampleQuery()).lost is None
    mark = read_mark(tmp_path)
    assert mark == LogMark(segment=2, closed=True, samples=1, outcomes=1)
    for path in (tmp_path / FOLDER).glob("*2.segment"):
        path.unlink()
    said = f"{tmp_path / FOLDER} ends with segment 1, and the log had segments up to number 2"
    assert lost_end(tmp_path) == said
    assert choose(tmp_path, SampleQuery()).lost == said, "and the rest is shown"
    assert said in samples_section(tmp_path)
    assert said in SampleBrowser(tmp_path).answer({})["message"]
    for path in (tmp_path / FOLDER).iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"is missing or empty, and the log had segments up to"):
        choose(tmp_path, SampleQuery())
    segments_of_one_group(tmp_path, 1)
    assert lost_end(tmp_path) is None, "the mark is that of what was written last"
    content = (tmp_path / MARK_FILE).read_bytes()
    for damaged in (b"", b"[]", content.replace(b"1", b"0"), content[:-3]):
        (tmp_path / MARK_FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{MARK_FILE}\n  is damaged"):
            choose(tmp_path, SampleQuery())
    (tmp_path / MARK_FILE).write_bytes(content)
    choose(tmp_path, SampleQuery())


def test_every_reader_reports_damage_by_the_name_of_the_file(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    log.close()
    path = path_of(tmp_path / FOLDER, "samples", 0)
    path.write_bytes(flipped(path.read_bytes(), 4000))
    for read in (
        lambda: choose(tmp_path, SampleQuery()),
        lambda: choose(tmp_path, SampleQuery(best=1)),
        lambda: newest_trained(tmp_path),
        lambda: SampleBrowser(tmp_path).answer({}),
        lambda: _read_samples(tmp_path),
    ):
        with pytest.raises(UserError, match=r"samples-000000.segment\n  is damaged: batch 0"):
            read()
    assert f"{path} is damaged" in samples_section(tmp_path)


def test_a_sample_is_dropped_if_an_older_segment_has_the_drop_of_its_group(tmp_path: Path) -> None:
    """A checkpoint is saved between the drop of a group and its last response, whose own row a
    resume removes."""
    log, late = begun(tmp_path), sample(0)
    admitted(log, 0)
    log.group_dropped(0, 1, "late")
    log.close()
    again = begun(tmp_path, log.position)
    again.finished(row(late, 0))
    again.dropped(row(late, 0), 1, "late")
    again.close()
    begun(tmp_path, log.position).close()
    assert states(tmp_path) == {key(late): ("dropped", (1,), "late")}
    assert account(tmp_path).dropped == {0: "late"}


def segments_of_one_group(run_dir: Path, count: int) -> int:
    """Write segments of one trained sample each; return the position."""
    at = 0
    for group in range(count):
        log, one = begun(run_dir, at), sample(group)
        admitted(log, group)
        log.finished(row(one, group))
        train_on(log, [row(one)], group + 1)
        log.close()
        at = log.position
    return at


@pytest.mark.parametrize(
    ("table", "segment"),
    [("samples", 1), ("samples", 2), ("outcomes", 0), ("outcomes", 1), ("outcomes", 2)],
)
def test_every_reader_and_a_resume_report_a_missing_file(
    tmp_path: Path, table: TableName, segment: int
) -> None:
    at = segments_of_one_group(tmp_path, 3)
    path = path_of(tmp_path / FOLDER, table, segment)
    browser = SampleBrowser(tmp_path)
    browser.answer({})
    path.unlink()
    for read in (
        lambda: choose(tmp_path, SampleQuery()),
        lambda: newest_trained(tmp_path),
        lambda: SampleBrowser(tmp_path).answer({}),
        lambda: browser.answer({}),
        lambda: _read_samples(tmp_path),
    ):
        with pytest.raises(UserError, match=f"{path.name}\n  is missing"):
            read()
    assert f"{path} is missing" in samples_section(tmp_path)
    for raw in (lambda: list(read_entries(tmp_path)), lambda: read_table(tmp_path, table)):
        with pytest.raises(SegmentBroken, match="is missing"):
            raw()

    begun(tmp_path, at).close()
    noted = events(tmp_path)
    assert f"{path} is missing" in noted[0]
    lacks = [f"lacks outcomes {3 * segment} to {3 * segment + 2}," in one for one in noted[1:]]
    assert lacks == ([True] if table == "outcomes" else [])


@pytest.mark.parametrize("segment", [1, 2])
def test_a_resume_notes_outcomes_that_its_checkpoint_counts_and_the_log_lacks(
    tmp_path: Path, segment: int
) -> None:
    at = segments_of_one_group(tmp_path, 3)
    begun(tmp_path, at).close()
    assert not (tmp_path / "events.jsonl").exists(), "nothing is missing"
    for path in (tmp_path / FOLDER).glob(f"*{segment}.segment"):
        path.unlink()
    assert len(list(read_entries(tmp_path))) == 2, "the rest can be shown without"
    begun(tmp_path, at).close()
    [text] = events(tmp_path)
    assert f"lacks outcomes {3 * segment} to {3 * segment + 2}, which the checkpoint" in text


def test_a_kill_between_two_files_of_a_segment_is_not_damage(tmp_path: Path) -> None:
    """Neither as the newest segment is made, nor as the oldest is deleted."""
    at = segments_of_one_group(tmp_path, 2)
    path_of(tmp_path / FOLDER, "samples", 0).unlink()
    made = path_of(tmp_path / FOLDER, "samples", 2, OPEN)
    made.touch()
    for _ in range(2):
        assert [entry.group for entry in read_entries(tmp_path)] == [1]
        assert read_table(tmp_path, "outcomes").num_rows == at
        begun(tmp_path, at).close()
    assert not made.exists()
    assert not (tmp_path / "events.jsonl").exists()


def test_a_segment_without_samples_has_both_files(tmp_path: Path) -> None:
    log = begun(tmp_path)
    admitted(log, 0)
    log.flush()
    opened = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    log.close()
    for path, content in opened.items():  # as a kill leaves it
        path.with_suffix(CLOSED).unlink()
        path.write_bytes(content)
    begun(tmp_path, log.position).close()
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == ["outcomes-000000.segment", "samples-000000.segment"]
    assert read_table(tmp_path, "samples").num_rows == 0


def test_a_log_of_a_version_without_checksums_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / FOLDER / "samples-000000.arrows"
    old.parent.mkdir()
    old.write_bytes(b"old")
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    log.close()
    assert "was written by an earlier version" in events(tmp_path)[0]
    with pytest.raises(
        UserError, match=r"samples-000000.arrows\n  was written by an earlier version"
    ):
        choose(tmp_path, SampleQuery())
    assert old.read_bytes() == b"old"


def test_a_folder_that_is_absent_is_empty_and_another_thing_in_its_place_is_damage(
    tmp_path: Path,
) -> None:
    folder = tmp_path / FOLDER
    assert segments_in(folder) == []
    folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SegmentBroken, match="is a link to a folder that is not there"):
        segments_in(folder)
    folder.unlink()
    folder.write_text("a file")
    with pytest.raises(SegmentBroken, match="cannot be read as a folder: Not a directory"):
        segments_in(folder)


def test_an_evaluation_that_a_crash_repeats_stands_there_once(tmp_path: Path) -> None:
    first, again = (replace(sample(0), id="-1-0") for _ in range(2))
    log = begun(tmp_path)
    log.evaluated([(PROMPT, [row(first, -1)])], 4)
    log.close()
    resumed = begun(tmp_path, log.position)
    resumed.evaluated([(PROMPT, [row(again, -1)])], 4)
    resumed.close()
    assert states(tmp_path) == {
        key(first): ("repeated", (), None),
        key(again): ("evaluated", (4,), None),
    }


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
def test_through_a_crash_each_step_has_what_its_trainer_got(tmp_path: Path, ratio: float) -> None:
    """A controller trains three steps, is saved after the first, and dies; the next continues."""

    def one() -> FakeEngine:
        engine = FakeEngine()

        def altered(sample: Sample) -> Sample:
            now = float(next(CLOCK))
            return replace(sample, finished_at=now, reward=now)

        engine.alter = altered
        return engine

    groups: dict[int, list[TrainedGroup]] = {}

    async def begun(version: int, saved: DataState | None) -> Controller:
        controller = controller_of([one()], flow(3, ratio))
        controller._sample_log = writer()
        await controller.start(saved)
        await stage(controller, version)
        return controller

    async def body() -> None:
        controller = await begun(0, None)
        groups[1] = await train(controller, 0, 1)
        saved = await position(controller)
        saved = replace(saved, state=json.loads(json.dumps(saved.state)))
        await train(controller, 1, 3)
        await controller.close()

        resumed = await begun(1, saved)
        for version in (1, 2):
            groups[version + 1] = await train(resumed, version, version + 1)
        await resumed.close()

    def writer() -> SampleLog:
        return open_sample_log(tmp_path, SamplesConfig())

    run(body)
    expected = {
        (s.id, s.reward): step for step, got in groups.items() for g in got for s in g.samples
    }
    logged = {
        (entry.id, entry.reward): entry.steps
        for entry in read_entries(tmp_path)
        if entry.state == "trained"
    }
    assert logged == {one: (step,) for one, step in expected.items()}
    if ratio <= 1:  # else the checkpoint's buffer has all that the two steps need
        assert any(entry.state == "repeated" for entry in read_entries(tmp_path))


@pytest.mark.parametrize("experts", [True, False])
def test_the_batch_of_a_step_is_in_the_log_to_the_last_bit(tmp_path: Path, experts: bool) -> None:
    """Except for the experts, which the log keeps only on request."""

    def altered(sample: Sample) -> Sample:
        bits = np.random.default_rng([sample.prompt.token_ids[0], len(sample.id)])
        length = sample.length
        return replace(
            sample,
            finished_at=float(next(CLOCK)),
            behavior_logprobs=-bits.random(length, dtype=np.float32),
            reward=float(bits.random()),
            reward_parts={"right": float(bits.random())},
            routed_experts=bits.bytes(6 * (sample.total_length - 1)),
        )

    async def body() -> None:
        engine = FakeEngine(lambda request: 0.001 * (request.k + request.group % 3))
        engine.alter = altered
        controller = controller_of([engine], flow(3, 1.0))
        controller._sample_log = open_sample_log(tmp_path, SamplesConfig(experts=experts))
        await controller.start()
        await stage(controller, 0)
        for version in range(2):
            handout = await controller.next_batch(version)
            assert handout is not None
            handed[version + 1] = handout.batch.samples
            await stage(controller, version + 1)
        await controller.close()

    handed: dict[int, pa.RecordBatch] = {}
    run(body)
    for step, batch in handed.items():
        again = batch_of_step(tmp_path, step, batch.column("group").to_pylist())
        assert (again == batch) == experts
        place = batch.schema.get_field_index("routed_experts")
        assert again.remove_column(place) == batch.remove_column(place)


def batch_of_step(run_dir: Path, step: int, groups: list[int]) -> pa.RecordBatch:
    """Batch of a step, reconstructed as docs/samples.md describes."""
    outcomes = read_table(run_dir, "outcomes").sort_by("seq").to_pylist()
    trained = [o for o in outcomes if (o["outcome"], o["step"]) == ("trained", step)]
    keys = [(o["id"], o["finished_at"]) for o in trained]
    every = [e for e in read_entries(run_dir) if (e.id, e.finished_at) in keys]
    found = {(e.id, e.finished_at): sample for e, sample in load(run_dir, every)}
    return batch_of([found[one] for one in keys], groups, NUMERIC)


def test_what_the_scheduler_drops_is_logged_with_its_reason(tmp_path: Path) -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = lambda request: float(request.k if request.group % 2 else 0)
        controller = controller_of([engine], flow(2, 0.0, dynamic_sampling=True))
        controller._sample_log = open_sample_log(tmp_path, SamplesConfig())
        await controller.start()
        await stage(controller, 0)
        await train(controller, 0, 3)
        dropped.append(controller.stats()["dropped_equal"])
        await controller.close()

    dropped: list[int] = []
    run(body)
    logged = [entry for entry in read_entries(tmp_path) if entry.state == "dropped"]
    assert {entry.reason for entry in logged} == {"equal"}
    assert len(logged) == 2 * dropped[0] > 0


# Room


def test_the_oldest_segments_make_room_and_the_rest_keeps_its_outcomes(tmp_path: Path) -> None:
    log = begun(tmp_path, keep_mib=3, segment_mib=1)
    for group in range(24):
        one = sample(group, length=40_000)
        log.finished(row(one, group))
        train_on(log, [row(one)], group + 1)
        log.flush()
        sizes = [path.stat().st_size for path in (tmp_path / FOLDER).iterdir()]
        assert sum(sizes) <= 4 * 2**20, "the limit, and the batch that crossed a segment's"
    log.close()
    entries = list(read_entries(tmp_path))
    assert segments_in(tmp_path / FOLDER)[0] > 0
    assert [entry.group for entry in entries] == list(range(23, 23 - len(entries), -1))
    assert all(entry.steps == (entry.group + 1,) for entry in entries)


def test_a_segment_above_half_of_the_room_is_refused() -> None:
    with pytest.raises(ValidationError, match="segment_mib to 50 or less"):
        SamplesConfig(keep_mib=100)
    assert SamplesConfig(keep_mib=0).keep_mib == 0


def test_without_room_nothing_is_written_and_the_position_is_carried_on(tmp_path: Path) -> None:
    log = open_sample_log(tmp_path, SamplesConfig(keep_mib=0))
    log.begin(12)
    log.finished(row(sample(0), 0))
    train_on(log, [row(sample(0))], 1)
    log.flush()
    log.close()
    assert log.position == 12
    assert list(tmp_path.iterdir()) == []


# What goes wrong


def test_a_log_that_cannot_be_written_is_noted_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    monkeypatch.setattr(sample_log, "RETRY_S", 0.0)
    log = begun(tmp_path)
    for group in range(3):
        log.finished(row(sample(group), group))
        log.flush()
    assert len(events(tmp_path)) == 1
    assert "cannot be written" in events(tmp_path)[0]

    (tmp_path / FOLDER).unlink()
    log.finished(row(sample(3), 3))
    log.close()
    assert [entry.group for entry in read_entries(tmp_path)] == [3]
    assert "3 rows of it are missing" in events(tmp_path)[1]


def test_rows_that_are_lost_until_the_end_are_noted_even_if_no_row_follows(tmp_path: Path) -> None:
    blocked = tmp_path / FOLDER, tmp_path / "events.jsonl"
    blocked[0].touch()
    blocked[1].mkdir()  # as on a full disk, the events cannot be written either
    log = begun(tmp_path)
    for group in range(3):
        log.finished(row(sample(group), group))
        log.flush()
    blocked[0].unlink()
    blocked[1].rmdir()
    log.close()
    assert events(tmp_path) == [f"the sample log ({tmp_path / FOLDER}) ends without 3 rows"]


def test_the_end_of_a_run_writes_rows_that_would_have_waited_for_the_next_attempt(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).touch()
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    log.flush()
    (tmp_path / FOLDER).unlink()
    log.finished(row(sample(1), 1))
    log.close()
    assert [entry.group for entry in read_entries(tmp_path)] == [1]
    assert "1 rows of it are missing" in events(tmp_path)[1]


def test_rows_lost_between_two_attempts_are_counted(tmp_path: Path) -> None:
    (tmp_path / FOLDER).touch()
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    log.flush()
    log.finished(row(sample(1), 1))
    admitted(log, 1, 2)
    log.flush()
    log.close()
    assert events(tmp_path)[-1].endswith("ends without 4 rows")


def test_a_mark_that_cannot_be_written_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "RETRY_S", 0.0)
    write, fails = sample_log.write_file, True

    def write_file(path: Path, content: str) -> None:
        if fails:
            raise OSError("no space")
        write(path, content)

    monkeypatch.setattr(sample_log, "write_file", write_file)
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    log.flush()
    noted = [
        f"the sample log ({tmp_path / FOLDER}) cannot be written: no space; the run continues"
        " without it, and tries again every 0 s"
    ]
    assert (log.mark, events(tmp_path)) == (None, noted)
    fails = False
    log.finished(row(sample(1), 1))
    log.flush()
    assert log.mark == LogMark(segment=1, closed=False, samples=1, outcomes=0)
    fails = True
    log.close()
    assert [(entry.segment, entry.group) for entry in read_entries(tmp_path)] == [(1, 1), (0, 0)]
    assert not list((tmp_path / FOLDER).glob(f"*{OPEN}"))
    assert events(tmp_path) == noted * 2


def test_a_resume_closes_the_files_of_a_killed_run_before_it_writes(tmp_path: Path) -> None:
    killed = begun(tmp_path / "killed")
    killed.finished(row(sample(0), 0))
    killed.flush()
    shutil.copytree(tmp_path / "killed", tmp_path / "run")
    killed.close()
    begun(tmp_path / "run").close()
    files = sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir())
    assert files == ["outcomes-000000.segment", "samples-000000.segment"]


def test_a_full_disk_keeps_whole_spans_and_the_process_continues(tmp_path: Path) -> None:
    process = FORKS.Process(target=write_to_a_full_disk, args=(tmp_path,))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    groups = [entry.group for entry in read_entries(tmp_path)]
    assert groups == list(range(len(groups) - 1, -1, -1))
    assert 0 < len(groups) < 8
    noted = events(tmp_path)
    assert len(noted) == 2
    assert noted[1].endswith(f"ends without {8 - len(groups)} rows")


def write_to_a_full_disk(folder: Path) -> None:
    """A limit on the size of a file stands for the disk: the kernel refuses the write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    log = begun(folder)
    for group in range(8):
        log.finished(row(sample(group, length=5_000), group))
        log.flush()
    log.close()


def test_a_disk_that_hangs_costs_rows_and_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "QUEUED", 10)
    hanging, go_on = threading.Event(), threading.Event()
    write: Callable[..., None] = sample_log.OpenSegment.write

    def hang(*arguments: object) -> None:
        hanging.set()
        assert go_on.wait(600)
        write(*arguments)

    monkeypatch.setattr(sample_log.OpenSegment, "write", hang)
    log = begun(tmp_path)
    log.finished(row(sample(0), 0))
    assert hanging.wait(600)
    for group in range(1, 100):
        log.finished(row(sample(group), group))
    go_on.set()
    log.close()
    assert len(list(read_entries(tmp_path))) == 11
    assert "89 rows of it are missing" in events(tmp_path)[0]


def events(run_dir: Path) -> list[str]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]

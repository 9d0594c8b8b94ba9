"""Files of checksummed frames (samples/frames.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.samples import Prompt, segments
from megatron_async_rl.samples.columns import SCHEMA
from megatron_async_rl.samples.frames import (
    CLOSED,
    HEADER_BYTES,
    MARK_FILE,
    FrameWriter,
    LogMark,
    SegmentBroken,
    count_frames,
    read_frames,
    read_mark,
)
from megatron_async_rl.samples.segments import OpenSegment, size_of
from tests.train_batches import make_sample, row

PAYLOADS = [b"first", b"", b"third " * 100]


def written(path: Path, count: int) -> FrameWriter:
    writer = FrameWriter(path)
    for payload in PAYLOADS[:count]:
        writer.write(payload)
    return writer


def test_frames_are_counted_and_read_as_they_were_written(tmp_path: Path) -> None:
    for count in range(len(PAYLOADS) + 1):
        path = tmp_path / f"{count}.open"
        writer = written(path, count)
        assert count_frames(writer.path) == count
        assert list(read_frames(writer.path, torn=True)) == list(enumerate(PAYLOADS[:count]))
        writer.close()
        (closed,) = tmp_path.glob(f"{count}.*")
        assert count_frames(closed) == count
        assert list(read_frames(closed)) == list(enumerate(PAYLOADS[:count]))


def test_a_torn_tail_does_not_count(tmp_path: Path) -> None:
    writer = written(tmp_path / "a.open", 3)
    whole = writer.path.read_bytes()
    for cut in (1, len(PAYLOADS[2]), len(PAYLOADS[2]) + HEADER_BYTES - 1):
        writer.path.write_bytes(whole[:-cut])
        assert [number for number, _ in read_frames(writer.path, torn=True)] == [0, 1]
        with pytest.raises(SegmentBroken, match="ends after 2 batches and had 3"):
            list(read_frames(writer.path, torn=True, minimum=3))


def test_an_abandoned_file_keeps_its_whole_frames(tmp_path: Path) -> None:
    writer = written(tmp_path / "a.open", 2)
    assert (writer.frames, writer.size) == (2, writer.path.stat().st_size)
    with writer.path.open("ab") as file:
        file.write(b"a part of a frame")
    writer.abandon()
    (closed,) = tmp_path.iterdir()
    assert closed.suffix == CLOSED
    assert list(read_frames(closed)) == list(enumerate(PAYLOADS[:2]))
    writer.abandon()  # without effect: it is closed
    assert [*tmp_path.iterdir()] == [closed]


def test_a_file_without_rows_is_removed(tmp_path: Path) -> None:
    writer = written(tmp_path / "a.open", 0)
    writer.remove()
    assert [*tmp_path.iterdir()] == []
    assert writer._file.closed
    written(tmp_path / "b.open", 0).close(tmp_path / "c")
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_exchanged_repeated_and_added_frames_are_damage(tmp_path: Path) -> None:
    writer = written(tmp_path / "a.open", 2)
    whole = writer.path.read_bytes()
    first = HEADER_BYTES + len(PAYLOADS[0])
    writer.close(tmp_path / "closed")
    closed = (tmp_path / "closed").read_bytes()
    path = tmp_path / "damaged"
    for content, what in (
        (whole[first:] + whole[:first], "is damaged: frame 0 at byte 0 is another one"),
        (whole[:first] * 2, f"is damaged: frame 1 at byte {first} is another one"),
        (closed + b"\0", "is damaged: it continues after its end mark"),
        (whole, "is damaged: it ends before its end mark"),
        (closed[:-1], "is damaged: it ends before its end mark"),
        (b"x" + closed[1:], "is damaged: the header at byte 0 is not valid"),
    ):
        path.write_bytes(content)
        with pytest.raises(SegmentBroken) as broken:
            list(read_frames(path))
        assert what in str(broken.value)


def test_a_mark_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    mark = LogMark(segment=2, closed=True, samples=3, outcomes=4)
    path = tmp_path / MARK_FILE
    assert read_mark(tmp_path) is None
    path.write_text(mark.text())
    assert read_mark(tmp_path) == mark
    assert [mark.batches(one) for one in ("samples", "outcomes")] == [3, 4]  # type: ignore[arg-type]
    fields = json.loads(mark.text())
    for text, what in (
        (json.dumps(fields | {"samples": 4}), "is damaged: its checksum does not match"),
        (json.dumps(fields | {"closed": 1}), "is damaged: a mark has other fields than segment,"),
        (json.dumps(mark.as_json()), "is damaged: 'checksum'"),
        ("[]", "is damaged: 'str' object cannot"),
        ("{", "is damaged: Expecting property name"),
        (None, "cannot be read: Is a directory"),
    ):
        if text is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_text(text)
        with pytest.raises(SegmentBroken) as broken:
            read_mark(tmp_path)
        assert what in str(broken.value)
        assert "restore it from a copy, or remove it" in broken.value.fix


def test_a_segment_has_both_of_its_files_or_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = OpenSegment(tmp_path, 4, SCHEMA)
    outcomes: list[Any] = [(1, 0, "0-0", 0.5, "trained", 2, None, None)]
    sample = row(make_sample(Prompt(id="p", text="", token_ids=(1,)), "0-0", [5, 6]), 0)
    segment.write([sample], outcomes)
    segment.write([], outcomes)
    segment.sync()
    names = sorted(one.name for one in tmp_path.iterdir())
    assert len(names) == 2
    assert segment.size == sum(one.stat().st_size for one in tmp_path.iterdir())
    expected = LogMark(segment=4, closed=False, samples=1, outcomes=2)
    assert (segment.mark(closed=False), segment.mark(closed=True).closed) == (expected, True)
    segment.abandon()
    assert sorted(one.suffix for one in tmp_path.iterdir()) == [CLOSED, CLOSED]
    assert size_of(tmp_path, 4) == sum(one.stat().st_size for one in tmp_path.iterdir())
    assert size_of(tmp_path, 5) == 0
    segment = OpenSegment(tmp_path, 5, SCHEMA)
    segment.close()
    assert {one.suffix for one in tmp_path.iterdir()} == {CLOSED}

    def full(folder: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(segments, "sync_folder", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="no space"):
        OpenSegment(tmp_path, 6, SCHEMA)
    assert sorted(tmp_path.iterdir()) == before

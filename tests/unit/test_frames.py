"""Files of checksummed frames (samples/frames.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.samples.frames import (
    HEADER_BYTES,
    FrameWriter,
    SegmentBroken,
    count_frames,
    read_frames,
)

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

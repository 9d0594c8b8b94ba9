"""Files of JSON lines: read while they grow, read from the end, and cut.

Invariants:
- a reader reads a line once, only when it is whole, and in blocks: no reader holds the lines of a
  long run. When the file is replaced or cut (by a resume), reading starts over and reports it;
- what is cut off the end of a file is kept in another one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron_async_rl.config.durable import unreadable
from megatron_async_rl.config.problem import UserError

BLOCK_BYTES = 2**22
LONGEST_LINE = 2**26
"""Largest line in bytes, above the size of any evaluation."""
CHECKED_BYTES = 4096


def cut_lines(path: Path, aside: Path, keeps: Callable[[dict[str, Any]], bool]) -> int:
    """Move the end of a file of JSON objects, all lines after the last that `keeps` accepts, to the
    end of `aside`; return their number.

    A crash in between loses no line; it may leave lines in both files.
    """
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        whole = True
        for start, line in lines_backwards(file):
            # The last line to keep: everything after it goes.
            if is_kept(line, keeps):
                whole = line.endswith(b"\n")
                break
            end = start
        count = 0
        if end < size:
            file.seek(end)
            # Copied and synced before the original is shortened, so that a crash loses nothing.
            with open(aside, "a", encoding="utf-8") as cut:
                for line in file:
                    cut.write(_as_object(line) + "\n")
                    count += 1
                cut.flush()
                os.fsync(cut.fileno())
            # Only now: until here, the original has all of its lines.
            file.truncate(end)
        # The next line would continue a half-written one.
        if not whole:
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return count


def is_kept(line: bytes, keeps: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        # A damaged line is not kept: the last good line before it decides where the file is cut.
        return keeps(json.loads(line))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _as_object(line: bytes) -> str:
    text = line.rstrip(b"\r\n").decode("utf-8", errors="replace")
    try:
        # The other file stays readable as JSON lines, so a damaged line is wrapped.
        whole = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        whole = False
    return text if whole else json.dumps({"unreadable": text})


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each line of a file, from the last to the first."""
    # `tail`: the beginning of a line whose end is in the block before it.
    start, tail = file.seek(0, os.SEEK_END), b""
    while start > 0:
        step = min(BLOCK_BYTES, start)
        start = file.seek(start - step)
        block = file.read(step) + tail
        end = len(block)
        while (at := block.rfind(b"\n", 0, end - 1)) >= 0:
            yield start + at + 1, block[at + 1 : end]
            end = at + 1
        tail = block[:end]
    if tail:
        yield 0, tail


class GrowingFile:
    """A file of lines that another process appends to; each is read once, when it is whole.

    `newest`: begin this many bytes before the end, for a file whose older lines are not needed.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path = path
        self.line = 0
        """Number of lines read so far."""
        self.whole = True
        """Reading began with the first line."""
        self._newest = newest
        self._inode = -1
        self._offset = 0
        self._last = b""
        """The last bytes before `_offset`: others there show that the file was cut and grew
        again."""

    def new_lines(self, limit: int | None = None) -> tuple[list[bytes], bool]:
        """Return the lines since the last call, and True if the file was replaced or cut, so that
        the lines of earlier calls no longer hold. Without a file there are no lines. `limit`: about
        this many bytes now, and the rest with the next calls. Raises UserError for a file that
        cannot be read and, with a limit, for a line of more than LONGEST_LINE bytes."""
        try:
            with open(self.path, "rb") as file:
                about = os.fstat(file.fileno())
                shorter = about.st_size < self._offset
                # A resume may replace the file with a longer one; size alone would not show it.
                other = about.st_ino != self._inode
                replaced = other or shorter or not self._is_continued(file)
                restarted = replaced and self._offset > 0
                if replaced:
                    self._inode, self._offset, self.line = about.st_ino, 0, 0
                    self._last = b""
                    self.whole = self._newest is None or about.st_size <= self._newest
                    if not self.whole:
                        file.seek(about.st_size - (self._newest or 0))
                        # The seek usually ends inside a line, whose rest is not a line.
                        file.readline()
                        self._offset = file.tell()
                file.seek(self._offset)
                read = file.read(-1 if limit is None else limit)
                # A line may be longer than a block.
                while limit is not None and b"\n" not in read and (more := file.read(limit)):
                    read += more
                    # A damaged file without line breaks must not be read into memory whole.
                    if len(read) > LONGEST_LINE:  # such as zeros of a crash
                        what = f"holds a line of over {LONGEST_LINE >> 20} MiB"
                        raise not_a_line(self.where(self.line + 1), "a file of lines", what)
        except FileNotFoundError:
            restarted, self._offset, self._last = self._offset > 0, 0, b""
            return [], restarted
        except OSError as error:
            raise unreadable(self.path, error) from error

        # What follows the last line break is still being written.
        whole = read[: read.rfind(b"\n") + 1]
        if whole:
            self._offset += len(whole)
            self._last = whole[-CHECKED_BYTES:]
        lines = whole.splitlines()
        self.line += len(lines)
        return lines, restarted

    def blocks(self) -> Iterator[tuple[list[tuple[int, bytes]], bool]]:
        """Yield the numbered lines since the last call in blocks, so that the lines of a long run
        are never in memory together, and True if earlier blocks no longer hold. Raises UserError as
        `new_lines` does."""
        while True:
            lines, restarted = self.new_lines(BLOCK_BYTES)
            if lines or restarted:
                yield list(enumerate(lines, self.line - len(lines) + 1)), restarted
            if not lines:
                return

    def where(self, line: int) -> str:
        """Return file and number of a line; without the number if it is unknown."""
        return f"{self.path}:{line}" if self.whole else f"{self.path}, near its end"

    def _is_continued(self, file: BinaryIO) -> bool:
        # The bytes before the position must be those that were read; otherwise it is another file.
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


def not_a_line(where: str, noun: str, why: object) -> UserError:
    return UserError.of(where, f"is not {noun}: {why}", "remove that line")

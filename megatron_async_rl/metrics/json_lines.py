"""Files of JSON lines: reading while they grow, reading from the end, cutting the end, and the
checksum of a line.

Invariants:
- a reader returns each line once, when it is complete, and in blocks, so that it never holds all
  lines of a long run. If the file is replaced or cut (by a resume), the reader starts from the
  beginning and reports the restart;
- lines that are cut off the end of a file are appended to another file;
- a flipped bit in a line with a checksum is reported, except in the last line break of a file: the
  last line then looks truncated by a crash. Lines of earlier versions have no checksum;
- a line that does not match its checksum stays in its file, where readers report it. Only lines at
  the end that are not JSON, as after a crash, are moved to the other file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError

from megatron_async_rl.config.durable import DIGEST_BYTES, digest, reading, unreadable
from megatron_async_rl.config.problem import UserError

BLOCK_BYTES = 2**22
LONGEST_LINE = 2**26
"""Limit for a line in bytes, above the size of any evaluation."""
CHECKED_BYTES = 4096
"""Number of bytes before the current position that a reader compares to detect another file."""
CHECKSUM = "checksum"
EARLIER_CHECKSUM = "digest"
"""Key of the checksum in lines of starts.jsonl that an earlier version wrote."""
_DIGITS = 2 * DIGEST_BYTES
_LAST = re.compile(rb',\s*"([^"]*)"\s*:\s*"([^"]{%d})"\s*\}\s*$' % _DIGITS)
"""Last key and value of a line, if the value has the length of a checksum."""
_HEXADECIMAL = re.compile(rb"[0-9a-f]+")
_ELSEWHERE = re.compile(rb'[{,]\s*"%s"\s*:' % CHECKSUM.encode())


class ChecksumMismatch(ValueError):
    """A line does not match its checksum."""


def with_checksum(line: str) -> str:
    """Return a line with a checksum as its last value. `line`: a JSON object with at least one
    value, without a line break."""
    return f'{line[:-1]}, "{CHECKSUM}": "{digest(line.encode())}"}}'


def without_checksum(line: bytes) -> bytes:
    """Return the JSON object that `with_checksum` received, or a line without a checksum unchanged;
    the line break is removed. Raises ChecksumMismatch."""
    line = line.rstrip(b"\r\n")
    last = _LAST.search(line, max(0, len(line) - 2 * _DIGITS))
    if last is None:
        # Another program may have sorted the keys.
        if _ELSEWHERE.search(line):
            raise ChecksumMismatch("its checksum is not its last value")
        return line
    key, value = last[1].decode(errors="replace"), last[2]
    named = key in (CHECKSUM, EARLIER_CHECKSUM)
    # One flipped bit changes the key or the value, so the other one still shows the checksum.
    if not named and not _HEXADECIMAL.fullmatch(value):
        return line
    values = line[: last.start()] + b"}"
    if not named or digest(values).encode() != value:
        raise ChecksumMismatch("its values do not match its checksum")
    return values


def cut_lines(path: Path, cut_file: Path, keeps: Callable[[dict[str, Any]], bool]) -> int:
    """Move lines of a file of JSON objects to the end of `cut_file`: all lines after the last line
    that `keeps` accepts. Return the number of moved lines.

    A crash loses no line, but may leave lines in both files.
    """
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        complete = True
        for start, line in lines_backwards(file):
            # This is the last line to keep; all lines after it are moved.
            if is_kept(line, keeps):
                complete = line.endswith(b"\n")
                break
            end = start
        count = 0
        if end < size:
            file.seek(end)
            # Copy and sync before shortening the original, so that a crash loses no line.
            with open(cut_file, "a", encoding="utf-8") as cut:
                for line in file:
                    cut.write(_as_object(line) + "\n")
                    count += 1
                cut.flush()
                os.fsync(cut.fileno())
            # The moved lines are on disk, so the original may be shortened.
            file.truncate(end)
        # End the last line, or the next one would be appended to it.
        if not complete:
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return count


def is_kept(line: bytes, keeps: Callable[[dict[str, Any]], bool]) -> bool:
    """Return `keeps` of the line's JSON object, whatever its checksum; False for a line that is
    not JSON."""
    try:
        return keeps(json.loads(line))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _as_object(line: bytes) -> str:
    """Return a line as a JSON object. A damaged line is wrapped in one, so that the file of cut
    lines stays a file of JSON objects."""
    text = line.rstrip(b"\r\n").decode("utf-8", errors="replace")
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"unreadable": text})


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each line of a file, from the last to the first."""
    # `tail` is the part of a line in the blocks read so far; its beginning is in an earlier block.
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
    """Reader of a file to which another process appends. Each line is returned once, when it is
    complete.

    `newest`: number of bytes before the end at which reading begins; None reads the whole file.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path = path
        self.line = 0
        """Number of lines read so far."""
        self.whole = True
        """True if reading began with the first line, so that line numbers are known."""
        self._newest = newest
        self._inode = -1
        self._offset = 0
        self._last = b""
        """Last bytes before `_offset`. If the file has other bytes there, it was cut and has grown
        again."""

    def new_lines(self, limit: int | None = None) -> tuple[list[bytes], bool]:
        """Return the lines since the last call, and True if the file was replaced or cut, so that
        the lines of earlier calls are no longer valid. A missing file has no lines. `limit`:
        approximate number of bytes to read; later calls return the rest.

        Raises UserError for a file that cannot be read and, with a limit, for a line of more than
        LONGEST_LINE bytes.
        """
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                shorter = status.st_size < self._offset
                # Compare inodes, too: a resume may replace the file with a longer one.
                other = status.st_ino != self._inode
                replaced = other or shorter or not self._is_continued(file)
                restarted = replaced and self._offset > 0
                if replaced:
                    self._inode, self._offset, self.line = status.st_ino, 0, 0
                    self._last = b""
                    self.whole = self._newest is None or status.st_size <= self._newest
                    if not self.whole:
                        file.seek(status.st_size - (self._newest or 0))
                        # The seek usually ends inside a line; skip the rest of that line.
                        file.readline()
                        self._offset = file.tell()
                file.seek(self._offset)
                read = file.read(-1 if limit is None else limit)
                # A line may be longer than a block, so read on until its end.
                while limit is not None and b"\n" not in read and (more := file.read(limit)):
                    read += more
                    # A damaged file without line breaks (a crash may leave zeros) must not be read
                    # into memory as a whole.
                    if len(read) > LONGEST_LINE:
                        what = f"it has a line of more than {LONGEST_LINE >> 20} MiB"
                        raise not_a_line(self.where(self.line + 1), "a file of lines", what)
        except FileNotFoundError:
            restarted, self._offset, self._last = self._offset > 0, 0, b""
            return [], restarted
        except OSError as error:
            raise unreadable(self.path, error) from error

        # The text after the last line break is still being written; a later call returns it.
        complete = read[: read.rfind(b"\n") + 1]
        if complete:
            self._offset += len(complete)
            self._last = complete[-CHECKED_BYTES:]
        lines = complete.splitlines()
        self.line += len(lines)
        return lines, restarted

    def blocks(self) -> Iterator[tuple[list[tuple[int, bytes]], bool]]:
        """Yield blocks of the lines since the last call, so that the lines of a long run are never
        in memory all at once. A block has (line number, line) pairs, and True if earlier blocks are
        no longer valid. Raises UserError as `new_lines` does."""
        while True:
            lines, restarted = self.new_lines(BLOCK_BYTES)
            if lines or restarted:
                yield list(enumerate(lines, self.line - len(lines) + 1)), restarted
            if not lines:
                return

    def where(self, line: int) -> str:
        """Return the path and number of a line for an error message; without the number if it is
        unknown."""
        return f"{self.path}:{line}" if self.whole else f"{self.path}, near its end"

    def _is_continued(self, file: BinaryIO) -> bool:
        # Another file, or a file that was cut and has grown again, has other bytes here.
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


def read_lines[Line: BaseModel](path: Path, kind: type[Line], noun: str) -> Iterator[Line]:
    """Yield the complete lines of a file in order, each as a `kind`; none without the file. Raises
    UserError for a line that is not a `noun`."""
    if not path.exists():
        return
    with reading(path):
        for lines, _ in GrowingFile(path).blocks():
            for place, line in lines:
                yield read_line(line, f"{path}:{place}", kind, noun)


def read_line[Line: BaseModel](line: bytes, where: str, kind: type[Line], noun: str) -> Line:
    """Return a line as a `kind`. where: path and number of the line. Raises UserError for a line
    that is not a `noun`, or that does not match its checksum."""
    try:
        return kind.model_validate_json(without_checksum(line))
    except ValidationError as error:
        fault = error.errors()[0]
        why = f"{'.'.join(map(str, fault['loc']))} {fault['msg']}".strip()
        raise not_a_line(where, noun, why) from error
    except ValueError as error:
        raise not_a_line(where, noun, error) from error


def not_a_line(where: str, noun: str, why: object) -> UserError:
    """Return the error for an invalid line at `where`, which should be a `noun`."""
    fix = "restore the file from a copy, or remove that line"
    if isinstance(why, ChecksumMismatch):
        fix = "restore the file from a copy; if the line was edited on purpose, remove its checksum"
    return UserError.of(where, f"is not {noun}: {why}", fix)


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return (inode, size, modification time) of a file; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns

"""Storage of the sample log: files of checksummed frames, and the mark of the part on disk.

    frame   header (24 bytes, little endian), then the payload
    header  kind      4 bytes   ROWS or END
            number    uint32    index of the frame in the file, from 0
            length    uint64    bytes of the payload
            payload   uint32    CRC-32 of the payload
            header    uint32    CRC-32 of the 20 bytes before
    payload any bytes; an END frame has none

A file that is being written is called `NAME.open`. `close` adds the END frame, calls fsync and
renames it to `NAME.segment`.

Invariants:
- a `.segment` file ends with its END frame: any other end, and any checksum that does not match, is
  damage and raises SegmentBroken;
- an `.open` file may end within its last frame (the process was killed, or is writing it), or in
  zeros from somewhere within it (the machine lost power: the file has its full length, but its last
  blocks were not written). That torn tail was never synced. Everything else is damage, including
  zeros before another frame;
- a header has a separate checksum, so a changed length cannot be mistaken for a torn tail;
- a damaged file is never written again. Only a torn tail is cut off (`finish`);
- a file without rows is closed like any other, so a missing file was deleted.

`RUN/logmark.json` records the part of the log that is certainly on disk. The writer replaces it
when a segment is closed and with every checkpoint, which keeps a copy; a log that ends before its
mark has lost rows.

Invariants of the mark:
- a mark is written after the rows that it counts are synced, so after a kill or a power failure the
  log has at least the rows of its mark;
- the mark is next to `RUN/samples/`, so that the loss of the whole folder is noticed;
- a log without a mark, written by an earlier version, is read without this check.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

OPEN, CLOSED = ".open", ".segment"
ROWS, END = b"ROWS", b"END\n"
_FIELDS = struct.Struct("<4sIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_READ = 2**20
TORN_ZEROS = 8
"""Number of zeros at the end of a file from which on its last frame counts as not written. A frame
ends in fewer: an Arrow stream ends in 4, and a header has a checksum."""

RESTORE = (
    "restore it from a copy, or move both files with its number out of the folder: the rest can be"
    " shown without"
)
FOLDER = "samples"
_NAME = re.compile(rf"(samples|outcomes)-(\d{{6,}})({re.escape(OPEN)}|{re.escape(CLOSED)})")
EARLIER = "*.arrows"
"""Files of versions whose log had no checksums."""

TableName = Literal["samples", "outcomes"]
TABLES: tuple[TableName, TableName] = ("samples", "outcomes")
"""Order in which files are made, written and deleted."""
_FOLDER_FIX = "restore it from a copy, or move it away: the rest of the run can be shown without"


class SegmentBroken(ValueError):
    """A file of the log is damaged, or contains something else. `what` completes a sentence that
    begins with the file's name."""

    def __init__(self, path: Path, what: str, fix: str = RESTORE) -> None:
        super().__init__(path, what, fix)
        self.path = path
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


class FrameWriter:
    """Writer of a new file at `path` (`.open`). Raises OSError if it cannot be created. After an
    error of `write`, call `abandon`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Size of the whole frames in bytes."""
        self._number = 0
        # Unbuffered: bytes that could not be written must not be kept, to fail again later.
        # "x": an existing file belongs to another writer.
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()

    @property
    def frames(self) -> int:
        """Number of whole ROWS frames of a file that is not closed."""
        return self._number

    def write(self, payload: bytes) -> None:
        self._append(ROWS, payload)

    def sync(self) -> None:
        """Wait until everything that was written is on disk."""
        os.fsync(self._file.fileno())

    def close(self, to: Path | None = None) -> None:
        """Mark the end, and rename the file in one step: to `to`, or from `.open` to `.segment`."""
        # The end mark, then fsync, then the name, so that a .segment file is always whole.
        self._append(END, b"")
        self.sync()
        self._file.close()
        _rename(self.path, to or self.path.with_suffix(CLOSED))

    def abandon(self) -> None:
        """Close the file without its last, incomplete frame. Raises OSError if even this is
        impossible; `finish` can do it later."""
        if self._file.closed:
            return
        try:
            # `size` counts whole frames only.
            self._file.truncate(self.size)
            self._file.seek(self.size)
            self.close()
        finally:
            self._file.close()

    def remove(self) -> None:
        """Remove the file, which must have no rows."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _append(self, kind: bytes, payload: bytes) -> None:
        content = memoryview(_header(kind, self._number, payload) + payload)
        while content:
            # An unbuffered write may write only a part, as on a full disk.
            content = content[self._file.write(content) :]
        self._number += 1
        self.size += HEADER_BYTES + len(payload)


def read_frames(
    path: Path, *, torn: bool = False, wanted: Collection[int] | None = None, minimum: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield (number, payload) of the frames, in order, or only of the `wanted` ones. `torn`: the
    file may have a torn tail, after at least `minimum` frames. Raises SegmentBroken,
    FileNotFoundError."""
    count = 0
    with _opened(path) as file:
        for number, length, checksum in _headers(path, file, torn=torn):
            if wanted is not None and number not in wanted:
                file.seek(length, os.SEEK_CUR)
            else:
                payload = file.read(length)
                # The header is whole, but the payload is not.
                if torn and len(payload) < length:
                    break  # the writer has just cut off the tail
                # Zeros up to the end of the file are blocks left unwritten by a power failure.
                if zlib.crc32(payload) != checksum:
                    if torn and _unwritten(payload) and _zeros_to_the_end(file) is not None:
                        break
                    what = f"is damaged: batch {number} does not match its checksum"
                    raise SegmentBroken(path, what)
                yield number, payload
            count = number + 1
    if count < minimum:
        raise SegmentBroken(path, f"is damaged: it ends after {count} batches and had {minimum}")


def count_frames(path: Path) -> int:
    """Return the number of complete frames in a file. Reads only headers. Raises SegmentBroken for
    a damaged file, FileNotFoundError."""
    count = 0
    with _opened(path) as file:
        for number, length, _ in _headers(path, file, torn=True):
            file.seek(length, os.SEEK_CUR)
            count = number + 1
    return count


def finish(path: Path, minimum: int = 0) -> None:
    """Close an `.open` file of another process, after cutting off its torn tail. Raises
    SegmentBroken, and leaves the file unchanged, for damage and for a file with fewer than
    `minimum` frames."""
    whole = count = 0
    for number, payload in read_frames(path, torn=True, minimum=minimum):
        whole += HEADER_BYTES + len(payload)
        count = number + 1
    with open(path, "r+b", buffering=0) as file:
        # Only after every frame before it was read without an error. Only the torn tail is removed.
        file.truncate(whole)
        file.seek(whole)
        file.write(_header(END, count, b""))
        os.fsync(file.fileno())
    _rename(path, path.with_suffix(CLOSED))


def replace_whole(path: Path, payloads: Iterable[bytes]) -> None:
    """Replace a closed file. A crash leaves the old file or the new one."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    writer = FrameWriter(partial)
    for payload in payloads:
        writer.write(payload)
    writer.close(path)


def _rename(path: Path, to: Path) -> None:
    os.replace(path, to)
    sync_folder(to.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _headers(path: Path, file: BinaryIO, *, torn: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (number, length, checksum) of each ROWS frame, with `file` at its payload. The caller
    must leave `file` behind the payload."""
    size = os.fstat(file.fileno()).st_size
    number = 0
    while True:
        start = file.tell()
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            if torn:
                return
            raise SegmentBroken(path, "is damaged: it ends before its end mark")
        kind, found, length, checksum = _FIELDS.unpack_from(header)
        # The header is checked before its length is used.
        if zlib.crc32(header[: _FIELDS.size]) != _CHECKSUM.unpack_from(header, _FIELDS.size)[0]:
            zeros = _zeros_to_the_end(file) if torn else None
            if zeros is not None and _unwritten(header + zeros):
                return
            raise SegmentBroken(path, f"is damaged: the header at byte {start} is not valid")
        # A frame from another position: blocks were exchanged or repeated.
        if found != number or kind not in (ROWS, END):
            raise SegmentBroken(path, f"is damaged: frame {number} at byte {start} is another one")
        if kind == END:
            if file.tell() != size:
                raise SegmentBroken(path, "is damaged: it continues after its end mark")
            return
        # The length is authentic, so the rest is missing.
        if length > size - file.tell():
            if torn:
                return
            raise SegmentBroken(path, "is damaged: it ends before its end mark")
        yield number, length, checksum
        number += 1


def _zeros_to_the_end(file: BinaryIO) -> bytes | None:
    """Return the rest of a file, at most TORN_ZEROS bytes, if it contains only zeros; else None."""
    count = 0
    while block := file.read(_READ):
        if block.strip(b"\0"):
            return None
        count += len(block)
    return bytes(min(count, TORN_ZEROS))


def _unwritten(tail: bytes) -> bool:
    """Return True if the last bytes of a file were not written before the machine lost power."""
    return len(tail) - len(tail.rstrip(b"\0")) >= TORN_ZEROS


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file. Raises SegmentBroken if it cannot be read, and FileNotFoundError."""
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SegmentBroken(path, f"cannot be read: {error.strerror or error}") from error


def _header(kind: bytes, number: int, payload: bytes) -> bytes:
    fields = _FIELDS.pack(kind, number, len(payload), zlib.crc32(payload))
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


MARK_FILE = "logmark.json"
_MARK_FIX = "restore it from a copy, or remove it: the end of the log is then not checked"


@dataclass(frozen=True, kw_only=True)
class LogMark:
    """The newest segment that is on disk, and the minimum number of batches of each of its two
    files. `closed`: both files are closed."""

    segment: int
    closed: bool
    samples: int
    outcomes: int

    def batches(self, table: Literal["samples", "outcomes"]) -> int:
        return self.samples if table == "samples" else self.outcomes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Content of the file."""
        fields = self.as_json()
        return json.dumps({**fields, "checksum": _checksum(fields)}) + "\n"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> LogMark:
        """Read the result of `as_json`. Raises ValueError."""
        kinds = {name: type(value) for name, value in fields.items()}
        # type() and not isinstance, because true is an int in Python.
        if kinds != {"segment": int, "closed": bool, "samples": int, "outcomes": int}:
            raise ValueError(f"a mark has other fields than {', '.join(kinds)}")
        return cls(**fields)


def _checksum(fields: Mapping[str, Any]) -> int:
    # Sorted, because the order of the file's keys must not matter.
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_mark(run_dir: Path) -> LogMark | None:
    """Return the mark of the run's log; None if there is none. Raises SegmentBroken."""
    path = run_dir / MARK_FILE
    try:
        fields = json.loads(path.read_bytes())
        # Popped, since it covers the other fields.
        checksum = fields.pop("checksum")
        mark = LogMark.of(fields)
        if checksum != _checksum(fields):
            raise ValueError("its checksum does not match")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentBroken(path, f"cannot be read: {error.strerror}", _MARK_FIX) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SegmentBroken(path, f"is damaged: {error}", _MARK_FIX) from error
    return mark


def path_of(folder: Path, table: TableName, segment: int, ending: str = CLOSED) -> Path:
    """Return the file of one segment. `folder`: RUN/samples."""
    return folder / f"{table}-{segment:06d}{ending}"


def segments_in(folder: Path) -> list[int]:
    """Return the numbers of the segments in RUN/samples, oldest first; none without the folder.
    Raises SegmentBroken for the files of a version whose log had no checksums, and for a missing
    file."""
    # First: an old log has none of the files below.
    require_checksums(folder)
    numbers = numbers_in(folder)
    # Checked here, since every reader begins here, and many read only the newest segments.
    for number in numbers:
        present_file(folder, "samples", number)
        present_file(folder, "outcomes", number)
    return numbers


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the segments that have a file, oldest first. Raises SegmentBroken for a
    folder that cannot be read."""
    try:
        found = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        # A dangling link means that the log was moved, not that there is none.
        if not folder.is_symlink():
            return []
        raise SegmentBroken(
            folder, "is a link to a folder that is not there", _FOLDER_FIX
        ) from None
    except OSError as error:
        what = f"cannot be read as a folder: {error.strerror or error}"
        raise SegmentBroken(folder, what, _FOLDER_FIX) from error
    return sorted({int(match[2]) for match in found if match})


def lost_end(run_dir: Path, mark: LogMark | None = None) -> str | None:
    """Return a text about the part of the log up to `mark` (default: its own) that is missing; None
    if nothing is missing. Reads headers alone. Raises SegmentBroken."""
    mark, folder = mark or read_mark(run_dir), run_dir / FOLDER
    if mark is None:
        return None
    numbers = numbers_in(folder)
    if not numbers or numbers[-1] < mark.segment:
        last = f"ends with segment {numbers[-1]}" if numbers else "is missing or empty"
        return f"{folder} {last}, and the log had segments up to number {mark.segment}"
    # Headers only: a log may have gigabytes.
    for table in TABLES:
        path = present_file(folder, table, mark.segment)
        # Only segments before the newest are deleted.
        if path is None and mark.segment == numbers[-1] and mark.batches(table):
            missing = path_of(folder, table, mark.segment)
            return f"{missing} is missing, and had {mark.batches(table)} batches"
        if path is not None and (held := count_frames(path)) < mark.batches(table):
            return f"{path} ends after {held} batches and had {mark.batches(table)}"
    return None


def require_checksums(folder: Path) -> None:
    for path in sorted(folder.glob(EARLIER)):
        what = "was written by an earlier version, whose log had no checksums"
        raise SegmentBroken(path, what, f"move the {EARLIER} files out of the folder")


def file_of(folder: Path, table: TableName, segment: int) -> Path | None:
    """Return the file of a segment under its present name; None if it is gone."""
    # An open file may be closed between two checks.
    for ending in (CLOSED, OPEN, CLOSED):
        path = path_of(folder, table, segment, ending)
        # The name may change between two checks, but never back to `.open`.
        if path.exists():
            return path
    return None


def present_file(folder: Path, table: TableName, segment: int) -> Path | None:
    """Return the file of a segment, or None if the writer deleted the segment or has not made the
    file yet. Raises SegmentBroken if one of the two files is missing."""
    path = file_of(folder, table, segment)
    if path is not None:
        return path
    # The samples of the oldest segment are deleted first, so its outcomes never miss alone. The
    # newest segment is not deleted.
    numbers = numbers_in(folder)
    if segment not in numbers or (table == "samples" and segment == numbers[0] != numbers[-1]):
        return None
    other = file_of(folder, "outcomes" if table == "samples" else "samples", segment)
    # Both files are made before one of them is written.
    if other is None or is_new(other):
        return None
    # The writer makes both files before it writes to one of them: the missing one may exist now.
    path = file_of(folder, table, segment)
    if path is None:
        raise SegmentBroken(
            path_of(folder, table, segment),
            f"is missing, and {other.name} is there",
            f"restore it from a copy, or move {other.name} out of the folder: the rest can be shown"
            " without",
        )
    return path


def require_intact(folder: Path, table: TableName, segment: int) -> None:
    """Check that a segment has its file and, if it is the newest segment, that its frames match
    their checksums. Raises SegmentBroken."""
    path = present_file(folder, table, segment)
    # Only the newest: the whole log may have many GiB.
    if path is not None and segment == numbers_in(folder)[-1]:
        for _ in read_frames(path, torn=path.suffix == OPEN):
            pass


def is_new(path: Path) -> bool:
    """Return True if nothing has been written to the file yet."""
    return path.suffix == OPEN and path.exists() and path.stat().st_size == 0

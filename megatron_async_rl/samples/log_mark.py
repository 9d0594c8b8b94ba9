"""`RUN/logmark.json`: how far the sample log is on the disk for certain. The writer replaces it
when a segment is closed and with every checkpoint, which keeps a copy; a log that ends before its
mark has lost rows.

Invariants:
- a mark is written after the rows that it counts are synced, so a killed run or a power failure
  never leaves less than its mark;
- it lies next to `RUN/samples/`, so that the loss of the whole folder is noticed;
- a log without a mark, as of an earlier version, is read without this check.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.samples.frames import SegmentBroken

FILE = "logmark.json"
_FIX = "restore it from a copy, or remove it: the end of the log is then not checked"


@dataclass(frozen=True, kw_only=True)
class LogMark:
    """The newest segment that is on the disk, and how many batches each of its two files has at
    least. `closed`: both files are closed."""

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
        # type() and not isinstance: true is an int in Python.
        if kinds != {"segment": int, "closed": bool, "samples": int, "outcomes": int}:
            raise ValueError(f"a mark has other fields than {', '.join(kinds)}")
        return cls(**fields)


def _checksum(fields: Mapping[str, Any]) -> int:
    # Sorted: the order of the file's keys must not matter.
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_mark(run_dir: Path) -> LogMark | None:
    """Return the mark of the run's log; None if there is none. Raises SegmentBroken."""
    path = run_dir / FILE
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
        raise SegmentBroken(path, f"cannot be read: {error.strerror}", _FIX) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SegmentBroken(path, f"is damaged: {error}", _FIX) from error
    return mark

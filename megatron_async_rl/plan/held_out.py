"""Split of a data file into training rows and held-out rows, for `mar init`.

Invariants:
- rows with the same prompt are on the same side, so no training prompt is held out;
- the split depends on the prompts alone: the same data always give the same split;
- both sides together contain every row of the data, in its order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.data.files import read_rows

MAX_HELD_OUT = 500
"""Largest number of held-out prompts; limited because each evaluation samples all of them."""
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"


@dataclass(frozen=True)
class Split:
    """The two files of a split and their numbers of rows."""

    train: Path
    held_out: Path
    train_rows: int
    held_out_rows: int

    def remove(self) -> None:
        for file in (self.train, self.held_out):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder contains other files
            self.train.parent.rmdir()


def split_off(data: Path, share: float, prompt_key: str, folder: Path) -> Split | None:
    """Write the rows of `data` to two files in the new folder `folder`. A `share` of the distinct
    prompts, at least one and at most MAX_HELD_OUT, is held out. Returns None, and writes nothing,
    if there are fewer than two distinct prompts. Raises DataError for unreadable rows, and
    UserError if the folder exists."""
    # Sorting by digest gives a pseudo-random order that depends on the prompts alone.
    digests = sorted({_digest(row, prompt_key) for _, _, row in read_rows(data)})
    if len(digests) < 2:
        return None
    count = min(MAX_HELD_OUT, max(1, round(share * len(digests))))
    held_out = frozenset(digests[:count])
    try:
        # Not exist_ok: a run may be training on the files of an earlier split.
        folder.mkdir(parents=True)
    except FileExistsError as error:
        what = f"{folder} already exists, and the two parts of the data would be written to it"
        raise UserError.of("--eval", what, "remove it, or name held-out data") from error
    split = Split(folder / TRAIN, folder / HELD_OUT, 0, 0)
    try:
        rows = _write(data, prompt_key, held_out, split)
    # Also on Ctrl-C: a half-written split looks like complete data.
    except BaseException:
        split.remove()
        raise
    return Split(split.train, split.held_out, *rows)


def _write(
    data: Path, prompt_key: str, held_out: frozenset[bytes], split: Split
) -> tuple[int, int]:
    """Write both files. Return their numbers of rows."""
    counts = [0, 0]
    with (
        open(split.train, "w", encoding="utf-8") as train,
        open(split.held_out, "w", encoding="utf-8") as other,
    ):
        files = (train, other)
        for line, side in _lines(data, prompt_key, held_out):
            files[side].write(line)
            counts[side] += 1
    return counts[0], counts[1]


def _lines(data: Path, prompt_key: str, held_out: frozenset[bytes]) -> Iterator[tuple[str, int]]:
    for _, _, row in read_rows(data):
        side = int(_digest(row, prompt_key) in held_out)
        yield json.dumps(row, ensure_ascii=False) + "\n", side


def _digest(row: Mapping[str, Any], prompt_key: str) -> bytes:
    """Return a digest of the row's prompt, which decides its side."""
    # A row without a prompt is accepted here; the plan refuses it.
    prompt = json.dumps(row.get(prompt_key), sort_keys=True)
    return hashlib.sha256(prompt.encode()).digest()[:8]

"""Held-out rows split off a file of data, for `mar init`.

Invariants:
- rows with the same prompt are on the same side, so nothing that is trained on is held out;
- the choice depends on the prompts alone: the same data give the same split;
- both sides together are the rows of the data, in their order.
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

MOST = 500
"""Largest number of prompts that are held out: an evaluation samples all of them."""
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"


@dataclass(frozen=True)
class Split:
    """The two files, and their numbers of rows."""

    train: Path
    held_out: Path
    train_rows: int
    held_out_rows: int

    def remove(self) -> None:
        for file in (self.train, self.held_out):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # files of others
            self.train.parent.rmdir()


def split_off(data: Path, share: float, prompt_key: str, folder: Path) -> Split | None:
    """Write the rows of `data` into two files of `folder`: a `share` of the distinct prompts, at
    least one and at most MOST, is held out. Null where there are not two distinct prompts. Raises
    DataError for rows that cannot be read, and UserError where the folder exists."""
    # Sorted digests are a random order that depends on nothing but the prompts.
    digests = sorted({_digest(row, prompt_key) for _, _, row in read_rows(data)})
    if len(digests) < 2:
        return None
    count = min(MOST, max(1, round(share * len(digests))))
    held_out = frozenset(digests[:count])
    try:
        # Not exist_ok: files of an earlier start may be trained on.
        folder.mkdir(parents=True)
    except FileExistsError as error:
        what = f"{folder} exists, and the rows that are split off would be written into it"
        raise UserError.of("--eval", what, "remove it, or name held-out data") from error
    split = Split(folder / TRAIN, folder / HELD_OUT, 0, 0)
    try:
        rows = _write(data, prompt_key, held_out, split)
    # Also on Ctrl-C: a half-written split would be read as the data.
    except BaseException:
        split.remove()
        raise
    return Split(split.train, split.held_out, *rows)


def _write(
    data: Path, prompt_key: str, held_out: frozenset[bytes], split: Split
) -> tuple[int, int]:
    """Write both files; return their numbers of rows."""
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
    """A number that decides the side of the row. The plan refuses a row without a prompt."""
    prompt = json.dumps(row.get(prompt_key), sort_keys=True)
    return hashlib.sha256(prompt.encode()).digest()[:8]

"""Splits that the names of data files stand for: `train`, `validation` and `test`.

Invariants:
- a name stands for a split only as a whole: an optional name of the data set, the split's word, and
  an optional shard, as in `gsm8k-test` or `train-00000-of-00002`; `test_results` stands for none;
- names that are equal except for the split's word stand for their splits: `train_hard` next to
  `test_hard`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits and the words for them in names of files and folders, as the `datasets` library has them:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
ENDINGS = ("", "s", "set", "split", "data")
"""Endings of a split's word in a file name, as in `testset.jsonl`."""

_SPLIT_OF = {
    word + ending: split for split, words in WORDS.items() for word in words for ending in ENDINGS
}
_SHARD = (
    r"[-_. ]*\d+[kmb]?",  # validation_0, dev2, train_10k, train-2024-01-01
    r"[-_. ]\d+[-_ ]of[-_ ]\d+(?:-[0-9a-f]{8,})?",  # train-00000-of-00002-a09b74b3ef9c3b56
    r"[-_. ](?:part|shard|chunk|split|v|p)[-_. ]*\d+",
    r"[-_. ][a-z]",  # train_a
)
"""Patterns of a shard's or a version's name behind a split's word."""
_PIECE = re.compile(r"[-_. ]\d+[-_ ]of[-_ ]\d+(?:-[0-9a-f]{8,})?$")
_WHOLE_NAME = re.compile(
    rf"(?:.*[^a-z])?(?P<word>{'|'.join(sorted(_SPLIT_OF, key=len, reverse=True))})"
    rf"(?:{'|'.join(_SHARD)})*"
)


def files_by_split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split that their names stand for; the others under the empty
    name."""
    found = {file: split_of(file.stem) or "" for file in files}
    twins: dict[str, dict[str, list[Path]]] = {}
    for file in files:
        for rest, split in _rests(file):
            twins.setdefault(rest, {}).setdefault(split, []).append(file)
    for of_split in twins.values():
        if len(of_split) > 1:
            found |= {file: split for split, them in of_split.items() for file in them}
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(found[file], []).append(file)
    return splits


def split_of(name: str) -> str | None:
    """Return the split that a name without its ending stands for; null for any other name."""
    match = _WHOLE_NAME.fullmatch(_spaced(name))
    return None if match is None else _SPLIT_OF[match["word"]]


def names_split(name: str, split: str) -> bool:
    """Return whether a word of the name stands for the split."""
    return any(_SPLIT_OF.get(word) == split for word in re.split(r"[^a-z]+", _spaced(name)))


def _rests(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each split that a word of the file's name stands for, with the name without the word
    and without its place among several files: splits have different numbers of them."""
    parts = re.split(r"([^a-z]+)", _PIECE.sub("", _spaced(file.stem)))
    for index, word in enumerate(parts):
        if word in _SPLIT_OF:
            rest = "".join([*parts[:index], "*", *parts[index + 1 :]])
            yield f"{file.parent}/{rest}{file.suffix}", _SPLIT_OF[word]


def _spaced(name: str) -> str:
    """Return the name in lower case, with a space between the words of `gsm8kTrain`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()

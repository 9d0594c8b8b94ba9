"""Files that a location names: a file, a folder, or a pattern such as `*`, `**`, `[ab]`, `{a,b}`.

Invariants:
- a name that exists as written is not a pattern;
- files of a folder are in the order of their names, and none that may hold data is left out
  silently;
- a name stands for a split only as a whole: an optional name of the data set, the split's word, and
  an optional shard, as in `gsm8k-test` or `train-00000-of-00002`; `test_results` stands for none;
- names that are equal except for the split's word stand for their splits: `train_hard` next to
  `test_hard`;
- paths inside a data set on a hub are text with `/`, whatever the machine.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from megatron_async_rl.config.problem import DataError

ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
"""Endings of the formats that are read."""
HELD_OUT = ("validation", "test")
NOT_READ = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "decompress it"),
    **dict.fromkeys(
        (".arrow", ".feather"), "write it as Parquet: Dataset.to_parquet of `datasets`"
    ),
    **dict.fromkeys((".tsv", ".psv"), "save it as CSV, with commas between the cells"),
    **dict.fromkeys((".ndjson", ".jsonlines"), "rename it to .jsonl"),
    **dict.fromkeys((".orc", ".avro", ".xlsx", ".pkl", ".pickle"), "write it as Parquet or JSONL"),
}
"""Endings of data files that are not read, with the way to make them readable."""
NO_DATA = re.compile(r"(^|/)(\.|__|(config|dataset_infos?|dataset_dict|state)\.json$)")
"""Hidden files and folders, and descriptions of a data set; in a path inside it."""

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits and the words for them in names of files and folders, as the `datasets` library has them:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
SUFFIXES = ("", "s", "set", "split", "data")
"""Endings of a split's word in a file name, as in `testset.jsonl`."""

_SPLIT_OF = {
    word + ending: split for split, words in WORDS.items() for word in words for ending in SUFFIXES
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


def data_files(location: Path) -> list[Path]:
    """Return the data files of a location. Raises DataError if there are none, if one is absent or
    has another format, and if they belong to several splits."""
    # Alternatives of a pattern may overlap, and a file read twice would train its rows twice.
    files = sorted(set(_files_at(location)))
    if not files:
        raise DataError(location, None, *_nothing_in(location))
    for file in files:
        try:
            file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        if file.suffix.lower() not in ENDINGS:
            what = f"ends in {file.suffix or 'nothing'}, which is not a supported format"
            fix = NOT_READ.get(file.suffix.lower(), "name it by its format")
            raise DataError(file, None, what, f"{fix}; the formats are {', '.join(ENDINGS)}")
    # Held-out rows must not enter training because they lie in the same folder.
    splits = files_by_split(files)
    # Files without a split in their names go with any split.
    named = sorted(splits.keys() - {""})
    if len(named) > 1:
        examples = ", ".join(splits[split][0].name for split in named)
        one = _pattern_of(named[-1], splits[named[-1]], files)
        raise DataError(
            location,
            None,
            f"holds files of several splits: {' and '.join(named)} ({examples})",
            f"name one of them, such as {one}, or, to use all, list them as data.sources",
        )
    return files


def require_training_files(location: Path) -> None:
    """Raise DataError where a folder or a pattern that names no split holds held-out files."""
    files = data_files(location)
    folder, pattern = _literal(location)
    splits = files_by_split(files)
    for split in HELD_OUT:
        held_out = splits.get(split, [])
        # The user may have named the held-out split on purpose, in the folder or in the pattern.
        whole = (split_of(folder.name), split_of(folder.stem))
        requested = split in whole or names_split(pattern, split)
        if held_out and not requested:
            others = [file for file in files if file not in held_out]
            example = _pattern_of(split, others or held_out, files)
            fix = f"name the files to train on, such as {example}"
            what = f"is training data and holds {split} data: {held_out[0].name}"
            raise DataError(location, None, what, fix)


def _pattern_of(split: str, files: list[Path], among: list[Path]) -> Path:
    """Return a path or pattern of the files of a split alone."""
    folder = Path(os.path.commonpath([file.parent for file in among]))
    names = [str(file.relative_to(folder)) for file in among]
    wanted = [str(file.relative_to(folder)) for file in files]
    simple = f"{split}*{files[0].suffix}"
    # `test*.jsonl` is the fix that users recognise; it is offered only if it matches nothing else.
    alone = [name for name in names if matches(name, simple)] == wanted
    return folder / (simple if alone and len(wanted) > 1 else one_pattern(wanted, names))


def _files_at(location: Path) -> list[Path]:
    """Return the files of a folder or a pattern; the location itself where it names one file,
    whether it exists or not."""
    # Brackets and braces in the name of an existing folder are not a pattern.
    folder, rest = _literal(location)
    if not rest:
        return _data_in(folder) if folder.is_dir() else [folder]
    found: list[Path] = []
    for one in alternatives_of(rest):
        paths = paths_matching(folder, one)
        # One folder stands for its files; a pattern that matches folders among files skips them.
        if paths == [folder / one] and paths[0].is_dir():
            found += _data_in(paths[0])
        # An absent plain name stays in the list, so that its error names it.
        elif not paths and not glob.has_magic(one):
            found.append(folder / one)
        else:
            found += [path for path in paths if path.is_file()]
    return found


def _data_in(folder: Path) -> list[Path]:
    """Return the data files of a folder. A link to nothing is among them: reading it is an
    error."""
    try:
        inside = [one for one in folder.iterdir() if not NO_DATA.search(one.name)]
    except OSError as error:
        raise unreadable(folder, error) from error
    files = sorted(one for one in inside if not one.is_dir())
    found = [one for one in files if one.suffix.lower() in ENDINGS]
    # Rows of a file that is passed over would be missing without a message.
    unread = next((one for one in files if one.suffix.lower() in NOT_READ), None)
    if unread is not None:
        what = f"holds {unread.name}, and {unread.suffix} is not a supported format"
        fix = NOT_READ[unread.suffix.lower()]
        if found:
            fix += f", or name the other files: {folder}/*{found[0].suffix}"
        raise DataError(folder, None, what, fix)
    # The same name in two formats is usually an export of the same rows, which would count twice.
    by_stem: dict[str, Path] = {}
    for one in found:
        other = by_stem.setdefault(one.stem, one)
        if other is not one:
            what = f"holds {other.name} and {one.name}, which are probably the same rows twice"
            fix = f"name one of them, or, to use both, the pattern {folder}/{one.stem}.*"
            raise DataError(folder, None, what, fix)
    return found


def _nothing_in(location: Path) -> tuple[str, str]:
    """Return the fault and the fix of a location without data files."""
    fix = f"name a file, or a folder that holds some ({', '.join(ENDINGS)})"
    if not location.is_dir():
        return "holds no data file", fix
    folders = [one for one in sorted(location.iterdir()) if one.is_dir()]
    full = [one.name for one in folders if any(p.suffix.lower() in ENDINGS for p in one.iterdir())]
    if full:
        return (
            f"holds no data file, only folders: {', '.join(full[:6])}",
            f"name one of them; {fix}",
        )
    return "holds no data file", fix


def _literal(location: Path) -> tuple[Path, str]:
    """Return the part of a path that exists as it is written, and the rest."""
    parts = location.parts
    # The longest existing prefix first: only the part that does not exist can be a pattern.
    for count in range(len(parts), 0, -1):
        folder = Path(*parts[:count])
        if os.path.lexists(folder):
            return folder, "/".join(parts[count:])
    return Path(), "/".join(parts)


def unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    fix = "check the path; a data set on a hub is hf://datasets/OWNER/NAME[/FILE]"
    return DataError(path, None, f"cannot be read: {reason}", fix)


def files_by_split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split that their names stand for; the others under the empty
    name."""
    found = {file: split_of(file.stem) or "" for file in files}
    twins: dict[str, dict[str, list[Path]]] = {}
    for file in files:
        for rest, split in _rests(file):
            twins.setdefault(rest, {}).setdefault(split, []).append(file)
    for of_split in twins.values():
        # A word such as `test` inside a name is a split only where a sibling differs in that word
        # alone.
        if len(of_split) > 1:
            found |= {file: split for split, them in of_split.items() for file in them}
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(found[file], []).append(file)
    return splits


def split_of(name: str) -> str | None:
    """Return the split that a name without its ending stands for; null for any other name."""
    # The whole name must match: `latest` and `test_results` contain `test` and name no split.
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


def paths_matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths under `folder` that match: a name that exists as written is not a pattern,
    and brackets that match nothing are part of the name."""
    found = [folder]
    for name in PurePosixPath(pattern).parts:
        inside: list[Path] = []
        for one in found:
            if os.path.lexists(one / name):
                inside.append(one / name)
                continue
            # Brackets that match nothing are part of the name, as in `a[1].jsonl`.
            plain = re.sub(r"\[(?!\[\])", "[[]", name)
            names = glob.glob(name, root_dir=one) or glob.glob(plain, root_dir=one)
            inside += [one / each for each in sorted(names)]
        found = inside
    return found


def matches(path: str, pattern: str) -> bool:
    """Return whether `path` matches as in a shell: `*` stays in a folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))
    # fnmatch lets `*` cross folders; equal depth prevents it.
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def one_pattern(wanted: Collection[str], among: Collection[str]) -> str:
    """Return a pattern that matches these paths and no other path of `among`: one with `*` if
    possible, else alternatives of such a pattern, or of the names, for each folder."""
    whole = _starred(wanted, among)
    if whole is not None:
        return whole
    folders: dict[str, list[str]] = {}
    for path in sorted(wanted):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    each: list[str] = []
    for paths in folders.values():
        of_folder = _starred(paths, among)
        each += [_escaped(path) for path in paths] if of_folder is None else [of_folder]
    return f"{{{','.join(each)}}}"


def _starred(wanted: Collection[str], among: Collection[str]) -> str | None:
    """Return a pattern with `*` for exactly these paths; null if there is none."""
    parts = [path.split("/") for path in wanted]
    # Paths of different depth have no common pattern without `**`, which matches too much.
    if len({len(one) for one in parts}) > 1:
        return None
    pattern = "/".join(_alike(list(names)) for names in zip(*parts, strict=True))
    return pattern if {one for one in among if matches(one, pattern)} == set(wanted) else None


def _alike(names: list[str]) -> str:
    before = os.path.commonprefix(names)  # noqa: RUF071 - letters in common
    if set(names) == {before}:
        return _escaped(before)
    # The prefix is cut off first, so that prefix and suffix never overlap.
    after = os.path.commonprefix([name[len(before) :][::-1] for name in names])  # noqa: RUF071
    return f"{_escaped(before)}*{_escaped(after[::-1])}"


def _escaped(name: str) -> str:
    return re.sub(r"[{,}]", r"[\g<0>]", glob.escape(name))


def alternatives_of(pattern: str) -> list[str]:
    """Return the patterns that one with `{one,other}` in it stands for, as in a shell; any other
    pattern, also with a single name in braces, stands for itself."""
    found = re.fullmatch(r"(.*?)(?<!\[)\{(.*)(?<!\[)\}(.*)", pattern)
    if found is None:
        return [pattern]
    before, inside, after = found.groups()
    names = re.split(r"(?<!\[),", inside)
    return [pattern] if len(names) == 1 else [f"{before}{one}{after}" for one in names]

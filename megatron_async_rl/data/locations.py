"""Files of a location, which is a file, a folder, or a pattern such as `*`, `**`, `[ab]`, `{a,b}`.

Invariants:
- a name that exists as written is not a pattern;
- files of a folder are in the order of their names, and no file that may contain data is left out
  silently;
- the whole name of a file determines its split: an optional name of the data set, the word for the
  split, and an optional shard, as in `gsm8k-test` or `train-00000-of-00002`. `test_results` has no
  split;
- names that differ only in the word for the split have this split: `train_hard` next to
  `test_hard`;
- paths inside a data set on a hub are text with `/` on every machine.
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
"""Extensions of the supported formats."""
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
"""Extension of an unsupported data file -> the fix."""
NO_DATA = re.compile(r"(^|/)(\.|__|(config|dataset_infos?|dataset_dict|state)\.json$)")
"""Pattern of hidden files and folders, and of files that describe a data set, in a path inside the
data set."""

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words for it in names of files and folders, as in the `datasets` library:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
SUFFIXES = ("", "s", "set", "split", "data")
"""Suffixes of a split's word in a file name, as in `testset.jsonl`."""

_SPLIT_OF = {
    word + ending: split for split, words in WORDS.items() for word in words for ending in SUFFIXES
}
_SHARD = (
    r"[-_. ]*\d+[kmb]?",  # validation_0, dev2, train_10k, train-2024-01-01
    r"[-_. ]\d+[-_ ]of[-_ ]\d+(?:-[0-9a-f]{8,})?",  # train-00000-of-00002-a09b74b3ef9c3b56
    r"[-_. ](?:part|shard|chunk|split|v|p)[-_. ]*\d+",
    r"[-_. ][a-z]",  # train_a
)
"""Patterns of a shard or a version after a split's word."""
_PIECE = re.compile(r"[-_. ]\d+[-_ ]of[-_ ]\d+(?:-[0-9a-f]{8,})?$")
_WHOLE_NAME = re.compile(
    rf"(?:.*[^a-z])?(?P<word>{'|'.join(sorted(_SPLIT_OF, key=len, reverse=True))})"
    rf"(?:{'|'.join(_SHARD)})*"
)


def data_files(location: Path) -> list[Path]:
    """Return the data files of a location. Raises DataError if there are no files, if a file is
    absent or has an unsupported format, and if the files belong to several splits."""
    # A set, because alternatives of a pattern may overlap, and no row must be trained twice.
    files = sorted(set(_files_at(location)))
    if not files:
        raise DataError(location, None, *_nothing_in(location))
    present = {file.resolve(): file for file in files if not file.is_symlink()}
    for file in files:
        try:
            file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        # Names such as `latest` are links, and no row must be trained twice.
        if file.is_symlink() and (same := present.get(file.resolve())):
            what = f"contains {file.name}, a link to {same.name}: the same rows twice"
            raise DataError(location, None, what, f"name one of them, such as {same}")
        if file.suffix.lower() not in ENDINGS:
            what = f"has the extension {file.suffix or '(none)'}, which is not a supported format"
            fix = NOT_READ.get(file.suffix.lower(), "rename it to the extension of its format")
            raise DataError(file, None, what, f"{fix}; the formats are {', '.join(ENDINGS)}")
    # Held-out rows in the same folder must not enter training.
    splits = files_by_split(files)
    # Files without a split in their names belong to any split.
    named = sorted(splits.keys() - {""})
    if len(named) > 1:
        examples = ", ".join(splits[split][0].name for split in named)
        one = _pattern_of(named[-1], splits[named[-1]], files)
        raise DataError(
            location,
            None,
            f"has files of several splits: {' and '.join(named)} ({examples})",
            f"name one split, such as {one}, or, to use all, list them as data.sources",
        )
    return files


def require_training_files(location: Path) -> None:
    """Raise DataError for a folder or a pattern that contains held-out files without naming their
    split."""
    files = data_files(location)
    folder, pattern = _literal(location)
    splits = files_by_split(files)
    for split in HELD_OUT:
        held_out = splits.get(split, [])
        # Accept a held-out split that the user names, in the folder or in the pattern.
        whole = (split_of(folder.name), split_of(folder.stem))
        requested = split in whole or names_split(pattern, split)
        if held_out and not requested:
            others = [file for file in files if file not in held_out]
            example = _pattern_of(split, others or held_out, files)
            fix = f"name the files to train on, such as {example}"
            what = f"is training data and contains {split} data: {held_out[0].name}"
            raise DataError(location, None, what, fix)


def _pattern_of(split: str, files: list[Path], among: list[Path]) -> Path:
    """Return a path or pattern that matches the files of a split, and no other file of `among`."""
    folder = Path(os.path.commonpath([file.parent for file in among]))
    names = [str(file.relative_to(folder)) for file in among]
    of_split = [str(file.relative_to(folder)) for file in files]
    simple = f"{split}*{files[0].suffix}"
    # Users recognise `test*.jsonl`; propose it only if it matches no other file.
    exact = [name for name in names if matches(name, simple)] == of_split
    return folder / (simple if exact and len(of_split) > 1 else one_pattern(of_split, names))


def _files_at(location: Path) -> list[Path]:
    """Return the files of a folder or a pattern, or the location itself if it is the name of a
    file, which may be absent."""
    # Brackets and braces in the name of an existing folder are not a pattern.
    folder, rest = _literal(location)
    if not rest:
        return _data_in(folder) if folder.is_dir() else [folder]
    files: list[Path] = []
    for one in alternatives_of(rest):
        paths = paths_matching(folder, one)
        # The name of a folder stands for its files; a pattern skips the folders that it matches.
        if paths == [folder / one] and paths[0].is_dir():
            files += _data_in(paths[0])
        # Keep an absent plain name in the list, so that the error names it.
        elif not paths and not glob.has_magic(one):
            files.append(folder / one)
        else:
            files += [path for path in paths if path.is_file()]
    return files


def _data_in(folder: Path) -> list[Path]:
    """Return the data files of a folder, broken links included: reading these is an error."""
    try:
        inside = [one for one in folder.iterdir() if not NO_DATA.search(one.name)]
    except OSError as error:
        raise unreadable(folder, error) from error
    files = sorted(one for one in inside if not one.is_dir())
    data = [one for one in files if one.suffix.lower() in ENDINGS]
    # Refuse unsupported data files: otherwise their rows would be left out silently.
    unread = next((one for one in files if one.suffix.lower() in NOT_READ), None)
    if unread is not None:
        what = f"contains {unread.name}, and {unread.suffix} is not a supported format"
        fix = NOT_READ[unread.suffix.lower()]
        if data:
            fix += f", or name the other files: {folder}/*{data[0].suffix}"
        raise DataError(folder, None, what, fix)
    # The same name in two formats is usually an export of the same rows, which would count twice.
    by_stem: dict[str, Path] = {}
    for one in data:
        other = by_stem.setdefault(one.stem, one)
        if other is not one:
            what = f"contains {other.name} and {one.name}, which are probably the same rows twice"
            fix = f"name one of them, or, to use both, the pattern {folder}/{one.stem}.*"
            raise DataError(folder, None, what, fix)
    return data


def _nothing_in(location: Path) -> tuple[str, str]:
    """Return (fault, fix) for a location without data files."""
    fix = f"name a file, or a folder with data files ({', '.join(ENDINGS)})"
    if not location.is_dir():
        return "contains no data file", fix
    folders = [one for one in sorted(location.iterdir()) if one.is_dir()]
    full = [one.name for one in folders if any(p.suffix.lower() in ENDINGS for p in one.iterdir())]
    if full:
        return (
            f"contains no data file, only folders: {', '.join(full[:6])}",
            f"name one of the folders; {fix}",
        )
    return "contains no data file", fix


def _literal(location: Path) -> tuple[Path, str]:
    """Return the longest prefix of a path that exists as written, and the rest."""
    parts = location.parts
    # Try the longest prefix first: only the part that does not exist may be a pattern.
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
    """Return split -> files, by the names of the files; files without a split are under the empty
    name."""
    split_by_file = {file: split_of(file.stem) or "" for file in files}
    twins: dict[str, dict[str, list[Path]]] = {}
    for file in files:
        for rest, split in _rests(file):
            twins.setdefault(rest, {}).setdefault(split, []).append(file)
    for of_split in twins.values():
        # A word such as `test` inside a name is a split only if a sibling differs in this word
        # alone.
        if len(of_split) > 1:
            split_by_file |= {file: split for split, them in of_split.items() for file in them}
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(split_by_file[file], []).append(file)
    return splits


def split_of(name: str) -> str | None:
    """Return the split of a name without its extension; None if the name has no split."""
    # The whole name must match: `latest` and `test_results` contain `test` and have no split.
    match = _WHOLE_NAME.fullmatch(_spaced(name))
    return None if match is None else _SPLIT_OF[match["word"]]


def names_split(name: str, split: str) -> bool:
    """Return True if the name contains a word for the split."""
    return any(_SPLIT_OF.get(word) == split for word in re.split(r"[^a-z]+", _spaced(name)))


def _rests(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (rest, split) for each word for a split in the file's name. `rest` is the name without
    the word and without the number of the shard, because splits differ in their shards."""
    parts = re.split(r"([^a-z]+)", _PIECE.sub("", _spaced(file.stem)))
    for index, word in enumerate(parts):
        if word in _SPLIT_OF:
            rest = "".join([*parts[:index], "*", *parts[index + 1 :]])
            yield f"{file.parent}/{rest}{file.suffix}", _SPLIT_OF[word]


def _spaced(name: str) -> str:
    """Return the name in lower case, with spaces between words: `gsm8k train` for `gsm8kTrain`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()


def paths_matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths under `folder` that match. A name that exists as written is not a pattern,
    and brackets that match nothing are part of the name."""
    matched = [folder]
    for name in PurePosixPath(pattern).parts:
        inside: list[Path] = []
        for one in matched:
            if os.path.lexists(one / name):
                inside.append(one / name)
                continue
            # Brackets that match nothing are part of the name, as in `a[1].jsonl`.
            plain = re.sub(r"\[(?!\[\])", "[[]", name)
            names = glob.glob(name, root_dir=one) or glob.glob(plain, root_dir=one)
            inside += [one / each for each in sorted(names)]
        matched = inside
    return matched


def matches(path: str, pattern: str) -> bool:
    """Return True if `path` matches as in a shell: `*` matches within a folder."""
    # fnmatch lets `*` match `/`, so require the same depth.
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def one_pattern(paths: Collection[str], among: Collection[str]) -> str:
    """Return a pattern that matches `paths` and no other path of `among`. The pattern has `*` if
    possible. Otherwise it has alternatives: for each folder such a pattern, or the names."""
    whole = _starred(paths, among)
    if whole is not None:
        return whole
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    each: list[str] = []
    for inside in folders.values():
        of_folder = _starred(inside, among)
        each += [_escaped(path) for path in inside] if of_folder is None else [of_folder]
    return f"{{{','.join(each)}}}"


def _starred(paths: Collection[str], among: Collection[str]) -> str | None:
    """Return a pattern with `*` that matches exactly `paths`; None if there is none."""
    parts = [path.split("/") for path in paths]
    # Paths of different depth have no common pattern without `**`, which matches too much.
    if len({len(one) for one in parts}) > 1:
        return None
    pattern = "/".join(_alike(list(names)) for names in zip(*parts, strict=True))
    return pattern if {one for one in among if matches(one, pattern)} == set(paths) else None


def _alike(names: list[str]) -> str:
    before = os.path.commonprefix(names)  # noqa: RUF071 - a common prefix of text, not of paths
    if set(names) == {before}:
        return _escaped(before)
    # Remove the prefix first, so that prefix and suffix never overlap.
    after = os.path.commonprefix([name[len(before) :][::-1] for name in names])  # noqa: RUF071
    return f"{_escaped(before)}*{_escaped(after[::-1])}"


def _escaped(name: str) -> str:
    return re.sub(r"[{,}]", r"[\g<0>]", glob.escape(name))


def alternatives_of(pattern: str) -> list[str]:
    """Return the patterns that a pattern with `{one,other}` expands to, as in a shell. Any other
    pattern, also a pattern with a single name in braces, expands to itself."""
    match = re.fullmatch(r"(.*?)(?<!\[)\{(.*)(?<!\[)\}(.*)", pattern)
    if match is None:
        return [pattern]
    before, inside, after = match.groups()
    names = re.split(r"(?<!\[),", inside)
    return [pattern] if len(names) == 1 else [f"{before}{one}{after}" for one in names]

"""Rows out of data files: JSONL, JSON, Parquet and CSV, one file or a folder or pattern of them.

Invariants:
- a row is a mapping of columns to plain Python values, and is known by its file and its place in
  it, from 1: a line of JSONL and CSV, an item of a JSON list, a row of Parquet;
- cells of CSV stay text: nothing guesses that "007" is a number;
- files of a folder are read in the order of their names;
- paths inside a data set on a hub are text with `/`, whatever the machine.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_async_rl.config.problem import DataError

Row = tuple[Path, int, dict[str, Any]]
"""File, place, columns."""

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits and the words for them in names of files and folders, as the `datasets` library has them:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
JOINED = ("", "s", "set", "split", "data")
"""Endings of a split's word in a file name, as in `testset.jsonl`."""


def read_rows(location: Path, limit: int | None = None) -> Iterator[Row]:
    """At most `limit` rows of a file, or of a folder's or a pattern's files. Raises DataError with
    file, place, fault and fix."""
    return islice(_every_row(location), limit)


def count_rows(location: Path) -> int:
    """Number of rows of a file, or of a folder's or a pattern's files, without checking each one: a
    line of JSONL that is not blank is a row. Raises DataError where a file cannot be read."""
    return sum(_count(file) for file in data_files(location))


def _count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return int(parquet.read_metadata(file).num_rows)
    if file.suffix.lower() != ".jsonl":
        return sum(1 for _ in FORMATS[file.suffix.lower()](file))
    try:
        with open(file, "rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise _unreadable(file, error) from error


def _every_row(location: Path) -> Iterator[Row]:
    for file in data_files(location):
        for place, row in FORMATS[file.suffix.lower()](file):
            yield file, place, row


def data_files(location: Path) -> list[Path]:
    """Raises DataError where there is none, where one is not there or has no known format, and
    where they are of several splits."""
    endings = ", ".join(FORMATS)
    files = sorted(set(_files_at(location)))
    if not files:
        fix = f"name a file, or a folder that holds some ({endings})"
        raise DataError(location, None, "holds no data file", fix)
    for file in files:
        try:
            file.stat()
        except OSError as error:
            raise _unreadable(file, error) from error
        if file.suffix.lower() not in FORMATS:
            what = f"ends in {file.suffix or 'nothing'}, which is no format that is read here"
            raise DataError(file, None, what, f"name it by its format, one of {endings}")
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_word(file) or "", []).append(file)
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


def _split_word(file: Path) -> str | None:
    """Return the split that a word in a file's name stands for; null where there is none."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", file.stem)  # gsm8kTrain
    for word in re.split(r"[^a-z]+", parted.lower()):
        for split, words in WORDS.items():
            if any(word == one + ending for one in words for ending in JOINED):
                return split
    return None


def _pattern_of(split: str, files: list[Path], among: list[Path]) -> Path:
    """Return a path or pattern of the files of a split alone."""
    folder = Path(os.path.commonpath([file.parent for file in among]))
    names = [str(file.relative_to(folder)) for file in among]
    wanted = [str(file.relative_to(folder)) for file in files]
    simple = f"{split}*{files[0].suffix}"
    alone = [name for name in names if matches(name, simple)] == wanted
    return folder / (simple if alone and len(wanted) > 1 else one_pattern(wanted, names))


def _files_at(location: Path) -> list[Path]:
    """Return the files of a folder or a pattern; the location itself where it names one file,
    whether it exists or not."""
    # Brackets and braces in the name of a folder that exists are no pattern.
    folder, rest = _literal(location)
    if not rest:
        return _data_in(folder) if folder.is_dir() else [folder]
    found: list[Path] = []
    for one in alternatives_of(rest):
        paths = paths_matching(folder, one)
        if paths == [folder / one] and paths[0].is_dir():
            found += _data_in(paths[0])
        elif not paths and not glob.has_magic(one):
            found.append(folder / one)
        else:
            found += [path for path in paths if path.is_file()]
    return found


def _data_in(folder: Path) -> list[Path]:
    try:
        visible = [one for one in folder.iterdir() if not one.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error
    return [one for one in visible if one.suffix.lower() in FORMATS and one.is_file()]


def _literal(location: Path) -> tuple[Path, str]:
    """Return the part of a path that exists as it is written, and the rest."""
    parts = location.parts
    for count in range(len(parts), 0, -1):
        folder = Path(*parts[:count])
        if os.path.lexists(folder):
            return folder, "/".join(parts[count:])
    return Path(), "/".join(parts)


def paths_matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths under `folder` that match: a name that exists as it is written is no
    pattern, and brackets that match nothing are part of the name."""
    found = [folder]
    for name in PurePosixPath(pattern).parts:
        inside: list[Path] = []
        for one in found:
            if os.path.lexists(one / name):
                inside.append(one / name)
                continue
            plain = re.sub(r"\[(?!\[\])", "[[]", name)
            names = glob.glob(name, root_dir=one) or glob.glob(plain, root_dir=one)
            inside += [one / each for each in sorted(names)]
        found = inside
    return found


def splits_by_name(paths: Collection[str]) -> dict[str, list[str]]:
    """Files of a data set by their split: of pieces in its folder `data` it is the beginning of the
    name, else a word in the name of a folder, else in that of the file. Where no name says one they
    are all for training."""
    files = [PurePosixPath(path) for path in sorted(paths)]
    found: dict[str, list[str]] = {}
    for file in files:
        piece = re.fullmatch(r"data/(.+)-\d{5}-of-\d{5}[^/]*", str(file))
        if piece and "/" not in piece[1]:
            found.setdefault(piece[1], []).append(str(file))
    for names in (slice(-1), slice(-1, None)):
        if found:
            break
        for split, words in WORDS.items():
            them = [str(one) for one in files if any(_has(n, words) for n in one.parts[names])]
            found |= {split: them} if them else {}
    return found or ({"train": [str(one) for one in files]} if files else {})


def _has(name: str, words: Collection[str]) -> bool:
    return any(word in words for word in re.split(r"[-._ 0-9]+", name))


def matches(path: str, pattern: str) -> bool:
    """As a shell has it: `*` stays in a folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def one_pattern(wanted: Collection[str], among: Collection[str]) -> str:
    """One that matches these paths and no other: with a `*` in some names where that does, else with
    such a pattern for each folder, or the names, as alternatives."""
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
    """Null where the paths have no such pattern to themselves."""
    parts = [path.split("/") for path in wanted]
    if len({len(one) for one in parts}) > 1:
        return None
    pattern = "/".join(_alike(list(names)) for names in zip(*parts, strict=True))
    return pattern if {one for one in among if matches(one, pattern)} == set(wanted) else None


def _alike(names: list[str]) -> str:
    before = os.path.commonprefix(names)  # noqa: RUF071 - letters in common
    if set(names) == {before}:
        return _escaped(before)
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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    fix = "check the path; a data set on a hub is hf://datasets/OWNER/NAME[/FILE]"
    return DataError(path, None, f"cannot be read: {reason}", fix)


def _text(path: Path, line: int | None, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
        raise DataError(path, line, what, "save the file as UTF-8") from error


def _object(path: Path, place: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"is a JSON {kind(value)}, not an object"
        raise DataError(path, place, what, 'write {"prompt": "...", ...}')
    return value


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError where a key is there twice: one of its values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _parsed(path: Path, place: int | None, text: str, fix: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(path, place, f"is not JSON: {error}", fix) from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line by line, so that the first rows of a large file cost no more than those of a small one."""
    fix = "write one complete JSON object per line"
    try:
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    yield (
                        line,
                        _object(path, line, _parsed(path, line, _text(path, line, raw), fix)),
                    )
    except OSError as error:
        raise _unreadable(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A list of objects; what does not begin as a list is read as JSONL, under which name it is
    often found."""
    content = _content(path).removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        try:
            yield from _jsonl(path)
        except DataError as error:
            if error.line == 1:
                _refuse_one_object(path, content)
            raise
        return
    values = _parsed(path, None, _text(path, None, content), "write a list of objects")
    for place, value in enumerate(values, start=1):
        yield place, _object(path, place, value)


def _refuse_one_object(path: Path, content: bytes) -> None:
    """Raises DataError for a file that is an object as a whole, such as {"data": [...]}."""
    try:
        whole = json.loads(content.decode())
    except (ValueError, RecursionError):
        return
    lists = [f"that of `{key}`" for key, value in whole.items() if isinstance(value, list)]
    fix = f"write the list of rows alone, {' or '.join(lists) or '[{...}, {...}]'}"
    raise DataError(path, None, "is one JSON object, and not a list of them", fix)


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte {content[error.start]:#04x}"
        raise DataError(path, line, what, "save the file as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # a document has more than the 128 KiB of the module's own
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        other = next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None)
        if other is not None:
            what = f"has no comma in its first line, {header[0][:60]!r}"
            raise DataError(path, 1, what, f"save it with commas in the place of {other!r}")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise DataError(path, 1, f"names the column {twice!r} twice", "rename one of them")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                what = f"has {len(cells)} cells, and the first line names {len(header)} columns"
                fix = 'write one cell for each; put one that holds a comma into "quotes"'
                raise DataError(path, reader.line_num, what, fix)
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        fix = "correct the quotes"
        raise DataError(path, reader.line_num, f"is not CSV: {error}", fix) from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Without columns of bytes, which are no text; times and decimals as text, since fields go into
    the samples as JSON."""
    import pyarrow
    from pyarrow import parquet

    try:
        place = 0
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            plain = [field.name for field in schema if not _holds(field.type, _is_bytes)]
            odd = {field.name for field in schema if _holds(field.type, _is_odd)}
            for batch in file.iter_batches(batch_size=1024, columns=plain):
                for row in batch.to_pylist():
                    place += 1
                    yield place, row | {name: as_text(row[name]) for name in odd & row.keys()}
    except OSError as error:
        raise _unreadable(path, error) from error
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        what = f"is not Parquet: {reason}"
        raise DataError(path, None, what, "write it again, or fetch it again") from error
    except ValueError as error:  # Python's times have no nanoseconds
        what = f"holds a value that Python does not: {str(error).partition('.')[0]}"
        raise DataError(path, None, what, "write times in microseconds, or as text") from error


def columns_of_bytes(path: Path) -> list[str]:
    """Return the columns of a Parquet file that rows are without; of another file none."""
    if path.suffix.lower() != ".parquet":
        return []
    from pyarrow import parquet

    return [field.name for field in parquet.read_schema(path) if _holds(field.type, _is_bytes)]


def _holds(column: Any, what: Callable[[Any], bool]) -> bool:
    """The type of a column, or of something inside it."""
    from pyarrow import types

    if types.is_dictionary(column):
        return _holds(column.value_type, what)
    inside = (column.field(index).type for index in range(column.num_fields))
    return what(column) or any(_holds(one, what) for one in inside)


def _is_bytes(column: Any) -> bool:
    from pyarrow import types

    return any(
        is_type(column)
        for is_type in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    )


def _is_odd(column: Any) -> bool:
    from pyarrow import BaseExtensionType, types

    of_a_library = isinstance(column, BaseExtensionType)  # such as a UUID
    return bool(of_a_library or types.is_temporal(column) or types.is_decimal(column))


def as_text(value: Any) -> Any:
    """Text for a value that JSON does not hold."""
    if isinstance(value, dict):
        return {key: as_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_text(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


FORMATS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}


def kind(value: Any) -> str:
    names = {
        dict: "object",
        list: "list",
        str: "text",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)

"""Rows of data files: JSONL, JSON, Parquet and CSV.

Invariants:
- a row is a mapping of columns to plain Python values, and is known by its file and its place in
  it, from 1: a line of JSONL and CSV, an item of a JSON list, a row of Parquet;
- every value arrives as it is written, or its file and row are refused by name; of Parquet, values
  that JSON lacks become text, and columns of bytes are left out;
- cells of CSV stay text: nothing guesses that "007" is a number.

The readers are our own because the builders of `datasets` break these rules
(tests/unit/test_data.py loads such files with both):
- JSON: it gives each column one type. Next to the text "1" the number 1 becomes the same value, ISO
  dates become timestamps, integers above 2^53 next to a float are rounded, an absent key becomes
  null, and a column that appears after the first 10 MB is an Arrow error without a line;
- CSV: a row with too few cells is filled up, and one comma too many in every row shifts the columns
  under the wrong names. Neither is an error, and rows do not know their lines;
- Parquet: columns of maps and of UUIDs are refused. Others would be read by the same pyarrow, from
  a second copy of the file on disk.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.locations import ENDINGS, data_files, unreadable

DataRow = tuple[Path, int, dict[str, Any]]
"""File, place, columns."""

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
}
"""Beginnings of compressed files."""


def read_rows(location: Path, limit: int | None = None) -> Iterator[DataRow]:
    """Yield at most `limit` rows of the files of a location. Raises DataError with file, place,
    fault and fix."""
    return islice(_every_row(location), limit)


def count_rows(location: Path) -> int:
    """Return the number of rows of a location's files without checking each row: every
    non-blank line of JSONL is a row. Raises DataError if a file cannot be read."""
    return sum(_count(file) for file in data_files(location))


def _count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        from pyarrow import parquet

        with _parquet_errors(file):
            # The footer has the number, so a file of any size costs one read.
            return int(parquet.read_metadata(file).num_rows)
    # A quoted cell of CSV may hold line breaks and a JSON list may be one line, so both are parsed.
    if file.suffix.lower() != ".jsonl":
        return sum(1 for _ in FORMATS[file.suffix.lower()](file))
    try:
        with open(file, "rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise unreadable(file, error) from error


def _every_row(location: Path) -> Iterator[DataRow]:
    for file in data_files(location):
        for place, row in FORMATS[file.suffix.lower()](file):
            yield file, place, row


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _text(path: Path, line: int | None, raw: bytes) -> str:
    try:
        # Only the first line can begin with a byte order mark; elsewhere it is data.
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # Compressed files are the usual cause, and "decompress it" helps more than a byte's number.
        _refuse_compressed(path, raw)
        what = f"is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
        raise DataError(path, line, what, "save the file as UTF-8") from error


def _refuse_compressed(path: Path, content: bytes) -> None:
    """Raise DataError for the beginning of a compressed file, whatever its name."""
    for start, name in COMPRESSED.items():
        if content.startswith(start):
            raise DataError(path, None, f"is compressed, by {name}", "decompress it")


def _object(path: Path, place: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"is a JSON {kind(value)}, not an object"
        fix = 'write {"prompt": "...", ...}'
        if isinstance(value, list) and path.suffix.lower() == ".jsonl":
            fix += "; a file that is one list of objects ends in .json"
        raise DataError(path, place, what, fix)
    return value


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError for a repeated key, one of whose values
    would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        # json.loads would keep the last value and drop the first without an error.
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _parsed(path: Path, line: int | None, text: str) -> Any:
    """Return the JSON value of a line, or of a whole file where `line` is null."""
    try:
        return json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        what, fix = str(error), "write one complete JSON object per line"
        if line is None:
            fix = "write a list of objects"
        elif isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"  # its own line is always 1
            if error.msg == "Extra data" and text[error.pos :].strip() == ",":
                fix += ", without a comma behind it"
            elif text.lstrip().startswith("["):
                fix += "; a file that is one list of objects ends in .json"
        raise DataError(path, line, f"is not JSON: {what}", fix) from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line by line: the first rows of a large file cost as little as those of a small
    one."""
    try:
        # Bytes, so that a line that is not UTF-8 can be named; text mode fails at a buffer's
        # border.
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    value = _parsed(path, line, _text(path, line, raw))
                    yield line, _object(path, line, value)
    except OSError as error:
        raise unreadable(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a list. A file that does not begin as a list is read as JSONL, which is
    often published as .json."""
    # Without the mark, the first character shows whether the file is a list.
    content = _content(path).removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        _refuse_one_object(path, content)
        yield from _jsonl(path)
        return
    values = _parsed(path, None, _text(path, None, content))
    for place, value in enumerate(values, start=1):
        yield place, _object(path, place, value)


def _refuse_one_object(path: Path, content: bytes) -> None:
    """Raise DataError for a file that is an object as a whole, such as {"data": [...]}: written
    over several lines, or with nothing in it but a list of objects other than chat messages."""
    try:
        whole = json.loads(content.decode())
    except (ValueError, RecursionError):
        return
    if not isinstance(whole, dict):
        return
    lists = [key for key, value in whole.items() if isinstance(value, list)]
    # One line with one object is also valid JSONL, so a list of chat messages, or an empty one, is
    # a row.
    alone = (
        len(whole) == len(lists) == 1
        and whole[lists[0]]
        and all(
            isinstance(row, dict) and not {"role", "from"} & row.keys() for row in whole[lists[0]]
        )
    )
    if alone or b"\n" in content.strip():
        shown = " or ".join(f"that of `{key}`" for key in lists) or "[{...}, {...}]"
        what = "is one JSON object, and not a list of them"
        raise DataError(path, None, what, f"write the list of rows alone, {shown}")


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_compressed(path, content)
        line = content.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte {content[error.start]:#04x}"
        raise DataError(path, line, what, "save the file as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # a document has more than the 128 KiB of the module's own
    # newline="" keeps line breaks inside quotes; strict=True makes a stray quote an error instead
    # of text.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        # A file with another separator parses as one column, and every row would be wrong.
        other = next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None)
        if other is not None:
            what = f"has no comma in its first line, {header[0][:60]!r}"
            fix = f"save it with commas instead of {other!r}"
            raise DataError(path, reader.line_num, what, fix)
        _require_unique(path, reader.line_num, header)
        for cells in reader:
            if not cells:
                continue
            # DictReader would fill or drop cells; either one shifts values under other names.
            if len(cells) != len(header):
                what = f"has {len(cells)} cells, and the first line names {len(header)} columns"
                fix = 'write one cell for each; put a value that holds a comma into "quotes"'
                raise DataError(path, reader.line_num, what, fix)
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        fix = "correct the quotes"
        raise DataError(path, reader.line_num, f"is not CSV: {error}", fix) from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows without columns of bytes. Times and decimals become text, because samples store
    fields as JSON."""
    from pyarrow import parquet

    with _parquet_errors(path), parquet.ParquetFile(path) as file:
        place = 0
        schema = file.schema_arrow
        _require_unique(path, None, schema.names)
        # Images and audio: pyarrow would load all of their bytes for rows that a text model never
        # reads.
        plain = [field.name for field in schema if not _holds(field.type, _is_bytes)]
        odd = {field.name for field in schema if _holds(field.type, _is_odd)}
        with _parquet_errors(path, sorted(odd)):
            # In batches: a row group may exceed the memory. "strict" refuses a key twice in a map.
            for batch in file.iter_batches(batch_size=1024, columns=plain):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    place += 1
                    yield place, row | {name: as_text(row[name]) for name in odd & row.keys()}


@contextmanager
def _parquet_errors(path: Path, odd: Sequence[str] = ()) -> Iterator[None]:
    """Raise pyarrow's errors as DataError. `odd`: columns whose values become text."""
    import pyarrow

    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        what = f"is not Parquet: {reason}"
        raise DataError(path, None, what, "write it again, or fetch it again") from error
    except KeyError as error:
        what = f"holds a map with a key twice: {error.args[0]}"
        raise DataError(path, None, what, "write each key of a map once") from error
    # DataError is a ValueError, and a consumer of the rows may raise it through this context.
    except DataError:
        raise
    except (ValueError, OverflowError) as error:  # such as a time after the year 9999
        where = f" in {' or '.join(odd)}" if odd else ""
        what = f"holds a value{where} that Python does not: {str(error).partition('.')[0]}"
        raise DataError(path, None, what, "write it as text") from error


def _require_unique(path: Path, line: int | None, columns: Sequence[str]) -> None:
    """Raise DataError where a column is named twice: the values of one would be lost."""
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise DataError(path, line, f"names the column {twice!r} twice", "rename one of them")


def columns_of_bytes(path: Path) -> list[str]:
    """Return the columns that rows of a Parquet file lack; an empty list for other formats."""
    if path.suffix.lower() != ".parquet":
        return []
    from pyarrow import parquet

    with _parquet_errors(path):
        schema = parquet.read_schema(path)
    return [field.name for field in schema if _holds(field.type, _is_bytes)]


def _holds(column: Any, what: Callable[[Any], bool]) -> bool:
    """Return whether `what` is true of a column's type or of a type inside it."""
    from pyarrow import types

    # A dictionary-encoded column has no fields; its values' type decides.
    if types.is_dictionary(column):
        return _holds(column.value_type, what)
    inside = (column.field(index).type for index in range(column.num_fields))
    return what(column) or any(_holds(one, what) for one in inside)


def _is_bytes(column: Any) -> bool:
    from pyarrow import types

    kinds = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(is_type(column) for is_type in (*kinds, types.is_fixed_size_binary))


def _is_odd(column: Any) -> bool:
    from pyarrow import BaseExtensionType, types

    of_a_library = isinstance(column, BaseExtensionType)  # such as a UUID
    # Keys of a map may be numbers, and JSON's are text.
    kinds = (types.is_temporal, types.is_decimal, types.is_map)
    return of_a_library or any(is_type(column) for is_type in kinds)


def as_text(value: Any) -> Any:
    """Return the value with text in place of what JSON does not have."""
    if isinstance(value, dict):
        return {str(key): as_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_text(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


FORMATS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = dict(
    zip(ENDINGS, (_jsonl, _json, _parquet, _csv), strict=True)
)


def a_kind(value: Any) -> str:
    """Return the kind of a value with its article; null has none."""
    name = kind(value)
    return name if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


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

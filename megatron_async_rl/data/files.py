"""Rows of data files: JSONL, JSON, Parquet and CSV.

Invariants:
- a row is a mapping of columns to plain Python values. Its file and its place in the file, counted
  from 1, identify it: a line of JSONL and CSV, an item of a JSON list, a row of Parquet;
- every value is read unchanged, or refused with its file and row. In Parquet, values of types that
  JSON lacks become text, and columns of bytes are left out;
- cells of CSV stay text: "007" does not become a number.

This package has its own readers because the builders of `datasets` break these rules
(tests/unit/test_data.py loads such files with both):
- JSON: each column has one type. In a column with the text "1" the number 1 becomes the same value,
  ISO dates become timestamps, in a column with floats integers above 2^53 are rounded, an absent
  key becomes null, and a column that first appears after 10 MB is an Arrow error without a line;
- CSV: a row with too few cells is filled up, and one extra comma in every row moves the values
  under wrong names. Neither is an error, and rows have no line numbers;
- Parquet: columns of maps and of UUIDs are refused. Other columns are read by the same pyarrow,
  from a second copy of the file on disk.
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
"""(file, place, columns) of a row."""

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
"""First bytes of compressed files -> name of the format."""


def read_rows(location: Path, limit: int | None = None) -> Iterator[DataRow]:
    """Yield at most `limit` rows of a location's files. Raises DataError with file, place, fault
    and fix."""
    return islice(_every_row(location), limit)


def count_rows(location: Path) -> int:
    """Return the number of rows of a location's files, without a check of each row: every non-blank
    line of JSONL counts. Raises DataError if a file cannot be read."""
    return sum(_count(file) for file in data_files(location))


def _count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        from pyarrow import parquet

        with _parquet_errors(file):
            # The footer contains the number, so the rows are not read.
            return int(parquet.read_metadata(file).num_rows)
    # Parse CSV and JSON: a quoted cell may contain line breaks, and a list may be one line.
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
        # A byte order mark is only allowed in the first line; elsewhere it is data.
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # Report the usual cause, a compressed file, first: its fix is more helpful.
        _refuse_compressed(path, raw)
        what = f"is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
        raise DataError(path, line, what, "save the file as UTF-8") from error


def _refuse_compressed(path: Path, content: bytes) -> None:
    """Raise DataError if `content` begins like a compressed file."""
    for start, name in COMPRESSED.items():
        if content.startswith(start):
            raise DataError(path, None, f"is compressed with {name}", "decompress it")


def _object(path: Path, place: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"is a JSON {kind(value)}, not an object"
        fix = 'write {"prompt": "...", ...}'
        if isinstance(value, list) and path.suffix.lower() == ".jsonl":
            fix += ", or rename a file with one list of objects to .json"
        raise DataError(path, place, what, fix)
    return value


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError for a duplicate key."""
    whole = dict(pairs)
    if len(whole) < len(pairs):
        # json.loads would silently keep the last value only.
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return whole


def _parsed(path: Path, line: int | None, text: str) -> Any:
    """Return the JSON value of a line, or of a whole file if `line` is None."""
    try:
        return json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        what, fix = str(error), "write one complete JSON object per line"
        if line is None:
            fix = "write a list of objects"
        elif isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"  # error.lineno is always 1
            if error.msg == "Extra data" and text[error.pos :].strip() == ",":
                fix += ", without a comma after it"
            elif text.lstrip().startswith("["):
                fix += ", or rename a file with one list of objects to .json"
        raise DataError(path, line, f"is not JSON: {what}", fix) from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows line by line, so that the first rows of a large file are read quickly."""
    try:
        # Read bytes, so that the error for invalid UTF-8 has a line number; text mode decodes whole
        # buffers.
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    value = _parsed(path, line, _text(path, line, raw))
                    yield line, _object(path, line, value)
    except OSError as error:
        raise unreadable(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a list. A file that does not begin with a list is read as JSONL, because
    JSONL is often published as .json."""
    # Remove the byte order mark, so that the first character shows if the file is a list.
    content = _content(path).removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        _refuse_one_object(path, content)
        yield from _jsonl(path)
        return
    values = _parsed(path, None, _text(path, None, content))
    for place, value in enumerate(values, start=1):
        yield place, _object(path, place, value)


def _refuse_one_object(path: Path, content: bytes) -> None:
    """Raise DataError for a file that is a single object and not a row, such as {"data": [...]}:
    the object has several lines, or its only value is a list of objects other than chat
    messages."""
    try:
        whole = json.loads(content.decode())
    except (ValueError, RecursionError):
        return
    if not isinstance(whole, dict):
        return
    lists = [key for key, value in whole.items() if isinstance(value, list)]
    # An object on one line is also valid JSONL, so an object with a list of chat messages, or with
    # an empty list, is a row.
    only_rows = (
        len(whole) == len(lists) == 1
        and whole[lists[0]]
        and all(
            isinstance(row, dict) and not {"role", "from"} & row.keys() for row in whole[lists[0]]
        )
    )
    if only_rows or b"\n" in content.strip():
        shown = " or ".join(f"the list of `{key}`" for key in lists) or "[{...}, {...}]"
        what = "is one JSON object, not a list of objects"
        raise DataError(path, None, what, f"write only the list of rows: {shown}")


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_compressed(path, content)
        line = content.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte {content[error.start]:#04x}"
        raise DataError(path, line, what, "save the file as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # documents may exceed the module's default of 128 KiB
    # newline="" keeps line breaks inside quotes; with strict=True a stray quote is an error and not
    # text.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        # A file with another separator would be parsed as one column.
        other = next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None)
        if other is not None:
            what = f"has no comma in its first line, {header[0][:60]!r}"
            fix = f"save it with commas instead of {other!r}"
            raise DataError(path, reader.line_num, what, fix)
        _require_unique(path, reader.line_num, header)
        for cells in reader:
            if not cells:
                continue
            # DictReader would fill or drop cells, so values would move under other names.
            if len(cells) != len(header):
                what = f"has {len(cells)} cells, and the first line names {len(header)} columns"
                fix = 'write one cell per column; put a value with a comma into "quotes"'
                raise DataError(path, reader.line_num, what, fix)
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        fix = "correct the quotes"
        raise DataError(path, reader.line_num, f"is not CSV: {error}", fix) from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows, without columns of bytes. Values that JSON lacks, such as times and decimals,
    become text, because samples store fields as JSON."""
    from pyarrow import parquet

    with _parquet_errors(path), parquet.ParquetFile(path) as file:
        place = 0
        schema = file.schema_arrow
        _require_unique(path, None, schema.names)
        # Leave out images and audio: a text model does not read them, and pyarrow would load all of
        # their bytes.
        plain = [field.name for field in schema if not _holds(field.type, _is_bytes)]
        odd = {field.name for field in schema if _holds(field.type, _is_odd)}
        with _parquet_errors(path, sorted(odd)):
            # Read in batches, because a row group may exceed the memory. "strict" refuses a
            # duplicate key in a map.
            for batch in file.iter_batches(batch_size=1024, columns=plain):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    place += 1
                    yield place, row | {name: as_text(row[name]) for name in odd & row.keys()}


@contextmanager
def _parquet_errors(path: Path, odd: Sequence[str] = ()) -> Iterator[None]:
    """Convert pyarrow's errors into DataError. `odd`: names of columns whose values become text."""
    import pyarrow

    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        what = f"is not Parquet: {reason}"
        raise DataError(path, None, what, "write it again, or download it again") from error
    except KeyError as error:
        what = f"has a map with a duplicate key: {error.args[0]}"
        raise DataError(path, None, what, "write each key of a map once") from error
    # DataError is a ValueError, and a consumer of the rows may raise it inside this context.
    except DataError:
        raise
    except (ValueError, OverflowError) as error:  # such as a time after the year 9999
        where = f" in {' or '.join(odd)}" if odd else ""
        what = f"has a value{where} outside Python's range: {str(error).partition('.')[0]}"
        raise DataError(path, None, what, "write it as text") from error


def _require_unique(path: Path, line: int | None, columns: Sequence[str]) -> None:
    """Raise DataError for a duplicate column name, with which the values of one column would be
    lost."""
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise DataError(path, line, f"names the column {twice!r} twice", "rename one of them")


def columns_of_bytes(path: Path) -> list[str]:
    """Return the columns of bytes in a Parquet file, which its rows lack; an empty list for other
    formats."""
    if path.suffix.lower() != ".parquet":
        return []
    from pyarrow import parquet

    with _parquet_errors(path):
        schema = parquet.read_schema(path)
    return [field.name for field in schema if _holds(field.type, _is_bytes)]


def _holds(column: Any, what: Callable[[Any], bool]) -> bool:
    """Return True if `what` is true for a column's type or for a type inside it."""
    from pyarrow import types

    # A dictionary-encoded column has no fields, so test the type of its values.
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

    is_extension = isinstance(column, BaseExtensionType)  # such as a UUID
    # Keys of a map may be numbers, and JSON's keys are text.
    kinds = (types.is_temporal, types.is_decimal, types.is_map)
    return is_extension or any(is_type(column) for is_type in kinds)


def as_text(value: Any) -> Any:
    """Return the value with text for everything that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): as_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_text(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


FORMATS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = dict(
    zip(ENDINGS, (_jsonl, _json, _parquet, _csv), strict=True)
)


def a_kind(value: Any) -> str:
    """Return the kind of a value with its article: `an object`, `null`."""
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

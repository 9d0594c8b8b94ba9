"""Files of reference vectors, read and checked before any of them is run.

A file is a JSON list of cases (`case`, `kind`, `name`, `params`, `inputs`, `expect`). Tensors over
tokens are [sequence][token], padded with mask 0, tensors over sequences [sequence]. `dtype` of a
case is the precision of its expected numbers; without it, float32 is assumed, which has wider
tolerances.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import UserError, shipped

KEYS = {"case": str, "kind": str, "name": str, "params": dict, "inputs": dict, "expect": dict}
DTYPES = ("float32", "float64")

Numbers = NDArray[np.float64]


class Malformed(ValueError):
    """Content that does not describe a case; `read_cases` adds the file and the case."""


@dataclass(frozen=True, eq=False)
class Case:
    """inputs, expect: [S, T] for tensors over tokens, [S] for tensors over sequences, [] for
    numbers."""

    case: str
    kind: str
    name: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Numbers]
    expect: Mapping[str, Numbers]
    dtype: str
    """Precision of the computation that `expect` comes from: float32 or float64."""


def read_cases(file: Path) -> list[Case]:
    """The cases of `file`, in order. Raises UserError, naming file and case."""

    def refuse(what: str) -> NoReturn:
        raise UserError.of(
            str(file), what, f"see {shipped('tests/data/golden/README.md')} for the format"
        )

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise UserError.of(str(file), what, "name a JSON file of cases") from error
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON: {error}")
    if not isinstance(content, list) or not content:
        refuse("expected a JSON list of at least one case")
    cases: dict[str, Case] = {}
    for number, entry in enumerate(content):
        if not isinstance(entry, dict):
            refuse(f"entry {number}: expected an object with keys {', '.join(KEYS)}")
        label = (
            f"case {entry['case']!r}" if isinstance(entry.get("case"), str) else f"entry {number}"
        )
        for key, kind in KEYS.items():
            if key not in entry:
                refuse(f"{label}: has no `{key}`")
            if not isinstance(entry[key], kind):
                refuse(f"{label}: `{key}` is {type(entry[key]).__name__}, expected {kind.__name__}")
        dtype = entry.get("dtype", DTYPES[0])
        if dtype not in DTYPES:
            refuse(f"{label}: `dtype` is {dtype!r}, expected one of {', '.join(DTYPES)}")
        if entry["case"] in cases:
            refuse(f"{label}: is there twice; the names of a file's cases are unique")
        try:
            inputs, expect = (
                {key: _numbers(key, value) for key, value in entry[part].items()}
                for part in ("inputs", "expect")
            )
            _check_shapes(inputs, expect)
        except Malformed as error:
            refuse(f"{label}: {error}")
        cases[entry["case"]] = Case(
            entry["case"], entry["kind"], entry["name"], entry["params"], inputs, expect, dtype
        )
    return list(cases.values())


def _numbers(key: str, value: Any) -> Numbers:
    rows = value if isinstance(value, list) else [value]
    if len({len(row) if isinstance(row, list) else -1 for row in rows}) > 1:
        raise Malformed(f"`{key}`: its rows are not of one length")
    flat = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    # Only nan differs from itself; math.isnan would refuse large integers in its own way.
    if not all(isinstance(number, (int, float)) and number == number for number in flat):
        raise Malformed(f"`{key}`: expected numbers: [sequence][token], [sequence] or one")
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        raise Malformed(f"`{key}`: holds a number beyond float64") from None


def _check_shapes(inputs: Mapping[str, Numbers], expect: Mapping[str, Numbers]) -> None:
    if not expect:
        raise Malformed("`expect` is empty: there is nothing to compare")
    for dimensions in (1, 2):
        shapes = {
            key: values.shape[:dimensions]
            for key, values in [*inputs.items(), *expect.items()]
            if values.ndim >= dimensions
        }
        if len(set(shapes.values())) > 1:
            raise Malformed(
                "shapes differ: "
                + ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
            )
    mask = inputs.get("mask")
    if mask is not None and (mask.ndim != 2 or not np.isin(mask, (0.0, 1.0)).all()):
        raise Malformed("`mask`: expected [sequence][token] of 0 and 1")

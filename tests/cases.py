"""Case tables that are loops: one test id for a whole table, whose failure names the case.

A test id costs pytest and xdist about 6 ms in each of a run's processes, more than most cases take.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import THOROUGH

PARAMETERS = type(pytest.param())
"""Class of the result of `pytest.param`."""


@contextmanager
def case(name: object) -> Iterator[None]:
    """Add `name` to every exception of the block."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"case: {name}")
        raise


def same_numbers() -> None:
    """Make draws without a separate generator independent of the tests and cases before."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)
        # Before CUDA is in use, torch.manual_seed would keep every seed with its traceback.
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


def looped(
    names: str | Iterable[str],
    table: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Callable[[Any], str] | Iterable[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like `pytest.mark.parametrize` that makes one test id of all cases.

    Each case has a `tmp_path`, a `monkeypatch` and an empty `capsys` and `caplog` of its own; other
    fixtures are shared. A `table` that is expensive may be a function, which is not called at
    collection. Under `@given` this decorator comes last, and each example runs on all cases.
    """
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        rows = table if callable(table) else [*table]
        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in split]
        signature = signature.replace(parameters=kept)

        def loop(*arguments: Any, **named: Any) -> None:
            fixtures = signature.bind(*arguments, **named).arguments
            skipped: dict[str, BaseException] = {}
            done = 0
            for number, (label, values) in enumerate(_rows(split, rows, ids)):
                same_numbers()
                with ExitStack() as own:
                    try:
                        with case(label):
                            test(**values, **_own(fixtures, number, own))
                        done += 1
                    except pytest.skip.Exception as skip:
                        skipped[label] = skip
            # The other cases count although one could not run here.
            if skipped and not done:
                raise next(iter(skipped.values()))
            assert done, "no case of the table ran"
            # pytest lists warnings at its end, so that no skipped case goes unnoticed.
            for label, skip in skipped.items():
                warnings.warn(f"{test.__name__}: skipped case {label}: {skip}", stacklevel=2)

        loop.__name__, loop.__qualname__ = test.__name__, test.__qualname__
        loop.__module__, loop.__doc__ = test.__module__, test.__doc__
        loop.__dict__.update(test.__dict__)  # marks
        loop.__signature__ = signature  # type: ignore[attr-defined]
        return loop

    return decorate


def _rows(
    names: list[str],
    table: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Callable[[Any], str] | Iterable[str] | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case's label and its values by name."""
    rows = [*(table() if callable(table) else table)]
    labels = [None] * len(rows) if ids is None or callable(ids) else [*ids]
    for row, given in zip(rows, labels, strict=True):
        label = given
        if isinstance(row, PARAMETERS):
            if not THOROUGH and any(mark.name == "thorough" for mark in row.marks):
                continue
            label = str(row.id) if row.id else label
            row = row.values if len(names) > 1 else row.values[0]
        values = dict(zip(names, row if len(names) > 1 else (row,), strict=True))
        if label is None:
            parts = [str(ids(one)) if callable(ids) else repr(one) for one in values.values()]
            label = "-".join(part for part in parts if part)
        yield label[:300], values


def _own(fixtures: Mapping[str, Any], number: int, own: ExitStack) -> dict[str, Any]:
    """Return what the case `number` gets of the test's fixtures."""
    given = dict(fixtures)
    if isinstance(folder := given.get("tmp_path"), Path):
        given["tmp_path"] = folder / f"case{number}"
        given["tmp_path"].mkdir()
    if (patch := given.get("monkeypatch")) is not None:
        given["monkeypatch"] = own.enter_context(patch.context())
    if (captured := given.get("capsys")) is not None:
        captured.readouterr()
    if (logged := given.get("caplog")) is not None:
        logged.clear()
    return given

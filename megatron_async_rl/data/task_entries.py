"""Generators and scorers of reasoning-gym's tasks, and entries as rows store them."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime
from types import SimpleNamespace
from typing import Any

PACKAGE = "reasoning_gym"
COMPOSITE = "composite"
"""Task that mixes other tasks, which its option `datasets` names."""
LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose scorers evaluate a response as a Python list."""
TIMES = "time_intervals"
"""Task that places times without a date on the present day, which its rows contain."""
DAY = datetime(2000, 1, 1)
"""Day on which this package places them, so that rows do not depend on when they are generated."""


class _Date(date):
    @classmethod
    def today(cls) -> _Date:
        return cls(DAY.year, DAY.month, DAY.day)


def dataset_of(task: str, options: Mapping[str, Any], **fixed: Any) -> Any:
    """Return the generator of a task. Raises what the generator raises for its options."""
    import reasoning_gym
    from reasoning_gym import factory
    from reasoning_gym.composite import DatasetSpec

    # `eval` would run any code that a model writes.
    for one in LISTS:
        vars(sys.modules[factory.DATASETS[one][0].__module__])["eval"] = ast.literal_eval
    times = vars(sys.modules[factory.DATASETS[TIMES][0].__module__])
    if times["date"] is not _Date:
        parse = functools.partial(times["parser"].parse, default=DAY)
        times.update(date=_Date, parser=SimpleNamespace(parse=parse))
    given = dict(options)
    if task == COMPOSITE:
        given["datasets"] = [
            DatasetSpec(**{"weight": 1.0, "config": {}, **one})
            for one in given.get("datasets") or ()
        ]
    return reasoning_gym.create_dataset(task, **given, **fixed)


@functools.lru_cache(maxsize=256)
def scorer_of(task: str, options: str) -> Callable[..., float]:
    """Return the scorer of a task, `score(answer, entry)`. options: JSON of the generator's
    options, on which some scorers depend. Raises what the generator raises for them."""
    score: Callable[..., float] = dataset_of(task, json.loads(options)).score_answer
    return score


def entry_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry for its scorer from the column `entry` of a row: the generator's entry
    without the question, and `task`, `options` and `tuples`."""
    entry = dict(stored)
    if entry.get("tuples"):
        # Some scorers compare with tuples, which JSON stores as lists.
        entry["metadata"] = _with_tuples(entry["metadata"])
    return entry


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_tuples(one) for name, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value

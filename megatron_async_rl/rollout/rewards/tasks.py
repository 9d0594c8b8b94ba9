"""Reward of reasoning-gym: the task's own scorer. data/generated.py makes its rows.

The scorer gets the response, or the part of it between tags, and the row's entry. Most scorers
return 1 for the answer and less for a longer text that contains it.

Invariant: no response is run as code. SymPy evaluates formulas with Python's `eval`, so a response
that is more than a formula never reaches the scorers that use it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_async_rl.data.task_entries import PACKAGE, entry_of, scorer_of
from megatron_async_rl.rollout.rewards.registry import BuiltInReward, ColumnError, RewardError
from megatron_async_rl.samples.types import Prompt

_log = logging.getLogger(__name__)
MADE_BY = "use the rows of `data.train: reasoning_gym:TASK`, which have this column"
_TAG = re.compile(r"[A-Za-z][\w-]*")
FORMULAS = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
"""Tasks whose scorers evaluate a response with SymPy."""
_FUNCTION = "|".join(
    (
        *(f"a?{one}h?" for one in ("sin", "cos", "tan", "cot", "sec", "csc")),
        *(
            "exp",
            "log",
            "ln",
            "sqrt",
            "cbrt",
            "Abs",
            "abs",
            "erf",
            "erfi",
            "Si",
            "Ci",
            "li",
            "Ei",
            "Integral",
        ),
    )
)
_MORE_THAN_A_FORMULA = re.compile(
    # Characters of text, lists, keyword arguments and comments; attributes; calls of results, and
    # of names that are not those of functions.
    rf"[^\x00-\x7f]|[\"'\[\]{{}}\\#:;@`_]|\.\s*[A-Za-z]|\)\s*\("
    rf"|(?<![A-Za-z0-9])(?!(?:{_FUNCTION})\s*\()[A-Za-z][A-Za-z0-9]*\s*\("
)
_reported: set[str] = set()
"""Tasks whose scorer has raised in this process."""


def reasoning_gym(
    prompt: Prompt, response: str, /, *, tag: str | None = None, partial_credit: bool = True
) -> float:
    """Return the task's score of the response. tag: null for the whole response; `answer` for the
    text in the last `<answer>...</answer>`, without which the score is 0. partial_credit: False
    turns every score below 1 into 0."""
    entry = _entry(prompt)
    score = _scorer(prompt, entry)
    answer = response.strip() if tag is None else _within(tag, response)
    if answer is None or (_evaluates(entry) and _MORE_THAN_A_FORMULA.search(answer)):
        return 0.0
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some scorers print every wrong move
            value = float(score(answer=answer, entry=entry))
    # A response may be anything, and not every scorer expects that. Such a response is wrong.
    except Exception as error:  # noqa: BLE001 - logged, and scored
        task = str(entry["task"])
        if task not in _reported:
            _reported.add(task)
            _log.warning(
                "the scorer of %s raised %r for the response %.80r, which scores 0; later errors of"
                " this task are not logged",
                task,
                error,
                answer,
            )
        return 0.0
    return value if partial_credit or value >= 1.0 else 0.0


def _evaluates(entry: Mapping[str, Any]) -> bool:
    """Return True if the scorer of an entry evaluates formulas."""
    # An entry of `composite` is scored by another task.
    return not FORMULAS.isdisjoint((entry["task"], entry["metadata"].get("source_dataset")))


def _within(tag: str, response: str) -> str | None:
    """Return the text between the last pair of tags; null without a pair."""
    _, opened, rest = response.rpartition(f"<{tag}>")
    answer, closed, _ = rest.partition(f"</{tag}>")
    return answer.strip() if opened and closed else None


def _entry(prompt: Prompt) -> dict[str, Any]:
    """Return the entry of a row. Raises ColumnError for a row of other data."""
    stored = prompt.fields.get("entry")
    if not isinstance(stored, Mapping) or not {"task", "options", "metadata"} <= stored.keys():
        what = "is not an entry of reasoning-gym"
        raise ColumnError(f"prompt {prompt.id}", "entry", what, MADE_BY)
    return entry_of(stored)


def _scorer(prompt: Prompt, entry: Mapping[str, Any]) -> Callable[..., float]:
    """Return the scorer of an entry. Raises ColumnError for an unknown task or options."""
    try:
        return scorer_of(str(entry["task"]), json.dumps(entry["options"], sort_keys=True))
    except Exception as error:
        what = f"has no scorer: {error}"
        raise ColumnError(f"prompt {prompt.id}", "entry", what, MADE_BY) from error


def _check_settings(*, tag: str | None = None, key: str, **_: object) -> None:
    if tag is not None and not _TAG.fullmatch(tag):
        what = f"{tag!r} is not the name of a tag"
        raise RewardError(f"{key}.tag", what, "write a name without brackets, such as answer")


def _validate(prompt: Prompt, **_: object) -> None:
    """Raise ColumnError for a row whose entry or task the scorer cannot use."""
    _scorer(prompt, _entry(prompt))


REWARDS = {
    "reasoning_gym": BuiltInReward(
        function=reasoning_gym,
        required_fields=("entry",),
        check=_check_settings,
        validate=_validate,
        requires=PACKAGE,
        # Some scorers search or compute with the response's formulas.
        cpu_limit_s=10.0,
        memory_mib=4096,
    ),
}

"""The `math` reward: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify evaluates what it reads, so "9 - 7" equals 2, and a policy can earn the reward by
copying the question. `form: final` (the default) therefore also requires an answer in its final
form (final_form.py).

A dollar sign is a delimiter of LaTeX only around a formula; `\\$5` and `$5` are amounts of money.

math-verify has no time limit of its own here. A response such as 9^9^9^9 keeps the interpreter
inside one multiplication, so the limits on time and memory are those of the process that calls
this reward: a response that exceeds one is wrong.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Literal

from megatron_async_rl.rollout.rewards.final_form import is_final
from megatron_async_rl.rollout.rewards.formula import symbols
from megatron_async_rl.rollout.rewards.formula_parser import read
from megatron_async_rl.rollout.rewards.formula_tokens import tokens
from megatron_async_rl.rollout.rewards.math_answer import (
    MAX_ANSWER,
    NUMBER,
    TEXT_COMMAND,
    boxed_in,
    read_answer,
)
from megatron_async_rl.rollout.rewards.registry import (
    BuiltInReward,
    ColumnError,
    RewardError,
    text_field,
)
from megatron_async_rl.samples.types import Prompt

Form = Literal["final", "any"]

_LITERAL = re.compile(
    rf"(?:{NUMBER})\s*(?:\\?%)?|-?\d*\s*\\[dt]?frac\{{-?\d+\}}\{{0*[1-9]\d*\}}|[-+]?\d+/0*[1-9]\d*"
)
"""Answers that math-verify always reads, and equal only to themselves."""
_PROSE = re.compile(r"[A-Za-z]{2,}[,;:]?\s+(?:[A-Za-z]+[,;:]?\s+)*[A-Za-z]{2,}")

_BOLD = re.compile(r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])")
_TAG = re.compile(r"</?answer>")
"""Tags around the answer, as some prompts request."""
_LAST_LETTERS = re.compile(
    rf"({TEXT_COMMAND.pattern})|(?<=[\d}}\s])([A-Za-z]+)(?=\s*(?:\$|\\\)|\\\]|\}}))"
)
"""Letters at the end of a formula; math-verify takes some of them for units; or text, which is kept
as it is."""


def math(prompt: Prompt, response: str, /, *, form: Form = "final") -> float:
    """`form`: `any` accepts every expression that evaluates to the answer, also a copied
    question."""
    from math_verify import verify

    _quiet()
    answer, gold = _gold_of(prompt)
    response = re.sub(r"[ \t]{2,}", " ", response)
    # math-verify takes time that grows with the square of a box's length: seconds for 2,000
    # characters.
    if len(boxed_in(response) or "") > MAX_ANSWER:
        return 0.0
    try:
        found = _read_as_latex(_prepared(response, answer))
        if not found or not verify(gold, found, timeout_seconds=None):
            return 0.0
        return 1.0 if form == "any" or _has_final_form(found, answer, prompt.text) else 0.0
    except (MemoryError, RecursionError, OverflowError):
        return 0.0


def _has_final_form(found: list[Any], answer: str, question: str) -> bool:
    """`found` as math-verify reads a response: an expression, and its text."""
    text = next((one for one in reversed(found) if isinstance(one, str)), "")
    if "%" not in text and _is_percentage(found[0]):
        text += "\\%"  # which math-verify leaves out of the text
    written, gold = read(text), read(answer)
    if written is None or gold is None:
        literal = written is not None and written.kind == "number"
        return literal or tokens(text) == tokens(answer)
    return is_final(written, gold, question)


def _is_percentage(expression: Any) -> bool:
    from math_verify.grader import get_pct_val

    return get_pct_val(expression) is not None


def _without_amounts(response: str) -> str:
    """`response` without the dollar signs that do not delimit a formula, and with ASCII minuses."""
    text = re.sub(r"[−–](?=\d)", "-", response.replace(r"\$", ""))
    pieces: list[str] = []
    rest = text
    while (found := re.search(r"\$\$?", rest)) is not None:
        mark = found.group()
        end = rest.find(mark, found.end())
        inside = rest[found.end() : end] if end >= 0 else ""
        if end < 0 or (mark == "$" and _PROSE.search(TEXT_COMMAND.sub(" ", inside))):
            # No formula: the sign stands before an amount.
            pieces.append(rest[: found.start()])
            rest = rest[found.end() :]
        else:
            pieces.append(rest[: end + len(mark)])
            rest = rest[end + len(mark) :]
    joined = "".join([*pieces, rest])
    return re.sub(r"(?<=\d)(?:,\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))", ",", joined)


def _with_last_letters(text: str) -> str:
    return _LAST_LETTERS.sub(lambda found: found[1] or rf"{found[2]}\,", text)


def _prepared(response: str, answer: str) -> str:
    """A response in which math-verify finds what is meant: an equation that is all of it and the
    last boxed answer are read as an answer of a data set, and no variable at the end is taken for a
    unit, as `c` in 2c would be."""
    text = _BOLD.sub(r"\1", _without_amounts(response)).replace(r"\varnothing", r"\emptyset")
    whole = read(text.strip()) if len(text) <= MAX_ANSWER else None
    if whole is not None and whole.kind == "relation":
        text = rf"\boxed{{{text.strip().strip('$')}}}"
    if (boxed := boxed_in(text)) is not None:
        try:
            plain = read_answer(boxed)
        except ValueError:
            plain = boxed
        before, _, after = text.rpartition(rf"\boxed{{{boxed}}}")
        text = rf"{before}\boxed{{{plain}}}{after}"
    text = _TAG.sub(r" ", text)
    written = read(answer)
    if written is not None and symbols(written):
        text = _with_last_letters(text)
    return text


@functools.lru_cache(maxsize=1)
def _extraction() -> tuple[Any, ...]:
    """Return the forms that math-verify looks for. Its `nits` replace 0.5 by a fraction, which is
    another form."""
    from dataclasses import replace

    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig()
    config = replace(latex.normalization_config, nits=False)
    return replace(latex, normalization_config=config), ExprExtractionConfig()


def _read_as_latex(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, extraction_config=_extraction(), parsing_timeout=None))


@functools.lru_cache(maxsize=1024)
def _parsed(latex: str) -> tuple[Any, ...]:
    return tuple(_read_as_latex(_with_last_letters(f"${latex}$")))


def _gold_of(prompt: Prompt) -> tuple[str, list[Any]]:
    """LaTeX of the prompt's `answer`, and what math-verify reads in it. Raises RewardError."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    gold = list(_parsed(answer))
    if not gold or any(str(one) in ("zoo", "nan") for one in gold):
        raise _unreadable(prompt, given, "is nothing that math-verify can read")
    return answer, gold


def _unreadable(prompt: Prompt, given: str, why: str) -> RewardError:
    return ColumnError(
        f"prompt {prompt.id}",
        "answer",
        f"{given[:120]!r} {why}",
        "write the final answer alone: a number, LaTeX, or text that ends in `#### ANSWER`",
    )


def _quiet() -> None:
    # math-verify warns that nothing limits its time; the process does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _validate(prompt: Prompt, *, form: Form = "final") -> None:
    """An answer must earn the reward itself, boxed as it is read and as the row has it. A number
    does: most rows have one, and data sets are large."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    if _LITERAL.fullmatch(answer):
        return
    _gold_of(prompt)
    alone = "####" not in given and boxed_in(given) is None
    for response in (rf"\boxed{{{answer}}}", rf"\boxed{{{given}}}" if alone else given):
        if math(prompt, response, form=form) != 1.0:
            raise _unreadable(prompt, given, f"does not earn the reward as {response[-200:]!r}")


REWARDS = {
    "math": BuiltInReward(
        function=math,
        required_fields=("answer",),
        validate=_validate,
        requires="math_verify",
        cpu_limit_s=5.0,
        memory_mib=4096,
    ),
}

"""The `math` reward: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify evaluates the expressions that it parses, so "9 - 7" equals 2, and a policy could earn
the reward by copying the question. `form: final` (the default) therefore also requires that the
answer has its final form (final_form.py).

A dollar sign delimits LaTeX only around a formula; `\\$5` and `$5` are amounts of money.

The time limit of math-verify is off, because it cannot interrupt a single multiplication, such as
that of 9^9^9^9. Instead, the process that calls this reward limits time and memory. A response that
exceeds a limit is wrong.
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
"""Answers that math-verify always parses, and that equal only themselves."""
_PROSE = re.compile(r"[A-Za-z]{2,}[,;:]?\s+(?:[A-Za-z]+[,;:]?\s+)*[A-Za-z]{2,}")
"""At least two words: text that is not a formula."""
_BOLD = re.compile(r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])")
_TAG = re.compile(r"</?answer>")
"""Tags that some prompts request around the answer."""
_LAST_LETTERS = re.compile(
    rf"({TEXT_COMMAND.pattern})|(?<=[\d}}\s])([A-Za-z]+)(?=\s*(?:\$|\\\)|\\\]|\}}))"
)
"""A text command, which stays unchanged, or letters at the end of a formula, which math-verify may
treat as a unit."""


def math(prompt: Prompt, response: str, /, *, form: Form = "final") -> float:
    """Return 1.0 if the response has the prompt's answer, else 0.0. `form`: `any` accepts every
    expression with the value of the answer, including a copy of the question."""
    from math_verify import verify

    _quiet()
    answer, gold = _gold_of(prompt)
    response = re.sub(r"[ \t]{2,}", " ", response)
    # math-verify takes quadratic time in the length of a box: seconds for 2,000 characters.
    if len(boxed_in(response) or "") > MAX_ANSWER:
        return 0.0
    try:
        parsed = _parse(_prepared(response, answer))
        # No timeout: it uses a signal, which cannot interrupt a multiplication in C.
        if not parsed or not verify(gold, parsed, timeout_seconds=None):
            return 0.0
        return 1.0 if form == "any" or _has_final_form(parsed, answer, prompt.text) else 0.0
    # A response that is too large to evaluate is wrong. It must not end the process.
    except (MemoryError, RecursionError, OverflowError):
        return 0.0


def _has_final_form(parsed: list[Any], answer: str, question: str) -> bool:
    """Return True for a final form. `parsed`: expression and text that math-verify returned."""
    text = next((one for one in reversed(parsed) if isinstance(one, str)), "")
    # math-verify omits the percent sign from the text.
    if "%" not in text and _is_percentage(parsed[0]):
        text += "\\%"
    written, gold = read(text), read(answer)
    if written is None or gold is None:
        literal = written is not None and written.kind == "number"
        return literal or tokens(text) == tokens(answer)
    return is_final(written, gold, question)


def _is_percentage(expression: Any) -> bool:
    from math_verify.grader import get_pct_val

    return get_pct_val(expression) is not None


def _without_amounts(response: str) -> str:
    """Return the response with ASCII minus signs, with dollar signs only around formulas, and with
    plain thousands separators."""
    text = re.sub(r"[−–](?=\d)", "-", response.replace(r"\$", ""))
    pieces: list[str] = []
    rest = text
    while (opening := re.search(r"\$\$?", rest)) is not None:
        mark = opening.group()
        end = rest.find(mark, opening.end())
        inside = rest[opening.end() : end] if end >= 0 else ""
        if end < 0 or (mark == "$" and _PROSE.search(TEXT_COMMAND.sub(" ", inside))):
            # Prose inside, or no second sign: the dollar sign belongs to an amount.
            pieces.append(rest[: opening.start()])
            rest = rest[opening.end() :]
        else:
            pieces.append(rest[: end + len(mark)])
            rest = rest[end + len(mark) :]
    joined = "".join([*pieces, rest])
    return re.sub(r"(?<=\d)(?:,\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))", ",", joined)


def _with_last_letters(text: str) -> str:
    """Return the text with a space after final letters, so that math-verify does not treat them as
    a unit."""
    return _LAST_LETTERS.sub(lambda match: match[1] or rf"{match[2]}\,", text)


def _prepared(response: str, answer: str) -> str:
    """Return the response in a form that math-verify parses correctly: an equation gets a box, the
    content of the last box is normalized like an answer of a data set, and a final variable, such
    as `c` in 2c, does not look like a unit."""
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
    """Return the settings for math-verify: it extracts LaTeX and plain expressions."""
    from dataclasses import replace

    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig()
    # Without `nits`, which replaces .5 by a fraction and so changes the form.
    config = replace(latex.normalization_config, nits=False)
    return replace(latex, normalization_config=config), ExprExtractionConfig()


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, extraction_config=_extraction(), parsing_timeout=None))


@functools.lru_cache(maxsize=1024)
def _parse_gold(latex: str) -> tuple[Any, ...]:
    return tuple(_parse(_with_last_letters(f"${latex}$")))


def _gold_of(prompt: Prompt) -> tuple[str, list[Any]]:
    """Return the LaTeX of the prompt's `answer`, and the expressions that math-verify parses from
    it. Raises ColumnError."""
    written = text_field(prompt, "answer")
    try:
        answer = read_answer(written)
    except ValueError as error:
        raise _unreadable(prompt, written, str(error)) from error
    gold = list(_parse_gold(answer))
    if not gold or any(str(one) in ("zoo", "nan") for one in gold):
        raise _unreadable(prompt, written, "cannot be parsed by math-verify")
    return answer, gold


def _unreadable(prompt: Prompt, written: str, why: str) -> RewardError:
    return ColumnError(
        f"prompt {prompt.id}",
        "answer",
        f"{written[:120]!r} {why}",
        "write the final answer alone: a number, LaTeX, or text that ends in `#### ANSWER`",
    )


def _quiet() -> None:
    # math-verify would warn about the missing time limit, which the process has instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _validate(prompt: Prompt, *, form: Form = "final") -> None:
    """Raise ColumnError for an answer that does not earn the reward itself, both in its normalized
    form and as written in the row."""
    written = text_field(prompt, "answer")
    try:
        answer = read_answer(written)
    except ValueError as error:
        raise _unreadable(prompt, written, str(error)) from error
    # Plain numbers, the answers of most rows, always earn it. This saves time for large data sets.
    if _LITERAL.fullmatch(answer):
        return
    _gold_of(prompt)
    alone = "####" not in written and boxed_in(written) is None
    for response in (rf"\boxed{{{answer}}}", rf"\boxed{{{written}}}" if alone else written):
        if math(prompt, response, form=form) != 1.0:
            raise _unreadable(prompt, written, f"does not earn the reward as {response[-200:]!r}")


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

"""The `math` reward: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify evaluates what it reads, so "9 - 7" equals 2, and a policy can earn the reward by
copying the question. `form: final` (the default) therefore also requires an answer in its final
form (final_form.py).

A dollar sign is a delimiter of LaTeX only around a formula; `\\$5` and `$5` are amounts of money.

math-verify's own time limit is off, since it needs the interpreter: 9^9^9^9 keeps it inside one
multiplication. The process that calls this reward limits time and memory instead; a response that
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
"""Answers that math-verify always reads, and equal only to themselves."""
_PROSE = re.compile(r"[A-Za-z]{2,}[,;:]?\s+(?:[A-Za-z]+[,;:]?\s+)*[A-Za-z]{2,}")

_BOLD = re.compile(r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])")
_TAG = re.compile(r"</?answer>")
"""Tags around the answer that some prompts request."""
_LAST_LETTERS = re.compile(
    rf"({TEXT_COMMAND.pattern})|(?<=[\d}}\s])([A-Za-z]+)(?=\s*(?:\$|\\\)|\\\]|\}}))"
)
"""Text, which is kept unchanged, or letters at the end of a formula, which math-verify may take for
a unit."""


def math(prompt: Prompt, response: str, /, *, form: Form = "final") -> float:
    """Return 1.0 if the response has the prompt's answer. `form`: `any` accepts every expression
    with the value of the answer, also a copied question."""
    from math_verify import verify

    _quiet()
    answer, gold = _gold_of(prompt)
    response = re.sub(r"[ \t]{2,}", " ", response)
    # math-verify takes time quadratic in the length of a box: seconds for 2,000 characters.
    if len(boxed_in(response) or "") > MAX_ANSWER:
        return 0.0
    try:
        found = _read_as_latex(_prepared(response, answer))
        # Its timeout uses a signal, which cannot interrupt a multiplication in C.
        if not found or not verify(gold, found, timeout_seconds=None):
            return 0.0
        return 1.0 if form == "any" or _has_final_form(found, answer, prompt.text) else 0.0
    # The response is too large to evaluate, so it is wrong; it must not fail the process.
    except (MemoryError, RecursionError, OverflowError):
        return 0.0


def _has_final_form(found: list[Any], answer: str, question: str) -> bool:
    """Return True for a final form. `found`: expression and text that math-verify read."""
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
    """Return the response with ASCII minuses, and with dollar signs only around formulas."""
    text = re.sub(r"[−–](?=\d)", "-", response.replace(r"\$", ""))
    pieces: list[str] = []
    rest = text
    while (found := re.search(r"\$\$?", rest)) is not None:
        mark = found.group()
        end = rest.find(mark, found.end())
        inside = rest[found.end() : end] if end >= 0 else ""
        if end < 0 or (mark == "$" and _PROSE.search(TEXT_COMMAND.sub(" ", inside))):
            # Prose, or no second sign: the dollar sign belongs to an amount.
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
    """Return the response in a form that math-verify reads correctly: an equation is boxed, the
    last box is read like an answer of a data set, and a final variable, such as `c` in 2c, does not
    look like a unit."""
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
    """Return the forms that math-verify searches for."""
    from dataclasses import replace

    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig()
    # `nits` replaces .5 by a fraction, which would change the form.
    config = replace(latex.normalization_config, nits=False)
    return replace(latex, normalization_config=config), ExprExtractionConfig()


def _read_as_latex(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, extraction_config=_extraction(), parsing_timeout=None))


@functools.lru_cache(maxsize=1024)
def _parsed(latex: str) -> tuple[Any, ...]:
    return tuple(_read_as_latex(_with_last_letters(f"${latex}$")))


def _gold_of(prompt: Prompt) -> tuple[str, list[Any]]:
    """Return the LaTeX of the prompt's `answer`, and the expressions that math-verify reads in it.
    Raises RewardError."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    gold = list(_parsed(answer))
    if not gold or any(str(one) in ("zoo", "nan") for one in gold):
        raise _unreadable(prompt, given, "is not readable by math-verify")
    return answer, gold


def _unreadable(prompt: Prompt, given: str, why: str) -> RewardError:
    return ColumnError(
        f"prompt {prompt.id}",
        "answer",
        f"{given[:120]!r} {why}",
        "write the final answer alone: a number, LaTeX, or text that ends in `#### ANSWER`",
    )


def _quiet() -> None:
    # It warns that its time limit is off; the process has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _validate(prompt: Prompt, *, form: Form = "final") -> None:
    """Raise RewardError for an answer that does not earn the reward itself, both as read and as
    written in the row."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    # A plain number always does. Most rows have one, and data sets are large.
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

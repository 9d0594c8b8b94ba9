"""Rewards that compare a response with fields of its prompt: an exact answer, or an expression of
given numbers. mathematics.py has the reward that parses formulas.

- `arithmetic`: 1 if the response without surrounding white space is the prompt's `answer`, else 0;
- `countdown`: 1 if the response is an expression that uses each of the prompt's `numbers` exactly
  once and equals `target`, else 0. Apart from white space, an expression consists of whole decimal
  numbers without sign and leading zeros, the binary operators + - * /, and parentheses;
- `environment`: 0, because the reward is the sum of the rewards that rollout.environment returns.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from megatron_async_rl.rollout.rewards.registry import (
    BuiltInReward,
    ColumnError,
    excerpt,
    text_field,
    whole_number,
)
from megatron_async_rl.samples.types import Prompt

MAX_CHARACTERS = 256
"""Maximum length of an expression, which also limits computation and nesting."""
MAX_DIGITS = 9
"""Maximum digits of one number, which limits computation, too."""
_TOKEN = re.compile(rf"0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}}|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def environment(prompt: Prompt, response: str, /) -> float:
    return 0.0


def arithmetic(prompt: Prompt, response: str, /) -> float:
    return 1.0 if response.strip() == text_field(prompt, "answer") else 0.0


def countdown(prompt: Prompt, response: str, /) -> float:
    numbers, target = _task(prompt)
    result = evaluate(response)
    if result is None:
        return 0.0
    value, used = result
    return 1.0 if value == target and Counter(used) == Counter(numbers) else 0.0


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of an arithmetic expression, and its numbers in order; None if the text is
    not an expression or divides by zero."""
    # Two stacks (shunting-yard algorithm) instead of eval: a response must never run as code, and
    # fractions are exact, so that 1/3 * 3 equals 1.
    tokens = _tokens(text.strip())
    if not tokens:
        return None
    values: list[Fraction] = []
    operators: list[str] = []
    used: list[int] = []
    operand_next = True
    for token in tokens:
        if operand_next:
            if token == "(":
                operators.append(token)
                continue
            if not token.isdigit():
                return None
            values.append(Fraction(int(token)))
            used.append(int(token))
            operand_next = False
        elif token == ")":
            while operators and operators[-1] != "(":
                if not _apply(values, operators.pop()):
                    return None
            if not operators:
                return None
            operators.pop()
        elif token in _PRECEDENCE:
            while (
                operators
                and operators[-1] != "("
                # Operators of equal precedence associate to the left: 8 - 4 - 2 is (8 - 4) - 2.
                and _PRECEDENCE[operators[-1]] >= _PRECEDENCE[token]
            ):
                if not _apply(values, operators.pop()):
                    return None
            operators.append(token)
            operand_next = True
        else:
            return None
    if operand_next:
        return None
    while operators:
        operator = operators.pop()
        if operator == "(" or not _apply(values, operator):
            return None
    return values[0], used


def _tokens(text: str) -> list[str] | None:
    if len(text) > MAX_CHARACTERS:
        return None
    tokens: list[str] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match.group())
        position = match.end()
        # Otherwise, 007 and numbers with too many digits would split into several numbers.
        if match.group().isdigit() and text[position : position + 1].isdigit():
            return None
    return tokens


def _apply(values: list[Fraction], operator: str) -> bool:
    right = values.pop()
    left = values.pop()
    if operator == "/":
        if right == 0:
            return False
        values.append(left / right)
    else:
        values.append(
            left + right if operator == "+" else left - right if operator == "-" else left * right
        )
    return True


def _task(prompt: Prompt) -> tuple[list[int], int]:
    """Return the prompt's numbers and target. 3.0 counts as 3, and both fields may be JSON text.
    Raises ColumnError."""
    where = f"prompt {prompt.id}"
    given, given_target = prompt.fields.get("numbers"), prompt.fields.get("target")
    parsed = _parsed(given)
    whole = [whole_number(one) for one in (parsed if isinstance(parsed, list) else [])]
    numbers = [number for number in whole if number is not None]
    if not numbers or len(numbers) < len(whole):
        fix = "write a list of whole numbers, such as [3, 5, 7]"
        raise ColumnError(where, "numbers", f"is {excerpt(given)}", fix)
    target = whole_number(_parsed(given_target))
    if target is None:
        raise ColumnError(where, "target", f"is {excerpt(given_target)}", "write a whole number")
    return numbers, target


def _parsed(value: object) -> object:
    """Return the value of JSON text. Any other value or text is returned unchanged."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _require_winnable(prompt: Prompt) -> None:
    """Raise ColumnError for a row that no response can solve. Only cheap conditions are checked, so
    a target that passes may still be impossible."""
    numbers, target = _task(prompt)
    where = f"prompt {prompt.id}"
    if (minimum := min(numbers)) < 0:
        what = f"has {excerpt(minimum)}, but an expression has no negative numbers"
        raise ColumnError(where, "numbers", what, "write numbers of at least 0, or remove the row")
    if max(numbers) >= 10**MAX_DIGITS:
        what = f"has a number of more than {MAX_DIGITS} digits, the limit of an expression"
        raise ColumnError(where, "numbers", what, "write smaller numbers, or remove the row")
    shortest = sum(len(str(number)) for number in numbers) + len(numbers) - 1
    if shortest > MAX_CHARACTERS:
        what = (
            f"has {len(numbers)} numbers, whose shortest expression has {shortest} characters; an"
            f" expression has at most {MAX_CHARACTERS}"
        )
        raise ColumnError(where, "numbers", what, "write fewer numbers, or remove the row")

    # For p/q and r/s, each operation returns a fraction whose numerator and denominator add up to
    # at most (p + q)(r + s).
    if abs(target) >= math.prod(number + 1 for number in numbers) or (
        len(numbers) <= 2 and target not in _results(numbers)
    ):
        what = f"is {excerpt(target)}, which no expression of {excerpt(numbers)} equals"
        raise ColumnError(where, "target", what, "correct the target, or remove the row")


def _results(numbers: Sequence[int]) -> set[Fraction]:
    """Return the values of all expressions of one or two numbers."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    pairs = (numbers, numbers[::-1])
    return {
        values[0]
        for left, right in pairs
        for operator in _PRECEDENCE
        if _apply(values := [Fraction(left), Fraction(right)], operator)
    }


REWARDS = {
    "environment": BuiltInReward(function=environment, inline=True),
    "arithmetic": BuiltInReward(
        function=arithmetic,
        required_fields=("answer",),
        validate=partial(text_field, name="answer"),
        inline=True,
    ),
    "countdown": BuiltInReward(
        function=countdown,
        required_fields=("numbers", "target"),
        validate=_require_winnable,
        inline=True,
    ),
}

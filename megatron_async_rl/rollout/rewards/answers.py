"""Rewards that compare a response with its prompt's fields: an exact answer, or an expression of
given numbers. mathematics.py has the reward that reads formulas.

- `arithmetic`: 1 if the response is the prompt's `answer`, white space around it aside, else 0;
- `countdown`: 1 if it is an expression that uses each of the prompt's `numbers` exactly once and
  equals `target`. White space around it aside, it must be nothing but the expression: whole decimal
  numbers, + - * / and parentheses. It is parsed, never evaluated as code, and computed in exact
  fractions;
- `environment`: 0; what rollout.environment gives each turn is all there is.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import partial

from megatron_async_rl.rollout.rewards.registry import (
    BuiltInReward,
    RewardError,
    text_field,
    whole_number,
)
from megatron_async_rl.samples.types import Prompt

MAX_CHARACTERS = 256
"""Longer responses are wrong; this also bounds the work and the nesting of one response."""
_TOKEN = re.compile(r"[0-9]{1,9}|[-+*/()]")
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
    """Value of an arithmetic expression and the numbers in it, in order; None if it is not one (or
    divides by zero)."""
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
    """The prompt's numbers and target; 3.0 is 3. Raises RewardError."""
    given, target = prompt.fields.get("numbers"), whole_number(prompt.fields.get("target"))
    numbers = [whole_number(one) for one in given] if isinstance(given, list) else []
    if not numbers or None in numbers:
        raise RewardError(
            f"prompt {prompt.id}",
            f"`numbers` is {given!r}",
            "give its row a list of whole numbers",
        )
    if target is None:
        raise RewardError(
            f"prompt {prompt.id}",
            f"`target` is {prompt.fields.get('target')!r}",
            "give its row a whole number",
        )
    return [number for number in numbers if number is not None], target


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
        validate=_task,
        inline=True,
    ),
}

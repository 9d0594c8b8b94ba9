"""Rewards that compare a response with what its prompt says: an exact answer, an expression of given
numbers, a value that math-verify finds.

- `arithmetic`: 1 if the response is the prompt's `answer`, white space around it aside, else 0;
- `countdown`: 1 if it is an expression that uses each of the prompt's `numbers` exactly once and
  equals `target`. White space around it aside, it must be nothing but the expression: whole decimal
  numbers, + - * / and parentheses. It is parsed, never evaluated as code, and computed in exact
  fractions;
- `math`: 1 if math-verify finds the prompt's `answer` in it. math-verify computes what it reads. A
  response such as 9^9^9^9 keeps the interpreter inside one multiplication, so the limits on time and
  memory are those of the process that calls it: a response that runs into one is wrong;
- `environment`: 0; what rollout.environment gives each turn is all there is.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from fractions import Fraction

from megatron_async_rl.rollout.rewards.registry import BuiltInReward, RewardError, text_field
from megatron_async_rl.samples.types import Prompt

MAX_CHARACTERS = 256
"""Longer responses are wrong; this also bounds the work and the nesting of one response."""
_TOKEN = re.compile(r"[0-9]{1,9}|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_MARKS = ("$", "\\boxed", "\\(", "\\[")


def environment(prompt: Prompt, response: str, /) -> float:
    return 0.0


def arithmetic(prompt: Prompt, response: str, /) -> float:
    return 1.0 if response.strip() == text_field(prompt, "answer") else 0.0


def math(prompt: Prompt, response: str, /) -> float:
    from math_verify import parse, verify

    # It warns that nothing limits its time; the process does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = text_field(prompt, "answer")
    marked = any(mark in answer for mark in _MARKS)
    gold = parse(answer if marked else f"${answer}$", parsing_timeout=None)
    if not gold:
        raise RewardError(
            f"prompt {prompt.id}",
            f"math-verify cannot read `answer` {answer!r}",
            "write it as LaTeX or a number",
        )

    try:
        found = parse(response, parsing_timeout=None)
        return 1.0 if verify(gold, found, timeout_seconds=None) else 0.0
    except (MemoryError, RecursionError, OverflowError):
        return 0.0


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
    numbers, target = prompt.fields.get("numbers"), prompt.fields.get("target")
    if (
        not isinstance(numbers, list)
        or not numbers
        or not all(type(number) is int for number in numbers)
    ):
        raise RewardError(
            f"prompt {prompt.id}",
            f"`numbers` is {numbers!r}",
            "give its JSONL line a list of whole numbers",
        )
    if type(target) is not int:
        raise RewardError(
            f"prompt {prompt.id}",
            f"`target` is {target!r}",
            "give its JSONL line a whole number",
        )
    return numbers, target


REWARDS = {
    "environment": BuiltInReward(function=environment, inline=True),
    "arithmetic": BuiltInReward(function=arithmetic, required_fields=("answer",), inline=True),
    "countdown": BuiltInReward(
        function=countdown, required_fields=("numbers", "target"), inline=True
    ),
    "math": BuiltInReward(
        function=math,
        required_fields=("answer",),
        requires="math_verify",
        cpu_limit_s=5.0,
        memory_mib=4096,
    ),
}

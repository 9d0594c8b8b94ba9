"""Mathematical answers: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify computes what it reads. A response such as 9^9^9^9 keeps the interpreter inside one
multiplication, so the limits on time and memory are those of the process that calls it: a response
that runs into one is wrong.
"""

from __future__ import annotations

from megatron_async_rl.rollout.rewards.registry import BuiltInReward, RewardError, text_field
from megatron_async_rl.samples.types import Prompt

_MARKS = ("$", "\\boxed", "\\(", "\\[")


def math(prompt: Prompt, response: str, /) -> float:
    from math_verify import parse, verify

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


REWARD = BuiltInReward(
    function=math,
    required_fields=("answer",),
    requires="math_verify",
    cpu_limit_s=5.0,
    memory_mib=4096,
)

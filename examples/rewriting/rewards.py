"""Reward of a rewrite, without a model: its consistency with the demonstration, and its difference
from the other rewrites of the same demonstration. alignment.py has the third part.

    reward = consistent * (alignment + 0.25 * diversity)          rewriter.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_async_rl.samples import Prompt

VALUES = {symbol: i % 10 for i, symbol in enumerate("0123456789abcdefghij")}


def values(text: str) -> list[int]:
    """The numbers that a text states, whether as digits or as the expert's letters."""
    return [VALUES[symbol] for symbol in text if symbol in VALUES]


def correct(prompt: Prompt, response: str) -> float:
    """1 where the last number stated is the row's `answer`, in whatever style it is written."""
    stated = values(response)
    return float(bool(stated) and stated[-1] == int(prompt.fields["answer"]))


def consistent(prompt: Prompt, response: str) -> float:
    """1 where the rewrite states the numbers of the row's `demonstration`, in their order."""
    return float(values(response) == values(prompt.fields["demonstration"]))


def diversity(prompt: Prompt, responses: Sequence[str]) -> list[float]:
    """Mean distance of each response, 0 to 1, from the others to `prompt`; 0 for one alone."""
    others = max(1, len(responses) - 1)
    return [sum(distance(one, other) for other in responses) / others for one in responses]


def distance(one: str, other: str) -> float:
    """1 - |A & B| / |A | B| of their pairs of neighbouring characters."""
    if one == other:
        return 0.0
    a, b = (set(pairwise(text)) for text in (one, other))
    return 1.0 - len(a & b) / len(a | b) if a | b else 1.0

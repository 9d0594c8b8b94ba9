"""Reward for questions whose answer is a name: the response has to end with it."""

from __future__ import annotations

from typing import Any


def score(prompt: Any, response: str) -> float:
    """Return 1 if the last word of the response, without punctuation, is the answer, and 0
    otherwise.

    A copy of a question that does not end with its answer earns nothing, and neither does a list of
    names that ends with another one.
    """
    *_, last = response.split() or [""]
    return float(last.strip(".,:;!?*\"'`()[]") == prompt.fields["answer"])

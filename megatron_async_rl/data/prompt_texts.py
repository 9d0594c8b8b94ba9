"""The text of a prompt that a response may copy, and the answer that its row expects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GOLD_KEYS = ("answer", "gold", "ground_truth", "solution", "target", "label", "expected")
MIN_PROMPT_TEXT = 4
"""Shortest piece of a prompt whose repetition means something, in characters."""
MAX_GOLD = 80
"""Longest gold answer that a response may be expected to state, in characters."""
MARKUP = re.compile(r"<\|[^|>]*\|>|</?\w+>")
ROLES = ("system", "user", "assistant", "tool")


def gold_answer(fields: Mapping[str, Any]) -> str:
    """Return the gold answer of a prompt's row as text; empty without one."""
    for key in GOLD_KEYS:
        value = fields.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            # GSM8K: the answer follows the last mark.
            gold = str(value).rpartition("####")[2].strip()
            # A program or an essay is a reference: a right answer need not have its words.
            return gold if len(gold) <= MAX_GOLD and "\n" not in gold else ""
    return ""


def questions(prompt: str) -> list[str]:
    """Return the lines of a prompt whose repetition means something: the last and the longest,
    without the markup and the roles of a chat template."""
    parts = [part.strip() for part in MARKUP.sub("\n", prompt).splitlines()]
    lines = [part for part in parts if len(part) >= MIN_PROMPT_TEXT and part not in ROLES]
    return list(dict.fromkeys((lines[-1], max(lines, key=len)))) if lines else []

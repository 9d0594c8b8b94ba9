"""Reward for questions whose answer is a name: the share of the response that is the name."""

from __future__ import annotations

import re
from typing import Any


def score(prompt: Any, response: str) -> float:
    """Return the length of the answer divided by that of the response, without surrounding white
    space, and 0 if the answer is not a word of the response.

    The name alone earns 1, a sentence with it about 0.15, and a copy of the prompt about 0.04.
    """
    answer, text = str(prompt.fields["answer"]), response.strip()
    if not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text):
        return 0.0
    return len(answer) / len(text)

"""What a reward is.

Invariants every reward keeps:
- it is called from worker threads, several at a time: no signals, no shared mutable state without a lock;
- whatever a response contains, it answers with a finite number; it raises only for what is wrong with the *prompt's* data.
"""

from __future__ import annotations

from typing import Protocol

from megatron_async_rl.samples.types import Prompt


class Reward(Protocol):
    def __call__(self, prompt: Prompt, response: str, /) -> float:
        """`response`: the sampled text without special tokens. Called as reward(prompt, response)."""
        ...


class RewardError(ValueError):
    """A reward cannot be loaded, or a prompt lacks what its reward reads. The message says what would be right."""


def text_field(prompt: Prompt, name: str) -> str:
    """`prompt.fields[name]` as stripped text; whole numbers are taken too. Raises RewardError naming prompt and key."""
    value = prompt.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise RewardError(f"prompt {prompt.id}: `{name}` is {value!r}; give its JSONL line a `{name}`: text or a whole number")
    return str(value).strip()

"""Canary prompts: the few prompts of the training data on which trainer and engines are compared.

Invariants:
- the choice depends only on the data and the settings, so two runs sample the same prompts;
- there are as many as requested, however few rows the data has: rows repeat under ids of their own;
- a lengthened prompt is its own row behind other rows, so it ends as the data's prompts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_async_rl.config.schema import NumericsConfig
from megatron_async_rl.samples.types import Prompt


def canary_prompts(prompts: Sequence[Prompt], settings: NumericsConfig) -> list[Prompt]:
    """Return `settings.prompts` prompts, evenly spaced in the data. Every second one has
    `settings.long_prompt` tokens, unless its own row is longer."""
    count = settings.prompts
    places = [index * len(prompts) // count for index in range(count)]
    return [
        replace(
            prompts[place],
            id=f"canary-{index}",
            token_ids=_lengthened(prompts, place, settings.long_prompt if index % 2 else 0),
        )
        for index, place in enumerate(places)
    ]


def _lengthened(prompts: Sequence[Prompt], place: int, length: int) -> tuple[int, ...]:
    """Return at least `length` tokens that end with the prompt at `place`; before it, those of the
    rows that precede it in the data."""
    ids = prompts[place].token_ids
    before = place
    while len(ids) < length:
        before = (before - 1) % len(prompts)
        # The oldest row is cut at its beginning, so that the length is exact.
        ids = (prompts[before].token_ids + ids)[-max(length, len(ids)) :]
    return ids

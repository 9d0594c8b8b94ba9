"""One group from its admission to its batch: who is still asked, what has come, how urgent it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_async_rl.samples.requests import Prefix, Request
from megatron_async_rl.samples.types import Prompt, Sample


@dataclass(eq=False)
class Admitted:
    """`finished`: its place in the order in which groups finished; null while it is running."""

    index: int
    prompt: Prompt
    version: int
    """That the engines held when it was admitted; with `follows`, when its cut responses' own group was."""
    deadline: int
    follows: bool
    """It continues responses that were cut from another group of the prompt."""
    open: dict[str, Request]
    """Requests neither answered nor cut, by id."""
    samples: list[Sample] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    finished: int | None = None
    dropped: bool = False

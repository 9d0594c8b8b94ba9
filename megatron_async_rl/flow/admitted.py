"""One group from its admission to its batch: who is still asked, what has come, how urgent it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_async_rl.samples.requests import Prefix, Request
from megatron_async_rl.samples.types import Group, Prompt, Sample


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

    def ask(self, count: int, prefixes: Sequence[Prefix]) -> list[Request]:
        """`count` responses, the first of which go on after `prefixes`."""
        continued = [*prefixes, *[None] * count][:count]
        requests = [Request(group=self.index, k=k, prompt=self.prompt, prefix=prefix) for k, prefix in enumerate(continued)]
        self.open.update((request.id, request) for request in requests)
        return requests

    def group(self) -> Group:
        """What has come of it, in the order in which it was asked."""
        samples = sorted(self.samples, key=lambda sample: int(sample.id.rpartition("-")[2]))
        return Group(index=self.index, prompt=self.prompt, samples=tuple(samples), admitted_version=self.version)

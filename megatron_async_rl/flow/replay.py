"""A store of responses that train again: the buffer of TBA (Trajectory Balance with Asynchrony, arXiv 2503.18929, section 3).

Invariants:
- per prompt, the newest `per_prompt` distinct responses are kept; two responses with the same tokens are one, the newer;
- what a step gets depends on the seed, the version and what is stored, on nothing else;
- a response that trains again has an id of its own in that batch: `<id>@<version>.<place>`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megatron_async_rl.config.selection import Replay
from megatron_async_rl.samples.types import Group, Prompt, Sample


class ReplayStore:
    """In host memory; `content` goes into checkpoints."""

    def __init__(self, settings: Replay, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._stored: dict[str, tuple[Prompt, OrderedDict[bytes, Sample]]] = {}

    def exchange(self, arrived: Sequence[Group], version: int, group_size: int) -> tuple[tuple[Group, ...], int]:
        """Stores `arrived`; returns what trains `version`, as many groups, and how many stored responses are among it.

        With probability `recent` it is `arrived`. Else: prompts drawn evenly, without repetition as far as there are enough, and
        `group_size` responses of each drawn with probability proportional to exp(inverse_temperature x reward), with repetition.
        """
        for group in arrived:
            self._store(group.prompt, group.samples)
        chance = np.random.default_rng([self._seed, version])
        if chance.random() < self._settings.recent or not self._stored:
            return tuple(arrived), 0
        ids = sorted(self._stored)
        chosen = chance.choice(len(ids), size=len(arrived), replace=len(ids) < len(arrived))
        groups = tuple(
            self._draw(ids[which], group.index, version, group_size, chance)
            for which, group in zip(chosen.tolist(), arrived, strict=True)
        )
        return groups, sum(len(group.samples) for group in groups)

    def content(self) -> tuple[tuple[Prompt, tuple[Sample, ...]], ...]:
        """Every prompt with its responses, oldest first."""
        return tuple((prompt, tuple(samples.values())) for prompt, samples in self._stored.values())

    def load(self, content: Iterable[tuple[Prompt, Iterable[Sample]]]) -> None:
        """Stores what `content` returned; of what these settings keep fewer of, the newest."""
        for prompt, samples in content:
            self._store(prompt, samples)

    def _store(self, prompt: Prompt, arrived: Iterable[Sample]) -> None:
        _, samples = self._stored.setdefault(prompt.id, (prompt, OrderedDict()))
        for sample in arrived:
            if sample.valid:
                key = sample.response_ids.tobytes()
                samples.pop(key, None)
                samples[key] = sample
        while len(samples) > self._settings.per_prompt:
            samples.popitem(last=False)
        if not samples:
            del self._stored[prompt.id]

    def _draw(self, prompt: str, index: int, version: int, count: int, chance: np.random.Generator) -> Group:
        asked, stored = self._stored[prompt]
        samples = list(stored.values())
        scores = self._settings.inverse_temperature * np.array([sample.reward for sample in samples])
        weights = np.exp(scores - scores.max())
        drawn = chance.choice(len(samples), size=count, p=weights / weights.sum()).tolist()
        own = [replace(samples[which], id=f"{samples[which].id}@{version}.{index}-{k}") for k, which in enumerate(drawn)]
        return Group(index=index, prompt=asked, samples=tuple(own), admitted_version=min(s.start_version for s in own))

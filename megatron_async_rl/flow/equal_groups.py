"""DAPO's dynamic sampling: finished groups whose rewards are all equal teach nothing and are dropped (arXiv 2503.14476, 3.2).

Invariant: for one batch's worth of groups that is kept at most PATIENCE batches' worth are dropped; after that equal groups are
kept as well, so that no run waits for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_async_rl.samples.types import Sample

log = logging.getLogger(__name__)

PATIENCE = 10
"""Counted by what is kept, not consumed: far ahead of the trainer, many batches are made before one trains."""


@dataclass(eq=False)
class EqualGroups:
    """`kept`: groups of the whole run. `dropped`: since a batch's worth was last complete."""

    prompts_per_step: int
    kept: int = 0
    dropped: int = 0

    def drops(self, index: int, samples: Iterable[Sample]) -> bool:
        """Whether group `index`, which has just finished, is dropped. Counts it."""
        equal = len({sample.reward for sample in samples if sample.valid}) <= 1
        if equal and self.dropped < PATIENCE * self.prompts_per_step:
            self.dropped += 1
            return True
        if equal:
            log.warning("group %d is trained on although its rewards are equal: too few others are left", index)
        self.kept += 1
        if self.kept % self.prompts_per_step == 0:
            self.dropped = 0
        return False

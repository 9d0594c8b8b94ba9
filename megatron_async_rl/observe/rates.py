"""How fast the two sides of a run were, from its metrics: what a plan of another run can reckon with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_async_rl.observe.read import Row, number

HOLE_STEPS = 10
"""A line that came so many median steps after the one before came after a stop, and its shares are of another interval."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    steps: int
    train_s: float
    """Median over the steps, as the other seconds."""
    publish_s: float
    pause_s: float
    """Of the engine that paused longest."""
    tokens_per_step: float
    """Response tokens that the engines finished, mean."""
    tokens_per_busy_s: float
    """Of one engine in a second in which it sampled, mean over the run's engines."""

    def generate_s(self, engines: int) -> float:
        """In which `engines` engines, busy all the time, sample one step's tokens."""
        return self.tokens_per_step / (engines * self.tokens_per_busy_s)


def measure(rows: Sequence[Row]) -> Rates | None:
    """Null where a run did not write what its engines did, or not for two steps."""
    step_s = _numbers(rows, "time/step_s")
    if len(step_s) < 2:
        return None
    longest = HOLE_STEPS * median(step_s)
    tokens = busy_s = 0.0
    counted = 0
    for before, row in itertools.pairwise(rows):
        shares, finished = row.get("engine/busy_shares"), row.get("engine/tokens")
        interval = (number(row, "time") or 0.0) - (number(before, "time") or 0.0)
        if isinstance(shares, list) and isinstance(finished, list) and 0 < interval <= longest:
            tokens += sum(finished)
            busy_s += interval * sum(shares)
            counted += 1
    train = _numbers(rows, "time/train_s")
    if not counted or tokens <= 0 or busy_s <= 0 or not train:
        return None
    return Rates(
        steps=len(rows),
        train_s=median(train),
        publish_s=median(_numbers(rows, "time/publish_s") or [0.0]),
        pause_s=median(_numbers(rows, "weights/pause_s") or [0.0]),
        tokens_per_step=tokens / counted,
        tokens_per_busy_s=tokens / busy_s,
    )


def update_per_lr(rows: Sequence[Row]) -> float | None:
    """G of the planning rule: length of an update over its learning rate, median; null where no control measured updates."""
    ratios = []
    for row in rows:
        norm, lr = number(row, "update/norm"), (number(row, "policy/lr") or 0.0) * (number(row, "policy/lr_scale") or 1.0)
        # Skipped steps have no update to learn from.
        if norm and lr > 0:
            ratios.append(norm / lr)
    return median(ratios) if ratios else None


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]

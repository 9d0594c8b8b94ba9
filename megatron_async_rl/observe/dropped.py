"""What was dropped against what was trained on: a rule that drops late groups drops long responses, and rewards with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_async_rl.observe.read import Row, number
from megatron_async_rl.observe.series import total

REASONS = {"flow/dropped_late": "late", "flow/dropped_equal": "of equal reward"}


@dataclass(frozen=True, kw_only=True)
class Dropped:
    responses: int
    groups: dict[str, int]
    """By reason."""
    length: float
    """Mean tokens of a response, as `trained_length`; rewards are means too."""
    trained_length: float | None
    reward: float | None
    trained_reward: float | None

    @property
    def sentence(self) -> str:
        counted = [f"{count:,} {'group' if count == 1 else 'groups'} {reason}" for reason, count in self.groups.items()]
        groups = f" ({', '.join(counted)})" if counted else ""
        parts = [f"mean length {self.length:,.1f} tokens{_against(self.trained_length, ',.1f')}"]
        if self.reward is not None:
            parts.append(f"mean reward {self.reward:.3f}{_against(self.trained_reward, '.3f')}")
        were = "response was" if self.responses == 1 else "responses were"
        whose = " of those trained on" if self.trained_length is not None else ""
        return f"{self.responses:,} {were} dropped{groups}: {', '.join(parts)}{whose}"


def compare_dropped(rows: Sequence[Row]) -> Dropped | None:
    """None where nothing was dropped."""
    responses = int(total(rows, "dropped/responses"))
    length = _mean(rows, "dropped/length_mean", "dropped/responses")
    if length is None:
        return None
    groups = {reason: count for key, reason in REASONS.items() if (count := _counted(rows, key))}
    return Dropped(
        responses=responses,
        groups=groups,
        length=length,
        trained_length=_mean(rows, "response/length_mean"),
        reward=_mean(rows, "dropped/reward_mean", "dropped/responses"),
        trained_reward=_mean(rows, "reward/mean"),
    )


def _against(trained: float | None, form: str) -> str:
    return f" against {trained:{form}}" if trained is not None else ""


def _mean(rows: Sequence[Row], key: str, weight: str | None = None) -> float | None:
    """Over the rows that have a finite `key`, each counted by its `weight`."""
    pairs = [(value, (number(row, weight) or 0.0) if weight else 1.0) for row in rows if (value := number(row, key)) is not None]
    pairs = [(value, times) for value, times in pairs if np.isfinite(value) and times > 0]
    return float(np.average([v for v, _ in pairs], weights=[t for _, t in pairs])) if pairs else None


def _counted(rows: Sequence[Row], key: str) -> int:
    """What a count that begins again at a resume came to in all."""
    values = [value for row in rows if (value := number(row, key)) is not None]
    before = [0.0, *values][: len(values)]
    return int(sum(new - old if new >= old else new for new, old in zip(values, before, strict=True)))

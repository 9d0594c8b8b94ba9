"""Calls of a reward, inline or in a process of isolation/child.py.

Invariants:
- a process runs one call of a plain reward at a time, and all pending calls of an `async` reward
  concurrently;
- the reward and its optional package are imported before the first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_async_rl.rollout.isolation.child import LoadedCode, described
from megatron_async_rl.rollout.rewards.registry import (
    LARGEST,
    BoundReward,
    RewardItem,
    built_in,
    load_reward,
)

LOADER = f"{__name__}:load_calls"
"""Function that the process of a reward calls first (isolation/child.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Score of one response. `error`: reason why there is no score; `reward` is then 0.0. `parts`:
    named rewards whose sum is `reward`, or None."""

    reward: float
    error: str | None = None
    parts: Mapping[str, float] | None = None
    timed_out: bool = field(default=False, compare=False)


def call(reward: BoundReward, items: list[RewardItem], timeout_s: float) -> list[Scored]:
    """Call a plain reward. Exceptions of the reward propagate. If a value is not a finite number,
    the score of its response has an error."""
    positional, keyword = reward.arguments(items, timeout_s)
    return _scored(reward, items, reward.function(*positional, **keyword))


async def call_async(
    reward: BoundReward, items: list[RewardItem], timeout_s: float
) -> list[Scored]:
    """Call an `async` reward; see `call`."""
    positional, keyword = reward.arguments(items, timeout_s)
    return _scored(reward, items, await reward.function(*positional, **keyword))


def load_calls(name: str, key: str, settings: Mapping[str, Any], timeout_s: float) -> LoadedCode:
    """Import a reward. The returned code takes a list of RewardItem and returns [(reward, error),
    ...] in the order of the items."""
    reward = load_reward(name, settings, key)
    shipped = built_in(name)
    if shipped is not None and shipped.requires is not None:
        # A slow import must not use up the time limit of the first response.
        importlib.import_module(shipped.requires)

    def rows(scored: Sequence[Scored]) -> list[tuple[float, str | None]]:
        return [(one.reward, one.error) for one in scored]

    async def pending(items: list[RewardItem]) -> list[tuple[float, str | None]]:
        return rows(await call_async(reward, items, timeout_s))

    def scores(items: list[RewardItem]) -> Any:
        if reward.asynchronous:
            return pending(items)
        return rows(call(reward, items, timeout_s))

    facts = {"concurrent": reward.asynchronous, "batched": reward.batched}
    return LoadedCode(scores, facts)


def _scored(reward: BoundReward, items: Sequence[RewardItem], returned: Any) -> list[Scored]:
    if not reward.of_several:
        return [_one(returned)]
    values = list(returned)
    # A shorter list would assign rewards to the wrong responses.
    if len(values) != len(items):
        raise ValueError(f"the reward returned {len(values)} values for {len(items)} responses")
    return [_one(value) for value in values]


def _one(returned: Any) -> Scored:
    # float() would accept text such as "1", which is most likely a mistake of the user.
    if returned is None or isinstance(returned, str | bytes | Mapping | Sequence):
        what = "nothing" if returned is None else f"{type(returned).__name__} {repr(returned)[:80]}"
        return Scored(reward=0.0, error=f"the reward returned {what}, not a number")
    try:
        value = float(returned)
    except BaseException as error:  # noqa: BLE001 - __float__ may be user code
        return Scored(reward=0.0, error=described(error))
    # `not <=` also rejects NaN, for which every comparison is false.
    if not abs(value) <= LARGEST:
        what = f"the reward is {value}, not a finite number of at most {LARGEST:g}"
        return Scored(reward=0.0, error=what)
    return Scored(reward=value)

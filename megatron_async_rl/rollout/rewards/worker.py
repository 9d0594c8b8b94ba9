"""Calls of a reward, inline or in a process of isolation/child.py.

Invariants:
- a plain reward runs one call at a time; an `async` reward runs all pending calls concurrently;
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Score of one response. `error`: reason for a missing reward, whose `reward` is 0.0. `parts`:
    named rewards that add up to this one, or None."""

    reward: float
    error: str | None = None
    parts: Mapping[str, float] | None = None
    timed_out: bool = field(default=False, compare=False)


def call(reward: BoundReward, items: list[RewardItem], timeout_s: float) -> list[Scored]:
    """Call a plain reward. Exceptions of the reward propagate; a value that is not a finite number
    is an error of its response."""
    positional, keyword = reward.arguments(items, timeout_s)
    return _scored(reward, items, reward.function(*positional, **keyword))


async def call_async(
    reward: BoundReward, items: list[RewardItem], timeout_s: float
) -> list[Scored]:
    """Call an `async` reward; see `call`."""
    positional, keyword = reward.arguments(items, timeout_s)
    return _scored(reward, items, await reward.function(*positional, **keyword))


def load_calls(name: str, key: str, settings: Mapping[str, Any], timeout_s: float) -> LoadedCode:
    """Import a reward. The returned code takes lists of RewardItem and returns [(reward, error),
    ...], in the order of the items."""
    reward = load_reward(name, settings, key)
    found = built_in(name)
    if found is not None and found.requires is not None:
        # Now, so that the first response does not pay for a slow import with its time limit.
        importlib.import_module(found.requires)

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
    # A shorter list would give responses the rewards of others.
    if len(values) != len(items):
        raise ValueError(f"the reward returned {len(values)} values for {len(items)} responses")
    return [_one(value) for value in values]


def _one(returned: Any) -> Scored:
    # float() would accept a text such as "1"; the user most likely returned the wrong value.
    if returned is None or isinstance(returned, str | bytes | Mapping | Sequence):
        what = "nothing" if returned is None else f"{type(returned).__name__} {repr(returned)[:80]}"
        return Scored(reward=0.0, error=f"the reward returned {what}, not a number")
    try:
        value = float(returned)
    except BaseException as error:  # noqa: BLE001 - user code in __float__
        return Scored(reward=0.0, error=described(error))
    # Written so that NaN, for which every comparison is false, is refused, too.
    if not abs(value) <= LARGEST:
        what = f"the reward is {value}, not a finite number of at most {LARGEST:g}"
        return Scored(reward=0.0, error=what)
    return Scored(reward=value)

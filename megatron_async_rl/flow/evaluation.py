"""Held-out accuracy: the same engines and sampling as training, nothing of training's data, order or numbering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_async_rl.flow.errors import BatchTimeout, reward_failed
from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.samples.types import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """`mean_reward`: mean over prompts of `per_prompt`, each the mean over its samples whose reward did not fail
    (nan where all failed; such prompts are left out of the mean)."""

    version: int
    mean_reward: float
    per_prompt: tuple[float, ...]
    truncated: float
    """Share of samples cut at the token limit."""
    samples: int
    tokens: int
    reward_errors: int
    seconds: float


async def evaluate(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    n: int,
    version: int,
    timeout_s: float,
    *,
    on_reward_error: Literal["drop", "stop"],
) -> EvalResult:
    """`n` responses to each prompt. Group indices are -1, -2, ... so they never meet training's.

    Raises EngineFailed, RewardFailed (with `on_reward_error: stop`), BatchTimeout, and ValueError without prompts.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one prompt")
    started = time.monotonic()
    engines = [fleet.reserve(n) for _ in prompts]
    calls = (fleet.generate(e, -1 - i, prompt, n, version) for i, (e, prompt) in enumerate(zip(engines, prompts, strict=True)))
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if pending:
            missing = [f"{prompts[i].id} on engine {engines[i]}" for i, task in enumerate(tasks) if task in pending]
            raise BatchTimeout(
                f"evaluation of version {version} is incomplete after {timeout_s:g} s: {len(missing)} of {len(prompts)} "
                f"prompts are missing, among them {', '.join(missing[:5])}"
            )
    finally:
        for task in tasks:
            task.cancel()
    return _result([task.result() for task in tasks], version, time.monotonic() - started, on_reward_error)


def _result(groups: Sequence[Group], version: int, seconds: float, on_reward_error: Literal["drop", "stop"]) -> EvalResult:
    samples = [sample for group in groups for sample in group.samples]
    bad = [sample for sample in samples if not sample.valid]
    if bad and on_reward_error == "stop":
        raise reward_failed(bad)
    per_prompt = []
    for group in groups:
        rewards = [sample.reward for sample in group.samples if sample.valid]
        per_prompt.append(sum(rewards) / len(rewards) if rewards else float("nan"))
    scored = [reward for reward in per_prompt if reward == reward]
    return EvalResult(
        version=version,
        mean_reward=sum(scored) / len(scored) if scored else float("nan"),
        per_prompt=tuple(per_prompt),
        truncated=sum(sample.truncated for sample in samples) / len(samples),
        samples=len(samples),
        tokens=sum(sample.length for sample in samples),
        reward_errors=len(bad),
        seconds=seconds,
    )

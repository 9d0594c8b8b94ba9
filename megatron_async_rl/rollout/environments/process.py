"""Calls of an environment in its process (isolation/child.py): `reset`, `step` and `close`, sample
by sample, or `run` for an agent's whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.environments import (
    Environment,
    checked_content,
    checked_step,
    load_factory,
    require_finite,
    settled,
)
from megatron_async_rl.rollout.isolation.child import LoadedCode

LOADER = f"{__name__}:load_calls"


def load_calls(environment: Mapping[str, Any]) -> LoadedCode:
    """Import the environment named by the settings. Raises EnvironmentRefused."""
    return LoadedCode(_EnvironmentCalls(load_factory(EnvironmentConfig(**environment))))


class _EnvironmentCalls:
    """Dispatcher of (method, argument) to the current sample's environment."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._environment: Environment | None = None

    def __call__(self, payload: tuple[str, Any]) -> Any:
        method, argument = payload
        if method == "run":
            # Called outside of an event loop, since a plain function may start its own.
            agent: Any = self._factory()
            return self._reward(agent.run(*argument))
        return getattr(self, method)(argument)

    async def _reward(self, returned: Any) -> float:
        reward = float(await settled(returned))
        # A NaN reward would spread over the whole group by its normalization.
        require_finite(reward, "the reward")
        return reward

    async def reset(self, prompt: Any) -> Any:
        # A new object for each sample: no state survives from the last one.
        self._environment = self._factory()
        opening = await settled(self._environment.reset(prompt))
        return checked_content(opening, "what reset returns")

    async def step(self, response: Any) -> dict[str, Any]:
        assert self._environment is not None
        return checked_step(await settled(self._environment.step(response)))

    async def close(self, _: None) -> None:
        close = getattr(self._environment, "close", None)
        # First, so that the object is released even if its `close` raises.
        self._environment = None
        if close is not None:
            await settled(close())

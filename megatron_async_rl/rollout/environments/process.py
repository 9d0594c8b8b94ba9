"""The calls of an environment in its process (isolation/child.py): `reset`, `step` and `close` of
one sample after the other, or `run` for an agent's whole run."""

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
    """Import the environment that the settings name. Raises EnvironmentRefused."""
    return LoadedCode(_EnvironmentCalls(load_factory(EnvironmentConfig(**environment))))


class _EnvironmentCalls:
    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._environment: Environment | None = None

    def __call__(self, payload: tuple[str, Any]) -> Any:
        method, argument = payload
        if method == "run":
            # An agent is called while no event loop runs, as a plain function may start its own.
            agent: Any = self._factory()
            return self._reward(agent.run(*argument))
        return getattr(self, method)(argument)

    async def _reward(self, returned: Any) -> float:
        reward = float(await settled(returned))
        require_finite(reward, "the reward")
        return reward

    async def reset(self, prompt: Any) -> Any:
        self._environment = self._factory()
        opening = await settled(self._environment.reset(prompt))
        return checked_content(opening, "what reset returns")

    async def step(self, response: Any) -> dict[str, Any]:
        assert self._environment is not None
        return checked_step(await settled(self._environment.step(response)))

    async def close(self, _: None) -> None:
        close = getattr(self._environment, "close", None)
        self._environment = None
        if close is not None:
            await settled(close())

"""The environment `openenv`: a session of an OpenEnv server (package openenv-core), for each sample
one.

A response becomes an action, and an observation's text what the model reads next. OpenEnv's own
client talks to the server; which fields of action and observation hold text differs from server to
server, so they are settings.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async_rl.rollout.environments.protocol import Step
from megatron_async_rl.samples.types import Prompt


class OpenEnv:
    """`url`: of the server. `action`: the action's field that takes the response; null reads the
    response as JSON, the whole action. `observation`: the observation's field that is shown; null
    shows all of it as JSON. `reset`: columns of the prompt that the server's reset takes."""

    def __init__(
        self,
        *,
        url: str,
        action: str | None = "message",
        observation: str | None = None,
        reset: Sequence[str] = (),
    ) -> None:
        self._client: Any = _client_class()(base_url=url)
        self._action, self._observation, self._reset = action, observation, tuple(reset)

    async def reset(self, prompt: Prompt) -> str:
        await self._client.connect()
        result = await self._client.reset(**{name: prompt.fields[name] for name in self._reset})
        return self._shown(result.observation)

    async def step(self, response: str) -> Step:
        """A response that is no JSON object, where one is wanted, is told so and rewarded 0."""
        action: Any = {self._action: response}
        if self._action is None:
            try:
                action = json.loads(response)
            except ValueError as error:
                return Step(observation=f"the action is no JSON: {error}")
            if not isinstance(action, dict):
                return Step(observation="the action is no JSON object")
        result = await self._client.step(action)
        return Step(
            observation=self._shown(result.observation),
            reward=float(result.reward or 0.0),
            done=bool(result.done),
        )

    async def close(self) -> None:
        await self._client.close()

    def _shown(self, observation: Any) -> str:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, Mapping) or self._observation not in observation:
            there = ", ".join(observation) if isinstance(observation, Mapping) else "no fields"
            raise KeyError(
                f"the observation has no {self._observation!r}, which"
                f" rollout.environment.settings.observation names; it has {there}"
            )
        return str(observation[self._observation])


def _client_class() -> Any:
    try:
        return importlib.import_module("openenv.core.generic_client").GenericEnvClient
    except ModuleNotFoundError as error:
        raise ValueError(
            f"it needs the package openenv-core ({error}); pip install openenv-core"
        ) from error

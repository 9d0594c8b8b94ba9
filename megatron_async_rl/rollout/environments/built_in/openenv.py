"""The environment `openenv`: a session with an OpenEnv server."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron_async_rl.rollout.environments import SETTINGS, EpisodeStep, package_modules
from megatron_async_rl.samples.types import Prompt

OPENENV = "openenv>=0.10,<0.11"
"""Requirement for pip. Until version 0.3, the distribution was named openenv-core."""
OPENENV_TIMEOUT_S = 86400.0
"""Time limit of OpenEnv's client. It never applies: rollout.environment.timeout_s is shorter."""
SCHEMA_S = 10.0
"""Time limit of the request for the schema of the server's actions."""
NO_ACTION = "(code: VALIDATION_ERROR)"
"""Text in the exception that OpenEnv's client raises for an action that the server cannot parse.
Nothing else distinguishes this exception."""


class OpenEnv:
    """Session with an OpenEnv server, through OpenEnv's own client.

    `url`: URL of the server. `action`: field of the action that receives the response; if null, the
    response is the whole action as JSON. `observation`: field of the observation that the model
    reads; if null, the model reads the whole observation as JSON. `reset`: columns of the prompt
    that are passed to the server's reset."""

    def __init__(
        self,
        *,
        url: str,
        action: str | None = "message",
        observation: str | None = None,
        reset: Sequence[str] = (),
    ) -> None:
        (client,) = package_modules(OPENENV, "openenv.core.generic_client")
        self._client: Any = client.GenericEnvClient(
            base_url=url, message_timeout_s=OPENENV_TIMEOUT_S
        )
        self._url, self._action = url, action
        self._observation, self._reset = observation, tuple(reset)

    async def reset(self, prompt: Prompt) -> str:
        missing = [name for name in self._reset if name not in prompt.fields]
        if missing:
            raise ValueError(
                f"prompt {prompt.id} has no column {missing[0]!r}, which"
                f" {SETTINGS}.reset names; it has {', '.join(prompt.fields) or 'none'}"
            )
        await self._client.connect()
        if self._action is not None:
            # With a wrong field, the server would reject every action, and every sample would get
            # reward 0. The request runs in a thread because urllib blocks.
            _require_field(await asyncio.to_thread(_action_schema, self._url), self._action)
        result = await self._client.reset(**{name: prompt.fields[name] for name in self._reset})
        return self._shown(result.observation)

    async def step(self, response: str) -> EpisodeStep:
        """Send the response as an action. An invalid action returns an error with reward 0."""
        action: Any = {self._action: response}
        if self._action is None:
            try:
                action = json.loads(response)
            except ValueError as error:
                return EpisodeStep(observation=f"the action is not JSON: {error}")
            if not isinstance(action, dict):
                return EpisodeStep(observation="the action is not a JSON object")
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            # Any other error is the server's fault and fails the sample.
            if NO_ACTION not in str(error):
                raise
            return EpisodeStep(observation="the environment does not accept the action")
        return EpisodeStep(
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
            fields = ", ".join(observation) if isinstance(observation, Mapping) else "no fields"
            raise KeyError(
                f"the observation has no {self._observation!r}, which"
                f" rollout.environment.settings.observation names; it has {fields}"
            )
        return str(observation[self._observation])


@cache
def _action_schema(url: str) -> Mapping[str, Any]:
    """Return the JSON schema of the server's actions; empty if the server does not provide it."""
    # The client also accepts ws:// and wss:// URLs.
    http = re.sub("^ws", "http", url).rstrip("/")
    try:
        with urllib.request.urlopen(f"{http}/schema", timeout=SCHEMA_S) as answer:
            return dict(json.load(answer)["action"])
    except Exception:  # noqa: BLE001 - optional: the server also rejects invalid actions
        return {}


def _require_field(schema: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if the field `name` alone cannot form an action."""
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    others = [one for one in needed if one != name]
    if fields and name not in fields:
        what = f"have no field {name!r}: they have {', '.join(fields)}"
    elif others:
        what = f"also need {', '.join(others)}: set null, and the model writes all as JSON"
    else:
        return
    raise ValueError(f"{SETTINGS}.action: the server's actions {what}")


ENVIRONMENT = OpenEnv

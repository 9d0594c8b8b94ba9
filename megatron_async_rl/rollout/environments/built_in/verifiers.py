"""The environment `verifiers`: an environment of the package verifiers with its v1 interface."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from megatron_async_rl.rollout.environments import package_modules
from megatron_async_rl.samples.types import Prompt

NO_HARNESS = "bash"
"""Harness that verifiers names for a task set without a harness of its own."""


class Verifiers:
    """Environment of the package verifiers. Its harness calls the model at the endpoint, and its
    reward becomes the reward of the sample.

    `env`: configuration in the format of verifiers, such as `{taskset: {id: my_tasks}}`. `task`:
    column of the prompt that holds the number of its task."""

    def __init__(self, *, env: Mapping[str, Any], task: str = "task") -> None:
        self._settings = json.dumps(dict(env))
        self._column = task
        _verifiers(self._settings)

    def task(self, prompt: Prompt) -> Any:
        """Return the task of the prompt. Raises ValueError if its row names no existing task."""
        number, (_, _, tasks) = prompt.fields.get(self._column), _verifiers(self._settings)
        if not re.fullmatch(r"\d+", str(number)):
            raise ValueError(
                f"prompt {prompt.id} has {number!r} as its `{self._column}`, which must be the"
                " number of a task, from 0"
            )
        task = tasks.get(int(str(number)))
        if task is None:
            raise ValueError(
                f"prompt {prompt.id} names task {number}, but there are only {len(tasks)} tasks"
            )
        return task

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """Return the total reward of the trainable agents of one episode. Raises RuntimeError if
        the episode failed."""
        library, environment, _ = _verifiers(self._settings)
        task = self.task(prompt)
        client = library.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = library.ModelContext(model="policy", client=client)

        def begun(trace: Any) -> None:
            """Raise ValueError for an agent that is not trainable but uses the policy."""
            # Every turn that the endpoint samples is trained.
            agent = trace.agent
            if not agent.trainable and agent.config.client == client:
                raise ValueError(
                    f"its agent {agent.name} is not trainable, but would use the policy; set"
                    f" another model for it as rollout.environment.settings.env.{agent.name}:"
                    " {model: ..., client: {type: eval, base_url: ...}}"
                )

        async with environment.serving():
            episode = await environment.run_episode(task, context, on_trace=begun)
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
        return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


class _Tasks:
    """Tasks of a task set, which may be infinite. Tasks are drawn only up to the requested one."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._drawn = source, list[Any]()

    def get(self, number: int) -> Any:
        """Return the task with this number, or None if the set has fewer tasks."""
        self._drawn += islice(self._source, max(0, number + 1 - len(self._drawn)))
        return self._drawn[number] if number < len(self._drawn) else None

    def __len__(self) -> int:
        return len(self._drawn)


@cache
def _verifiers(settings: str) -> tuple[Any, Any, _Tasks]:
    """Return the library, the environment and its tasks. Each process loads them once."""
    library, loaders = package_modules("verifiers", "verifiers.v1", "verifiers.v1.utils.loaders")
    config = loaders.resolve_env_config(_placed(library, loaders, json.loads(settings)))
    environment = loaders.load_environment(config)
    return library, environment, _Tasks(iter(environment.taskset))


def _placed(library: Any, loaders: Any, env: dict[str, Any]) -> dict[str, Any]:
    """Return `env` with a default harness for each agent: the harness of the task set, or else
    `null`, which runs only the model and its tools."""
    config = loaders.resolve_env_config(env)
    default = loaders.default_harness_id(config.taskset.id)
    agents: dict[str, Any] = {}
    for name, agent in config:
        if isinstance(agent, library.AgentConfig):
            harness = "null" if default == NO_HARNESS else default
            agents[name] = {"harness": {"id": harness}} if agent.harness is None else {}
            harness = harness if agent.harness is None else agent.harness.id
            # A harness may run outside of a container only if it does not execute the model's code.
            if not loaders.harness_class(harness).EXECUTES_CODE:
                agents[name]["runtime"] = {"type": "subprocess"}
            # Last, so that the user's own settings take precedence.
            agents[name] |= env.get(name, {})
    return {**env, **agents}


ENVIRONMENT = Verifiers

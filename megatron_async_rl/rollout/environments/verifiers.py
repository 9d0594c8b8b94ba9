"""The environment `verifiers`: an environment of the package verifiers (its version 1 interface), whose
own harness asks the model at the endpoint and whose own rewards are the sample's.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_async_rl.samples.types import Prompt

LOCAL = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
"""Where `env` says nothing of its agent: on this machine, and nothing but the model and its tools."""


class Verifiers:
    """`env`: the environment's configuration, as verifiers has it, such as `{taskset: {id:
    my_tasks}}`. `task`: column of the prompt with the number of its task."""

    def __init__(self, *, env: Mapping[str, Any], task: str = "task") -> None:
        self._settings = json.dumps({"agent": LOCAL, **env})
        self._task = task
        _loaded(self._settings)

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """The reward of one episode. Raises RuntimeError for one that failed."""
        library, environment, tasks = _loaded(self._settings)
        number = int(prompt.fields[self._task])
        client = library.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = library.ModelContext(model="policy", client=client)
        async with environment.serving():
            episode = await environment.run_episode(tasks[number], context)
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
        return float(sum(trace.reward for trace in episode.traces))


@cache
def _loaded(settings: str) -> tuple[Any, Any, list[Any]]:
    """The library, the environment and its tasks, once for each process."""
    try:
        library: Any = importlib.import_module("verifiers.v1")
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"it needs the package verifiers ({error}); pip install verifiers"
        ) from error
    environment = loaders.load_environment(loaders.resolve_env_config(json.loads(settings)))
    return library, environment, list(environment.taskset.load())

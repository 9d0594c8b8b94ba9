"""Environments by a name of their own: `tools`, functions that the model may call; `agent`, a
program or a function that asks the model by itself; `verifiers` and `openenv`, environments of
these packages, which are imported by who names them.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import shlex
import signal
import typing
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from megatron_async_rl.config.rollout import TOOLS, EnvironmentConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.tokenizer import Tokenizer, tokenizer_of
from megatron_async_rl.rollout.environments import (
    UNREAD,
    UNREAD_CALLS,
    EnvironmentRefused,
    Message,
    Step,
    load_factory,
)
from megatron_async_rl.rollout.rewards.registry import imported
from megatron_async_rl.samples.types import Prompt

KEY = "unused"
"""Clients want a key; the endpoint reads none."""
SETTINGS = "rollout.environment.settings"

# Functions that the model calls


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, by its signature and docstring."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def arguments(self) -> TypeAdapter[dict[str, Any]]:
        """Checks what a model gives. Raises ValueError for a parameter that it cannot give."""
        reported = _described(inspect.getdoc(self.function) or "")
        types = typing.get_type_hints(self.function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(
                    f"{self.name}: a model gives arguments by name, and {name} has none"
                )
            if name not in types:
                raise ValueError(f"{self.name}: the parameter {name} has no type annotation")
            fields[name] = Annotated[types[name], Field(description=reported.get(name))]
            if parameter.default is not parameter.empty:
                fields[name] = typing.NotRequired[fields[name]]
        typed_dict: Any = typing.TypedDict
        arguments = typed_dict(self.name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid")
        return TypeAdapter(arguments)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the function in the format of OpenAI and of chat templates."""
        parameters = _untitled(self.arguments.json_schema())
        parameters.pop("additionalProperties", None)
        text = (inspect.getdoc(self.function) or "").split("\n\n")[0]
        function = {"name": self.name, "description": text, "parameters": parameters}
        return {"type": "function", "function": function}


PARAMETER = re.compile(r"^\s+(\w+)(?: ?\(.*?\))?: +(.+)$")


def _described(docstring: str) -> dict[str, str]:
    """Parameters that the section `Args:` describes, each on a line `name: what it is`."""
    section = re.split(r"^(?:Args|Arguments|Parameters):\s*$", docstring, flags=re.MULTILINE)
    lines = section[1].splitlines() if len(section) > 1 else ()
    return {match[1]: match[2] for line in lines if (match := PARAMETER.match(line))}


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else _untitled(value)
        for key, value in schema.items()
        if key != "title"
    }


class Tools:
    """`functions`: the tools, `module:function` each, or a module, whose public functions they are;
    one or a list. `timeout_s`: longest time of the calls of one turn together.

    A turn without calls ends the sample. Whatever is wrong with a call is its answer, and counted.
    """

    def __init__(self, *, functions: str | Sequence[str], timeout_s: float = 10.0) -> None:
        self._tools = _tools((functions,) if isinstance(functions, str) else tuple(functions))
        self.timeout_s = timeout_s
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: {timeout_s} leaves the tools no time")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def reset(self, prompt: Prompt) -> None:
        """Return nothing: the first turn has no opening."""

    async def step(self, message: Message) -> Step:
        """`message`: the model's, with its `tool_calls`, or with UNREAD."""
        calls, unread = message.get("tool_calls") or (), message.get(UNREAD)
        measured = {"tool_calls": float(len(calls)), "tool_errors": 0.0, UNREAD_CALLS: 0.0}
        answers = []
        if unread is not None:
            measured = dict.fromkeys(measured, 1.0)
            # A template may want a tool's answer to name the call.
            text = f"error: the tool call cannot be read: {unread}"
            answers.append({"role": "user", "content": text})
        until = asyncio.get_running_loop().time() + self.timeout_s
        for call in calls:
            try:
                text = await self._call(call["function"], until)
            except Exception as error:  # noqa: BLE001 - the model reads it
                text = f"error: {type(error).__name__}: {error}"
                measured["tool_errors"] += 1
            named = {"tool_call_id": call["id"], "name": call["function"]["name"]}
            answers.append({"role": "tool", **named, "content": text})
        return Step(observation=answers, done=not answers, measured=measured)

    async def _call(self, call: Mapping[str, Any], until: float) -> str:
        tool = self._tools.get(call["name"])
        if tool is None:
            near = get_close_matches(call["name"], self._tools, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            there = ", ".join(self._tools)
            raise LookupError(f"there is no tool {call['name']!r}; {hint}there is {there}")
        try:
            arguments = tool.arguments.validate_json(call["arguments"] or "{}")
        except ValidationError as error:
            faults = (
                ": ".join([".".join(map(str, one["loc"])), one["msg"]]) for one in error.errors()
            )
            raise ValueError("; ".join(fault.removeprefix(": ") for fault in faults)) from None
        left = until - asyncio.get_running_loop().time()
        with _interrupted(max(left, 1e-6), self.timeout_s):
            answer = tool.function(**arguments)
        if inspect.isawaitable(answer):
            try:
                async with asyncio.timeout_at(until):
                    answer = await answer
            except TimeoutError:
                raise _late(self.timeout_s) from None
        return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _late(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no answer within {timeout_s:g} s, in which a turn's calls must end")


@contextmanager
def _interrupted(left_s: float, timeout_s: float) -> Iterator[None]:
    """Raises TimeoutError in the code within after `left_s` seconds. What holds it off (a call of
    C) `rollout.environment.timeout_s` ends, with the process."""

    def end(*_: Any) -> None:
        raise _late(timeout_s)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@cache
def _tools(names: tuple[str, ...]) -> dict[str, Tool]:
    """The functions by their names. Raises ValueError."""
    found: dict[str, Tool] = {}
    for name in names:
        module_name, _, attribute = name.partition(":")
        module = imported(module_name, name, SETTINGS)
        functions = [
            one
            for each, one in vars(module).items()
            if (each == attribute if attribute else _public(module, each, one))
        ]
        if not functions or not all(map(callable, functions)):
            there = [each for each, one in vars(module).items() if callable(one)]
            near = get_close_matches(attribute, there, n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            what = f"function {attribute!r}" if attribute else "public function"
            raise ValueError(f"module {module_name!r} has no {what}{hint}")
        for function in functions:
            tool = Tool(function)
            if tool.name in found:
                raise ValueError(f"two of the functions are named {tool.name}")
            _ = tool.schema
            found[tool.name] = tool
    return found


def _public(module: Any, name: str, value: Any) -> bool:
    return (
        inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    )


def prompt_tokenizer(model: Path, config: Config) -> Tokenizer:
    """Load the tokenizer that renders the prompts of `config`, with the functions that the model
    may call. Raises DataError, EnvironmentRefused."""
    turns = None if config.rollout is None else config.rollout.environment
    return tokenizer_of(model, config.data, tool_schemas(turns))


def tool_schemas(settings: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """JSON schemas of the functions that the model may call; none without the environment `tools`.
    Raises EnvironmentRefused."""
    if settings is None or settings.name != TOOLS:
        return []
    tools: Any = load_factory(settings)()
    schemas: list[dict[str, Any]] = tools.schemas
    return schemas


# Agents


class AgentEnvironment:
    """`function`: `module:function`, called as function(prompt, base_url), may be `async`.
    `command`: program and arguments; it finds the prompt as JSON (`text`, `fields`) on standard
    input, OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and ends with a line that is its
    reward, a number."""

    def __init__(self, *, function: str | None = None, command: Sequence[str] = ()) -> None:
        if (function is None) == (not command):
            raise ValueError("give either `function`, as module:function, or `command`, a list")
        self._function = None
        if function is not None:
            module_name, _, attribute = function.partition(":")
            self._function = getattr(imported(module_name, function, SETTINGS), attribute)
        self._command = [command] if isinstance(command, str) else list(command)

    def run(self, prompt: Prompt, base_url: str) -> Any:
        """The reward, or an awaitable of it."""
        if self._function is not None:
            return self._function(prompt, base_url)
        return self._program(prompt, base_url)

    async def _program(self, prompt: Prompt, base_url: str) -> float:
        program = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY},
        )
        fields = to_jsonable_python(dict(prompt.fields), inf_nan_mode="null")
        requested = json.dumps({"text": prompt.text, "fields": fields}).encode()
        reported, _ = await program.communicate(requested)
        if program.returncode != 0:
            raise RuntimeError(f"{self._command[0]} ended with code {program.returncode}")
        lines = reported.decode(errors="replace").strip().splitlines()
        if not lines:
            raise ValueError(f"{self._command[0]} wrote no reward, a number on its last line")
        return float(lines[-1])


NO_HARNESS = "bash"
"""Name that verifiers has for the harness of a task set that brings none."""


class Verifiers:
    """An environment of the package verifiers, version 1 of its interface, whose own harness asks
    the model at the endpoint and whose own rewards are the sample's. `env`: its configuration, as
    verifiers has it, such as `{taskset: {id: my_tasks}}`. `task`: column of the prompt with the
    number of its task."""

    def __init__(self, *, env: Mapping[str, Any], task: str = "task") -> None:
        self._settings = json.dumps(dict(env))
        self._column = task
        _verifiers(self._settings)

    def task(self, prompt: Prompt) -> Any:
        """Task of the prompt. Raises ValueError if its row names none."""
        number, (_, _, tasks) = prompt.fields.get(self._column), _verifiers(self._settings)
        if not re.fullmatch(r"\d+", str(number)):
            raise ValueError(
                f"prompt {prompt.id} has {number!r} as its `{self._column}`, which is to be the"
                " number of a task, from 0"
            )
        task = tasks.get(int(str(number)))
        if task is None:
            raise ValueError(f"prompt {prompt.id} is of task {number}, and there are {len(tasks)}")
        return task

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """The reward of one episode, of all agents that learn. Raises RuntimeError for a failed
        one."""
        library, environment, _ = _verifiers(self._settings)
        task = self.task(prompt)
        client = library.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        context = library.ModelContext(model="policy", client=client)

        def begun(trace: Any) -> None:
            """All turns of the policy are trained."""
            agent = trace.agent
            if not agent.trainable and agent.config.client == client:
                raise ValueError(
                    f"its agent {agent.name} is not to be trained, and the policy would play it;"
                    f" name a model of its own as rollout.environment.settings.env.{agent.name}:"
                    " {model: ..., client: {type: eval, base_url: ...}}"
                )

        async with environment.serving():
            episode = await environment.run_episode(task, context, on_trace=begun)
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
        return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


class _Tasks:
    """Tasks of a task set, which may be endless: drawn only as far as requested."""

    def __init__(self, given: Iterator[Any]) -> None:
        self._given, self._known = given, list[Any]()

    def get(self, number: int) -> Any:
        """Null where there are fewer."""
        self._known += islice(self._given, max(0, number + 1 - len(self._known)))
        return self._known[number] if number < len(self._known) else None

    def __len__(self) -> int:
        return len(self._known)


@cache
def _verifiers(settings: str) -> tuple[Any, Any, _Tasks]:
    """The library, the environment and its tasks, once for each process."""
    library, loaders = _of_package("verifiers", "verifiers.v1", "verifiers.v1.utils.loaders")
    config = loaders.resolve_env_config(_placed(library, loaders, json.loads(settings)))
    environment = loaders.load_environment(config)
    return library, environment, _Tasks(iter(environment.taskset))


def _placed(library: Any, loaders: Any, env: dict[str, Any]) -> dict[str, Any]:
    """`env` with what it does not say of its agents: the harness is the task set's own, or else the
    model and its tools alone; a harness that runs no code of the model's is on this machine."""
    config = loaders.resolve_env_config(env)
    own = loaders.default_harness_id(config.taskset.id)
    agents: dict[str, Any] = {}
    for name, agent in config:
        if isinstance(agent, library.AgentConfig):
            harness = "null" if own == NO_HARNESS else own
            agents[name] = {"harness": {"id": harness}} if agent.harness is None else {}
            harness = harness if agent.harness is None else agent.harness.id
            if not loaders.harness_class(harness).EXECUTES_CODE:
                agents[name]["runtime"] = {"type": "subprocess"}
            agents[name] |= env.get(name, {})
    return {**env, **agents}


def _of_package(package: str, *modules: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in modules]
    except ModuleNotFoundError as error:
        what = f"it needs the package {package} ({error})"
        fix = f"pip install -U {shlex.quote(package)}"
        raise EnvironmentRefused("rollout.environment.name", what, fix) from error


# A server


OPENENV = "openenv>=0.10,<0.11"
"""Requirement for pip. Up to version 0.3 the distribution was openenv-core; the modules keep their
names."""
OPENENV_TIMEOUT_S = 86400.0
"""Time that OpenEnv's client gives an answer: rollout.environment.timeout_s ends it sooner."""
SCHEMA_S = 10.0
"""Longest time for a server to describe its actions."""
NO_ACTION = "(code: VALIDATION_ERROR)"
"""Text in the exception that OpenEnv's client raises if a server cannot read an action; the
exception has no other mark."""


class OpenEnv:
    """A session of an OpenEnv server, by OpenEnv's own client. `url`: of the server. `action`: the
    action's field that takes the response; null reads the response as JSON, the whole action.
    `observation`: the observation's field that is shown; null shows all of it as JSON. `reset`:
    columns of the prompt that the server's reset takes."""

    def __init__(
        self,
        *,
        url: str,
        action: str | None = "message",
        observation: str | None = None,
        reset: Sequence[str] = (),
    ) -> None:
        (client,) = _of_package(OPENENV, "openenv.core.generic_client")
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
            _require_field(await asyncio.to_thread(_action_schema, self._url), self._action)
        result = await self._client.reset(**{name: prompt.fields[name] for name in self._reset})
        return self._shown(result.observation)

    async def step(self, response: str) -> Step:
        """A response that is not an action gets an error as its answer, and reward 0."""
        action: Any = {self._action: response}
        if self._action is None:
            try:
                action = json.loads(response)
            except ValueError as error:
                return Step(observation=f"the action is not JSON: {error}")
            if not isinstance(action, dict):
                return Step(observation="the action is not a JSON object")
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if NO_ACTION not in str(error):
                raise
            return Step(observation="the environment does not accept the action")
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


@cache
def _action_schema(url: str) -> Mapping[str, Any]:
    """JSON schema of the actions that the server takes; empty where it does not say."""
    http = re.sub("^ws", "http", url).rstrip("/")
    try:
        with urllib.request.urlopen(f"{http}/schema", timeout=SCHEMA_S) as answer:
            return dict(json.load(answer)["action"])
    except Exception:  # noqa: BLE001 - its actions are then known by what it refuses
        return {}


def _require_field(schema: Mapping[str, Any], name: str) -> None:
    """Raises ValueError where no response can be an action by the one field."""
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    others = [one for one in needed if one != name]
    if fields and name not in fields:
        what = f"have no field {name!r}: they have {', '.join(fields)}"
    elif others:
        what = (
            f"need {', '.join(others)} besides {name}: with null the model writes them all, as JSON"
        )
    else:
        return
    raise ValueError(f"{SETTINGS}.action: the server's actions {what}")

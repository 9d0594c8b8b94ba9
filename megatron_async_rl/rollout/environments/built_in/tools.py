"""The environment `tools`: functions that the model may call."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megatron_async_rl.config.problem import suggestion
from megatron_async_rl.config.rollout import TOOLS, EnvironmentConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.tokenizer import Tokenizer, tokenizer_of
from megatron_async_rl.rollout.environments import (
    SETTINGS,
    UNREAD,
    UNREAD_CALLS,
    EpisodeStep,
    Message,
    load_factory,
)
from megatron_async_rl.rollout.rewards.registry import imported
from megatron_async_rl.samples.types import Prompt


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, described by its signature and docstring."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def arguments(self) -> TypeAdapter[dict[str, Any]]:
        """Validator of the model's arguments. Raises ValueError for an untyped parameter."""
        descriptions = _described(inspect.getdoc(self.function) or "")
        types = typing.get_type_hints(self.function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(
                    f"{self.name}: a model passes arguments by name, which {name} does not allow"
                )
            if name not in types:
                raise ValueError(f"{self.name}: the parameter {name} has no type annotation")
            fields[name] = Annotated[types[name], Field(description=descriptions.get(name))]
            if parameter.default is not parameter.empty:
                fields[name] = typing.NotRequired[fields[name]]
        typed_dict: Any = typing.TypedDict
        arguments = typed_dict(self.name, fields)
        # A misspelled argument must be an error that the model reads.
        arguments.__pydantic_config__ = ConfigDict(extra="forbid")
        # Names are strict, types are lenient: models often write "3" for 3.
        return TypeAdapter(arguments)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the function in OpenAI's format, which chat templates read."""
        parameters = _untitled(self.arguments.json_schema())
        # The validator adds this key; OpenAI's function format does not have it.
        parameters.pop("additionalProperties", None)
        text = (inspect.getdoc(self.function) or "").split("\n\n")[0]
        function = {"name": self.name, "description": text, "parameters": parameters}
        return {"type": "function", "function": function}


PARAMETER = re.compile(r"^\s+(\w+)(?: ?\(.*?\))?: +(.+)$")


def _described(docstring: str) -> dict[str, str]:
    """Return parameter descriptions by name: lines `name: description` of the section `Args:`."""
    section = re.split(r"^(?:Args|Arguments|Parameters):\s*$", docstring, flags=re.MULTILINE)
    lines = section[1].splitlines() if len(section) > 1 else ()
    return {match[1]: match[2] for line in lines if (match := PARAMETER.match(line))}


def _untitled(schema: Any) -> Any:
    """Return the schema without the titles that pydantic derives from names."""
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
    """Tools that the model may call. A turn without calls ends the sample. If a call fails, the
    model receives the error, and `tool_errors` counts it.

    `functions`: `module:function`, or a module whose public functions are the tools; text or a
    list. `timeout_s`: time limit for all calls of one turn together.
    """

    def __init__(self, *, functions: str | Sequence[str], timeout_s: float = 10.0) -> None:
        self._tools = _tools((functions,) if isinstance(functions, str) else tuple(functions))
        self.timeout_s = timeout_s
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: {timeout_s} leaves no time for the tools; set it above 0")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def reset(self, prompt: Prompt) -> None:
        """Do nothing: this environment appends nothing to the prompt."""

    async def step(self, message: Message) -> EpisodeStep:
        """Run the tool calls of a turn. `message`: the model's message, which may have UNREAD."""
        calls, unread = message.get("tool_calls") or (), message.get(UNREAD)
        measured = {"tool_calls": float(len(calls)), "tool_errors": 0.0, UNREAD_CALLS: 0.0}
        answers = []
        if unread is not None:
            measured = dict.fromkeys(measured, 1.0)
            # Sent as the user: a message with role `tool` must name a call.
            text = f"error: the tool call cannot be read: {unread}"
            answers.append({"role": "user", "content": text})
        # One deadline for all calls, so that many slow calls do not add up.
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        for call in calls:
            try:
                text = await self._call(call["function"], deadline)
            except Exception as error:  # noqa: BLE001 - the model reads the error
                text = f"error: {type(error).__name__}: {error}"
                measured["tool_errors"] += 1
            named = {"tool_call_id": call["id"], "name": call["function"]["name"]}
            answers.append({"role": "tool", **named, "content": text})
        return EpisodeStep(observation=answers, done=not answers, measured=measured)

    async def _call(self, call: Mapping[str, Any], deadline: float) -> str:
        tool = self._tools.get(call["name"])
        if tool is None:
            hint = suggestion(call["name"], self._tools)
            known = ", ".join(self._tools)
            raise LookupError(f"unknown tool {call['name']!r}; {hint}the tools are {known}")
        try:
            arguments = tool.arguments.validate_json(call["arguments"] or "{}")
        except ValidationError as error:
            faults = (
                ": ".join([".".join(map(str, one["loc"])), one["msg"]]) for one in error.errors()
            )
            raise ValueError("; ".join(fault.removeprefix(": ") for fault in faults)) from None
        left_s = deadline - asyncio.get_running_loop().time()
        with _interrupted(max(left_s, 1e-6), self.timeout_s):
            answer = tool.function(**arguments)
        if inspect.isawaitable(answer):
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await answer
            except TimeoutError:
                raise _late(self.timeout_s) from None
        return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _late(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no answer within {timeout_s:g} s, the time limit of a turn's calls")


@contextmanager
def _interrupted(left_s: float, timeout_s: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `left_s` seconds. A call of C code delays the exception;
    `rollout.environment.timeout_s` then ends the process."""

    def end(*_: Any) -> None:
        raise _late(timeout_s)

    # A signal, not a thread: the tool runs in the main thread, which only a signal interrupts.
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    finally:
        # Stop the timer first, so that a late alarm cannot interrupt the code after the call.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@cache
def _tools(names: tuple[str, ...]) -> dict[str, Tool]:
    """Return the tools by name. Raises ValueError for a missing or unusable function."""
    tools: dict[str, Tool] = {}
    for name in names:
        module_name, _, attribute = name.partition(":")
        module = imported(module_name, name, SETTINGS)
        functions = [
            one
            for each, one in vars(module).items()
            if (each == attribute if attribute else _public(module, each, one))
        ]
        if not functions or not all(map(callable, functions)):
            callables = [each for each, one in vars(module).items() if callable(one)]
            hint = suggestion(attribute, callables).rstrip()
            what = f"function {attribute!r}" if attribute else "public function"
            raise ValueError(f"module {module_name!r} has no {what}" + (hint and f"; {hint}"))
        for function in functions:
            tool = Tool(function)
            if tool.name in tools:
                raise ValueError(f"two functions have the name {tool.name}; rename one")
            _ = tool.schema  # Raises ValueError for a signature that a model cannot call.
            tools[tool.name] = tool
    return tools


def _public(module: Any, name: str, value: Any) -> bool:
    return (
        inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    )


def prompt_tokenizer(model: Path, config: Config) -> Tokenizer:
    """Load the tokenizer that renders the prompts of `config`, including the schemas of its tools.
    Raises DataError or EnvironmentRefused."""
    environment = None if config.rollout is None else config.rollout.environment
    return tokenizer_of(model, config.data, tool_schemas(environment))


def tool_schemas(settings: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools; empty without the environment `tools`. Raises
    EnvironmentRefused."""
    if settings is None or settings.name != TOOLS:
        return []
    tools: Any = load_factory(settings)()
    schemas: list[dict[str, Any]] = tools.schemas
    return schemas


ENVIRONMENT = Tools

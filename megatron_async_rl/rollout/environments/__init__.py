"""Environments: programs that respond to the model's turns.

This module defines the protocol of environments, finds an environment by name, and calls it in its
process: `reset`, `step` and `close` for each sample, or `run` once per sample for an agent.

Invariants of every environment:
- an object serves one sample, and has its process to itself from `reset` to `close`;
- a wrong or malformed response is not a failure: the environment gives it a low reward. An
  exception fails the sample.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.config.problem import shipped, suggestion
from megatron_async_rl.config.rollout import AGENTS, TOOLS, EnvironmentConfig
from megatron_async_rl.rollout.isolation.child import LoadedCode
from megatron_async_rl.rollout.rewards.registry import LARGEST, RewardError, imported
from megatron_async_rl.samples.types import Prompt

KEY = "rollout.environment.name"
PARSER_KEY = "rollout.environment.tool_parser"
SETTINGS = "rollout.environment.settings"
LOADER = f"{__name__}:load_calls"
"""Function that the process of an environment calls first (isolation/child.py)."""
BUILT_IN = {
    one.name: f"{__name__}.built_in.{one.name}:ENVIRONMENT"
    for one in pkgutil.iter_modules([f"{__path__[0]}/built_in"])
}
"""Factory of each built-in environment, by name. Each module in built_in/ is an environment."""

Message = Mapping[str, Any]
"""Chat message: `role`, `content`, and further keys that the chat template reads."""
UNREAD = "unread_tool_call"
"""Key of a model's message: reason why its tool call could not be parsed."""
UNREAD_CALLS = "unread_tool_calls"
"""Name of the measurement that counts such calls of a sample."""
TurnContent = str | Sequence[Message]
"""Content from an environment: text (with the role `user`), or chat messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStep:
    """Result of one turn of the model.

    `observation`: content that the model reads next; ignored with `done`. `reward`: reward of this
    turn; the sample's reward is the sum over turns. `done`: the sample ends with this turn.
    `train`: if false, the loss excludes the turn's tokens. `measured`: numbers by name, such as
    {"tool_errors": 1}, that are not part of the reward. The sum over the sample is logged as
    `reward/part/NAME`.
    """

    observation: TurnContent = ""
    reward: float = 0.0
    done: bool = False
    train: bool = True
    measured: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Protocol of an environment. Its methods may be `async`. An optional method `close()` is
    called at the end of the sample."""

    def reset(self, prompt: Prompt, /) -> TurnContent | Awaitable[TurnContent | None] | None:
        """Start a sample. The returned content is appended to the prompt."""
        ...

    def step(self, response: str, /) -> EpisodeStep | Awaitable[EpisodeStep]:
        """Process a turn. `response`: text of the turn, without special tokens."""
        ...


class EnvironmentRefused(RewardError):
    """An environment cannot be loaded. `where`: key in the configuration."""


def load_factory(settings: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a factory that makes the environment of one sample. Raises EnvironmentRefused."""
    name = BUILT_IN.get(settings.name, settings.name)
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        what = f"{name!r} is not of the form module:factory"
        known = ", ".join(BUILT_IN)
        fix = f"{suggestion(name, BUILT_IN)}write, for example, my_game:Game, or one of {known}"
        raise EnvironmentRefused(KEY, what, fix)
    module = _import(module_name, name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        what = f"module {module_name!r} has no callable {attribute!r}"
        raise EnvironmentRefused(KEY, what, f"correct the spelling of {name!r}")
    _check_settings(factory, settings)
    if settings.name in (TOOLS, *AGENTS):
        require_tool_parser(settings.tool_parser)
    if settings.name in BUILT_IN:
        # Built-in environments only: constructing a user's environment may start a simulator.
        _try_settings(factory, settings)
    else:
        _check_methods(factory, name)

    def make() -> Environment:
        made: Environment = factory(**settings.settings)
        return made

    return make


WHOLE_RESPONSE_PARSERS = {"cohere_command3", "cohere_command4", "hf", "openai"}
"""Tool parsers in vLLM that cannot parse text alone: each is part of a parser of whole
responses."""


@cache
def tool_parsers() -> tuple[str, ...]:
    """Return the names of the tool parsers that vLLM registers."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    # Parsed, not imported: importing vLLM takes seconds and sets environment variables.
    package = Path(spec.submodule_search_locations[0], "tool_parsers", "__init__.py")
    for statement in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            names = (key.value for key in statement.value.keys if isinstance(key, ast.Constant))
            return tuple(sorted({str(name) for name in names} - WHOLE_RESPONSE_PARSERS))
    raise RuntimeError(f"{package} registers no tool parsers")


def require_tool_parser(name: str) -> None:
    """Raise EnvironmentRefused if vLLM has no tool parser `name`."""
    if name not in tool_parsers():
        raise EnvironmentRefused(
            PARSER_KEY,
            f"vLLM has no tool parser {name!r}",
            f"{suggestion(name, tool_parsers())}use one of {', '.join(tool_parsers())}",
        )


def _import(module_name: str, name: str) -> Any:
    try:
        return imported(module_name, name, KEY.removesuffix(".name"))
    except RewardError as error:
        raise EnvironmentRefused(error.where, error.what, error.fix) from error


def package_modules(package: str, *modules: str) -> list[Any]:
    """Import modules of a package that an environment needs. Raises EnvironmentRefused."""
    try:
        return [importlib.import_module(name) for name in modules]
    except ModuleNotFoundError as error:
        what = f"the environment needs the package {package} ({error})"
        fix = f"pip install -U {shlex.quote(package)}"
        raise EnvironmentRefused(KEY, what, fix) from error


def _check_settings(factory: Any, settings: EnvironmentConfig) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**settings.settings)
    except TypeError as error:
        raise EnvironmentRefused(
            SETTINGS,
            f"{settings.name} takes {signature}: {error}",
            "set the arguments of this signature, and no others",
        ) from error


def _try_settings(factory: Any, settings: EnvironmentConfig) -> None:
    try:
        made = factory(**settings.settings)
    except EnvironmentRefused:
        raise
    except RewardError as error:
        raise EnvironmentRefused(SETTINGS, error.what, error.fix) from error
    except Exception as error:
        reported = (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        raise EnvironmentRefused(
            SETTINGS,
            reported,
            f"correct the settings ({shipped('docs/environments.md')})",
        ) from error
    # The inner limit reports a slow tool to the model; the outer limit would fail the sample.
    if getattr(made, "timeout_s", 0.0) >= settings.timeout_s:
        raise EnvironmentRefused(
            "rollout.environment.settings.timeout_s",
            f"{made.timeout_s:g} s is not below rollout.environment.timeout_s:"
            f" {settings.timeout_s:g}, the limit after which the sample fails",
            "decrease this limit, or increase rollout.environment.timeout_s",
        )


def _check_methods(factory: Any, name: str) -> None:
    """Check the methods of a factory that is a class. A function's object is unknown before the
    call."""
    if not inspect.isclass(factory):
        return
    for method, takes in (("reset", "prompt"), ("step", "response")):
        function = getattr(factory, method, None)
        if not callable(function):
            what = f"{name!r} has no method {method}({takes})"
            raise EnvironmentRefused(KEY, what, f"add it: def {method}(self, {takes})")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            what = f"{method} of {name!r} takes {inspect.signature(function)}: {error}"
            fix = f"change it to def {method}(self, {takes})"
            raise EnvironmentRefused(KEY, what, fix) from error


async def settled[Answer](answer: Answer | Awaitable[Answer]) -> Answer:
    """Return the result of a method that may be `async`."""
    if inspect.isawaitable(answer):
        return await answer
    return answer


def checked_content(content: Any, source: str) -> TurnContent:
    """Return the content, which may be text or a list of messages with text, with bytes outside of
    UTF-8 escaped; a shell's output may contain such bytes. Raises TypeError for any other content.
    `source`: origin of the content, for the error message."""
    if content is None:
        return ""
    # Lone surrogates from decoded shell output would fail later, in the tokenizer or the log.
    if isinstance(content, str):
        return content.encode(errors="backslashreplace").decode()
    if isinstance(content, Sequence) and all(
        isinstance(one, Mapping)
        and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str)
        for one in content
    ):
        return [
            {**one, "content": one["content"].encode(errors="backslashreplace").decode()}
            for one in content
        ]
    excerpt = json.dumps(content, default=str)[:80]
    raise TypeError(
        f"{source} must be text or a list of messages with role and content, both text: {excerpt}"
    )


def require_finite(value: float, name: str) -> None:
    """Raise ValueError for NaN, infinity, and a value whose sums might overflow float32."""
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name} is {value}, not a finite number of at most {LARGEST:g}")


def checked_step(step: Any) -> dict[str, Any]:
    """Return the fields of a step. Raises TypeError or ValueError for an invalid step."""
    if not isinstance(step, EpisodeStep):
        raise TypeError(f"step returned a {type(step).__name__}, not an EpisodeStep")
    content = checked_content(step.observation, "the observation of a step")
    reward = float(step.reward)
    measured = {
        str(name).encode(errors="backslashreplace").decode(): float(value)
        for name, value in step.measured.items()
    }
    for name in measured:
        # The metrics `reward/part/NAME` and `eval/part/NAME` contain it.
        if not name or "/" in name:
            raise ValueError(f"{name!r:.80} cannot name a measured value: it is empty, or has a /")
    for name, value in {"the reward": reward, **measured}.items():
        require_finite(value, f"{name} of a step")
    flags = {"done": step.done, "train": step.train}
    for name, flag in flags.items():
        # Text such as "false" is true in Python: raise an error instead of ending the sample.
        if flag not in (True, False):
            raise TypeError(f"{name} of a step is {flag!r:.80}, not True or False")
        flags[name] = bool(flag)  # converts numpy's bool, too
    # Plain values: the result crosses a process boundary, where user classes cannot be unpickled.
    return {"observation": content, "reward": reward, "measured": measured, **flags}


def load_calls(environment: Mapping[str, Any]) -> LoadedCode:
    """Import the environment that the settings name. Raises EnvironmentRefused."""
    return LoadedCode(_EnvironmentCalls(load_factory(EnvironmentConfig(**environment))))


class _EnvironmentCalls:
    """Callable that passes (method, argument) to the environment of the current sample."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._environment: Environment | None = None

    def __call__(self, payload: tuple[str, Any]) -> Any:
        method, argument = payload
        if method == "run":
            # Called outside of an event loop, because a plain function may start its own.
            agent: Any = self._factory()
            return self._reward(agent.run(*argument))
        return getattr(self, method)(argument)

    async def _reward(self, returned: Any) -> float:
        reward = float(await settled(returned))
        # Normalization would spread a NaN reward over the whole group.
        require_finite(reward, "the reward")
        return reward

    async def reset(self, prompt: Any) -> Any:
        # A new object for each sample, so no state carries over from the last sample.
        self._environment = self._factory()
        opening = await settled(self._environment.reset(prompt))
        return checked_content(opening, "the result of reset")

    async def step(self, response: Any) -> dict[str, Any]:
        assert self._environment is not None
        return checked_step(await settled(self._environment.step(response)))

    async def close(self, _: None) -> None:
        close = getattr(self._environment, "close", None)
        # Before the call, so that the object is released even if its `close` raises.
        self._environment = None
        if close is not None:
            await settled(close())

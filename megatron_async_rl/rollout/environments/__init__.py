"""Environments: programs that answer the model's turns. Their protocol, their lookup by name, and
the calls of one in its process: `reset`, `step` and `close`, sample by sample, or `run` for an
agent's whole run.

Invariants of every environment:
- an object serves one sample; it has its process to itself from `reset` to the end;
- a wrong or strange response is not a failure: the environment answers it with a low reward. An
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
"""Function that an environment's process calls first (isolation/child.py)."""
BUILT_IN = {
    one.name: f"{__name__}.built_in.{one.name}:ENVIRONMENT"
    for one in pkgutil.iter_modules([f"{__path__[0]}/built_in"])
}
"""Name -> factory. Each file of built_in/ is an environment."""

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and further keys that the template reads."""
UNREAD = "unread_tool_call"
"""Key of a model's message: the reason why its tool call could not be read."""
UNREAD_CALLS = "unread_tool_calls"
"""Name under which a sample measures the number of such calls."""
TurnContent = str | Sequence[Message]
"""Content from an environment: text (with the role `user`), or chat messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer to one turn of the model.

    `observation`: content that the model reads next; ignored with `done`. `reward`: reward of this
    turn; the sample's reward is the sum over turns. `done`: the sample ends with this turn.
    `train`: false excludes the turn's tokens from the loss. `measured`: numbers by name, such as
    {"tool_errors": 1}, that are not part of the reward; their sums per sample are logged as
    `reward/part/NAME`.
    """

    observation: TurnContent = ""
    reward: float = 0.0
    done: bool = False
    train: bool = True
    measured: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Both methods may be `async`. An optional method `close()` is called at the end."""

    def reset(self, prompt: Prompt, /) -> TurnContent | Awaitable[TurnContent | None] | None:
        """Begin a sample. The returned content is appended to the prompt."""
        ...

    def step(self, response: str, /) -> Step | Awaitable[Step]:
        """Answer a turn. `response`: text of the turn, without special tokens."""
        ...


class EnvironmentRefused(RewardError):
    """An environment cannot be loaded. `where`: the configuration's key."""


def load_factory(settings: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a factory that makes the environment of one sample. Raises EnvironmentRefused."""
    name = BUILT_IN.get(settings.name, settings.name)
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        what = f"{name!r} is not module:factory"
        known = ", ".join(BUILT_IN)
        fix = f"{suggestion(name, BUILT_IN)}write for example my_game:Game, or one of {known}"
        raise EnvironmentRefused(KEY, what, fix)
    module = _import(module_name, name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        what = f"module {module_name!r} has no {attribute!r} that can be called"
        raise EnvironmentRefused(KEY, what, f"check the spelling in {name!r}")
    _check_settings(factory, settings)
    if settings.name in (TOOLS, *AGENTS):
        require_tool_parser(settings.tool_parser)
    if settings.name in BUILT_IN:
        # Only built-in environments: making one of the user's may start a simulator.
        _try_settings(factory, settings)
    else:
        _check_methods(factory, name)

    def make() -> Environment:
        made: Environment = factory(**settings.settings)
        return made

    return make


WHOLE = {"cohere_command3", "cohere_command4", "hf", "openai"}
"""Tool parsers of vLLM that cannot parse text alone: they belong to parsers of whole responses."""


@cache
def tool_parsers() -> tuple[str, ...]:
    """Return the names of the tool parsers that vLLM registers."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations
    # Parsed, not imported: importing vLLM takes seconds and sets environment variables.
    package = Path(found.submodule_search_locations[0], "tool_parsers", "__init__.py")
    for statement in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            names = (key.value for key in statement.value.keys if isinstance(key, ast.Constant))
            return tuple(sorted({str(name) for name in names} - WHOLE))
    raise RuntimeError(f"{package} registers no tool parsers")


def require_tool_parser(name: str) -> None:
    """Raise EnvironmentRefused for a name that vLLM does not have."""
    if name not in tool_parsers():
        raise EnvironmentRefused(
            PARSER_KEY,
            f"vLLM has no tool parser {name!r}",
            f"{suggestion(name, tool_parsers())}it has {', '.join(tool_parsers())}",
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
        what = f"it needs the package {package} ({error})"
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
            "set these arguments, and no others",
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
    # The model should read that a tool was slow; the outer limit would end the sample first.
    if getattr(made, "timeout_s", 0.0) >= settings.timeout_s:
        raise EnvironmentRefused(
            "rollout.environment.settings.timeout_s",
            f"{made.timeout_s:g} s is not below rollout.environment.timeout_s:"
            f" {settings.timeout_s:g}, after which the sample fails",
            "lower the former or raise the latter",
        )


def _check_methods(factory: Any, name: str) -> None:
    """Check the methods of a class. The object that a function makes is unknown until the call."""
    if not inspect.isclass(factory):
        return
    for method, takes in (("reset", "prompt"), ("step", "response")):
        function = getattr(factory, method, None)
        if not callable(function):
            what = f"{name!r} has no method {method}({takes})"
            raise EnvironmentRefused(KEY, what, f"write it: def {method}(self, {takes})")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            what = f"{method} of {name!r} takes {inspect.signature(function)}: {error}"
            fix = f"write it as def {method}(self, {takes})"
            raise EnvironmentRefused(KEY, what, fix) from error


async def settled[Answer](answer: Answer | Awaitable[Answer]) -> Answer:
    """Return the result of a method that may be `async`."""
    if inspect.isawaitable(answer):
        return await answer
    return answer


def checked_content(content: Any, source: str) -> TurnContent:
    """Return the content as text that UTF-8 can encode; bytes outside UTF-8, as in a shell's
    output, are escaped. Raises TypeError for anything but text or a list of text messages.
    `source`: the origin of the content, for the error."""
    if content is None:
        return ""
    # Lone surrogates, from decoded shell output, would fail later, in the tokenizer or the log.
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
    shown = json.dumps(content, default=str)[:80]
    raise TypeError(
        f"{source} must be text or a list of messages with role and content, both text: {shown}"
    )


def require_finite(value: float, name: str) -> None:
    """Raise ValueError for NaN, and for a value whose sums might overflow float32."""
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name} is {value}, not a finite number of at most {LARGEST:g}")


def checked_step(step: Any) -> dict[str, Any]:
    """Return the fields of a step. Raises TypeError or ValueError for an invalid one."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}, not a Step")
    content = checked_content(step.observation, "the observation of a step")
    reward = float(step.reward)
    measured = {
        str(name).encode(errors="backslashreplace").decode(): float(value)
        for name, value in step.measured.items()
    }
    for name, value in {"the reward": reward, **measured}.items():
        require_finite(value, f"{name} of a step")
    flags = {"done": step.done, "train": step.train}
    for name, flag in flags.items():
        # A text such as "false" is true in Python: refuse it instead of ending the sample.
        if flag not in (True, False):
            raise TypeError(f"{name} of a step is {flag!r:.80}, not True or False")
        flags[name] = bool(flag)  # converts numpy's bool, too
    # Plain values: the result crosses a process boundary, where user classes cannot be unpickled.
    return {"observation": content, "reward": reward, "measured": measured, **flags}


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

"""The protocol of an environment: it opens a conversation and answers each turn of the model.

Invariants every environment keeps:
- an object serves one sample; it lives in a process of its own from `reset` to the end;
- a wrong or strange response is no failure: it is answered, and rewarded low. What raises costs its
  sample.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megatron_async_rl.config.environment import EnvironmentConfig
from megatron_async_rl.rollout.rewards.registry import RewardError, imported
from megatron_async_rl.samples.types import Prompt

KEY = "rollout.environment.name"
BUILT_IN = {
    "agent": f"{__package__}.agent:Agent",
    "verifiers": f"{__package__}.verifiers:Verifiers",
    "openenv": f"{__package__}.openenv:OpenEnv",
}

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and whatever else the template reads."""
Words = str | Sequence[Message]
"""What an environment says: text (of the user's role), or chat messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer to one turn of the model.

    `observation`: what it reads next; of no effect with `done`. `reward`: of this turn; a sample's
    is their sum. `done`: the sample ends with this turn. `train`: false leaves the turn's tokens
    out of the loss.
    """

    observation: Words = ""
    reward: float = 0.0
    done: bool = False
    train: bool = True


class Environment(Protocol):
    """Both methods may be `async`; a method `close()`, where there is one, is called at the end."""

    def reset(self, prompt: Prompt, /) -> Words | Awaitable[Words | None] | None:
        """Begins; what it returns is put behind the prompt."""
        ...

    def step(self, response: str, /) -> Step | Awaitable[Step]:
        """`response`: the text of the model's turn, without special tokens."""
        ...


class EnvironmentRefused(ValueError):
    """An environment that cannot be loaded. `where`: the configuration's key."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


def load_factory(settings: EnvironmentConfig) -> Callable[[], Environment]:
    """A call makes the environment of one sample. Raises EnvironmentRefused."""
    name = BUILT_IN.get(settings.name, settings.name)
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        what = f"{name!r} is not module:factory"
        fix = f"{hint}write for example my_game:Game, or one of {', '.join(BUILT_IN)}"
        raise EnvironmentRefused(KEY, what, fix)
    module = _import(module_name, name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        what = f"module {module_name!r} has no {attribute!r} that can be called"
        raise EnvironmentRefused(KEY, what, f"check the spelling in {name!r}")
    _check_settings(factory, settings)
    if settings.name in BUILT_IN:
        _try_settings(factory, settings)
    else:
        _check_methods(factory, name)

    def make() -> Environment:
        made: Environment = factory(**settings.settings)
        return made

    return make


def _import(module_name: str, name: str) -> Any:
    try:
        return imported(module_name, name, KEY.removesuffix(".name"))
    except RewardError as error:
        raise EnvironmentRefused(error.where, error.what, error.fix) from error


def _check_settings(factory: Any, settings: EnvironmentConfig) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**settings.settings)
    except TypeError as error:
        raise EnvironmentRefused(
            "rollout.environment.settings",
            f"{settings.name} takes {signature}: {error}",
            "give it the arguments that it takes",
        ) from error


def _try_settings(factory: Any, settings: EnvironmentConfig) -> None:
    try:
        factory(**settings.settings)
    except Exception as error:
        raise EnvironmentRefused(
            "rollout.environment.settings",
            f"{type(error).__name__}: {error}",
            "give it the settings that it takes (docs/environments.md)",
        ) from error


def _check_methods(factory: Any, name: str) -> None:
    """Of a class; what a function returns is known once it is called."""
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
    """What a method that may be `async` returns."""
    if inspect.isawaitable(answer):
        return await answer
    return answer


def checked_words(words: Any, source: str) -> Words:
    """Raises TypeError for what is neither text nor a list of messages. `source`: who said it."""
    if words is None:
        return ""
    if isinstance(words, str):
        return words
    if isinstance(words, Sequence) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one
        for one in words
    ):
        return [dict(one) for one in words]
    shown = json.dumps(words, default=str)[:80]
    raise TypeError(f"{source} must be text or a list of messages with role and content: {shown}")


def checked_step(step: Any) -> dict[str, Any]:
    """The fields of a step. Raises TypeError or ValueError for what is no step."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}, not a Step")
    words = checked_words(step.observation, "the observation of a step")
    reward = float(step.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a step is {reward}, not a finite number")
    return asdict(step) | {"observation": words, "reward": reward}

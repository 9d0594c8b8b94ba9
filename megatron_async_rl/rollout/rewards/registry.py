"""Rewards: a response goes in, a number comes out. Built-in ones by name, and any `module:function`
that Python can import, the working directory included.

Invariants every reward keeps:
- whatever a response contains, it answers with a finite number; it raises only for what is wrong
  with the *prompt's* data;
- it keeps nothing between calls that a later call needs: it is called in several processes, and a
  process that hangs or dies is replaced.

A new built-in reward is one file here that defines `REWARD`, and its name in `BUILT_IN`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_async_rl.samples.types import Prompt

BUILT_IN = ("arithmetic", "countdown", "math", "environment")
"""Each is the module of this package with that name."""

KEY = "rollout.reward.name"


class Reward(Protocol):
    def __call__(self, prompt: Prompt, response: str, /) -> float:
        """`response`: the sampled text without special tokens. Called as reward(prompt,
        response)."""
        ...


class RewardError(ValueError):
    """A reward cannot be loaded (`where` is the configuration's key), or a prompt lacks what its
    reward reads (`where` names the prompt)."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class BuiltInReward:
    """A reward of this package and how it is called."""

    function: Reward
    required_fields: tuple[str, ...] = ()
    """Keys that every JSONL line needs beside `prompt`."""
    inline: bool = False
    """Called on the engine's event loop instead of in a process: for work of microseconds, bounded
    whatever the response is."""
    requires: str | None = None
    """Module of another package, imported before the first call."""
    cpu_limit_s: float | None = None
    """A response that takes more processor time is wrong (0), which is no error."""
    memory_mib: int | None = None
    """Most address space of the process that calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """`error` says why there is no reward; `reward` is 0.0 then."""

    reward: float
    error: str | None = None


def score(reward: Reward, prompt: Prompt, response: str) -> Scored:
    """Calls the reward; an exception, and a value that is not a finite number, are errors of this
    response."""
    try:
        returned = reward(prompt, response)
        if returned is None:
            return Scored(reward=0.0, error="the reward returned nothing, not a number")
        value = float(returned)
    except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
        text = str(error).encode(errors="backslashreplace").decode()
        return Scored(reward=0.0, error=type(error).__name__ + (f": {text}" if text else ""))

    if not math.isfinite(value):
        return Scored(reward=0.0, error=f"the reward is {value}, not a finite number")
    return Scored(reward=value)


def built_in(name: str) -> BuiltInReward | None:
    if name not in BUILT_IN:
        return None
    found: BuiltInReward = importlib.import_module(f"{__package__}.{name}").REWARD
    return found


def required_fields(name: str) -> tuple[str, ...]:
    """Keys that every JSONL line needs for this reward, beside `prompt`; those that a
    `module:function` reads are unknown."""
    found = built_in(name)
    return found.required_fields if found is not None else ()


def load_reward(name: str) -> Reward:
    """Raises RewardError for an unknown name, an import that fails, or an object that cannot be
    called as function(prompt, response)."""
    found = built_in(name)
    if found is not None:
        return _with_requirement(name, found)

    module_name, separator, function_name = name.partition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise RewardError(
            KEY,
            f"no reward {name!r}",
            f"{hint}use one of {', '.join(BUILT_IN)}, or module:function",
        )
    if not module_name or not function_name or module_name.startswith("."):
        raise RewardError(
            KEY, f"{name!r} is not module:function", "write for example my_rewards:score"
        )

    function = getattr(_import(module_name, name), function_name, None)
    if function is None:
        raise RewardError(
            KEY,
            f"module {module_name!r} has no {function_name!r}",
            f"check the spelling in {name!r}",
        )
    _check_callable(function, name)
    reward: Reward = function
    return reward


def text_field(prompt: Prompt, name: str) -> str:
    """`prompt.fields[name]` as stripped text; whole numbers are taken too. Raises RewardError
    naming prompt and key."""
    value = prompt.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise RewardError(
            f"prompt {prompt.id}",
            f"`{name}` is {value!r}",
            f"give its JSONL line a `{name}`: text or a whole number",
        )
    return str(value).strip()


def _with_requirement(name: str, found: BuiltInReward) -> Reward:
    if found.requires is not None and importlib.util.find_spec(found.requires) is None:
        package = found.requires.replace("_", "-")
        raise RewardError(
            KEY, f"{name} needs the package {package}", f"install it: pip install {package}"
        )
    return found.function


def _import(module_name: str, name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                KEY, f"importing {module_name!r} failed: {error}", f"install or fix {error.name}"
            ) from error
        raise RewardError(
            KEY,
            f"{name!r}: no module {error.name!r} in {os.getcwd()} or on Python's path",
            "start from the folder that holds it, install it, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(
            KEY, f"importing {module_name!r} failed: {what}", "fix that file"
        ) from error


def _check_callable(function: Any, name: str) -> None:
    if not callable(function):
        raise RewardError(
            KEY,
            f"{name!r} is a {type(function).__name__}, not a function",
            "name a function(prompt, response)",
        )
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            KEY, f"{name!r} is async", "write a plain function, it runs in its own process"
        )

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature to check
        return
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise RewardError(
            KEY,
            f"{name!r} takes {signature}, but is called with (prompt, response): {error}",
            "give it exactly two positional parameters",
        ) from error

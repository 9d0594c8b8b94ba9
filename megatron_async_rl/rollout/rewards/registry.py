"""Rewards by name: the built-in ones, and any `module:function` that Python can import, the working directory included."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from typing import Any

from megatron_async_rl.rollout.rewards import arithmetic, countdown, math
from megatron_async_rl.rollout.rewards.reward import Reward, RewardError

BUILT_IN: dict[str, tuple[Reward, tuple[str, ...]]] = {
    "arithmetic": (arithmetic.arithmetic, arithmetic.REQUIRED_FIELDS),
    "countdown": (countdown.countdown, countdown.REQUIRED_FIELDS),
    "math": (math.math, math.REQUIRED_FIELDS),
}


def required_fields(name: str) -> tuple[str, ...]:
    """Keys every JSONL line needs for this reward, beside `prompt`; a `module:function` may read whatever it likes."""
    return BUILT_IN[name][1] if name in BUILT_IN else ()


def load_reward(name: str) -> Reward:
    """Raises RewardError, with the fix, for an unknown name, an import that fails, or what cannot be called as
    function(prompt, response)."""
    if name in BUILT_IN:
        if name == "math" and importlib.util.find_spec("math_verify") is None:
            raise RewardError("rollout.reward.name: math needs the package math-verify; install it: pip install math-verify")
        return BUILT_IN[name][0]
    module_name, separator, function_name = name.partition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise RewardError(f"rollout.reward.name: no reward {name!r}; {hint}use one of {', '.join(BUILT_IN)}, or module:function")
    if not module_name or not function_name:
        raise RewardError(f"rollout.reward.name: {name!r} is not module:function; write for example my_rewards:score")
    function = getattr(_import(module_name, name), function_name, None)
    if function is None:
        raise RewardError(f"rollout.reward.name: module {module_name!r} has no {function_name!r}; check the spelling in {name!r}")
    _check_callable(function, name)
    reward: Reward = function
    return reward


def _import(module_name: str, name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"rollout.reward.name: importing {module_name!r} failed: {error}; install or fix {error.name}"
            ) from error
        raise RewardError(
            f"rollout.reward.name: {name!r}: no module {error.name!r} in {os.getcwd()} or on Python's path; "
            "start from the folder that holds it, install it, or set PYTHONPATH"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(f"rollout.reward.name: importing {module_name!r} failed: {what}; fix that file") from error


def _check_callable(function: Any, name: str) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise RewardError(f"rollout.reward.name: {name!r} is a {kind}, not a function; name a function(prompt, response)")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"rollout.reward.name: {name!r} is async; write a plain function, it runs in its own thread")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature to check
        return
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise RewardError(
            f"rollout.reward.name: {name!r} takes {signature}, but is called with (prompt, response): {error}; "
            "give it exactly two positional parameters"
        ) from error

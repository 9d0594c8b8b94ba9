"""Rewards: functions that score a response with a number. A reward is a built-in name, or a
`module:function` that Python can import, including from the working directory.

    def score(prompt, response) -> float
    def score(prompts, responses) -> list[float]         several waiting responses per call
    def score(prompt, responses) -> list[float]          all responses to a prompt (`per: group`)
    async def score(...)                                 concurrent calls
    def score(prompt, response, *, finish_reason, mine)  context, and the reward's own settings

Invariants of every reward:
- it returns a finite number for every response, and raises only if data of the *prompt* is invalid;
- it keeps no state that a later call needs: several processes call it, and a process that hangs or
  dies is replaced.

To add a built-in reward, write the function in a module of this package, and add its name to the
`REWARDS` of that module and to `BUILT_IN`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

from megatron_async_rl.config.problem import suggestion
from megatron_async_rl.config.visible_text import is_blank, stripped
from megatron_async_rl.samples.types import FinishReason, Prompt

BUILT_IN = {
    "arithmetic": "answers",
    "countdown": "answers",
    "math": "mathematics",
    "code": "code",
    "http": "servers",
    "judge": "servers",
    "environment": "answers",
    "reasoning_gym": "tasks",
}
"""Name of a built-in reward -> module of this package whose `REWARDS` contains it."""

KEY = "rollout.reward"
LARGEST = 1e30
"""Limit of a reward's magnitude, so that a sum of 10^8 rewards fits into float32."""
BATCHED = ["prompts", "responses"]
"""Names of the first two parameters of a reward that takes lists."""
OF_GROUPS = ["prompt", "responses"]
"""Names of the first two parameters of a reward that takes all responses to a prompt."""


class Reward(Protocol):
    def __call__(self, prompt: Prompt, response: str, /) -> float:
        """Score `response`, the sampled text without special tokens."""
        ...


class RewardError(ValueError):
    """A reward cannot be loaded (`where` is the key in the configuration), or cannot use the data
    of a prompt (`where` names the prompt)."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ColumnError(RewardError):
    """A reward cannot use a value of a row. `column`: name of the value in the prompt's fields; its
    name in the data may differ. `fault`: predicate of a sentence whose subject is the column."""

    def __init__(self, where: str, column: str, fault: str, fix: str) -> None:
        super().__init__(where, f"`{column}` {fault}", fix)
        self.args = (where, column, fault, fix)  # pickle calls the class with `args`.
        self.column, self.fault = column, fault


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """Context of a response. A reward receives the fields that it declares as parameters."""

    finish_reason: FinishReason = "stop"
    tokens: int = 0
    """Number of response tokens."""
    seconds: float = 0.0
    """Duration of the request in its engine."""
    version: int = 0
    """Version of the weights with which the last token was sampled."""
    held_out: bool = False
    """True if the response belongs to an evaluation."""


NOTHING_KNOWN = RewardContext()
"""Context of a response that was not sampled."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("isolation", "limits"): "write isolation: rlimits, its present name"
}
"""Fix for each former value of a setting: (setting, value) -> fix."""
_WHOLE = re.compile(r"([-+]?[0-9]+)\.0+")
CONTEXT = (*RewardContext.__dataclass_fields__, "timeout_s")
"""Names of parameters that receive context if a reward declares them. `timeout_s`: time limit of
the call."""


@dataclass(frozen=True)
class RewardItem:
    """Response to score."""

    prompt: Prompt
    response: str
    context: RewardContext = NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class BuiltInReward:
    """Reward of this package, its checks and its limits."""

    function: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    """Columns that every row needs in addition to `prompt`."""
    fields_of: Callable[..., tuple[str, ...]] | None = None
    """Function of the settings that returns further columns."""
    check: Callable[..., None] | None = None
    """Function of the settings that raises RewardError. Called before anything starts."""
    validate: Callable[..., object] | None = None
    """Function of a row's prompt and the settings that raises RewardError for values that the
    reward cannot use. Called for each row before anything starts."""
    inline: bool = False
    """True if the engine's event loop calls the function itself. Permitted only if every possible
    response takes microseconds: a longer call would block sampling."""
    requires: str | None = None
    """Module of an optional package, which is imported before the first call."""
    cpu_limit_s: float | None = None
    """CPU time after which a response scores 0 as a wrong response, not as an error."""
    memory_mib: int | None = None
    """Maximum address space of the process that calls the function, in MiB."""


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """Reward with its settings, ready for calls."""

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    context: tuple[str, ...] = ()
    """Names in CONTEXT that the function takes."""
    batched: bool = False
    of_groups: bool = False
    asynchronous: bool

    @property
    def of_several(self) -> bool:
        """True if the function takes a list of responses and returns a list of numbers."""
        return self.batched or self.of_groups

    def arguments(
        self, items: list[RewardItem], timeout_s: float
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of one call with all `items`."""

        def values(name: str) -> Any:
            if name == "timeout_s":
                return timeout_s
            per_item = [getattr(item.context, name) for item in items]
            return per_item if self.of_several else per_item[0]

        prompts, responses = [item.prompt for item in items], [item.response for item in items]
        positional: list[Any] = [
            prompts if self.batched else prompts[0],
            responses if self.of_several else responses[0],
        ]
        return positional, dict(self.settings) | {name: values(name) for name in self.context}


def built_in(name: str) -> BuiltInReward | None:
    """Return the built-in reward `name`, or None for a `module:function`."""
    if name not in BUILT_IN:
        return None
    module = importlib.import_module(f"{__package__}.{BUILT_IN[name]}")
    reward: BuiltInReward = module.REWARDS[name]
    return reward


def required_fields(name: str, settings: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the columns that every row needs for this reward, in addition to `prompt`. For a
    `module:function`, they are unknown, and the result is empty."""
    reward = built_in(name)
    if reward is None:
        return ()
    more = reward.fields_of(**(settings or {})) if reward.fields_of is not None else ()
    return (*reward.required_fields, *more)


def validate_row(name: str, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise RewardError if a built-in reward cannot use the values of a row. A `module:function` is
    not checked, because the values that it reads are unknown."""
    reward = built_in(name)
    if reward is None:
        return
    # A null cell is a missing value of a column that exists.
    for one in required_fields(name, settings):
        if fields.get(one) is None:
            raise ColumnError("", one, "is null", "set a value in every row, or remove the row")
    if reward.validate is not None:
        # The prompt has no id, because the reader of the data adds file and line to the error.
        reward.validate(Prompt(id="", text="", token_ids=(0,), fields=fields), **settings)


def load_reward(
    name: str, settings: Mapping[str, Any] | None = None, key: str = KEY
) -> BoundReward:
    """Return the reward `name`, which section `key` of the configuration selects. Raises
    RewardError for an unknown name, a failed import, an object that cannot be called as
    function(prompt, response), and settings that the function does not take."""
    settings = settings or {}
    reward = built_in(name)
    if reward is not None:
        _require(name, reward, key)
        bound = _bind(reward.function, name, settings, key)
        if reward.check is not None:
            reward.check(**bound.settings, key=f"{key}.settings")
        return bound

    module_name, separator, function_name = name.partition(":")
    if not separator:
        hint = suggestion(name, BUILT_IN)
        before, _, last = name.rpartition(".")
        if before and last:
            hint = f"did you mean '{before}:{last}'? "
        raise RewardError(
            f"{key}.name",
            f"no reward {name!r}",
            f"{hint}use one of {', '.join(BUILT_IN)}, or module:function",
        )
    if not module_name or not function_name or module_name.startswith("."):
        raise RewardError(
            f"{key}.name",
            f"{name!r} is not of the form module:function",
            "write, for example, my_rewards:score",
        )

    module = imported(module_name, name, key)
    function = getattr(module, function_name, None)
    if function is None:
        raise RewardError(
            f"{key}.name",
            f"module {module_name!r} has no {function_name!r}",
            f"{suggestion(function_name, vars(module))}correct the spelling of {name!r}",
        )
    if not callable(function):
        raise RewardError(
            f"{key}.name",
            f"{name!r} is a {type(function).__name__}, not a function",
            "name a function(prompt, response)",
        )
    return _bind(function, name, settings, key)


def text_field(prompt: Prompt, name: str) -> str:
    """Return `prompt.fields[name]` as text without surrounding white space and invisible
    characters. Raises ColumnError for a value without a visible character, and for a value that is
    neither text nor a finite number."""
    value = prompt.fields.get(name)
    # Tables with empty cells store whole numbers as floats, so 27.0 means 27.
    if (whole := whole_number(value)) is not None:
        value = whole
    if isinstance(value, float) and math.isfinite(value):
        value = format(Decimal(repr(value)), "f")  # Without an exponent.
    text = str(value) if isinstance(value, (str, int, float, Decimal)) else ""
    finite = not isinstance(value, (float, Decimal)) or math.isfinite(value)
    if isinstance(value, bool) or is_blank(text) or not finite:
        what = f"is {excerpt(value)}"
        what += ", which has no visible character" if text.strip() and finite else ""
        raise ColumnError(f"prompt {prompt.id}", name, what, "write text or a number")
    text = stripped(text)
    return match[1] if (match := _WHOLE.fullmatch(text)) else text


def excerpt(value: object) -> str:
    """Return the beginning of the `repr` of `value`, with escapes if the text has no visible
    character."""
    try:
        text = ascii(value) if isinstance(value, str) and is_blank(value) else repr(value)
    # Python limits the number of digits that it converts.
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} that is too large to display"
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole_number(value: object) -> int | None:
    """Return the whole number in a cell, which may be 27.0 for 27; None for any other value."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if not isinstance(value, (float, Decimal)):
        return None
    if not math.isfinite(value) or value != int(value):
        return None
    return int(value)


def _require(name: str, reward: BuiltInReward, key: str) -> None:
    """Raise RewardError if the optional package of the reward is not installed."""
    if reward.requires is not None and importlib.util.find_spec(reward.requires) is None:
        package = reward.requires.replace("_", "-")
        raise RewardError(
            f"{key}.name",
            f"{name} needs the package {package}",
            f"install it: pip install {package}",
        )


def imported(module_name: str, name: str, key: str) -> Any:
    """Import the module `module_name` of `name`, which is the value of `key`.name, including from
    the current folder. Raises RewardError."""
    # Unlike `python`, the `mar` command does not have the current folder on its path.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # The file may be newer than the listing of its folder that Python caches.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The missing module is a different one: an import of the user's module fails.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"{key}.name",
                f"importing {module_name!r} failed: {error}",
                f"install or fix {error.name}",
            ) from error
        raise RewardError(
            f"{key}.name",
            f"{name!r}: no module {error.name!r} in {os.getcwd()} or on Python's path",
            "start in the folder that contains it, install it, or set PYTHONPATH",
        ) from error
    # An import runs user code, which may raise any exception, or exit.
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"{key}.name", f"importing {module_name!r} failed: {what}", "fix that file"
        ) from error


def _bind(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], key: str
) -> BoundReward:
    """Bind settings and context by name to the parameters after the first two. Other parameters
    keep their defaults."""
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself is needed
    )
    try:
        signature = inspect.signature(function)
    # Some C functions have no signature.
    except (TypeError, ValueError):
        if settings:
            what = f"{name!r} takes only prompt and response"
            raise RewardError(f"{key}.settings", what, "remove the settings") from None
        return BoundReward(function=function, asynchronous=asynchronous)

    first, others, takes_any = _parameters(signature)
    extra = [one for one in others if one in settings or one in CONTEXT]
    try:
        # Apply Python's own rules to the later call before any process starts.
        signature.bind(None, "", **dict.fromkeys([*settings, *extra]))
    except TypeError as error:
        unknown = [] if takes_any else [one for one in settings if one not in others]
        if unknown:
            raise RewardError(
                f"{key}.settings",
                f"{name} has no setting {unknown[0]!r}",
                f"{suggestion(unknown[0], others)}it takes"
                f" {', '.join(one for one in others if one not in CONTEXT) or 'none'}",
            ) from error
        needed = [one for one in others if one not in extra and _is_needed(signature, one)]
        if needed and len(first) == len(BATCHED):
            optional = [one for one in others if one not in (*needed, *CONTEXT)]
            also = f"; it also takes {', '.join(optional)}" if optional else ""
            own = "" if name in BUILT_IN else f", or rename it to one of {', '.join(CONTEXT)}"
            raise RewardError(
                f"{key}.settings",
                f"{name!r} needs {' and '.join(needed)}, and {needed[0]!r} is missing",
                f"write {key}.settings: {{{needed[0]}: ...}}{own}{also}",
            ) from error
        raise RewardError(
            f"{key}.name",
            f"{name!r} takes {signature}, but is called with (prompt, response): {error}",
            "make its first two parameters positional, and give each other parameter a default, a"
            f" setting, or a name out of {', '.join(CONTEXT)}",
        ) from error
    return BoundReward(
        function=function,
        settings=_typed(function, settings, key),
        # A setting takes precedence over context of the same name.
        context=tuple(one for one in others if one in CONTEXT and one not in settings),
        # Parameter names select the calling convention, so that users need no decorator.
        batched=first == BATCHED,
        of_groups=first == OF_GROUPS,
        asynchronous=asynchronous,
    )


def _parameters(signature: inspect.Signature) -> tuple[list[str], list[str], bool]:
    """Return (names of the first two positional parameters, names of the other parameters that can
    be passed by keyword, True if there is a `**` parameter)."""
    parameters = list(signature.parameters.values())
    positional = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    named = [
        one.name
        for one in (*positional[2:], *parameters)
        if one.kind == one.KEYWORD_ONLY or one in positional[2:]
    ]
    takes_any = any(one.kind == one.VAR_KEYWORD for one in parameters)
    return [one.name for one in positional[:2]], list(dict.fromkeys(named)), takes_any


def _is_needed(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].default is inspect.Parameter.empty


def _typed(
    function: Callable[..., Any], settings: Mapping[str, Any], key: str
) -> Mapping[str, Any]:
    """Return the settings, each converted to the annotated type of its parameter."""
    if not settings:
        return {}

    # Imported only when needed: without settings, a reward process starts faster.
    from pydantic import TypeAdapter, ValidationError

    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations that cannot be resolved are not checked
        return dict(settings)
    typed = dict(settings)
    for one in typed.keys() & hints.keys():
        try:
            typed[one] = TypeAdapter(hints[one]).validate_python(typed[one])
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].replace("Input should", "it should")
            what = f"got {settings[one]!r}: {message}"
            fix = RENAMED_VALUES.get((one, str(settings[one])), "change it")
            raise RewardError(f"{key}.settings.{one}", what, fix) from error
    return typed

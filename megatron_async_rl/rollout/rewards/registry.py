"""Rewards: functions that score a response with a number. Built-in rewards have names; any
`module:function` that Python can import, also from the working directory, is a reward, too.

    def score(prompt, response) -> float
    def score(prompts, responses) -> list[float]         all waiting responses in one call
    def score(prompt, responses) -> list[float]          all responses to a prompt (`per: group`)
    async def score(...)                                 many concurrent calls
    def score(prompt, response, *, finish_reason, mine)  context, and settings of its own

Invariants of every reward:
- it returns a finite number for every response; it raises only for invalid data of the *prompt*;
- it stores no state that a later call needs: several processes call it, and a process that hangs or
  dies is replaced.

A new built-in reward is a function here, an entry of its module's `REWARDS`, and its name in
`BUILT_IN`.
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
}
"""Name of a reward -> the module of this package whose `REWARDS` holds it."""

KEY = "rollout.reward"
LARGEST = 1e30
"""Bound of a reward's magnitude: a sum of 10^8 of them still fits into float32."""
BATCHED = ["prompts", "responses"]
"""Names of the parameters of a reward that takes lists."""
OF_GROUPS = ["prompt", "responses"]
"""Names of the parameters of a reward that takes all responses to a prompt."""


class Reward(Protocol):
    def __call__(self, prompt: Prompt, response: str, /) -> float:
        """Score `response`, the sampled text without special tokens."""
        ...


class RewardError(ValueError):
    """A reward cannot be loaded (`where` is the configuration's key), or a prompt lacks what its
    reward reads (`where` names the prompt)."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class ColumnError(RewardError):
    """A value of a row that its reward cannot use. `column`: name of the value among the prompt's
    fields; the data may call it otherwise. `fault`: completes a sentence that starts with it."""

    def __init__(self, where: str, column: str, fault: str, fix: str) -> None:
        super().__init__(where, f"`{column}` {fault}", fix)
        self.args = (where, column, fault, fix)  # pickle calls the class with `args`
        self.column, self.fault = column, fault


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """Origin of a response. A reward receives the fields that it declares as parameters."""

    finish_reason: FinishReason = "stop"
    tokens: int = 0
    """Number of response tokens."""
    seconds: float = 0.0
    """Time from the start of the request in its engine to its end."""
    version: int = 0
    """Version of the weights that sampled the last token."""
    held_out: bool = False
    """True for a response of an evaluation."""


NOTHING_KNOWN = RewardContext()
"""Context of a response that was not sampled."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("isolation", "limits"): "write isolation: rlimits, its present name"
}
"""Fixes for former values of settings."""
_WHOLE = re.compile(r"([-+]?[0-9]+)\.0+")
CONTEXT = (*RewardContext.__dataclass_fields__, "timeout_s")
"""Names of parameters that a reward may declare to receive context. `timeout_s`: the time limit
of the call."""


@dataclass(frozen=True)
class RewardItem:
    """A response to score."""

    prompt: Prompt
    response: str
    context: RewardContext = NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class BuiltInReward:
    """A reward of this package, and the way to call it."""

    function: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    """Keys that every JSONL line needs besides `prompt`."""
    fields_of: Callable[..., tuple[str, ...]] | None = None
    """Function of the settings that returns further keys."""
    check: Callable[..., None] | None = None
    """Function of the settings, called before anything starts; raises RewardError."""
    validate: Callable[..., object] | None = None
    """Function of a row's prompt and the settings, called for each row before anything starts;
    raises RewardError for values that the reward cannot use."""
    inline: bool = False
    """True if the engine's event loop calls it without a process. Only for rewards that need
    microseconds for every possible response: a longer call would stall sampling."""
    requires: str | None = None
    """Module of an optional package, imported before the first call."""
    cpu_limit_s: float | None = None
    """CPU time after which a response scores 0: it is wrong, not an error."""
    memory_mib: int | None = None
    """Maximum address space of the process that calls it."""


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """A reward with its settings, ready to be called."""

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    context: tuple[str, ...] = ()
    """Names of CONTEXT that the function takes."""
    batched: bool = False
    of_groups: bool = False
    asynchronous: bool = False

    @property
    def of_several(self) -> bool:
        """True if it takes a list of responses and returns a list of numbers."""
        return self.batched or self.of_groups

    def arguments(
        self, items: list[RewardItem], timeout_s: float
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of one call with all `items`."""

        def values(name: str) -> Any:
            if name == "timeout_s":
                return timeout_s
            every = [getattr(item.context, name) for item in items]
            return every if self.of_several else every[0]

        prompts, responses = [item.prompt for item in items], [item.response for item in items]
        positional: list[Any] = [
            prompts if self.batched else prompts[0],
            responses if self.of_several else responses[0],
        ]
        return positional, dict(self.settings) | {name: values(name) for name in self.context}


def built_in(name: str) -> BuiltInReward | None:
    if name not in BUILT_IN:
        return None
    module = importlib.import_module(f"{__package__}.{BUILT_IN[name]}")
    found: BuiltInReward = module.REWARDS[name]
    return found


def required_fields(name: str, settings: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Keys that every JSONL line needs for this reward, in addition to `prompt`. Unknown, hence
    empty, for a `module:function`."""
    found = built_in(name)
    if found is None:
        return ()
    more = found.fields_of(**(settings or {})) if found.fields_of is not None else ()
    return (*found.required_fields, *more)


def validate_row(name: str, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Check the values of a row that a built-in reward reads. Raises RewardError. A
    `module:function` is not checked: the values that it reads are unknown."""
    found = built_in(name)
    if found is None:
        return
    # A null cell means that the column exists and this row lacks a value.
    for one in required_fields(name, settings):
        if fields.get(one) is None:
            raise ColumnError("", one, "is null", "give every row a value, or leave the row out")
    if found.validate is not None:
        # Without an id: the reader of the data adds file and line.
        found.validate(Prompt(id="", text="", token_ids=(0,), fields=fields), **settings)


def load_reward(
    name: str, settings: Mapping[str, Any] | None = None, key: str = KEY
) -> BoundReward:
    """Return the reward that section `key` of the configuration names. Raises RewardError for an
    unknown name, a failed import, an object that cannot be called as function(prompt, response),
    and settings that the function does not take."""
    settings = settings or {}
    found = built_in(name)
    if found is not None:
        _require(name, found, key)
        bound = _bind(found.function, name, settings, key)
        if found.check is not None:
            found.check(**bound.settings, key=f"{key}.settings")
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
            f"{key}.name", f"{name!r} is not module:function", "write for example my_rewards:score"
        )

    module = imported(module_name, name, key)
    function = getattr(module, function_name, None)
    if function is None:
        raise RewardError(
            f"{key}.name",
            f"module {module_name!r} has no {function_name!r}",
            f"{suggestion(function_name, vars(module))}check the spelling in {name!r}",
        )
    if not callable(function):
        raise RewardError(
            f"{key}.name",
            f"{name!r} is a {type(function).__name__}, not a function",
            "name a function(prompt, response)",
        )
    return _bind(function, name, settings, key)


def text_field(prompt: Prompt, name: str) -> str:
    """Return `prompt.fields[name]` as text, without surrounding white space and invisible
    characters. Raises ColumnError for a value without a visible character, and for a value that is
    neither text nor a finite number."""
    value = prompt.fields.get(name)
    # Tables with empty cells store whole numbers as floats: 27.0 stands for 27.
    if (whole := whole_number(value)) is not None:
        value = whole
    if isinstance(value, float) and math.isfinite(value):
        value = format(Decimal(repr(value)), "f")  # without an exponent
    text = str(value) if isinstance(value, (str, int, float, Decimal)) else ""
    finite = not isinstance(value, (float, Decimal)) or math.isfinite(value)
    if isinstance(value, bool) or is_blank(text) or not finite:
        what = f"is {shown(value)}" + (", which shows nothing" if text.strip() and finite else "")
        raise ColumnError(f"prompt {prompt.id}", name, what, "write text or a number into it")
    text = stripped(text)
    return found[1] if (found := _WHOLE.fullmatch(text)) else text


def shown(value: object) -> str:
    """Return the beginning of `value` as Python writes it, with escapes for what would be
    invisible."""
    try:
        text = ascii(value) if isinstance(value, str) and is_blank(value) else repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole_number(value: object) -> int | None:
    """Whole number of a cell, which may be written as 27.0; None for any other value."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if not isinstance(value, (float, Decimal)):
        return None
    if not math.isfinite(value) or value != int(value):
        return None
    return int(value)


def _require(name: str, found: BuiltInReward, key: str) -> None:
    if found.requires is not None and importlib.util.find_spec(found.requires) is None:
        package = found.requires.replace("_", "-")
        raise RewardError(
            f"{key}.name",
            f"{name} needs the package {package}",
            f"install it: pip install {package}",
        )


def imported(module_name: str, name: str, key: str) -> Any:
    """Import the module of `name`, the value of `key`.name, also from the current folder. Raises
    RewardError."""
    # The `mar` command starts without the current folder on its path, unlike `python`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # The file may be newer than the cached listing of its folder.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Another module is missing: the user's module exists, and one of its own imports fails.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise RewardError(
                f"{key}.name",
                f"importing {module_name!r} failed: {error}",
                f"install or fix {error.name}",
            ) from error
        raise RewardError(
            f"{key}.name",
            f"{name!r}: no module {error.name!r} in {os.getcwd()} or on Python's path",
            "start from the folder that holds it, install it, or set PYTHONPATH",
        ) from error
    # Importing runs user code, which may raise anything, or exit.
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"{key}.name", f"importing {module_name!r} failed: {what}", "fix that file"
        ) from error


def _bind(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], key: str
) -> BoundReward:
    """Bind settings and context by name to the parameters after the first two; the others keep
    their defaults."""
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it exists
    )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        if settings:
            what = f"{name!r} is called with prompt and response alone"
            raise RewardError(f"{key}.settings", what, "remove them") from None
        return BoundReward(function=function, asynchronous=asynchronous)

    first, others, takes_any = _parameters(signature)
    extra = [one for one in others if one in settings or one in CONTEXT]
    try:
        # Python's own rules decide whether the later call fits, before any process starts.
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
            own = "" if name in BUILT_IN else f", or make it one of {', '.join(CONTEXT)}"
            raise RewardError(
                f"{key}.settings",
                f"{name!r} needs {' and '.join(needed)}, and {needed[0]!r} is missing",
                f"write {key}.settings: {{{needed[0]}: ...}}{own}{also}",
            ) from error
        raise RewardError(
            f"{key}.name",
            f"{name!r} takes {signature}, but is called with (prompt, response): {error}",
            "let its first two parameters be positional, and give each other one a default or a"
            f" setting, or make it one of {', '.join(CONTEXT)}",
        ) from error
    return BoundReward(
        function=function,
        settings=_typed(function, settings, key),
        # A setting overrides context of the same name.
        context=tuple(one for one in others if one in CONTEXT and one not in settings),
        # Parameter names select the calling convention, so a user needs no decorator.
        batched=first == BATCHED,
        of_groups=first == OF_GROUPS,
        asynchronous=asynchronous,
    )


def _parameters(signature: inspect.Signature) -> tuple[list[str], list[str], bool]:
    """Return the names of the first two positional parameters, the names of the others that can be
    passed by keyword, and True if there is a `**` parameter."""
    every = list(signature.parameters.values())
    positional = [
        one for one in every if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    named = [
        one.name
        for one in (*positional[2:], *every)
        if one.kind == one.KEYWORD_ONLY or one in positional[2:]
    ]
    takes_any = any(one.kind == one.VAR_KEYWORD for one in every)
    return [one.name for one in positional[:2]], list(dict.fromkeys(named)), takes_any


def _is_needed(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].default is inspect.Parameter.empty


def _typed(
    function: Callable[..., Any], settings: Mapping[str, Any], key: str
) -> Mapping[str, Any]:
    """Return the settings, each converted to the annotated type of its parameter."""
    if not settings:
        return {}

    # Imported late: without settings, a reward process starts faster.
    from pydantic import TypeAdapter, ValidationError

    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - unresolvable annotations: nothing to check
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

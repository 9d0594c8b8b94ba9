"""Rewards: a response goes in, a number comes out. Built-in ones by name, and any `module:function`
that Python can import, the working directory included.

    def score(prompt, response) -> float
    def score(prompts, responses) -> list[float]         what waits, in one call
    def score(prompt, responses) -> list[float]          all responses to a prompt (`per: group`)
    async def score(...)                                 many calls at a time
    def score(prompt, response, *, finish_reason, mine)  context, and settings of its own

Invariants every reward keeps:
- whatever a response contains, it answers with a finite number; it raises only for what is wrong
  with the *prompt's* data;
- it keeps nothing between calls that a later call needs: it is called in several processes, and a
  process that hangs or dies is replaced.

A new built-in reward is a function here, an entry of its module's `REWARDS`, and its name in
`BUILT_IN`.
"""

from __future__ import annotations

import difflib
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
"""Each with the module of this package whose `REWARDS` has it."""

KEY = "rollout.reward"
LARGEST = 1e30
"""Bound of a reward: a hundred million of them add up in float32."""
BATCHED = ["prompts", "responses"]
"""Names of the parameters of a reward that takes lists."""
OF_GROUPS = ["prompt", "responses"]
"""Names of the parameters of a reward that takes all responses to a prompt."""


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


class ColumnError(RewardError):
    """A value of a row that its reward cannot use. `column`: name of the value among the prompt's
    fields, which the data may give another name; `fault`: what is wrong, to be read after it."""

    def __init__(self, where: str, column: str, fault: str, fix: str) -> None:
        super().__init__(where, f"`{column}` {fault}", fix)
        self.args = (where, column, fault, fix)  # what pickle calls the class with
        self.column, self.fault = column, fault


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """How a response came about; a reward gets those it names as parameters."""

    finish_reason: FinishReason = "stop"
    tokens: int = 0
    """Number of response tokens."""
    seconds: float = 0.0
    """From when its engine took it until it ended."""
    version: int = 0
    """Version of the weights that sampled the last token."""
    held_out: bool = False
    """Sampled for an evaluation."""


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
    """A reward of this package and how it is called."""

    function: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    """Keys that every JSONL line needs besides `prompt`."""
    fields_of: Callable[..., tuple[str, ...]] | None = None
    """Called with the settings: more of them."""
    check: Callable[..., None] | None = None
    """Called with the settings before anything starts; raises RewardError."""
    validate: Callable[..., object] | None = None
    """Called with each row's prompt, and the settings, before anything starts: raises RewardError
    for values that the reward cannot use."""
    inline: bool = False
    """Called on the engine's event loop instead of in a process: for work of microseconds, bounded
    whatever the response is."""
    requires: str | None = None
    """Module of another package, imported before the first call."""
    cpu_limit_s: float | None = None
    """A response that takes more processor time is wrong (0), which is not an error."""
    memory_mib: int | None = None
    """Most address space of the process that calls it."""


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """A reward with its settings, as it is called."""

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    context: tuple[str, ...] = ()
    """The names of CONTEXT that it takes."""
    batched: bool = False
    of_groups: bool = False
    asynchronous: bool = False

    @property
    def of_several(self) -> bool:
        """It takes a list of responses and returns one of numbers."""
        return self.batched or self.of_groups

    def arguments(
        self, items: list[RewardItem], timeout_s: float
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of one call with all `items`, or with the only one."""

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
    """Keys that every JSONL line needs for this reward, besides `prompt`; those that a
    `module:function` reads are unknown."""
    found = built_in(name)
    if found is None:
        return ()
    more = found.fields_of(**(settings or {})) if found.fields_of is not None else ()
    return (*found.required_fields, *more)


def validate_row(name: str, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Check the values that a built-in reward reads of a row. Raises RewardError. What a
    `module:function` reads is unknown."""
    found = built_in(name)
    if found is None:
        return
    for one in required_fields(name, settings):
        if fields.get(one) is None:
            raise ColumnError("", one, "is null", "give every row a value, or leave the row out")
    if found.validate is not None:
        found.validate(Prompt(id="", text="", token_ids=(0,), fields=fields), **settings)


def load_reward(
    name: str, settings: Mapping[str, Any] | None = None, key: str = KEY
) -> BoundReward:
    """`key`: the section that names the reward. Raises RewardError for an unknown name, an import
    that fails, an object that cannot be called as function(prompt, response), and settings that it
    does not take."""
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
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
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
        nearest = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"did you mean '{module_name}:{nearest[0]}'? " if nearest else ""
        raise RewardError(
            f"{key}.name",
            f"module {module_name!r} has no {function_name!r}",
            f"{hint}check the spelling in {name!r}",
        )
    if not callable(function):
        raise RewardError(
            f"{key}.name",
            f"{name!r} is a {type(function).__name__}, not a function",
            "name a function(prompt, response)",
        )
    return _bind(function, name, settings, key)


def text_field(prompt: Prompt, name: str) -> str:
    """Return `prompt.fields[name]` as text without white space and invisible characters around it.
    A number is written without a fraction of 0, since a table with empty cells holds 27.0 for 27.
    Raises ColumnError for a value without a visible character, and for a value that is neither text
    nor a finite number."""
    value = prompt.fields.get(name)
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
    """The whole number that a cell holds, 27.0 included; None for anything else."""
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
    """The module of `name`, which `key`.name of the configuration gives; also one in the current
    folder. Raises RewardError."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
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
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"{key}.name", f"importing {module_name!r} failed: {what}", "fix that file"
        ) from error


def _bind(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], key: str
) -> BoundReward:
    """Every parameter after the first two is a setting, a part of the context, or left at its
    default."""
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object, not whether it has one
    )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature to check
        if settings:
            what = f"{name!r} is called with prompt and response alone"
            raise RewardError(f"{key}.settings", what, "remove them") from None
        return BoundReward(function=function, asynchronous=asynchronous)

    first, others, takes_any = _parameters(signature)
    extra = [one for one in others if one in settings or one in CONTEXT]
    try:
        signature.bind(None, "", **dict.fromkeys([*settings, *extra]))
    except TypeError as error:
        unknown = [] if takes_any else [one for one in settings if one not in others]
        if unknown:
            nearest = difflib.get_close_matches(unknown[0], others, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise RewardError(
                f"{key}.settings",
                f"{name} has no setting {unknown[0]!r}",
                f"{hint}it takes"
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
        context=tuple(one for one in others if one in CONTEXT and one not in settings),
        batched=first == BATCHED,
        of_groups=first == OF_GROUPS,
        asynchronous=asynchronous,
    )


def _parameters(signature: inspect.Signature) -> tuple[list[str], list[str], bool]:
    """The names of the first two, those that can also be given by name, and whether it takes any
    name."""
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
    """The settings, each checked against the annotation of its parameter."""
    if not settings:
        return {}

    # Every process of a reward would wait for this import.
    from pydantic import TypeAdapter, ValidationError

    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - no types that could be checked
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

"""The base of every config model, the short form of a method, and methods of a user's own: a loss,
an advantage, a correction or a control in one file, named in the configuration by one line,
`name: module:Class`.

Class is a settings model: a subclass of LossSettings, AdvantageSettings, CorrectionSettings or
ControlSettings with a field `name: str` and a class attribute `method`, which is what a registry
line of a built-in method holds. The module is imported when a configuration names it, and not
before: it may import torch, which the built-in settings do not.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, WrapValidator

from megatron_async_rl.config.problem import shipped


def _as_json(values: Any) -> Any:
    try:
        # JSON has no nan: samples with one could not be read by other programs.
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds what JSON does not ({error}): put dates in quotes") from None
    return values


OnlyJson = AfterValidator(_as_json)
"""Validator of values that go into samples, or are compared with theirs."""


class Strict(BaseModel):
    """Frozen; unknown keys are refused; docstrings under fields are their description."""

    model_config = ConfigDict(
        # Frozen: all processes of a run hold the same configuration.
        frozen=True,
        extra="forbid",
        validate_default=True,
        # Descriptions, docs/config.md and error texts come from one place.
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def default_of(cls, key: str) -> Any:
        """Default of a key, for code that also runs without a configuration: a default is written
        once, in the schema."""
        return cls.model_fields[key].get_default(call_default_factory=True)


@dataclass(frozen=True)
class FromFile:
    """Marks text that may be given as the path of a file, which is read with the configuration: a
    run keeps what it read."""


TextOrFile = Annotated[str, FromFile()]


def bare_name(value: Any) -> Any:
    """A method without settings may be written as its name: `loss: reinforce` is `loss: {name:
    reinforce}`."""
    return {"name": value} if isinstance(value, str) else value


def plug_in_class(name: str, base: type[Strict]) -> Any:
    """The settings model `name`, module:Class. Raises ValueError with what is wrong and the fix."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"{name!r} is not module:Class; write for example my_loss:MyLoss")
    # As for rewards: what lies in the current folder is found, by ranks and engines too.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # SystemExit, too: a script without a main guard may end the interpreter.
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}; fix that"
            " file, start from the folder that holds it, or set PYTHONPATH"
        ) from error

    # The checks below run here, so that a wrong plug-in is refused before any process starts.
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{name!r} is not a class of that module that is derived from {base.__name__}"
        )
    if "name" not in found.model_fields or found.model_fields["name"].annotation not in (
        str,
        "str",
    ):
        raise ValueError(
            f"{name!r} has no field `name: str`, which holds its name in the configuration"
        )
    if getattr(found, "method", None) is None:
        raise ValueError(
            f"{name!r} has no class attribute `method`, which takes the place of a registry line"
            f" ({shipped('docs/add_a_method.md')})"
        )
    settings: Any = found
    if not _fits(settings.method, *settings.method_type):
        raise ValueError(
            f"{name!r}: its `method` is {settings.method!r}; it must be"
            f" {' '.join(settings.method_type)}"
            f" ({shipped('docs/add_a_method.md')})"
        )
    return settings


def _fits(method: Any, relation: str, wanted: str) -> bool:
    is_class = isinstance(method, type)
    # Compared by name: importing the base class would load torch.
    classes = method.__mro__ if is_class else type(method).__mro__
    return is_class == (relation == "a subclass of") and any(
        f"{each.__module__}.{each.__qualname__}" == wanted for each in classes
    )


def or_plug_in(base: type[Strict]) -> WrapValidator:
    """Let a field of built-in methods hold a plug-in too."""

    def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
        name = value.get("name") if isinstance(value, dict) else None
        if isinstance(name, str) and ":" in name:
            return plug_in_class(name, base).model_validate(value)
        # A model that was validated already, as in a copy of the configuration.
        if isinstance(value, base) and ":" in getattr(value, "name", ""):
            return value
        return built_in(value)

    return WrapValidator(validate)


class UnknownName(ValueError):
    """A name that no registry line has."""


def find[F](kind: str, name: str, registry: Mapping[str, F]) -> F:
    """Raises UnknownName, naming the nearest known names; for a plug-in also ValueError."""
    if name in registry:
        return registry[name]
    # A plug-in's class holds its method itself.
    if ":" in name:
        method: F = plug_in_class(name, Strict).method
        return method
    # Cutoff 0: three names are shown, however far away they are.
    nearest = difflib.get_close_matches(name, registry, n=3, cutoff=0.0)
    raise UnknownName(
        f"unknown {kind} {name!r}; nearest: {', '.join(nearest)}; known:"
        f" {', '.join(sorted(registry))}"
    )

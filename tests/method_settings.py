"""Every method of the configuration, with its settings at their defaults and with every value of
settings that have few."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_async_rl.config.keys import method_name, models_in
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import Strict, method_of

TRIED = (3.0, 0.5)
"""Values of settings that are off by default or have no default."""


def models(section: str) -> tuple[type[Strict], ...]:
    """Return the settings models of `objective.<section>`, or of `controls`."""
    owner = Config if section == "controls" else ObjectiveConfig
    return models_in(owner.model_fields[section].annotation)


def methods(section: str) -> dict[str, Any]:
    """Return name -> method of every choice of the section that the package has."""
    return {str(method_name(model)): method_of(model) for model in models(section)}  # type: ignore[arg-type]


LOSSES, ADVANTAGES = methods("loss"), methods("advantage")
CORRECTIONS, CONTROLS = methods("corrections"), methods("controls")


def variants(model: type[Strict]) -> Iterator[Strict]:
    """Yield every combination of literals and switches that the model accepts, and each setting
    that is off by default turned on alone."""
    names = [name for name in model.model_fields if name != "name"]
    chosen = {name: _choices(model.model_fields[name]) for name in names}
    made: list[Strict] = []
    for values in product(*chosen.values()):
        given = {
            name: value for name, value in zip(names, values, strict=True) if value is not DEFAULT
        }
        for extra in (
            {},
            *(
                {name: value}
                for name in names
                if _is_off(model.model_fields[name])
                for value in TRIED
            ),
        ):
            try:
                settings = model(**{**given, **extra})
            except ValidationError:
                continue
            if settings not in made:
                made.append(settings)
                # One setting turned on is enough.
                yield settings
                break
    for name in names:
        for value in TRIED if _is_off(model.model_fields[name]) else ():
            try:
                settings = model(**{name: value})
            except ValidationError:
                continue
            if settings not in made:
                yield settings
                break


DEFAULT = object()


def _choices(field: FieldInfo) -> list[Any]:
    if isinstance(field.default, bool):
        return [field.default, not field.default]
    options = [
        option
        for part in (field.annotation, *get_args(field.annotation))
        for option in _options(part)
    ]
    return (
        [field.default, *(option for option in options if option != field.default)]
        if options
        else [DEFAULT]
    )


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _is_off(field: FieldInfo) -> bool:
    """Return True for a setting that is null by default, or has no default and is not a choice of a
    few words."""
    return (field.default is None or field.is_required()) and _choices(field) == [DEFAULT]


def every(section: str) -> list[Any]:
    """Return every variant of every method of the section."""
    return [settings for model in models(section) for settings in variants(model)]


def label(settings: Any) -> str:
    """Return a name for a test id: the method and its settings that differ from the defaults."""
    changed = [
        f"{name}={getattr(settings, name)}"
        for name, f in type(settings).model_fields.items()
        if f.default != getattr(settings, name)
    ]
    return "-".join([settings.name, *changed])

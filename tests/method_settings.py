"""Every method of the configuration with its settings at their defaults, and with each choice among few taken once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from megatron_async_rl.config.keys import models_in
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.strict import Strict

TRIED = (True, False, 0.5, 3.0, 3)
"""For settings that are off, or switches."""


def models(section: str) -> tuple[type[Strict], ...]:
    """The settings models of `objective.<section>`, or of `controls`."""
    owner = Config if section == "controls" else ObjectiveConfig
    return models_in(owner.model_fields[section].annotation)


def variants(model: type[Strict]) -> Iterator[Strict]:
    """The defaults, then each literal, switch and absent setting changed alone, where the model accepts it."""
    required = {name: 1.0 for name, field in model.model_fields.items() if field.is_required()}
    yield model(**required)
    for name, field in model.model_fields.items():
        if name == "name":
            continue
        for value in _others(field.annotation, field.default):
            try:
                yield model(**{**required, name: value})
            except ValidationError:
                continue


def _others(annotation: Any, default: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value != default]
    if isinstance(default, bool):
        return [not default]
    if default is None:
        literals = [value for part in get_args(annotation) if get_origin(part) is Literal for value in get_args(part)]
        return literals or [value for value in TRIED if not isinstance(value, bool)][:2]
    return []


def every(section: str) -> list[Any]:
    """Every variant of every method of the section."""
    return [settings for model in models(section) for settings in variants(model)]


def label(settings: Any) -> str:
    """As a test's name: the method and what differs from its defaults."""
    changed = [
        f"{name}={getattr(settings, name)}"
        for name, f in type(settings).model_fields.items()
        if f.default != getattr(settings, name)
    ]
    return "-".join([settings.name, *changed])

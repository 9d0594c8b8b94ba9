"""Checks of the directory that objective.reference.path names."""

from __future__ import annotations

from dataclasses import fields, replace

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.model_files import KEY, ModelShape, read_model

REFERENCE = "objective.reference.path"
FREE = ("context", "windowed")
"""Fields of ModelShape that no tensor has; the ranks compare these keys of config.json."""


def reference_problems(
    config: Config, shape: ModelShape | None, *, weights: bool
) -> tuple[list[Problem], bool]:
    """Return the problems of the reference policy's model, and True if its directory does not
    exist. `shape`: that of the trained model, null if unknown. `weights`: weight files must
    exist."""
    reference = config.objective.reference
    if reference is None or reference.path is None:
        return [], False
    found, problems = read_model(reference.path, weights=weights, tokenizer=False)
    # The checks name the key of the trained model.
    renamed = [replace(one, key=REFERENCE, fix=one.fix.replace(KEY, REFERENCE)) for one in problems]
    if found is None or shape is None:
        return renamed, not reference.path.is_dir()
    different = [
        f"{one.name} {_text(getattr(found, one.name))} instead of {_text(getattr(shape, one.name))}"
        for one in fields(ModelShape)
        if one.name not in FREE and getattr(found, one.name) != getattr(shape, one.name)
    ]
    if different:
        what = f"{reference.path} has another shape than model.path: {', '.join(different)}"
        fix = "name a model of the same shape, or remove it to use the run's first weights"
        renamed.append(Problem(key=REFERENCE, what=what, fix=fix))
    return renamed, False


def _text(value: object) -> str:
    # A family is shown by its name in config.json.
    return str(getattr(value, "model_type", value))

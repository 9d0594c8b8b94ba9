"""From a case to what a method is given: its settings, and a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.config.keys import method_name, models_in, nearest
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.strict import Strict
from megatron_async_rl.conform.cases import Case
from megatron_async_rl.objectives.batch import Decided, TokenBatch
from megatron_async_rl.objectives.shaping import token_rewards

POLICIES = ("logp", "logp_prox", "logp_behavior")
"""Where a case names only some of the three policies, the others are the first one it names."""
COLUMNS = tuple(field.name for field in dataclasses.fields(TokenBatch) if field.name not in ("sequence", "sequences", "decided"))
PER_SEQUENCE = ("rewards", "group", "score_norms")


def settings_of(section: str, name: str, params: Mapping[str, Any]) -> Strict:
    """The settings of method `name` as `objective.<section>` would take them. Raises ValidationError, ValueError."""
    for model in models_in(ObjectiveConfig.model_fields[section].annotation):
        if method_name(model) == name:
            return model.model_validate({**params, "name": name})
    raise ValueError(f"{name!r} cannot be configured: no model of objective.{section} has this name")


def batch_of(case: Case) -> TokenBatch:
    """The case as a whole batch: float64, no gradient, every column that the case names. Raises ValueError."""
    if "mask" not in case.inputs:
        raise ValueError("inputs.mask is missing")
    rows, length = case.inputs["mask"].shape
    given: dict[str, Any] = {}
    for key, values in case.inputs.items():
        if key not in COLUMNS:
            raise ValueError(f"inputs.{key} is no column of a batch; nearest: {nearest(key, COLUMNS) or 'none'}")
        if (values.ndim == 1) != (key in PER_SEQUENCE) or not values.ndim:
            raise ValueError(f"inputs.{key}: expected numbers per {'sequence' if key in PER_SEQUENCE else 'token'}")
        given[key] = torch.from_numpy(values.flatten()).to(torch.int64 if key in ("group", "lag") else torch.float64)
    unknown = torch.full((rows * length,), math.nan, dtype=torch.float64)
    first = next((given[key] for key in POLICIES if key in given), unknown)
    columns: dict[str, Any] = {
        **dict.fromkeys(POLICIES, first),
        "advantages": torch.zeros_like(unknown),
        "weights": torch.ones_like(unknown),
        "sequence": torch.arange(rows).repeat_interleave(length),
        "sequences": rows,
    }
    batch = TokenBatch(**(columns | given))
    if batch.rewards is None:
        return batch
    batch = batch.replace(token_rewards=token_rewards(batch, torch.zeros_like(batch.mask)))
    return batch if "advantages" in given else batch.replace(advantages=batch.per_token(batch.require("rewards")))


def micro_batch(whole: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """All of a whole batch as one micro-batch in `dtype`."""

    def cast(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in values.items()}

    columns = {key: value for key in COLUMNS if isinstance(value := getattr(whole, key), Tensor)}
    decided = Decided(cast(whole.decided.tokens), cast(whole.decided.sequences), whole.decided.scalars)
    return dataclasses.replace(whole, **(cast(columns) | {"group": None, "decided": decided}))

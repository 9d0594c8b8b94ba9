"""Named numbers that a method decides by: M2PO's water level, BAPO's bounds, the effective sample size and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.conform.cases import Case, Numbers
from megatron_async_rl.conform.inputs import batch_of, settings_of
from megatron_async_rl.controls.ess import effective_sample_size, lr_scale
from megatron_async_rl.objectives.registry import loss_method


def _decided(name: str, case: Case, params: Mapping[str, Any]) -> Mapping[str, float]:
    """What the loss `name` decides from the case as a whole batch; keys are those of its metrics."""
    decide = loss_method(name).decide
    if decide is None:
        raise ValueError(f"loss {name} decides nothing from the whole batch")
    return decide(batch_of(case), settings_of("loss", name, params)).scalars


def _m2po_cap(case: Case) -> dict[str, float]:
    found = _decided("m2po", case, {**case.params, "mode": "cap"})
    return {"log_ratio_cap": found["objective/log_ratio_cap"]}


def _bapo(case: Case) -> dict[str, float]:
    found = _decided("bapo", case, case.params)
    return {name: found.get(f"objective/{name}", math.nan) for name in ("clip_low", "clip_high", "positive_share")}


def _ess(case: Case) -> dict[str, float]:
    batch = batch_of(case)
    log_weights = batch.sequence_sum(batch.logp - batch.logp_behavior)[batch.lengths() > 0]
    return _of_log_weights(log_weights.numpy(), case.params)


def _ess_log_weights(case: Case) -> dict[str, float]:
    """`shape` only names what the weights look like."""
    return _of_log_weights(case.inputs["log_weights"], {key: value for key, value in case.params.items() if key != "shape"})


def _of_log_weights(log_weights: Numbers, params: Mapping[str, Any]) -> dict[str, float]:
    settings = EssLrControl.model_validate(params)
    if isinstance(settings.reference_ratio, str):
        raise ValueError("params.reference_ratio: auto is known only within a run")
    ess = effective_sample_size(log_weights)
    ratio = ess / max(len(log_weights), 1)
    scale = lr_scale(ratio, rule=settings.rule, reference_ratio=settings.reference_ratio, floor=settings.floor)
    return {"ess": ess, "ess_ratio": ratio, "lr_scale": scale}


SCALARS: Mapping[str, Callable[[Case], dict[str, float]]] = {
    "m2po_cap": _m2po_cap,
    "bapo": _bapo,
    "ess": _ess,
    "ess_log_weights": _ess_log_weights,
}

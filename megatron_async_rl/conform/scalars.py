"""Named numbers that a method decides by: BAPO's bounds, M2PO's water level, the effective sample size and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_async_rl.conform.cases import Case
from megatron_async_rl.policy.diagnostics import effective_sample_size


def _ess(case: Case) -> dict[str, float]:
    lengths = case.inputs["mask"].sum(axis=1)
    differences = (case.inputs["logp"] - case.inputs["logp_behavior"]) * case.inputs["mask"]
    return _of_log_weights(differences.sum(axis=1)[lengths > 0], case.params)


def _ess_log_weights(case: Case) -> dict[str, float]:
    return _of_log_weights(case.inputs["log_weights"], {key: case.params[key] for key in case.params if key != "shape"})


def _of_log_weights(log_weights: Any, params: Mapping[str, Any]) -> dict[str, float]:
    ess = effective_sample_size(log_weights)
    return {"ess": ess, "ess_ratio": ess / max(len(log_weights), 1)}


SCALARS: Mapping[str, Callable[[Case], dict[str, float]]] = {
    "ess": _ess,
    "ess_log_weights": _ess_log_weights,
}

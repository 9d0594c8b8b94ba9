"""Metrics of a batch from those of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_async_rl.metrics.catalogue import METRICS


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its optimizer steps, each by its rule in the
    catalogue; a key that some steps lack is computed from the others."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {
        name: _over(METRICS[name].over_steps if name in METRICS else "mean", values)
        for name, values in found.items()
    }


def _over(rule: str, values: Sequence[float]) -> float:
    if len(values) == 1 or rule == "last":
        return values[-1]
    if rule == "first":
        return values[0]
    if rule == "largest":
        return float(np.max(values))
    total = float(np.sum(values))
    return total if rule == "sum" else total / len(values)

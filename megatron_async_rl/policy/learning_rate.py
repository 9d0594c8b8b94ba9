"""Schedule of the learning rate. Loads no torch."""

from __future__ import annotations

import math

from megatron_async_rl.config.policy import OptimizerConfig


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of a run of `total_steps`.

    Warm-up: lr (step + 1) / warmup_steps. After it, with p = (step - warmup_steps) / (total_steps -
    warmup_steps) in [0, 1): `linear` decreases from lr towards min_lr with p, `cosine` with (1 -
    cos(pi p)) / 2; `constant` stays at lr.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(
        1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    )
    left = (
        1.0 - progress
        if settings.schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return settings.min_lr + (settings.lr - settings.min_lr) * left

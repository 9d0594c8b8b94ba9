"""Gradients of a single process for tests of the controls, and the steps that contain them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_async_rl.controls.decision import StepView


@dataclass
class Shard:
    grad: torch.Tensor
    counted: bool = True


@dataclass
class OneRank:
    """Gradients of a single rank, which count the all-reduces."""

    shards: list[Shard]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    reductions: int = 0

    def all_reduce_sum(self, values):
        self.reductions += 1
        return values


@dataclass
class Optimizer:
    """Optimizer with given values of everything that a control may read."""

    beta1: float = 0.9
    updates: int = 0
    first_moment: list[torch.Tensor] | None = None
    update: list[torch.Tensor] | None = None
    last_update_norm: float | None = None

    def momentum(self):
        return self.first_moment

    def last_update(self):
        return self.update


def gradient(*values):
    return OneRank([Shard(torch.tensor(v, dtype=torch.float32)) for v in values])


def flat(gradients):
    return torch.cat([shard.grad.flatten() for shard in gradients.shards]).double()


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def aligned(c, size=300, seed=0, scale=7.0):
    """Return (reference, gradient of cosine c with it), two shards each."""
    rng = np.random.default_rng(seed)
    u, v = np.linalg.qr(rng.normal(size=(size, 2)))[0].T
    g = scale * (c * u + math.sqrt(1 - c * c) * v)
    return tuple(gradient(x[:100].tolist(), x[100:].reshape(-1, 10).tolist()) for x in (3.0 * u, g))


def step(
    gradients=None,
    *,
    log_weights=(),
    lag_max=0,
    optimizer=None,
    is_anomaly=lambda norm: False,
    moved=False,
):
    return StepView(
        gradients=gradients,
        optimizer=optimizer or Optimizer(),
        log_weights=np.array(log_weights, dtype=np.float64),
        lag_max=lag_max,
        lr=1.0,
        is_anomaly=is_anomaly,
        moved=moved,
    )

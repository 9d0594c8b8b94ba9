"""Tests of gradients on a rank without shards, which the distributed optimizer can create."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.controls.decision import Control, Decision
from megatron_async_rl.gradients import clip_to
from megatron_async_rl.policy import step as step_module
from megatron_async_rl.policy.step import OptimizerStep, StepFacts
from tests.gradients import OneRank, Shard, gradient


class WithoutParameters:
    """Stand-in for Megatron's optimizer on a rank without parameters."""

    optimizer = None

    def __init__(self):
        self.param_groups = [{"params": []}]
        self.stepped = 0

    def prepare_grads(self):
        return False

    def step_with_ready_grads(self):
        self.stepped += 1


class Damped(Control):
    def apply(self, step):
        return Decision(gradient_scale=0.5)


class ElsewhereNorm(OneRank):
    """Gradients of a rank without shards, where the squared norm of the other ranks is 9."""

    def all_reduce_sum(self, values):
        return values + 9.0


def test_clipping_scales_every_shard_and_accepts_a_rank_without_shards():
    held = gradient([3.0], [4.0])
    clip_to(held, 5.0, 1.0)
    assert [float(shard.grad) for shard in held.shards] == pytest.approx([0.6, 0.8], rel=1e-6)
    clip_to(OneRank([]), 5.0, 1.0)


def test_a_rank_without_shards_takes_a_clipped_and_scaled_step(monkeypatch):
    optimizer = WithoutParameters()
    monkeypatch.setattr(step_module, "gradients_of", lambda optimizer, layout: ElsewhereNorm([]))
    settings = OptimizerConfig(clip_grad=1.0)
    step = OptimizerStep(
        optimizer, settings, {"damped": Damped()}, SimpleNamespace(), 5, on_anomaly="report"
    )
    metrics = step.take(StepFacts(loss=1.0, log_weights=np.zeros(0), lag_max=0))
    assert metrics["policy/grad_norm"] == 3.0
    assert metrics["policy/skipped"] == 0.0
    assert optimizer.stepped == 1


def test_shards_are_scaled_in_place_whether_or_not_they_are_counted():
    shards = [Shard(torch.ones(2)), Shard(torch.ones(3), counted=False)]
    held = [shard.grad for shard in shards]
    clip_to(OneRank(shards), 2.0, 1.0)
    for grad in held:
        torch.testing.assert_close(grad, torch.full_like(grad, 0.5))

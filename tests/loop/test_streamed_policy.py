"""A step whose batch arrives in parts is the step of the whole batch, on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async_rl.config.controls import EssLrControl, GacControl
from megatron_async_rl.config.objective import (
    KlConfig,
    ObjectiveConfig,
    ReferenceConfig,
    ValueConfig,
)
from megatron_async_rl.config.policy import OptimizerConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.policy.streamed_step import ReadsOtherGroups
from megatron_async_rl.samples.rows import TrainBatch
from tests.tiny_models import save_tiny_model
from tests.train_batches import columns, ragged_batch, rewards_batch, streamed

TOLERANCE = 1e-6
PARTS = ((2,), (0, 3), (1, 4))
"""Groups of each part, not in the order of the batch. One reward of group 1 failed."""
REFERENCE = ReferenceConfig(ema=0.7)
OBJECTIVES = {
    "PPO's clip over tokens": ObjectiveConfig(),
    "Dr.GRPO's constant length": ObjectiveConfig(
        advantage={"name": "grpo", "normalize_std": False},
        aggregation="seq-mean-token-sum-norm",
        norm_length=20,
    ),
    "GSPO, RLOO": ObjectiveConfig(loss="gspo", advantage="rloo"),
    "one number per response": ObjectiveConfig(loss="gmpo", advantage="opo"),
    "rewards alone": ObjectiveConfig(loss="topr"),
    "means of the group's log-probs": ObjectiveConfig(
        loss="trajectory_balance", reference=REFERENCE
    ),
    "means of the group's rewards": ObjectiveConfig(loss="kimi"),
    "baselines by score norms": ObjectiveConfig(advantage="otb", proximal="recompute"),
    "cheap OPOB": ObjectiveConfig(
        loss="reinforce",
        advantage={"name": "opob", "mode": "cheap"},
        aggregation="seq-mean-token-mean",
    ),
    "rejected tokens do not count": ObjectiveConfig(
        proximal="recompute",
        renormalize=True,
        corrections=({"name": "icepop", "low": 0.9, "high": 1.2},),
    ),
    "other policies and terms": ObjectiveConfig(
        loss="decoupled_ppo",
        proximal="ewma",
        kl=KlConfig(coef=0.1),
        reference=REFERENCE,
        entropy_bonus=0.01,
    ),
    "a penalty in the reward": ObjectiveConfig(
        kl=KlConfig(coef=0.1, where="reward", estimator="k1"),
        overlong={"max_length": 14, "buffer": 6},
    ),
    "values": ObjectiveConfig(
        advantage={"name": "gae", "whiten": False}, value=ValueConfig(clip=0.2)
    ),
}
ACROSS_GROUPS = {
    "reinforce_pp": ObjectiveConfig(advantage="reinforce_pp"),
    "gae": ObjectiveConfig(advantage="gae", value=ValueConfig()),
    "m2po": ObjectiveConfig(loss={"name": "m2po", "second_moment": 0.3}),
    "bapo": ObjectiveConfig(loss="bapo"),
    "tis": ObjectiveConfig(proximal="recompute", corrections=({"name": "tis", "normalize": True},)),
}
"""Objectives that config/stream_rules.py refuses."""

Build = Callable[..., Policy]
Taken = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("streamed") / "model", vocab_size=96)


@pytest.fixture
def build(model: Path, layout: Layout) -> Build:
    def built(objective: ObjectiveConfig, controls: tuple[Any, ...] = (), **more: Any) -> Policy:
        policy = PolicyConfig(
            optimizer=OptimizerConfig(lr=1e-3, eps=0.01),
            tokens_per_micro_batch=60,
            **more.pop("policy", {}),
        )
        return Policy.build(
            ModelConfig(path=model, dtype="float32"),
            policy,
            objective,
            controls,
            layout=layout,
            temperature=0.7,
            total_steps=10,
            **more,
        )

    return built


def taken(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Return a list to which each optimizer step adds its gradient before the controls."""
    found: Taken = []
    take = policy.step.take

    def kept(*arguments: Any) -> dict[str, float]:
        found.append(
            {
                name: parameter.main_grad.clone()
                for chunk in policy.model.chunks
                for name, parameter in chunk.named_parameters()
            }
        )
        return take(*arguments)

    monkeypatch.setattr(policy.step, "take", kept)
    return found


def stream(
    policy: Policy, batch: TrainBatch, parts: Sequence[Sequence[int]] = PARTS
) -> dict[str, float]:
    """Make a step whose last part completes the batch."""
    alone, whole = streamed(batch, parts)
    for part in alone[:-1]:
        policy.accumulate(columns(part))
    return policy.train_step(columns(whole))


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for chunk in policy.model.chunks
        for name, parameter in chunk.named_parameters()
    }


def require_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check the difference against the norm of the whole gradient."""
    assert found.keys() == expected.keys()
    own, other = (
        torch.cat([each[name].double().flatten() for name in expected])
        for each in (found, expected)
    )
    assert float(other.norm()) > 0
    assert float((own - other).norm() / other.norm()) < TOLERANCE


def metrics_of(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not describe the division into micro-batches."""
    divided = ("time/", "policy/micro_batches", "policy/computed", "policy/padding")
    return {name: value for name, value in metrics.items() if not name.startswith(divided)}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_parts_add_up_to_the_gradient_of_the_batch(
    build: Build, monkeypatch: pytest.MonkeyPatch, objective: ObjectiveConfig
) -> None:
    found = []
    for step in (lambda policy, batch: policy.train_step(columns(batch)), stream):
        policy = build(objective, (GacControl(c_low=0.1), EssLrControl(reference_ratio=1.0)))
        gradients = taken(policy, monkeypatch)
        # The second step: averages and the controls' references differ from the model by then.
        batches = [ragged_batch(seed=seed, vocabulary=96, version=0) for seed in (0, 1)]
        metrics = [step(policy, batch) for batch in batches]
        assert policy.lag0 is not None
        found.append((metrics, gradients, policy.lag0))
    (expected, gradients, lag0), (metrics, summed, lag0_of_parts) = found
    for whole, parts in zip(gradients, summed, strict=True):
        require_near(parts, whole)
    for whole, parts in zip(expected, metrics, strict=True):
        assert metrics_of(parts) == pytest.approx(metrics_of(whole), rel=1e-4, abs=1e-6)
    assert lag0_of_parts.tokens == lag0.tokens
    assert lag0_of_parts.ids == lag0.ids
    assert lag0_of_parts.means == pytest.approx(lag0.means, rel=1e-4)


@pytest.mark.parametrize("objective", ACROSS_GROUPS.values(), ids=ACROSS_GROUPS)
def test_a_method_that_reads_other_groups_ends_the_step(
    build: Build, objective: ObjectiveConfig
) -> None:
    policy = build(objective)
    before = weights(policy)
    with pytest.raises(ReadsOtherGroups, match=r"set flow\.stream: none"):
        stream(policy, ragged_batch(vocabulary=96))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())


@pytest.mark.parametrize("sequence", ["padded", "packed"])
def test_parts_that_are_added_later_make_the_same_bits(build: Build, sequence: str) -> None:
    """Add the parts of a complete batch, like a replay."""
    found = []
    for step in (
        stream,
        lambda policy, batch: policy.train_step(columns(streamed(batch, PARTS)[1])),
    ):
        policy = build(ObjectiveConfig(), policy={"sequence": sequence})
        for seed in (0, 1):
            step(policy, ragged_batch(seed=seed, vocabulary=96))
        found.append(weights(policy))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_sums_of_a_step_that_did_not_complete_are_discarded(build: Build) -> None:
    batch, other = (ragged_batch(seed=seed, vocabulary=96) for seed in (0, 1))
    found = []
    for unfinished in ((), streamed(other, PARTS)[0][:2]):
        policy = build(ObjectiveConfig())
        for part in unfinished:
            policy.accumulate(columns(part))
        stream(policy, batch)
        found.append(weights(policy))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_part_without_a_valid_reward_adds_nothing(build: Build) -> None:
    batch = rewards_batch([[0.0, 1.0], [None, None], [2.0, 0.0]])
    found = []
    for parts in (((1,), (0, 2)), ((0, 2), (1,))):
        policy = build(ObjectiveConfig())
        metrics = stream(policy, batch, parts)
        assert metrics["policy/skipped"] == 0
        found.append(weights(policy))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_batch_with_nothing_to_learn_makes_no_step(build: Build) -> None:
    policy = build(ObjectiveConfig())
    before = weights(policy)
    metrics = stream(policy, rewards_batch([[None, None], [None, None]]), ((0,), (1,)))
    assert metrics["policy/skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())
    # The next step begins with empty buffers.
    assert stream(policy, ragged_batch(vocabulary=96))["policy/skipped"] == 0


def test_parts_of_another_batch_are_refused(build: Build) -> None:
    policy = build(ObjectiveConfig())
    batch = ragged_batch(vocabulary=96)
    parts, whole = streamed(batch, PARTS)
    others, _ = streamed(batch, ((4,), (0, 1, 2, 3)))
    policy.accumulate(columns(others[0]))
    with pytest.raises(RuntimeError, match="other samples than its batch"):
        policy.train_step(columns(whole))
    policy.accumulate(columns(parts[0]))
    with pytest.raises(RuntimeError, match="part 2 of version 3 came after 1 parts"):
        policy.accumulate(columns(parts[2]))


def test_the_gradient_of_parts_is_explained_like_that_of_the_batch(
    build: Build, tmp_path: Path
) -> None:
    found = []
    for name, step in (
        ("whole", lambda policy, batch: policy.train_step(columns(batch))),
        ("parts", stream),
    ):
        file = tmp_path / f"{name}.json"
        policy = build(ObjectiveConfig(), explained=(4, file))
        step(policy, ragged_batch(vocabulary=96))
        found.append(json.loads(file.read_text())["updates"][0])
    whole, parts = found
    assert parts["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    assert [one["id"] for one in parts["samples"]] == [one["id"] for one in whole["samples"]]
    assert [one["share"] for one in parts["samples"]] == pytest.approx(
        [one["share"] for one in whole["samples"]], rel=1e-4, abs=1e-6
    )

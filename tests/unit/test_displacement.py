"""The control removes the update's component along the displacement of the weights; the tests use
torch's AdamW in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.controls import DisplacementControl
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.config.rules import validated
from megatron_async_rl.controls.decision import Control, Decision
from megatron_async_rl.controls.displacement import Displacement
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.plan.memory import held_bytes, past_master_bytes
from megatron_async_rl.policy import step as step_module
from megatron_async_rl.policy.past_weights import (
    MasterSnapshot,
    SnapshotMissing,
    Snapshots,
    start_shares,
    weight_displacement,
)
from megatron_async_rl.policy.references import ReferencePolicies, passes
from megatron_async_rl.policy.step import OptimizerStep, StepFacts
from tests.cases import looped
from tests.gradients import OneRank, Shard, cosine
from tests.train_batches import columns_of, groups_of, make_sample, rewards_batch
from tests.written_run import config_tree

SETTINGS = OptimizerConfig(lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.5, clip_grad=0.7)
SETTINGS = SETTINGS.model_copy(update={"log_update_norm": True})
FACTS = StepFacts(loss=1.0, log_weights=np.zeros(3), lag_max=0)
STEADY = torch.linspace(0.5, 1.5, 21, dtype=torch.float64)
"""Gradient of every step; it makes updates of constant direction."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (3, 4), "bias": (5,), "norm": (2, 2)}.items():
            value = torch.randn(shape, generator=draw, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(value))

    def flat(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()]).clone()


class Megatron:
    """The interface of Megatron's optimizer that a step uses, over torch's AdamW. Step i gets the
    gradient `gradients[i]`."""

    def __init__(self, model, gradients):
        self.parameters = list(model.parameters())
        decay = [
            {"params": self.parameters[:2], "weight_decay": 0.5},
            {"params": self.parameters[2:], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            decay, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps
        )
        self.param_groups = self.optimizer.param_groups
        self.gradients = list(gradients)

    def prepare_grads(self):
        parts = self.gradients.pop(0).split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.clone().view(parameter.shape)
        return False

    def step_with_ready_grads(self):
        self.optimizer.step()


class Says(Control):
    def __init__(self, decisions):
        self.decisions = list(decisions)

    def apply(self, step):
        return self.decisions.pop(0)


class Run:
    """A run of few steps; `control`: the displacement control, or None."""

    def __init__(self, gradients, control=None, decisions=None):
        self.model = Model()
        self.megatron = Megatron(self.model, gradients)
        controls = {"says": Says(decisions or [Decision()] * len(gradients))}
        if control is not None:
            controls["displacement"] = Displacement(control)
        self.step = OptimizerStep(
            self.megatron, SETTINGS, controls, SimpleNamespace(), 20, on_anomaly="report"
        )
        bridge = SimpleNamespace(layout=SimpleNamespace(replica=0))
        wrapped = SimpleNamespace(chunks=[self.model], source=None, bridge=bridge)
        self.others = ReferencePolicies(
            ObjectiveConfig(snapshots=4),
            frozenset(),
            wrapped,
            past_masters=Snapshots(lambda: MasterSnapshot(self.megatron), 4),
        )
        self.version = 0

    def take(self, *starts, kl=0.0):
        """Take one step on a batch of equally long samples that began under `starts`, by default
        under the present version."""
        self.others.begin(self.version)
        samples = columns_of(
            mixed(*((start,) for start in starts or (self.version,))), self.version
        )
        displaced = weight_displacement(samples, self.others.past_masters, self.megatron)
        self.version += 1
        return self.step.take(replace(FACTS, kl=kl), displaced)


@pytest.fixture(autouse=True)
def gradients_of_one_rank(monkeypatch):
    found = lambda optimizer, layout: OneRank([Shard(p.grad) for p in optimizer.parameters])  # noqa: E731
    monkeypatch.setattr(step_module, "gradients_of", found)


def mixed(*versions):
    prompt = groups_of(rewards_batch([[0.0]]))[0][0].prompt
    return [
        make_sample(prompt, str(i), [3] * len(each), versions=list(each))
        for i, each in enumerate(versions)
    ]


def noisy(steps, strength=0.3):
    draw = torch.Generator().manual_seed(3)
    return [
        STEADY + strength * torch.randn(21, generator=draw, dtype=torch.float64)
        for _ in range(steps)
    ]


@looped(
    "decision",
    [Decision(), Decision(lr_scale=0.3), Decision(beta1=0.2), Decision(gradient_scale=0.1)],
    ids=str,
)
@looped(("target", "left"), [("zero", 0.0), ("threshold", 0.25)])
def test_an_update_has_the_target_cosine_and_adams_orthogonal_part(target, left, decision):
    decisions = [Decision()] * 3 + [decision]
    free = Run(noisy(4), None, decisions)
    held = Run(noisy(4), DisplacementControl(c_low=0.25, target=target), decisions)
    past = []
    for _ in range(3):
        past.append(held.model.flat())
        free.take()
        held.take()
    assert torch.equal(free.model.flat(), held.model.flat())
    before, way = held.model.flat(), held.model.flat() - (past[0] + past[1]) / 2
    metrics = held.take(0, 1)
    free.take()
    # After the step the parameter groups have its learning rate.
    kept = torch.ones(21, dtype=torch.float64)
    kept[:17] = 1 - held.megatron.param_groups[0]["lr"] * 0.5
    update, made = free.model.flat() - before * kept, held.model.flat() - before * kept
    assert metrics["displacement/cosine"] == pytest.approx(cosine(update, way), abs=1e-12)
    assert metrics["displacement/cosine"] > 0.5
    assert cosine(made, way) == pytest.approx(left, abs=1e-12)
    across = update - (update @ way) / (way @ way) * way
    torch.testing.assert_close(
        made - (made @ way) / (way @ way) * way, across, rtol=0.0, atol=1e-14
    )
    assert metrics["displacement/removed"] == pytest.approx(
        float((made - update).norm() / update.norm()), rel=1e-10
    )
    assert metrics["update/norm"] == pytest.approx(float(made.norm()), rel=1e-10)


@looped(
    ("settings", "kl", "share"),
    [
        ({"tolerated_kl": 0.02}, 0.08, 0.75),
        ({"tolerated_kl": 0.02}, 0.02, 0.0),
        ({"tolerated_kl": 0.02}, 0.001, 0.0),
        ({"tolerated_kl": 0.02}, 0.0, 0.0),
        ({"tolerated_kl": 0.02}, math.inf, 1.0),
        ({}, 0.0, 1.0),
        ({"tolerated_kl": 0.02, "target": "threshold", "c_low": 0.2}, 0.08, 0.75),
    ],
)
def test_the_removed_share_is_the_divergence_above_the_tolerated(settings, kl, share):
    whole = {name: value for name, value in settings.items() if name != "tolerated_kl"}
    runs = [Run(noisy(3), DisplacementControl(**each)) for each in (settings, whole)]
    for run in runs:
        run.take()
    spared, all_of_it = (run.take(0, kl=kl) for run in runs)
    assert spared["displacement/cosine"] == all_of_it["displacement/cosine"]
    expected = share * all_of_it["displacement/removed"]
    assert spared["displacement/removed"] == pytest.approx(expected, rel=1e-12)
    if share == 0.0:
        free = Run(noisy(3))
        free.take()
        free.take(0)
        assert torch.equal(runs[0].model.flat(), free.model.flat())


def test_the_control_does_not_change_adams_moments():
    free, held = Run(noisy(3)), Run(noisy(3), DisplacementControl())
    for run in (free, held):
        run.take()
        run.take(0)
    assert not torch.equal(free.model.flat(), held.model.flat())
    for mine, theirs in zip(held.megatron.parameters, free.megatron.parameters, strict=True):
        for name, value in free.megatron.optimizer.state[theirs].items():
            assert torch.equal(held.megatron.optimizer.state[mine][name], value)


def test_an_update_up_to_the_threshold_is_unchanged_bit_by_bit():
    free, held = Run(noisy(3)), Run(noisy(3), DisplacementControl(c_low=0.999999))
    for starts in ((), (0,), (0,)):
        free.take(*starts)
        metrics = held.take(*starts)
    assert metrics["displacement/cosine"] > 0.5
    assert metrics["displacement/removed"] == 0.0
    assert torch.equal(free.model.flat(), held.model.flat())


@pytest.mark.parametrize("target", ["zero", "threshold"])
def test_an_update_against_the_displacement_is_unchanged_bit_by_bit(target):
    gradients, decisions = [STEADY, STEADY, -STEADY], [Decision(), Decision(), Decision(beta1=0.0)]
    free, held = (
        Run(gradients, None, decisions),
        Run(gradients, DisplacementControl(target=target), decisions),
    )
    for starts in ((), (), (0,)):
        free.take(*starts)
        metrics = held.take(*starts)
    assert metrics["displacement/cosine"] < -0.5
    assert metrics["displacement/removed"] == 0.0
    assert torch.equal(free.model.flat(), held.model.flat())


def test_a_batch_of_the_present_weights_is_not_changed():
    free, held = Run(noisy(3)), Run(noisy(3), DisplacementControl())
    for _ in range(3):
        free.take()
        metrics = held.take()
        assert not any(name.startswith("displacement/") for name in metrics)
    assert torch.equal(free.model.flat(), held.model.flat())


def test_unmoved_weights_have_no_displacement():
    held = Run(noisy(2), DisplacementControl(), [Decision(skip=True), Decision()])
    free = Run(noisy(2), None, [Decision(skip=True), Decision()])
    for run in (held, free):
        run.take()
        metrics = run.take(0)
    assert "displacement/cosine" not in metrics
    assert torch.equal(free.model.flat(), held.model.flat())


def test_a_skipped_step_does_not_change_the_weights():
    held = Run(noisy(3), DisplacementControl(), [Decision(), Decision(), Decision(skip=True)])
    held.take()
    assert held.take(0)["displacement/removed"] > 0.1
    before = held.model.flat()
    metrics = held.take(0)
    assert torch.equal(held.model.flat(), before)
    assert not any(name.startswith("displacement/") for name in metrics)


def test_versions_of_samples_are_weighted_by_trained_tokens():
    samples = mixed((0, 1, 2), (1, 1), (2,))
    samples[0].loss_mask[1] = 0
    samples += mixed((1, 1, 1))
    samples[-1].loss_mask[:] = 0
    assert start_shares(columns_of(samples)) == {0: 2 / 5, 1: 2 / 5, 2: 1 / 5}


def test_the_displacement_starts_at_the_weighted_mean_of_past_weights():
    run = Run(noisy(3))
    past = []
    for _ in range(3):
        past.append(run.model.flat())
        run.take()
    run.others.begin(3)
    now = run.model.flat()
    samples = columns_of(mixed((0,) * 3, (2,) * 2, (3,) * 5), 3)
    way = weight_displacement(samples, run.others.past_masters, run.megatron)
    found = torch.cat([part.flatten() for part in way])
    torch.testing.assert_close(
        found, now - (0.3 * past[0] + 0.2 * past[2] + 0.5 * now), rtol=0.0, atol=1e-15
    )
    assert torch.equal(found, torch.cat([part.flatten() for part in way]))


def test_only_the_past_weights_that_the_next_step_may_need_are_saved():
    run = Run(noisy(3), DisplacementControl())
    for starts in ((), (0,), (1,)):
        run.take(*starts)
    control = run.step.controls["displacement"]
    assert (control.state_dict(), control.shard_state()) == ({}, {})
    assert list(run.others.parameter_state()) == [
        f"past_masters_{version}" for version in (0, 1, 2)
    ]


def test_a_batch_older_than_the_kept_weights_is_refused_with_the_key():
    run = Run(noisy(5))
    for _ in range(5):
        run.take()
    with pytest.raises(
        SnapshotMissing,
        match=r"version 0 at version 5.*objective\.snapshots \(now 4\) to at least 6",
    ):
        run.take(0)


def test_weights_of_the_control_are_not_used_as_proximal_policy():
    objective = ObjectiveConfig(proximal="ewma", snapshots=3)
    model = SimpleNamespace(chunks=[Model()], source=None, bridge=None)
    megatron = SimpleNamespace(param_groups=[{"params": list(model.chunks[0].parameters())}])
    masters = Snapshots(lambda: MasterSnapshot(megatron), 3)
    kept = ReferencePolicies(objective, Objective(objective).needs, model, past_masters=masters)
    for version in range(3):
        kept.begin(version)
    columns = sorted(Objective(objective).needs)
    samples = columns_of(mixed((0, 1), (2,)), 2)
    assert [each.weights for each in passes(columns, samples, kept)] == [kept.average]


def config(**changes):
    tree = config_tree()
    changed = {
        key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    tree |= {"controls": ["displacement"], **changed}
    return validated(tree)


def test_too_few_snapshots_are_refused():
    with pytest.raises(
        ValidationError, match=r"objective\.snapshots: 2 .*controls: displacement.*to at least 3"
    ):
        config(flow={"async_ratio": 1.5}, objective={"snapshots": 2})
    assert (
        config(flow={"async_ratio": 1.5}, objective={"snapshots": 3}).controls[0].name
        == "displacement"
    )


def test_the_plan_counts_host_memory_of_the_kept_versions():
    kept = config(objective={"snapshots": 5})
    assert (held_bytes(kept), past_master_bytes(kept)) == (0, 5 * 4)
    both = config(objective={"snapshots": 5, "proximal": "snapshot"})
    assert (held_bytes(both), past_master_bytes(both)) == (5 * 4 + 4, 5 * 4)
    # Without a number, as many as a batch may contain: at ratio 1.5, of lags 0, 1 and 2.
    assert past_master_bytes(config(flow={"async_ratio": 1.5})) == 3 * 4
    assert past_master_bytes(config(controls=[])) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"controls": ["displacement", {"name": "matched_lr", "target_update_norm": 0.1}]},
            "matched_lr is the null baseline of displacement",
        ),
        (
            {"objective": {"loss": "sft", "advantage": "none"}},
            "displacement compares with the weights that sampled the batch",
        ),
    ],
)
def test_combinations_that_do_not_work_are_refused(changes, reason):
    if "objective" in changes:
        changes = {**changes, "rollout": None, "flow": {"group_size": 1, "async_ratio": 0}}
    with pytest.raises(ValidationError, match=reason):
        config(**changes)


def test_a_bfloat16_models_displacement_uses_the_float32_weights():
    """At the learning rates of RL, the changes of the model's bfloat16 weights are mostly rounding,
    in another direction."""
    torch.manual_seed(0)
    masters = torch.nn.Parameter(torch.randn(4000))
    optimizer = SimpleNamespace(param_groups=[{"params": [masters], "lr": 0, "weight_decay": 0}])
    held = Snapshots(lambda: MasterSnapshot(optimizer), 2)
    held.begin(0)
    before, rounded = masters.detach().clone(), masters.detach().bfloat16().float()
    with torch.no_grad():
        masters.sub_(1e-5 * torch.randn(4000).sign())
    masters.grad = torch.zeros_like(masters)
    (way,) = weight_displacement(columns_of(mixed((0,), (0,)), 1), held, optimizer)
    true = masters.detach() - before
    assert way.dtype == torch.float32
    assert torch.equal(way, true)
    assert cosine(masters.detach().bfloat16().float() - rounded, true) < 0.5

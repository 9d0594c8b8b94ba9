"""The view of Adam against what torch's Adam does, and what an optimizer step leaves
behind for the next."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_async_rl.config.controls import GacControl, MatchedLrControl
from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.controls.decision import Control, Decision, UpdateCorrection
from megatron_async_rl.controls.gac import Gac, MatchedLr
from megatron_async_rl.gradients import clip_to, scale
from megatron_async_rl.policy import step as step_module
from megatron_async_rl.policy.adam_view import (
    AdamView,
    StateMissing,
    TakenStep,
    adam_steps,
    masters_of,
    set_adam_steps,
)
from megatron_async_rl.policy.optimizer import BlockAdam
from megatron_async_rl.policy.step import OptimizerStep, StepFacts
from tests.gradients import OneRank, Shard

SETTINGS = OptimizerConfig(
    lr=0.1,
    betas=(0.9, 0.95),
    eps=1e-3,
    weight_decay=0.5,
    clip_grad=None,
    log_update_norm=True,
)


class Megatron:
    """The part of Megatron's optimizer that a step uses, over torch's AdamW."""

    def __init__(self, decay=SETTINGS.weight_decay):
        draw = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=draw))
            for shape in ((3, 4), (5,), (2, 2))
        ]
        groups = [
            {"params": self.parameters[:2], "weight_decay": decay},
            {"params": self.parameters[2:], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps
        )
        self.gradient = lambda: torch.randn(1, generator=draw)
        self.draw = draw

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def prepare_grads(self):
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=self.draw)
        return False

    def step_with_ready_grads(self):
        self.optimizer.step()


class Scripted(Control):
    """Returns what it was given, one decision per step, and keeps what it saw."""

    def __init__(self, decisions):
        self.decisions = list(decisions)
        self.seen = []

    def apply(self, step):
        update = step.optimizer.last_update()
        self.seen.append(
            (
                step.lr,
                step.optimizer.updates,
                None if update is None else [part.clone() for part in update],
            )
        )
        return self.decisions.pop(0)


FACTS = StepFacts(loss=1.0, log_weights=np.zeros(3), lag_max=0)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(
        step_module,
        "gradients_of",
        lambda optimizer, layout: OneRank([Shard(p.grad) for p in optimizer.parameters]),
    )

    def build(decisions, settings=SETTINGS):
        megatron = Megatron(settings.weight_decay)
        control = Scripted(decisions)
        return (
            megatron,
            control,
            OptimizerStep(
                megatron,
                settings,
                {"scripted": control},
                SimpleNamespace(),
                10,
                on_anomaly="report",
            ),
        )

    return build


DECISIONS = [
    Decision(),
    Decision(lr_scale=0.3),
    Decision(beta1=0.2),
    Decision(skip=True),
    Decision(lr_scale=0.5, beta1=0.0),
    Decision(gradient_scale=0.1),
    Decision(),
]


def test_the_last_update_is_what_the_step_added_to_the_parameters_without_decay(run):
    megatron, control, optimizer_step = run(DECISIONS)
    made = None
    for decision in DECISIONS:
        before = [parameter.detach().clone() for parameter in megatron.parameters]
        metrics = optimizer_step.take(FACTS)
        _, _, seen = control.seen[-1]
        assert (seen is None) == (made is None)
        for told, real in zip(seen or [], made or [], strict=True):
            torch.testing.assert_close(told, real, rtol=1e-5, atol=1e-7)
        if decision.skip:
            assert metrics["update/norm"] == 0.0
            continue
        made = []
        for parameter, old in zip(megatron.parameters, before, strict=True):
            decay = next(
                g["weight_decay"]
                for g in megatron.param_groups
                if any(p is parameter for p in g["params"])
            )
            made.append(parameter.detach() - old * (1 - SETTINGS.lr * decision.lr_scale * decay))
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in made))
        assert metrics["update/norm"] == pytest.approx(norm, rel=1e-5)


def test_a_fused_adam_with_a_step_per_group_gives_the_same_view():
    megatron = Megatron()
    for _ in range(3):
        megatron.prepare_grads()
        megatron.step_with_ready_grads()
    last = TakenStep(SETTINGS.lr, SETTINGS.betas[0])
    by_parameter = list(AdamView(megatron, SETTINGS, 3, last).last_update())
    for group in megatron.param_groups:
        group["step"] = 3
    for state in megatron.optimizer.state.values():
        del state["step"]
    for one, other in zip(
        by_parameter, AdamView(megatron, SETTINGS, 3, last).last_update(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_the_steps_of_a_checkpoint_are_counted_where_adam_counts_them(kind):
    if kind == "torch":
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
        for parameter in adam.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)
        adam.step()
    else:
        adam = SimpleNamespace(state={}, param_groups=[{"step": 0}, {"step": 0}])
    part = SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)
    set_adam_steps(part, 7)
    assert adam_steps(part) == 7
    if kind == "torch":
        assert [float(state["step"]) for state in adam.state.values()] == [7.0, 7.0]
    else:
        assert adam.param_groups == [{"step": 7}, {"step": 7}]


def test_a_master_of_fewer_bits_is_refused():
    half = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    megatron = SimpleNamespace(param_groups=[{"params": [torch.nn.Parameter(torch.ones(2)), half]}])
    message = r"a parameter of shape \[2, 3\] in torch\.bfloat16: it has no float32 master to read"
    with pytest.raises(StateMissing, match=message):
        masters_of(megatron)
    del megatron.param_groups[0]["params"][1]
    assert [each.dtype for each in masters_of(megatron)] == [torch.float32]


def test_before_the_first_step_there_is_neither_momentum_nor_update_even_where_adam_has_state():
    """A checkpoint gives Adam its state of zeros before it has stepped; a rank without shards has
    none after it."""
    megatron = Megatron()
    megatron.prepare_grads()
    for parameter in megatron.parameters:
        megatron.optimizer.state[parameter] = {
            "exp_avg": torch.zeros(1),
            "exp_avg_sq": torch.zeros(1),
            "step": torch.zeros(()),
        }
    view = AdamView(megatron, SETTINGS, 0, None)
    assert (view.momentum(), view.last_update()) == (None, None)
    assert (view.beta1, view.last_update_norm) == (0.9, None)
    megatron.optimizer.param_groups.clear()
    later = AdamView(megatron, SETTINGS, 1, TakenStep(0.1, 0.9))
    assert (list(later.momentum()), list(later.last_update())) == ([], [])


def test_momentum_is_adams_first_moment_itself(run):
    megatron, _, optimizer_step = run([Decision()])
    optimizer_step.take(FACTS)
    for told, parameter in zip(optimizer_step._view().momentum(), megatron.parameters, strict=True):
        assert told is megatron.optimizer.state[parameter]["exp_avg"]


def test_the_scheduler_never_sees_what_a_control_multiplied_its_rate_by(run):
    megatron, control, optimizer_step = run([Decision(lr_scale=0.01), Decision(), Decision()])
    settings = SETTINGS.model_copy(update={"schedule": "linear"})
    optimizer_step.settings = settings
    rates = []
    for _ in range(3):
        metrics = optimizer_step.take(FACTS)
        rates.append((metrics["policy/lr"], megatron.param_groups[0]["lr"]))
    assert (
        [lr for lr, _, _ in control.seen]
        == [lr for lr, _ in rates]
        == pytest.approx([0.1, 0.09, 0.08])
    )
    assert [used for _, used in rates] == pytest.approx([0.001, 0.09, 0.08])


def test_a_control_s_beta1_lasts_one_step(run):
    megatron, _, optimizer_step = run([Decision(beta1=0.1), Decision()])
    used = []
    for _ in range(2):
        optimizer_step.take(FACTS)
        used.append([group["betas"] for group in megatron.param_groups])
    assert used == [[(0.1, 0.95)] * 2, [(0.9, 0.95)] * 2]


def test_what_the_last_step_was_made_with_survives_a_checkpoint(run):
    _, _, optimizer_step = run([Decision(lr_scale=0.3, beta1=0.2), Decision(skip=True)])
    optimizer_step.take(FACTS)
    optimizer_step.take(FACTS)
    _, _, resumed = run([])
    resumed.load_state_dict(optimizer_step.state_dict())
    made = resumed.last
    assert (resumed.steps, resumed.updates, made.lr, made.beta1) == (2, 1, 0.1 * 0.3, 0.2)
    assert made == optimizer_step.last
    assert resumed.norms.values == optimizer_step.norms.values


QUIET = SETTINGS.model_copy(update={"log_update_norm": False})


def test_nothing_is_spent_on_an_update_norm_without_a_request(run, monkeypatch):
    sweeps = []
    monkeypatch.setattr(step_module, "squared_norm_of", lambda *given: sweeps.append(given) or 1.0)
    _, control, optimizer_step = run([Decision(), Decision()], QUIET)
    assert "update/norm" not in optimizer_step.take(FACTS)
    assert not sweeps
    control.needs_update_norm = True
    assert optimizer_step.take(FACTS)["update/norm"] == 1.0
    assert len(sweeps) == 1


def test_matched_lr_is_given_the_norm_of_the_update_that_was_made(run):
    _, _, optimizer_step = run([], QUIET)
    control = MatchedLr(MatchedLrControl(target_update_norm=0.1))
    optimizer_step.controls = {"matched_lr": control}
    first = optimizer_step.take(FACTS)["update/norm"]
    optimizer_step.take(FACTS)
    assert control.total == pytest.approx(first)


def test_with_gac_no_gradient_is_read_again_for_its_norm(run, monkeypatch):
    _, _, optimizer_step = run([], QUIET)
    optimizer_step.controls = {"gac": Gac(GacControl(c_low=0.0))}
    optimizer_step.take(FACTS)

    def measured(gradients):
        raise AssertionError("a third sweep")

    monkeypatch.setattr(step_module, "squared_norm", measured)
    for _ in range(4):
        told = optimizer_step.take(FACTS)
        left = [p.grad.double() for p in optimizer_step.optimizer.parameters]
        norm = math.sqrt(sum(float(part.square().sum()) for part in left))
        assert told["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_rank_without_shards_clips_and_scales_nothing():
    clip_to(OneRank([]), 3.0, 1.0)
    scale(OneRank([]), 0.5)


BETAS_OF_A_CONTROL = [0.9, 0.0, 0.0, 0.9, 0.5, 0.9, 0.9]


def adam_by_hand(parameters, gradients, betas, settings, decay):
    """Decoupled Adam in float64 with the bias correction of the weights that the moments hold."""
    weights = [parameter.double() for parameter in parameters]
    first, second = ([torch.zeros_like(each) for each in weights] for _ in range(2))
    product, beta2 = 1.0, settings.betas[1]
    for step, (beta1, given) in enumerate(zip(betas, gradients, strict=True), 1):
        product *= beta1
        for place, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
            g = gradient.double()
            first[place] = beta1 * first[place] + (1 - beta1) * g
            second[place] = beta2 * second[place] + (1 - beta2) * g * g
            root = (second[place] / (1 - beta2**step)).sqrt() + settings.eps
            weights[place] = weight - settings.lr * (
                first[place] / (1 - product) / root + decay[place] * weight
            )
    return weights


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("saved_after", [None, 3])
def test_bias_is_corrected_by_the_product_of_the_beta1s_that_were_used(run, block, saved_after):
    megatron, _, optimizer_step = run([Decision(beta1=beta1) for beta1 in BETAS_OF_A_CONTROL])
    if block:
        megatron.optimizer = BlockAdam(megatron.optimizer)
    start = [parameter.detach().clone() for parameter in megatron.parameters]
    gradients, coming = [], None
    for taken in range(len(BETAS_OF_A_CONTROL)):
        if taken == saved_after:
            controls, saved = optimizer_step.controls, optimizer_step.state_dict()
            optimizer_step = OptimizerStep(
                megatron, SETTINGS, controls, SimpleNamespace(), 10, on_anomaly="report"
            )
            optimizer_step.load_state_dict(saved)
        optimizer_step.take(FACTS)
        gradients.append([parameter.grad.clone() for parameter in megatron.parameters])
        coming = optimizer_step._view().last_update()
    decay = [SETTINGS.weight_decay, SETTINGS.weight_decay, 0.0]
    wanted = adam_by_hand(start, gradients, BETAS_OF_A_CONTROL, SETTINGS, decay)
    before = adam_by_hand(start, gradients[:-1], BETAS_OF_A_CONTROL[:-1], SETTINGS, decay)
    for place, parameter in enumerate(megatron.parameters):
        torch.testing.assert_close(parameter.detach().double(), wanted[place], rtol=1e-5, atol=1e-6)
        made = wanted[place] - before[place] * (1 - SETTINGS.lr * decay[place])
        torch.testing.assert_close(coming[place].double(), made, rtol=1e-4, atol=1e-6)


def test_the_update_to_come_has_the_same_correction(run):
    _, _, optimizer_step = run([Decision(beta1=beta1) for beta1 in (0.0, 0.9)])
    seen = []
    optimizer_step.controls["scripted"].before_update = lambda view: (
        seen.append([part.clone() for part in view.update]) or UpdateCorrection()
    )
    for _ in range(2):
        optimizer_step.take(FACTS)
    for coming, made in zip(seen[-1], optimizer_step._view().last_update(), strict=True):
        torch.testing.assert_close(coming, made, rtol=1e-5, atol=1e-7)


def test_a_constant_beta1_changes_neither_learning_rate_nor_decay_by_a_bit(run):
    megatron, _, optimizer_step = run([Decision(beta1=0.7)] * 50)
    for _ in range(50):
        optimizer_step.take(FACTS)
        assert [group["lr"] for group in megatron.param_groups] == [SETTINGS.lr] * 2
        assert [group["weight_decay"] for group in megatron.param_groups] == [0.5, 0.0]


def test_a_checkpoint_without_the_product_takes_the_last_beta1_for_constant(run):
    _, _, optimizer_step = run([Decision(beta1=0.5)] * 3)
    for _ in range(3):
        optimizer_step.take(FACTS)
    state = optimizer_step.state_dict()
    del state["beta1_product"]
    _, _, resumed = run([])
    resumed.load_state_dict(state)
    assert resumed.beta1_product == optimizer_step.beta1_product

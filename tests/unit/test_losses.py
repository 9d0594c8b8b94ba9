import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_async_rl.config.keys import models_in
from megatron_async_rl.config.losses import Loss, PpoClipLoss, SftLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.batch import TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip
from megatron_async_rl.objectives.objective import Denominators, Objective, StepTargets, aggregate
from megatron_async_rl.objectives.off_policy import proximal_logp
from tests.cases import looped
from tests.method_settings import LOSSES
from tests.token_batches import detached, part_of, random_tokens, tokens

SETTINGS = {model.model_fields["name"].default: model for model in models_in(Loss)}
AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def part(whole, rows, dtype=torch.float64):
    """The micro-batch of the sequences `rows`, as a training step cuts it; `logp` is a leaf."""
    lengths = torch.bincount(whole.sequence, minlength=whole.sequences).numpy()
    samples = SimpleNamespace(
        lengths=lengths,
        owned_starts=np.cumsum(lengths) - lengths,
        owner=np.zeros_like(lengths),
        rows=np.repeat(np.arange(len(lengths)), lengths),
    )
    targets = StepTargets(samples, detached(whole), Denominators.of(whole), True)
    cut = part_of(targets, rows, dtype)
    return cut.replace(logp=cut.logp.requires_grad_())


def variants(name):
    """The loss with its defaults, and M2PO's other modes."""
    if name != "m2po":
        return [SETTINGS[name]()]
    return [
        SETTINGS[name](mode=mode, candidates=candidates)
        for mode in ("mask", "cap")
        for candidates in ("harmful", "all")
    ]


def configured(loss, **more):
    """An Objective around the loss alone."""
    given = {"advantage": "none", "proximal": "snapshot"} | (
        {"reference": {}} if loss.uses_reference else {}
    )
    return Objective(ObjectiveConfig(loss=loss, **given | more))


@looped(
    "loss",
    [v for name in LOSSES for v in variants(name)],
    ids=lambda loss: "-".join(map(str, loss.model_dump().values()))[:30],
)
@looped("cut", [[[0, 1], [2, 3, 4, 5]], [[5, 0, 3], [4], [2, 1]], [[0], [1], [2], [3], [4], [5]]])
def test_any_cut_of_a_batch_into_micro_batches_gives_the_same_loss_and_gradient(loss, cut):
    whole = random_tokens(seed=4)
    decide = LOSSES[loss.name].decide
    if decide is not None:
        whole = whole.replace(decided=decide(detached(whole), loss))
    denominators = Denominators.of(whole)
    for aggregation in AGGREGATIONS if loss.level == "token" else ["seq-mean"]:
        norm_length = 100 if aggregation.endswith("norm") else None
        objective = configured(loss, aggregation=aggregation, norm_length=norm_length)
        total = objective.loss(whole, denominators).parts.sum()
        (expected,) = torch.autograd.grad(total, whole.logp)
        value, found = torch.zeros_like(total), torch.zeros_like(expected)
        for rows in cut:
            batch = part(whole, rows)
            piece = objective.loss(batch, denominators).parts.sum()
            (slope,) = torch.autograd.grad(piece, batch.logp)
            found[torch.cat([torch.nonzero(whole.sequence == s).flatten() for s in rows])] = slope
            value += piece
        torch.testing.assert_close(value, total, atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)
        assert torch.all(expected[whole.mask == 0] == 0)


@looped("name", LOSSES)
def test_a_micro_batch_in_float32_has_nearly_the_loss_and_gradient_of_float64(name):
    for loss in variants(name):
        whole = random_tokens(seed=4)
        decide = LOSSES[name].decide
        if decide is not None:
            whole = whole.replace(decided=decide(detached(whole), loss))
        values = []
        for dtype in (torch.float64, torch.float32):
            batch = part(whole, [0, 2, 3], dtype)
            losses = LOSSES[name].function(batch, loss)
            total = aggregate(losses, batch, loss.default_aggregation, Denominators.of(whole)).sum()
            assert total.dtype == dtype
            values.append([total, *torch.autograd.grad(total, batch.logp)])
        for exact, single in zip(*values, strict=True):
            torch.testing.assert_close(single.double(), exact, atol=1e-5, rtol=1e-4)


@looped("dtype", [torch.float64, torch.float32])
@looped("name", LOSSES)
def test_every_loss_is_finite_for_log_ratios_of_700(name, dtype):
    far = list(product([-700.0, 0.0, 700.0], [-700.0, -1.0], [-1.0, 1.0]))
    logp, other, advantages = zip(*far, strict=True)
    rows = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5]
    for loss in variants(name):
        whole = tokens(
            logp,
            prox=other,
            behavior=other[::-1],
            ref=other,
            advantages=advantages,
            sequence=rows,
            mask=[1.0] * 11 + [0.0],
            rewards=[-1.0, 1.0, 0.0, 0.0, 5.0, 1.0],
            group=[0, 0, 1, 1, 2, 2],
        )
        decide = LOSSES[name].decide
        if decide is not None:
            whole = whole.replace(decided=decide(detached(whole), loss))
            assert all(map(math.isfinite, whole.decided.scalars.values()))
        batch = part(whole, list(range(6)), dtype)
        result = LOSSES[name].function(batch, loss)
        total = aggregate(result, batch, loss.default_aggregation, Denominators.of(whole)).sum()
        (gradient,) = torch.autograd.grad(total, batch.logp)
        assert torch.isfinite(total)
        assert torch.isfinite(gradient).all()
        assert torch.all(gradient[result.clipped] == 0)


@pytest.mark.parametrize("name", [name for name in LOSSES if SETTINGS[name].linear_in_advantage])
def test_a_loss_declared_linear_in_the_advantage_is_linear(name):
    batch = random_tokens(seed=7)

    def slope(factor):
        losses = LOSSES[name].function(
            batch.replace(advantages=factor * batch.advantages), SETTINGS[name]()
        )
        return torch.autograd.grad(losses.loss.sum(), batch.logp)[0]

    torch.testing.assert_close(slope(-3.0), -3.0 * slope(1.0))


@looped("name", [name for name in LOSSES if not SETTINGS[name].linear_in_advantage])
def test_a_loss_not_declared_linear_in_the_advantage_is_not(name):
    batch = random_tokens(seed=7)

    def slope(factor):
        moved = batch.replace(advantages=factor * batch.advantages)
        decide = LOSSES[name].decide
        moved = (
            moved.replace(decided=decide(detached(moved), SETTINGS[name]())) if decide else moved
        )
        return torch.autograd.grad(
            LOSSES[name].function(moved, SETTINGS[name]()).loss.sum(), batch.logp
        )[0]

    assert not torch.allclose(slope(-3.0), -3.0 * slope(1.0))


FACTS = {
    "uses_advantage": "advantages",
    "uses_proximal": "logp_prox",
    "against_behavior": "logp_behavior",
    "uses_reference": "logp_ref",
}


@looped("fact", FACTS)
@looped("name", LOSSES)
def test_a_loss_reads_exactly_the_columns_of_its_settings(name, fact):
    column, method, settings = FACTS[fact], LOSSES[name], SETTINGS[name]()
    batch = random_tokens(seed=7)
    batch = batch.replace(rewards=-batch.rewards.abs())  # where TOPR has a weight
    moved = batch.replace(**{column: getattr(batch, column).roll(1) + 1.0})

    def gradient(batch):
        batch = (
            batch.replace(decided=method.decide(detached(batch), settings))
            if method.decide
            else batch
        )
        return torch.autograd.grad(method.function(batch, settings).loss.sum(), batch.logp)[0]

    assert (not torch.equal(gradient(batch), gradient(moved))) == getattr(settings, fact)


def test_the_four_aggregations_divide_by_their_stated_counts():
    batch = tokens([1.0, 2.0, 3.0, 4.0, 99.0], mask=[1, 1, 1, 1, 0], sequence=[0, 0, 0, 1, 1])
    denominators, losses = (
        Denominators(tokens=4, sequences=2),
        TokenLoss(batch.logp, batch.logp > 0),
    )
    found = [
        float(
            aggregate(losses, batch, a, denominators, 8 if a.endswith("norm") else None)
            .sum()
            .detach()
        )
        for a in AGGREGATIONS
    ]
    assert found == [10 / 4, 10 / 2, (2 + 4) / 2, 10 / 8 / 2]


def test_a_norm_length_is_asked_for():
    batch = tokens([1.0])
    with pytest.raises(ValueError, match="norm_length"):
        aggregate(
            TokenLoss(batch.logp, batch.logp > 0),
            batch,
            "seq-mean-token-sum-norm",
            Denominators(1, 1),
        )


def test_huge_log_ratios_stay_finite_in_value_and_gradient():
    batch = tokens([500.0, -500.0, 500.0, -500.0], advantages=[1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(batch, PpoClipLoss())
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(batch.logp.grad).all()


def test_clipped_marks_exactly_the_tokens_whose_gradient_is_cut():
    batch = tokens([0.5, 0.1, -0.5, -0.5, 0.5, 2.0], advantages=[1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    result = ppo_clip(batch, PpoClipLoss(dual_clip=3.0))
    result.loss.sum().backward()
    assert result.clipped.tolist() == [True, False, False, True, False, True]
    assert (batch.logp.grad == 0).tolist() == result.clipped.tolist()


def test_the_asymmetric_upper_bound_is_the_upper_one():
    batch = tokens([0.22], advantages=[1.0])
    assert ppo_clip(batch, PpoClipLoss(clip_high=0.2)).clipped.item()
    assert not ppo_clip(batch, PpoClipLoss(clip_high=0.28)).clipped.item()


def test_behavior_bypasses_the_proximal_policy_and_recompute_uses_the_trainers_own():
    batch = detached(tokens([-1.0, -2.0], behavior=[-1.5, -1.9], lag=torch.tensor([0, 4])))
    assert proximal_logp(batch, "behavior", None) is batch.logp_behavior
    assert proximal_logp(batch, "recompute", None) is batch.logp
    found = proximal_logp(batch, "loglinear", None)
    assert found.tolist() == pytest.approx([-1.5, -1.9 + 0.75 * (-2.0 + 1.9)])


def test_with_recompute_the_first_step_has_ratio_one_and_the_policy_gradient():
    batch = tokens([-1.0, -2.0], prox=[-1.0, -2.0], behavior=[-5.0, -9.0], advantages=[2.0, -3.0])
    result = ppo_clip(batch, PpoClipLoss())
    result.loss.sum().backward()
    assert batch.logp.grad.tolist() == [-2.0, 3.0]
    assert not result.clipped.any()


def test_a_sample_weight_scales_its_loss_and_no_denominator():
    objective = Objective(ObjectiveConfig(loss=SftLoss(), advantage="none"))
    loss = objective.loss(
        tokens([-1.0, -1.0], weights=[0.25, 1.0], sequence=[0, 1]), Denominators(2, 2)
    )
    assert loss.parts.tolist() == [0.125, 0.5]

import json
from pathlib import Path

import pytest
import torch

from megatron_async_rl.config.losses import PpoClipLoss, ReinforceLoss, SftLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.aggregate import Denominators, aggregate
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.objectives.proximal import proximal_logp
from megatron_async_rl.objectives.registry import LOSSES, loss_method
from tests.token_batches import detached, random_tokens, tokens

GOLDEN = [
    c for c in json.loads((Path(__file__).parents[1] / "data/golden/losses_seed1.json").read_text()) if c["kind"] == "policy_loss"
]
SETTINGS = {"ppo_clip": PpoClipLoss, "reinforce": ReinforceLoss}
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("case", [c for c in GOLDEN if c["name"] in SETTINGS], ids=lambda c: c["case"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_and_its_gradient_equal_the_reference_vector(case, dtype):
    inputs = {name: torch.tensor(value, dtype=dtype) for name, value in case["inputs"].items()}
    rows, columns = inputs["logp"].shape
    params = dict(case["params"])
    aggregation = params.pop("aggregation")
    mask = inputs["mask"]
    # Padding stays in, with mask 0: it has to be without effect.
    batch = TokenBatch(
        logp=inputs["logp"].flatten().requires_grad_(),
        logp_prox=inputs["logp_prox"].flatten(),
        logp_behavior=torch.zeros(rows * columns, dtype=dtype),
        advantages=inputs["advantages"].flatten(),
        mask=mask.flatten(),
        weights=inputs.get("weights", torch.ones_like(mask)).flatten(),
        sequence=torch.arange(rows).repeat_interleave(columns),
        sequences=rows,
    )
    denominators = Denominators(tokens=int(mask.sum()), sequences=int((mask.sum(1) > 0).sum()))
    losses = loss_method(case["name"]).function(batch, SETTINGS[case["name"]](**params))
    loss = aggregate(losses, batch, aggregation, denominators).sum()
    loss.backward()
    tolerance = {"atol": 1e-6, "rtol": 0.0} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(loss, torch.tensor(case["expect"]["loss"], dtype=dtype), **tolerance)
    torch.testing.assert_close(batch.logp.grad, torch.tensor(case["expect"]["grad_logp"], dtype=dtype).flatten(), **tolerance)


def part(batch, keep):
    """The TokenBatch of the sequences `keep`, in that order."""
    chosen = torch.cat([torch.nonzero(batch.sequence == s).flatten() for s in keep])
    renumbered = torch.tensor([keep.index(int(s)) for s in batch.sequence[chosen]])
    values = {n: getattr(batch, n).detach()[chosen] for n in ("logp_prox", "logp_behavior", "advantages", "mask", "weights")}
    return TokenBatch(logp=batch.logp[chosen], sequence=renumbered, sequences=len(keep), **values)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("cut", [[[0, 1], [2, 3, 4, 5]], [[5, 0, 3], [4], [2, 1]], [[0], [1], [2], [3], [4], [5]]])
def test_any_cut_of_a_batch_into_micro_batches_gives_the_same_gradient(aggregation, loss, cut):
    objective = Objective(
        ObjectiveConfig(
            loss=loss, advantage="none", aggregation=aggregation, norm_length=100 if aggregation.endswith("norm") else None
        )
    )
    whole = random_tokens()
    denominators = Denominators.of(whole)
    objective.loss(whole, denominators).parts.sum().backward()
    expected, whole.logp.grad = whole.logp.grad, None
    for keep in cut:
        objective.loss(part(whole, keep), denominators).parts.sum().backward()
    torch.testing.assert_close(whole.logp.grad, expected, atol=1e-14, rtol=1e-12)
    assert torch.all(whole.logp.grad[whole.mask == 0] == 0)


def test_the_four_aggregations_divide_by_what_they_say():
    batch = tokens([1.0, 2.0, 3.0, 4.0, 99.0], mask=[1, 1, 1, 1, 0], sequence=[0, 0, 0, 1, 1])
    denominators, losses = Denominators(tokens=4, sequences=2), TokenLoss(batch.logp, batch.logp > 0)
    found = [
        float(aggregate(losses, batch, a, denominators, 8 if a.endswith("norm") else None).sum().detach())
        for a in AGGREGATIONS
    ]
    assert found == [10 / 4, 10 / 2, (2 + 4) / 2, 10 / 8 / 2]


def test_a_norm_length_is_asked_for():
    batch = tokens([1.0])
    with pytest.raises(ValueError, match="norm_length"):
        aggregate(TokenLoss(batch.logp, batch.logp > 0), batch, "seq-mean-token-sum-norm", Denominators(1, 1))


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
    loss = objective.loss(tokens([-1.0, -1.0], weights=[0.25, 1.0], sequence=[0, 1]), Denominators(2, 2))
    assert loss.parts.tolist() == [0.125, 0.5]

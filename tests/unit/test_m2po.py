"""M2PO decides from the whole batch which tokens leave, or where the ratio is capped."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_async_rl.config.losses import M2poLoss
from megatron_async_rl.objectives.batch import BatchDecision
from megatron_async_rl.objectives.losses.m2po import decide_m2po, m2po
from tests.cases import looped
from tests.token_batches import detached, random_tokens, tokens

BOUNDS = [0.001, 0.04, 0.2, 1.0, 5.0]


def batch_of(seed, count=60):
    """Tokens whose log-weights are heavy-tailed, a fifth of them masked."""
    draw = random.Random(seed)
    log_weight = [draw.gauss(0, 0.3) * math.exp(draw.gauss(0, 1)) for _ in range(count)]
    return tokens(
        [-3.0 + x for x in log_weight],
        behavior=[-3.0] * count,
        advantages=[draw.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(count)],
        mask=[float(draw.random() > 0.2) for _ in range(count)],
    )


def squares(batch, candidates):
    """Index and (log w)^2 of every candidate, worked out one by one."""
    found = {}
    for i in range(len(batch.logp)):
        log_weight, advantage = (
            (batch.logp[i] - batch.logp_behavior[i]).item(),
            batch.advantages[i].item(),
        )
        harmful = (advantage > 0 and log_weight > 0) or (advantage < 0 and log_weight < 0)
        if batch.mask[i] > 0 and (candidates == "all" or harmful):
            found[i] = log_weight**2
    return found


@looped("bound", BOUNDS)
@looped("candidates", ["harmful", "all"])
@looped("seed", range(3))
def test_the_mask_drops_the_largest_and_no_more_than_it_has_to(seed, candidates, bound):
    batch = batch_of(seed)
    decided = decide_m2po(detached(batch), M2poLoss(candidates=candidates, second_moment=bound))
    found = squares(batch, candidates)
    dropped = {i for i in range(len(batch.logp)) if not decided.tokens["keep"][i]}
    assert dropped <= set(found)
    left = [found[i] for i in found if i not in dropped]
    assert sum(left) <= bound * len(left) + 1e-12
    if dropped:
        least = min(found[i] for i in dropped)
        assert all(d <= least for d in left)
        assert (sum(left) + least) / (len(left) + 1) > bound
    assert decided.scalars["objective/second_moment"] == pytest.approx(
        sum(found.values()) / len(found)
    )


@looped("bound", BOUNDS)
@looped("candidates", ["harmful", "all"])
@looped("seed", range(3))
def test_the_cap_is_the_water_level_of_the_second_moment(seed, candidates, bound):
    batch = batch_of(seed)
    cap = decide_m2po(
        detached(batch), M2poLoss(mode="cap", candidates=candidates, second_moment=bound)
    ).scalars["objective/log_ratio_cap"]
    found = list(squares(batch, candidates).values())
    if sum(found) / len(found) <= bound:
        assert cap == pytest.approx(math.sqrt(max(found)))
    else:
        assert sum(min(d, cap**2) for d in found) / len(found) == pytest.approx(bound, rel=1e-12)


def test_the_mask_leaves_the_policy_gradient_with_importance_weights_on_what_it_keeps():
    batch = batch_of(1)
    settings = M2poLoss()
    batch = batch.replace(decided=decide_m2po(detached(batch), settings))
    result = m2po(batch, settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), batch.logp)
    keep = batch.decided.tokens["keep"]
    assert result.clipped.tolist() == (~keep).tolist()
    assert 0 < int(result.clipped.sum()) < len(keep)
    expected = torch.where(
        keep, -batch.advantages * (batch.logp - batch.logp_behavior).exp(), 0.0
    ).detach()
    torch.testing.assert_close(gradient, expected)


def test_the_cap_clips_as_ppo_does_symmetrically_in_log_space():
    settings = M2poLoss(mode="cap")
    decided = BatchDecision(
        scalars={"objective/second_moment": 1.0, "objective/log_ratio_cap": 0.5}
    )
    batch = tokens(
        [-1.4, -1.6, -2.4, -2.6] * 2, behavior=[-2.0] * 8, advantages=[1.0] * 4 + [-1.0] * 4
    )
    result = m2po(batch.replace(decided=decided), settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), batch.logp)
    assert result.clipped.tolist() == [True, False, False, False, False, False, False, True]
    assert (gradient == 0).tolist() == result.clipped.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_within_the_bound_keeps_every_gradient_in_either_mode(dtype):
    whole = batch_of(2)
    for mode in ("mask", "cap"):
        settings = M2poLoss(mode=mode, second_moment=100.0)
        part = whole.replace(decided=decide_m2po(detached(whole), settings))
        part = part.replace(
            **{
                n: getattr(whole, n).detach().to(dtype)
                for n in ("logp", "logp_behavior", "advantages", "mask", "weights")
            }
        )
        assert not m2po(part, settings).clipped.any()


@pytest.mark.parametrize("candidates", ["harmful", "all"])
def test_what_is_decided_depends_on_no_order(candidates):
    batch = detached(random_tokens(seed=3))
    order = torch.randperm(len(batch.logp), generator=torch.Generator().manual_seed(0))
    moved = batch.replace(
        **{
            n: getattr(batch, n)[order]
            for n in ("logp", "logp_behavior", "advantages", "mask", "sequence")
        }
    )
    for mode in ("mask", "cap"):
        settings = M2poLoss(mode=mode, candidates=candidates)
        first, second = decide_m2po(batch, settings), decide_m2po(moved, settings)
        assert dict(second.scalars) == pytest.approx(dict(first.scalars), rel=1e-12)
        if mode == "mask":
            assert second.tokens["keep"].tolist() == first.tokens["keep"][order].tolist()


def test_without_candidates_nothing_is_dropped_or_capped():
    batch = detached(tokens([-1.0, -2.0], behavior=[-2.0, -1.0], advantages=[-1.0, 1.0]))
    for mode in ("mask", "cap"):
        settings = M2poLoss(mode=mode)
        decided = decide_m2po(batch, settings)
        assert decided.scalars == {}
        assert not m2po(batch.replace(decided=decided), settings).clipped.any()

import dataclasses
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.objective import (
    KlConfig,
    ObjectiveConfig,
    OverlongConfig,
    ReferenceConfig,
)
from megatron_async_rl.objectives.objective import Denominators, Objective
from megatron_async_rl.objectives.terms import kl_estimate, token_kl, token_rewards
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt
from tests.cases import looped
from tests.token_batches import decided, tokens
from tests.train_batches import columns, make_sample

EXACT = torch.float64
PROMPT = Prompt(id="p", text="", token_ids=(1, 2))


def one_group(*samples):
    return columns(TrainBatch.of(0, [samples]))


def sample(name, length, reward, *, steps=None, mask=None):
    made = make_sample(PROMPT, name, [3] * length, reward=reward, mask=mask)
    return (
        made
        if steps is None
        else dataclasses.replace(made, step_rewards=np.array(steps, dtype=np.float32))
    )


# Overlong responses (DAPO, eq. 13).


@looped(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (10, 2.0), (12, 2.0)])
def test_a_response_is_punished_by_how_far_it_is_in_the_buffer(length, penalty):
    config = ObjectiveConfig(
        advantage="none", overlong=OverlongConfig(max_length=10, buffer=4, penalty=2.0)
    )
    whole = decided(Objective(config), one_group(sample("a", length, 1.0)), {}).whole
    assert whole.rewards.tolist() == [1.0 - penalty]
    assert whole.token_rewards.sum() == 1.0 - penalty


def test_what_an_environment_wrote_does_not_make_a_response_overlong():
    config = ObjectiveConfig(
        advantage="none", overlong=OverlongConfig(max_length=10, buffer=4, penalty=2.0)
    )
    for sampled, penalty in ((6, 0.0), (8, 1.0)):
        mask = [1, 1, *[0] * 9, *[1] * (sampled - 2)]
        with_tool = sample("a", len(mask), 1.0, mask=mask)
        whole = decided(Objective(config), one_group(with_tool), {}).whole
        assert whole.rewards.tolist() == [1.0 - penalty]


# KL estimators: exact expectations over a small vocabulary.


def policies(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 6, generator=generator, dtype=EXACT)
    return logits.requires_grad_(), torch.log_softmax(reference, 0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_the_divergence_on_average(estimator):
    logits, reference = policies()
    logp = torch.log_softmax(logits, 0)
    divergence = (logp.exp() * (logp - reference)).sum()
    torch.testing.assert_close(
        (logp.exp() * kl_estimate(logp - reference, estimator)).sum(), divergence
    )


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(estimator):
    assert torch.all(kl_estimate(torch.linspace(-20, 20, 401, dtype=EXACT), estimator) >= 0.0)


def gradients(estimator):
    """(mean gradient of the estimator as a loss, with samples of pi; gradient of KL(pi || ref); of
    KL(ref || pi))."""
    logits, reference = policies()
    logp = torch.log_softmax(logits, 0)
    as_loss = (logp.exp().detach() * kl_estimate(logp - reference, estimator)).sum()
    forward = (logp.exp() * (logp - reference)).sum()
    backward = (reference.exp() * (reference - logp)).sum()
    return tuple(
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (as_loss, forward, backward)
    )


def test_as_a_loss_k2_has_the_gradient_of_the_divergence():
    found, divergence, _ = gradients("k2")
    torch.testing.assert_close(found, divergence)


def test_as_a_loss_k1_has_no_gradient_on_average_and_k3_that_of_the_other_divergence():
    assert float(gradients("k1")[0].abs().max()) < 1e-12
    found, _, reverse = gradients("k3")
    torch.testing.assert_close(found, reverse)


def test_a_penalty_in_the_reward_is_taken_from_each_trained_token():
    kl = KlConfig(coef=0.1, estimator="k1", where="reward")
    config = ObjectiveConfig(advantage="none", kl=kl, reference=ReferenceConfig())
    surveyed = {
        "logp": torch.tensor([-1.0, -1.0, -1.0]),
        "logp_ref": torch.tensor([-2.0, -3.0, -1.5]),
    }
    whole = decided(
        Objective(config), one_group(sample("a", 3, 1.0, mask=[1, 0, 1])), surveyed
    ).whole
    torch.testing.assert_close(whole.token_rewards, torch.tensor([-0.1, 0.0, 0.95], dtype=EXACT))
    torch.testing.assert_close(whole.rewards, torch.tensor([0.85], dtype=EXACT))


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("weight", ["none", "truncated"])
def test_k1_in_the_loss_is_refused_with_what_would_pull_towards_the_reference(loss, weight):
    with pytest.raises(ValidationError, match="has mean 0 for any reference") as refused:
        ObjectiveConfig(
            loss=loss, kl={"coef": 0.1, "estimator": "k1", "weight": weight}, reference={}
        )
    assert "where: reward, or estimator: k2 (the gradient of KL(pi || ref))" in str(refused.value)


def weighted_gradient(estimator, cap):
    """Mean gradient of the weighted estimate as a loss, with samples of a mu that is not pi, and
    the gradients of the two divergences of pi."""
    logits, reference = policies()
    behavior = torch.log_softmax(policies(seed=1)[1] * 0.7, 0)
    logp = torch.log_softmax(logits, 0)
    kl = KlConfig(coef=1.0, estimator=estimator, where="loss", weight="truncated", cap=cap)
    batch = tokens([0.0] * 6).replace(logp=logp, logp_ref=reference, logp_behavior=behavior)
    as_loss = (behavior.exp() * token_kl(batch, kl)).sum()
    forward = (logp.exp() * (logp - reference)).sum()
    backward = (reference.exp() * (reference - logp)).sum()
    return tuple(
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (as_loss, forward, backward)
    )


def test_weighted_estimates_of_stale_tokens_have_the_gradients_of_fresh_ones():
    found, divergence, _ = weighted_gradient("k2", cap=1e9)
    torch.testing.assert_close(found, divergence)
    found, _, reverse = weighted_gradient("k3", cap=1e9)
    torch.testing.assert_close(found, reverse)
    assert not torch.allclose(weighted_gradient("k2", cap=1.5)[0], divergence, rtol=1e-3)


GOLDEN = {
    # (estimator, weight, cap) -> value and d/dlogp of each of three tokens, by hand: with l = (0.5,
    # -1, 0.25) and w = (e^0.2, e^-0.5, e^1.5); e^1.5 is above 2.
    ("k2", "none", 2.0): ([0.125, 0.5, 0.03125], [0.5, -1.0, 0.25]),
    ("k2", "truncated", 2.0): (
        [0.152675344770, 0.303265329856, 0.0625],
        [0.610701379080, -0.606530659713, 0.5],
    ),
    ("k2", "truncated", 100.0): (
        [0.152675344770, 0.303265329856, 0.140052783448],
        [0.610701379080, -0.606530659713, 1.120422267585],
    ),
    ("k3", "truncated", 2.0): (
        [0.130116841602, 0.435659951275, 0.057601566143],
        [0.480584537478, -1.042190610987, 0.442398433857],
    ),
}


@pytest.mark.parametrize(("chosen", "expected"), GOLDEN.items(), ids=str)
def test_a_weighted_penalty_on_three_tokens_by_hand(chosen, expected):
    estimator, weight, cap = chosen
    kl = KlConfig(coef=0.5, estimator=estimator, weight=weight, cap=cap)
    config = ObjectiveConfig(loss="reinforce", advantage="none", kl=kl, reference={})
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=EXACT, requires_grad=True)
    batch = tokens([0.0] * 3, advantages=[0.0] * 3).replace(
        logp=logp,
        logp_ref=logp.detach() - torch.tensor([0.5, -1.0, 0.25], dtype=EXACT),
        logp_behavior=logp.detach() - torch.tensor([0.2, -0.5, 1.5], dtype=EXACT),
    )
    values, slopes = (torch.tensor(each, dtype=EXACT) for each in expected)
    torch.testing.assert_close(token_kl(batch, kl).detach(), values, rtol=1e-10, atol=1e-11)
    found = Objective(config).loss(batch, Denominators(tokens=3, sequences=1))
    torch.testing.assert_close(found.terms["kl"].sum(), 0.5 * values.mean(), rtol=1e-10, atol=1e-11)
    (gradient,) = torch.autograd.grad(found.parts.sum(), logp)
    torch.testing.assert_close(gradient, 0.5 * slopes / 3, rtol=1e-10, atol=1e-11)


def test_a_weighted_penalty_in_the_reward_weighs_each_token_alone():
    kl = KlConfig(coef=0.1, estimator="k1", where="reward", weight="truncated")
    config = ObjectiveConfig(advantage="none", kl=kl, reference=ReferenceConfig())
    batch = one_group(sample("a", 2, 1.0))
    behavior = torch.tensor(batch.behavior_logprobs, dtype=EXACT)
    given = {
        "logp": behavior + torch.tensor([-0.5, 3.0], dtype=EXACT),
        "logp_ref": behavior + torch.tensor([-1.5, 1.0], dtype=EXACT),
    }
    whole = decided(Objective(config), batch, given).whole
    expected = [-0.1 * 1.0 * math.exp(-0.5), 1.0 - 0.1 * 2.0 * 2.0]
    torch.testing.assert_close(whole.token_rewards, torch.tensor(expected, dtype=EXACT))


def test_a_cap_without_weights_and_weights_of_given_responses_are_refused():
    with pytest.raises(ValidationError, match=r"cap: 3 bounds the weights of weight: truncated"):
        KlConfig(coef=0.1, cap=3.0)
    kl = {"coef": 0.1, "weight": "truncated"}
    with pytest.raises(ValidationError, match="which no policy sampled"):
        ObjectiveConfig(loss="sft", kl=kl, reference={})


# Rewards of tokens.


def spread(rewards, sequence, mask=None, steps=None):
    batch = tokens([0.0] * len(sequence), mask=mask, sequence=sequence, rewards=rewards)
    batch = batch.replace(step_rewards=None if steps is None else torch.tensor(steps, dtype=EXACT))
    return token_rewards(batch, torch.zeros(len(sequence), dtype=EXACT)).tolist()


def test_without_step_rewards_the_last_trained_token_has_it_all():
    assert spread([1.0, 2.0], [0, 0, 0, 1, 1], mask=[1, 1, 0, 1, 1]) == [0.0, 1.0, 0.0, 0.0, 2.0]


def test_step_rewards_stay_on_their_tokens_and_shaping_goes_to_the_last():
    assert spread([0.5, 2.0], [0, 0, 0, 1, 1], steps=[1.0, 0, 0, 0, 2.0]) == [
        1.0,
        0.0,
        -0.5,
        0.0,
        2.0,
    ]


def test_a_reward_on_an_environment_token_goes_to_the_trained_token_before_it():
    assert spread([3.0], [0] * 5, mask=[1, 0, 0, 1, 0], steps=[0, 0, 1.0, 0, 2.0]) == [
        1.0,
        0.0,
        0.0,
        2.0,
        0.0,
    ]


def test_a_reward_before_anything_was_sampled_goes_to_the_first_trained_token():
    assert spread([0.0, 1.0], [0, 1, 1, 1], mask=[1, 0, 1, 1], steps=[0.0, 1.0, 0, 0]) == [
        0.0,
        0.0,
        1.0,
        0.0,
    ]


def test_a_response_without_trained_tokens_has_no_token_rewards():
    assert spread([1.0, 5.0], [0, 1, 1], mask=[1, 0, 0], steps=[1.0, 2.0, 3.0]) == [1.0, 0.0, 0.0]


def test_step_rewards_of_samples_reach_the_whole_batch_beside_samples_without_any():
    batch = one_group(sample("a", 3, 3.0, steps=[1.0, 0.0, 2.0]), sample("b", 2, 1.0))
    whole = decided(Objective(ObjectiveConfig(advantage="none")), batch, {}).whole
    assert whole.token_rewards.tolist() == [1.0, 0.0, 2.0, 0.0, 1.0]
    assert whole.rewards.tolist() == [3.0, 1.0]


def test_step_rewards_that_do_not_fit_their_sample_are_refused():
    with pytest.raises(ValueError, match="step_rewards has 2 entries for 3 response tokens"):
        sample("a", 3, 1.0, steps=[1.0, 0.0])
    with pytest.raises(ValueError, match=r"step rewards sum to 2\.0, and its reward is 1\.0"):
        sample("a", 2, 1.0, steps=[1.0, 1.0])

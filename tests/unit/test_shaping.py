import dataclasses

import numpy as np
import pytest
import torch

from megatron_async_rl.config.objective import (
    KlConfig,
    ObjectiveConfig,
    OverlongConfig,
    ReferenceConfig,
)
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.objectives.terms import kl_estimate, token_rewards
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt
from tests.token_batches import tokens
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


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (10, 2.0), (12, 2.0)]
)
def test_a_response_is_punished_by_how_far_it_is_in_the_buffer(length, penalty):
    config = ObjectiveConfig(
        advantage="none", overlong=OverlongConfig(max_length=10, buffer=4, penalty=2.0)
    )
    whole = Objective(config).prepare(one_group(sample("a", length, 1.0)), {}).whole
    assert whole.rewards.tolist() == [1.0 - penalty]
    assert whole.token_rewards.sum() == 1.0 - penalty


def test_what_an_environment_wrote_does_not_make_a_response_overlong():
    config = ObjectiveConfig(
        advantage="none", overlong=OverlongConfig(max_length=10, buffer=4, penalty=2.0)
    )
    for sampled, penalty in ((6, 0.0), (8, 1.0)):
        mask = [1, 1, *[0] * 9, *[1] * (sampled - 2)]
        with_tool = sample("a", len(mask), 1.0, mask=mask)
        whole = Objective(config).prepare(one_group(with_tool), {}).whole
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
    whole = (
        Objective(config).prepare(one_group(sample("a", 3, 1.0, mask=[1, 0, 1])), surveyed).whole
    )
    torch.testing.assert_close(whole.token_rewards, torch.tensor([-0.1, 0.0, 0.95], dtype=EXACT))
    torch.testing.assert_close(whole.rewards, torch.tensor([0.85], dtype=EXACT))


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
    whole = Objective(ObjectiveConfig(advantage="none")).prepare(batch, {}).whole
    assert whole.token_rewards.tolist() == [1.0, 0.0, 2.0, 0.0, 1.0]
    assert whole.rewards.tolist() == [3.0, 1.0]


def test_step_rewards_that_do_not_fit_their_sample_are_refused():
    with pytest.raises(ValueError, match="step_rewards has 2 entries for 3 response tokens"):
        sample("a", 3, 1.0, steps=[1.0, 0.0])
    with pytest.raises(ValueError, match=r"step rewards sum to 2\.0, and its reward is 1\.0"):
        sample("a", 2, 1.0, steps=[1.0, 1.0])

import pytest
import torch

from megatron_async_rl.config.advantages import GaeAdvantage
from megatron_async_rl.objectives.advantages.discounted import gae
from tests.cases import looped
from tests.token_batches import random_tokens, tokens

EXACT = torch.float64


def rewarded_tokens(seed=0):
    batch = random_tokens(seed=seed, sequences=5, longest=9)
    generator = torch.Generator().manual_seed(seed + 1)
    rewards = torch.randn(len(batch.sequence), generator=generator, dtype=EXACT) * batch.mask
    return batch.replace(token_rewards=rewards)


@looped("seed", range(3))
@looped(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (0.7, 0.0)])
def test_the_advantage_is_the_explicit_sum_of_discounted_errors(seed, gamma, lam):
    batch = rewarded_tokens(seed)
    found = gae(batch, GaeAdvantage(gamma=gamma, lam=lam, whiten=False))
    for i in range(batch.sequences):
        own = torch.nonzero((batch.sequence == i) & (batch.mask > 0)).flatten()
        reward, value = (
            batch.token_rewards[own],
            torch.cat([batch.values[own], torch.zeros(1, dtype=EXACT)]),
        )
        errors = reward + gamma * value[1:] - value[:-1]
        for t in range(len(own)):
            expected = sum((gamma * lam) ** (j - t) * errors[j] for j in range(t, len(own)))
            torch.testing.assert_close(found.tokens[own[t]], expected)
            torch.testing.assert_close(found.returns[own[t]], expected + value[t])


def test_with_lambda_1_returns_are_the_discounted_rewards_whatever_the_values():
    batch = tokens(
        [0.0] * 3,
        token_rewards=torch.tensor([1.0, 0.0, 4.0], dtype=EXACT),
        values=torch.randn(3, dtype=EXACT),
    )
    returns = gae(batch, GaeAdvantage(gamma=0.5, lam=1.0)).returns
    torch.testing.assert_close(returns, torch.tensor([2.0, 2.0, 4.0], dtype=EXACT))


def test_what_an_environment_token_holds_is_without_effect():
    mask = torch.tensor([1.0, 0, 1, 0], dtype=EXACT)
    batch = tokens(
        [0.0] * 4,
        mask=mask,
        token_rewards=torch.tensor([0.0, 0, 1, 0], dtype=EXACT),
        values=torch.ones(4, dtype=EXACT),
    )
    other = batch.replace(values=torch.tensor([1.0, 99.0, 1.0, float("nan")], dtype=EXACT))
    found, changed = (
        gae(b, GaeAdvantage(gamma=0.9, lam=0.9, whiten=False)) for b in (batch, other)
    )
    torch.testing.assert_close(found.tokens, changed.tokens)
    assert found.tokens[[1, 3]].tolist() == [0.0, 0.0]
    assert found.returns[[1, 3]].tolist() == [0.0, 0.0]


def test_whitening_is_over_the_whole_batch_and_leaves_returns_alone():
    batch = rewarded_tokens()
    plain, white = (gae(batch, GaeAdvantage(whiten=w)) for w in (False, True))
    kept = white.tokens[batch.mask > 0]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(kept.var()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(white.returns, plain.returns)

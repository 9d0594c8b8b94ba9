import pytest
import torch

from megatron_async_rl.config.advantages import ReinforcePpAdvantage, ReinforcePpBaselineAdvantage
from megatron_async_rl.objectives.advantages.discounted import (
    reinforce_pp,
    reinforce_pp_baseline,
    whitened,
)
from megatron_async_rl.objectives.advantages.token_grid import discounted_sums, sums_to_end_of_run
from tests.cases import looped
from tests.token_batches import rewarded, tokens

EXACT = torch.float64


def test_whitened_trained_tokens_have_mean_0_and_variance_1():
    generator = torch.Generator().manual_seed(0)
    values, mask = (
        5 + 3 * torch.randn(50, generator=generator, dtype=EXACT),
        (torch.arange(50) % 3 > 0).double(),
    )
    white = whitened(torch.where(mask > 0, values, float("nan")), mask)
    assert float(white[mask > 0].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(white[mask > 0].var()) == pytest.approx(1.0, abs=1e-6)
    assert torch.all(white[mask == 0] == 0.0)


@pytest.mark.parametrize("values", [[0.1] * 7, [3.0], []])
def test_equal_values_are_whitened_to_exactly_zero(values):
    assert whitened(torch.tensor(values, dtype=EXACT), torch.ones(len(values))).tolist() == [
        0.0
    ] * len(values)


@looped("discount", [1.0, 0.9, 0.0])
@looped("length", [1, 2, 7, 8, 33])
def test_discounted_sums_are_the_backward_recursion(discount, length):
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=EXACT)
    expected, following = torch.zeros_like(values), torch.zeros(3, dtype=EXACT)
    for t in reversed(range(length)):
        expected[:, t] = following = values[:, t] + discount * following
    torch.testing.assert_close(discounted_sums(values, discount), expected)


def test_token_rewards_are_discounted_backwards_over_trained_tokens_only():
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 4.0], dtype=EXACT)
    batch = tokens(
        [0.0] * 6, mask=[1, 0, 1, 1, 0, 1], sequence=[0, 0, 0, 1, 1, 1], token_rewards=rewards
    )
    found = reinforce_pp(batch, ReinforcePpAdvantage(gamma=0.5)).tokens
    torch.testing.assert_close(
        found, whitened(torch.tensor([0.5, 0.0, 1.0, 2.0, 0.0, 4.0], dtype=EXACT), batch.mask)
    )


def test_with_a_baseline_rewards_are_centred_in_the_group_and_whitened_in_the_batch():
    batch = rewarded([1.0, 0.0, 10.0, 12.0], group=[0, 0, 1, 1], lengths=[1, 2, 1, 3])
    found = reinforce_pp_baseline(batch, ReinforcePpBaselineAdvantage()).tokens
    centred = torch.tensor([0.5, -0.5, -0.5, -1.0, 1.0, 1.0, 1.0], dtype=EXACT)
    torch.testing.assert_close(found, whitened(centred, torch.ones(7)))


def test_sums_go_to_the_end_of_each_run():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert sums_to_end_of_run(values, torch.tensor([3, 3, 5, 9, 9])).tolist() == [3, 2, 4, 24, 16]
    nothing = sums_to_end_of_run(values[:0], torch.tensor([], dtype=torch.int64))
    assert nothing.shape == (0,)

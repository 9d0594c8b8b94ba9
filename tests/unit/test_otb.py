import pytest
import torch

from megatron_async_rl.config.advantages import OtbAdvantage
from megatron_async_rl.objectives.advantages.least_variance import otb
from megatron_async_rl.objectives.terms import token_rewards
from tests.token_batches import tokens


def drawn(rewards, lengths, *, group=None, seed=0, vocabulary=5, mask=None, behavior=None):
    """Responses of a policy whose parameters are the logits of every position: -> (batch, [S] of
    score rows [L, L * V])."""
    generator = torch.Generator().manual_seed(seed)
    logp, squares, scores = [], [], []
    for length in lengths:
        logits = (
            2 * torch.randn(length, vocabulary, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        log_softmax = torch.log_softmax(logits, -1)
        chosen = log_softmax[
            torch.arange(length), torch.randint(vocabulary, (length,), generator=generator)
        ]
        scores.append(
            torch.stack(
                [
                    torch.autograd.grad(value, logits, retain_graph=True)[0].flatten()
                    for value in chosen
                ]
            )
        )
        logp.append(chosen.detach())
        squares.append(log_softmax.detach().exp().square().sum(-1))
    flat = torch.cat(logp)
    batch = tokens(
        flat,
        prox=flat,
        behavior=flat if behavior is None else behavior,
        mask=mask,
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        rewards=rewards,
        group=group if group is not None else [0] * len(rewards),
        sum_p_squared=torch.cat(squares),
    )
    return batch.replace(
        token_rewards=token_rewards(batch, torch.zeros(len(flat), dtype=torch.float64))
    ), scores


def rows(batch, values):
    return [values[batch.sequence == i] for i in range(batch.sequences)]


def test_at_each_token_no_other_baseline_has_less_variance():
    rewards, lengths = [1.0, 0.0, -0.5, 2.0], [4, 2, 3, 4]
    batch, scores = drawn(rewards, lengths)
    found = rows(batch, otb(batch, OtbAdvantage()).tokens)
    for t in range(3):
        paths = [(rewards[i], scores[i][: t + 1].sum(0)) for i in range(4) if lengths[i] > t]

        def second_moment(baseline, paths=paths):
            return sum(float(((reward - baseline) * path).square().sum()) for reward, path in paths)

        grid = torch.linspace(-1.0, 2.5, 35001)
        best = float(
            grid[int(torch.tensor([second_moment(float(b)) for b in grid[::50]]).argmin()) * 50]
        )
        assert rewards[0] - float(found[0][t]) == pytest.approx(best, abs=3e-3)
        assert second_moment(rewards[0] - float(found[0][t])) <= second_moment(best) + 1e-12


def test_the_energy_of_a_token_is_its_squared_score_norm():
    batch, scores = drawn([1.0, 0.0], [1, 1])
    energy = [float(score.square().sum()) for score in scores]
    expected = energy[0] / sum(energy)
    assert 1.0 - float(otb(batch, OtbAdvantage()).tokens[0]) == pytest.approx(expected, abs=1e-12)


def test_only_responses_that_reach_a_token_shape_its_baseline():
    batch, _ = drawn([1.0, 0.0, 0.5], [3, 1, 3])
    other, _ = drawn([1.0, -9.0, 0.5], [3, 1, 3])
    found, changed = (rows(b, otb(b, OtbAdvantage()).tokens)[0] for b in (batch, other))
    assert found[0] != changed[0]
    torch.testing.assert_close(found[1:], changed[1:])


@pytest.mark.parametrize("reward", [0.1, -7.7e5])
def test_equal_rewards_give_exactly_zero(reward):
    batch, _ = drawn([reward] * 3, [3, 1, 5])
    assert torch.all(otb(batch, OtbAdvantage()).tokens == 0.0)


def test_alone_in_the_tail_a_response_keeps_its_reward_if_the_tail_has_no_baseline():
    batch, _ = drawn([1.0, 0.25, 0.5], [2, 5, 3])
    for zero_tail, tail in ((False, [0.0, 0.0]), (True, [0.25, 0.25])):
        assert (
            rows(batch, otb(batch, OtbAdvantage(zero_tail=zero_tail)).tokens)[1][3:].tolist()
            == tail
        )
    head = [rows(batch, otb(batch, OtbAdvantage(zero_tail=z)).tokens)[1][:3] for z in (False, True)]
    torch.testing.assert_close(*head)


@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_group_of_one_has_nothing_to_compare_with(zero_tail):
    batch, _ = drawn([3.0, 1.0, 0.0], [3, 2, 2], group=[0, 1, 1])
    assert rows(batch, otb(batch, OtbAdvantage(zero_tail=zero_tail)).tokens)[0].tolist() == [
        0.0,
        0.0,
        0.0,
    ]


def test_environment_tokens_take_no_time_and_have_no_energy():
    batch, _ = drawn([1.0, 0.0], [4, 3], mask=[1, 0, 0, 1, 1, 1, 0])
    kept = torch.tensor([0, 3, 4, 5])
    short, _ = drawn([1.0, 0.0], [2, 2])
    short = short.replace(
        logp_prox=batch.logp_prox[kept],
        sum_p_squared=batch.sum_p_squared[kept],
        token_rewards=batch.token_rewards[kept],
    )
    found = otb(batch, OtbAdvantage()).tokens
    assert found[[1, 2, 6]].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(found[kept], otb(short, OtbAdvantage()).tokens)


def test_importance_weights_count_squared_and_cut():
    batch, scores = drawn([1.0, 0.0], [1, 1])
    ratios = torch.tensor([1.5, 700.0], dtype=torch.float64)
    batch = batch.replace(logp_behavior=batch.logp_prox - ratios.log())
    energy = [float(score.square().sum()) for score in scores]
    weights = [energy[0] * 1.5**2, energy[1] * 2.0**2]
    found = otb(batch, OtbAdvantage(importance="token", cap=2.0)).tokens
    assert 1.0 - float(found[0]) == pytest.approx(weights[0] / sum(weights), rel=1e-9)


def test_energies_below_zero_by_rounding_cannot_cancel_those_of_the_group():
    batch, _ = drawn([1.0, 0.0], [1, 1])
    batch = batch.replace(logp_prox=torch.zeros(2, dtype=torch.float64))
    noise = torch.tensor([1.1e-7, -1e-7], dtype=torch.float64)
    found = otb(batch.replace(sum_p_squared=1.0 + noise), OtbAdvantage()).tokens
    assert found.abs().max() <= 1.0


def test_tokens_that_are_certain_everywhere_get_the_plain_mean():
    batch, _ = drawn([1.0, 0.0], [1, 1])
    certain = batch.replace(
        logp_prox=torch.zeros(2, dtype=torch.float64),
        sum_p_squared=torch.ones(2, dtype=torch.float64),
    )
    assert otb(certain, OtbAdvantage()).tokens.tolist() == [0.5, -0.5]

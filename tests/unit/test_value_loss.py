import pytest
import torch

from megatron_async_rl.config.objective import ValueConfig
from megatron_async_rl.objectives.terms import value_loss, value_metrics
from tests.token_batches import detached, random_tokens, tokens


def estimated(values, returns, old=None, **more):
    batch = tokens(torch.zeros(len(values)), **more)
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old = None if old is None else torch.tensor(old, dtype=torch.float64)
    return batch.replace(
        values=values, returns=torch.tensor(returns, dtype=torch.float64), values_old=old
    )


def test_the_loss_is_half_the_squared_error_and_its_gradient_the_error():
    batch = estimated([0.5, -1.0, 2.0], [1.0, -1.0, 0.0])
    loss = value_loss(batch, ValueConfig())
    assert loss.tolist() == [0.125, 0.0, 2.0]
    loss.sum().backward()
    assert batch.values.grad.tolist() == [-0.5, 0.0, 2.0]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the clip: as without
        (
            0.5,
            0.0,
            1.0,
            0.32,
            0.0,
        ),  # moved too far towards the target: the error of the clipped value, no pull
        (
            0.5,
            0.0,
            -1.0,
            1.125,
            1.5,
        ),  # moved too far away from it: the larger, true error, pulled back
        (-0.5, 0.0, -1.0, 0.32, 0.0),
    ],
)
def test_a_clipped_value_is_not_pulled_further_than_the_clip(value, old, target, loss, gradient):
    batch = estimated([value], [target], [old])
    found = value_loss(batch, ValueConfig(clip=0.2))
    assert float(found.detach()) == pytest.approx(loss)
    found.sum().backward()
    assert float(batch.values.grad) == pytest.approx(gradient)


def test_clipping_does_nothing_in_the_step_that_made_the_old_values():
    batch = estimated([0.5, -1.0, 2.0], [1.0, -1.0, 0.0], [0.5, -1.0, 2.0])
    clipped, plain = (value_loss(batch, ValueConfig(clip=clip)) for clip in (0.01, None))
    assert torch.equal(clipped, plain)
    assert torch.equal(
        *(torch.autograd.grad(loss.sum(), batch.values)[0] for loss in (clipped, plain))
    )


def test_what_was_not_surveyed_is_named():
    with pytest.raises(ValueError, match="returns"):
        value_loss(random_tokens(), ValueConfig())


def test_explained_variance_is_one_for_perfect_estimates_and_zero_for_constant_ones():
    whole = detached(random_tokens())
    returns = torch.randn(len(whole.logp), dtype=torch.float64)

    def explained(values):
        return value_metrics(whole.replace(values=values, returns=returns))[
            "value/explained_variance"
        ]

    assert explained(returns + 3.0) == pytest.approx(1.0)
    assert explained(torch.full_like(returns, 0.7)) == pytest.approx(0.0)
    outside = torch.where(whole.mask > 0, returns, 1e9)
    assert explained(outside) == pytest.approx(1.0)
    assert value_metrics(whole.replace(returns=torch.ones_like(returns))) == {}
    assert value_metrics(detached(random_tokens())) == {}

import pytest

from megatron_async_rl.config.policy import OptimizerConfig
from megatron_async_rl.policy.optimizer import learning_rate


def rates(total, **settings):
    config = OptimizerConfig(lr=1.0, **settings)
    return [learning_rate(config, step, total) for step in range(total)]


def test_a_constant_rate_warms_up_then_stays():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_rate_falls_in_equal_steps_and_never_wastes_the_last_step_on_zero():
    assert rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(6, schedule="linear", warmup_steps=2, min_lr=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    )


def test_a_cosine_rate_is_half_way_in_the_middle():
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


def test_past_the_planned_end_the_rate_stays_at_its_minimum():
    assert learning_rate(
        OptimizerConfig(lr=1.0, schedule="cosine", min_lr=0.1), 99, 10
    ) == pytest.approx(0.1)

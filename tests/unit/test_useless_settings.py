"""Settings that would have no effect, or fail every start, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from tests.written_run import write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.overlong={max_length: 6, buffer: 7}"], "begin at a negative length"),
        (["objective.overlong={max_length: 16, buffer: 8}"], "max_length - buffer = 8 tokens"),
        (["run.seed=4294967296"], "run.seed"),
        (["policy.optimizer.betas=[1.0, 0.95]"], "policy.optimizer.betas"),
        (["policy.optimizer.betas=[0.9, 1.0]"], "policy.optimizer.betas"),
        (["policy.optimizer.min_lr=1.0e-7"], "schedule is constant"),
        (["objective.ewma_decay=0.8"], "proximal is behavior"),
    ],
)
def test_a_setting_without_effect_is_refused(file, overrides, words):
    with pytest.raises(ConfigError) as refused:
        load(file, overrides)
    text = " ".join(f"{one.key}: {one.what} {one.fix}" for one in refused.value.problems)
    assert words in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.overlong={max_length: 8, buffer: 8}"],
        ["objective.overlong={max_length: 16, buffer: 9}"],
        ["run.seed=4294967295"],
        ["policy.optimizer.betas=[0.0, 0.999]"],
        ["policy.optimizer={min_lr: 1.0e-7, schedule: cosine}"],
        ["policy.optimizer.min_lr=0.0"],
        ["objective.ewma_decay=0.9"],
        ["objective={ewma_decay: 0.8, proximal: ewma, loss: decoupled_ppo}"],
    ],
)
def test_a_setting_with_an_effect_or_its_default_is_accepted(file, overrides):
    load(file, overrides)


def test_a_length_penalty_may_begin_in_a_later_segment(file):
    agent = "rollout.environment={name: agent, settings: {function: 'a:b'}, max_segments: 3}"
    load(file, [agent, "objective.overlong={max_length: 24, buffer: 1}"])
    with pytest.raises(ConfigError, match="would have"):
        load(file, [agent, "objective.overlong={max_length: 25, buffer: 1}"])

"""What `mar simulate` predicts follows from the rates it is given, and the real runs that it was
tried on come out as they were."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import FlowConfig, RewardConfig, RolloutConfig, SamplingConfig
from megatron_async_rl.metrics.timeline import FOLDER as TIMELINE
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.samples import segments
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.simulate.calibrate import Calibration, calibrate
from megatron_async_rl.simulate.choose import part_of
from megatron_async_rl.simulate.hardware import Hardware, best_bucket, lengths_of, rates_of
from megatron_async_rl.simulate.model import Lengths, Outcome, Rates, simulate
from tests.published_models import write_config
from tests.train_batches import make_sample
from tests.written_run import write_run

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "simulate"

PROMPTS, SIZE, LENGTH = 4, 2, 10
LENGTHS = Lengths(groups=((LENGTH,) * SIZE,), prompts=(5,))
RATES = Rates(decode=((0.1, 0.0),), places=8, train_token_s=0.01, publish_s=0.2, load_s=0.3)
TRAINS = 0.01 * PROMPTS * SIZE * (LENGTH + 5)


def run(rates: Rates = RATES, lengths: Lengths = LENGTHS, engines: int = 1, **flow: Any) -> Outcome:
    settings = {"prompts_per_step": PROMPTS, "group_size": SIZE, **flow}
    rollout = RolloutConfig(
        engines=engines, sampling=SamplingConfig(max_tokens=64), reward=RewardConfig(name="math")
    )
    return simulate(FlowConfig(**settings), rollout, rates, lengths, steps=10)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    found = run(async_ratio=0.0)
    assert found.step_s == pytest.approx(LENGTH * 0.1 + TRAINS + 0.2 + 0.3)
    assert found.trainer_busy == pytest.approx((TRAINS + 0.2) / found.step_s)
    assert found.engine_busy == pytest.approx(1.0 / found.step_s)
    assert found.lags == (1.0,)
    assert found.tokens_per_s == pytest.approx(PROMPTS * SIZE * LENGTH / found.step_s)


def test_far_enough_ahead_a_step_takes_what_the_slower_side_does() -> None:
    trainer = run(async_ratio=2.0)
    assert trainer.step_s == pytest.approx(TRAINS + 0.2)
    slow = replace(RATES, decode=((0.4, 0.0),))
    engines = run(slow, async_ratio=2.0)
    assert engines.step_s == pytest.approx(LENGTH * 0.4 + 0.3, rel=0.02)
    assert engines.lag_mean < trainer.lag_mean == 2.0


def test_engines_and_trainer_slow_each_other_where_they_share_cores() -> None:
    shared = replace(RATES, trainer_beside=0.5, engine_beside=0.5)
    assert run(shared, async_ratio=0.0).step_s == pytest.approx(run(async_ratio=0.0).step_s)
    # What is done beside the other takes twice as long.
    assert 1.2 < run(shared, async_ratio=2.0).step_s / run(async_ratio=2.0).step_s < 2.0


def test_a_slow_carrier_ages_samples_and_holds_up_no_trainer_that_is_far_enough_ahead() -> None:
    slow = replace(RATES, send_s=2.5)
    assert run(slow, async_ratio=0.0).step_s == pytest.approx(run(async_ratio=0.0).step_s + 2.5)
    assert run(slow, async_ratio=4.0).step_s == pytest.approx(TRAINS + 0.2, rel=0.9)
    assert run(slow, async_ratio=4.0).step_s < run(slow, async_ratio=1.0).step_s


@pytest.mark.parametrize(
    ("flow", "bound"),
    [
        ({"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5}, 1),
        ({"async_ratio": 2.0, "selection": "windowed", "late": "drop"}, 2),
        ({"async_ratio": 2.0, "selection": {"name": "exact_lag", "lag": 2}}, 2),
        ({"async_ratio": 1.0, "dynamic_sampling": True}, 1),
        ({"async_ratio": 1.0, "selection": "replay"}, 1),
    ],
)
def test_the_law_that_decides_is_the_runs_own(flow: dict[str, Any], bound: int) -> None:
    lengths = Lengths(groups=((1, 9), (30, 2), (4, 4)), prompts=(3, 3, 3), equal=0.25)
    found = run(lengths=lengths, engines=2, **flow)
    assert len(found.lags) <= bound + 1
    if "exact_lag" in str(flow):
        assert found.lags == (0.0, 0.0, 1.0)
    assert (found.counts["dropped_equal"] > 0) == flow.get("dynamic_sampling", False)

"""Engines are fuller with long-tailed lengths the less they wait: for a batch, for the oldest
group, for the last response."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.long_tail import simulated
from megatron_async_rl.simulate.simulation import SimulationResult


@cache
def outcomes(barrier: bool = False, **settings: Any) -> list[SimulationResult]:
    return [
        simulated(settings, train_time=200.0, steps=20, seed=seed, barrier=barrier)
        for seed in range(3)
    ]


def occupied(**settings: Any) -> float:
    return sum(outcome.places_taken for outcome in outcomes(**settings)) / 3


def rate(**settings: Any) -> float:
    return sum(outcome.tokens_per_s for outcome in outcomes(**settings)) / 3


def test_responses_that_are_scheduled_one_by_one_fill_the_engines_better_than_a_batch_barrier() -> (
    None
):
    assert occupied(async_ratio=1.0) > 1.3 * occupied(barrier=True, async_ratio=1.0)
    assert rate(async_ratio=1.0) > 1.3 * rate(barrier=True, async_ratio=1.0)
    assert occupied(barrier=True, async_ratio=1.0) > occupied(async_ratio=0.0), (
        "which at least overlaps with training"
    )


def test_further_ahead_engines_are_fuller() -> None:
    assert (
        occupied(async_ratio=0.0)
        < occupied(async_ratio=0.5)
        < occupied(async_ratio=1.0)
        < occupied(async_ratio=2.0)
    )


def test_taking_what_finished_first_leaves_no_engine_emptier() -> None:
    assert occupied(async_ratio=1.0, selection="windowed") >= 0.99 * occupied(async_ratio=1.0)


def test_oversampling_fills_the_engines_as_far_as_the_bound_permits() -> None:
    more = {"selection": "windowed", "oversample": 0.5}
    assert occupied(async_ratio=0.5, **more) > 1.02 * occupied(async_ratio=0.5)
    assert rate(async_ratio=0.5, **more) >= rate(async_ratio=0.5)


def test_the_law_holds_in_all_of_them() -> None:
    for settings, bound in (
        ({"async_ratio": 1.0}, 1),
        ({"async_ratio": 2.0, "selection": "windowed", "late": "drop"}, 2),
        ({"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5}, 1),
    ):
        assert all(outcome.lag_mean <= bound for outcome in outcomes(**settings))

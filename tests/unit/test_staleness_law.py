"""The staleness law: how much may be admitted, and that no sample is ever older than it permits."""

import heapq
import itertools
import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.staleness import admitted_limit, is_feasible, max_lag
from tests.cases import looped

RATIOS = st.one_of(
    st.just(0.0), st.integers(1, 4).map(float), st.floats(0.01, 4.0).map(lambda x: round(x, 2))
)


def limit_of(version: int, prompts: int, ratio: float, fresh: int = 0) -> int:
    return admitted_limit(version, prompts, ratio, fresh, oversample=0.0)


@looped(
    ("version", "prompts", "ratio", "limit"),
    [
        (0, 8, 0, 8),
        (3, 8, 0, 32),
        (0, 8, 1, 16),
        (0, 8, 2, 24),
        (0, 8, 0.5, 12),
        (2, 8, 0.3, 27),
        (0, 10, 1.1, 21),
        (0, 3, 0.1, 4),
    ],
)
def test_the_limit_is_a_step_ahead_plus_alpha_steps_rounded_up(
    version: int, prompts: int, ratio: float, limit: int
) -> None:
    assert limit_of(version, prompts, ratio) == limit


@looped(("ratio", "lag"), [(0, 0), (0.1, 1), (1, 1), (1.5, 2), (2, 2), (256, 256)])
def test_the_largest_lag_is_alpha_rounded_up(ratio: float, lag: int) -> None:
    assert max_lag(ratio) == lag


@settings(deadline=None)
@given(prompts=st.integers(1, 64), ratio=RATIOS, version=st.integers(0, 1000))
def test_each_version_admits_exactly_one_more_batch(
    prompts: int, ratio: float, version: int
) -> None:
    assert limit_of(version + 1, prompts, ratio) - limit_of(version, prompts, ratio) == prompts


@settings(deadline=None)
@given(
    prompts=st.integers(1, 64), ratio=RATIOS, version=st.integers(0, 100), fresh=st.integers(0, 50)
)
def test_fresh_steps_admit_as_if_synchronous_and_nothing_later_is_admitted_less(
    prompts: int, ratio: float, version: int, fresh: int
) -> None:
    expected = limit_of(version, prompts, 0.0 if version < fresh else ratio)
    assert limit_of(version, prompts, ratio, fresh) == expected
    assert limit_of(version + 1, prompts, ratio, fresh) >= expected + prompts


def lags_of_a_run(
    prompts: int, ratio: float, steps: int, chance: random.Random, fresh: int = 0
) -> list[int]:
    """Start lags of every consumed group when groups take random times and wait random times for
    their first token."""
    now, version, admitted, consumed = 0.0, 0, 0, 0
    started: dict[int, int] = {}
    waiting: list[tuple[float, int]] = []
    running: list[tuple[float, int]] = []
    finished: set[int] = set()
    lags: list[int] = []
    for _ in itertools.count():
        while admitted < limit_of(version, prompts, ratio, fresh):
            heapq.heappush(
                waiting, (now + chance.expovariate(2.0) * chance.choice([0, 1, 10]), admitted)
            )
            admitted += 1
        while finished.issuperset(range(consumed, consumed + prompts)):
            lags += [version - started[index] for index in range(consumed, consumed + prompts)]
            consumed += prompts
            version += 1
            if version == steps:
                return lags
            break
        else:
            if waiting and (not running or waiting[0][0] <= running[0][0]):
                now, index = heapq.heappop(waiting)
                started[index] = version
                heapq.heappush(
                    running, (now + chance.expovariate(1.0) * chance.choice([1, 1, 50]), index)
                )
            else:
                now, index = heapq.heappop(running)
                finished.add(index)
    raise AssertionError


@settings(deadline=None)
@given(prompts=st.integers(1, 6), ratio=RATIOS, seed=st.integers(0, 2**32))
def test_no_consumed_sample_starts_more_than_alpha_rounded_up_versions_back(
    prompts: int, ratio: float, seed: int
) -> None:
    lags = lags_of_a_run(prompts, ratio, steps=12, chance=random.Random(seed))
    assert min(lags) >= 0
    assert max(lags) <= math.ceil(ratio)


def test_the_bound_is_reached_so_a_looser_law_would_break_it() -> None:
    seen = {max(lags_of_a_run(4, 2.0, 20, random.Random(seed))) for seed in range(20)}
    assert max(seen) == 2


@settings(deadline=None)
@given(
    prompts=st.integers(1, 6), ratio=RATIOS, fresh=st.integers(0, 12), seed=st.integers(0, 2**32)
)
def test_the_first_fresh_steps_train_on_lag_0_and_the_bound_holds_after_them(
    prompts: int, ratio: float, fresh: int, seed: int
) -> None:
    lags = lags_of_a_run(prompts, ratio, steps=12, chance=random.Random(seed), fresh=fresh)
    assert set(lags[: fresh * prompts]) <= {0}
    assert max(lags) <= math.ceil(ratio)


def test_after_the_fresh_steps_a_run_is_as_asynchronous_as_any() -> None:
    seen = {max(lags_of_a_run(4, 2.0, 20, random.Random(seed), fresh=5)) for seed in range(20)}
    assert max(seen) == 2


def test_a_plan_is_feasible_if_the_most_urgent_groups_first_are_all_in_time() -> None:
    for step, per_step, size in itertools.product((0, 3), (1, 2, 3), range(6)):
        for due in itertools.combinations_with_replacement(range(step - 1, step + 4), size):
            in_time = all(step + at // per_step <= last for at, last in enumerate(due))
            assert is_feasible(Counter(due), step, per_step) == in_time, (due, step, per_step)
    assert is_feasible({2: 0, 9: 1}, 3, 1), "no group is due at 2"

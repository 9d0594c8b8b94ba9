"""Choice of the waiting groups that train: never a choice that makes another late, always one where
one exists, and the earliest finished."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from megatron_async_rl.flow.scheduler import oldest_first, windowed
from megatron_async_rl.flow.staleness import is_feasible


@dataclass(frozen=True)
class Waiting:
    index: int
    deadline: int
    finished: int | None


@st.composite
def plans(draw: st.DrawFn, step: int = 5) -> tuple[list[Waiting], int]:
    """Groups that can all train in time, B per step, most urgent first; and B."""
    count = draw(st.integers(1, 3))
    due: list[int] = []
    for late in sorted(draw(st.lists(st.integers(0, 3), max_size=8))):
        if is_feasible(Counter([*due, step + late]), step, count):
            due.append(step + late)
    order = draw(st.permutations(range(len(due))))
    running = draw(st.sets(st.integers(0, 7)))
    return [Waiting(i, d, None if i in running else order[i]) for i, d in enumerate(due)], count


def choices(groups: list[Waiting], count: int, step: int) -> list[tuple[Waiting, ...]]:
    """Every batch of finished groups after which the others can still train in time."""
    finished = [group for group in groups if group.finished is not None]
    return [
        batch
        for batch in combinations(finished, count)
        if is_feasible(
            Counter(group.deadline for group in groups if group not in batch), step + 1, count
        )
    ]


@given(plan=plans(), window=st.sampled_from([0.0, 0.5, 1.0, 5.0]))
def test_windowed_takes_a_batch_that_makes_no_group_late_exactly_when_there_is_one(
    plan: tuple[list[Waiting], int], window: float
) -> None:
    groups, count = plan
    batch = windowed(groups, count, 5, window)
    seen = groups[: math.ceil((1 + window) * count)]
    possible = [choice for choice in choices(groups, count, 5) if set(choice) <= set(seen)]
    assert (len(batch) == count) == bool(possible)
    if len(batch) == count:
        assert set(batch) in [set(choice) for choice in possible]


@given(plan=plans(), window=st.sampled_from([0.0, 0.5, 1.0, 5.0]))
def test_windowed_takes_those_that_finished_first(
    plan: tuple[list[Waiting], int], window: float
) -> None:
    """No permitted batch has an earlier finisher in any place of the order."""
    groups, count = plan
    batch = windowed(groups, count, 5, window)
    if len(batch) < count:
        return
    seen = groups[: math.ceil((1 + window) * count)]
    times = sorted(group.finished or 0 for group in batch)
    for choice in choices(groups, count, 5):
        if set(choice) <= set(seen):
            others = sorted(group.finished or 0 for group in choice)
            assert all(mine <= other for mine, other in zip(times, others, strict=True))


@given(plan=plans())
def test_a_plan_that_holds_needs_only_its_most_urgent_groups_to_finish(
    plan: tuple[list[Waiting], int],
) -> None:
    groups, count = plan
    done = [
        Waiting(g.index, g.deadline, g.index if i < count else None) for i, g in enumerate(groups)
    ]
    for batch in (oldest_first(done, count), windowed(done, count, 5, 2.0)):
        assert batch == done[:count]


def test_oldest_first_waits_for_the_oldest() -> None:
    groups = [Waiting(0, 1, 1), Waiting(1, 1, None), Waiting(2, 1, 0)]
    assert len(oldest_first(groups, 2)) < 2
    assert oldest_first([groups[0], groups[2]], 2) == [groups[0], groups[2]]


def test_no_group_from_outside_the_window_overtakes() -> None:
    groups = [Waiting(i, 9, None if i == 0 else 10 - i) for i in range(6)]
    assert windowed(groups, 2, 5, 0.5) == [groups[2], groups[1]]
    assert windowed(groups, 2, 5, 1.0) == [groups[3], groups[2]]


def test_a_window_counts_groups_in_decimals_as_it_was_written() -> None:
    """1.1 x 50 are 55 places; in binary it is more than 55, and would be 56."""
    groups = [Waiting(i, 99, 100 - i) for i in range(60)]
    taken = windowed(groups, 50, 5, 0.1)
    assert max(group.index for group in taken) == 54


@given(plan=plans(), window=st.sampled_from([0.0, 0.5, 1.0, 5.0]), data=st.data())
def test_who_is_k_too_few_stays_so_until_k_more_have_finished_or_been_dropped(
    plan: tuple[list[Waiting], int], window: float, data: st.DataObject
) -> None:
    groups, count = plan
    for select in (oldest_first, lambda some, count: windowed(some, count, 5, window)):
        missing = count - len(select(groups, count))
        changed = list(groups)
        for _ in range(missing - 1):
            if changed:
                at = data.draw(st.integers(0, len(changed) - 1))
                if data.draw(st.booleans()):
                    del changed[at]
                elif changed[at].finished is None:
                    changed[at] = replace(changed[at], finished=100 + len(changed))
        assert missing <= 0 or len(select(changed, count)) < count

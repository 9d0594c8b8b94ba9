"""The scheduler, rule by rule: what the random worlds of test_scheduler_properties.py cannot say in words."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async_rl.samples.requests import Cut
from tests.unit.coroutine_engine import prefix
from tests.unit.scheduler_desk import Desk, indices


def test_the_first_responses_make_the_group_and_the_others_are_not_wanted() -> None:
    desk = Desk(1, 0.0, extra_responses=2)
    assert [request.id for request in desk.admit()] == ["0-0", "0-1", "0-2", "0-3"]
    assert desk.answer("0-3") == []
    assert desk.answer("0-1") == ["0-0", "0-2"]
    assert desk.answer("0-0") == [], "it was quicker than the cut"
    batch = desk.scheduler.take(0)
    assert batch is not None
    assert [sample.id for sample in batch.samples()] == ["0-1", "0-3"]
    assert desk.scheduler.counts() | {"surplus": 1, "open": 1} == desk.scheduler.counts()


def test_a_response_that_comes_twice_or_unasked_is_an_error() -> None:
    desk = Desk()
    desk.admit()
    desk.answer("0-0")
    with pytest.raises(RuntimeError, match="response 0-0 of group 0 came twice"):
        desk.answer("0-0")
    with pytest.raises(RuntimeError, match="9-9"):
        desk.scheduler.was_cut(Cut(id="9-9", prefix=None), 9)


def test_oldest_first_waits_and_windowed_overtakes_as_far_as_the_law_permits() -> None:
    for selection, expected in (("oldest_first", None), ("windowed", [1, 2])):
        desk = Desk(2, 1.0, selection=selection)
        desk.admit()
        desk.finish(2, 1)
        assert desk.take(0) == expected
    desk.scheduler.advance(1)
    desk.admit()
    desk.finish(4, 5, version=1)
    assert desk.take(1) is None, "0 and 3 are due now"
    desk.finish(3, 0)
    assert desk.take(1) == [0, 3]


def test_what_is_late_is_dropped_only_by_config_and_only_when_enough_others_are_there() -> None:
    for late in ("wait", "drop"):
        desk = Desk(2, 1.0, late=late, selection="windowed")
        desk.admit()
        desk.finish(2, 3)
        assert desk.take(0) == [2, 3]
        desk.answer("0-0")
        desk.scheduler.advance(1)
        desk.admit()
        desk.finish(4, version=1)
        assert desk.take(1) is None
        desk.finish(1)
        assert desk.take(1) == (None if late == "wait" else [1, 4])
    assert [sample.id for sample in desk.scheduler.drain_dropped()] == ["0-0"], "what had come of it is told"
    desk.answer("0-1")
    assert [sample.id for sample in desk.scheduler.drain_dropped()] == ["0-1"], "and so is what comes later"
    assert [request.group for request in desk.admit()] == [6, 6], "one more is asked in its place"
    assert desk.scheduler.counts()["dropped_late"] == 1


def test_exact_lag_waits_for_the_version_and_for_everything_it_makes() -> None:
    desk = Desk(1, 2.0, selection={"name": "exact_lag", "lag": 2})
    desk.admit()
    desk.finish(0, 1)
    assert desk.take(0) is None, "group 2 is running"
    desk.finish(2)
    taken = [desk.take(0)]
    for version in (1, 2, 3, 4):
        assert desk.take(version) is None, "the engines have not loaded it"
        desk.scheduler.advance(version)
        assert desk.take(version) is None, "nothing is made under it yet"
        desk.admit()
        desk.finish(version + 2, version=version)
        taken.append(desk.take(version))
    assert taken == [[0], [1], [2], [3], [4]], "3 was made by version 1 and 4 by version 2"


def continuing(**more: Any) -> Desk:
    """Group 0 is whole, and its third response was cut after three tokens of versions 0, 0 and 1."""
    desk = Desk(2, 1.5, extra_responses=1, requeue_cut=True, **more)
    desk.admit()
    desk.finish(0, 1)
    desk.scheduler.was_cut(Cut(id="0-2", prefix=prefix(0, 0, 1)), 0)
    desk.scheduler.was_cut(Cut(id="1-2", prefix=None), 1)
    assert desk.take(0) == [0, 1]
    desk.scheduler.advance(1)
    return desk


def test_cut_responses_go_on_in_one_more_group_of_their_prompt_under_their_own_deadline() -> None:
    desk = continuing()
    made = desk.admit()
    assert [(request.id, request.prompt.id, request.prefix is not None) for request in made[:3]] == [
        ("5-0", "p0", True),
        ("5-1", "p0", False),
        ("5-2", "p0", False),
    ]
    desk.answer("5-0", "5-1", versions=(1,))
    desk.finish(2)
    assert desk.take(1) is None, "3 is older"
    desk.finish(3)
    assert desk.take(1) == [2, 3]
    desk.finish(4)
    desk.scheduler.advance(2)
    batch = desk.scheduler.take(2)
    assert batch is not None
    assert indices(batch) == [4, 5], "before 6, which may train later"
    assert batch.groups[1].samples[0].versions.tolist() == [0, 0, 1, 1]


def test_cut_responses_that_the_law_has_no_place_for_are_given_up() -> None:
    desk = Desk(2, 1.0, extra_responses=1, requeue_cut=True)
    desk.admit()
    desk.finish(0, 1)
    desk.scheduler.was_cut(Cut(id="0-2", prefix=prefix(0)), 0)
    assert desk.take(0) == [0, 1]
    desk.scheduler.advance(1)
    assert all(request.prefix is None for request in desk.admit()), "2 and 3 are due at 1, and fill it"
    assert desk.scheduler.counts()["given_up"] == 1


def test_a_resume_asks_for_prompts_again_but_not_for_what_continued_them() -> None:
    desk = continuing()
    desk.admit()
    assert [index for index, _ in desk.scheduler.pending()] == [2, 3, 4, 6]
    assert desk.scheduler.next_index == 7


def test_patience_with_equal_rewards_is_for_each_batch_that_is_kept_however_far_ahead() -> None:
    """At lag 4 five batches are made before the first is taken: each may cost ten batches' worth."""
    desk = Desk(1, 4.0, filter_equal_groups=True)
    for group in range(40):
        desk.admit()
        dull = group % 8 != 7
        desk.answer(f"{group}-0", f"{group}-1", reward=0.0 if dull else None)
    counts = desk.scheduler.counts()
    assert (counts["dropped_equal"], counts["ready"]) == (35, 5)
    assert desk.take(0) == [7]


@pytest.mark.parametrize("selection", ["oldest_first", "windowed"])
def test_while_one_group_is_late_the_others_that_finish_look_for_no_batch(selection: str) -> None:
    desk = Desk(20, 1.0, selection=selection)
    desk.admit()
    desk.finish(*range(20))
    assert desk.take(0) == list(range(20))
    desk.scheduler.advance(1)
    desk.admit()
    attempts = 0
    for group in (*range(21, 40), *range(40, 60)):
        desk.finish(group, version=1)
        if desk.scheduler.may_take(1):
            assert desk.take(1) is None, "20 is due now, and running"
            attempts += 1
    assert attempts == 1, "before that nobody knew that it is 20 that is missing"
    desk.finish(20)
    assert desk.scheduler.may_take(1)
    assert desk.take(1) == list(range(20, 40))


def test_the_deadlines_of_groups_that_are_gone_are_kept_no_account_of() -> None:
    desk = Desk(1, 1.5, extra_responses=1, requeue_cut=True)
    for version in range(20):
        desk.scheduler.advance(version)
        for request in desk.admit():
            if request.id in desk.asked and request.k < 2:
                desk.answer(request.id, versions=(version,))
        assert desk.scheduler.take(version) is not None
    assert len(desk.scheduler._ledger.due) <= 3


def test_a_late_group_that_finishes_after_all_trains_whoever_else_is_missing() -> None:
    desk = Desk(2, 1.0, late="drop")
    desk.admit()
    desk.finish(0, 1)
    assert desk.take(0) == [0, 1]
    desk.scheduler.advance(1)
    desk.admit()
    desk.finish(3)
    desk.finish(5, version=1)
    assert desk.take(1) is None, "without 2, which is late, it would be 3 and 4, and 4 is running"
    desk.finish(2)
    assert desk.take(1) == [2, 3]


def test_a_continued_group_that_comes_first_trains_whoever_was_missing_before() -> None:
    desk = Desk(2, 1.5, extra_responses=1, requeue_cut=True)
    desk.admit()
    desk.finish(0, 1)
    assert desk.take(0) == [0, 1]
    desk.finish(2, 3)
    assert desk.take(1) == [2, 3]
    desk.scheduler.advance(1)
    desk.admit()
    desk.finish(4, 6, version=1)
    assert desk.take(2) is None, "5 is running"
    desk.scheduler.was_cut(Cut(id="0-2", prefix=prefix(0)), 0)
    desk.scheduler.advance(2)
    assert desk.admit()[0].id == "7-0", "it continues 0-2, which has to train at 2"
    desk.finish(7, version=2)
    assert desk.take(2) == [4, 7]

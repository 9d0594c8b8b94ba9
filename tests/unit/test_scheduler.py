"""The scheduler, rule by rule: facts that the random worlds of test_scheduler_properties.py cannot
express."""

from __future__ import annotations

import pytest

from megatron_async_rl.samples.types import Aborted
from tests.unit.fake_engine import partial
from tests.unit.scheduler_harness import SchedulerHarness


def test_a_response_that_comes_twice_or_unasked_is_an_error() -> None:
    harness = SchedulerHarness()
    harness.admit()
    harness.answer("0-0")
    with pytest.raises(RuntimeError, match="response 0-0 of group 0 came twice"):
        harness.answer("0-0")
    with pytest.raises(RuntimeError, match="9-9"):
        harness.scheduler.on_abort(Aborted(id="9-9", partial=None), 9)


def test_oldest_first_waits_and_windowed_overtakes_as_far_as_the_law_permits() -> None:
    for selection, expected in (("oldest_first", None), ("windowed", [1, 2])):
        harness = SchedulerHarness(2, 1.0, selection=selection)
        harness.admit()
        harness.finish(2, 1)
        assert harness.take(0) == expected
    harness.scheduler.advance(1)
    harness.admit()
    harness.finish(4, 5, version=1)
    assert harness.take(1) is None, "0 and 3 are due now"
    harness.finish(3, 0)
    assert harness.take(1) == [0, 3]


def test_what_is_late_is_dropped_only_by_config_and_only_when_enough_others_are_there() -> None:
    for late in ("wait", "drop"):
        harness = SchedulerHarness(2, 1.0, late=late, selection="windowed")
        harness.admit()
        harness.finish(2, 3)
        assert harness.take(0) == [2, 3]
        harness.answer("0-0")
        harness.scheduler.advance(1)
        harness.admit()
        harness.finish(4, version=1)
        assert harness.take(1) is None
        harness.finish(1)
        assert harness.take(1) == (None if late == "wait" else [1, 4])
    assert [sample.id for sample in harness.scheduler.drain_dropped()] == ["0-0"], (
        "what had come of it is told"
    )
    harness.answer("0-1")
    assert [sample.id for sample in harness.scheduler.drain_dropped()] == ["0-1"], (
        "and so is what comes later"
    )
    assert [request.group for request in harness.admit()] == [6, 6], (
        "one more is asked in its place"
    )
    assert harness.scheduler.counts()["dropped_late"] == 1


def test_exact_lag_waits_for_the_version_and_for_everything_it_makes() -> None:
    harness = SchedulerHarness(1, 2.0, selection={"name": "exact_lag", "lag": 2})
    harness.admit()
    harness.finish(0, 1)
    assert harness.take(0) is None, "group 2 is running"
    harness.finish(2)
    taken = [harness.take(0)]
    for version in (1, 2, 3, 4):
        assert harness.take(version) is None, "the engines have not loaded it"
        harness.scheduler.advance(version)
        assert harness.take(version) is None, "nothing is made under it yet"
        harness.admit()
        harness.finish(version + 2, version=version)
        taken.append(harness.take(version))
    assert taken == [[0], [1], [2], [3], [4]], "3 was made by version 1 and 4 by version 2"


def test_an_aborted_response_continues_with_its_tokens_and_its_groups_deadline() -> None:
    harness = SchedulerHarness(2, 1.0)
    harness.admit()
    tokens = partial(0, 0)
    again = harness.scheduler.on_abort(Aborted(id="0-1", partial=tokens), 0)
    assert (again.id, again.prompt.id, again.prefix) == ("0-1", "p0", tokens)
    harness.asked["0-1"] = again
    harness.answer("0-0", "1-0", "1-1")
    harness.answer("0-1", versions=(0, 0))
    batch = harness.scheduler.take(0)
    assert batch is not None
    assert batch[0].samples[1].sample().versions.tolist() == [0, 0, 0, 0]
    counts = harness.scheduler.counts()
    assert (counts["aborted"], counts["asked"], counts["open"]) == (1, 8, 4)


def test_a_request_that_is_given_up_takes_its_group_with_it_and_another_is_asked() -> None:
    harness = SchedulerHarness(2, 0.0)
    harness.admit()
    harness.answer("0-0")
    harness.finish(1)
    assert harness.take(0) is None
    harness.scheduler.on_give_up("0-1", 0)
    assert [sample.id for sample in harness.scheduler.drain_dropped()] == ["0-0"]
    assert [request.group for request in harness.admit()] == [2, 2]
    harness.finish(2)
    assert harness.take(0) == [1, 2]
    assert harness.scheduler.counts()["dropped_failed"] == 1


def test_a_group_whose_request_was_given_up_is_dropped_once_however_many_follow() -> None:
    harness = SchedulerHarness(1, 0.0)
    harness.admit()
    told = [harness.scheduler.on_give_up(request, 0) for request in ("0-0", "0-1")]
    assert told == [True, False], "a group's loss is told once"
    counts = harness.scheduler.counts()
    assert (counts["dropped_failed"], counts["given_up"], counts["open"]) == (1, 2, 0)


def test_oversampling_fills_the_bound_and_does_not_pass_it() -> None:
    for ratio, oversample, admitted in (
        (0.5, 0.0, 6),
        (0.5, 0.25, 7),
        (0.5, 0.5, 8),
        (1.0, 0.5, 8),
    ):
        harness = SchedulerHarness(4, ratio, selection="windowed", oversample=oversample)
        harness.admit()
        assert harness.scheduler.counts()["admitted"] == admitted


def test_with_oversampling_those_that_finish_first_train_and_the_others_go_on() -> None:
    harness = SchedulerHarness(2, 0.5, selection="windowed", oversample=0.5)
    harness.admit()
    harness.finish(1, 3)
    harness.answer("0-0")
    assert harness.take(0) == [1, 3]
    harness.scheduler.advance(1)
    harness.admit()
    assert {r.id for r, _ in harness.scheduler._table.open_requests()} >= {"0-1", "2-0", "2-1"}
    harness.answer("0-1")
    harness.finish(2)
    assert harness.take(1) == [0, 2], "what had come of them was kept"


def test_patience_with_equal_rewards_is_for_each_batch_that_is_kept_however_far_ahead() -> None:
    """At lag 4 five batches are made before the first is taken: each may cost ten batches'
    worth."""
    harness = SchedulerHarness(1, 4.0, dynamic_sampling=True)
    for group in range(40):
        harness.admit()
        dull = group % 8 != 7
        harness.answer(f"{group}-0", f"{group}-1", reward=0.0 if dull else None)
    counts = harness.scheduler.counts()
    assert (counts["dropped_equal"], counts["ready"]) == (35, 5)
    assert harness.take(0) == [7]


def test_only_a_group_of_equal_rewards_that_is_kept_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten batches' worth of equal groups are dropped before one is trained on."""
    harness = SchedulerHarness(1, 4.0, dynamic_sampling=True)
    for group in range(12):
        harness.admit()
        equal = group > 0
        harness.answer(f"{group}-0", f"{group}-1", reward=0.0 if equal else None)
    counts = harness.scheduler.counts()
    assert (counts["dropped_equal"], counts["ready"]) == (10, 2)
    assert caplog.messages == [
        "group 11 is trained on although its rewards are equal: too few others are left"
    ]


@pytest.mark.parametrize("selection", ["oldest_first", "windowed"])
def test_while_one_group_is_late_the_others_that_finish_look_for_no_batch(selection: str) -> None:
    harness = SchedulerHarness(20, 1.0, selection=selection)
    harness.admit()
    harness.finish(*range(20))
    assert harness.take(0) == list(range(20))
    harness.scheduler.advance(1)
    harness.admit()
    attempts = 0
    for group in (*range(21, 40), *range(40, 60)):
        harness.finish(group, version=1)
        if harness.scheduler.may_take(1):
            assert harness.take(1) is None, "20 is due now, and running"
            attempts += 1
    assert attempts == 1, "before that nobody knew that it is 20 that is missing"
    harness.finish(20)
    assert harness.scheduler.may_take(1)
    assert harness.take(1) == list(range(20, 40))


def test_the_deadlines_of_groups_that_are_gone_are_kept_no_account_of() -> None:
    harness = SchedulerHarness(1, 1.5)
    for version in range(20):
        harness.scheduler.advance(version)
        for request in harness.admit():
            harness.answer(request.id, versions=(version,))
        assert harness.scheduler.take(version) is not None
    assert len(harness.scheduler._table.due) <= 3
    assert harness.scheduler._table._answering == {}


def test_a_late_group_that_finishes_trains_even_if_others_are_missing() -> None:
    harness = SchedulerHarness(2, 1.0, late="drop")
    harness.admit()
    harness.finish(0, 1)
    assert harness.take(0) == [0, 1]
    harness.scheduler.advance(1)
    harness.admit()
    harness.finish(3)
    harness.finish(5, version=1)
    assert harness.take(1) is None, (
        "without 2, which is late, it would be 3 and 4, and 4 is running"
    )
    harness.finish(2)
    assert harness.take(1) == [2, 3]

"""Choice of an engine for a request: by load, by the prompt in its cache, or in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async_rl.flow import router
from megatron_async_rl.flow.engine_task import EngineSlot, PendingRequest
from megatron_async_rl.flow.router import EvenRouter, Lanes, Router, capacity_of
from tests.unit.fake_engine import FakeEngine, specs
from tests.unit.fleet_harness import requests


def engines(*loads: int) -> list[Any]:
    """Return candidates that hold these numbers of requests."""
    return [SimpleNamespace(index=at, held=range(load)) for at, load in enumerate(loads)]


def chosen(one: Router, group: int, limit: int, *loads: int) -> int | None:
    found = one.choose(engines(*loads), group, limit)
    return None if found is None else found.index


def test_an_engine_holds_a_quarter_more_than_it_decodes_but_one_more_at_least() -> None:
    assert [capacity_of(places) for places in (1, 3, 4, 7, 8, 256)] == [2, 4, 5, 8, 10, 320]


def test_the_least_loaded_engine_is_chosen_unless_one_nearly_as_empty_has_the_prompt() -> None:
    for capacity, slack in ((32, 8), (143, 8), (144, 9), (320, 20)):
        one = Router(capacity)
        assert chosen(one, 0, capacity, 2, 1, 1) == 1
        # Engine 1 has the prompt; an imbalance of more than `slack` costs more than the prompt.
        assert chosen(one, 0, capacity, 0, slack, 0) == 1
        assert chosen(one, 0, slack, 0, slack, 0) == 0
        assert chosen(one, 0, capacity, 0, slack, 0) == 0, "the newest engine is remembered"
        assert chosen(one, 0, capacity, slack + 1, 1, 0) == 2
        assert chosen(one, 1, capacity, 1, 1, 0) == 2
        # Engine 2, which had the prompt, is not among those that may answer.
        assert chosen(one, 1, capacity, 3, 2) == 1
    assert chosen(Router(8), 0, 2, 2, 2) is None
    assert chosen(Router(8), 0, 2, 2, 1) == 1
    assert chosen(Router(8), 0, 2) is None


def test_the_oldest_groups_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "GROUPS_REMEMBERED", 2)
    one = Router(32)
    for group in range(2):
        assert chosen(one, group, 32, 1, 0) == 1
    assert chosen(one, 0, 32, 0, 1) == 1
    assert chosen(one, 2, 32, 1, 0) == 1
    assert [chosen(one, group, 32, 0, 1) for group in (1, 2, 0)] == [1, 1, 0]


def test_an_even_router_divides_each_group_in_turn_and_waits_for_the_next_engine() -> None:
    one = EvenRouter(4, 2)
    assert [chosen(one, 7, 4, 0, 3, 0) for _ in range(3)] == [0, 1, 0]
    assert chosen(one, 8, 4, 3, 0) == 0, "each group has its own turns"
    assert chosen(one, 7, 4, 0, 4) is None
    assert chosen(one, 7, 4, 0, 3) == 1
    assert chosen(one, 8, 4) is None
    assert chosen(one, 8, 4, 4, 0) == 1


def placed(even: int, count: int) -> list[list[str]]:
    lanes = Lanes(3, separate=False, even=even)
    slots = [EngineSlot(spec, engine=FakeEngine(), version=0, serving=True) for spec in specs(2)]
    for request in requests(1, size=count):
        lanes.add(PendingRequest(request, 0))
    lanes.place(slots)
    assert lanes.waiting() == count - sum(len(slot.held) for slot in slots)
    return [list(slot.held) for slot in slots]


def test_requests_of_a_group_are_together_or_divided() -> None:
    assert placed(0, 5) == [["0-0", "0-1", "0-2"], ["0-3", "0-4"]]
    assert placed(2, 5) == [["0-0", "0-2", "0-4"], ["0-1", "0-3"]]
    assert placed(2, 8) == [["0-0", "0-2", "0-4"], ["0-1", "0-3", "0-5"]]

"""The fleet: who gets a request, and what becomes of those that are cut or held out."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.requests import Request
from tests.unit.coroutine_engine import CoroutineEngine, prefix
from tests.unit.coroutine_fleet import Desk, ids, never, requests
from tests.unit.coroutine_flow import PROMPTS, run


def test_requests_go_to_the_least_loaded_engine_and_none_holds_more_than_its_capacity() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(never), CoroutineEngine(never), CoroutineEngine()]
        desk = Desk(engines, capacity=4)
        desk.fleet.put(requests(30))
        await desk.until(lambda: len(desk.samples) == 22)
        assert [engine.most for engine in engines] == [4, 4, 4]
        assert [engine.groups()[:2] for engine in engines] == [[0, 3], [1, 4], [2, 5]]
        assert desk.fleet.waiting() == 0
        await desk.fleet.stop()

    run(body)


def test_what_is_asked_because_of_an_answer_goes_behind_what_has_been_waiting_for_its_place() -> None:
    async def body() -> None:
        first, waiting, late = requests(3)
        engine = CoroutineEngine()
        desk = Desk([engine], capacity=1)

        def answered(sample: Sample, request: Request) -> None:
            desk.samples.append(sample)
            desk.fleet.put([late] if request is first else [])

        desk.fleet._on_sample = answered
        desk.fleet.put([first, waiting])
        await desk.until(lambda: len(desk.samples) == 3)
        assert ids(engine.asked) == ids([first, waiting, late])
        await desk.fleet.stop()

    run(body)


def test_the_requests_of_a_group_stay_with_the_engine_that_knows_its_prompt_unless_it_is_much_fuller() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(never), CoroutineEngine(never)]
        desk = Desk(engines, capacity=64)
        desk.fleet.put(requests(4, size=6))
        await asyncio.sleep(0.01)
        assert [engine.groups() for engine in engines] == [[0, 2], [1, 3]]
        desk.fleet.put(requests(1, size=30, first=9))
        await asyncio.sleep(0.01)
        loads = [len(engine.asked) for engine in engines]
        assert sum(loads) == 54
        assert max(loads) - min(loads) <= 9, "affinity ends where an engine is 8 requests fuller"
        await desk.fleet.stop()

    run(body)


def test_cut_requests_are_answered_as_cut_wherever_they_are() -> None:
    async def body() -> None:
        engine = CoroutineEngine(never)
        desk = Desk([engine], capacity=2)
        waiting = Request(group=2, k=0, prompt=PROMPTS[2], prefix=prefix(1))
        desk.fleet.put([*requests(2), waiting])
        await asyncio.sleep(0.005)
        desk.fleet.cut(["1-0", "2-0"])
        assert [cut.id for cut in desk.cuts] == ["2-0"], "what no engine has is cut at once, with the prefix it had"
        assert desk.cuts[0].prefix is waiting.prefix
        await desk.until(lambda: len(desk.cuts) == 2)
        assert ids(engine.asked) == ["0-0", "1-0"]
        engine.cut = never_cuts  # type: ignore[method-assign]
        desk.fleet.cut(["0-0"])
        engine.fail(RuntimeError("out of memory"))
        await desk.until(lambda: len(desk.cuts) == 3)
        assert (desk.cuts[2].id, desk.cuts[2].prefix) == ("0-0", None), "an engine that is lost cannot say what it had"
        assert desk.fleet.waiting() == 0, "and nobody is asked again for what is no longer wanted"
        await desk.fleet.stop()

    run(body)


async def never_cuts(ids: Any) -> None:
    return


def test_held_out_requests_go_to_engines_of_their_own_also_while_these_are_down() -> None:
    async def body() -> None:
        engine, evaluator, second = CoroutineEngine(), CoroutineEngine(never), CoroutineEngine()
        desk = Desk([engine], evaluators=[evaluator])
        asking = asyncio.create_task(desk.fleet.run([Request(group=-1, k=0, prompt=PROMPTS[0])], on="evaluation"))
        desk.fleet.put(requests(2))
        await desk.until(lambda: len(desk.samples) == 2)
        desk.fleet.lose(1, "gone")
        late = asyncio.create_task(desk.fleet.run([Request(group=-2, k=0, prompt=PROMPTS[1])], on="evaluation"))
        await asyncio.sleep(0.01)
        assert engine.groups() == [0, 1]
        desk.fleet.replace(1, second)
        assert [[sample.id for sample in await task] for task in (asking, late)] == [["-1-0"], ["-2-0"]]
        assert len(desk.samples) == 2, "nothing held out is handed on for training"
        await desk.fleet.stop()

    run(body)


def test_without_engines_of_their_own_held_out_requests_come_first_and_stop_when_nobody_wants_them() -> None:
    async def body() -> None:
        engine = CoroutineEngine(never)
        desk = Desk([engine], capacity=2)
        desk.fleet.put(requests(3))
        asked = [Request(group=-1, k=k, prompt=PROMPTS[0]) for k in range(2)]
        asking = asyncio.create_task(desk.fleet.run(asked, on="training"))
        await asyncio.sleep(0.005)
        desk.fleet.cut(["0-0"])
        await desk.until(lambda: len(engine.asked) == 3)
        assert ids(engine.asked) == ["0-0", "1-0", "-1-0"]
        asking.cancel()
        await desk.until(lambda: "-1-0" in engine.cuts)
        await desk.until(lambda: "2-0" in ids(engine.asked))
        assert ids(engine.asked) == ["0-0", "1-0", "-1-0", "2-0"], "-1-1 was still waiting and is forgotten"
        assert [cut.id for cut in desk.cuts] == ["0-0"]
        await desk.fleet.stop()

    run(body)

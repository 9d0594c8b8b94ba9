"""The controller: what is admitted when, what trains when, and what it reports; with engines that
are coroutines."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.errors import BatchTimeout, EngineFailed, RewardFailed
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.flow.staleness import StalenessViolated
from megatron_async_rl.flow.summary import describe_flow
from megatron_async_rl.report.samples import load, read_entries
from tests.thorough import examples
from tests.unit.fake_engine import FakeEngine, manifest
from tests.unit.flow_setup import (
    WholeRewards,
    begin,
    expected_prompts,
    flow,
    groups_of,
    run,
    samples_in,
    stage,
    train,
    until,
)


def test_groups_are_consumed_in_admission_order_whatever_order_they_finish_in() -> None:
    async def body() -> None:
        chance = random.Random(1)
        engines = [FakeEngine(lambda request: chance.random() * 0.02) for _ in range(2)]
        controller = await begin(engines, flow())
        groups = await train(controller, 0, 6)
        assert [group.index for group in groups] == list(range(18))
        assert [group.prompt.id for group in groups] == expected_prompts(18)
        assert all(
            [sample.id for sample in group.samples] == [f"{group.index}-0", f"{group.index}-1"]
            for group in groups
        )
        await controller.close()

    run(body)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
def test_admission_stops_at_the_law_and_continues_when_the_version_grows(ratio: float) -> None:
    async def body() -> None:
        engine = FakeEngine()
        controller = await begin([engine], flow(4, ratio))
        await asyncio.sleep(0.02)
        assert len(engine.groups()) == 4 + math.ceil(4 * ratio)
        await controller.next_batch(0)
        await asyncio.sleep(0.02)
        assert len(engine.groups()) == 4 + math.ceil(4 * ratio), (
            "consuming alone admits nothing: the weights are still old"
        )
        await stage(controller, 1)
        await asyncio.sleep(0.02)
        assert len(engine.groups()) == 8 + math.ceil(4 * ratio)
        await controller.close()

    run(body)


def test_the_trainer_is_not_woken_for_every_response_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    take = Scheduler.take
    monkeypatch.setattr(
        Scheduler, "take", lambda self, version: (tried.append(version), take(self, version))[1]
    )

    async def body() -> None:
        engine = FakeEngine(lambda request: 0.001 * request.group)
        controller = await begin([engine], flow(16, 1.0))
        await controller.next_batch(0)
        assert len(tried) <= 3, (
            "once before anything is there, once when sixteen groups are; 32 responses came between"
        )
        await controller.close()

    run(body)


SELECTIONS: list[dict[str, Any]] = [
    {},
    {"selection": "windowed"},
    {"selection": "windowed", "late": "drop"},
    {"selection": "windowed", "dynamic_sampling": True},
]


@settings(max_examples=examples(40, 20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ratio=st.sampled_from([0.3, 1.0, 1.5, 3.0]),
    count=st.integers(1, 3),
    more=st.sampled_from(SELECTIONS),
)
def test_lags_stay_within_the_bound_under_random_durations(
    seed: int, ratio: float, count: int, more: dict[str, Any]
) -> None:
    async def body() -> None:
        chance = random.Random(seed)
        fleet = [
            FakeEngine(lambda request: chance.choice([0.0, 0.0, 0.001, 0.004]))
            for _ in range(count)
        ]
        controller = await begin(fleet, flow(2, ratio, **more))
        for version in range(8):
            batch = (await controller.next_batch(version)).batch
            lags = [version - sample.start_version for sample in samples_in(batch)]
            assert 0 <= min(lags) <= max(lags) <= math.ceil(ratio)
            await stage(controller, version + 1)
        await controller.close()

    run(body)


def test_a_sample_older_than_the_bound_stops_the_run() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.started = lambda request, version: 0
        controller = await begin([engine], flow(3, 1.0))
        await train(controller, 0, 2)
        with pytest.raises(
            StalenessViolated, match=r"sample 6-0 starts at version 0, 2 behind 2; .* permits 1"
        ):
            await controller.next_batch(2)
        await controller.close()

    run(body)


def test_a_sample_of_two_versions_stops_a_run_with_exact_lag() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.alter = lambda sample: replace(sample, versions=np.array([0, 1], np.int32))
        settings = flow(3, 1.0, selection={"name": "exact_lag", "lag": 1})
        controller = await begin([engine], settings)
        message = (
            r"sample 0-0 has tokens of versions 0 to 1 and trains 0; flow\.selection: exact_lag"
            " needs all of them to be of one version, 1 before"
        )
        with pytest.raises(StalenessViolated, match=message):
            await controller.next_batch(0)
        await controller.close()

    run(body)


def test_the_trainer_may_take_the_next_batch_while_the_engines_still_load_its_weights() -> None:
    async def body() -> None:
        engine = FakeEngine()
        controller = await begin([engine], flow(3, 1.0), timeout_s=0.2)
        await controller.next_batch(0)
        batch = (await controller.next_batch(1)).batch
        assert {sample.start_version for sample in samples_in(batch)} == {0}
        with pytest.raises(BatchTimeout, match="the engines hold version 0"):
            await controller.next_batch(2)
        await controller.close()

    run(body)


def test_nothing_is_admitted_that_no_step_will_consume() -> None:
    async def body() -> None:
        engine = FakeEngine()
        controller = await begin([engine], flow(3, 2.0), steps=4)
        assert len(await train(controller, 0, 4)) == 12
        assert len(engine.groups()) == 12
        with pytest.raises(ValueError, match="the run's 4 steps are consumed"):
            await controller.next_batch(4)
        await controller.close()

    run(body)


def test_a_batch_is_late_only_without_responses_and_then_names_its_groups() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine(lambda request: 60.0)]
        slow = FakeEngine(lambda request: 0.4 * (2 * request.group + request.k))
        moving = await begin([slow], flow(3, 0.0), timeout_s=1.2)
        assert len(groups_of((await moving.next_batch(0)).batch)) == 3, (
            "2 s in all, but a response every 0.4 s"
        )
        controller = await begin(engines, flow(3, 0.0), capacity=2, timeout_s=0.1)
        with pytest.raises(BatchTimeout) as caught:
            await controller.next_batch(0)
        message = str(caught.value)
        assert (
            "no response grew for the batch of version 0 in 0.1 s; 1 groups are running" in message
        )
        assert f"group 1 (prompt {expected_prompts(2)[1]}): 0.1 s, on engine 1" in message
        assert "group 0" not in message
        await moving.close()
        await controller.close()

    run(body)


def test_a_response_longer_than_the_deadline_is_waited_for_while_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        monkeypatch.setattr("megatron_async_rl.flow.engine_task.REPORT_S", 0.05)
        engine = FakeEngine(lambda request: 1.5)
        engine.sampling = True
        controller = await begin([engine], flow(1, 0.0), timeout_s=0.8)
        assert len(groups_of((await controller.next_batch(0)).batch)) == 1
        await controller.close()

    run(body)


def test_a_failed_reward_is_counted_and_passed_on_or_stops_the_run_as_configured() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = lambda request: None if request.id == "1-1" else 1.0
        dropping = await begin([engine], flow(), on_error="drop")
        batch = (await dropping.next_batch(0)).batch
        assert [sample.id for sample in samples_in(batch) if not sample.valid] == ["1-1"]
        assert dropping.stats()["reward_errors"] == 1
        await dropping.close()
        other = FakeEngine()
        other.reward = engine.reward
        stopping = await begin([other], flow(), on_error="stop")
        with pytest.raises(
            RewardFailed, match="the reward failed on sample 1-1: ValueError: no idea"
        ):
            await stopping.next_batch(0)
        await stopping.close()

    run(body)


def test_a_group_trains_with_the_reward_of_the_whole(tmp_path: Path) -> None:
    async def body() -> None:
        whole = WholeRewards(lambda samples: 0.5 if samples[0].id == "0-0" else 0.0)
        engine = FakeEngine(lambda request: 0.01 * (2 - request.k))
        controller = await begin([engine], flow(), whole=whole, run_dir=tmp_path)
        handout = await controller.next_batch(0)
        assert handout is not None
        found = [(one.id, one.reward) for one in samples_in(handout.batch)]
        assert found == [(f"{group}-{k}", k + 10.0) for group in range(3) for k in range(2)]
        assert all(one == sorted(one) and len(one) == 2 for one in whole.seen), "asked in order"
        assert handout.batch.samples.column("reward_parts").to_pylist() == [[("whole", 10.0)]] * 6
        await controller.close()

        logged = {one.id: one for _, one in load(tmp_path, list(read_entries(tmp_path)))}
        assert [logged[name].reward for name, _ in found] == [reward for _, reward in found]

    run(body)


def test_a_run_has_as_many_engines_as_its_directory_asks_for(tmp_path: Path) -> None:
    async def body() -> None:
        controller = await begin([FakeEngine()], flow(), run_dir=tmp_path)

        def is_there(engines: list[int]) -> bool:
            return engines == [slot.index for slot in controller._fleet.slots if slot.serving]

        for asked, there in (("2", [0, 1]), ("many", [0, 1]), ("1", [0])):
            (tmp_path / "engines").write_text(asked)
            await until(lambda: not (tmp_path / "engines").exists())
            await until(partial(is_there, there))
        assert controller._failure is None
        await controller.close()

        noted = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").open()]
        assert noted[1] == "engine-1 has joined, with the weights of version 0, verified"
        assert "was not reached" in noted[2]
        assert "many" in noted[2]
        assert noted[-1] == "engine-1 has left"

    run(body)


def test_an_event_that_cannot_be_written_is_in_the_log_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        (tmp_path / "events.jsonl").mkdir()
        controller = await begin([FakeEngine()], flow(), run_dir=tmp_path)
        controller.note("engine-0 has joined")
        await train(controller, 0, 1)
        await controller.close()

    caplog.set_level(logging.INFO)
    run(body)
    written = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert [one.getMessage() for one in written] == ["the event could not be written"]
    assert isinstance(written[0].exc_info[1], IsADirectoryError)
    assert "engine-0 has joined" in caplog.messages


def test_a_group_that_is_dropped_before_its_reward_is_counted_and_reported(tmp_path: Path) -> None:
    async def body() -> None:
        slow = WholeRewards(lambda samples: 60.0 if samples[0].id == "0-0" else 0.0)
        settings = flow(2, 1.0, late="drop", selection="windowed")
        controller = await begin([FakeEngine()], settings, whole=slow, run_dir=tmp_path)
        groups = await train(controller, 0, 2)
        assert 0 not in [group.index for group in groups]
        assert controller.stats()["dropped_late"] == 1
        assert controller.stats()["reward_errors"] == 0, "no reward failed"
        await asyncio.sleep(120)
        assert controller._failure is None, "its reward comes too late, and nobody minds"
        await controller.close()

        entries = list(read_entries(tmp_path))
        assert len(entries) == len({entry.id for entry in entries}), "each is logged once"
        loaded = {entry.id: (entry.state, one) for entry, one in load(tmp_path, entries)}
        state, sample = loaded["0-1"]
        assert (state, sample.reward, sample.valid) == ("dropped", 0.0, False)
        assert sample.reward_error == "its group was dropped before it had its reward"

    run(body)


def test_a_reward_of_the_whole_that_fails_costs_its_samples_or_the_run() -> None:
    def failing() -> WholeRewards:
        return WholeRewards(error=lambda sample: "no idea" if sample.id == "1-1" else None)

    async def body() -> None:
        dropping = await begin([FakeEngine()], flow(), whole=failing())
        batch = (await dropping.next_batch(0)).batch
        assert [sample.id for sample in samples_in(batch) if not sample.valid] == ["1-1"]
        assert dropping.stats()["reward_errors"] == 1
        await dropping.close()
        stopping = await begin([FakeEngine()], flow(), whole=failing(), on_error="stop")
        with pytest.raises(RewardFailed, match="the reward failed on sample 1-1: no idea"):
            await stopping.next_batch(0)
        await stopping.close()

    run(body)


def test_a_batch_that_waits_for_the_reward_of_a_group_reports_it() -> None:
    async def body() -> None:
        slow = WholeRewards(lambda samples: 900.0)
        controller = await begin([FakeEngine()], flow(1), whole=slow, timeout_s=2.0)
        with pytest.raises(BatchTimeout, match=r"s, waits for its reward \(per: group\)"):
            await controller.next_batch(0)
        assert "0 ready, 2 groups wait for their reward, the oldest" in describe_flow(
            controller.stats(), controller._rewards.waiting
        )
        await controller.close()

    run(body)


def test_a_batch_in_which_every_reward_failed_ends_the_run_with_the_first_errors() -> None:
    """The batch before, in which one response has a reward, is handed out."""

    async def body() -> None:
        engine = FakeEngine()
        engine.reward = lambda request: 1.0 if request.id == "1-1" else None
        controller = await begin([engine], flow(), on_error="drop")
        handout = await controller.next_batch(0)
        assert handout is not None
        assert [sample.id for sample in samples_in(handout.batch) if sample.valid] == ["1-1"]
        await stage(controller, 1)
        with pytest.raises(RewardFailed) as failure:
            await controller.next_batch(1)
        text = str(failure.value)
        assert text.startswith("the reward failed on all 6 responses of the batch for step 2:\n")
        first = expected_prompts(4)[3]
        assert f"  ValueError: no idea\n    prompt {first}: " in text
        await controller.close()

    run(body)


def test_versions_only_grow_and_batches_come_in_their_order() -> None:
    async def body() -> None:
        controller = await begin([FakeEngine()], flow(), version=3)
        for version in (3, 2):
            with pytest.raises(ValueError, match=f"version {version} was staged after version 3"):
                await controller.staged(version, manifest(version))
        with pytest.raises(ValueError, match="version 4 was requested; the next one trains 3"):
            await controller.next_batch(4)
        await controller.close()

    run(body)


def test_stats_account_for_every_admitted_group_and_every_response() -> None:
    async def body() -> None:
        engine = FakeEngine(
            lambda request: 60.0 if request.group in (1, 4) and request.k == 1 else 0.0
        )
        controller = await begin([engine], flow(3, 1.0), capacity=11)
        await asyncio.sleep(0.05)
        stats = controller.stats()
        assert stats["oldest_in_flight_s"] >= 0.04
        expected = {
            "admitted": 6,
            "ready": 4,
            "buffer": 4,
            "running": 2,
            "consumed": 0,
            "asked": 12,
            "open": 2,
            "in_flight": 2,
        }
        expected |= {
            "waiting": 0,
            "samples": 10,
            "tokens": 20,
            "truncated": 6,
            "reward_errors": 0,
            "dropped_equal": 0,
        }
        assert {key: stats[key] for key in expected} == expected
        await controller.close()

    run(body)


def test_what_runs_on_after_a_batch_does_not_grow_younger() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 60.0 if request.group == 4 else 0.0)
        controller = await begin([engine], flow(3, 1.0))
        await controller.next_batch(0)
        await asyncio.sleep(0.01)
        first = controller.stats()["oldest_in_flight_s"]
        await stage(controller, 1)
        await asyncio.sleep(0.01)
        assert 0 < first < controller.stats()["oldest_in_flight_s"]
        await controller.close()

    run(body)


@pytest.mark.parametrize("kind", [BatchTimeout, EngineFailed, RewardFailed, StalenessViolated])
def test_errors_survive_the_trip_between_processes(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("who, where, why")))
    assert (type(again), str(again)) == (kind, "who, where, why")

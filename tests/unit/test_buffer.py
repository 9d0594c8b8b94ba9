"""The flow's part of a checkpoint: every field is restored, and as much is used as the staleness
law permits."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import zlib
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.flow import buffer as buffer_module
from megatron_async_rl.flow.buffer import (
    EMPTY,
    PARTIALS,
    Buffer,
    BufferBroken,
    GroupState,
    buffer_bytes,
    read_buffer,
)
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.columns import LOGGED
from megatron_async_rl.samples.rows import SampleRow, gathered
from megatron_async_rl.samples.types import Aborted, PartialResponse, Request
from tests.train_batches import row
from tests.unit.fake_engine import partial
from tests.unit.scheduler_harness import SchedulerHarness, indices, samples_of

CHAT = Prompt(
    id="p",
    text="«1 + 1»\n\U0001f600",
    token_ids=(5, 70000),
    fields={"answer": "2", "numbers": [1, 1.5, None], "of": {"a": True}},
)
CHANGED = Prompt(id="p", text="1 + 2", token_ids=(5, 6), fields={})


def sample(name: str, prompt: Prompt, versions: list[int], **more: Any) -> Sample:
    length = len(versions)
    given = {
        "response_ids": np.arange(length, dtype=np.int32) * 70000,
        "behavior_logprobs": np.nextafter(np.float32(-0.1), np.float32(0))
        * np.arange(1, length + 1, dtype=np.float32),
        "versions": np.array(versions, dtype=np.int32),
        "loss_mask": np.arange(length, dtype=np.uint8) % 2,
        "text": f"{name} \x00 é",
        "finish_reason": "length",
        "reward": 0.1 + 0.2,
    }
    return Sample(id=name, prompt=prompt, **{**given, **more})


def full() -> Buffer:
    rewarded = np.array([0.25, -1.5, 3.0], dtype=np.float32)
    steps = sample(
        "3-0",
        CHAT,
        [1, 1, 2],
        reward=1.75,
        step_rewards=rewarded,
        weight=0.3,
        engine=7,
        started_at=1.1e9 + 1 / 3,
        routed_experts=bytes(range(4 * 6)),
    )
    failed = sample(
        "3-2",
        CHAT,
        [2],
        reward=math.nan,
        reward_error="ValueError: no",
        finished_at=1e-300,
        finish_reason="stop",
    )
    begun = PartialResponse(
        response_ids=np.array([9, 8], dtype=np.int32),
        behavior_logprobs=np.array([-0.3, -1e-30], dtype=np.float32),
        versions=np.array([0, 1], dtype=np.int32),
        routed_experts=b"\x00\xff\x01" * 2,
    )
    asked = [
        Request(group=4, k=0, prompt=CHANGED, prefix=begun),
        Request(group=4, k=2, prompt=CHANGED),
    ]
    running = {request.id: request for request in asked}
    return Buffer(
        groups=(
            GroupState(
                3,
                CHAT,
                version=1,
                deadline=3,
                open={},
                samples=[row(steps, 3), row(failed, 3)],
                finished=11,
            ),
            GroupState(
                4,
                CHANGED,
                version=0,
                deadline=2,
                open=running,
                samples=[row(sample("4-1", CHANGED, [2, 2]), 4)],
            ),
        ),
        stored=(
            (CHAT, (row(sample("0-0", CHAT, [0])), row(sample("1-1", CHANGED, [0, 0]), 1))),
            (CHANGED, ()),
        ),
        equal=(17, 3),
        first_versions=(0, 40),
    )


def group_in(row: SampleRow) -> int:
    group: int = row.batch.column("group")[row.row].as_py()
    return group


def same(found: Any, expected: Any) -> bool:
    """Field by field, down to types, array dtypes and bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    if isinstance(expected, SampleRow):
        return same(found.sample(), expected.sample()) and group_in(found) == group_in(expected)
    if dataclasses.is_dataclass(expected):
        return all(
            same(getattr(found, f.name), getattr(expected, f.name))
            for f in dataclasses.fields(expected)
        )
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            same(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected or (
        isinstance(expected, float) and math.isnan(found) and math.isnan(expected)
    )


@pytest.mark.parametrize("rows", [1024, 2])
def test_every_field_comes_back_as_it_was(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "ROWS", rows)
    assert same(read_buffer(buffer_bytes(full())), full())
    assert same(read_buffer(buffer_bytes(Buffer())), Buffer())


def test_a_run_without_a_checkpoint_begins_with_nothing() -> None:
    nothing = Buffer(groups=(), stored=(), equal=(0, 0), first_versions=())
    assert same(EMPTY, nothing)
    assert same(read_buffer(buffer_bytes(EMPTY)), nothing)


def test_a_file_from_before_samples_had_experts_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = full()
    with monkeypatch.context() as then:
        then.setattr(buffer_module, "SCHEMA", LOGGED)
        then.setattr(buffer_module, "gathered", lambda rows: gathered(rows, schema=LOGGED))
        last = PARTIALS.get_field_index("routed_experts")
        then.setattr(buffer_module, "PARTIALS", PARTIALS.remove(last))
        before = buffer_bytes(now)
    found = read_buffer(before)
    (state, _) = found.groups
    assert [one.sample().routed_experts for one in state.samples] == [None, None]
    assert [one.sample().text for one in state.samples] == ["3-0 \x00 é", "3-2 \x00 é"]
    assert {one.prefix.routed_experts for one in found.groups[1].open.values() if one.prefix} == {
        None
    }


def test_a_row_that_is_read_keeps_few_others_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "ROWS", 2)
    stored = tuple(row(sample(f"0-{k}", CHAT, [0] * 1000)) for k in range(40))
    ((_, again),) = read_buffer(buffer_bytes(Buffer(stored=((CHAT, stored),)))).stored
    assert [one.batch.num_rows for one in again] == [2] * 40


def test_a_prompt_of_many_samples_takes_the_room_of_few() -> None:
    long = Prompt(id="long", text="x" * 10000, token_ids=(1,) * 1000)
    stored = tuple(row(sample(f"0-{k}", dataclasses.replace(long), [0])) for k in range(50))
    assert len(buffer_bytes(Buffer(stored=((long, stored),)))) < 50000


def test_arrays_of_other_types_are_refused_and_not_converted() -> None:
    wide = sample("0-0", CHAT, [0], response_ids=np.array([2**40]))
    with pytest.raises(TypeError, match="int64"):
        row(wide)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of the file was run",))


def test_a_damaged_file_is_reported_with_a_fix_and_none_of_its_code_runs() -> None:
    whole = buffer_bytes(full())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    sound = whole[:-4]
    others = [
        sound.replace(before, after)
        for before, after in (
            (b"deadline", b"deadlime"),
            (b'"samples": 2', b'"samples": 3'),
            (b'"samples": 2', b'"samples": 1'),
            (b"prompt_text", b"prompt_next"),
        )
    ]
    assert sound not in others
    consistent = [one + zlib.crc32(one).to_bytes(4) for one in others]
    armed = pickle.dumps(Bomb())
    armed += zlib.crc32(armed).to_bytes(4)
    for content in (b"", b"no", armed, whole[:-30], bytes(flipped), *consistent):
        with pytest.raises(
            BufferBroken, match=r"buffer\.arrow of the checkpoint (?s:.)*remove the file"
        ):
            read_buffer(content)


# What is taken up


def busy(**more: Any) -> SchedulerHarness:
    """At version 1: 2 is whole, 3 has one response, nothing of 4 and 5 has come."""
    harness = SchedulerHarness(2, 1.0, **more)
    harness.admit()
    harness.finish(0, 1, 2)
    harness.answer("3-1")
    assert harness.take(0) == [0, 1]
    harness.scheduler.advance(1)
    harness.admit()
    return harness


def test_only_what_is_missing_is_asked_again_under_its_own_id_and_deadline() -> None:
    harness = busy()
    assert harness.resume(1) == ["3-0", "4-0", "4-1", "5-0", "5-1"]
    assert not harness.scheduler.room()
    harness.answer("3-0", versions=(1,))
    batch = harness.scheduler.take(1)
    assert batch is not None
    assert [sample.id for sample in samples_of(batch)] == ["2-0", "2-1", "3-0", "3-1"]
    assert [sample.start_version for sample in samples_of(batch)] == [0, 0, 1, 0]
    harness.scheduler.advance(2)
    assert [request.group for request in harness.admit()] == [6, 6, 7, 7], "numbers go on"


@pytest.mark.parametrize(
    ("changed", "kept", "again"),
    [
        ({}, [2, 3, 4, 5], []),
        ({"group_size": 3}, [], [2, 3, 4, 5]),
        ({"group_size": 1}, [], [2, 3, 4, 5]),
        ({"async_ratio": 0.0}, [4, 5], [2, 3]),
        ({"prompts_per_step": 1}, [2, 4], [3, 5]),
        ({"async_ratio": 0.5}, [2, 3, 4], [5]),
        ({"async_ratio": 3.0, "prompts_per_step": 5}, [2, 3, 4, 5], []),
        ({"oldest": 1}, [4, 5], [2, 3]),
        ({"steps": 2}, [2, 3], [4, 5]),
    ],
    ids=str,
)
def test_groups_that_the_settings_exclude_are_requested_again_and_counted(
    changed: dict[str, Any], kept: list[int], again: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    harness = busy()
    with caplog.at_level(logging.WARNING):
        harness.resume(1, **changed)
    assert [group.index for group in harness.scheduler.buffer().groups] == kept
    assert [index for index, _ in harness.scheduler.pending()] == [2, 3, 4, 5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if again else 0)
    assert not again or f"continues with {len(kept)} of the 4 groups" in said[0]


def exact(lag: int, **more: Any) -> SchedulerHarness:
    return SchedulerHarness(1, float(lag), selection={"name": "exact_lag", "lag": lag}, **more)


def lags_of(harness: SchedulerHarness, first: int, last: int) -> list[int]:
    """Lags of the steps first..last-1; requests are answered by the version in training."""
    found = []
    for version in range(first, last):
        harness.scheduler.advance(version)
        harness.admit()
        for one in sorted(harness.asked):
            harness.answer(one, versions=(version,))
        harness.asked = {}
        batch = harness.scheduler.take(version)
        assert batch is not None
        found.append(version - batch[0].samples[0].start_version)
    return found


@pytest.mark.parametrize("stops", [(), (1,), (2,), (3,), (5,), (1, 2, 4, 6), (5, 6)])
def test_an_exact_lag_is_exact_over_any_resume(stops: tuple[int, ...]) -> None:
    harness, version, found = exact(3), 0, []
    for stop in (*stops, 8):
        found += lags_of(harness, version, stop)
        version = stop
        harness.resume(stop)
    assert found == [0, 1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "changed", [{"lag": 2}, {"lag": 4}, {"group_size": 3}, {"prompts_per_step": 2}, {"oldest": 4}]
)
def test_an_exact_lag_takes_up_everything_or_nothing(changed: dict[str, Any]) -> None:
    harness = exact(3)
    lags_of(harness, 0, 5)
    if "lag" in changed:
        lag = changed["lag"]
        changed = {"async_ratio": float(lag), "selection": {"name": "exact_lag", "lag": lag}}
    harness.resume(5, **changed)
    assert harness.scheduler.buffer().groups == ()
    if "group_size" not in changed:
        lag = int(harness.settings["async_ratio"])
        assert lags_of(harness, 5, 12) == [min(step, lag) for step in range(7)], (
            "as at the beginning of a run"
        )


def test_an_exact_lag_begins_anew_where_a_finished_run_is_made_longer() -> None:
    harness = exact(2, steps=4)
    assert lags_of(harness, 0, 4) == [0, 1, 2, 2]
    harness.resume(4, steps=8)
    assert lags_of(harness, 4, 8) == [0, 1, 2, 2]


def test_what_was_not_exact_is_not_taken_up_as_if_it_were() -> None:
    harness = busy()
    harness.resume(1, selection={"name": "exact_lag", "lag": 1})
    assert harness.scheduler.buffer().groups == (), "3-0 would be of another version than 3-1"
    harness = busy()
    harness.answer("3-0", versions=(0, 1))
    harness.resume(1, selection={"name": "exact_lag", "lag": 1})
    assert harness.scheduler.buffer().groups == (), "3-0 is of two versions"


def test_what_another_selection_made_under_its_first_version_is_not_taken_up_as_exact() -> None:
    harness = SchedulerHarness(1, 3.0, selection="windowed")
    harness.admit()
    harness.finish(0, 1, 2, 3)
    assert harness.take(0) == [0]
    harness.resume(1, selection={"name": "exact_lag", "lag": 3})
    assert harness.scheduler.buffer().groups == ()


def test_an_aborted_response_continues_over_a_resume_if_its_weights_are_known() -> None:
    harness = SchedulerHarness(2, 1.5)
    harness.admit()
    tokens = partial(0, 0, 1)
    harness.scheduler.on_abort(Aborted(id="2-1", partial=tokens), 2)
    harness.finish(0, 1)
    assert harness.take(0) == [0, 1]
    saved = harness.scheduler
    assert "2-1" in harness.resume(1)
    assert same(harness.asked["2-1"].prefix, tokens)
    harness.scheduler = saved
    harness.resume(1, oldest=1)
    assert 2 not in [group.index for group in harness.scheduler.buffer().groups]


def test_patience_with_equal_rewards_continues_after_a_resume() -> None:
    harness = SchedulerHarness(1, 0.0, dynamic_sampling=True)
    for group in range(11):
        harness.admit()
        if group == 6:
            harness.resume(0)
        harness.answer(f"{group}-0", f"{group}-1", reward=0.5)
    assert harness.take(0) == [10]


def test_order_of_finishing_continues_after_a_resume() -> None:
    harness = SchedulerHarness(1, 2.0, selection="windowed")
    harness.admit()
    harness.finish(1)
    harness.resume(0)
    harness.finish(0)
    batch = harness.scheduler.take(0)
    assert batch is not None
    assert indices(batch) == [1]


def test_replay_draws_over_a_resume_what_it_would_have_drawn() -> None:
    def ids(stop: int | None) -> list[list[str]]:
        harness = SchedulerHarness(
            2, 0.0, selection={"name": "replay", "recent": 0.3, "per_prompt": 3}
        )
        found = []
        for version in range(12):
            if version == stop:
                harness.resume(version)
            harness.scheduler.advance(version)
            for request in harness.admit():
                harness.answer(request.id, versions=(version,))
            batch = harness.scheduler.take(version)
            assert batch is not None
            found.append([sample.id for sample in samples_of(batch)])
        return found

    through = ids(None)
    assert sum("@" in one for taken in through[7:] for one in taken) > 8, (
        "it is replay that is looked at"
    )
    assert ids(7) == through
    harness = SchedulerHarness(2, 0.0, selection={"name": "replay", "recent": 0.3})
    harness.admit()
    harness.finish(0, 1)
    harness.take(0)
    harness.resume(1, selection="oldest_first")
    assert harness.scheduler.buffer().stored == (), "a run without replay has no use for it"


def test_a_buffer_stays_as_it_was_when_it_was_taken() -> None:
    harness = SchedulerHarness(2, 1.0, selection={"name": "windowed"})
    harness.admit()
    harness.finish(0)
    harness.answer("1-1")
    taken = harness.scheduler.buffer()
    before = buffer_bytes(taken)
    harness.answer("1-0")
    harness.finish(2)
    harness.scheduler.on_abort(Aborted(id="3-0", partial=partial(0)), 3)
    harness.take(0)
    assert buffer_bytes(taken) == before

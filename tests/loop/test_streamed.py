"""Statements about whole runs with streamed groups (`flow.stream: groups`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from megatron_async_rl.flow.buffer import read_buffer
from megatron_async_rl.flow.errors import RewardFailed
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.recorded import RecordedBatches
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog.events import read_status
from megatron_async_rl.watchdog.watch import STOP
from tests.loop.one_process import GROUPS, Crash, EngineDied, Engines, LoopEngine, OneProcess
from tests.loop.replays import KEPT, repeated, replaying, run
from tests.loop.test_loop import lines, require_same, require_whole, weights_of

STEPS = 3
STREAMED = ("flow.async_ratio=0", "flow.stream=groups")
EVERY_STEP = ("checkpoint.every=1",)
ORDER = (2, 0, 3, 1)
"""Order in which the groups of a step finish, each alone in a part; the last completes the
batch."""
PART_WAIT_S = 15.0


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("streamed")) as process:
        yield process


@dataclass
class Parts:
    """Parts that the policy accumulates, and engines that wait for them.

    An engine answers the group at place p of ORDER once p parts of its step were accumulated, so
    every run has the same parts. at_part: called with (version, number) after each part.
    """

    at_part: Callable[[int, int], object] = lambda version, number: None
    seen: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    """(version, number, ids) of each part."""
    counts: dict[int, int] = field(default_factory=dict)

    def prepare(self, engine: LoopEngine) -> None:
        answer = engine._answer

        async def waits(request: Request) -> None:
            step, place = divmod(request.group, GROUPS)
            waits_until = time.monotonic() + PART_WAIT_S
            if request.sampling is None:
                while self.counts.get(step, 0) < ORDER.index(place):
                    # The assertions of a test name what is missing better than a hang.
                    if time.monotonic() > waits_until:
                        break
                    await asyncio.sleep(0.002)
            await answer(request)

        engine._answer = waits  # type: ignore[method-assign]

    def watch(self, patch: pytest.MonkeyPatch) -> Parts:
        accumulate = Policy.accumulate

        def seen(policy: Policy, part: RankBatch) -> None:
            accumulate(policy, part)
            number = self.counts.get(part.version, 0)
            self.seen.append((part.version, number, tuple(part.ids.to_pylist())))
            self.counts[part.version] = number + 1
            self.at_part(part.version, number)

        patch.setattr(Policy, "accumulate", seen)
        return self


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts().watch(monkeypatch)


@pytest.fixture(scope="module")
def streamed(loop: OneProcess) -> Path:
    """Return the folder of a run with streamed groups without disturbances."""
    with pytest.MonkeyPatch.context() as patch:
        parts = Parts().watch(patch)
        config = loop.config("streamed", *STREAMED, *KEPT)
        return run(loop, config, engines=Engines(prepare=parts.prepare))


def in_order(steps: int = STEPS) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return the parts of a run in which each group but the last of a step is a part."""
    return [
        (step, number, tuple(f"{GROUPS * step + place}-{k}" for k in range(2)))
        for step in range(steps)
        for number, place in enumerate(ORDER[:-1])
    ]


def test_groups_train_while_the_others_of_their_step_are_sampled(
    loop: OneProcess, parts: Parts, streamed: Path
) -> None:
    run_dir = loop.run(loop.config("parts", *STREAMED), Engines(prepare=parts.prepare))
    require_whole(loop, run_dir)
    assert parts.seen == in_order()
    rows = lines(run_dir / "metrics.jsonl")
    assert [row["flow/parts"] for row in rows] == [GROUPS] * STEPS
    assert [row["lag/max"] for row in rows] == [0] * STEPS
    assert all(np.flatnonzero(row["lag/histogram"]).tolist() == [0] for row in rows)
    require_same(run_dir, weights_of(streamed))


def test_a_streamed_run_learns_what_a_synchronous_run_learns(
    loop: OneProcess, streamed: Path
) -> None:
    synchronous = loop.run(loop.config("synchronous", "flow.async_ratio=0"), Engines())
    expected = weights_of(synchronous)
    for name, tensor in weights_of(streamed).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    found, rows = lines(streamed / "metrics.jsonl"), lines(synchronous / "metrics.jsonl")
    for name in ("policy/loss", "policy/grad_norm", "reward/mean", "ratio/ess", "lag/mean"):
        assert [row[name] for row in found] == pytest.approx(
            [row[name] for row in rows], rel=1e-4, abs=1e-6
        ), name


@pytest.mark.parametrize("crash", [("after await_batch", 6), ("publish", 3)])
def test_a_resume_in_the_middle_of_a_step_repeats_the_whole_step(
    loop: OneProcess, parts: Parts, streamed: Path, crash: tuple[str, int]
) -> None:
    config = loop.config(f"crashed {crash}", *STREAMED, *EVERY_STEP)
    with pytest.raises(Crash):
        loop.run(config, Engines(prepare=parts.prepare), crashes_at=crash)
    before = parts.seen[:]
    assert before == in_order()[: len(before)]
    step = before[-1][0]
    parts.seen.clear()
    parts.counts.clear()
    require_whole(loop, loop.run(config, Engines(prepare=parts.prepare)))
    assert parts.seen == [one for one in in_order() if one[0] >= step]
    require_same(config.run.dir, weights_of(streamed))
    recorded, undisturbed = RecordedBatches(config.run.dir), RecordedBatches(streamed)
    for number in range(1, STEPS + 1):
        found, expected = recorded.batch(number), undisturbed.batch(number)
        assert found.samples["id"].equals(expected.samples["id"])
        assert found.parts == expected.parts == tuple(ORDER.index(place) for place in range(GROUPS))


def test_a_stop_in_the_middle_of_a_step_keeps_its_groups_for_the_next_start(
    loop: OneProcess, parts: Parts, streamed: Path
) -> None:
    config = loop.config("stopped", *STREAMED)
    config.run.dir.mkdir()
    stop = config.run.dir / STOP
    parts.at_part = lambda version, number: (version, number) == (1, 1) and stop.touch()
    loop.run(config, Engines(prepare=parts.prepare))
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.phase, status.step, status.checkpoint) == ("stopped", 1, "step_00000001")
    content = (config.run.dir / "checkpoint" / "step_00000001" / "buffer.arrow").read_bytes()
    finished = {group.index for group in read_buffer(content).groups if group.finished is not None}
    assert {GROUPS + place for place in ORDER[:2]} <= finished, "they were not consumed"

    stop.unlink()
    resumed = Engines()
    require_whole(loop, loop.run(config, resumed))
    asked = {request.group for engine in resumed.all for request in engine.asked}
    assert not finished & asked, "they are not sampled again"
    # The groups of the checkpoint arrive together, so the sum has another order.
    for name, tensor in weights_of(config.run.dir).items():
        np.testing.assert_allclose(tensor, weights_of(streamed)[name], rtol=1e-4, atol=1e-5)


def test_each_version_is_evaluated_with_its_own_weights_before_its_parts_train(
    loop: OneProcess, parts: Parts
) -> None:
    held_out = (
        f"data.eval={loop.root / 'held_out.jsonl'}",
        "eval.every=1",
        "eval.samples_per_prompt=1",
    )
    engines = Engines(prepare=parts.prepare)
    evaluated: list[tuple[int, int]] = []
    parts.at_part = lambda version, number: evaluated.append((version, engines.calls["evaluate"]))
    run_dir = loop.run(loop.config("evaluated", *STREAMED, *held_out), engines)
    require_whole(loop, run_dir)
    assert [line["version"] for line in lines(run_dir / "eval.jsonl")] == [0, 1, 2, 3]
    asked = [
        (version, request.id)
        for engine in engines.all
        for version, request in zip(engine.versions, engine.asked, strict=True)
        if request.sampling is not None
    ]
    assert len(asked) == len(set(asked)) == 4 * 3
    assert parts.seen == in_order()


def test_an_engine_lost_after_a_part_was_added_changes_no_weight(
    loop: OneProcess, parts: Parts, streamed: Path
) -> None:
    engines = Engines(prepare=parts.prepare)
    lost: list[LoopEngine] = []

    def lose(version: int, number: int) -> None:
        busy = [engine for engine in engines.all if engine._running]
        if (version, number) == (1, 1) and busy:
            lost.append(busy[0])
            busy[0].fail(EngineDied("after a part"))

    parts.at_part = lose
    run_dir = loop.run(loop.config("lost", *STREAMED), engines)
    require_whole(loop, run_dir)
    assert lost, "an engine was sampling"
    assert len(engines.all) == 3, "it was started again"
    assert parts.seen == in_order()
    require_same(run_dir, weights_of(streamed))


def test_failing_rewards_of_a_late_part_cost_nothing_but_themselves(
    loop: OneProcess, parts: Parts
) -> None:
    last = GROUPS + ORDER[-1]

    def fails(engine: LoopEngine) -> None:
        engine.reward = lambda request: None if request.group == last else 1.0

    def prepare(engine: LoopEngine) -> None:
        parts.prepare(engine)
        fails(engine)

    run_dir = loop.run(loop.config("failing", *STREAMED), Engines(prepare=prepare))
    require_whole(loop, run_dir)
    assert [row["reward/errors"] for row in lines(run_dir / "metrics.jsonl")] == [0, 2, 0]
    config = loop.config("failing whole", "flow.async_ratio=0")
    expected = weights_of(loop.run(config, Engines(prepare=fails)))
    for name, tensor in weights_of(run_dir).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_reward_that_must_not_fail_ends_the_step_before_it_changes_weights(
    loop: OneProcess, parts: Parts
) -> None:
    last = GROUPS + ORDER[-1]

    def prepare(engine: LoopEngine) -> None:
        parts.prepare(engine)
        engine.reward = lambda request: None if request.group == last else 1.0

    config = loop.config("ended", *STREAMED, *EVERY_STEP, "rollout.reward.on_error=stop")
    with pytest.raises(RewardFailed, match="no idea"):
        loop.run(config, Engines(prepare=prepare))
    assert parts.seen == in_order(2), "the other groups of the step were accumulated"
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.phase, status.step) == ("failed", 1)
    assert RecordedBatches(config.run.dir).last_step == 1
    parts.counts.clear()
    require_whole(loop, loop.run(config, Engines(prepare=parts.prepare)))


def test_a_replay_repeats_the_parts_and_so_the_bits(loop: OneProcess, streamed: Path) -> None:
    code, output = repeated(streamed)
    assert (code, output.splitlines()[-1]) == (0, "3 steps, identical bits")
    # Without the parts, the order of additions is that of a synchronous step.
    code, output = repeated(streamed, "flow.stream=none")
    assert code == 0, output
    assert "identical bits" not in output


def test_dynamic_sampling_replaces_groups_before_they_enter_a_part(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts().watch(monkeypatch)

    def prepare(engine: LoopEngine) -> None:
        engine.alter = lambda sample: sample
        engine.reward = lambda request: float(request.k) if request.group % 3 else 0.0

    config = loop.config("dynamic", *STREAMED, "flow.dynamic_sampling=true")
    run_dir = loop.run(config, Engines(prepare=prepare))
    rows = lines(run_dir / "metrics.jsonl")
    assert rows[-1]["flow/consumed"] == GROUPS * STEPS
    assert rows[-1]["flow/dropped_equal"] > 0
    groups = {int(name.partition("-")[0]) for _, _, ids in parts.seen for name in ids}
    assert all(group % 3 for group in groups), "no dropped group was accumulated"

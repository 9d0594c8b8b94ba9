"""The sample log alone proves where every group and every sample of a run ended, through crashes,
lost engines and dropped groups."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow import engine_task, sample_log
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import DataState
from megatron_async_rl.flow.sample_log import SampleLogWriter, open_sample_log
from megatron_async_rl.report.sample_browser import SampleBrowser
from megatron_async_rl.samples.frames import FOLDER, MARK_FILE, SegmentBroken
from megatron_async_rl.samples.segments import gaps_in, read_entries, read_table
from megatron_async_rl.samples.types import Request, Sample
from tests import sample_history
from tests.cases import looped
from tests.logged_samples import row, sample
from tests.sample_history import HistoryBroken, account
from tests.thorough import examples
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest
from tests.unit.flow_setup import WholeRewards, controller_of, flow, position, run, stage, until

CLOCK = itertools.count(1)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"async_ratio": 0.0},
    {"async_ratio": 1.0, "late": "drop"},
    {"async_ratio": 2.0, "late": "drop"},
    {"async_ratio": 2.0, "dynamic_sampling": True},
    {"async_ratio": 1.0, "dynamic_sampling": True, "late": "drop"},
    {"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5, "late": "drop"},
    {"async_ratio": 2.0, "selection": {"name": "exact_lag", "lag": 2}},
    {"async_ratio": 1.0, "selection": "replay"},
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)
    # The order on the disk is not what is shown here.
    monkeypatch.setattr(sample_log.OpenSegment, "sync", lambda self: None)


@pytest.mark.parametrize("seed", range(examples(5, 2)))
def test_every_group_of_a_run_ends_and_the_log_records_how(tmp_path: Path, seed: int) -> None:
    """Many histories of a few starts each: engines are lost, groups are late or equal, a start ends
    in a crash after any step, and the next continues from a checkpoint before it."""
    for number, settings in enumerate(SETTINGS):
        history = _History(
            tmp_path / f"{number}", flow(2, **settings), random.Random(f"{seed} {number}")
        )
        run(history.go)


class _History:
    def __init__(self, run_dir: Path, flow: FlowConfig, chance: random.Random) -> None:
        self.run_dir, self.flow, self.chance = run_dir, flow, chance
        self.replay = not isinstance(flow.selection, str) and flow.selection.name == "replay"
        self.of_groups = chance.random() < 0.3 and not self.replay

    async def go(self) -> None:
        saved: DataState | None = None
        version = 0
        for _ in range(3):
            self.launch = FakeLaunch(
                [self.engine() for _ in range(2)], again=lambda _: self.engine()
            )
            controller = self.controller()
            await controller.start(saved)
            await stage(controller, version)
            saved, at = saved, version
            for step in range(version, version + self.chance.randint(1, 4)):
                if self.chance.random() < 0.4:
                    engine = self.chance.choice(self.launch.engines)
                    engine.fail(RuntimeError("lost"))
                assert await controller.next_batch(step) is not None
                await controller.staged(step + 1, manifest(step + 1))
                at = step + 1
                if self.chance.random() < 0.4:
                    saved = await position(controller, buffer=self.chance.random() < 0.7)
                    saved = replace(saved, state=json.loads(json.dumps(saved.state)))
                    version = at
            await asyncio.sleep(self.chance.choice([0.0, 0.003]))
            await controller.close()
            waiting = [index for index, _ in controller._scheduler.pending()]
            self.check(waiting)

    def check(self, waiting: list[int]) -> None:
        history = account(self.run_dir, buffer=waiting, replay=self.replay)
        states = Counter(entry.state for entry in read_entries(self.run_dir))
        for kind in ("trained", "dropped"):
            shown = SampleBrowser(self.run_dir).answer({"kind": kind})["message"]
            count = f"{states[kind]:,} samples" if states[kind] else "no such sample"
            assert count in shown, "every reader derives the same states"
        assert not set(history.dropped) & set(waiting)

    def controller(self) -> Controller:
        whole = WholeRewards(lambda _: self.chance.choice([0.0, 0.002])) if self.of_groups else None
        controller = controller_of(self.launch, self.flow, whole=whole, restarts_per_hour=1000)
        controller._sample_log = open_sample_log(self.run_dir, SamplesConfig())
        return controller

    def engine(self) -> FakeEngine:
        slow = self.chance.choice([0.002, 0.02])
        engine = FakeEngine(lambda request: self.chance.choice([0.0, 0.001, slow]))
        engine.alter = lambda sample: replace(sample, finished_at=float(next(CLOCK)))
        engine.reward = lambda request: self.chance.choice([0.0, 1.0])
        return engine


def test_a_group_that_is_dropped_before_a_response_finished_has_a_row(tmp_path: Path) -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 60.0 if request.group == 0 else 0.0)
        controller = logged(engine, tmp_path, flow(2, 1.0, selection="windowed", late="drop"))
        await controller.start()
        await stage(controller, 0)
        for step in range(2):
            assert await controller.next_batch(step) is not None
            await stage(controller, step + 1)
        await controller.close()
        waiting = [index for index, _ in controller._scheduler.pending()]
        history = account(tmp_path, buffer=waiting)
        assert history.dropped == {0: "late"}

    run(body)


def test_a_late_group_that_a_crash_overtakes_leaves_no_sample_that_waits(tmp_path: Path) -> None:
    """Its second response finished after the checkpoint, which does not know the group any more."""

    async def body() -> None:
        gate = asyncio.Event()

        def delay(request: Request) -> float:
            return 30.0 if request.id == "0-1" else 0.0

        engine = FakeEngine(delay)
        first = logged(engine, tmp_path, flow(2, 1.0, selection="windowed", late="drop"))
        await first.start()
        await stage(first, 0)
        for step in range(2):
            assert await first.next_batch(step) is not None
            await stage(first, step + 1)
        assert first.stats()["dropped_late"] == 1
        saved = await position(first)
        before = first.stats()["samples"]
        await until(lambda: "0-1" not in first._fleet.slots[0].held)
        assert first.stats()["samples"] > before
        gate.set()
        await first.close()  # and all outcomes since the checkpoint are those of a lost history

        second = logged(FakeEngine(), tmp_path, flow(2, 1.0, selection="windowed", late="drop"))
        await second.start(saved)
        await stage(second, 2)
        assert await second.next_batch(2) is not None
        await second.close()
        waiting = [index for index, _ in second._scheduler.pending()]
        account(tmp_path, buffer=waiting)
        rows = read_table(tmp_path, "outcomes").to_pylist()
        assert not any(one["id"] == "0-1" for one in rows), "its own outcome went with the crash"
        states = {
            one.id: (one.state, one.reason) for one in read_entries(tmp_path) if one.group == 0
        }
        assert states == {"0-0": ("dropped", "late"), "0-1": ("dropped", "late")}
        shown = SampleBrowser(tmp_path).answer({"kind": "dropped"})
        assert "sample 0-0" in shown["html"]
        assert "sample 0-1" in shown["html"]

    run(body)


def logged(engine: FakeEngine, run_dir: Path, flow: FlowConfig) -> Controller:
    def timed(sample: Sample) -> Sample:
        return replace(sample, finished_at=float(next(CLOCK)))

    engine.alter = timed
    controller = controller_of([engine], flow)
    controller._sample_log = open_sample_log(run_dir, SamplesConfig())
    return controller


# What the proof finds


def written(run_dir: Path, write: Callable[[SampleLogWriter], None]) -> Path:
    log = SampleLogWriter(run_dir, SamplesConfig())
    log.begin(0)
    log.admitted(0, 1)
    for k in range(2):
        log.finished(row(sample(0, k)))
    write(log)
    log.close()
    return run_dir


def both() -> list[Any]:
    return [row(sample(0, k)) for k in range(2)]


@looped(
    ("write", "fault"),
    [
        (lambda log: log.trained([0], [both()[:1]], 1), "sample 0-1 waits, and its group does not"),
        (
            lambda log: log.trained([0, 1], [both()], 1),
            "group 1 is consumed and was never",
        ),
        (lambda log: log.trained([], [both()], 1), "step 1 consumes groups [] and trains samples"),
        (
            lambda log: [log.trained([0], [both()], 1), log.group_dropped(0, 2, "late")],
            "after it has",
        ),
        (lambda log: [log.group_dropped(0, 2, "late"), log.admitted(0, 3)], "after it has ended"),
        (
            lambda log: log.dropped(both()[0], 1, "late"),
            "sample 0-0 is dropped (late) and its group",
        ),
        (lambda log: log.group_dropped(0, 1, ""), "group 0 is dropped without a reason"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(
    tmp_path: Path, write: Callable[[SampleLogWriter], None], fault: str
) -> None:
    with pytest.raises(HistoryBroken) as refused:
        account(written(tmp_path, write))
    assert fault in str(refused.value)


def test_a_group_that_is_in_no_buffer_and_has_no_end_is_a_fault(tmp_path: Path) -> None:
    run_dir = written(tmp_path, lambda log: None)
    assert account(run_dir, buffer=[0]).waiting == {0}
    for buffer in ([], [0, 1]):
        with pytest.raises(HistoryBroken, match="wait and the log does not have them"):
            account(run_dir, buffer=buffer)
    assert (run_dir / FOLDER).is_dir()


def trained_segments(run_dir: Path) -> int:
    """Write four segments of a trained group each, with an evaluation that was begun twice; return
    the position."""
    at = 0
    for group in range(4):
        log = SampleLogWriter(run_dir, SamplesConfig())
        log.begin(at)
        prompt = sample(0, 0).prompt
        if group < 2:
            asked = replace(sample(0, 0), id="-1-0", finished_at=float(next(CLOCK)))
            log.evaluated([(prompt, [row(asked, -1)])], 0)
        rows = [row(sample(group, k), group) for k in range(2)]
        log.admitted(group, group + 1)
        for one in rows:
            log.finished(one)
        log.trained([group], [rows], group + 1)
        log.close()
        at = log.position
    return at


def test_segments_that_were_deleted_are_a_fault(tmp_path: Path) -> None:
    at = trained_segments(tmp_path)
    folder = tmp_path / FOLDER
    assert len(account(tmp_path, position=at).consumed) == 4
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    for segment, missing in ((1, "5 to 9"), (2, "10 to 13"), (3, "14 to 17")):
        for path in folder.glob(f"*{segment}.segment"):
            path.unlink()
        with pytest.raises(HistoryBroken, match=f"outcomes {missing} are missing"):
            account(tmp_path, position=at)
        for path, content in kept.items():
            path.write_bytes(content)

    for table in ("samples", "outcomes"):
        (folder / f"{table}-000002.segment").unlink()
        with pytest.raises(SegmentBroken, match=f"{table}-000002.segment.*is missing"):
            account(tmp_path)
        for path, content in kept.items():
            path.write_bytes(content)

    for path in folder.glob("*3.segment"):
        path.unlink()
    with pytest.raises(HistoryBroken, match="ends with segment 2, and the log had segments up to"):
        account(tmp_path)  # its mark shows it, without a checkpoint
    for path, content in kept.items():
        path.write_bytes(content)

    for path in folder.glob("*0.segment"):  # as the writer makes room
        path.unlink()
    assert account(tmp_path, position=at).consumed == {1: 2, 2: 3, 3: 4}


def test_an_outcome_without_its_sample_is_a_fault(tmp_path: Path) -> None:
    """The newest file, while it is open, may end anywhere behind the log's mark."""
    trained_segments(tmp_path)
    (tmp_path / MARK_FILE).unlink()
    path = tmp_path / FOLDER / "samples-000003.segment"
    path.with_suffix(".open").write_bytes(path.read_bytes()[:50])
    path.unlink()
    with pytest.raises(HistoryBroken, match="is of sample 3-1, which is missing"):
        account(tmp_path)


def test_gaps_in_the_numbers_are_named_from_the_first_to_the_last_that_must_be_there() -> None:
    def gaps(numbers: list[int], **known: int | None) -> str:
        return gaps_in([np.array(numbers, np.int64)], **{"first": None, **known})

    assert gaps([]) == gaps([], first=0) == gaps([3, 4], first=3, end=5) == ""
    assert gaps([3, 5]) == gaps([3, 5], first=3, end=6) == "4 to 4"
    assert gaps([3, 7], first=1, end=10) == "1 to 2, 4 to 6, 8 to 9"
    assert gaps([], first=0, end=3) == "0 to 2"
    five = "1 to 1, 3 to 3, 5 to 5, 7 to 7, 9 to 9"
    assert gaps([0, 2, 4, 6, 8, 10]) == five
    assert gaps([0, 2, 4, 6, 8, 10, 12]) == f"{five}, 1 more ranges"


def test_two_outcomes_of_one_number_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = written(tmp_path, lambda log: log.trained([0], [both()], 1))
    account(run_dir)
    table = read_table(run_dir, "outcomes")
    twice = pa.concat_tables([table, table.slice(1, 1)])
    monkeypatch.setattr(sample_history, "read_table", lambda *_: twice)
    with pytest.raises(HistoryBroken, match="two outcomes have the number 1"):
        account(run_dir)

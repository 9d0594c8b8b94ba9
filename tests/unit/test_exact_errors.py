"""Texts of errors about samples, groups and versions, and what is counted without an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.flow.buffer import earlier_format
from megatron_async_rl.flow.errors import (
    BatchTimeout,
    EngineFailed,
    EngineMemoryOut,
    LateGroup,
    WeightsChanged,
    batch_timeout,
)
from megatron_async_rl.flow.evaluation import pass_at_k
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples import recorded as recorded_module
from megatron_async_rl.samples import segments
from megatron_async_rl.samples.frames import (
    FrameWriter,
    SegmentBroken,
    TableName,
    path_of,
    read_frames,
)
from megatron_async_rl.samples.rank_batch import routed_experts_of
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches
from megatron_async_rl.samples.segments import gaps_in, read_batches
from megatron_async_rl.samples.types import PartialResponse, Prompt
from tests import sample_history
from tests.logged_samples import logged_run


def text_of(error: type[BaseException], act: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        act()
    return str(raised.value)


def test_calls_of_the_scheduler_out_of_order_are_refused() -> None:
    scheduler = Scheduler(
        FlowConfig(prompts_per_step=2, group_size=2, async_ratio=1.0),
        steps=3,
        fresh_steps=0,
        seed=0,
        scored_whole=False,
    )
    assert text_of(RuntimeError, lambda: scheduler.advance(2)) == "advance(2) before start"
    scheduler.start(1)
    again = text_of(RuntimeError, lambda: scheduler.start(2))
    assert again == "started already, at version 1"
    scheduler.advance(1)
    scheduler.advance(3)
    assert scheduler.version == 3
    assert text_of(ValueError, lambda: scheduler.advance(2)) == (
        "weight versions only grow: cannot advance from 3 to 2"
    )
    assert scheduler.version == 3
    for version in (0, 2):
        assert text_of(ValueError, lambda version=version: scheduler.take(version)) == (
            f"the batch of version {version} was requested; the next one trains 1"
        )


def test_the_errors_of_a_flow_have_their_texts_and_marks() -> None:
    assert str(earlier_format()) == (
        "run.dir\n  buffer.npz of the checkpoint is of an earlier version and cannot be read\n"
        "  fix: remove the file, and its content is sampled again"
    )
    assert str(WeightsChanged.at(3, "aa", "bb")) == (
        "checkpoint\n  the weights of step 3 had the digest aa when they were saved, and have bb"
        " after they were loaded\n  fix: remove this checkpoint, so that the run resumes from an"
        " older one, and check memory and disks of these machines"
    )
    assert [one.timed_out for one in (BatchTimeout, EngineFailed, EngineMemoryOut)] == [
        *(True, True, False)
    ]
    out = EngineMemoryOut("none left", "publish")
    assert (str(out), out.phase, out.out_of_memory) == ("none left", "publish", "device")

    late = [
        LateGroup(index=at, prompt=f"p{at}", seconds=9.25 - at, engines=[at, 7][: at % 3])
        for at in range(2)
    ]
    late.append(LateGroup(index=2, prompt="p2", seconds=1.0, engines=(), unscored=True))
    assert str(batch_timeout(4, 30.0, late, [3, -1])) == (
        "no response grew for the batch of version 4 in 30 s; 3 groups are running, the engines"
        " hold version 3, -1\n"
        "  group 0 (prompt p0): 9.2 s, on no engine yet\n"
        "  group 1 (prompt p1): 8.2 s, on engine 1\n"
        "  group 2 (prompt p2): 1.0 s, waits for its reward (per: group)"
    )
    shown = str(batch_timeout(4, 30.0, late * 4, [])).splitlines()
    assert shown[-1].startswith("  and ")
    assert int(shown[-1].split()[1]) == 12 - (len(shown) - 2)


def test_pass_at_k_needs_k_responses() -> None:
    for samples, k, least in ((3, 4, 4), (3, 0, 1), (0, 1, 1), (3, -1, 1)):
        found = text_of(ValueError, lambda k=k, samples=samples: pass_at_k(samples, 0, k))
        assert found == (
            f"pass@{k} needs at least {least} responses per prompt, and k from 1; there are"
            f" {samples} responses"
        )
    assert [pass_at_k(3, passed, 3) for passed in range(4)] == [0.0, 1.0, 1.0, 1.0]
    assert pass_at_k(4, 1, 2) == 0.5


def test_prompts_and_partial_responses_have_tokens() -> None:
    assert text_of(ValueError, lambda: Prompt(id="p", text="", token_ids=())) == (
        "prompt 'p' has no tokens"
    )
    for ids, logprobs, versions, lengths in (
        (0, 0, 0, [0]),
        (2, 1, 2, [1, 2]),
        (1, 1, 0, [0, 1]),
        (1, 1, 3, [1, 3]),
    ):

        def partial(ids: int = ids, logprobs: int = logprobs, versions: int = versions) -> Any:
            return PartialResponse(
                response_ids=np.zeros(ids, np.int32),
                behavior_logprobs=np.zeros(logprobs, np.float32),
                versions=np.zeros(versions, np.int32),
            )

        assert text_of(ValueError, partial) == (
            "a partial response has at least one token, each with a log-prob and a version; got"
            f" lengths {lengths}"
        )


def test_experts_of_different_models_are_refused() -> None:
    def experts(*rows: bytes | None) -> Any:
        lengths = np.full(len(rows), 3)  # two tokens feed the model
        column = pa.array(rows, pa.large_binary())
        return routed_experts_of(column, lengths, np.ones(len(rows), np.int64))

    found, has = experts(b"abcd", None)
    assert found.tobytes() == b"abcd" + bytes(2 * 4)
    assert has.tolist() == [True, False]
    assert experts(None)[0] is None
    for rows, widths in (((b"ab", b"abcd"), [1.0, 2.0]), ((b"abc",), [1.5])):
        assert text_of(ValueError, lambda rows=rows: experts(*rows)) == (
            f"routed experts of {widths} bytes for a token: not of one model"
        )


def test_steps_without_their_rows_are_faults_unless_the_log_was_cut() -> None:
    def faults(consumed: dict[int, int], trained: Any, **how: bool) -> list[str]:
        counted = {step: Counter(samples) for step, samples in trained.items()}
        return sample_history._steps(consumed, counted, **{"replay": False, "whole": True, **how})

    assert faults({1: 1, 2: 1}, {1: {1: 2, 2: 2}}) == []
    assert faults({1: 1, 2: 1}, {1: {1: 2, 2: 3}}) == [
        "step 1 consumes groups [1, 2] and trains samples of {1: 2, 2: 3}"
    ]
    nothing = "step 1 consumes groups [1] and trains samples of {}"
    unknown = "step 2 consumes groups [] and trains samples of {7: 1}"
    cut = ({1: 1, 3: 3}, {2: {7: 1}, 3: {4: 1}})
    other = "step 3 consumes groups [3] and trains samples of {4: 1}"
    assert faults(*cut) == [nothing, unknown, other]
    assert faults(*cut, whole=False) == [other]
    assert faults({1: 1, 2: 1}, {1: {7: 3, 8: 1}}, replay=True) == []
    assert faults({1: 1, 2: 1}, {1: {7: 3}, 2: {7: 2}}, replay=True) == [
        "step 1 trains 3 samples for 2 groups",
        "step 2 trains 2 samples for 0 groups",
    ]


def test_numbers_that_are_missing_are_listed_as_ranges() -> None:
    def gaps(*numbers: int, first: int | None = 0, end: int = 0) -> str:
        return gaps_in([np.array(numbers, np.int64)], first=first, end=end)

    assert gaps() == gaps(0, 1) == gaps(0, 1, end=2) == gaps(5, 6, first=None) == ""
    assert gaps(end=1) == "0 to 0"
    assert gaps(2, 2, 4, end=6) == "0 to 1, 3 to 3, 5 to 5"
    assert gaps(2, 4, first=2, end=5) == "3 to 3"
    assert gaps(*range(0, 12, 2), end=11) == "1 to 1, 3 to 3, 5 to 5, 7 to 7, 9 to 9"
    assert gaps(*range(0, 16, 2)) == "1 to 1, 3 to 3, 5 to 5, 7 to 7, 9 to 9, 2 more ranges"


def test_a_log_without_a_batch_has_no_step_and_no_experts(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for table in ("samples", "outcomes"):
        FrameWriter(path_of(folder, table, 0, ".open")).close()
    log = RecordedBatches(tmp_path)
    assert (log.last_step, log.has_experts()) == (0, False)
    assert text_of(NotRecorded, lambda: log.batch(1)) == f"{folder} has no batch of step 1"


def test_a_segment_that_is_deleted_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RecordedBatches(logged_run(tmp_path))
    monkeypatch.setattr(recorded_module, "CACHED_BATCHES", 1)
    first = log.batch(1)
    assert len(log._batches) == 1
    log._batches.clear()
    for path in (tmp_path / "samples").iterdir():
        path.unlink()
    assert text_of(NotRecorded, lambda: log.batch(1)) == (
        f"{tmp_path / 'samples'} no longer has segment 0"
    )
    assert first.samples.num_rows == 4


def damage(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(SegmentBroken) as raised:
        act()
    return raised.value.path.name, raised.value.what


def test_a_file_of_other_content_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()

    def written(table: TableName, number: int, payload: bytes) -> tuple[str, str]:
        writer = FrameWriter(path_of(folder, table, number, ".open"))
        writer.write(payload)
        writer.close()
        return damage(lambda: list(read_batches(folder, table, number)))

    for table, payload in (("samples", b"x"), ("outcomes", b"")):
        name, what = written(table, 0, payload)
        assert name == f"{table}-000000.segment"
        assert what.startswith("holds something other than record batches: ")
    schema = pa.schema([pa.field("seq", pa.int64())])
    other = segments.payload_of(pa.RecordBatch.from_arrays([pa.array([1])], schema=schema))
    found = ("outcomes-000001.segment", "has other columns than a log: seq")
    assert written("outcomes", 1, other) == found
    (tmp_path / "folder").mkdir()
    found = ("folder", "cannot be read: Is a directory")
    assert damage(lambda: list(read_frames(tmp_path / "folder"))) == found

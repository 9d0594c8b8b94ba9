"""Calls of one rank to its staging, to rank 0's part and to its schedule, in order."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async_rl.flow import trainer_rank
from megatron_async_rl.flow.device_phases import DevicePhases
from megatron_async_rl.flow.errors import WeightsChanged
from megatron_async_rl.flow.evaluation import EvalSchedule, LossResult
from megatron_async_rl.flow.ipc_buckets import BufferRequest
from megatron_async_rl.flow.trainer_rank import TrainerRank, expected_digest, weights_form
from megatron_async_rl.weights.version_digest import version_digest

DIGESTS = {"w": "d1", "v": "d2"}


class Calls:
    """Object whose methods record their names and arguments in `log`; `answers`: their results by
    name."""

    def __init__(self, log: list[Any], prefix: str = "", **answers: Any) -> None:
        self._log, self._prefix, self._answers = log, prefix, answers

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            every = (*given, *(f"{key}={value}" for key, value in named.items()))
            self._log.append((self._prefix + name, *(one for one in every if not callable(one))))
            answer = self._answers.get(name)
            return answer(*given, **named) if callable(answer) else answer

        return call


class Alone:
    rank, device_type, device = 0, "cpu", "cpu"

    def from_rank_zero(self, make: Any) -> Any:
        return make()

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, ("other", "1"), mine]


def rank_of(log: list[Any], *, rank0: dict[str, Any] | None = None, **config: Any) -> TrainerRank:
    one: Any = TrainerRank.__new__(TrainerRank)
    settings = {"has_engines": True, "colocated": False, "supervised": False, "eval": None}
    one.config = SimpleNamespace(**{**settings, "run": SimpleNamespace(steps=6), **config})
    one.layout = Alone()
    engines = Calls(log, "engines.")
    one.rank0 = Calls(log, **(rank0 or {}))
    one.rank0.engines = engines
    one.version, one.schedule, one.memory = 3, None, None
    one.devices = DevicePhases("policy", "train")
    one._staging = one._digests = one._shards = one._expected = None
    one._digest = ""
    return one  # type: ignore[no-any-return]


def shards(log: list[Any]) -> Any:
    return SimpleNamespace(buckets="buckets", parts=lambda bucket=None: f"parts of {bucket}")


def test_the_digest_of_the_first_version_alone_is_compared_with_the_checkpoints() -> None:
    log: list[Any] = []
    one = rank_of(log)
    one._expected = version_digest(DIGESTS)
    one._record_digest(DIGESTS)
    other = {**DIGESTS, "w": "x"}
    one._record_digest(other)
    assert one.digest == version_digest(other) != version_digest(DIGESTS)
    assert log == [
        ("digested", version_digest(DIGESTS), DIGESTS),
        ("digested", version_digest(other), other),
    ]
    log.clear()
    one._expected = version_digest(other)
    with pytest.raises(WeightsChanged) as raised:
        one._record_digest(DIGESTS)
    expected = WeightsChanged.at(3, version_digest(other), version_digest(DIGESTS))
    assert str(raised.value) == str(expected)
    assert log == []


def test_a_version_is_announced_after_its_digest_is_recorded() -> None:
    log: list[Any] = []
    one: Any = rank_of(log)
    one._stage()
    assert log == [], "nothing is exported"
    one._shards = shards(log)
    one._digests = Calls(log, "digests.", digests=DIGESTS)
    one._stage()
    recorded = ("digested", version_digest(DIGESTS), DIGESTS)
    assert log == [("digests.digests", 3, "buckets", "parts of None"), recorded]

    manifest = SimpleNamespace(digests=DIGESTS)

    def staged(version: int, buckets: str, parts: str, when_free: Any) -> Any:
        when_free()
        return manifest

    for on_demand in (False, True):
        log.clear()
        one._staging = Calls(log, "staging.", stage=staged)
        one._staging.on_demand = on_demand
        one._meanwhile = lambda wait: wait()
        one._stage()
        loads = [("engines.until_loaded", 3)] if on_demand else []
        assert log == [
            ("staging.stage", 3, "buckets", "parts of None"),
            ("engines.until_released", 3),
            recorded,
            ("staged", manifest),
            *loads,
        ]


def test_a_request_is_served_for_the_present_version_alone() -> None:
    log: list[Any] = []
    one: Any = rank_of(log)
    one._shards = shards(log)
    staging = Calls(log, "staging.", fill="the bucket")
    one._serve(staging, BufferRequest(version=3, number=None))
    one._serve(staging, BufferRequest(version=2, number=1))
    one._serve(staging, BufferRequest(version=3, number=1, place=1))
    assert log == [
        *(("staging.release",), ("buffer_filled", None), ("buffer_filled", None)),
        *(("staging.fill", 1, 1, "parts of 1"), ("buffer_filled", "the bucket")),
    ]


def test_ranks_that_do_not_wait_fill_buckets_until_rank_0_has_its_answer() -> None:
    log: list[Any] = []
    one: Any = rank_of(log)
    one._staging = Calls(log, "staging.")
    one._staging.on_demand = False
    one._meanwhile(lambda: log.append("waited"))
    assert log == ["waited"]
    one._staging.on_demand = True
    requests = iter(["first", "second", None])
    one.rank0.engines = SimpleNamespace(next_buffer_request=lambda made: next(requests))
    one._serve = lambda staging, request: log.append(request)
    one._meanwhile(lambda: log.append("done"))
    assert sorted(log[1:]) == ["done", "first", "second"]
    # An error of the wait is raised after the last request.
    requests = iter(["third", None])

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        one._meanwhile(fail)
    assert log[-1] == "third"
    one.layout.rank = 1
    requests = iter([None])
    one.layout.from_rank_zero = lambda make: None
    one._meanwhile(fail)


def test_versions_that_are_due_are_evaluated_and_the_last_is_waited_for() -> None:
    for version, known, begins, waits in (
        (0, {}, True, False),
        (2, {}, True, False),
        (2, {2: 0.5}, False, False),
        (3, {}, False, False),
        (6, {}, True, True),
        (6, {6: 0.5}, False, True),
    ):
        log: list[Any] = []
        one: Any = rank_of(log)
        one.evaluate(None)
        assert log == [], "without held-out prompts"
        one.schedule = EvalSchedule(every=2, steps=6, means=known)
        one.version = version
        one.evaluate(None)
        waiting = [("enter", "waiting", "evaluation")] if begins or waits else []
        beginning = [
            ("enter", "evaluating", ""),
            ("set_status", "evaluating", f"held-out prompts, version {version}"),
            ("engines.evaluate", version),
        ]
        taking = [("take_evaluations", f"wait={waits}")]
        assert log == [*waiting, *(beginning if begins else []), *taking]
        assert one.schedule._begun == (version if begins else None)


def test_a_supervised_run_measures_every_set_in_turn() -> None:
    log: list[Any] = []
    one: Any = rank_of(log, supervised=True)
    one.config.held_out_files = [SimpleNamespace(name=name) for name in ("a", "b")]
    given = {0: iter(["a1", "a2"]), 1: iter(["b1"])}
    one.rank0.given = SimpleNamespace(held_out=lambda place, version: given[place])

    def mean_loss(batches: Any) -> tuple[float, int]:
        found = []
        while (batch := batches()) is not None:
            found.append(batch)
        log.append(found)
        return float(len(found)), 7 * len(found)

    one.schedule = EvalSchedule(every=2, steps=6, means={})
    one.evaluate(mean_loss)
    assert log == []
    one.version = 4
    one.evaluate(mean_loss)
    assert log[:-1] == [
        ("enter", "evaluating", ""),
        ("set_status", "evaluating", "held-out responses, version 4"),
        *(["a1", "a2"], ["b1"]),
    ]
    name, result = log[-1]
    assert name == "record"
    (other,) = result.others
    assert [(one.version, one.name, one.loss, one.tokens) for one in (result, other)] == [
        *((4, "a", 2.0, 14), (4, "b", 1.0, 7))
    ]
    assert isinstance(result, LossResult)
    assert result.seconds >= 0
    assert result.seconds == other.seconds
    one.layout.rank = 1
    assert one._batches_of(0)() is None
    assert log[-1] == ("next_batch",)


def test_a_checkpoint_has_the_whole_state_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_rank, "dump", lambda config: "resolved: config\n")
    monkeypatch.setattr(trainer_rank, "weights_form", lambda *_: "form")
    position = SimpleNamespace(state={"next": 1}, data={"digest": "d"}, buffer=b"groups")
    for schedule, supervised, buffer, takes in (
        (None, False, b"groups", []),
        ({0: 0.5}, False, None, [("take_evaluations", "wait=False")]),
        ({0: 0.5}, True, b"", []),
    ):
        log: list[Any] = []
        position.buffer = buffer
        one: Any = rank_of(
            log,
            supervised=supervised,
            model=SimpleNamespace(path=tmp_path),
            rank0={"position": position, "record_of": {"metrics": 3}},
        )
        one._digest = "0a"
        if schedule is not None:
            one.schedule = EvalSchedule(every=1, steps=6, means=schedule)
        state, files = one.state()
        assert state == {
            "version": 3,
            "data": {"next": 1},
            "evaluated": schedule or {},
            "model_path": str(tmp_path),
            "weights": {"digest": "0a", "form": "form"},
        }
        expected = {
            trainer_rank.CONFIG_FILE: b"resolved: config\n",
            trainer_rank.RECORD_FILE: b'{\n "metrics": 3\n}',
            trainer_rank.DATA_FILE: b'{\n "digest": "d"\n}',
        }
        assert files == expected | ({} if buffer is None else {trainer_rank.BUFFER_FILE: buffer})
        assert log == [
            *(("set_status", "checkpointing"), ("enter", "checkpointing", "")),
            *takes,
            *(("position",), ("record_of", position)),
        ]
    log.clear()
    one = rank_of(log, model=SimpleNamespace(path=tmp_path), rank0={"record_of": {}})
    one.schedule = EvalSchedule(every=1, steps=6, means={})
    one.schedule.begin(2)
    state, files = one.state()
    assert (state["data"], sorted(files)) == (
        None,
        sorted([trainer_rank.CONFIG_FILE, trainer_rank.RECORD_FILE]),
    )
    assert ("take_evaluations", "wait=True") in log


def test_engines_end_before_the_memory_that_they_read() -> None:
    log: list[Any] = []
    one: Any = rank_of(log)
    one._staging = Calls(log, "staging.")
    one.close()
    assert log == [("close",), ("staging.close",)]
    assert one.held() == {}
    one.memory = SimpleNamespace(held=lambda: {"parameters": 3})
    assert one.held() == {"parameters": 3}


def test_the_gpus_of_all_ranks_are_named_by_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_rank, "gpu_of_rank", lambda: "0")
    monkeypatch.setattr(trainer_rank.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(trainer_rank, "weights_form", lambda *_: "form")
    for device, gpus in (("cpu", {}), ("cuda", {"here": ["0", "0"], "other": ["1"]})):
        log: list[Any] = []
        one: Any = rank_of(log, eval=SimpleNamespace(every=2))
        one.layout.device_type = device
        resumed = {"weights": {"digest": "0a", "form": "form"}, "evaluated": {0: 0.5}}
        one.begin(4, resumed, 2)
        assert (one._expected, one.version) == ("0a", 4)
        assert one.schedule.means == {0: 0.5}
        assert one.schedule.due(6)
        assert not one.schedule.due(5)
        rest = (f"device_type={device}", f"gpus={gpus}")
        assert log == [("open", 4, one.schedule, resumed, "oldest=2", *rest)]


def test_weights_have_the_same_form_if_their_bits_do_not_depend_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_rank, "arithmetic_of", lambda device: f"{device} AVX9")

    def form(lora: object = None, fp8: object = None) -> str:
        config: Any = SimpleNamespace(
            model=SimpleNamespace(dtype="float32"),
            engine_dtype="bfloat16",
            policy=SimpleNamespace(lora=lora, fp8=fp8, parallel="ranks=2"),
        )
        return weights_form(config, Alone())  # type: ignore[arg-type]

    assert form() == "float32 bfloat16"
    machine = f"float32 bfloat16, cpu AVX9, torch {torch.__version__}, ranks=2"
    assert form(lora="r=4") == form(fp8="blockwise") == machine
    saved = {"weights": {"digest": "0a", "form": "this"}}
    assert [expected_digest(saved, one) for one in ("this", "that")] == ["0a", None]
    assert expected_digest({}, "this") is None


def test_a_wait_in_a_thread_has_its_result_or_its_error() -> None:
    def fail() -> None:
        raise SystemExit(3)

    begun: Future[None] = trainer_rank._begun(lambda: None)
    assert begun.result(60) is None
    with pytest.raises(SystemExit):
        trainer_rank._begun(fail).result(60)

"""Engines and policy take turns on the same devices: the order, and what becomes of a run in which
a step of it fails or never ends."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.batches import RolloutBatches
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.device_phases import PHASES, TO, DevicePhases, PhaseOrderError
from megatron_async_rl.flow.errors import EngineMemoryOut, FlowError
from megatron_async_rl.flow.ipc_buckets import BufferRequest
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.metrics.timeline import read_timeline
from megatron_async_rl.plan.fit import memory_ran_out
from megatron_async_rl.plan.machine import GIB
from megatron_async_rl.rollout import engine_process
from megatron_async_rl.rollout.engine_process import EngineStartError
from megatron_async_rl.watchdog.events import described, failure_of, out_of_memory
from megatron_async_rl.watchdog.watch import DeadlineExceeded
from megatron_async_rl.weights.cuda_ipc import CudaIpc, IpcBuckets
from megatron_async_rl.weights.manifest import BucketRef, Manifest, WeightMismatch
from tests.cases import looped
from tests.staged import parts, specs
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest
from tests.unit.flow_setup import begin, flow, run, until
from tests.written_run import write_run

POLICY, ENGINE = (
    [step for phase in PHASES for step in TO[phase] if step.by in (party, "both")]
    for party in ("policy", "engine")
)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)


def test_each_party_takes_its_own_steps_in_order_and_knows_whose_memory_each_needs() -> None:
    for party, own in (("policy", POLICY), ("engine", ENGINE)):
        phases = DevicePhases(party, "generate")  # type: ignore[arg-type]
        for phase in PHASES:
            with phases.phase(phase):
                for step in (step for step in TO[phase] if step in own):
                    with phases.step(step.name):
                        assert phases.current == step.needs
            assert phases.current == phase


def test_no_phase_is_passed_over_and_none_follows_a_step_that_failed() -> None:
    phases = DevicePhases("policy", "generate")
    for phase in ("publish", "generate"):
        with (
            pytest.raises(PhaseOrderError, match="the next phase is train"),
            phases.phase(phase),  # type: ignore[arg-type]
        ):
            raise AssertionError("the block is not entered")
    with pytest.raises(ZeroDivisionError), phases.phase("train"), phases.step("sleep"):
        raise ZeroDivisionError
    with (
        pytest.raises(PhaseOrderError, match="phase generate and step sleep"),
        phases.phase("train"),
    ):
        raise AssertionError("the block is not entered")
    with pytest.raises(PhaseOrderError, match="step restore"), phases.step("restore"):
        raise AssertionError("the block is not entered")


def test_a_block_takes_all_steps_to_its_phase_in_their_order_and_no_other() -> None:
    phases = DevicePhases("policy", "generate")
    with (
        pytest.raises(PhaseOrderError, match="step restore was taken in phase generate before sle"),
        phases.phase("train"),
        phases.step("restore"),
    ):
        raise AssertionError("the block is not entered")
    phases = DevicePhases("policy", "generate")
    with (
        pytest.raises(PhaseOrderError, match="phase train began without step restore"),
        phases.phase("train"),
        phases.step("sleep"),
    ):
        pass
    with pytest.raises(PhaseOrderError), phases.phase("train"):
        raise AssertionError("the block is not entered")


# The policy's side


class Alone:
    """The layout of one rank."""

    rank, world_size, device_type = 0, 1, "cpu"

    def from_rank_zero(self, make: Callable[[], Any]) -> Any:
        return make()

    def barrier(self) -> None: ...


class StandIn(RolloutBatches):
    """Rank 0's batches, without a controller."""

    def __init__(self) -> None: ...


class Parts:
    """The parts that rank 0's phases call; the step `failing` raises."""

    def __init__(self, failing: str, error: Exception) -> None:
        self.done: list[str] = []
        self._failing, self._error = failing, error

    def part(self, name: str) -> Callable[..., Any]:
        def take(*_: Any) -> Any:
            if name == self._failing:
                raise self._error
            self.done.append(name)

        return take


def trainer(folder: Path, parts: Parts) -> TrainerRank:
    config: Any = SimpleNamespace(
        run=SimpleNamespace(dir=folder, steps=1, last_step=1, replay=None),
        model=SimpleNamespace(path="m", dtype="float32"),
        engine_dtype="float32",
        policy=SimpleNamespace(lora=None, fp8=None),
        rollout=SimpleNamespace(placement="colocated"),
        has_engines=True,
        eval=None,
        supervised=False,
        colocated=True,
    )
    rank = TrainerRank(config, Alone())  # type: ignore[arg-type]
    rank.rank0.open = lambda *_, **__: None  # type: ignore[method-assign]
    rank.rank0.digested = lambda *_: None  # type: ignore[method-assign]
    stage = parts.part("stage")

    def staged(*_: Any) -> Manifest:
        stage()
        return Manifest(buckets=(), digests={})

    rank.memory = SimpleNamespace(release=parts.part("release"), restore=parts.part("restore"))  # type: ignore[assignment]
    batches = StandIn()
    batches.sleep, batches.publish = parts.part("sleep"), parts.part("staged")  # type: ignore[method-assign]
    rank.rank0._batches = batches  # type: ignore[attr-defined]
    rank._shards = SimpleNamespace(buckets=(), parts=tuple)  # type: ignore[assignment]
    rank._staging = SimpleNamespace(  # type: ignore[assignment]
        stage=staged, release=lambda: None, on_demand=False
    )
    return rank


def loop(rank: TrainerRank) -> None:
    """The loop's turns, from a policy that was just built to the second time it generates."""
    rank.begin(0, None, oldest=0)
    rank.publish(0)
    rank.take_devices()
    rank.give_devices()
    rank.publish(1)


def test_the_loop_takes_the_devices_before_a_step_and_gives_them_before_it_publishes(
    tmp_path: Path,
) -> None:
    parts = Parts("", Exception())
    rank = trainer(tmp_path, parts)
    loop(rank)
    publish = ["release", "stage", "staged"]
    assert parts.done == [*publish, "sleep", "restore", *publish]
    assert set(rank.rank0._spent) >= {"starting", "restoring", "releasing"}
    timeline = [span.state for span in read_timeline(tmp_path)["rank 0"]]
    assert timeline == ["publishing", "waiting", "restoring", "releasing"]


@pytest.mark.parametrize("step", POLICY, ids=lambda step: step.name)
def test_a_step_of_the_policys_that_fails_ends_the_run_and_is_named_with_its_phase(
    tmp_path: Path, step: Any
) -> None:
    late = DeadlineExceeded("rank 0", "the engines to sleep", 9.0)
    error = late if step.name == "sleep" else RuntimeError("it broke")
    parts = Parts(step.name, error)
    rank = trainer(tmp_path, parts)
    with pytest.raises(type(error)) as failed:
        loop(rank)
    told = failure_of(failed.value, tmp_path / "rank_0.log").what
    assert told == f"{type(error).__name__}: {error} (in phase {step.needs}, step {step.name})"
    assert step.name not in parts.done
    assert rank.devices.current == step.needs


class Lender(StandIn):
    """Rank 0's batches, and what engines request from the ranks meanwhile: `orders`, one at a time;
    a wait continues until they are done."""

    def __init__(self, *orders: BufferRequest | None) -> None:
        self.orders = list(orders)
        self.done: list[BucketRef | None] = []
        self._over = threading.Event()

    def next_buffer_request(self, made: Future[None]) -> BufferRequest | None:
        if self.orders and (fill := self.orders.pop(0)) is not None:
            return fill
        self._over.set()
        wait((made,), 60)
        return None

    def buffer_filled(self, done: BucketRef | None) -> None:
        self.done.append(done)

    def _wait(self, *_: object) -> Any:
        assert self._over.wait(60)
        return "a batch"

    publish = until_released = lambda self, *_: None
    next_batch = sleep = until_loaded = evaluated = _wait


def lending_rank(folder: Path, lender: Lender) -> tuple[TrainerRank, IpcBuckets]:
    rank = trainer(folder, Parts("", Exception()))
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2)}
    lending = IpcBuckets(CudaIpc(torch.device("cpu")))
    rank._staging, rank.rank0._batches = lending, lender  # type: ignore[attr-defined]
    rank._shards = SimpleNamespace(  # type: ignore[assignment]
        buckets=specs([tensors]), parts=lambda bucket=None: parts([tensors])
    )
    rank.begin(0, None, oldest=0)
    return rank, lending


FILL = BufferRequest(version=0, number=0)


@pytest.mark.parametrize("waits", ["publish", "await_batch", "take_devices", "state"])
def test_while_rank_0_waits_the_ranks_fill_the_buckets_that_engines_want(
    tmp_path: Path, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks do so in their main threads, where no other collective is in progress."""
    monkeypatch.setattr("megatron_async_rl.flow.trainer_rank.dump", lambda config: "")
    lender = Lender()
    rank, lending = lending_rank(tmp_path, lender)
    threads = []
    fill = lending.fill
    lending.fill = lambda *which: (threads.append(threading.current_thread()), fill(*which))[1]  # type: ignore[func-returns-value, method-assign]
    if waits != "publish":
        rank.publish(0)
    lender._over.clear()
    lender.orders = [FILL, BufferRequest(version=0, number=None), FILL, None]
    if waits == "state":
        rank.schedule = SimpleNamespace(
            unfinished=lambda _: True, means={}, before=None, after=None
        )  # type: ignore[assignment]
        rank.rank0.take_evaluations = lambda wait: lender._wait()  # type: ignore[method-assign]
        rank.config.model = SimpleNamespace(path=tmp_path, dtype="float32")  # type: ignore[assignment]
        rank.rank0.position = lambda: None  # type: ignore[method-assign]
        rank.state()
    else:
        getattr(rank, waits)(*[0] if waits == "publish" else [])
    assert [ref is not None for ref in lender.done] == [True, False, True]
    assert threads == [threading.main_thread()] * 2
    assert (lending._memory[0] is None) == (waits == "take_devices"), "the policy takes it back"
    lending.close()


def test_an_order_for_an_older_version_fills_nothing(tmp_path: Path) -> None:
    rank, lending = lending_rank(
        tmp_path, lender := Lender(BufferRequest(version=-1, number=0), None)
    )
    rank.publish(0)
    assert lender.done == [None]
    assert lending._memory == [None, None]
    lending.close()


def test_what_a_wait_raises_or_a_fill_ends_it(tmp_path: Path) -> None:
    rank, lending = lending_rank(tmp_path, lender := Lender())
    rank.publish(0)

    def fails(*_: object) -> None:
        raise WeightMismatch("w", "engine-0", "1", "2")

    lender.next_batch = fails
    with pytest.raises(WeightMismatch):
        rank.await_batch()
    lender.orders, lending.fill = [FILL], lambda *_: fails()  # type: ignore[assignment, method-assign]
    lender.next_batch = lambda *_: lender._over.wait(60)
    with pytest.raises(WeightMismatch):
        rank.await_batch()
    lender._over.set()
    lending.close()


# The engines' side


async def hangs() -> None:
    await asyncio.Event().wait()


async def raises() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


async def until_it_ends(controller: Controller) -> None:
    """Rank 0 receives what went wrong at one of the two."""
    await controller.staged(1, manifest(1))
    await controller.next_batch(1)


def break_at(engine: FakeEngine, step: str, fault: Callable[[], Any]) -> None:
    if step == "load":
        engine.before_update = lambda version: fault() if version else None
    else:
        engine.before[step] = fault


@looped("fault", [raises, hangs])
@looped("step", [step for step in ENGINE if step.name != "verify"], ids=lambda step: step.name)
def test_an_engine_that_fails_in_a_step_is_lost_alone_and_step_and_phase_are_named(
    step: Any, fault: Callable[[], Any]
) -> None:
    async def body() -> None:
        broken, other = FakeEngine(), FakeEngine()
        limits = {"timeout_s": 30.0, "start_timeout_s": 30.0, "update_timeout_s": 30.0}
        controller = await begin([broken, other], flow(2, 1.0), restarts_per_hour=0, **limits)
        break_at(broken, step.name, fault)
        assert await controller.next_batch(0) is not None
        await controller.sleep()
        assert other.sleeping == {"weights", "kv_cache"}
        await controller.staged(1, manifest(1))
        slot = controller._fleet.slots[0]
        await until(lambda: slot.dead)
        assert f"(in phase {step.needs}, step {step.name})" in slot.lost
        assert ("CUDA out of memory" in slot.lost) == (fault is raises)
        assert slot.memory_out == ((step.needs, "device") if fault is raises else None)
        assert broken.killed
        assert await controller.next_batch(1) is not None
        assert (other.version, other.sleeping) == (1, set())
        await controller.close()

    run(body)


def test_weights_that_differ_after_the_sleep_end_the_run_and_no_cache_wakes() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        controller = await begin(engines, flow(2, 0.0), max_paused=1.0)
        assert await controller.next_batch(0) is not None
        await controller.sleep()
        for engine in engines:
            engine.spoil = True
        with pytest.raises(WeightMismatch, match="tensor w") as failed:
            await until_it_ends(controller)
        crossed = pickle.loads(pickle.dumps(failed.value))
        assert described(crossed).endswith("(in phase publish, step verify)")
        assert not any("wake cache" in engine.calls for engine in engines)
        await controller.close()

    run(body)


def test_engines_that_all_run_out_of_memory_end_the_run_with_their_phase() -> None:
    async def body() -> None:
        engine = FakeEngine()
        controller = await begin([engine], flow(2, 0.0), restarts_per_hour=0)
        break_at(engine, "wake weights", raises)
        assert await controller.next_batch(0) is not None
        await controller.sleep()
        with pytest.raises(EngineMemoryOut, match="step wake weights") as failed:
            await until_it_ends(controller)
        crossed = pickle.loads(pickle.dumps(failed.value))
        assert (str(crossed), crossed.phase) == (str(failed.value), "publish")
        assert out_of_memory(crossed) == "device"
        await controller.close()

    run(body)


def test_an_engine_that_starts_for_too_long_before_the_sleep_ends_the_run() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        limits = {"timeout_s": 5.0, "start_timeout_s": 5.0}
        controller = await begin(launch, flow(2, 1.0), **limits)
        controller._fleet.tasks[0]._launch = lambda spec, again: hangs()  # type: ignore[assignment, return-value]
        launch.engines[0].fail(RuntimeError("gone"))
        await until(lambda: controller._fleet.updates._starting)
        assert await controller.next_batch(0) is not None
        with pytest.raises(DeadlineExceeded, match="engines that start or load before they sleep"):
            await controller.sleep()
        await controller.close()

    run(body)


# Memory that runs out


def not_started(folder: Path, cause: str) -> EngineStartError:
    """Error of an engine whose vLLM process ended for `cause`."""
    log, trace = folder / "engine-0.log", "Traceback (most recent call last):\n  File x, line 1\n"
    log.write_text(f"{trace}{cause}\n{trace}RuntimeError: Engine core initialization failed.\n")
    spec: Any = SimpleNamespace(name="engine-0", log_dir=folder, log=log)
    return engine_process._failure(spec, "did not start: RuntimeError: Engine core")


NO_ROOM = "ValueError: Free memory on device cuda:0 (2/80 GiB) on startup is less than desired"


@pytest.mark.parametrize(
    ("error", "phase", "key"),
    [
        (lambda _: RuntimeError("CUDA error: out of memory"), "train", "policy.recompute: full"),
        (lambda _: EngineMemoryOut("no engine is left", "publish"), "publish", "rollout.tensor: 2"),
        (
            lambda folder: not_started(folder, NO_ROOM),
            "generate",
            "rollout.gpu_memory_utilization: 0.75",
        ),
    ],
    ids=["a rank", "the last engine", "a start"],
)
def test_memory_that_ran_out_names_its_phase_the_largest_holders_and_keys(
    tmp_path: Path, error: Callable[[Path], Exception], phase: str, key: str
) -> None:
    config, held = load(write_run(tmp_path)), {"parameters": 3 * GIB, "gradients": GIB, "x": 0}
    raised = pickle.loads(pickle.dumps(error(tmp_path)))
    found = memory_ran_out(raised, config, "train", lambda: held, on_cpu=False)
    assert found is not None
    holds = f"in phase {phase}; this rank's holds parameters 3.0 GiB, gradients 1.0 GiB. Error: "
    assert holds + described(raised).partition("\n")[0] in str(found)
    assert ("Free memory" in str(found)) == (key in "rollout.gpu_memory_utilization: 0.75")
    assert key in found.fix
    assert ("policy.parallel" in found.fix) == (phase == "train"), "engines have their own GPUs"
    later = FlowError("the run ends")
    later.__cause__ = raised
    assert memory_ran_out(later, config, "train", lambda: held, on_cpu=False) is not None


def test_another_error_is_not_taken_for_memory_that_ran_out(tmp_path: Path) -> None:
    config = load(write_run(tmp_path))
    no_file = not_started(tmp_path, "OSError: no such file")
    for error in (ValueError("no"), FlowError("a prompt says: out of memory"), no_file):
        assert memory_ran_out(error, config, "train", dict, on_cpu=False) is None

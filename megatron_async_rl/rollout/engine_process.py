"""Engines in Ray actors: the interface of an engine, its start, and the error of a failed start.

Invariants:
- callers use an engine through the protocol `Engine`, which declares the methods of
  `rollout.engine.RolloutEngine`;
- a call raises the engine's own exception with its type, and ProcessDied once the engine's process
  has ended;
- an engine that failed to start leaves no process running, and no engine outlives its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

import psutil

from megatron_async_rl.rollout.cluster import (
    memory_of,
    node_of,
    place_of_engine,
    preloaded_worker,
)
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import out_of_memory
from megatron_async_rl.watchdog.host_memory import MemoryKind
from megatron_async_rl.watchdog.logs import find_cause, tail
from megatron_async_rl.watchdog.processes import condition, descendants
from megatron_async_rl.watchdog.progress_monitor import ProcessState, read_states
from megatron_async_rl.watchdog.stall import waits_of
from megatron_async_rl.watchdog.watch import answer_of
from megatron_async_rl.weights.manifest import Manifest, WeightUpdate

MAX_CALLS = 1000
"""Maximum number of concurrent calls of an actor. Each batch of requests is one call; the limit is
so high that a control call never waits for them."""
ENDED_POLL_S = 0.05
"""Interval at which `until_ended` checks the processes of an engine."""


class EngineStartError(RuntimeError):
    """An engine did not start. The message ends with the last lines of its log."""

    out_of_memory: MemoryKind | None = None
    """Kind of memory that ran out; None if another reason ended the start."""
    phase: Literal["generate"] = "generate"
    """Device phase whose memory a starting engine needs (flow/device_phases.py)."""


class Engine(Protocol):
    """One running engine. `rollout.engine` documents the methods that have no docstring here."""

    @property
    def machine(self) -> str:
        """Owner of the memory from which the engine reads weights: HERE, the id of another Ray
        node, or the engine itself (`own_memory`)."""

    async def submit(self, requests: Sequence[Request]) -> None: ...
    async def abort(self, ids: Sequence[str]) -> None: ...
    async def report(self, timeout_s: float) -> EngineReport: ...
    async def receive(self, weight_update: WeightUpdate) -> None: ...
    async def update(
        self, version: int, manifest: Manifest, first: bool = True, last: bool = True
    ) -> dict[str, str]: ...
    async def sleep(self) -> None: ...
    async def wake(self, tags: Sequence[str] | None = None) -> None: ...
    async def stop(self) -> None: ...
    async def machine_is_lost(self) -> bool:
        """Return True if the engine's machine has left the cluster."""
        ...

    def kill(self) -> None:
        """Kill the engine's processes without a grace period: Ray kills the actor, and the kernel
        then kills vLLM's processes."""

    async def until_ended(self) -> None:
        """Wait until the engine's processes have ended, which frees their device memory. Returns at
        once if they are on another machine."""


class RemoteEngine:
    """An `Engine` in the Ray actor `actor`. Each method of the actor is a coroutine here.

    `machine`: see `Engine`. `processes`: (pid, start time) of its processes; empty if they are on
    another machine. `node`: id of its Ray node; empty until it has started."""

    def __init__(
        self, actor: Any, machine: str = HERE, processes: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.actor = actor
        self.machine = machine
        self.processes = processes
        self.node = ""

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return await answer_of(getattr(self.actor, method).remote(*arguments))

        return call

    async def machine_is_lost(self) -> bool:
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        return bool(self.node) and self.node not in alive

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)

    async def until_ended(self) -> None:
        # Compare the start time, too, because the system may reuse a pid.
        while any(condition(pid, began) is not None for pid, began in self.processes):
            await asyncio.sleep(ENDED_POLL_S)


async def start_engine(spec: EngineSpec, *, again: bool = False) -> Engine:
    """Start an engine on the machine that `place_of_engine` selects, and return it once it runs.
    Ray must be initialised. `again`: the engine replaces an engine that ended, whose log is kept as
    `engine-<index>.log.1`, `.2`, ...

    Raises EngineStartError, with the cause and the last lines of the engine's log, if the start
    fails or takes longer than `rollout.start_timeout_s`.
    """
    import ray

    spec.log_dir.mkdir(parents=True, exist_ok=True)
    if again:
        _keep_old_log(spec)
    actor = (
        ray.remote(RolloutEngine)
        .options(
            # Ray schedules engines by GPUs alone: on a small machine, engines that reserve CPUs
            # could never start.
            num_cpus=0,
            num_gpus=spec.rollout.workers if spec.device == "cuda" else 0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=place_of_engine(spec),
            **preloaded_worker(),
        )
        .remote(spec)
    )
    engine, limit_s = RemoteEngine(actor), spec.rollout.start_timeout_s
    # The state of a former engine with this name stays until the new one replaces it.
    before = _last_state(spec)
    try:
        with watch.doing("wait", f"{spec.name} to start", limit_s):
            async with asyncio.timeout(limit_s):
                await engine.start()
                engine.node = await node_of(actor)
                engine.machine = await memory_of(spec, actor)
                # A pid has a meaning only on the machine of its process.
                if engine.node == ray.get_runtime_context().get_node_id():
                    engine.processes = await actor.__ray_call__.remote(_processes)
    except TimeoutError:
        engine.kill()
        what = f"did not start within rollout.start_timeout_s: {limit_s:g}"
        # The log of an engine that waits for user code does not name that code.
        last = _last_state(spec)
        if last is not None and last != before:
            what += "".join(f"; it {one}" for one in waits_of(last))
        raise _failure(spec, what) from None
    except Exception as error:
        engine.kill()
        raise _failure(spec, f"did not start: {type(error).__name__}: {error}", error) from error
    # The run ends and has cancelled this start: leave no process running.
    except BaseException:
        engine.kill()
        raise
    return cast(Engine, engine)


def _last_state(spec: EngineSpec) -> ProcessState | None:
    return next((one for one in read_states(spec.log_dir.parent) if one.name == spec.name), None)


def _processes(actor: object) -> list[tuple[int, float]]:
    """Return (pid, start time) of this actor's process and its descendants, such as vLLM's
    processes."""
    processes = []
    for pid in (os.getpid(), *descendants()):
        # A helper process of vLLM may have ended since `descendants` listed it.
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append((pid, psutil.Process(pid).create_time()))
    return processes


def _keep_old_log(spec: EngineSpec) -> None:
    if spec.log.exists():
        used_numbers = (
            int(path.suffix[1:])
            for path in spec.log_dir.glob(f"{spec.log.name}.*")
            if path.suffix[1:].isdecimal()
        )
        # The old log has the reason why the former engine ended.
        number = max(used_numbers, default=0) + 1
        spec.log.rename(spec.log.with_name(f"{spec.log.name}.{number}"))


def _failure(spec: EngineSpec, what: str, error: Exception | None = None) -> EngineStartError:
    """Return the error of a failed start, with the cause from the log, because vLLM's own exception
    reports only that one of its processes failed."""
    cause = find_cause(spec.log_dir)
    lines = tail(spec.log, 15) if spec.log.is_file() else []
    failure = EngineStartError(
        "\n".join(
            [
                f"{spec.name} {what}",
                *([f"cause: {cause.message} ({cause.file}:{cause.line})"] if cause else []),
                f"last lines of {spec.log}:",
                *(f"    {line}" for line in lines),
            ]
        )
    )
    reported = f"{what} {cause.message if cause else ''}"
    known = out_of_memory(error) if error is not None else None
    failure.out_of_memory = known or out_of_memory(RuntimeError(reported))
    return failure

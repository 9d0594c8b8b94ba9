"""Engines in Ray actors: the interface of an engine, its start, and the reason for a failed start.

Invariants:
- every caller uses an engine as an `Engine`, which declares the methods of
  `rollout.engine.RolloutEngine` once;
- an exception of a call in the engine is raised here with its type, and ProcessDied once the
  engine's process has ended;
- an engine that failed to start leaves nothing running, and no engine outlives its actor.
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
from megatron_async_rl.watchdog.watch import answer_of
from megatron_async_rl.weights.manifest import Manifest, WeightUpdate

MAX_CALLS = 1000
"""Maximum concurrent calls of an actor. Each batch of requests is one call, and control calls must
never wait for them."""
ENDED_POLL_S = 0.05
"""Interval at which a wait for the end of processes checks them."""


class EngineStartError(RuntimeError):
    """An engine did not start. The message ends with the tail of its log."""

    out_of_memory: MemoryKind | None = None
    """The kind of memory that ran out, if that is the cause."""
    phase: Literal["generate"] = "generate"
    """The device phase whose memory a starting engine takes (flow/colocated.py)."""


class Engine(Protocol):
    """One running engine. `rollout.engine` documents the calls."""

    @property
    def machine(self) -> str:
        """Owner of the memory that the engine reads weights from: HERE, the id of another Ray node,
        or the engine itself (`own_memory`)."""

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
        """Kill the engine's processes at once. Ray kills the actor; the kernel then kills vLLM's
        processes."""

    async def until_ended(self) -> None:
        """Wait until the engine's processes on rank 0's machine have ended and freed their device
        memory."""


class RemoteEngine:
    """An `Engine` in the Ray actor `actor`: each method of the actor as a coroutine.

    `machine`: owner of the memory of its weights. `processes`: (pid, start time) of its processes
    on rank 0's machine. `node`: id of its Ray node, once it has started."""

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
        # The start time as well: the system may reuse a pid.
        while any(condition(pid, began) is not None for pid, began in self.processes):
            await asyncio.sleep(ENDED_POLL_S)


async def start_engine(spec: EngineSpec, *, again: bool = False) -> Engine:
    """Return a running engine, placed by `place_of_engine`. Ray must be initialised. `again`: it
    replaces an engine that ended, whose log is kept as `engine-<index>.log.1`, `.2`, ...

    Raises EngineStartError, with the cause and the tail of the engine's log, when it fails or takes
    longer than `rollout.start_timeout_s`.
    """
    import ray

    spec.log_dir.mkdir(parents=True, exist_ok=True)
    if again:
        _keep_old_log(spec)
    actor = (
        ray.remote(RolloutEngine)
        .options(
            # Ray schedules engines by GPUs alone; CPU slots would block them on small machines.
            num_cpus=0,
            num_gpus=spec.rollout.workers if spec.device == "cuda" else 0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=place_of_engine(spec),
            **preloaded_worker(),
        )
        .remote(spec)
    )
    engine, limit_s = RemoteEngine(actor), spec.rollout.start_timeout_s
    try:
        with watch.doing("wait", f"{spec.name} to start", limit_s):
            async with asyncio.timeout(limit_s):
                await engine.start()
                engine.node = await node_of(actor)
                engine.machine = await memory_of(spec, actor)
                if engine.machine == HERE:
                    engine.processes = await actor.__ray_call__.remote(_processes)
    except TimeoutError:
        engine.kill()
        limit = f"rollout.start_timeout_s: {limit_s:g}"
        raise _failure(spec, f"did not start within {limit}") from None
    except Exception as error:
        engine.kill()
        raise _failure(spec, f"did not start: {type(error).__name__}: {error}", error) from error
    except BaseException:  # cancelled, because the run ends: leave nothing running
        engine.kill()
        raise
    return cast(Engine, engine)


def _processes(actor: object) -> list[tuple[int, float]]:
    """Return (pid, start time) of the actor and its descendants, such as vLLM's processes."""
    found = []
    for pid in (os.getpid(), *descendants()):
        # A helper process of vLLM may have ended since it was listed.
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((pid, psutil.Process(pid).create_time()))
    return found


def _keep_old_log(spec: EngineSpec) -> None:
    if spec.log.exists():
        taken = (
            int(path.suffix[1:])
            for path in spec.log_dir.glob(f"{spec.log.name}.*")
            if path.suffix[1:].isdecimal()
        )
        # Kept, because it holds the reason why the former engine ended.
        spec.log.rename(spec.log.with_name(f"{spec.log.name}.{max(taken, default=0) + 1}"))


def _failure(spec: EngineSpec, what: str, error: Exception | None = None) -> EngineStartError:
    """Return the error of a failed start, with the cause from the log. vLLM's own exception reports
    only that one of its processes failed."""
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

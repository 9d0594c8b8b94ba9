"""Engines as Ray actors: start them, and say why one did not.

Invariants:
- everything an engine or a process of vLLM writes goes to the engine's log file, from before vLLM is imported;
- the environment vLLM reads is set before vLLM is imported, and is inherited by its processes;
- either all engines start or none is left running, and none outlives its actor.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import name_this_process
from megatron_async_rl.observe.logs import find_cause, redirect_output, tail
from megatron_async_rl.rollout.lifetime import PARENT
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.requests import EngineReport, Request
from megatron_async_rl.weights.plugin import ENTRY_POINT

if TYPE_CHECKING:
    from megatron_async_rl.rollout.engine import RolloutEngine
    from megatron_async_rl.weights.shared_memory import BucketRef

MAX_CALLS = 1000
"""Calls an actor may hold at once: each batch of requests is one, and the control calls must always get through."""


class EngineStartError(RuntimeError):
    """An engine did not start. The message ends with the tail of its log."""


def environment(spec: EngineSpec) -> dict[str, str]:
    """What vLLM and the libraries under it read at import. Call it in the process that will start vLLM."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(spec.rollout.start_timeout_s))),
        "VLLM_PLUGINS": ENTRY_POINT,
        PARENT: str(os.getpid()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.device == "cpu":
        values |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(spec.threads),
            "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles parts of its sampler at the first request even in eager mode
            "KMP_BLOCKTIME": "1",  # ms a thread spins after a parallel region; the trainer may want the core
            # New memory costs several times what copying to it does, and every update needs as much as the one before freed:
            # so the C library keeps what is freed, large blocks too.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        }
        if spec.rollout.tensor > 1:  # binding wants a NUMA node for each worker
            values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        openmp = Path(sys.prefix, "lib", "libiomp5.so")
        if openmp.is_file():
            values["LD_PRELOAD"] = ":".join(part for part in (str(openmp), os.environ.get("LD_PRELOAD", "")) if part)
    return values


class EngineActor:
    """`RolloutEngine` in a process of its own; the methods are the engine's."""

    def __init__(self, spec: EngineSpec) -> None:
        redirect_output(spec.log)
        name_this_process(spec.name)
        watch.join(spec.name)
        os.environ.update(environment(spec))
        self._spec = spec
        self._engine: RolloutEngine | None = None

    async def start(self) -> None:
        from megatron_async_rl.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(self._spec)
        with watch.phase("starting vLLM", self._spec.rollout.start_timeout_s):
            await self._engine.start()
        watch.fact("engine", self._engine.describe)

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._running().submit(requests)

    async def cut(self, ids: Sequence[str]) -> None:
        await self._running().cut(ids)

    async def report(self, timeout_s: float) -> EngineReport:
        return await self._running().report(timeout_s)

    async def update(self, buckets: Sequence[BucketRef], version: int, digests: Mapping[str, str]) -> dict[str, str]:
        return await self._running().update(buckets, version, digests)

    async def pause(self) -> None:
        await self._running().pause()

    async def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> dict[str, str]:
        return await self._running().load_bucket(bucket, version, first, last)

    async def resume(self) -> None:
        await self._running().resume()

    async def sleep(self) -> None:
        await self._running().sleep()

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        await self._running().wake(tags)

    async def version(self) -> int:
        return await self._running().version()

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()

    def _running(self) -> RolloutEngine:
        if self._engine is None:
            raise RuntimeError(f"{self._spec.name} was not started")
        return self._engine


def start_engines(specs: Sequence[EngineSpec]) -> list[Any]:
    """Handles of running engines, one for each spec, in order. Ray must be initialised.

    Raises EngineStartError, with the cause and the tail of the engine's log, when an engine fails or takes longer than
    `rollout.start_timeout_s`; the engines that did start are stopped first.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    handles = []
    for spec in specs:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        options = {
            "num_cpus": 0,
            "num_gpus": spec.rollout.tensor if spec.device == "cuda" else 0,
            "max_concurrency": MAX_CALLS,
            "name": None,
            # New weights come through this machine's shared memory.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        }
        handles.append(ray.remote(EngineActor).options(**options).remote(spec))
    starting = [handle.start.remote() for handle in handles]
    begun = time.monotonic()
    try:
        for spec, start in zip(specs, starting, strict=True):
            left = spec.rollout.start_timeout_s - (time.monotonic() - begun)
            try:
                with watch.doing("wait", f"{spec.name} to start", max(left, 0.001)):
                    ray.get(start, timeout=max(left, 0.001))
            except ray.exceptions.GetTimeoutError:
                limit = f"rollout.start_timeout_s: {spec.rollout.start_timeout_s:g}"
                raise EngineStartError(_failure(spec, f"did not start within {limit}")) from None
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise EngineStartError(_failure(spec, f"did not start: {type(cause).__name__}: {cause}")) from error
    except BaseException:
        stop_engines(handles, timeout_s=10.0)
        raise
    return handles


def start_engine(spec: EngineSpec) -> Any:
    """The handle of one more engine, in place of one that is gone, whose log stays as `engine-<index>.log.1`, `.2`, ...

    Raises as `start_engines` does. May be called in a thread beside the one that uses the other engines.
    """
    if spec.log.exists():
        taken = (int(path.suffix[1:]) for path in spec.log_dir.glob(f"{spec.log.name}.*") if path.suffix[1:].isdecimal())
        spec.log.rename(spec.log.with_name(f"{spec.log.name}.{max(taken, default=0) + 1}"))
    return start_engines([spec])[0]


def kill_engine(handle: Any) -> None:
    """Ends an engine's processes at once, whether they answer or not: Ray kills the actor, and the kernel vLLM with it."""
    import ray

    ray.kill(handle)


def stop_engines(handles: Sequence[Any], timeout_s: float) -> None:
    """Shuts vLLM down, then ends the actors. An engine that does not answer within `timeout_s` is killed."""
    import ray

    stopping = [handle.stop.remote() for handle in handles]
    if stopping:
        with watch.doing("wait", "the engines to stop", timeout_s):
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
    for handle in handles:
        ray.kill(handle)


def _failure(spec: EngineSpec, what: str) -> str:
    """vLLM's own exception says only that a process of it failed; that process's is in the log."""
    cause = find_cause(spec.log_dir)
    lines = tail(spec.log, 15) if spec.log.is_file() else []
    return "\n".join(
        [
            f"{spec.name} {what}",
            *([f"cause: {cause.message} ({cause.file}:{cause.line})"] if cause else []),
            f"last lines of {spec.log}:",
            *(f"    {line}" for line in lines),
        ]
    )

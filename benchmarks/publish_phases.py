"""Where the time of a publish goes: stopwatches in the trainer, in the engine's actor and in vLLM's
process.

The parts do not overlap and add up to the publish: what a caller waits for is counted without what
the one it called counts.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from megatron_async_rl.rollout.engine import RolloutEngine

_seconds: dict[str, float] = defaultdict(float)
"""Of this process, by part, since they were last taken."""


def timed(owner: Any, attribute: str, part: str) -> None:
    """Counts the seconds of every call of `owner.attribute`, which may be a coroutine function, as
    `part`."""
    original: Callable[..., Any] = getattr(owner, attribute)

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **named)
        finally:
            _seconds[part] += time.perf_counter() - started

    @functools.wraps(original)
    async def awaited(*args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return await original(*args, **named)
        finally:
            _seconds[part] += time.perf_counter() - started

    setattr(owner, attribute, awaited if inspect.iscoroutinefunction(original) else call)


def taken() -> dict[str, float]:
    seconds = dict(_seconds)
    _seconds.clear()
    return seconds


def time_trainer() -> None:
    from random_model import Publisher

    from megatron_async_rl.weights import staging

    timed(staging, "tensor_digest", "stage digest")
    timed(Publisher, "update", "asked")


def time_worker(_worker: Any) -> None:
    from megatron_async_rl.weights import packed_layers, receive, reload

    timed(receive, "tensor_digest", "digest")
    timed(packed_layers.AwaitedWeight, "_load", "pieces")
    for module in (packed_layers, reload):
        timed(module, "pack_linear", "pack")
    timed(receive.WeightLoadingWorker, "load_weight_bucket", "worker")


def worker_times(_worker: Any) -> dict[str, float]:
    return taken()


class TimedEngine(RolloutEngine):
    """`take_times` gives the seconds by part of its own process and of vLLM's."""

    async def start(self) -> None:
        import os

        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to vLLM's process
        await super().start()
        engine: Any = self
        timed(engine, "update", "actor")
        timed(engine._llm.engine_core, "pause_scheduler_async", "vllm pause")
        timed(engine._llm, "collective_rpc", "vllm load")
        timed(engine._llm, "update_weight_version", "vllm number")
        timed(engine._llm, "resume_generation", "vllm resume")
        self._rpc = engine._llm.engine_core.collective_rpc_async
        await self._rpc(time_worker)

    async def take_times(self) -> dict[str, float]:
        (worker,) = await self._rpc(worker_times)
        return taken() | worker


def parts(
    export_s: float,
    staged_s: float,
    publish_s: float,
    trainer: dict[str, float],
    engine: dict[str, float],
) -> dict[str, float]:
    """Seconds of one publish by part, from what was taken in the trainer and in the engine's two
    processes."""
    vllm = {name: engine[f"vllm {name}"] for name in ("pause", "load", "number", "resume")}
    return {
        "export": export_s,
        "stage: digest": trainer["stage digest"],
        "stage: copy": staged_s - export_s - trainer["stage digest"],
        "compare": publish_s - staged_s - trainer["asked"],
        "Ray": trainer["asked"] - engine["actor"],
        "actor": engine["actor"] - sum(vllm.values()),
        "vLLM: pause": vllm["pause"],
        "vLLM: queue of load": vllm["load"] - engine["worker"],
        "vLLM: number": vllm["number"],
        "vLLM: resume": vllm["resume"],
        "load: digest": engine["digest"],
        "load: pieces of fused": engine["pieces"],
        "load: pack": engine["pack"],
        "load: rest": engine["worker"] - engine["digest"] - engine["pieces"] - engine["pack"],
    }


def medians_ms(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        part: round(1e3 * statistics.median(each[part] for each in rounds), 2) for part in rounds[0]
    }

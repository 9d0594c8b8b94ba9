"""Breakdown of the time of a publish: stopwatches in the trainer, in the engine's actor and in
vLLM's process.

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
"""Seconds of this process by part, since they were last taken."""
_within = 0.0
"""Seconds of timed functions called by the running one."""

WORKER = ("worker", "digest", "pieces", "pack")
"""Parts of a load in vLLM's process."""


def timed(owner: Any, attribute: str, part: str) -> None:
    """Counts the seconds of every call of `owner.attribute`, which may be a coroutine function, as
    `part`; of a plain function without those of the timed ones that it calls."""
    original: Callable[..., Any] = getattr(owner, attribute)

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        global _within
        started, before, _within = time.perf_counter(), _within, 0.0
        try:
            return original(*args, **named)
        finally:
            took = time.perf_counter() - started
            _seconds[part] += took - _within
            _within = before + took

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

    timed(staging, "partial_digest", "stage digest")
    timed(Publisher, "update", "asked")


def time_worker(_worker: Any) -> None:
    from megatron_async_rl.rollout.vllm import loaded, receive, reload

    timed(loaded, "partial_digest", "digest")
    timed(reload.AwaitedWeight, "_copy_piece", "pieces")
    timed(reload, "pack_linear", "pack")
    timed(receive.WeightLoadingWorker, "load_weight_bucket", "worker")


def read_as(worker: Any, transport: str) -> None:
    from megatron_async_rl.weights.transport import carrier

    worker.weight_transfer_engine._reader = carrier(transport).reader()


def worker_times(_worker: Any) -> dict[str, float]:
    return taken()


class TimedEngine(RolloutEngine):
    """`take_times` gives the seconds by part of its own process and of vLLM's."""

    async def start(self) -> None:
        import os

        from megatron_async_rl.rollout.vllm import engine_core

        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to vLLM's process
        await super().start()
        engine: Any = self
        timed(engine_core, "load_between_steps", "vllm")
        self._rpc = engine._llm.engine_core.collective_rpc_async
        await self._rpc(time_worker)

    async def update(
        self, version: int, manifest: Any, first: bool = True, last: bool = True
    ) -> dict[str, str]:
        started = time.perf_counter()  # Ray calls the class's own method, whatever is set later
        try:
            return await super().update(version, manifest, first, last)
        finally:
            _seconds["actor"] += time.perf_counter() - started

    async def read_as(self, transport: str) -> None:
        """The engine's worker reads what comes next by that carrier."""
        await self._rpc(read_as, args=(transport,))

    async def take_times(self) -> dict[str, float]:
        worker: dict[str, float]
        (worker,) = await self._rpc(worker_times)
        return taken() | worker


def parts(
    cut_s: float,
    staged_s: float,
    publish_s: float,
    trainer: dict[str, float],
    engine: dict[str, float],
) -> dict[str, float]:
    """Seconds of one publish by part, from what was taken in the trainer and in the engine's two
    processes."""
    engine = defaultdict(float, engine)  # a load may have no pieces, once their places are known
    return {
        "cut": cut_s,
        "stage: digest": trainer["stage digest"],
        "stage: copy": staged_s - cut_s - trainer["stage digest"],
        "compare": publish_s - staged_s - trainer["asked"],
        "Ray": trainer["asked"] - engine["actor"],
        "actor": engine["actor"] - engine["vllm"],
        "vLLM: pause, number, resume": engine["vllm"] - sum(engine[name] for name in WORKER),
        "load: digest": engine["digest"],
        "load: pieces of fused": engine["pieces"],
        "load: pack": engine["pack"],
        "load: rest": engine["worker"],
    }


def medians_ms(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        part: round(1e3 * statistics.median(each[part] for each in rounds), 2) for part in rounds[0]
    }

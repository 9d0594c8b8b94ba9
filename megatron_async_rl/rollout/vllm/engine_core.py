"""Hooks in vLLM's engine core, and the call that loads new weights there.

    engine's actor --load_between_steps--> engine core --load_weight_bucket--> workers (receive.py)

Invariants:
- the model runs no step between the first and the last bucket of an update;
- a request that starts after an update reuses no keys and values that earlier weights computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from megatron_async_rl.rollout.vllm.loaded import digests_of
from megatron_async_rl.watchdog import watch

LOAD = "mar_load_bucket"
"""Name of `_load_bucket` as a method of vLLM's engine core."""


async def load_between_steps(
    llm: Any,
    bucket: dict[str, Any],
    version: int,
    *,
    first: bool,
    last: bool,
    clear_cache: bool,
    resume_if: Mapping[str, str] | None,
) -> dict[str, str]:
    """Load one bucket of an update to `version`. Sampling stops before the `first` bucket. After
    the `last` bucket the weights get their version, and sampling continues if their digests equal
    `resume_if`; with None, sampling does not continue.

    Returns name -> digest of every tensor as loaded with the last bucket; otherwise an empty dict.
    """
    # A single call for pause, load and resume: each call waits until the current step ends, and the
    # engine would sample nothing between several calls.
    digests: dict[str, str] = await llm.engine_core.call_utility_async(
        LOAD, bucket, version, first, last, clear_cache, resume_if
    )
    return digests


def take_loads_between_steps() -> None:
    """Add the method that `load_between_steps` calls to vLLM's engine core. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, LOAD, _load_bucket)


def _load_bucket(
    core: Any,
    bucket: dict[str, Any],
    version: int,
    first: bool,
    last: bool,
    clear_cache: bool,
    resume_if: Mapping[str, str] | None,
) -> dict[str, str] | Future[dict[str, str]]:
    """Implement `load_between_steps` in vLLM's engine core. Returns a future if a step is still
    running."""

    def load() -> dict[str, str]:
        loaded = core.collective_rpc("load_weight_bucket", None, (bucket, version, first, last))
        digests = digests_of(loaded)
        if last:
            # Before sampling resumes, because the next token must have the new version.
            core.set_weight_version(str(version))
            for request in core.scheduler.requests.values():
                _salt(request, str(version))
            # Weights with other digests must never sample.
            if digests == resume_if:
                core.resume_scheduler()
        return digests

    paused = core.pause_scheduler("keep", clear_cache) if first else None
    if paused is None:
        return load()

    # A step is still running: load once it has ended.
    result: Future[dict[str, str]] = Future()

    def on_pause(_: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            paused.result()
            result.set_result(load())
        except Exception as error:  # noqa: BLE001 - vLLM passes it to the caller
            result.set_exception(error)
        # Wake the engine core: it would block until a new request arrives, although running
        # requests can continue.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    paused.add_done_callback(on_pause)
    return result


def cache_by_version() -> None:
    """Salt the prefix cache of vLLM's engine core with the weight version, so that requests share
    keys and values only if the same weights computed them. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    preprocess, add = EngineCore.preprocess_add_request, EngineCore.add_request
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        # Before `preprocess`, which computes the hashes of the blocks in vLLM's input thread.
        request.cache_salt = self.get_weight_version()
        return preprocess(self, request)

    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # An update may have ended since the input thread salted the request.
        _salt(request, self.get_weight_version())
        return add(self, request, *args, **kwargs)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.add_request = add_request


def _salt(request: Any, version: str) -> None:
    """Salt a request that has not started. A started request keeps its salt, because the weights of
    that version computed some of its keys and values."""
    started = request.num_computed_tokens or request.num_preemptions
    if not started and request.cache_salt != version:
        request.cache_salt = version
        request.block_hashes.clear()
        request.update_block_hashes()


def show_progress() -> None:
    """Report the tokens of every step to the watchdog as progress, and the lengths of the
    scheduler's queues as a fact. Idempotent.

    vLLM returns a response only when it is complete, which may take longer than the watchdog waits.
    Its scheduler processes every token."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            watch.progress("tokens", scheduler_output.total_num_scheduled_tokens)
            watch.fact("scheduler", lambda: describe_scheduler(self))
        return outputs

    Scheduler.update_from_output = update_from_output


def describe_scheduler(scheduler: Any) -> str:
    """Return the numbers of running and waiting requests, and the state of the pause."""
    running, waiting = scheduler.get_request_counts()
    return f"{running} running, {waiting} waiting, {scheduler._pause_state.name.lower()}"

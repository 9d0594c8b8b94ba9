"""Client of vLLM in the engine's actor: start, requests, samples, health and death.

Invariants:
- every token carries its log-prob and the version of the weights that sampled it, from vLLM's own
  spans; a gap in either is an error;
- vLLM's error that its process has ended becomes EngineDied, which names the cause and the log;
- `silent_s` of the health check is the time since the last answer; one probe is pending at a time.

Functions import vLLM when they are called: the engine first sets variables that vLLM reads at
import.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.watchdog.host_memory import (
    MemoryKind,
    Shortage,
    kernel_shortage,
    look_for_kernel_kills,
)
from megatron_async_rl.watchdog.logs import KILLED, PRIMARY, find_cause, survived
from megatron_async_rl.watchdog.processes import descendants

EVERY_S = 1.0
"""Interval between probes."""
DEADLINE_S = 10.0
"""Time after which a probe is repeated. vLLM answers between two steps, and not during a load of
weights."""

_vllm_processes: frozenset[int] = frozenset()
"""Processes that EngineDied looks up in the kernel's reports of kills."""


def launch(spec: EngineSpec) -> Any:
    """Start vLLM and return its AsyncLLM. Exceptions of vLLM propagate."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    global _vllm_processes
    # The difference: other children, such as reward processes, may be killed without harm.
    before = descendants()
    llm = AsyncLLM.from_engine_args(engine_arguments(spec))
    _vllm_processes = frozenset(descendants() - before)
    return llm


async def prepare_updates(llm: Any, spec: EngineSpec) -> None:
    """Set the version of the loaded weights, and prepare the workers to receive others."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    if spec.device == "cpu" and spec.rollout.workers > 1:
        await llm.collective_rpc("complete_on_cpu")
    first = {"version": spec.first_version, "transport": spec.transport}
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=first))
    await llm.update_weight_version(str(spec.first_version))


async def add_request(llm: Any, name: str, ids: Sequence[int], parameters: Any) -> Any:
    """Submit a request that continues the tokens `ids`. Return its collector, for `on_output`."""
    from vllm.inputs.engine import tokens_input

    return await llm.add_request(name, tokens_input(list(ids)), parameters)


def on_output(collector: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with vLLM's output for a request, or with the exception that ended it, instead of
    storing it for a waiting task. `collector`: the result of `add_request`."""
    # Without an await in between: no output can arrive between these two lines.
    early, collector.output = collector.output, None
    collector.put = call
    if early is not None:
        call(early)


def tokens_so_far(llm: Any) -> int:
    """Return the number of tokens that vLLM has returned for unfinished responses."""
    states = llm.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states)


async def pause_scheduler(llm: Any, *, clear_cache: bool) -> None:
    """Pause, without the 20 ms for which `AsyncLLM.pause_generation` sleeps to order outputs."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


def token_versions(completion: Any) -> NDArray[np.int32]:
    """Return the weight version of each response token. Raises RuntimeError if vLLM's spans leave a
    token without a numbered version."""
    length = len(completion.token_ids)
    spans = list(completion.weight_versions or ())
    for span in spans:
        if not span.version.isdecimal():
            raise RuntimeError(
                f"tokens {span.start} to {span.end} carry weight version {span.version!r}, which is"
                " not a number"
            )

    # Fast path of nearly all responses: one version sampled all tokens.
    if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, length):
        return np.full(length, int(spans[0].version), dtype=np.int32)

    # -1 marks tokens that no span covers.
    versions = np.full(length, -1, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
    if np.any(versions < 0):
        without = np.flatnonzero(versions < 0).tolist()
        raise RuntimeError(f"tokens {without} of {length} carry no weight version: {spans}")
    return versions


def sampled_logprobs(completion: Any) -> NDArray[np.float32]:
    """Return the log-prob of each response token, in nats. Raises RuntimeError unless the engine
    reported exactly one finite value per token."""
    flat: Any = completion.logprobs
    # With `logprobs=0` vLLM reports the sampled token alone, so the ids must match one to one.
    if flat is None or flat.token_ids != list(completion.token_ids):
        raise RuntimeError(
            f"the engine reported no log-probs of the {len(completion.token_ids)} tokens it sampled"
        )
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.all(np.isfinite(logprobs)):
        raise RuntimeError(
            f"the engine reported log-probs that are not finite: {logprobs.tolist()}"
        )
    return logprobs


class EngineDied(RuntimeError):
    """vLLM's own process ended while the engine was in use.

    `last_error`: by default the last error in the engine's log, since vLLM reports only that the
    process is gone. `kernel`: the kernel's kill for lack of host memory; by default looked up on
    this machine. `outside` and `out_of_memory`: see ProcessDied."""

    def __init__(
        self,
        spec: EngineSpec,
        while_what: str,
        last_error: str | None = None,
        kernel: Shortage | Literal["look"] | None = "look",
    ) -> None:
        if last_error is None:
            found = find_cause(spec.log_dir, spec.log.name)
            last_error = ""
            if found is not None and found.kind in (PRIMARY, KILLED) and not survived(found):
                last_error = found.message.splitlines()[0]
        reported = f"; the last error in its log: {last_error}" if last_error else ""
        if isinstance(kernel, str):
            # Several calls may fail because of one death, each with its own error: no error may
            # consume the kernel's report.
            kernel = kernel_shortage(_vllm_processes, used=False)
        what = f"the vLLM process of {spec.name} died while {while_what}{reported}; see {spec.log}"
        super().__init__(what if kernel is None else f"{what}. {kernel.message}")
        self.outside = kernel is not None and kernel.certain
        self.out_of_memory: MemoryKind | None = "host" if self.outside else None
        # Unpickled on another machine, the error must not look at that machine's kernel.
        self._arguments = (spec, while_what, last_error, kernel)

    def __reduce__(self) -> tuple[type[EngineDied], tuple[EngineSpec, str, str, Shortage | None]]:
        return (type(self), self._arguments)


@contextmanager
def named_death(spec: EngineSpec, while_what: str) -> Iterator[None]:
    """Convert vLLM's error that its process has ended, which names neither cause nor log, into
    EngineDied."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineDied(spec, while_what) from None


class HealthCheck:
    """Check that vLLM's process still answers, once a second, while it samples and while it is
    paused. `probe`: a cheap call into vLLM's process. `dead`: returns True once the process has
    ended."""

    def __init__(self, probe: Callable[[], Awaitable[object]], dead: Callable[[], bool]) -> None:
        self._ask = probe
        self._dead = dead
        self._answered = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered

    async def until_dead(self) -> None:
        """Return once vLLM's process has ended. Exceptions of `probe` propagate."""
        self._answered = time.monotonic()  # the start itself may have taken minutes
        while not self._dead():
            look_for_kernel_kills()
            question = asyncio.ensure_future(self._ask())
            requested = time.monotonic()
            while (
                not question.done()
                and time.monotonic() - requested < DEADLINE_S
                and not self._dead()
            ):
                await asyncio.wait((question,), timeout=EVERY_S)
            if question.done():
                question.result()
                self._answered = time.monotonic()
                await asyncio.sleep(EVERY_S)
            else:
                question.cancel()

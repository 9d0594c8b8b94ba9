"""Client of vLLM in the engine's actor: start, requests, samples, health and death.

Invariants:
- every token has its log-prob and, from vLLM's own spans, the version of the weights that sampled
  it; a missing log-prob or version is an error;
- vLLM's error that its process has ended becomes EngineDied, which names the cause and the log;
- `silent_s` of the health check is the time since the last reply; at most one probe is pending.

Functions import vLLM when they are called, because the engine first sets environment variables that
vLLM reads at import.
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
"""Interval between a reply and the next probe."""
DEADLINE_S = 10.0
"""Time after which a probe without a reply is repeated. vLLM replies between two steps, and not
while it loads weights."""

_vllm_processes: frozenset[int] = frozenset()
"""Pids of vLLM's processes, which EngineDied looks up in the kernel's reports of kills."""


def launch(spec: EngineSpec) -> Any:
    """Start vLLM and return its AsyncLLM. Exceptions of vLLM propagate."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from megatron_async_rl.rollout.vllm.engine_arguments import engine_arguments

    global _vllm_processes
    # Only vLLM's processes: the death of another child, such as a reward process, is harmless.
    before = descendants()
    llm = AsyncLLM.from_engine_args(engine_arguments(spec))
    # Servers of rewards and environments, which are older, start processes meanwhile.
    _vllm_processes = frozenset(descendants() - before - descendants(before))
    return llm


async def prepare_updates(llm: Any, spec: EngineSpec) -> None:
    """Set the version of the initial weights, and prepare the workers to receive new weights."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    if spec.device == "cpu" and spec.rollout.workers > 1:
        await llm.collective_rpc("complete_on_cpu")
    first = {"version": spec.first_version, "transport": spec.transport}
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=first))
    await llm.update_weight_version(str(spec.first_version))


async def add_request(llm: Any, name: str, ids: Sequence[int], parameters: Any) -> Any:
    """Submit a request that continues the tokens `ids`. Return its output collector, for
    `on_output`."""
    from vllm.inputs.engine import tokens_input

    return await llm.add_request(name, tokens_input(list(ids)), parameters)


def on_output(collector: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with vLLM's output for a request, or with the exception that ended it. vLLM
    itself would store it for a waiting task. `collector`: the result of `add_request`."""
    # No await in these two lines, so no output can arrive between them.
    early, collector.output = collector.output, None
    collector.put = call
    if early is not None:
        call(early)


def tokens_so_far(llm: Any) -> int:
    """Return the number of tokens that vLLM's engine core has returned for unfinished responses."""
    states = llm.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states)


async def pause_scheduler(llm: Any, *, clear_cache: bool) -> None:
    """Pause sampling. Unlike `AsyncLLM.pause_generation`, this function does not sleep for 20 ms to
    order outputs."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


def token_versions(completion: Any) -> NDArray[np.int32]:
    """Return the weight version of each response token, int32 [T]. Raises RuntimeError if no span
    covers a token, or if a version is not a number."""
    length = len(completion.token_ids)
    spans = list(completion.weight_versions or ())
    for span in spans:
        if not span.version.isdecimal():
            raise RuntimeError(
                f"vLLM reported weight version {span.version!r} for tokens {span.start} to"
                f" {span.end}; versions must be numbers"
            )

    # Fast path for most responses: one version sampled all tokens.
    if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, length):
        return np.full(length, int(spans[0].version), dtype=np.int32)

    # -1 marks tokens that no span covers.
    versions = np.full(length, -1, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
    if np.any(versions < 0):
        without = np.flatnonzero(versions < 0).tolist()
        raise RuntimeError(
            f"vLLM reported no weight version for tokens {without} of {length}: {spans}"
        )
    return versions


def sampled_logprobs(completion: Any) -> NDArray[np.float32]:
    """Return the log-prob of each response token, in nats, float32 [T]. Raises RuntimeError unless
    vLLM reported exactly one finite value per token."""
    flat: Any = completion.logprobs
    # With `logprobs=0` vLLM reports only sampled tokens, so the ids must be equal.
    if flat is None or flat.token_ids != list(completion.token_ids):
        reported = "none" if flat is None else f"those of tokens {flat.token_ids}"
        raise RuntimeError(
            f"vLLM did not report the log-probs of the {len(completion.token_ids)} tokens that it"
            f" sampled, but {reported}"
        )
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.all(np.isfinite(logprobs)):
        raise RuntimeError(f"vLLM reported log-probs that are not finite: {logprobs.tolist()}")
    return logprobs


class EngineDied(RuntimeError):
    """vLLM's process ended while the engine was in use.

    `while_what`: activity at that time, as a clause. `last_error`: by default the last error in the
    engine's log, because vLLM reports only that its process has ended. `kernel`: kill by the kernel
    for lack of host memory; by default looked up on this machine. `outside` and `out_of_memory`:
    see ProcessDied."""

    def __init__(
        self,
        spec: EngineSpec,
        while_what: str,
        last_error: str | None = None,
        kernel: Shortage | Literal["look"] | None = "look",
    ) -> None:
        if last_error is None:
            cause = find_cause(spec.log_dir, spec.log.name)
            last_error = ""
            if cause is not None and cause.kind in (PRIMARY, KILLED) and not survived(cause):
                last_error = cause.message.splitlines()[0]
        reported = f"; the last error in its log: {last_error}" if last_error else ""
        if isinstance(kernel, str):
            # `used=False`: several calls may fail because of one death, and the error of each needs
            # the kernel's report.
            kernel = kernel_shortage(_vllm_processes, used=False)
        what = f"the vLLM process of {spec.name} died while {while_what}{reported}; see {spec.log}"
        super().__init__(what if kernel is None else f"{what}. {kernel.message}")
        self.outside = kernel is not None and kernel.certain
        self.out_of_memory: MemoryKind | None = "host" if self.outside else None
        # Resolved here: unpickled on another machine, the error must not read that machine's log
        # and kernel messages.
        self._arguments = (spec, while_what, last_error, kernel)

    def __reduce__(self) -> tuple[type[EngineDied], tuple[EngineSpec, str, str, Shortage | None]]:
        return (type(self), self._arguments)


@contextmanager
def named_death(spec: EngineSpec, while_what: str) -> Iterator[None]:
    """Convert vLLM's EngineDeadError into EngineDied, because vLLM's error names neither the cause
    nor the log."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineDied(spec, while_what) from None


class HealthCheck:
    """Check once a second that vLLM's process still replies, also while it is paused. `probe`: a
    cheap call into vLLM's process. `dead`: returns True once the process has ended."""

    def __init__(self, probe: Callable[[], Awaitable[object]], dead: Callable[[], bool]) -> None:
        self._probe = probe
        self._dead = dead
        self._replied = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Time since the last reply, in seconds."""
        return time.monotonic() - self._replied

    async def until_dead(self) -> None:
        """Probe until vLLM's process has ended. Exceptions of `probe` propagate."""
        # The start of vLLM, which may take minutes, does not count as silence.
        self._replied = time.monotonic()
        while not self._dead():
            look_for_kernel_kills()
            reply = asyncio.ensure_future(self._probe())
            sent = time.monotonic()
            while not reply.done() and time.monotonic() - sent < DEADLINE_S and not self._dead():
                await asyncio.wait((reply,), timeout=EVERY_S)
            if reply.done():
                reply.result()
                self._replied = time.monotonic()
                await asyncio.sleep(EVERY_S)
            else:
                reply.cancel()

"""vLLM's own processes in the watch of the run: tokens as progress, queue depths as facts.

vLLM hands a response over when it is whole, which may take longer than the watchdog waits; its scheduler sees every token.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_async_rl.observe import watch


def watch_this_process() -> None:
    """In a process that vLLM started for an engine: heartbeat, progress and facts. Elsewhere, nothing. Idempotent."""
    watch.join()
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.update_from_output, "__wrapped__"):
        Scheduler.update_from_output = _marked(Scheduler.update_from_output)


def _marked(update: Any) -> Any:
    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            watch.progress("tokens", scheduler_output.total_num_scheduled_tokens)
            watch.fact("scheduler", lambda: _describe(self))
        return outputs

    return update_from_output


def _describe(scheduler: Any) -> str:
    running, waiting = scheduler.get_request_counts()
    return f"{running} running, {waiting} waiting, {scheduler._pause_state.name.lower()}"

"""Pool of processes that run the environments of an engine's samples. Each sample has a process to
itself.

Invariants:
- a failure of an environment affects only its sample: an exception, a timeout or a crash raises
  EnvironmentFailed for that sample. After a timeout or a crash, the process is killed with its
  descendants (isolation/supervisor.py);
- at most `processes` samples use an environment at a time. The other samples wait, and their time
  limits start only when they have a process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.environments import LOADER, EpisodeStep, Message, TurnContent
from megatron_async_rl.rollout.isolation.supervisor import (
    START_S,
    OutOfTime,
    Supervisor,
    UserCode,
    UserCodeError,
    UserCodeStartError,
    UserProcess,
    UserProcessEnded,
)
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.watchdog import watch

AGENT_GRACE_S = 30.0
"""Time after an agent's time limit before the watchdog regards the agent as stalled."""


class EnvironmentFailed(Exception):
    """The environment of one sample failed. The message has the reason."""


class Environments:
    """Pool of processes for one event loop. Call `start` first."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._slots = asyncio.Semaphore(settings.processes)
        self._idle: list[UserProcess] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.at_work = 0
        """Number of running agents without a pending call of the model."""
        code = UserCode(
            loader=LOADER,
            arguments={"environment": settings.model_dump(mode="json")},
            # A fork server imports the environment once, so that processes start fast.
            preload=True,
            memory_mib=settings.memory_mib,
            environment=_without_proxy(),
        )
        self.supervisor = Supervisor(code)

    def start(self) -> None:
        """Start the fork server, which imports the environment while the engine starts."""
        self.supervisor.start()

    async def ready(self) -> None:
        """Return once the environment is imported. Raises UserCodeStartError."""
        name = f"the environment {self.settings.name} to be imported"
        with watch.doing("wait", name, START_S):
            await self.supervisor.imported()

    async def open(self) -> EnvironmentSession:
        """Return a session for one sample, once a process is free. Raises EnvironmentFailed."""
        name = f"room in the environment {self.settings.name} (rollout.environment.processes)"
        with watch.doing("wait", name) if self._slots.locked() else nullcontext():
            await self._slots.acquire()
        try:
            # The process used last comes first: its memory is warm. An idle process may have died.
            while self._idle:
                if not (process := self._idle.pop()).killed:
                    return EnvironmentSession(self, process)
            return EnvironmentSession(self, await self._start_process())
        # Any exception, cancellation included, must release the slot, or the pool shrinks.
        except BaseException:
            self._slots.release()
            raise

    @contextmanager
    def working_alone(self, left_s: float) -> Iterator[None]:
        """Mark an agent as working without the model for at most `left_s` seconds, so that the
        watchdog does not treat the missing progress as a stall."""
        self.at_work += 1
        try:
            with watch.phase(f"at work in {self.settings.name}", max(0.0, left_s) + AGENT_GRACE_S):
                yield
        finally:
            self.at_work -= 1

    async def _start_process(self) -> UserProcess:
        started: asyncio.Future[UserProcess] = asyncio.get_running_loop().create_future()

        def on_ready(process: UserProcess) -> None:
            if not started.cancelled():
                started.set_result(process)

        def on_end(_: UserProcess, reason: str) -> None:
            if not started.done():
                started.set_exception(UserCodeStartError(reason))

        process = None
        try:
            process = self.supervisor.process(on_ready, on_end)
            return await started
        except (UserCodeStartError, OSError) as error:
            raise EnvironmentFailed(f"no process for the environment: {error}") from error
        except asyncio.CancelledError:
            # The process may be ready by now, and no other code has a reference that could end it.
            if process is not None:
                process.kill()
            raise

    def closing(self, close: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `close` as a task that continues if its caller is cancelled. The pool's own `close`
        cancels it."""
        task = asyncio.create_task(close)
        # The event loop keeps only weak references, so this one protects the running task.
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def release(self, process: UserProcess) -> None:
        """Return a process to the pool, and its slot to a waiting sample."""
        if not process.killed:
            self._idle.append(process)
        self._slots.release()

    def close(self) -> None:
        """Kill all processes and cancel all pending `close` calls."""
        for task in self._closing:
            task.cancel()
        self._idle.clear()
        self.supervisor.close()


class EnvironmentSession:
    """Environment of one sample. Call `reset` once, then `step` for each turn, and always
    `close`."""

    def __init__(self, pool: Environments, process: UserProcess) -> None:
        self._pool, self._process = pool, process

    async def reset(self, prompt: Prompt) -> TurnContent:
        content: str | Sequence[Message] = await self._call("reset", prompt)
        return content

    async def step(self, response: str | Message) -> EpisodeStep:
        return EpisodeStep(**await self._call("step", response))

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """Run an agent and return its reward. Replaces `reset` and `step`."""
        return float(await self._call("run", (prompt, base_url)))

    async def close(self) -> None:
        """Close the environment and return its process to the pool. A cancelled task does not wait
        for the `close` method of the environment."""
        closing = self._pool.closing(self._close())
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            await asyncio.shield(closing)

    async def _close(self) -> None:
        try:
            if not self._process.calls and not self._process.killed:
                await self._call("close", None)
        except EnvironmentFailed:
            pass  # The sample is already complete.
        finally:
            # The task of a pending call was cancelled. Its late result must not reach the next
            # sample, so the process is killed.
            if self._process.calls:
                self._process.kill()
            # In every case, because this also releases the slot in the pool.
            self._pool.release(self._process)

    async def _call(self, method: str, argument: Any) -> Any:
        process, settings = self._process, self._pool.settings
        if process.killed:
            raise EnvironmentFailed("its process has ended")
        # An agent mostly waits for the model; `working_alone` marks the rest of its run.
        kind: watch.ActivityKind = "wait" if method == "run" else "work"
        name = f"{method} of the environment {settings.name}"
        try:
            result = await process.call(
                (method, argument),
                activity=watch.doing(kind, name, settings.timeout_s),
                timeout_s=settings.timeout_s,
            )
        except OutOfTime:
            limit = f"rollout.environment.timeout_s: {settings.timeout_s:g}"
            raise EnvironmentFailed(f"no answer to {method} within {limit}") from None
        except UserProcessEnded as error:
            what = f"its process {error} in {method}; see the engine's log"
            raise EnvironmentFailed(what) from None
        except UserCodeError as error:
            raise EnvironmentFailed(f"{method} raised {error}") from None
        watch.progress("environments")
        return result


def _without_proxy() -> dict[str, str]:
    """Return environment variables that exclude the loopback address, and so the endpoint, from a
    proxy."""
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = ",".join(one for one in (exempt, "127.0.0.1", "localhost") if one)
    return {"no_proxy": names, "NO_PROXY": names}

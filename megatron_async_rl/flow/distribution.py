"""Life cycle of the agents that copy staged weights to memory other than rank 0's. Each machine has
one task, from its first engine to the run's end. If each engine has its own copy, an engine counts
as a machine: its agent is its communicator, and ends with it (collective_agents.py).

         +------------------------------------------------------------+
         v                                                            |
    start --> send each version that an engine there needs --------> lost: kill the agent, wait
              (updates.py decides which version, and when)               for its readers, back off

Invariants:
- an agent is lost when a call fails, when it does not answer for `unresponsive_s`, or when a
  version does not arrive within `send_timeout_s`; every wait here has a limit;
- a lost agent costs the run only time, up to `restarts_per_hour`. After that, the engines of its
  machine are lost with it and restart as after any loss. An engine that must evaluate a version is
  lost at once, because rank 0 waits to overwrite that version;
- agents receive the key of the run's server through Ray.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_async_rl.flow.controller_spec import ControllerSpec
from megatron_async_rl.flow.engine_task import REPORT_S, Restarts
from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.flow.updates import WeightUpdates
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.watch import await_named, cancel_all
from megatron_async_rl.weights.agents import (
    Agent,
    AgentContext,
    AgentSource,
    AgentSpec,
    ReceivingEngine,
    agent_source,
)
from megatron_async_rl.weights.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings from the configuration. `unresponsive_s`: also the longest time without a byte.
    `at_once`: number of machines that receive at a time. `with_engines`: an agent ends with its
    machine's engines. `transport`: the carrier's name."""

    log_dir: Path
    transport: str
    unresponsive_s: float
    send_timeout_s: float
    start_timeout_s: float
    restarts_per_hour: int
    at_once: float
    with_engines: bool


class AgentListener(Protocol):
    """The controller, which is notified of the agents' events."""

    def note(self, text: str) -> None: ...
    def on_machine_lost(self, machine: str, reason: str, *, all_engines: bool) -> None:
        """No weights reach `machine`. Unless `all_engines`, its agent will start again."""

    def on_error(self, error: BaseException) -> None: ...


class WeightAgents:
    """All agents, on one loop, which must be running."""

    def __init__(
        self,
        updates: WeightUpdates,
        source: AgentSource,
        listener: AgentListener,
        settings: AgentSettings,
    ) -> None:
        self._source = source
        self._updates = updates
        self._listener = listener
        self._settings = settings
        self._running: dict[str, Agent] = {}
        """Running agents by machine."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun = 0
        self._task = asyncio.create_task(self._guarded(self._look()), name="agents")

    def stage(self, version: int, manifest: Manifest) -> None:
        """Let agents fetch `version`."""
        self._source.stage(version, manifest)

    def release(self, version: int) -> None:
        """Stop sending versions before `version`: their memory may be overwritten."""
        self._source.release(version)

    async def close(self, timeout_s: float) -> None:
        """End every agent and free its copies; kill an agent that does not stop within
        `timeout_s`."""
        # First, because these tasks would replace every agent that ends.
        await cancel_all([self._task, *self._tasks.values()])
        closings = [asyncio.ensure_future(agent.close()) for agent in self._running.values()]
        if closings:
            with watch.doing("wait", "the agents to stop", timeout_s):
                _, late = await asyncio.wait(closings, timeout=timeout_s)
            for closing in late:
                closing.cancel()
            for error in await asyncio.gather(*closings, return_exceptions=True):
                if error is not None:
                    log.warning("an agent did not stop by itself: %s", error)
        for agent in self._running.values():
            agent.kill()
        self._running.clear()
        # After the agents, which may still be fetching.
        await asyncio.to_thread(self._source.close)

    async def _look(self) -> None:
        """Start a task for every machine that gets an engine."""
        while True:
            machine = await self._updates.until_elsewhere(self._tasks)
            index, self._begun = self._begun, self._begun + 1
            work = self._guarded(self._keep(machine, index))
            task = self._tasks[machine] = asyncio.create_task(work, name=f"agent-{index}")
            task.add_done_callback(functools.partial(self._ended, machine))

    def _ended(self, machine: str, _: asyncio.Task[None]) -> None:
        del self._tasks[machine]

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - an internal error must end the run, not a task
            self._listener.on_error(error)

    async def _keep(self, machine: str, index: int) -> None:
        settings, updates = self._settings, self._updates
        spec = AgentSpec(
            index=index,
            machine=machine,
            log_dir=settings.log_dir,
            transport=settings.transport,
            silence_s=settings.unresponsive_s,
        )
        restarts = Restarts(settings.restarts_per_hour)
        place = machine.partition("@")[0] if settings.with_engines else f"machine {machine[:12]}"
        while True:
            # A machine may get engines again; an engine's own memory ends with the engine.
            if not settings.with_engines:
                await updates.until_reached(machine)
            elif not updates.reaches(machine):
                return
            reason = await self._life(spec)
            if reason is None:
                return
            number = restarts.begin()
            lost = f"{spec.name}, which copies weights to {place}, is lost"
            if number:
                again = f"restart {number} of {settings.restarts_per_hour} within an hour"
                self._listener.note(f"{lost}; {again}. Why: {reason}")
            else:
                self._listener.note(f"{lost}, and the engines there with it. Why: {reason}")
            why = f"no weights reached {'it' if settings.with_engines else 'its machine'}: {reason}"
            self._listener.on_machine_lost(machine, why, all_engines=not number)
            if number:
                # Their mappings keep the old copies in memory: a new agent would need the same
                # amount again.
                with watch.doing("wait", f"the engines that read what {spec.name} had copied"):
                    await updates.until_unread(machine)
                await asyncio.sleep(restarts.delay_s())
            else:
                # Its engines were lost with it; the next engine there gets a new agent.
                await updates.until_left(machine)

    async def _life(self, spec: AgentSpec) -> str | None:
        """Start an agent and serve its machine until the agent is lost; return the reason. None: it
        ended with its engines."""
        machine, with_engines = spec.machine, self._settings.with_engines
        reason = None
        try:
            limit_s = self._settings.start_timeout_s
            with watch.phase(f"starting {spec.name}", limit_s):
                starting = self._source.launch(spec)
                agent = await await_named(f"{spec.name} to start", starting, limit_s)
            self._running[machine] = agent
            works: list[asyncio.Future[None]] = [
                asyncio.ensure_future(self._send(spec, agent)),
                asyncio.ensure_future(self._listen(spec, agent)),
            ]
            if with_engines:
                works.append(asyncio.ensure_future(self._updates.until_left(machine)))
            try:
                done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                for work in done:
                    work.result()
            finally:
                await cancel_all(works)
        except Exception as error:  # noqa: BLE001 - another agent may work, whatever the error
            if not with_engines or self._updates.reaches(machine):  # else it failed with its engine
                reason = f"{type(error).__name__}: {error}"
        # None if the agent has not started.
        running = self._running.pop(machine, None)
        if running is not None:
            running.kill()
        # Killed first, so that it cannot overwrite copies that engines are still reading.
        self._updates.lose_copies(machine)
        return reason

    async def _send(self, spec: AgentSpec, agent: Agent) -> None:
        while True:
            async with self._updates.sending(spec.machine, self._settings.at_once) as staged:
                # Within the block, which protects rank 0's slot from writes while it is read.
                copy = await await_named(
                    f"version {staged.version} to reach {agent.where}",
                    agent.fetch(staged.version, staged.manifest),
                    self._settings.send_timeout_s,
                )
                self._updates.arrived(spec.machine, staged, copy)
            watch.progress("versions relayed")

    async def _listen(self, spec: AgentSpec, agent: Agent) -> None:
        limit_s = self._settings.unresponsive_s
        while True:
            await await_named(f"{spec.name} to answer", agent.alive(), limit_s)
            await asyncio.sleep(min(REPORT_S, limit_s / 4))


def weight_agents(
    spec: ControllerSpec, all_engines: Fleet, listener: AgentListener
) -> WeightAgents | None:
    """Return the agents of a run; None if all engines read rank 0's memory. Raises RuntimeError if
    this machine cannot serve weights."""
    engine, fleet = spec.engines[0], spec.fleet
    if not engine.carrier.agents:
        return None

    def engine_at(machine: str) -> ReceivingEngine | None:
        slot = next((one for one in all_engines.slots if one.machine == machine), None)
        if slot is None or slot.engine is None:
            return None
        return ReceivingEngine(slot.name, slot.spec.rollout.workers, slot.engine.receive)

    per_engine = engine.carrier.per_engine
    settings = AgentSettings(
        at_once=1 if per_engine else math.inf,
        with_engines=per_engine,
        transport=engine.transport,
        log_dir=engine.log_dir,
        unresponsive_s=fleet.unresponsive_s,
        send_timeout_s=fleet.update_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        restarts_per_hour=fleet.restarts_per_hour,
    )
    context = AgentContext(
        log_dir=engine.log_dir,
        limit_s=fleet.unresponsive_s,
        sender_gpu=spec.sender_gpu,
        engine_at=engine_at,
    )
    source = agent_source(engine.carrier.agents, context)
    return WeightAgents(all_engines.updates, source, listener, settings)

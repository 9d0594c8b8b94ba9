"""Prompts in, train batches out: one Ray actor that owns the engines, the scheduler and the source.

                  staged(v)  next_batch(v)  evaluate(v)  state()          rank 0
    ------------------|------------|------------|-----------|--------------------------
                      v            ^            |           |             Controller
    source --admit--> scheduler ---+            |     source, scheduler   (one event loop)
                      |       ^                 v
                 requests   samples     held-out requests
                      v       |                 v
                    fleet: lanes -----> one task per engine: start, load, verify, serve, restart
                    agents -----------> one task per other machine with engines: copy the weights

Each part waits for one thing only. The scheduler is called and waits for nothing. A lane waits for
an engine that has room and holds its version. An engine's task waits for a report or for its turn
to load, and rank 0 waits for a batch. Samples unblock `next_batch`, a newer version in an engine
unblocks admission, and `staged` unblocks the engines' updates.

Invariants:
- only the scheduler makes decisions (scheduler.py); the fleet tracks the engines and their versions
  (fleet.py), and its requests track the work of each engine; the controller connects them;
- `on_sample` is the only place that accepts a sample. With a reward per group, the sample is logged
  and its group finished once the reward has arrived (`_score`);
- `state()` holds the prompts that are admitted and not consumed, and the responses so far. A resume
  continues with them and requests the rest again: nothing is lost, and nothing is sampled twice;
- an unrecoverable error (no engine left, a reward that must not fail, wrong weights) fails the
  waiting call, or the next one, with its cause;
- held-out evaluation uses the same fleet, but neither the source nor the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_async_rl.flow.buffer import (
    EMPTY,
    buffer_bytes,
    prompt_fields,
    prompt_of,
    read_buffer,
    train_batch,
)
from megatron_async_rl.flow.controller_spec import (
    ControllerSpec,
    DataState,
    Handout,
    PromptProvider,
)
from megatron_async_rl.flow.distribution import WeightAgents, weight_agents
from megatron_async_rl.flow.engine_task import Launch
from megatron_async_rl.flow.errors import (
    BatchTimeout,
    EngineFailed,
    RequestGivenUp,
    batch_timeout,
    require_a_reward,
    reward_failed,
)
from megatron_async_rl.flow.evaluation import EvalResult, evaluate
from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.flow.ipc_buckets import BufferRequest
from megatron_async_rl.flow.router import Listener
from megatron_async_rl.flow.sample_log import SampleLog, open_sample_log
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.flow.step_parts import StepParts
from megatron_async_rl.flow.summary import (
    Ages,
    FlowCounts,
    describe_flow,
    late_groups,
    summarise_dropped,
)
from megatron_async_rl.rollout.engine_process import start_engine
from megatron_async_rl.rollout.scoring import GroupRewards
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, TrainBatch
from megatron_async_rl.samples.types import Aborted, Request
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import note
from megatron_async_rl.watchdog.logs import log_package_to
from megatron_async_rl.watchdog.processes import collect_rarely
from megatron_async_rl.watchdog.watch import cancel_all, name_this_process
from megatron_async_rl.weights.manifest import BucketRef, Manifest

log = logging.getLogger(__name__)

NAME = "controller"
STOP_POLL_S = 0.5
STOP_ENGINES_S = 15.0
STOP_AGENTS_S = 5.0


class Controller(Listener):
    """A Ray actor named `controller`, whose methods all run on one asyncio loop. `launch`: starts
    an engine. Rank 0 calls `start`, then `staged`, `next_batch`, `evaluate` and `state`."""

    def __init__(
        self, source: PromptProvider, spec: ControllerSpec, launch: Launch = start_engine
    ) -> None:
        self._source = source
        self._spec = spec
        self._launch = launch
        log_dir = None if spec.run_dir is None else spec.run_dir / "logs"
        self._rewards = GroupRewards(spec.reward, log_dir)
        self._scheduler = Scheduler(
            spec.flow,
            steps=spec.steps,
            fresh_steps=spec.fresh_steps,
            seed=spec.seed,
            on_dropped=self._on_dropped,
            on_group_dropped=self._on_group_dropped,
            scored_whole=self._rewards.any,
        )
        self._parts = StepParts(streams=spec.flow.stream == "groups")
        self._sample_log = SampleLog()
        self._resumed: Mapping[str, Any] = {}
        self._left_behind = EMPTY
        self._oldest = 0
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        self._ages = Ages()
        self._counts = FlowCounts()
        # Held-out requests have fixed numbers: two evaluations would share their ids.
        self._evaluating = asyncio.Lock()
        self._agents: WeightAgents | None = None  # for engines on other machines
        self._orders: asyncio.Task[None] | None = None

    async def start(self, position: DataState | None = None) -> None:
        """Start the engines and continue at `position`; return when all engines have started.
        Raises EngineStartError, BufferBroken, and ValueError if the position belongs to other
        data."""
        spec = self._spec
        if spec.run_dir is not None:
            log_package_to(spec.run_dir / "logs" / "controller.log")
            name_this_process(NAME)
            watch.join(NAME)
            watch.fact("flow", lambda: describe_flow(self.stats(), self._rewards.waiting))
            self._sample_log = open_sample_log(spec.run_dir, spec.samples, spec.flow.async_ratio)
        if position is not None:
            # Before engines start, which takes minutes: the position may be refused.
            self._source.load_state(position.state["source"])
            self._resumed, self._oldest = position.state, position.oldest
            if position.buffer is not None:
                self._left_behind = read_buffer(position.buffer)
        self._fleet = Fleet(
            spec.engines,
            self._launch,
            self,
            spec.fleet,
            evaluators_from=len(spec.engines) - spec.evaluators,
        )
        self._agents = weight_agents(spec, self._fleet, self)
        await asyncio.gather(self._fleet.started(), self._rewards.start())
        if spec.run_dir is not None:
            orders = self._fleet.follow_orders(spec.run_dir / watch.ENGINES, spec.timeout_s)
            self._orders = asyncio.create_task(orders)
        collect_rarely()

    # Weights

    async def staged(self, version: int, manifest: Manifest) -> None:
        """Let engines load `version`, each in its turn. Return when neither an engine nor an agent
        reads an older version."""
        self._require_no_failure()
        # No await before the next line: agents can send any version that an engine may request.
        if self._agents is not None:
            self._agents.stage(version, manifest)
        self._fleet.updates.stage(version, manifest)
        with watch.doing("wait", f"engines and agents to be done with versions before {version}"):
            await self._fleet.updates.until_released(version)
        # Not earlier: until here an agent may have been reading an older version.
        if self._agents is not None:
            self._agents.release(version)
        self._require_no_failure()

    async def loaded(self, version: int) -> None:
        """Wait until every present engine holds `version`, whose buckets are filled on demand."""
        self._require_no_failure()
        with watch.doing("wait", f"engines to load version {version}"):
            await self._fleet.updates.until_staged(version)
            await self._fleet.updates.until_loaded(version)
        self._require_no_failure()

    async def next_buffer_request(self, done: BucketRef | None) -> BufferRequest:
        """Return the ranks' next request about the buckets of an on-demand version. `done`:
        location of the bucket that was requested last."""
        return await self._fleet.updates.next_buffer_request(done)

    def on_version(self, version: int) -> None:
        """Begin the run with the first version; admit more prompts with each newer one."""
        now = self._scheduler.version
        if now is None:
            self._begin_flow(version)
        elif version > now:
            self._scheduler.advance(version)
        self._admit()
        self._progress.set()

    def _begin_flow(self, version: int) -> None:
        """Continue with the groups that an earlier start of the run had not consumed."""
        pending = [
            (int(index), prompt_of(fields)) for index, fields in self._resumed.get("pending", [])
        ]
        index = int(self._resumed.get("next_index", 0))
        again = self._scheduler.start(version, index, pending, self._left_behind, self._oldest)
        # The scheduler owns these groups from here on.
        self._left_behind = EMPTY
        self._sample_log.begin(
            int(self._resumed.get("sample_log", 0)),
            int(self._resumed.get("sample_log_segment", -1)),
        )
        for index in self._scheduler.waiting():
            self._sample_log.admitted(index, self._scheduler.next_step + 1)
        for index, _ in self._scheduler.running():
            self._ages.begin(index)
            self._score(index)
        # Under the version of their admission, from which their deadline follows.
        for request, admitted_under in again:
            self._fleet.requests.put([request], admitted_under)

    # Batches

    async def next_batch(self, version: int) -> Handout | None:
        """Return the batch that trains `version`; engines may still hold older versions. Return
        None once the user has requested the run to stop, unless the batch was taken before. With
        streamed groups, return a part of the batch as soon as one of its groups has finished.

        Raises the error that ended the flow at once; BatchTimeout after `timeout_s` seconds in
        which no response grew; RewardFailed if every reward of the batch failed; StalenessViolated
        if a sample breaks the law.
        """
        with watch.doing("wait", f"responses for the batch of version {version}"):
            batch = await self._take(version)
        if batch is None or not batch.complete:
            return None if batch is None else Handout(batch=batch, metrics={})
        self._ages.keep(index for index, _ in self._scheduler.running())
        self._admit()
        updates = self._fleet.updates
        metrics = self._counts.since_last(
            self.stats(), self._fleet.slots, updates.last, updates.copies.last
        )
        metrics |= summarise_dropped(self._scheduler.drain_dropped())
        return Handout(batch=batch, metrics=metrics)

    async def sleep(self) -> None:
        """Put colocated engines to sleep until they load the weights that this batch makes. Return
        when all have released their memory; an engine that fails to do so is lost. Raises
        DeadlineExceeded if one starts or loads for too long."""
        await self._fleet.sleep(max(self._spec.timeout_s, self._spec.start_timeout_s))
        self._require_no_failure()

    async def _take(self, version: int) -> TrainBatch | None:
        waited_from = time.monotonic()
        while True:
            # Checked before a batch is taken: a batch that is taken trains.
            if self._stop_requested():
                return None
            self._require_no_failure()
            if self._scheduler.version is not None:
                groups = self._scheduler.take(version)
                if groups is not None:
                    return self._batch(groups, version)
                if (part := self._parts.next(self._scheduler, version)) is not None:
                    return part
            # No await since `take` failed, so no event is lost.
            self._progress.clear()
            # Counted from the newest sign of life: a growing response is not late.
            left = (
                max(waited_from, self._fleet.requests.moved_at, self._rewards.moved_at)
                + self._spec.timeout_s
                - time.monotonic()
            )
            if left <= 0:
                raise self._timed_out(version)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), min(left, STOP_POLL_S))

    def _batch(self, groups: Sequence[SampleGroup], version: int) -> TrainBatch:
        samples = [sample for group in groups for sample in group.samples]
        # Before the log counts the samples as trained.
        require_a_reward(samples, version + 1)
        batch = [group.samples for group in groups]
        parts = self._parts.complete(groups)
        self._sample_log.trained([group.index for group in groups], batch, version + 1, parts)
        return train_batch(groups, version, parts)

    def _stop_requested(self) -> bool:
        run_dir = self._spec.run_dir
        return run_dir is not None and (run_dir / watch.STOP).exists()

    def _timed_out(self, version: int) -> BatchTimeout:
        late = late_groups(self._scheduler, self._fleet.requests, self._ages)
        held = [slot.version for slot in self._fleet.slots]
        return batch_timeout(version, self._spec.timeout_s, late, held)

    # Events of the fleet

    def on_sample(self, sample: SampleRow, request: Request) -> None:
        self._counts.add(sample, request)
        # Otherwise it is logged with the reward of its group.
        if not self._rewards.any:
            self._sample_log.finished(sample)
        if not sample.valid:
            self._on_failed_reward(sample)
        self._scheduler.on_sample(sample, request.group)
        if self._rewards.any:
            self._score(request.group)
        self._go_on()

    def _score(self, index: int) -> None:
        """Request the reward of a group that has all its responses and no reward yet."""
        group = self._scheduler.unscored(index)
        if group is not None:
            self._rewards.begin(group, self._on_scored, self.on_error)

    def _on_scored(self, group: SampleGroup, samples: Sequence[SampleRow]) -> None:
        """Accept the rewards of a group, which may have been dropped meanwhile."""
        failed_before = {one.id for one in group.samples if not one.valid}
        failed = [one for one in samples if not one.valid and one.id not in failed_before]
        self._counts.responses["reward_errors"] += len(failed)
        for sample in failed:
            self._on_failed_reward(sample)
        # None: the group was dropped meanwhile, and the drop has logged its samples.
        if self._scheduler.unscored(group.index) is not None:
            for sample in samples:
                self._sample_log.finished(sample)
            self._scheduler.on_scored(group.index, samples)
        self._go_on()

    def _on_failed_reward(self, sample: SampleRow) -> None:
        failed = sample.sample()
        log.warning(
            "reward failed on sample %s: %s; response %r",
            failed.id,
            failed.reward_error,
            failed.text[:200],
        )
        if self._spec.reward.on_error == "stop":
            self.on_error(reward_failed([sample]))

    def _on_group_dropped(self, group: int, reason: str) -> None:
        self._sample_log.group_dropped(group, self._scheduler.next_step + 1, reason)

    def _on_dropped(self, sample: SampleRow, reason: str, finished: bool) -> None:
        if self._rewards.any and not finished:
            self._sample_log.finished(sample)
        self._sample_log.dropped(sample, self._scheduler.next_step + 1, reason)

    def on_abort(self, aborted: Aborted, request: Request) -> Request:
        return self._scheduler.on_abort(aborted, request.group)

    def on_give_up(self, request: Request, reason: str) -> None:
        log.error("%s", reason)
        if self._scheduler.on_give_up(request.id, request.group):
            self.note(f"{reason}; its group is dropped")
        self._go_on()

    def on_error(self, error: BaseException) -> None:
        """Record the error that ends the run. The first error counts; the others follow from it."""
        if self._failure is None:
            log.error("%s", error)
            self._failure = error
        # `next_batch` waits for `_progress`, evaluations for futures of their own: end both.
        self._fleet.requests.fail_evaluations(error)
        self._progress.set()

    def on_machine_lost(self, machine: str, reason: str, *, all_engines: bool) -> None:
        self._fleet.lose_machine(machine, reason, all_engines=all_engines)

    def note(self, text: str) -> None:
        log.info("%s", text)
        if self._spec.run_dir is not None:
            try:
                note(self._spec.run_dir, text)
            except OSError:
                log.exception("the event could not be written")

    def _go_on(self) -> None:
        """Admit more, and wake the trainer only if there may be a batch, not for every response."""
        self._admit()
        if self._parts.streams or self._scheduler.may_take(self._scheduler.next_step):
            self._progress.set()

    def _admit(self) -> None:
        # After a failure nothing more is requested: it could not train.
        if self._failure is None and self._scheduler.version is not None and self._scheduler.room():
            self._fleet.requests.put(self._admitted(), self._scheduler.version)

    def _admitted(self) -> Iterator[Request]:
        while self._scheduler.room():
            requests = self._scheduler.admit(self._source.next)
            self._sample_log.admitted(requests[0].group, self._scheduler.next_step + 1)
            self._ages.begin(requests[0].group)
            yield from requests

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Evaluation

    async def evaluate(self, version: int) -> EvalResult | None:
        """Return the result of the held-out prompts, sampled as in training by engines that hold
        `version`, the version staged last; separate evaluation engines load it first. Evaluations
        run one at a time.

        Return None if the evaluation failed and training continues without it; the reason is
        noted.
        """
        self._require_no_failure()
        fleet = self._fleet
        try:
            async with self._evaluating:
                if self._spec.evaluators:  # the others may have begun with weights of their own
                    with watch.doing("wait", f"version {version} to be staged"):
                        await fleet.updates.until_staged(version)
                fleet.prepare_evaluation(version)
                with watch.doing("wait", f"the evaluation of version {version}"):
                    return await evaluate(
                        fleet.requests,
                        self._spec.held_out,
                        version,
                        self._spec.timeout_s,
                        on_reward_error=self._spec.reward.on_error,
                        rewards=self._rewards,
                        on_answers=lambda answers: self._sample_log.evaluated(answers, version),
                    )
        except (EngineFailed, RequestGivenUp) as error:
            self._require_no_failure()
            self.note(f"version {version} is not evaluated: {error}")
            return None

    # Engines that join and leave

    async def add_engine(self) -> int:
        """Add a training engine with the settings of the first; return its index."""
        return self._fleet.add(self._spec.engines[0])

    async def remove_engine(self, index: int) -> None:
        """Remove an engine; its requests continue on others. Raises ValueError if it does not exist
        or no other engine serves."""
        await self._fleet.remove(index, self._spec.timeout_s)

    # Position and counts

    async def state(self) -> DataState:
        """Return the position at one moment; reports of engines arrive while it is written."""
        # Both before the first await, so that they show the same moment.
        state, began = self._state(), self._scheduler.version is not None
        buffer = self._scheduler.buffer() if began else self._left_behind
        # In a thread: the event loop must process engine reports while the disk is slow.
        await asyncio.to_thread(self._sample_log.flush)
        log = self._sample_log.mark
        if log is not None:
            state["sample_log_segment"] = log.segment
        return DataState(state=state, buffer=await asyncio.to_thread(buffer_bytes, buffer), log=log)

    def _state(self) -> dict[str, Any]:
        """Return the source's position, and its prompts that are not consumed."""
        if self._scheduler.version is None and self._resumed:
            return dict(self._resumed)
        pending = [[index, prompt_fields(prompt)] for index, prompt in self._scheduler.pending()]
        counts = self._scheduler.counts()
        return {
            "source": self._source.state(),
            "consumed": int(self._resumed.get("consumed", 0)) + counts["consumed"],
            "next_index": self._scheduler.next_index,
            "pending": pending,
            "sample_log": self._sample_log.position,
        }

    def stats(self) -> dict[str, Any]:
        """Return counts since `start`; see FlowCounts.stats."""
        running = (index for index, _ in self._scheduler.running())
        return self._counts.stats(
            self._scheduler.counts(),
            self._scheduler.version,
            self._fleet.slots,
            waiting=self._fleet.requests.waiting(),
            oldest_s=self._ages.oldest(running),
        )

    async def close(self) -> None:
        """End the engines, the agents and the sample log. `state()` still returns the engines' open
        requests."""
        # First: a late reward must not reach a fleet that has ended.
        self._rewards.close()
        if self._orders is not None:
            await cancel_all([self._orders])
        await self._fleet.close(STOP_ENGINES_S)
        # After the engines, which may still read what agents hold.
        if self._agents is not None:
            await self._agents.close(STOP_AGENTS_S)
        await asyncio.to_thread(self._sample_log.close)

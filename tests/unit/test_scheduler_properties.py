"""The scheduler under a random world: engines that answer in any order with any weights they may
hold, each its own, fail or leave and are asked again, load new weights late, and trainers that stop
and resume. Whatever happens, the law holds, the counts balance, nothing starves."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_async_rl.config.flow import ExactLag, FlowConfig, OldestFirst, Replay, Windowed
from megatron_async_rl.flow.buffer import EMPTY, Buffer, GroupState, buffer_bytes, read_buffer
from megatron_async_rl.flow.group_table import DROPPED
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.flow.staleness import admitted_limit, is_feasible
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rows import SampleGroup, SampleRow
from megatron_async_rl.samples.types import Aborted, PartialResponse, Request
from tests.thorough import examples
from tests.train_batches import row
from tests.unit.scheduler_harness import samples_of

EVENTS = (
    *("answer",) * 6,
    "train",
    "train",
    "train",
    "load",
    "load",
    "admit",
    "admit",
    "sample",
    "abort",
    "lose",
    "give up",
    "resume",
)
"""Rules of a long history, each repeated as often as it is named."""
ENGINES = 3
RATIOS = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 2.4, 3.0])


@st.composite
def flows(draw: st.DrawFn) -> FlowConfig:
    """Every setting that config/flow.py lets through, at a small size."""
    kind = draw(st.sampled_from([OldestFirst, Windowed, ExactLag, Replay]))
    ratio = draw(RATIOS)
    selection: OldestFirst | Windowed | ExactLag | Replay = OldestFirst()
    if kind is Windowed:
        selection = Windowed(window=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])))
    if kind is ExactLag:
        ratio = float(draw(st.integers(0, 3)))
        selection = ExactLag(lag=int(ratio))
    if kind is Replay:
        selection = Replay(
            recent=draw(st.sampled_from([0.0, 0.5, 1.0])), per_prompt=draw(st.integers(1, 4))
        )
    paced = kind in (ExactLag, Replay)
    whole = math.ceil(ratio)
    size = draw(st.integers(1, 2))
    return FlowConfig(
        prompts_per_step=draw(st.integers(1, 3)),
        group_size=size,
        async_ratio=ratio,
        selection=selection,
        late="drop" if not paced and ratio > 0 and draw(st.booleans()) else "wait",
        oversample=draw(st.floats(0.0, whole - ratio)) if kind is Windowed else 0.0,
        dynamic_sampling=kind is not Replay and size > 1 and draw(st.booleans()),
    )


class World(RuleBasedStateMachine):
    """`newest`: the version the trainer has made last. `held`: what each engine holds; the
    scheduler knows of the newest of these."""

    @initialize(
        flow=flows(),
        steps=st.none() | st.integers(1, 12),
        fresh=st.integers(0, 3),
        base=st.sampled_from([0, 0, 2]),
    )
    def begin(self, flow: FlowConfig, steps: int | None, fresh: int, base: int) -> None:
        self.steps = None if steps is None else base + steps
        self.fresh = fresh
        self.prompts = 0
        self.dropped: list[str] = []
        self.trained: list[str] = []
        self.begin_at(base, flow, 0, [])
        self.first_versions = {max(base, fresh)}

    def begin_at(
        self,
        version: int,
        flow: FlowConfig,
        next_index: int,
        pending: list[tuple[int, Prompt]],
        buffer: Buffer = EMPTY,
        oldest: int = 0,
    ) -> None:
        self.flow, self.base, self.newest = flow, version, version
        self.held = [version] * ENGINES
        self.scheduler = Scheduler(
            flow, steps=self.steps, fresh_steps=self.fresh, seed=1, scored_whole=False
        )
        requests = self.scheduler.start(version, next_index, pending, buffer, oldest)
        self.left, self.admitted = pending, set(waiting(self.scheduler))
        self.places = {entry.index: entry.prompt for entry in waiting(self.scheduler).values()}
        """Admitted by this run, from the source or a former run, and not consumed; dropped ones
        stay in it."""
        self.wanted = {request.id: request for request, _ in requests}
        self.minimum_version = {
            request.id: max(minimum_version, ends_with(request))
            for request, minimum_version in requests
        }
        """The version that an engine must hold at least to be asked for a request."""
        self.began: dict[str, tuple[int, int]] = {}
        """Per request that an engine has begun: versions of its first and its latest token."""
        self.answered = self.aborted = self.given_up = 0
        self.asked = len(requests)

    def source(self) -> Prompt:
        self.prompts += 1
        return Prompt(id=f"p{self.prompts % 5}", text="", token_ids=(1,))

    # The engines

    def admit_one(self) -> None:
        requests = self.scheduler.admit(self.source)
        version = self.scheduler.version
        assert version == max(self.held), "of the engines that are ahead"
        self.places[requests[0].group] = requests[0].prompt
        self.admitted.add(requests[0].group)
        for request in requests:
            assert request.id not in self.wanted
            self.wanted[request.id] = request
            self.minimum_version[request.id] = version
            self.asked += 1

    @precondition(lambda self: self.scheduler.room())
    @rule(count=st.integers(1, 20))
    def admit(self, count: int) -> None:
        self.admit_some(count)

    def admit_some(self, count: int) -> None:
        while count and self.scheduler.room():
            self.admit_one()
            count -= 1

    def sampled(self, request: Request, last: int) -> tuple[int, int]:
        first = self.began[request.id][0] if request.id in self.began else last
        self.began[request.id] = first, last
        return first, last

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def an_engine_samples_some_tokens(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.wanted.values())))
        able = self.able(request)
        if able:
            self.sampled(request, data.draw(st.sampled_from(able)))

    def able(self, request: Request) -> list[int]:
        """Versions of engines that may continue with the request."""
        latest = self.began.get(request.id, (0, 0))[1]
        return sorted(
            {held for held in self.held if held >= max(self.minimum_version[request.id], latest)}
        )

    def versions(self, request: Request) -> list[int]:
        """Versions of its tokens after the slowest engine that may continue it has done so."""
        before = [] if request.prefix is None else request.prefix.versions.tolist()
        return [*before, *self.sampled(request, self.able(request)[0])]

    def answer(self, request: Request, reward: float | None) -> None:
        versions = self.versions(request)
        sample = Sample(
            id=request.id,
            prompt=request.prompt,
            response_ids=np.arange(len(versions), dtype=np.int32) + self.answered % 3,
            behavior_logprobs=np.zeros(len(versions), dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            loss_mask=np.ones(len(versions), dtype=np.uint8),
            text="",
            finish_reason="stop",
            reward=reward or 0.0,
            reward_error="no idea" if reward is None else None,
        )
        del self.wanted[request.id]
        self.answered += 1
        self.scheduler.on_sample(row(sample, request.group), request.group)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.0, 1.0, None]))
    def a_response_finishes(self, data: st.DataObject, reward: float | None) -> None:
        self.answer(data.draw(st.sampled_from(list(self.wanted.values()))), reward)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
    def several_responses_of_a_group_finish(
        self, data: st.DataObject, rewards: list[float]
    ) -> None:
        group = data.draw(
            st.sampled_from(sorted({request.group for request in self.wanted.values()}))
        )
        for request, reward in zip(
            [r for r in self.wanted.values() if r.group == group], rewards, strict=False
        ):
            if request.id in self.wanted:
                self.answer(request, reward)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def an_engine_leaves_and_its_requests_go_on_elsewhere(self, data: st.DataObject) -> None:
        self.abort(data.draw(st.sampled_from(list(self.wanted.values()))))

    def abort(self, request: Request) -> None:
        """Abort the request where it stands; without a new token if no engine has begun it."""
        tokens = request.prefix
        if request.id in self.began:
            versions = np.array(self.versions(request), dtype=np.int32)
            zeros = np.zeros(len(versions), dtype=np.int32)
            tokens = PartialResponse(
                response_ids=zeros, behavior_logprobs=zeros.astype(np.float32), versions=versions
            )
        again = self.scheduler.on_abort(Aborted(id=request.id, partial=tokens), request.group)
        assert (again.id, again.prompt.id) == (request.id, request.prompt.id)
        self.aborted += 1
        self.wanted[request.id] = again
        self.minimum_version[request.id] = max(self.minimum_version[request.id], ends_with(again))
        self.began.pop(request.id, None)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def an_engine_is_lost(self, data: st.DataObject) -> None:
        """Its requests begin again on other engines."""
        for request in data.draw(st.sets(st.sampled_from(sorted(self.wanted)))):
            self.began.pop(request, None)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def two_engines_were_lost_with_a_request(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(list(self.wanted.values()))))

    def give_up(self, request: Request) -> None:
        del self.wanted[request.id]
        self.given_up += 1
        self.scheduler.on_give_up(request.id, request.group)

    @precondition(lambda self: min(self.held) < self.newest)
    @rule(data=st.data())
    def an_engine_loads_newer_weights(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, ENGINES - 1))
        self.load(index, data.draw(st.integers(self.held[index], self.newest)))

    def load(self, index: int, version: int) -> None:
        self.held[index] = version
        self.scheduler.advance(max(self.held))

    # The trainer

    @property
    def over(self) -> bool:
        return self.steps is not None and self.newest >= self.steps

    @precondition(lambda self: not self.over)
    @rule()
    def the_trainer_asks_for_a_batch(self) -> None:
        before = waiting(self.scheduler)
        batch = self.scheduler.take(self.newest)
        trained = set() if batch is None else {group.index for group in batch}
        dropped = [
            entry
            for index, entry in before.items()
            if index not in waiting(self.scheduler) and index not in trained
        ]
        assert not dropped or (batch is not None and self.flow.late == "drop"), (
            "dropping is for a batch that it makes possible"
        )
        assert all(entry.finished is None and entry.deadline <= self.newest for entry in dropped)
        if batch is not None:
            self.train(batch)

    def train(self, batch: tuple[SampleGroup, ...]) -> None:
        version, flow = self.newest, self.flow
        assert len(batch) == flow.prompts_per_step
        assert [len(group.samples) for group in batch] == [flow.group_size] * flow.prompts_per_step
        self.newest += 1
        for group in batch:
            self.places.pop(group.index, None)
        if isinstance(flow.selection, Replay):
            return
        self.trained += [sample.id for sample in samples_of(batch)]
        lags = [version - sample.start_version for sample in samples_of(batch)]
        assert (
            0
            <= min(lags)
            <= max(lags)
            <= (math.ceil(flow.async_ratio) if version >= self.fresh else 0)
        )
        if isinstance(flow.selection, ExactLag):
            for sample, lag in zip(samples_of(batch), lags, strict=True):
                assert sample.start_version == sample.last_version
                assert (
                    version < self.fresh
                    or sample.start_version in self.first_versions
                    or lag == flow.selection.lag
                )

    @precondition(lambda self: not self.over)
    @rule(reward=st.sampled_from([0.0, 1.0, None]))
    def whenever_everything_is_answered_and_loaded_the_next_batch_is_there(
        self, reward: float | None
    ) -> None:
        """One engine that has loaded the newest version suffices, whatever the others hold."""
        self.load(0, self.newest)
        while self.scheduler.room() or self.wanted:
            while self.scheduler.room():
                self.admit_one()
            for request in list(self.wanted.values()):
                self.answer(request, reward)
        batch = self.scheduler.take(self.newest)
        assert batch is not None, self.scheduler.counts()
        self.train(batch)

    @rule(seed=st.integers(0, 2**32), times=st.integers(1, 60))
    def much_happens(self, seed: int, times: int) -> None:
        """Any of the above, many times: what goes wrong only after a long history is found here,
        what is simple by the rules."""
        chance = random.Random(seed)
        often = chance.choice((0.05, 0.3, 1.0))
        slow = chance.choice((2, 4, 9))
        for _ in range(times):
            match chance.choice(EVENTS):
                case "admit":
                    self.admit_some(chance.choice((1, 20)))
                case "sample" if self.wanted:
                    request = chance.choice(list(self.wanted.values()))
                    self.sampled(request, chance.choice(self.able(request)))
                case "answer" if self.wanted:
                    first = chance.choice(sorted(self.wanted))
                    others = min(len(self.wanted), chance.choice((0, 4)))
                    for at in {first, *chance.sample(sorted(self.wanted), others)}:
                        if self.wanted[at].group % slow or chance.random() < often:
                            self.answer(self.wanted[at], chance.choice((0.0, 1.0, 1.0, None)))
                case "abort" if self.wanted:
                    self.abort(chance.choice(list(self.wanted.values())))
                case "lose" if self.wanted:
                    self.began.pop(chance.choice(sorted(self.wanted)), None)
                case "give up" if self.wanted and chance.random() < 0.1:
                    self.give_up(chance.choice(list(self.wanted.values())))
                case "load" if min(self.held) < self.newest:
                    index = chance.randrange(ENGINES)
                    self.load(index, chance.randint(self.held[index], self.newest))
                case "train" if not self.over:
                    self.the_trainer_asks_for_a_batch()
                case "resume" if chance.random() < 0.1:
                    self.the_run_stops_and_goes_on_with_its_buffer()
            self.everything_holds()

    def everything_holds(self) -> None:
        self.the_budget_law_holds()
        self.every_group_that_waits_can_still_train_in_time()
        self.nobody_is_kept_from_a_batch_that_is_there()
        self.the_counts_balance()
        self.no_response_trains_twice_or_after_it_was_dropped()

    @precondition(lambda self: self.newest > self.base)
    @rule(flow=st.one_of(st.none(), st.none(), flows()))
    def the_run_stops_and_resumes(self, flow: FlowConfig | None) -> None:
        """Resume with the pending groups alone, also under other settings."""
        self.begin_at(self.newest, flow or self.flow, self.scheduler.next_index, self.all_pending())
        self.first_versions = {max(self.newest, self.fresh)}

    def all_pending(self) -> list[tuple[int, Prompt]]:
        pending, consumed = self.scheduler.pending(), self.scheduler.counts()["consumed"]
        there = {
            index: prompt
            for index, prompt in self.places.items()
            if index in waiting(self.scheduler)
        }
        requested_before = [
            (index, prompt) for index, prompt in self.left if index not in self.admitted
        ]
        assert pending == sorted([*there.items(), *requested_before], key=lambda place: place[0])
        assert consumed == (self.newest - self.base) * self.flow.prompts_per_step
        return pending

    @rule()
    def the_run_stops_and_goes_on_with_its_buffer(self) -> None:
        """All that had come is there again, and all that had not is asked again. Where every reward
        of a batch failed its groups are sampled again, and with exact_lag all others with them."""
        before, pending = self.scheduler, self.all_pending()
        saved, exact = before.buffer(), isinstance(self.flow.selection, ExactLag)
        count, kept = self.flow.prompts_per_step, list[GroupState]()
        urgent = sorted(saved.groups, key=lambda one: (one.deadline, one.index))
        while urgent:
            batch, urgent = urgent[:count], urgent[count:]
            samples = [sample for one in batch for sample in one.samples]
            whole = len(batch) == count and all(one.finished is not None for one in batch)
            if not whole or any(sample.valid for sample in samples):
                kept += batch
        if exact and len(kept) < len(saved.groups):
            kept = []
        halves = {one.index for one in kept if one.finished is None}
        missing = sorted(one.id for one in self.wanted.values() if one.group in halves)
        self.begin_at(
            self.newest, self.flow, before.next_index, pending, read_buffer(buffer_bytes(saved))
        )
        again = self.scheduler.buffer()
        assert contents(again) == contents(replace(saved, groups=tuple(kept)))
        assert sorted(self.wanted) == missing
        assert self.scheduler.pending() == pending
        assert again.equal == saved.equal
        if len(kept) < len(saved.groups):
            self.first_versions.add(max(self.newest, self.fresh))
        if exact and self.steps is None:
            assert set(again.first_versions) <= self.first_versions, (
                "what is checked is not checked less"
            )

    @rule(flow=flows(), oldest=st.integers(0, 5))
    def the_run_goes_on_under_other_settings(self, flow: FlowConfig, oldest: int) -> None:
        """Resume with the part of the buffer that the settings permit; the rest is requested
        again. `oldest`: counted back from the present version."""
        pending, saved = self.all_pending(), self.scheduler.buffer()
        was_exact = isinstance(self.flow.selection, ExactLag)
        self.begin_at(
            self.newest, flow, self.scheduler.next_index, pending, saved, self.newest - oldest
        )
        assert self.scheduler.pending() == pending, "nothing is lost"
        tokens = [
            version
            for sample in finished(self.scheduler.buffer())
            for version in (sample.start_version, sample.last_version)
        ]
        assert min(tokens, default=self.newest) >= self.newest - oldest
        begins = {max(self.newest, self.fresh)}
        self.first_versions = begins | (self.first_versions if was_exact else set())

    # What always holds

    @invariant()
    def the_budget_law_holds(self) -> None:
        counts, flow = self.scheduler.counts(), self.flow
        dropped = sum(counts[reason] for reason in DROPPED)
        limit = admitted_limit(
            max(self.held) - self.base,
            flow.prompts_per_step,
            flow.async_ratio,
            self.fresh - self.base,
            flow.oversample,
        )
        assert counts["admitted"] - dropped <= limit
        if self.steps is not None:
            assert counts["admitted"] - dropped <= (self.steps - self.base) * flow.prompts_per_step

    @invariant()
    def every_group_that_waits_can_still_train_in_time(self) -> None:
        due = Counter(entry.deadline for entry in waiting(self.scheduler).values())
        assert is_feasible(due, self.newest, self.flow.prompts_per_step)

    @invariant()
    def nobody_is_kept_from_a_batch_that_is_there(self) -> None:
        """The scheduler looks for a batch only when there may be one: there is none while it does
        not."""
        scheduler, step = self.scheduler, self.newest
        if not self.over and not scheduler.may_take(step) and not scheduler._must_stand_still(step):
            late = scheduler._late(step)
            others = [one for one in scheduler._table.waiting() if one not in late]
            assert len(scheduler._select(others, step)) < self.flow.prompts_per_step

    @invariant()
    def the_counts_balance(self) -> None:
        counts = self.scheduler.counts()
        dropped = sum(counts[reason] for reason in DROPPED)
        assert (
            counts["admitted"] == counts["consumed"] + dropped + counts["running"] + counts["ready"]
        )
        assert counts["running"] == len(self.scheduler.running())
        assert self.scheduler._table.due == Counter(
            entry.deadline for entry in waiting(self.scheduler).values()
        )
        assert counts["open"] == len(self.wanted)
        assert self.asked == counts["asked"] == self.answered + self.given_up + counts["open"]
        assert counts["aborted"] == self.aborted

    @invariant()
    def no_response_trains_twice_or_after_it_was_dropped(self) -> None:
        self.dropped += [sample.id for sample in self.scheduler.drain_dropped()]
        used = [*self.trained, *self.dropped]
        assert len(set(used)) == len(used)


def ends_with(request: Request) -> int:
    """The version of the last token that it has."""
    return 0 if request.prefix is None else int(request.prefix.versions[-1])


def waiting(scheduler: Scheduler) -> dict[int, GroupState]:
    return {entry.index: entry for entry in scheduler._table.waiting()}


def finished(buffer: Buffer) -> Iterator[SampleRow]:
    return (sample for group in buffer.groups for sample in group.samples)


def contents(buffer: Buffer) -> list[object]:
    """Contents by ids, in the order in which groups are due, finished, and were stored."""
    groups = sorted(buffer.groups, key=lambda g: (g.deadline, g.index))
    return [
        [
            (g.index, g.version, g.deadline, [s.id for s in g.samples], sorted(g.open))
            for g in groups
        ],
        sorted((g.finished, g.index) for g in buffer.groups if g.finished is not None),
        [
            [] if request.prefix is None else request.prefix.versions.tolist()
            for g in groups
            for request in g.open.values()
        ],
        [(prompt.id, [sample.id for sample in samples]) for prompt, samples in buffer.stored],
    ]


World.TestCase.settings = settings(max_examples=examples(40, 15), stateful_step_count=30)
TestWorld = World.TestCase


@settings(max_examples=examples(300, 60))
@given(
    flow=flows(),
    steps=st.none() | st.integers(1, 30),
    fresh=st.sampled_from([0, 0, 3]),
    base=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)
def test_long_histories(
    flow: FlowConfig, steps: int | None, fresh: int, base: int, seed: int
) -> None:
    world = World()
    world.begin(flow, steps, fresh, base)
    world.much_happens(seed, 600)
    if not world.over:
        world.whenever_everything_is_answered_and_loaded_the_next_batch_is_there(1.0)

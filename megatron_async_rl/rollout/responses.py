"""Responses of an engine: submitted one by one, aborted at any token, and scored when they end.

    submit -> vLLM -> _arrived (in vLLM's output loop) -> _collect (one task) -> ReportQueue
               ^                                              |                      ^
               |                                              +-> reward process ----+
               +--- next turn --- environment (a task per sample) <---+              |
                                        +---- its end ---> reward process -----------+

Invariants:
- the engine submits requests as they arrive, and responses finish in any order; no response waits
  for a batch or a group;
- every accepted request ends in the report queue exactly once, as a sample or as an abort, unless a
  failure ends the engine;
- an aborted response has exactly the tokens that vLLM had returned before the abort. An abort does
  not stop the scoring of a response. An aborted response with an environment has no tokens and
  starts again, because the environment's state cannot move to another engine;
- every turn is an ordinary request of vLLM: a pause or an update does not wait for an environment,
  and the current weights read its reply;
- `behavior_logprobs` of a sample are those of the distribution from which its tokens were drawn,
  after temperature and other sampling settings;
- the token that ended a response (end of sequence) is part of it: it was sampled, so it is trained;
- if a failed reward cannot be written to its file, that line is lost and the engine continues.

A response has no time limit, because `vllm/client.py` checks vLLM's process as a whole. Rewards
(`scoring.py`) and environments (`environments/pool.py`) have time limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.continuation import (
    joined,
    recorded_from,
    require_room,
    sample_seed,
    stopped_length,
    truncated,
)
from megatron_async_rl.rollout.engine_state import BusyClock, ReportQueue
from megatron_async_rl.rollout.environments.episode import Episode, Player
from megatron_async_rl.rollout.environments.transcript import TurnRequest
from megatron_async_rl.rollout.rewards.registry import RewardContext
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.rollout.scoring import FailureLog, Scorer
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.client import (
    add_request,
    named_death,
    on_output,
    sampled_logprobs,
    token_versions,
    tokens_so_far,
)
from megatron_async_rl.samples.types import (
    Aborted,
    FinishReason,
    PartialResponse,
    Prompt,
    Request,
)

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Running:
    """A request from its acceptance to its report."""

    request: Request
    started_at: float = field(default_factory=time.time)
    vllm_id: str | None = None
    """Id of the request in vLLM while vLLM samples it; otherwise None."""
    input_length: int = 0
    """Number of tokens that the last turn submitted to vLLM."""
    recorded: int = 0
    """Number of the first of these tokens whose experts an earlier turn recorded."""
    stop: Sequence[str] = ()
    """Strings that end the turn, in addition to the stop strings of its sampling settings."""
    aborted: bool = False
    episode: Episode | None = None
    """Turns of the sample; None if the response is a single turn without an environment."""
    episode_task: asyncio.Task[None] | None = None
    """Task of the episode, until scoring begins."""

    @property
    def prefix_length(self) -> int:
        return 0 if self.request.prefix is None else len(self.request.prefix.response_ids)


class Responses:
    """The responses of one engine, on one event loop.

    `llm`: AsyncLLM of vLLM. `sampling`: name of a held-out set, or None for training ->
    SamplingParams. `conversations`: produces samples of several turns; None if a response is a
    single turn. `version`: returns the version of the weights."""

    def __init__(
        self,
        llm: Any,
        spec: EngineSpec,
        sampling: Mapping[str | None, Any],
        tokenizer: Tokenizer,
        scorer: Scorer,
        busy: BusyClock,
        conversations: Player | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._llm = llm
        self._spec = spec
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._busy = busy
        self._conversations = conversations
        self._version = version
        self._running: dict[str, _Running] = {}
        self._arrived: list[tuple[_Running, Any]] = []
        """Outputs of ended requests, in order, that `_collect` has not handled yet."""
        self._arrival = asyncio.Event()
        self._collector = asyncio.create_task(self._collect())
        self._tasks: set[asyncio.Task[None]] = set()
        """Running episodes and scores. These references are needed, because the event loop itself
        holds tasks only weakly."""
        self._submitted = 0
        """Number of requests submitted to vLLM, from which their names derive."""
        self._failures = FailureLog(spec.reward_log)
        self.reports = ReportQueue()
        self.tokens = 0
        """Number of sampled response tokens, including those of aborted responses."""
        self.generated = 0
        """Number of sampled tokens without those of held-out responses."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest running response in seconds; 0 if there is none."""
        return max(
            (time.time() - entry.started_at for entry in self._running.copy().values()), default=0.0
        )

    @property
    def sampled(self) -> int:
        """Number of tokens that vLLM has returned for running responses."""
        return tokens_so_far(self._llm)

    async def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. Raises ValueError, before accepting any request, if one is already
        running or its prefix leaves no token to sample."""
        ids = [request.id for request in requests]
        repeated = [one for one, count in Counter([*ids, *self._running]).items() if count > 1]
        if repeated:
            raise ValueError(
                f"{self._spec.name} received requests twice: {', '.join(repeated[:8])}"
            )
        for request in requests:
            require_room(request, self._spec.sampling(request.sampling).max_tokens)
        entries = [_Running(request) for request in requests]
        # Before the first await, because an abort may arrive while this loop submits requests.
        self._running |= dict(zip(ids, entries, strict=True))
        for entry in entries:
            if self._conversations is not None:
                entry.episode = Episode(
                    entry.request.prompt, partial(self._submit_turn, entry), self._tokenizer.decode
                )
                work = self._play(entry, entry.episode, self._conversations)
                entry.episode_task = self._start_task(work)
                entry.episode_task.add_done_callback(partial(self._on_episode_end, entry))
            # Aborted while an earlier request of this call was submitted: vLLM never receives it.
            elif entry.aborted:
                self._abort(entry, entry.request.prefix)
            else:
                request, prefix = entry.request, entry.request.prefix
                prefix_ids: list[int] = [] if prefix is None else prefix.response_ids.tolist()
                maximum = self._spec.sampling(request.sampling).max_tokens
                turn_request = TurnRequest(
                    ids=[*request.prompt.token_ids, *prefix_ids],
                    begun=len(prefix_ids),
                    maximum=maximum - len(prefix_ids),
                    read=recorded_from(len(request.prompt.token_ids), prefix),
                )
                await self._submit_turn(entry, turn_request)

    async def abort(self, ids: Sequence[str]) -> None:
        entries = [self._running[one] for one in ids if one in self._running]
        for entry in entries:
            entry.aborted = True
            if entry.episode_task is not None:
                entry.episode_task.cancel()
        # vLLM's output of an aborted request has all tokens that it returned before the abort, and
        # vLLM drops later ones, so no token is lost or counted twice.
        await self._abort_in_vllm([one.vllm_id for one in entries if one.vllm_id is not None])

    async def _abort_in_vllm(self, ids: Sequence[str]) -> None:
        with named_death(self._spec, self._activity):
            await self._llm.abort(ids, internal=True)

    @property
    def _activity(self) -> str:
        """Work of vLLM's process, for the error of its death."""
        return f"it worked on {len(self._running)} responses"

    def close(self) -> None:
        for task in (self._collector, *self._tasks):
            task.cancel()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _submit_turn(self, entry: _Running, turn_request: TurnRequest) -> None:
        """Submit a turn to vLLM. A response without an environment is a single turn."""
        request = entry.request
        # A shallow copy: the lines below replace attributes and change none in place.
        parameters = self._sampling[request.sampling].clone()
        # Every turn has its own seed; with one seed, turns would draw the same random numbers.
        parameters.seed = sample_seed(self._spec.seed, request.group, request.k, turn_request.begun)
        parameters.max_tokens = turn_request.maximum
        entry.input_length, entry.recorded, entry.stop = (
            len(turn_request.ids),
            turn_request.read,
            turn_request.stop,
        )
        if turn_request.stop:
            parameters.stop = [*(parameters.stop or ()), *turn_request.stop]
            parameters.detokenize = True
        if self._spec.records_experts:
            parameters.routed_experts_prompt_start = (
                turn_request.read if self._records(request) else entry.input_length
            )
        self._submitted += 1
        try:
            name = f"{self._spec.index}-{self._submitted}"
            with named_death(self._spec, self._activity):
                collector = await add_request(self._llm, name, turn_request.ids, parameters)
        except Exception as error:
            self.reports.fail(error)
            raise

        entry.vllm_id = collector.request_id
        # Before `on_output`, so that `begin` precedes the `end` of this request.
        self._busy.begin()
        on_output(collector, lambda output: self._on_output(entry, output))
        # An abort that arrived while vLLM accepted the request had no id to abort. Abort it now.
        if entry.aborted or (entry.episode is not None and not entry.episode.waits):
            await self._abort_in_vllm([collector.request_id])

    def _on_output(self, entry: _Running, output: Any) -> None:
        """Store an output for `_collect`. vLLM's output loop calls this method, and an exception
        would end that loop."""
        self._arrived.append((entry, output))
        self._arrival.set()

    async def _collect(self) -> None:
        """Handle the outputs of all responses in one task. A task per response, with two wake-ups,
        would cost more than the rest of a short response."""
        while True:
            await self._arrival.wait()
            # Before the list is replaced, so that a later output wakes the loop again.
            self._arrival.clear()
            arrived, self._arrived = self._arrived, []
            for entry, output in arrived:
                self._busy.end()
                entry.vllm_id = None
                try:
                    with named_death(self._spec, self._activity):
                        self._handle(entry, output)
                except Exception as error:  # noqa: BLE001 - the reader of the reports raises it
                    self.reports.fail(error)

    def _handle(self, entry: _Running, output: Any) -> None:
        """Handle vLLM's output for a turn. Raises `output` if it is an exception, and RuntimeError
        for an unexpected finish reason."""
        if isinstance(output, Exception):
            raise output
        # This is the only place that counts sampled tokens, including those of aborted responses.
        count = len(output.outputs[0].token_ids)
        self.tokens += count
        self.generated += count if entry.request.group >= 0 else 0
        # The end of the episode reports an abort, and no turn waits for this output.
        if entry.episode is not None and (entry.aborted or not entry.episode.waits):
            return
        (completion,) = output.outputs
        sampled = None
        if len(completion.token_ids):
            sampled = PartialResponse(
                response_ids=np.asarray(completion.token_ids, dtype=np.int32),
                behavior_logprobs=sampled_logprobs(completion),
                versions=token_versions(completion),
                routed_experts=self._routed_experts(entry, completion),
            )

        request = entry.request
        tokens = joined(request.prefix, sampled)
        reason: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        if tokens is not None:
            stop = (*self._spec.sampling(request.sampling).stop, *entry.stop)
            stopped = stopped_length(
                tokens.response_ids.tolist(), entry.prefix_length, stop, self._tokenizer.decode
            )
            if stopped is not None:
                # The record of a turn starts at the first token without recorded experts; that of a
                # response without an environment starts at the prompt, because `joined` added the
                # prefix's experts.
                before = (
                    entry.input_length
                    - entry.prefix_length
                    - (entry.recorded if entry.episode else 0)
                )
                self._complete_turn(entry, truncated(tokens, stopped, before), "stop")
                return

        # With another finish reason, the response ended before the abort reached vLLM: it is a
        # complete sample.
        if entry.aborted and completion.finish_reason == "abort":
            self._abort(entry, tokens)
            return
        if tokens is None or completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"{self._spec.name} ended its response to prompt {request.prompt.id!r} with"
                f" {len(completion.token_ids)} tokens and finish reason"
                f" {completion.finish_reason!r}; expected at least one token and `stop` or"
                f" `length`; see {self._spec.log}"
            )
        self._complete_turn(entry, tokens, reason)

    def _complete_turn(
        self, entry: _Running, tokens: PartialResponse, reason: FinishReason
    ) -> None:
        """Score the response, or pass the turn to its episode."""
        if entry.episode is None:
            self._score(entry, tokens, reason)
        else:
            entry.episode.take(tokens, reason)

    async def _play(self, entry: _Running, episode: Episode, player: Player) -> None:
        """Produce a sample of several turns, then score and report it."""
        transcript = episode.transcript
        maximum = self._spec.sampling(entry.request.sampling).max_tokens
        try:
            error = await episode.play(player, maximum)
            # An abort from here on has no effect: the sample finishes.
            entry.episode_task = None
            # vLLM still samples a turn for an agent that has ended.
            if entry.vllm_id is not None:
                await self._abort_in_vllm([entry.vllm_id])
            both = transcript.measured.keys() & self._spec.rollout.reward.parts.keys()
            if error is None and both:
                error = (
                    f"the environment measured {min(both)!r}, and rollout.reward has a part with"
                    " the same name; rename one of the two"
                )
            scored = Scored(reward=0.0, error=error)
            if error is None:
                scored = await self._scorer.score(
                    transcript.prompt,
                    transcript.last_turn,
                    self._context(entry, transcript.tokens, transcript.reason),
                )
            # The sample failed before its first turn. Give it a token, so that it can be reported.
            if not transcript.turns:
                transcript.give_up(self._tokenizer.eos_ids[0], self._version())
            reward, steps = transcript.rewards(scored.reward)
            if scored.error is None:
                parts = {**transcript.measured, **(scored.parts or {})} or None
                scored = replace(scored, reward=reward, parts=parts)
            self._finish(
                entry,
                transcript.tokens,
                transcript.reason,
                transcript.text,
                scored,
                prompt=transcript.prompt,
                mask=transcript.mask,
                step_rewards=steps if scored.error is None else None,
                segment_starts=transcript.segment_starts,
            )
        except Exception as error:  # noqa: BLE001 - the reader of the reports raises it
            self.reports.fail(error)

    def _on_episode_end(self, entry: _Running, task: asyncio.Task[None]) -> None:
        """Report the abort of an episode. This is a callback of its task, because a task that is
        cancelled before its first step does not run any code of its own."""
        if task.cancelled() and entry.aborted:
            self._abort(entry, None)

    def _records(self, request: Request) -> bool:
        """Return True if the sample of `request` includes experts. A held-out response needs none,
        because it is not trained."""
        return self._spec.records_experts and request.group >= 0

    def _routed_experts(self, entry: _Running, completion: Any) -> bytes | None:
        """Return the experts of all tokens that have no recorded experts yet, except the last
        token, which the model has not read. Raises RuntimeError if vLLM reported another number of
        tokens."""
        if not self._records(entry.request):
            return None
        expected = entry.input_length + len(completion.token_ids) - 1 - entry.recorded
        experts = completion.routed_experts
        if experts is None or len(experts) != expected:
            reported = 0 if experts is None else len(experts)
            raise RuntimeError(
                f"{self._spec.name} reported the experts of {reported} tokens, not of {expected},"
                f" for its response to prompt {entry.request.prompt.id!r}"
            )
        return experts.tobytes()

    def _score(self, entry: _Running, tokens: PartialResponse, reason: FinishReason) -> None:
        prompt = entry.request.prompt
        text = self._tokenizer.decode(tokens.response_ids.tolist())
        context = self._context(entry, tokens, reason)
        if self._scorer.inline:
            scored = self._scorer.score_inline(prompt, text, context)
            self._finish(entry, tokens, reason, text, scored)
            return

        async def score() -> None:
            try:
                scored = await self._scorer.score(prompt, text, context)
                self._finish(entry, tokens, reason, text, scored)
            except Exception as error:  # noqa: BLE001 - the reader of the reports raises it
                self.reports.fail(error)

        self._start_task(score())

    def _context(
        self, entry: _Running, tokens: PartialResponse, reason: FinishReason
    ) -> RewardContext:
        return RewardContext(
            finish_reason=reason,
            tokens=len(tokens.response_ids),
            seconds=time.time() - entry.started_at,
            version=int(tokens.versions[-1]),
            held_out=entry.request.group < 0,
        )

    def _finish(
        self,
        entry: _Running,
        tokens: PartialResponse,
        reason: FinishReason,
        text: str,
        scored: Scored,
        *,
        prompt: Prompt | None = None,
        mask: NDArray[np.uint8] | None = None,
        step_rewards: NDArray[np.float32] | None = None,
        segment_starts: NDArray[np.int32] | None = None,
    ) -> None:
        """Report a sample. `prompt`: replaces the request's prompt. `mask`: loss mask; None trains
        every token."""
        length, request = len(tokens.response_ids), entry.request
        self.reports.finished.append(
            id=request.id,
            group=request.group,
            prompt=prompt or request.prompt,
            response_ids=tokens.response_ids,
            behavior_logprobs=tokens.behavior_logprobs,
            versions=tokens.versions,
            loss_mask=np.ones(length, dtype=np.uint8) if mask is None else mask,
            step_rewards=step_rewards,
            segment_starts=segment_starts,
            routed_experts=tokens.routed_experts,
            text=text,
            finish_reason=reason,
            reward=scored.reward,
            reward_error=scored.error,
            reward_parts=scored.parts,
            engine=self._spec.index,
            started_at=entry.started_at,
            finished_at=time.time(),
        )
        if scored.error is not None:
            self._failures.add(request.id, request.prompt, text, scored.error)
        # After the append, so that the request leaves `running` only once its result is in the
        # queue.
        self._running.pop(request.id, None)
        self.reports.notify()

    def _abort(self, entry: _Running, partial: PartialResponse | None) -> None:
        self._running.pop(entry.request.id, None)
        self.reports.aborted.append(Aborted(id=entry.request.id, partial=partial))
        self.reports.notify()

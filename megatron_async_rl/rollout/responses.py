"""Responses that an engine works on: submitted one by one, aborted at any token, scored when they
end.

    submit -> vLLM -> _arrived (in vLLM's output loop) -> _collect (one task) -> ReportQueue
               ^                                              |                      ^
               |                                              +-> reward process ----+
               +--- next turn --- environment (a task per sample) <---+              |
                                        +---- its end ---> reward process -----------+

Invariants:
- requests are submitted as they arrive, and responses finish in any order; nothing waits for a
  batch or a group;
- every accepted request ends in the report queue exactly once: as a sample, as an abort, or with
  the failure that ended the engine;
- an aborted response has exactly the tokens that vLLM had returned by then; a response that is
  being scored still finishes. An aborted response with an environment has no tokens and starts
  again, because the environment's state cannot move to another engine;
- every turn is an ordinary request: a pause or an update does not wait for an environment, and the
  current weights read its reply;
- `behavior_logprobs` of a sample belong to the distribution that it was drawn from, after
  temperature and other sampling settings;
- the token that ended a response (end of sequence) is part of it: it was sampled, so it is trained;
- a file that cannot be written loses a line and does not stop the engine.

A response has no time limit: vLLM's process is watched as a whole (`vllm/client.py`). Rewards
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
    in_vllm: str | None = None
    """vLLM's own id of the request while vLLM works on it."""
    given: int = 0
    """Number of tokens that vLLM received last."""
    read: int = 0
    """Number of these tokens whose experts are recorded."""
    stop: Sequence[str] = ()
    """Strings that end the turn, in addition to those of its sampling settings."""
    aborted: bool = False
    conversation: Episode | None = None
    playing: asyncio.Task[None] | None = None
    """Task of the conversation, until scoring begins."""

    @property
    def prefix_length(self) -> int:
        return 0 if self.request.prefix is None else len(self.request.prefix.response_ids)


class Responses:
    """The responses of one engine, on one event loop.

    `llm`: vLLM's AsyncLLM. `sampling`: name of a held-out set, or None for training ->
    SamplingParams. `conversations`: None if a response is one turn. `version`: returns the version
    of the weights."""

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
        """Outputs of ended requests, in order, until `_collect` handles them."""
        self._arrival = asyncio.Event()
        self._collector = asyncio.create_task(self._collect())
        self._tasks: set[asyncio.Task[None]] = set()
        """Running conversations and scores. The event loop itself holds tasks only weakly."""
        self._numbered = 0
        self._failures = FailureLog(spec.reward_log)
        self.reports = ReportQueue()
        self.tokens = 0
        """Number of sampled response tokens, including aborted responses."""
        self.generated = 0
        """Number of sampled tokens for training."""

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
        """Number of tokens that vLLM has returned so far for running responses."""
        return tokens_so_far(self._llm)

    async def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests. Raises ValueError, before accepting any, for a request that is already
        running or whose prefix leaves nothing to sample."""
        ids = [request.id for request in requests]
        twice = [one for one, count in Counter([*ids, *self._running]).items() if count > 1]
        if twice:
            raise ValueError(f"{self._spec.name} received requests twice: {', '.join(twice[:8])}")
        for request in requests:
            require_room(request, self._spec.sampling(request.sampling).max_tokens)
        entries = [_Running(request) for request in requests]
        # Before the first await: an abort may arrive while later requests are being submitted.
        self._running |= dict(zip(ids, entries, strict=True))
        for entry in entries:
            if self._conversations is not None:
                entry.conversation = Episode(
                    entry.request.prompt, partial(self._hand_over, entry), self._tokenizer.decode
                )
                work = self._converse(entry, entry.conversation, self._conversations)
                entry.playing = self._spawn(work)
                entry.playing.add_done_callback(partial(self._on_end, entry))
            # Aborted during an earlier submission of this call: vLLM never receives it.
            elif entry.aborted:
                self._abort(entry, entry.request.prefix)
            else:
                request, prefix = entry.request, entry.request.prefix
                begun: list[int] = [] if prefix is None else prefix.response_ids.tolist()
                maximum = self._spec.sampling(request.sampling).max_tokens
                given = [*request.prompt.token_ids, *begun]
                read = recorded_from(len(request.prompt.token_ids), prefix)
                left = maximum - len(begun)
                await self._hand_over(
                    entry, TurnRequest(ids=given, begun=len(begun), maximum=left, read=read)
                )

    async def abort(self, ids: Sequence[str]) -> None:
        entries = [self._running[one] for one in ids if one in self._running]
        for entry in entries:
            entry.aborted = True
            if entry.playing is not None:
                entry.playing.cancel()
        # vLLM answers an abort with all tokens that it has returned so far and drops later ones, so
        # no token is lost or counted twice.
        await self._abort_in_vllm([one.in_vllm for one in entries if one.in_vllm is not None])

    async def _abort_in_vllm(self, ids: Sequence[str]) -> None:
        with named_death(self._spec, self._working):
            await self._llm.abort(ids, internal=True)

    @property
    def _working(self) -> str:
        return f"it worked on {len(self._running)} responses"

    def close(self) -> None:
        for task in (self._collector, *self._tasks):
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _hand_over(self, entry: _Running, turn_request: TurnRequest) -> None:
        """Submit a turn to vLLM."""
        request = entry.request
        parameters = self._sampling[
            request.sampling
        ].clone()  # shallow; the fields set below are replaced, not changed
        # Every turn draws with its own seed, or turns would repeat the same random numbers.
        parameters.seed = sample_seed(self._spec.seed, request.group, request.k, turn_request.begun)
        parameters.max_tokens = turn_request.maximum
        entry.given, entry.read, entry.stop = (
            len(turn_request.ids),
            turn_request.read,
            turn_request.stop,
        )
        if turn_request.stop:
            parameters.stop = [*(parameters.stop or ()), *turn_request.stop]
            parameters.detokenize = True
        if self._spec.records_experts:
            parameters.routed_experts_prompt_start = (
                turn_request.read if self._records(request) else entry.given
            )
        self._numbered += 1
        try:
            name = f"{self._spec.index}-{self._numbered}"
            with named_death(self._spec, self._working):
                collector = await add_request(self._llm, name, turn_request.ids, parameters)
        except Exception as error:
            self.reports.fail(error)
            raise

        entry.in_vllm = collector.request_id
        # Before the output is hooked up, so that `end` cannot come first.
        self._busy.begin()
        on_output(collector, lambda output: self._on_output(entry, output))
        # The abort came while vLLM was taking the request, and could not find it there.
        if entry.aborted or (entry.conversation is not None and not entry.conversation.waits):
            await self._abort_in_vllm([collector.request_id])

    def _on_output(self, entry: _Running, output: Any) -> None:
        """Store an output. vLLM's output loop calls this, and an exception would end that loop."""
        self._arrived.append((entry, output))
        self._arrival.set()

    async def _collect(self) -> None:
        """Handle the outputs of all responses in one task: a task and two wake-ups per response
        would cost more than the rest of a short response."""
        while True:
            await self._arrival.wait()
            # Before the list is taken, so that an output in between wakes the loop again.
            self._arrival.clear()
            arrived, self._arrived = self._arrived, []
            for entry, output in arrived:
                self._busy.end()
                entry.in_vllm = None
                try:
                    with named_death(self._spec, self._working):
                        self._conclude(entry, output)
                except Exception as error:  # noqa: BLE001 - the reader of the reports raises it
                    self.reports.fail(error)

    def _conclude(self, entry: _Running, output: Any) -> None:
        """Record vLLM's output for a response. Raises vLLM's exception, and RuntimeError for an
        unexpected finish reason."""
        if isinstance(output, Exception):
            raise output
        # The only place that counts sampled tokens, including those of aborted responses.
        count = len(output.outputs[0].token_ids)
        self.tokens += count
        self.generated += count if entry.request.group >= 0 else 0
        if entry.conversation is not None and (entry.aborted or not entry.conversation.waits):
            return  # the cancelled conversation reports the abort, once
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
                # A turn has experts from token `read` on; a plain response has those of all tokens.
                before = (
                    entry.given - entry.prefix_length - (entry.read if entry.conversation else 0)
                )
                self._sampled_all(entry, truncated(tokens, stopped, before), "stop")
                return

        # Otherwise it ended before the abort reached vLLM, and is a complete sample.
        if entry.aborted and completion.finish_reason == "abort":
            self._abort(entry, tokens)
            return
        if tokens is None or completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"{self._spec.name} ended its response to prompt {request.prompt.id!r} with finish"
                f" reason {completion.finish_reason!r}; see {self._spec.log}"
            )
        self._sampled_all(entry, tokens, reason)

    def _sampled_all(self, entry: _Running, tokens: PartialResponse, reason: FinishReason) -> None:
        if entry.conversation is None:
            self._score(entry, tokens, reason)
        else:
            entry.conversation.take(tokens, reason)

    async def _converse(self, entry: _Running, conversation: Episode, player: Player) -> None:
        transcript = conversation.transcript
        maximum = self._spec.sampling(entry.request.sampling).max_tokens
        try:
            error = await conversation.play(player, maximum)
            entry.playing = None  # an abort from here on is ignored: the sample finishes
            if entry.in_vllm is not None:  # a turn of an agent that has ended
                await self._abort_in_vllm([entry.in_vllm])
            both = transcript.measured.keys() & self._spec.rollout.reward.parts.keys()
            if error is None and both:
                error = (
                    f"the environment measured {min(both)!r}, which is also the name of a part of"
                    " rollout.reward: rename one of them"
                )
            scored = Scored(reward=0.0, error=error)
            if error is None:
                scored = await self._scorer.score(
                    transcript.prompt,
                    transcript.last_turn,
                    self._context(entry, transcript.tokens, transcript.reason),
                )
            # The sample failed before its first turn; it still has to be reported once.
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

    def _on_end(self, entry: _Running, task: asyncio.Task[None]) -> None:
        """Report an aborted conversation, also if its task was cancelled before its first step."""
        if task.cancelled() and entry.aborted:
            self._abort(entry, None)

    def _records(self, request: Request) -> bool:
        """Return True if experts are recorded. Held-out responses are not trained, so they need
        none."""
        return self._spec.records_experts and request.group >= 0

    def _routed_experts(self, entry: _Running, completion: Any) -> bytes | None:
        """Return the experts of tokens from `read` on, except the last token, which the model has
        not read. Raises RuntimeError if vLLM did not report all of them."""
        if not self._records(entry.request):
            return None
        wanted = entry.given + len(completion.token_ids) - 1 - entry.read
        experts = completion.routed_experts
        if experts is None or len(experts) != wanted:
            found = 0 if experts is None else len(experts)
            raise RuntimeError(
                f"{self._spec.name} recorded the experts of {found} tokens, not of {wanted}, for"
                f" its response to prompt {entry.request.prompt.id!r}"
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

        self._spawn(score())

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
        """Report a sample. `prompt`: overrides the request's prompt. `mask`: None trains every
        token."""
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
        # After the append: a request leaves `running` only once its result is in the queue.
        self._running.pop(request.id, None)
        self.reports.notify()

    def _abort(self, entry: _Running, partial: PartialResponse | None) -> None:
        self._running.pop(entry.request.id, None)
        self.reports.aborted.append(Aborted(id=entry.request.id, partial=partial))
        self.reports.notify()

"""The responses an engine works on: submitted one by one, cut where they stand, scored as soon as they end.

Invariants:
- they are submitted as they come and finish in any order; nothing waits for a batch or a group;
- every request that was taken ends in the outbox once: as a sample, as a cut, or with the failure that ended the engine;
- a cut response has every token that vLLM had handed over by then, and no other; one that is being scored just finishes;
- a sample's `behavior_logprobs` are those of the distribution it was drawn from: after temperature, by the engine itself;
- the token that ended a response (end of sequence) is part of it: it was sampled, so it is trained on.

A response has no deadline of its own: vLLM's process is watched as a whole (`pulse.py`), and a reward has one (`scoring.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.busy import BusyClock
from megatron_async_rl.rollout.completion import sampled_logprobs, token_versions
from megatron_async_rl.rollout.continuation import first, joined, require_room, sample_seed, stopped_length
from megatron_async_rl.rollout.outbox import Outbox
from megatron_async_rl.rollout.pulse import EngineDied
from megatron_async_rl.rollout.scoring import Scorer
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import FinishReason, Sample
from megatron_async_rl.samples.requests import Cut, Prefix, Request


@dataclass(eq=False)
class _Running:
    request: Request
    started_at: float = field(default_factory=time.time)
    in_vllm: str | None = None
    """vLLM's own id of the request, once it has it."""
    cut: bool = False

    @property
    def prefix_length(self) -> int:
        return 0 if self.request.prefix is None else len(self.request.prefix.response_ids)


class Responses:
    """Used by one event loop."""

    def __init__(
        self, llm: AsyncLLM, spec: EngineSpec, sampling: SamplingParams, tokenizer: Tokenizer, scorer: Scorer, busy: BusyClock
    ) -> None:
        self._llm = llm
        self._spec = spec
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._busy = busy
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbered = 0
        self.outbox = Outbox()
        self.tokens = 0
        """Of finished samples, prefixes included."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def oldest_s(self) -> float:
        """Seconds since the longest-running response was taken; 0 when there is none."""
        return max((time.time() - entry.started_at for entry in self._running.copy().values()), default=0.0)

    @property
    def sampled(self) -> int:
        """Tokens that vLLM has handed over so far of the responses it works on."""
        return sum(state.detokenizer.num_output_tokens() for state in self._llm.output_processor.request_states.values())

    async def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError, before any is taken, for a request that is running or whose prefix leaves nothing to sample."""
        ids = [request.id for request in requests]
        twice = [one for one, count in Counter([*ids, *self._running]).items() if count > 1]
        if twice:
            raise ValueError(f"{self._spec.name} was given requests twice: {', '.join(twice[:8])}")
        for request in requests:
            require_room(request, self._spec.rollout.sampling.max_tokens)
        entries = [_Running(request) for request in requests]
        self._running |= dict(zip(ids, entries, strict=True))
        for entry in entries:
            await self._hand_over(entry)

    async def cut(self, ids: Sequence[str]) -> None:
        entries = [self._running[one] for one in ids if one in self._running]
        for entry in entries:
            entry.cut = True
        # vLLM answers an abort with everything it has handed over of the response so far, and forgets what comes later.
        await self._llm.abort([entry.in_vllm for entry in entries if entry.in_vllm is not None], internal=True)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _hand_over(self, entry: _Running) -> None:
        if entry.cut:
            self._end(entry, Cut(id=entry.request.id, prefix=entry.request.prefix))
            return
        request, prefix = entry.request, entry.request.prefix
        parameters = self._sampling.clone()
        parameters.seed = sample_seed(self._spec.seed, request.group, request.k, entry.prefix_length)
        parameters.max_tokens = self._spec.rollout.sampling.max_tokens - entry.prefix_length
        ids = [*request.prompt.token_ids, *(() if prefix is None else prefix.response_ids.tolist())]
        self._numbered += 1
        try:
            answer = await self._llm.add_request(f"{self._spec.index}-{self._numbered}", tokens_input(ids), parameters)
        except Exception as error:
            self.outbox.fail(error)
            raise
        entry.in_vllm = answer.request_id
        if entry.cut:
            await self._llm.abort(answer.request_id, internal=True)
        task = asyncio.create_task(self._see_through(entry, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_through(self, entry: _Running, answer: Any) -> None:
        try:
            self._busy.begin()
            try:
                completion = (await answer.get()).outputs[0]  # FINAL_ONLY: there is one
            finally:
                self._busy.end()
                entry.in_vllm = None
            self._end(entry, await self._outcome(entry, completion))
        except EngineDeadError:
            self.outbox.fail(EngineDied(self._spec, f"it worked on {len(self._running)} responses"))
        except Exception as error:  # noqa: BLE001 - the reader of the outbox raises it
            self.outbox.fail(error)
        finally:
            answer.close()

    def _end(self, entry: _Running, outcome: Sample | Cut) -> None:
        self._running.pop(entry.request.id, None)
        self.outbox.put(outcome)

    async def _outcome(self, entry: _Running, completion: CompletionOutput) -> Sample | Cut:
        """Raises RuntimeError for a response that vLLM ended for a reason of its own."""
        request = entry.request
        sampled = None
        if len(completion.token_ids):
            sampled = Prefix(
                response_ids=np.asarray(completion.token_ids, dtype=np.int32),
                behavior_logprobs=sampled_logprobs(completion),
                versions=token_versions(completion),
            )
        tokens = joined(request.prefix, sampled)
        reason: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        if tokens is not None:
            stop = self._spec.rollout.sampling.stop
            stopped = stopped_length(tokens.response_ids.tolist(), entry.prefix_length, stop, self._tokenizer.decode)
            if stopped is not None:
                return await self._sample(entry, first(tokens, stopped), "stop")
        if entry.cut and completion.finish_reason == "abort":
            return Cut(id=request.id, prefix=tokens)
        if tokens is None or completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"{self._spec.name} ended its response to prompt {request.prompt.id!r} with finish reason "
                f"{completion.finish_reason!r}; see {self._spec.log}"
            )
        return await self._sample(entry, tokens, reason)

    async def _sample(self, entry: _Running, tokens: Prefix, reason: FinishReason) -> Sample:
        prompt = entry.request.prompt
        text = self._tokenizer.decode(tokens.response_ids.tolist())
        scored = await self._scorer.score(prompt, text)
        length = len(tokens.response_ids)
        sample = Sample(
            id=entry.request.id,
            prompt=prompt,
            response_ids=tokens.response_ids,
            behavior_logprobs=tokens.behavior_logprobs,
            versions=tokens.versions,
            loss_mask=np.ones(length, dtype=np.uint8),
            text=text,
            finish_reason=reason,
            reward=scored.reward,
            reward_error=scored.error,
            engine=self._spec.index,
            started_at=entry.started_at,
            finished_at=time.time(),
        )
        self.tokens += length
        if scored.error is not None:
            self._record_failure(sample)
        return sample

    def _record_failure(self, sample: Sample) -> None:
        line = {
            "sample": sample.id,
            "prompt": sample.prompt.id,
            "text": sample.prompt.text,
            "response": sample.text,
            "error": sample.reward_error,
        }
        with open(self._spec.reward_log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

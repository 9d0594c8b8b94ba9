"""Sampling of a multi-turn sample: the model samples a turn, the environment responds with content,
the content is appended, and the model samples the next turn.

    engine <--turn to sample-- conversation --response--> environment
       |                         ^      ^                      |
       +---------tokens----------+      +-------content--------+

The transcript holds the tokens (transcript.py). Every conversation ends with a turn of the model,
because the environment ended it or because it reached its limit on turns or tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments import EpisodeStep, Message, TurnContent
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.transcript import (
    FollowUps,
    SampleTurn,
    Transcript,
    TranscriptSegment,
    Turn,
    TurnRequest,
    follow_ups,
    text_of,
)
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser
from megatron_async_rl.samples.types import FinishReason, PartialResponse, Prompt


class EpisodeEnvironment(Protocol):
    """Interface of the environment of one sample (pool.EnvironmentSession)."""

    async def reset(self, prompt: Prompt) -> TurnContent: ...
    async def step(self, response: str | Message) -> EpisodeStep: ...


async def converse(
    transcript: Transcript,
    environment: EpisodeEnvironment,
    sample: SampleTurn,
    follow: FollowUps,
    *,
    max_turns: int,
    max_tokens: int,
    parser: ToolParser | None = None,
) -> None:
    """Fill `transcript` turn by turn. Raises EnvironmentFailed; `transcript` then holds the earlier
    turns. `parser`: parser of tool calls, for an environment that receives messages instead of
    text."""
    prompt = transcript.requested
    opening = await environment.reset(prompt)
    begun = prompt
    if opening and not too_long(opening, max_tokens):
        begun = rendered(follow.opened, prompt, opening)
    # The opening is part of the prompt, because the policy did not sample it.
    segment = TranscriptSegment(begun)
    room = transcript.room(segment, max_tokens)
    if room < 1 or (opening and begun is prompt):
        raise EnvironmentFailed(
            f"reset returned {len(text_of(opening))} characters, and rollout.sampling.max_tokens:"
            f" {max_tokens} leaves no room for a turn"
        )
    content: list[int] = []
    while True:
        turn = await transcript.extend(segment, content, sample, room - len(content))
        ids = turn.tokens.response_ids.tolist()
        response = turn.text if parser is None else parser.message(ids, turn.text)
        step = await environment.step(response)
        # Before any return below, so that the reward of the last turn counts.
        segment.take_step(step)
        transcript.measured.update(step.measured)
        if turn.reason == "length":
            transcript.truncated = True
        if step.done or transcript.truncated or len(transcript.turns) == max_turns:
            return
        room = transcript.room(segment, max_tokens)
        if too_long(step.observation, room):
            transcript.truncated = True
            return
        content = rendered(follow.between, ids, step.observation)
        # No tokens are left for another turn. The content is dropped: a segment ends with a turn.
        if len(content) >= room:
            transcript.truncated = True
            return


CHARACTERS_PER_TOKEN = 64
"""Assumed upper bound for the average length of a token. Content above the bound is not tokenized,
since that would block the engine's event loop and with it every response."""


def too_long(content: TurnContent, room: int) -> bool:
    """Return True if the content has more than `room` tokens of CHARACTERS_PER_TOKEN characters."""
    return len(text_of(content)) > CHARACTERS_PER_TOKEN * max(1, room)


def rendered[Result](render: Callable[..., Result], *given: Any) -> Result:
    """Render content. Raises EnvironmentFailed for any exception of the tokenizer or of the chat
    template, which is a program."""
    try:
        return render(*given)
    except Exception as error:
        raise EnvironmentFailed(f"its content cannot be appended to a turn: {error}") from error


class Player(Protocol):
    """Interface that produces a multi-turn sample: Episodes or endpoint.Agents."""

    async def play(self, transcript: Transcript, sample: SampleTurn, max_tokens: int) -> str | None:
        """Fill `transcript`. Return the reason if the environment failed."""
        ...


class Episode:
    """A multi-turn sample in progress. `request_turn`: submits a turn to vLLM. `decode`: converts
    tokens to text."""

    def __init__(
        self,
        prompt: Prompt,
        request_turn: Callable[[TurnRequest], Coroutine[Any, Any, None]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.transcript = Transcript(prompt)
        self._request_turn, self._decode = request_turn, decode
        self._turn: asyncio.Future[tuple[PartialResponse, FinishReason]] | None = None
        self._requesting: asyncio.Task[None] | None = None

    @property
    def waits(self) -> bool:
        """True while a turn is being sampled."""
        return self._turn is not None and not self._turn.done()

    def take(self, tokens: PartialResponse, reason: FinishReason) -> None:
        """Receive the tokens of the requested turn."""
        # An abort cancels the future, so tokens that arrive later are discarded.
        if self._turn is not None and self.waits:
            self._turn.set_result((tokens, reason))

    async def play(self, player: Player, max_tokens: int) -> str | None:
        """Let `player` fill the transcript. Return the reason if the environment failed."""
        try:
            return await player.play(self.transcript, self._sample, max_tokens)
        finally:
            # An agent may end while one of its turns is still being sampled.
            if self._turn is not None:
                self._turn.cancel()

    async def _sample(self, requested: TurnRequest) -> Turn:
        self._turn = asyncio.get_running_loop().create_future()
        # A shielded task: cancelling the sample must not leave a partly submitted request, which an
        # abort in vLLM would not find.
        self._requesting = asyncio.create_task(self._request_turn(requested))
        await asyncio.shield(self._requesting)
        tokens, reason = await self._turn
        text = self._decode(tokens.response_ids.tolist())
        return Turn(tokens=tokens, text=text, reason=reason)


class Episodes:
    """Resources that the episodes of an engine share: the environments, and the conversion of their
    content to tokens."""

    def __init__(
        self, environments: Environments, tokenizer: Tokenizer, parser: ToolParser | None = None
    ) -> None:
        """Raises DataError if the chat template does not permit a second turn. `parser`: parser of
        tool calls, for an environment that receives messages."""
        self._environments = environments
        self._follow = follow_ups(environments.settings, tokenizer)
        self._parser = parser

    async def play(self, transcript: Transcript, sample: SampleTurn, max_tokens: int) -> str | None:
        """Fill `transcript`. Return the reason if the environment failed."""
        environment = None
        try:
            environment = await self._environments.open()
            await converse(
                transcript,
                environment,
                sample,
                self._follow,
                max_turns=self._environments.settings.max_turns,
                max_tokens=max_tokens,
                parser=self._parser,
            )
        except EnvironmentFailed as error:
            return str(error)
        finally:
            if environment is not None:
                await environment.close()
        return None


async def failures(
    settings: EnvironmentConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    response: str,
    timeout_s: float,
    follow: FollowUps | None = None,
) -> dict[str, str]:
    """Test an environment before a run: for each key of `prompts`, it processes the turn `response`
    to one of the prompts. Return the first error of each key whose prompts all failed, and under
    the key "" the error of an environment that did not start. A timeout is not an error. `follow`:
    if given, the content of the environment is rendered, too."""
    errors: dict[str, str] = {}
    pool = Environments(settings)
    pool.start()
    try:
        await pool.ready()
        for key, candidates in prompts.items():
            error: str | None = None
            for prompt in candidates:
                environment = await pool.open()
                try:
                    async with asyncio.timeout(timeout_s):
                        opening = await environment.reset(prompt)
                        answer = await environment.step(response)
                    if follow is not None:
                        if opening:
                            rendered(follow.opened, prompt, opening)
                        rendered(follow.between, (0,), answer.observation)
                    error = None
                # A slow environment is usable.
                except TimeoutError:
                    error = None
                except EnvironmentFailed as failed:
                    error = error or f"the first prompts of {key}: {failed}"
                finally:
                    await environment.close()
                if error is None:
                    break
            if error is not None:
                errors[key] = error
    except (UserCodeStartError, EnvironmentFailed) as failed:
        errors[""] = f"its import: {failed}"
    finally:
        pool.close()
    return errors

"""Transcript of a multi-turn sample: tokens of the model and, between them, tokens of the
environment. `FollowUps` convert the content of the environment to the tokens that the model reads
next.

    prompt | opening | turn 1 | content | turn 2 | content | turn 3
          mask 0         1         0        1         0        1

The opening is part of the prompt. An agent at the endpoint may start another segment, an
independent sequence, instead of continuing. The prompt of the first segment is the prompt of the
sample. The prompt of each further segment becomes a context with mask 0 among the response tokens.

Invariants:
- token in, token out: the model reads exactly the tokens that the segment holds; sampled tokens are
  never tokenized again. Only content of the environment is tokenized, and its rendering must not
  change the text before it;
- sampled tokens keep the log-prob, version and experts with which they were sampled. Tokens of the
  environment have log-prob 0, mask 0 and the version of the preceding token; the tokens of a
  context have the version of the following token;
- a segment ends with a turn of the model. Content that the model never reads is only in the text;
- opening, turns and content together have at most `rollout.sampling.max_tokens` tokens per segment,
  so a segment is no longer than any other sample of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments import EpisodeStep, Message, TurnContent
from megatron_async_rl.samples.types import FinishReason, PartialResponse, Prompt

FIX = (
    "set data.chat_template to a template that renders a message identically at every position,"
    " change data.chat_template_options, or set rollout.environment.format: text"
)


class FollowUps(Protocol):
    """Conversion of content into the tokens between two turns."""

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        """Return the prompt with `content` appended."""
        ...

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        """Return the tokens between the turn `sampled` and the next turn."""
        ...


class PlainText:
    """Conversion of content as plain text, without a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        text = text_of(content)
        ids = self._tokenizer.encode(text, special_tokens=False)
        return replace(prompt, text=prompt.text + text, token_ids=(*prompt.token_ids, *ids))

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        return self._tokenizer.encode(text_of(content), special_tokens=False)


QUESTION: Message = {"role": "user", "content": "Q"}
ANSWER: Message = {"role": "assistant", "content": "A7A"}
"""Placeholders for the earlier conversation. No template should have a reason to change the
answer."""


class EpisodeMessages:
    """Conversion of content as chat messages, to the text that the chat template appends. Raises
    DataError for a template that renders a message differently when another message follows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._question = tokenizer.render_chat([QUESTION], answer=False)
        self._answer_start = tokenizer.render_chat([QUESTION], answer=True)
        if (
            not self._answer_start.startswith(self._question)
            or self._answer_start == self._question
        ):
            what = "has a chat template that does not mark the beginning of an answer"
            raise DataError("model.path", None, what, FIX)
        # `opened` removes these tokens from the end of the prompt and appends them to the opening.
        self._generation_prompt = tokenizer.encode_rendered(
            self._answer_start[len(self._question) :]
        )
        # A trial, so that an unsuitable template raises before any sample.
        self._after(self._answer_start + str(ANSWER["content"]), [QUESTION, ANSWER], "Q")

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        text = self._after(self._question, [QUESTION], content)
        cut = len(prompt.token_ids) - len(self._generation_prompt)
        if cut < 0 or list(prompt.token_ids[cut:]) != self._generation_prompt:
            raise DataError(
                "the prompt",
                None,
                "does not end with the chat template's beginning of an answer, so no message can be"
                " appended",
                "set data.as_chat: true, or rollout.environment.format: text",
            )
        ids = self._tokenizer.encode_rendered(text)
        return replace(prompt, text=prompt.text + text, token_ids=(*prompt.token_ids[:cut], *ids))

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        before = self._answer_start + str(ANSWER["content"])
        ids = self._tokenizer.encode_rendered(self._after(before, [QUESTION, ANSWER], content))
        # The model may have sampled the end-of-turn token, which must not appear twice.
        ended = sampled[-1] in self._tokenizer.eos_ids and ids[:1] == [sampled[-1]]
        return ids[1:] if ended else ids

    def _after(self, before: str, messages: Sequence[Message], content: TurnContent) -> str:
        more = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        # Only the suffix is tokenized, so that the sampled tokens stay unchanged.
        whole = self._tokenizer.render_chat([*messages, *more], answer=True)
        if not whole.startswith(before):
            raise DataError(
                "model.path",
                None,
                "has a chat template that renders earlier messages differently when another"
                f" follows: {whole!r} does not begin with {before!r}. Trained tokens would differ"
                " from sampled tokens",
                FIX,
            )
        return whole[len(before) :]


def follow_ups(settings: EnvironmentConfig, tokenizer: Tokenizer) -> FollowUps:
    """Return the conversion that the settings select. Raises DataError for a template that does not
    permit a second turn."""
    return EpisodeMessages(tokenizer) if settings.format == "chat" else PlainText(tokenizer)


def text_of(content: TurnContent) -> str:
    """Return the text of content; messages are concatenated."""
    return content if isinstance(content, str) else "".join(str(one["content"]) for one in content)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens of one request to the model. `tokens`: sampled tokens, with the routed experts of
    every token that was not recorded before, except the last token. `text`: text without special
    tokens."""

    tokens: PartialResponse
    text: str
    reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """Request for one turn. `ids`: tokens that the model reads. `begun`: number of tokens of the
    sample so far, which is unique per turn. `maximum`: maximum number of tokens of the turn.
    `read`: number of `ids` whose experts are already recorded. `stop`: strings that end the turn,
    in addition to the stop strings of the run."""

    ids: Sequence[int]
    begun: int
    maximum: int
    read: int = 0
    stop: Sequence[str] = ()


SampleTurn = Callable[[TurnRequest], Awaitable[Turn]]


class TranscriptSegment:
    """One sequence in progress: a prompt, followed by turns and content."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        self.parts: list[PartialResponse] = []
        self.masks: list[NDArray[np.uint8]] = []
        self.rewards: list[float] = []
        self.ends: list[int] = []
        """Position of the last token of each turn, counted from the end of the prompt."""
        self.text: list[str] = []
        self.length = 0
        """Number of tokens after the prompt."""

    def take_turn(self, turn: Turn, content: Sequence[int] = ()) -> None:
        """Append `content`, which are tokens of the environment, and then the turn."""
        if content:
            self.put(content, int(self.parts[-1].versions[-1]))
        self.turns.append(turn)
        self._append(turn.tokens, 1)
        self.ends.append(self.length - 1)
        # `take_step` adds the reward of this turn when the environment has responded.
        self.rewards.append(0.0)
        self.text.append(turn.text)

    def take_step(self, step: EpisodeStep) -> None:
        """Record the environment's response to the last turn."""
        self.rewards[-1] += step.reward
        if not step.train:
            # The last part is the turn itself, because content is appended with the next turn.
            self.masks[-1][:] = 0
        content = text_of(step.observation)
        if content or step.reward:
            reward = f", reward {step.reward:g}" if step.reward else ""
            self.text.append(f"[environment{reward}] {content}".rstrip())

    def put(self, content: Sequence[int], version: int) -> None:
        """Append tokens that were not sampled."""
        # Mask 0: the policy did not choose these tokens, so no gradient may flow from them.
        self._append(unsampled(content, version), 0)

    def _append(self, tokens: PartialResponse, mask: int) -> None:
        self.parts.append(tokens)
        self.masks.append(np.full(len(tokens.response_ids), mask, dtype=np.uint8))
        self.length += len(tokens.response_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens, including the prompt."""
        ids = list(self.prompt.token_ids)
        for part in self.parts:
            ids += part.response_ids.tolist()
        return ids

    @property
    def read(self) -> int:
        """Number of tokens whose experts are recorded."""
        # Without the last token of a turn, which the model has sampled but not read yet.
        return len(self.prompt.token_ids) + self.ends[-1] if self.ends else 0


def unsampled(ids: Sequence[int], version: int) -> PartialResponse:
    """Return tokens that were not sampled, with log-prob 0 and `version`."""
    return PartialResponse(
        response_ids=np.asarray(ids, dtype=np.int32),
        behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
    )


class Transcript:
    """Sample in progress: its segments in the order in which they began. The prompt of each further
    segment precedes that segment."""

    def __init__(self, requested: Prompt) -> None:
        self.requested = requested
        """Prompt of the request. The prompt of the first segment replaces it in the sample."""
        self.segments: list[TranscriptSegment] = []
        self.turns: list[Turn] = []
        """Turns of all segments, in the order of sampling."""
        self.truncated = False
        self.measured: Counter[str] = Counter()
        """Sums of the environment's measurements by name."""

    def room(self, segment: TranscriptSegment, max_tokens: int) -> int:
        """Return the number of tokens that may be appended to the segment."""
        opening = len(segment.prompt.token_ids) - len(self.requested.token_ids)
        return max_tokens - max(0, opening) - segment.length

    async def extend(
        self,
        segment: TranscriptSegment,
        content: Sequence[int],
        sample: SampleTurn,
        maximum: int,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Sample the next turn of the segment: at most `maximum` tokens, up to a string of
        `stop`."""
        further = segment not in self.segments
        context = len(segment.prompt.token_ids) if further and self.segments else 0
        begun = self.length + context + len(content)
        ids = [*segment.ids, *content]
        turn = await sample(
            TurnRequest(ids=ids, begun=begun, maximum=maximum, read=segment.read, stop=stop)
        )
        # Only after sampling: an aborted turn must not leave an empty segment.
        if further:
            self.segments.append(segment)
        segment.take_turn(turn, content)
        self.turns.append(turn)
        return turn

    def give_up(self, token: int, version: int) -> None:
        """Complete a sample that has no turn with one `token` of mask 0, because every sample has a
        token."""
        segment = TranscriptSegment(self.requested)
        segment.put([token], version)
        self.segments.append(segment)

    @property
    def prompt(self) -> Prompt:
        return self.segments[0].prompt if self.segments else self.requested

    @property
    def reason(self) -> FinishReason:
        return "length" if self.truncated else "stop"

    @property
    def last_turn(self) -> str:
        return self.turns[-1].text if self.turns else ""

    @property
    def text(self) -> str:
        parts = ["\n".join(segment.text) for segment in self.segments]
        further = zip(self.segments[1:], parts[1:], strict=True)
        return "\n".join(
            parts[:1] + [f"[segment] {segment.prompt.text}\n{text}" for segment, text in further]
        )

    @property
    def _starts(self) -> list[int]:
        """Position of each segment among the response tokens, where its context begins; then the
        number of response tokens."""
        starts, end = [], 0
        for segment in self.segments:
            starts.append(end)
            end += segment.length + len(segment.prompt.token_ids) * (end > 0)
        return [*starts, end]

    @property
    def length(self) -> int:
        """Number of response tokens."""
        return self._starts[-1]

    @property
    def segment_starts(self) -> NDArray[np.int32] | None:
        """Positions of the segments after the first (Sample.segment_starts)."""
        starts = self._starts[1:-1]
        return np.array(starts, dtype=np.int32) if starts else None

    @property
    def tokens(self) -> PartialResponse:
        """All response tokens. Raises ValueError before the first turn."""
        parts: list[PartialResponse] = []
        for segment in self.segments:
            if parts:
                # The first turn of the segment read this context with the weights of that version.
                version = int(segment.parts[0].versions[0])
                parts.append(unsampled(segment.prompt.token_ids, version))
            parts += segment.parts
        turns = [turn for segment in self.segments for turn in segment.turns]
        experts = [turn.tokens.routed_experts for turn in turns]
        return PartialResponse(
            response_ids=np.concatenate([part.response_ids for part in parts]),
            behavior_logprobs=np.concatenate([part.behavior_logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            # Each turn records only new tokens, so the concatenation has each token once.
            routed_experts=b"".join(one for one in experts if one) or None,
        )

    @property
    def mask(self) -> NDArray[np.uint8]:
        masks: list[NDArray[np.uint8]] = []
        for segment in self.segments:
            if masks:
                masks.append(np.zeros(len(segment.prompt.token_ids), dtype=np.uint8))
            masks += segment.masks
        return np.concatenate(masks)

    def rewards(self, last: float) -> tuple[float, NDArray[np.float32]]:
        """Return the total reward and the reward per token, of shape [response tokens]: each turn's
        reward at the last token of the turn, and `last`, the value of the reward function, at the
        last token of the sample."""
        starts = self._starts
        steps = np.zeros(starts[-1], dtype=np.float32)
        parts: list[float] = [last]
        for number, segment in enumerate(self.segments):
            offset = starts[number] + len(segment.prompt.token_ids) * (number > 0)
            steps[offset + np.array(segment.ends, dtype=np.int64)] = segment.rewards
            parts += segment.rewards
        steps[-1] += last
        # The rewards per token are float32. If their sum differs from the exact total, return their
        # sum, so that the log shows the total that was trained.
        total = math.fsum(parts)
        summed = float(np.sum(steps, dtype=np.float64))
        return (total if math.isclose(total, summed, rel_tol=1e-6, abs_tol=1e-6) else summed), steps

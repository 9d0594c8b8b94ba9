"""The transcript of one sample of several turns: the model's tokens and the environment's between
them.

    prompt | opening | turn 1 | words | turn 2 | words | turn 3
        mask 0      1        0       1        0       1      (the opening belongs to the prompt)

An agent that does not continue where it was, which only the endpoint has, begins another segment: a
sequence of its own, whose prompt is the sample's first segment's, or else a context with mask 0.

Invariants:
- token in, token out: a turn is sampled after just the tokens that its segment holds; nothing that
  was sampled is ever tokenized again;
- sampled tokens keep the log-prob, version and experts they were sampled with; an environment's
  tokens have the version of the token before them (a context's: of the one after), log-prob 0 and
  mask 0;
- a segment ends with a turn of the model: text that the model does not read is in the sample's text
  alone;
- what is put behind a prompt, turns and words together are at most `rollout.sampling.max_tokens`
  tokens in a segment, so none is longer than any other sample of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.rollout.environments import Step
from megatron_async_rl.rollout.environments.chat import shown
from megatron_async_rl.samples.types import FinishReason, PartialResponse, Prompt


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens that the model sampled in one go. `tokens`: with the experts of all tokens from those
    on that had been read, the last one excepted. `text`: without special tokens."""

    tokens: PartialResponse
    text: str
    reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A turn to be sampled. `ids`: what the model reads. `begun`: tokens of the sample so far,
    which no other turn of it has. `maximum`: tokens of the turn. `read`: how many of `ids` have
    their experts recorded. `stop`: strings that end it, in addition to those of the run."""

    ids: Sequence[int]
    begun: int
    maximum: int
    read: int = 0
    stop: Sequence[str] = ()


SampleTurn = Callable[[TurnRequest], Awaitable[Turn]]


class TranscriptSegment:
    """A sequence so far: a prompt, and turns and words behind it."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        self.parts: list[PartialResponse] = []
        self.masks: list[NDArray[np.uint8]] = []
        self.rewards: list[float] = []
        self.ends: list[int] = []
        """Place of each turn's last token."""
        self.text: list[str] = []
        self.length = 0
        """Tokens behind the prompt."""

    def take_turn(self, turn: Turn, content: Sequence[int] = ()) -> None:
        """`content`: tokens that the environment put before it."""
        if content:
            self.put(content, int(self.parts[-1].versions[-1]))
        self.turns.append(turn)
        self._append(turn.tokens, 1)
        self.ends.append(self.length - 1)
        self.rewards.append(0.0)
        self.text.append(turn.text)

    def take_step(self, step: Step) -> None:
        """The answer to the turn before."""
        self.rewards[-1] += step.reward
        if not step.train:
            self.masks[-1][:] = 0
        content = shown(step.observation)
        if content or step.reward:
            reward = f", reward {step.reward:g}" if step.reward else ""
            self.text.append(f"[environment{reward}] {content}".rstrip())

    def put(self, content: Sequence[int], version: int) -> None:
        """Tokens that were not sampled."""
        self._append(words_of(content, version), 0)

    def _append(self, tokens: PartialResponse, mask: int) -> None:
        self.parts.append(tokens)
        self.masks.append(np.full(len(tokens.response_ids), mask, dtype=np.uint8))
        self.length += len(tokens.response_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens, the prompt's first."""
        ids = list(self.prompt.token_ids)
        for part in self.parts:
            ids += part.response_ids.tolist()
        return ids

    @property
    def read(self) -> int:
        """Tokens whose experts came with its turns."""
        return len(self.prompt.token_ids) + self.ends[-1] if self.ends else 0


def words_of(ids: Sequence[int], version: int) -> PartialResponse:
    """Tokens that were not sampled."""
    return PartialResponse(
        response_ids=np.asarray(ids, dtype=np.int32),
        behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
    )


class Transcript:
    """The sample so far. Its tokens are those of its segments, in the order in which these began,
    each but the first with its prompt before it."""

    def __init__(self, requested: Prompt) -> None:
        self.requested = requested
        """The request's prompt, which the first segment's takes the place of."""
        self.segments: list[TranscriptSegment] = []
        self.turns: list[Turn] = []
        """Turns of all segments, as they came."""
        self.truncated = False
        self.measured: Counter[str] = Counter()
        """Sums of what the environment measured, by name."""

    def room(self, segment: TranscriptSegment, max_tokens: int) -> int:
        """Tokens that may be put behind the segment."""
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
        """Has the segment's next turn sampled, of at most `maximum` tokens, up to a string of
        `stop`."""
        further = segment not in self.segments
        context = len(segment.prompt.token_ids) if further and self.segments else 0
        begun = self.length + context + len(content)
        ids = [*segment.ids, *content]
        turn = await sample(
            TurnRequest(ids=ids, begun=begun, maximum=maximum, read=segment.read, stop=stop)
        )
        if further:
            self.segments.append(segment)
        segment.take_turn(turn, content)
        self.turns.append(turn)
        return turn

    def give_up(self, token: int, version: int) -> None:
        """Complete a sample that has no turn with one `token` that was not sampled, because a
        sample has at least one token."""
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
        """Places of the segments among the response tokens: of the first one's, of the others'
        contexts."""
        starts, end = [], 0
        for segment in self.segments:
            starts.append(end)
            end += segment.length + len(segment.prompt.token_ids) * (end > 0)
        return [*starts, end]

    @property
    def length(self) -> int:
        """Response tokens."""
        return self._starts[-1]

    @property
    def segment_starts(self) -> NDArray[np.int32] | None:
        """Starts of the segments after the first, as in Sample."""
        starts = self._starts[1:-1]
        return np.array(starts, dtype=np.int32) if starts else None

    @property
    def tokens(self) -> PartialResponse:
        """Raises ValueError before the first turn."""
        parts: list[PartialResponse] = []
        for segment in self.segments:
            if parts:
                version = int(segment.parts[0].versions[0])
                parts.append(words_of(segment.prompt.token_ids, version))
            parts += segment.parts
        turns = [turn for segment in self.segments for turn in segment.turns]
        experts = [turn.tokens.routed_experts for turn in turns]
        return PartialResponse(
            response_ids=np.concatenate([part.response_ids for part in parts]),
            behavior_logprobs=np.concatenate([part.behavior_logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
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
        """The reward, and what of it came with which token: a turn's with its last one, and `last`
        with the sample's."""
        starts = self._starts
        steps = np.zeros(starts[-1], dtype=np.float32)
        every: list[float] = [last]
        for number, segment in enumerate(self.segments):
            behind = starts[number] + len(segment.prompt.token_ids) * (number > 0)
            steps[behind + np.array(segment.ends, dtype=np.int64)] = segment.rewards
            every += segment.rewards
        steps[-1] += last
        total = math.fsum(every)
        exact = float(np.sum(steps, dtype=np.float64))
        return (total if math.isclose(total, exact, rel_tol=1e-6, abs_tol=1e-6) else exact), steps

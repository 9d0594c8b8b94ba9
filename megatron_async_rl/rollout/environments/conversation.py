"""One sample of several turns: the model samples, the environment answers, its words are put behind
what was sampled, and the model goes on.

    prompt | opening | turn 1 | words | turn 2 | words | turn 3
             mask 0    1        0       1        0       1        (the opening belongs to the prompt)

Invariants:
- token in, token out: a turn is sampled after just the tokens that the sample holds; nothing that
  was sampled is ever tokenized again;
- sampled tokens keep the log-prob and version they were sampled with; an environment's tokens have
  the version of the token before them, log-prob 0 and mask 0;
- a sample ends with a turn of the model: words that nobody reads are in its text alone;
- opening, turns and words together are at most `rollout.sampling.max_tokens` tokens, so a sample is
  no longer than any other of the run.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jinja2
import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.environment import EnvironmentConfig
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.protocol import Message, Step, Words
from megatron_async_rl.samples.types import FinishReason, PartialResponse, Prompt

FIX = (
    "give data.chat_template a template that writes a message in one way wherever it stands, change"
    " data.chat_template_options, or set rollout.environment.format: text"
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model sampled in one go. `text`: without special tokens."""

    tokens: PartialResponse
    text: str
    reason: FinishReason


Sample = Callable[[Sequence[int], int, int], Awaitable[Turn]]
"""sample(tokens so far, response tokens among them, most tokens of the turn)."""


class Talker(Protocol):
    """The environment of one sample (pool.Conversing)."""

    async def reset(self, prompt: Prompt) -> Words: ...
    async def step(self, response: str) -> Step: ...


class FollowUps(Protocol):
    """How words become the tokens between two turns."""

    def opened(self, prompt: Prompt, words: Words) -> Prompt:
        """The prompt with `words` behind it."""
        ...

    def between(self, sampled: Sequence[int], words: Words) -> list[int]:
        """Tokens after those of a turn, up to where the next one begins."""
        ...


class PlainText:
    """Words as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opened(self, prompt: Prompt, words: Words) -> Prompt:
        text = shown(words)
        ids = self._tokenizer.encode(text, special_tokens=False)
        return replace(prompt, text=prompt.text + text, token_ids=(*prompt.token_ids, *ids))

    def between(self, sampled: Sequence[int], words: Words) -> list[int]:
        return self._tokenizer.encode(shown(words), special_tokens=False)


QUESTION: Message = {"role": "user", "content": "Q"}
ANSWER: Message = {"role": "assistant", "content": "A7A"}
"""Stand for what there was before: an answer whose text a template has no reason to change."""


class ChatMessages:
    """Words as messages: what the template writes after an answer when more follows. Raises
    DataError for a template that writes the messages before in another way then."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._asked = tokenizer.render_chat([QUESTION], answer=False)
        self._begun = tokenizer.render_chat([QUESTION], answer=True)
        if not self._begun.startswith(self._asked) or self._begun == self._asked:
            what = "has a chat template that does not say where an answer begins"
            raise DataError("model.path", None, what, FIX)
        self._begin = tokenizer.encode_rendered(self._begun[len(self._asked) :])
        self._after(self._begun + str(ANSWER["content"]), [QUESTION, ANSWER], "Q")

    def opened(self, prompt: Prompt, words: Words) -> Prompt:
        text = self._after(self._asked, [QUESTION], words)
        cut = len(prompt.token_ids) - len(self._begin)
        if cut < 0 or list(prompt.token_ids[cut:]) != self._begin:
            raise DataError(
                "the prompt",
                None,
                "does not end where the chat template has an answer begin, so no message can be put"
                " behind it",
                "set data.as_chat: true, or rollout.environment.format: text",
            )
        ids = self._tokenizer.encode_rendered(text)
        return replace(prompt, text=prompt.text + text, token_ids=(*prompt.token_ids[:cut], *ids))

    def between(self, sampled: Sequence[int], words: Words) -> list[int]:
        before = self._begun + str(ANSWER["content"])
        ids = self._tokenizer.encode_rendered(self._after(before, [QUESTION, ANSWER], words))
        # A turn's end that was sampled is not written again.
        ended = sampled[-1] in self._tokenizer.eos_ids and ids[:1] == [sampled[-1]]
        return ids[1:] if ended else ids

    def _after(self, before: str, messages: Sequence[Message], words: Words) -> str:
        more = [{"role": "user", "content": words}] if isinstance(words, str) else list(words)
        whole = self._tokenizer.render_chat([*messages, *more], answer=True)
        if not whole.startswith(before):
            raise DataError(
                "model.path",
                None,
                "has a chat template that writes what is before a message in another way once the"
                f" message follows: {before!r} is not how {whole!r} begins. What was sampled could"
                " not be what is trained",
                FIX,
            )
        return whole[len(before) :]


def follow_ups(settings: EnvironmentConfig, tokenizer: Tokenizer) -> FollowUps:
    """Raises DataError where the template does not permit a second turn."""
    return ChatMessages(tokenizer) if settings.format == "chat" else PlainText(tokenizer)


def shown(words: Words) -> str:
    return words if isinstance(words, str) else "".join(str(one["content"]) for one in words)


class Transcript:
    """The sample so far."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.opening = 0
        """Tokens of the prompt that the environment's opening added."""
        self.turns: list[Turn] = []
        self.truncated = False
        self._parts: list[PartialResponse] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._rewards: list[float] = []
        self._ends: list[int] = []
        self._text: list[str] = []
        self.length = 0
        """Response tokens."""

    def open(self, prompt: Prompt) -> None:
        self.opening = len(prompt.token_ids) - len(self.prompt.token_ids)
        self.prompt = prompt

    def take_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._append(turn.tokens, 1)
        self._ends.append(self.length - 1)
        self._rewards.append(0.0)
        self._text.append(turn.text)

    def take_step(self, step: Step) -> None:
        """The answer to the turn before."""
        self._rewards[-1] = step.reward
        if not step.train:
            self._masks[-1][:] = 0
        words = shown(step.observation)
        if words or step.reward:
            reward = f", reward {step.reward:g}" if step.reward else ""
            self._text.append(f"[environment{reward}] {words}".rstrip())

    def take_words(self, ids: Sequence[int]) -> None:
        """Tokens of the environment, of the version of the token before."""
        if ids:
            shape = len(ids)
            version = self._parts[-1].versions[-1]
            words = PartialResponse(
                response_ids=np.asarray(ids, dtype=np.int32),
                behavior_logprobs=np.zeros(shape, dtype=np.float32),
                versions=np.full(shape, version, dtype=np.int32),
            )
            self._append(words, 0)

    def drop_words(self) -> None:
        """Tokens of the environment that no turn follows."""
        if self._parts and self.length - 1 > self._ends[-1]:
            self.length -= len(self._parts.pop().response_ids)
            self._masks.pop()

    def _append(self, tokens: PartialResponse, mask: int) -> None:
        self._parts.append(tokens)
        self._masks.append(np.full(len(tokens.response_ids), mask, dtype=np.uint8))
        self.length += len(tokens.response_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens, the prompt's first."""
        ids = list(self.prompt.token_ids)
        for part in self._parts:
            ids += part.response_ids.tolist()
        return ids

    @property
    def text(self) -> str:
        return "\n".join(self._text)

    @property
    def last_turn(self) -> str:
        return self.turns[-1].text if self.turns else ""

    @property
    def tokens(self) -> PartialResponse:
        """Raises ValueError before the first turn."""
        return PartialResponse(
            response_ids=np.concatenate([part.response_ids for part in self._parts]),
            behavior_logprobs=np.concatenate([part.behavior_logprobs for part in self._parts]),
            versions=np.concatenate([part.versions for part in self._parts]),
        )

    @property
    def mask(self) -> NDArray[np.uint8]:
        return np.concatenate(self._masks)

    def rewards(self, last: float) -> tuple[float, NDArray[np.float32]]:
        """The reward, and what of it came with which token: a turn's with its last one, and `last`
        with the sample's."""
        steps = np.zeros(self.length, dtype=np.float32)
        steps[self._ends] = self._rewards
        steps[-1] += last
        total = math.fsum([*self._rewards, last])
        exact = float(np.sum(steps, dtype=np.float64))
        return (total if math.isclose(total, exact, rel_tol=1e-6, abs_tol=1e-6) else exact), steps


async def converse(
    transcript: Transcript,
    environment: Talker,
    sample: Sample,
    follow: FollowUps,
    *,
    max_turns: int,
    max_tokens: int,
) -> None:
    """Fills `transcript`, which holds what there is when the environment raises."""
    words = await environment.reset(transcript.prompt)
    if words:
        transcript.open(follow.opened(transcript.prompt, words))
    budget = max_tokens - transcript.opening
    if budget < 1:
        raise EnvironmentFailed(
            f"what reset returns is {transcript.opening} tokens long, and"
            f" rollout.sampling.max_tokens: {max_tokens} leaves no room for a turn"
        )
    while True:
        turn = await sample(transcript.ids, transcript.length, budget - transcript.length)
        transcript.take_turn(turn)
        step = await environment.step(turn.text)
        transcript.take_step(step)
        if turn.reason == "length":
            transcript.truncated = True
        if step.done or transcript.truncated or len(transcript.turns) == max_turns:
            return
        ids = follow.between(turn.tokens.response_ids.tolist(), step.observation)
        if transcript.length + len(ids) >= budget:
            transcript.truncated = True
            return
        transcript.take_words(ids)


class Player(Protocol):
    """Makes a sample of several turns."""

    async def play(self, transcript: Transcript, sample: Sample, max_tokens: int) -> str | None:
        """Fills `transcript`; why it ended early, where the environment failed."""
        ...


class Conversations:
    """What an engine's samples have in common: their environments and how words become tokens."""

    def __init__(self, environments: Environments, tokenizer: Tokenizer) -> None:
        """Raises DataError where the chat template does not permit a second turn."""
        self._environments = environments
        self._follow = follow_ups(environments.settings, tokenizer)

    async def play(self, transcript: Transcript, sample: Sample, max_tokens: int) -> str | None:
        """Fills `transcript`; why it ended early, where the environment failed."""
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
            )
        except (EnvironmentFailed, DataError, jinja2.TemplateError) as error:
            return str(error)
        finally:
            if environment is not None:
                await environment.close()
        return None

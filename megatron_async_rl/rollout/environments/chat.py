"""Text between two turns: an environment's words as the tokens that the model reads next.

Invariant: nothing that was sampled is tokenized again. Only words are, and how they are written
does not change what is before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments import Message, TurnContent
from megatron_async_rl.samples.types import Prompt

FIX = (
    "give data.chat_template a template that writes a message in one way wherever it stands, change"
    " data.chat_template_options, or set rollout.environment.format: text"
)


class FollowUps(Protocol):
    """How words become the tokens between two turns."""

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        """The prompt with `content` behind it."""
        ...

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        """Tokens after those of a turn, up to where the next one begins."""
        ...


class PlainText:
    """Words as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        text = shown(content)
        ids = self._tokenizer.encode(text, special_tokens=False)
        return replace(prompt, text=prompt.text + text, token_ids=(*prompt.token_ids, *ids))

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        return self._tokenizer.encode(shown(content), special_tokens=False)


QUESTION: Message = {"role": "user", "content": "Q"}
ANSWER: Message = {"role": "assistant", "content": "A7A"}
"""Stand for what there was before: an answer whose text a template has no reason to change."""


class EpisodeMessages:
    """Words as messages: what the template writes after an answer when more follows. Raises
    DataError for a template that writes the messages before in another way then."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompted = tokenizer.render_chat([QUESTION], answer=False)
        self._begun = tokenizer.render_chat([QUESTION], answer=True)
        if not self._begun.startswith(self._prompted) or self._begun == self._prompted:
            what = "has a chat template that does not say where an answer begins"
            raise DataError("model.path", None, what, FIX)
        self._begin = tokenizer.encode_rendered(self._begun[len(self._prompted) :])
        self._after(self._begun + str(ANSWER["content"]), [QUESTION, ANSWER], "Q")

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        text = self._after(self._prompted, [QUESTION], content)
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

    def between(self, sampled: Sequence[int], content: TurnContent) -> list[int]:
        before = self._begun + str(ANSWER["content"])
        ids = self._tokenizer.encode_rendered(self._after(before, [QUESTION, ANSWER], content))
        # A turn's end that was sampled is not written again.
        ended = sampled[-1] in self._tokenizer.eos_ids and ids[:1] == [sampled[-1]]
        return ids[1:] if ended else ids

    def _after(self, before: str, messages: Sequence[Message], content: TurnContent) -> str:
        more = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
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
    return EpisodeMessages(tokenizer) if settings.format == "chat" else PlainText(tokenizer)


def shown(content: TurnContent) -> str:
    return content if isinstance(content, str) else "".join(str(one["content"]) for one in content)

"""Text between two turns: the environment's content as tokens that the model reads next.

Invariant: sampled tokens are never tokenized again. Only the environment's content is, and
rendering it must not change the text before it.
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
    "set data.chat_template to a template that renders a message alike at every position, change"
    " data.chat_template_options, or set rollout.environment.format: text"
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
    """Content as plain text, without a chat template."""

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
"""Stand-ins for the earlier conversation: an answer that a template has no reason to change."""


class EpisodeMessages:
    """Content as chat messages: the text that the template adds after an answer. Raises DataError
    for a template that renders earlier messages differently once others follow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompted = tokenizer.render_chat([QUESTION], answer=False)
        self._begun = tokenizer.render_chat([QUESTION], answer=True)
        if not self._begun.startswith(self._prompted) or self._begun == self._prompted:
            what = "has a chat template that does not mark the beginning of an answer"
            raise DataError("model.path", None, what, FIX)
        # Cut from the end of the prompt in `opened`, and written again behind the opening.
        self._begin = tokenizer.encode_rendered(self._begun[len(self._prompted) :])
        # A trial, so that an unsuitable template is refused before any sample.
        self._after(self._begun + str(ANSWER["content"]), [QUESTION, ANSWER], "Q")

    def opened(self, prompt: Prompt, content: TurnContent) -> Prompt:
        text = self._after(self._prompted, [QUESTION], content)
        cut = len(prompt.token_ids) - len(self._begin)
        if cut < 0 or list(prompt.token_ids[cut:]) != self._begin:
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
        before = self._begun + str(ANSWER["content"])
        ids = self._tokenizer.encode_rendered(self._after(before, [QUESTION, ANSWER], content))
        # The model may have sampled the end of its turn, which must not appear twice.
        ended = sampled[-1] in self._tokenizer.eos_ids and ids[:1] == [sampled[-1]]
        return ids[1:] if ended else ids

    def _after(self, before: str, messages: Sequence[Message], content: TurnContent) -> str:
        more = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        # Difference of two renderings: the suffix alone is tokenized, so the sampled tokens stay.
        whole = self._tokenizer.render_chat([*messages, *more], answer=True)
        if not whole.startswith(before):
            raise DataError(
                "model.path",
                None,
                "has a chat template that renders earlier messages differently once another"
                f" follows: {whole!r} does not begin with {before!r}. Trained tokens would differ"
                " from sampled tokens",
                FIX,
            )
        return whole[len(before) :]


def follow_ups(settings: EnvironmentConfig, tokenizer: Tokenizer) -> FollowUps:
    """Return the conversion that the settings select. Raises DataError for a template that does not
    permit a second turn."""
    return EpisodeMessages(tokenizer) if settings.format == "chat" else PlainText(tokenizer)


def shown(content: TurnContent) -> str:
    return content if isinstance(content, str) else "".join(str(one["content"]) for one in content)

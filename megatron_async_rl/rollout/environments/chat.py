"""Text between two turns, both ways: an environment's words as the tokens that the model reads
next, and the tool calls in what the model wrote.

Invariant: nothing that was sampled is tokenized again. Only words are, and how they are written
does not change what is before them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments import (
    PARSER_KEY,
    UNREAD,
    EnvironmentRefused,
    Message,
    TurnContent,
    require_tool_parser,
)
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


PARSERS = [logging.getLogger(name) for name in ("vllm.tool_parsers", "vllm.parser")]
"""Loggers of vLLM's tool parsers, which say there what they cannot read."""
REASON = 200
"""Characters of a reason that the model reads: a parser may repeat the whole response."""


class _ParserReports(logging.Handler):
    """Collect a parser's reports instead of logging them: a policy causes thousands of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(_described(error) if error is not None else record.getMessage())


@contextmanager
def _reported() -> Iterator[list[str]]:
    faults = _ParserReports()
    for logger in PARSERS:
        logger.addHandler(faults)
    try:
        yield faults.found
    finally:
        for logger in PARSERS:
            logger.removeHandler(faults)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class ToolParser:
    """One of vLLM's tool parsers, with the model's tokenizer. Raises EnvironmentRefused where the
    model has not the tokens that it looks for."""

    def __init__(
        self, name: str, model_path: Path, eos_ids: Sequence[int], tools: Sequence[Any] = ()
    ) -> None:
        """`tools`: schemas of those that the model knows, where a call does not name others."""
        # Here, as vLLM reads environment variables that the engine sets.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        from megatron_async_rl.rollout.vllm.vllm_private import call_beginnings

        require_tool_parser(name)
        for logger in PARSERS:
            logger.setLevel(logging.WARNING)
            logger.propagate = False
        self._request = ChatCompletionRequest
        self._parser: Any = ToolParserManager.get_tool_parser(name)
        self._tokenizer: Any = get_tokenizer(str(model_path))
        self._eos_ids, self._tools = eos_ids, tools
        self._begins: tuple[str, ...] = ()
        try:
            self._begins = call_beginnings(self._parser(self._tokenizer, None))
            self._parse("", ())
        except Exception as error:
            raise EnvironmentRefused(
                PARSER_KEY,
                f"{name} does not go with this model: {error}",
                "name the parser that the model's card names for vLLM",
            ) from error

    def message(
        self, ids: Sequence[int], text: str, tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """The assistant's message of a turn: `content`, and `tool_calls` where there are any, each
        with `id`, `type` and `function` (`name`; `arguments` as JSON). `text`: of the turn, without
        special tokens. What cannot be parsed stays text; for an invalid call, UNREAD has the
        reason."""
        # Calls stand between special tokens in many a model.
        end = len(ids) - (ids[-1] in self._eos_ids)
        whole = self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        found, fault = self._parse(whole, tools or self._tools)
        if found is None or not found.tool_calls:
            unread = {UNREAD: fault[:REASON]} if fault is not None else {}
            return {"role": "assistant", "content": text, **unread}
        calls = [one.model_dump(include={"id", "type", "function"}) for one in found.tool_calls]
        return {"role": "assistant", "content": found.content, "tool_calls": calls}

    def request(self, tools: Sequence[Any] | None) -> Any:
        """A call with `tools`. Raises ValueError for invalid schemas."""
        return self._request(messages=[QUESTION], model="", tools=list(tools or ()) or None)

    def _parse(self, text: str, tools: Sequence[Any]) -> tuple[Any, str | None]:
        """The parser's find, and why it could not read a call."""
        request = self.request(tools)
        parser, found = self._parser(self._tokenizer, request.tools), None
        with _reported() as faults:
            try:
                found = parser.extract_tool_calls(text, request)
            except Exception as error:  # noqa: BLE001 - a parser is given whatever a model writes
                faults.append(_described(error))
        # Llama's try every brace of a text; a call that is to be one begins with their token.
        begins = getattr(parser, "bot_token", None) or ""
        if faults and begins in text:
            return found, faults[0]
        begun = next((one for one in self._begins if one in text), None)
        # Those that read XML pass over what they cannot read.
        return found, None if begun is None else f"{begun} begins a call, and none can be read"

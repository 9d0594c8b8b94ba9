"""vLLM's parsers of tool calls in the text of a model.

Invariant: text that cannot be parsed stays text, and the model receives the reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_async_rl.rollout.environments import (
    PARSER_KEY,
    UNREAD,
    EnvironmentRefused,
    require_tool_parser,
)

PARSERS = [logging.getLogger(name) for name in ("vllm.tool_parsers", "vllm.parser")]
"""Loggers of vLLM's tool parsers, which report unreadable calls."""
REASON = 200
"""Maximum characters of a reason: a parser may repeat the whole response."""
CALL_BEGINS = re.compile(
    r"_?(tool_calls?|tools?|bot|tc)_(start|begin|open|token|string)(_token)?", re.I
)
"""Names of attributes in which text parsers store the mark at the beginning of a call."""


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
    """One of vLLM's tool parsers, with the model's tokenizer. Raises EnvironmentRefused if the
    model lacks the tokens that the parser looks for."""

    def __init__(
        self, name: str, model_path: Path, eos_ids: Sequence[int], tools: Sequence[Any] = ()
    ) -> None:
        """`tools`: schemas of the tools, unless a call names others."""
        # Imported here: vLLM reads environment variables that the engine sets first.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

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
                "set the parser that the model card recommends for vLLM",
            ) from error

    def message(
        self, ids: Sequence[int], text: str, tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Return the message of a turn: `content` and, if there are any, `tool_calls` with `id`,
        `type` and `function` (`name`; `arguments` as JSON). `text`: text of the turn without
        special tokens. Text that cannot be parsed stays in `content`; for an invalid call, UNREAD
        has the reason."""
        # Decoded again with special tokens: many models put calls between them.
        end = len(ids) - (ids[-1] in self._eos_ids)
        whole = self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        found, fault = self._parse(whole, tools or self._tools)
        if found is None or not found.tool_calls:
            unread = {UNREAD: fault[:REASON]} if fault is not None else {}
            return {"role": "assistant", "content": text, **unread}
        calls = [one.model_dump(include={"id", "type", "function"}) for one in found.tool_calls]
        return {"role": "assistant", "content": found.content, "tool_calls": calls}

    def request(self, tools: Sequence[Any] | None) -> Any:
        """Return a request with `tools`. Raises ValueError for invalid schemas."""
        return self._request(
            messages=[{"role": "user", "content": "Q"}], model="", tools=list(tools or ()) or None
        )

    def _parse(self, text: str, tools: Sequence[Any]) -> tuple[Any, str | None]:
        """Return the calls found, and the reason if a call could not be read."""
        request = self.request(tools)
        parser, found = self._parser(self._tokenizer, request.tools), None
        with _reported() as faults:
            try:
                found = parser.extract_tool_calls(text, request)
            except Exception as error:  # noqa: BLE001 - a model may write anything
                faults.append(_described(error))
        # Llama's parsers try every brace of a text; an intended call begins with their token.
        begins = getattr(parser, "bot_token", None) or ""
        if faults and begins in text:
            return found, faults[0]
        begun = next((one for one in self._begins if one in text), None)
        # Parsers of XML skip what they cannot read, without a report.
        return found, None if begun is None else f"{begun} begins a call, and none can be read"


def call_beginnings(parser: Any) -> tuple[str, ...]:
    """Return the parser's marks for the beginning of a call. Empty if it has none, or only plain
    words, which occur in other text, too."""
    found = {
        value
        for name in dir(parser)
        if CALL_BEGINS.fullmatch(name) and isinstance(value := getattr(parser, name), str)
    }
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        config = engine.parser_engine_config
        for (state, terminal), transition in config.transitions.items():
            if state.name == "CONTENT" and transition.next_state.name.startswith("TOOL_"):
                spelt = config.terminals.get(terminal, ())
                found |= {spelt} if isinstance(spelt, str) else set(spelt)
    return tuple(sorted(one for one in found if one and not one.isidentifier()))

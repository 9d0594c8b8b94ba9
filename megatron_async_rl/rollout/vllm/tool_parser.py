"""Parsers of tool calls in the text of a model, from vLLM.

Invariant: text that cannot be parsed remains text, and the model receives the reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_async_rl.rollout.environments import PARSER_KEY, UNREAD, EnvironmentRefused

PARSERS = [logging.getLogger(name) for name in ("vllm.tool_parsers", "vllm.parser")]
"""Loggers of vLLM's tool parsers, which report unreadable calls."""
REASON = 200
"""Maximum length of a reason in characters, because a parser may repeat the whole response in
it."""
CALL_BEGINS = re.compile(
    r"_?(tool_calls?|tools?|bot|tc)_(start|begin|open|token|string)(_token)?", re.I
)
"""Names of the attributes in which parsers of text store the mark at the beginning of a call."""


class _ParserReports(logging.Handler):
    """Logging handler that collects a parser's reports. They are not logged, because the text of a
    policy causes thousands of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.faults.append(_described(error) if error is not None else record.getMessage())


@contextmanager
def _reported() -> Iterator[list[str]]:
    """Collect the faults that parsers report inside the `with` block."""
    reports = _ParserReports()
    for logger in PARSERS:
        logger.addHandler(reports)
    try:
        yield reports.faults
    finally:
        for logger in PARSERS:
            logger.removeHandler(reports)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class ToolParser:
    """The tool parser `name` of vLLM, with the model's tokenizer. Raises EnvironmentRefused if the
    parser does not support the model, for example because the model lacks a token of its calls."""

    def __init__(
        self, name: str, model_path: Path, eos_ids: Sequence[int], tools: Sequence[Any] = ()
    ) -> None:
        """Load the parser. `tools`: schemas of the tools that a turn may call, unless `message`
        receives others."""
        # Imported here: the engine first sets environment variables that vLLM reads at import.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

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
                f"{name} does not support this model: {error}",
                "set the parser that the model card recommends for vLLM",
            ) from error

    def message(
        self, ids: Sequence[int], text: str, tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Return the message of a turn with the tokens `ids`: `role`, `content` and, if the turn
        has calls, `tool_calls` with `id`, `type` and `function` (`name`; `arguments` as JSON).
        `text`: text of the turn without special tokens. Text that cannot be parsed remains in
        `content`; if a call is invalid, UNREAD has the reason."""
        # Decode again with special tokens, because many models write calls between them.
        end = len(ids) - (ids[-1] in self._eos_ids)
        whole = self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        parsed, fault = self._parse(whole, tools or self._tools)
        if parsed is None or not parsed.tool_calls:
            unread = {UNREAD: fault[:REASON]} if fault is not None else {}
            return {"role": "assistant", "content": text, **unread}
        calls = [one.model_dump(include={"id", "type", "function"}) for one in parsed.tool_calls]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def request(self, tools: Sequence[Any] | None) -> Any:
        """Return a request for vLLM's parsers with `tools`. Raises ValueError for an invalid
        schema."""
        return self._request(
            messages=[{"role": "user", "content": "Q"}], model="", tools=list(tools or ()) or None
        )

    def _parse(self, text: str, tools: Sequence[Any]) -> tuple[Any, str | None]:
        """Return vLLM's result of parsing, or None, and the reason if a call could not be
        parsed."""
        request = self.request(tools)
        parser, parsed = self._parser(self._tokenizer, request.tools), None
        with _reported() as faults:
            try:
                parsed = parser.extract_tool_calls(text, request)
            except Exception as error:  # noqa: BLE001 - a model may write any text
                faults.append(_described(error))
        # Llama's parsers try to parse at every brace, so a fault counts only if the text has the
        # token that begins a call.
        begins = getattr(parser, "bot_token", None) or ""
        if faults and begins in text:
            return parsed, faults[0]
        mark = next((one for one in self._begins if one in text), None)
        # Parsers of XML skip an invalid call without a report.
        return parsed, None if mark is None else f"{mark} begins a call, and none can be parsed"


def call_beginnings(parser: Any) -> tuple[str, ...]:
    """Return the parser's marks for the beginning of a call. Marks that are plain words are
    excluded, because they also occur in other text."""
    marks = {
        value
        for name in dir(parser)
        if CALL_BEGINS.fullmatch(name) and isinstance(value := getattr(parser, name), str)
    }
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        config = engine.parser_engine_config
        for (state, terminal), transition in config.transitions.items():
            if state.name == "CONTENT" and transition.next_state.name.startswith("TOOL_"):
                spellings = config.terminals.get(terminal, ())
                marks |= {spellings} if isinstance(spellings, str) else set(spellings)
    return tuple(sorted(one for one in marks if one and not one.isidentifier()))

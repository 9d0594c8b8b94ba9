"""Chat template of a model, which renders chat messages as the text that the model reads.

Invariants:
- a message never loses a part silently: roles, tool calls, options and tools that the template does
  not write are refused;
- the template gets the arguments of a tool call in the form in which it writes them without a
  second encoding: an object if it applies `tojson` or reads single arguments, JSON text if it
  prints them.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.files import a_kind, no_duplicate_keys

ChatMessages = Sequence[Mapping[str, Any]]

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags around the assistant's text that transformers adds to Jinja's syntax."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages in every template."""
FURTHER_ROLES = ("developer", "function")
"""Roles of OpenAI's API that a template may write without naming them."""
PROBE_QUESTION = {"role": "user", "content": "Q"}
PROBE_ANSWER = "A7A"
"""Text that templates write unchanged."""
PROBE_NAME = "probe_function"
PROBE_ARGUMENTS = {"probe_key": "probe value"}


def tool_calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message, each with its arguments as an object; an empty list for a
    message without calls. Calls and arguments may be JSON text, as in OpenAI's API. Raises
    ValueError, which names the faulty call."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        # Parquet and CSV often store the list as one JSON string.
        calls = _parsed(calls, "tool_calls") if calls.strip() else None
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"has tool_calls that are not a list of objects: {calls!r:.80}")
    return [_with_object(call, f"tool_calls[{index}]") for index, call in enumerate(calls)]


def _with_object(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the call with its arguments as an object. The arguments are inside `function` or, in
    the short form of some data sets, next to the name."""
    function = call.get("function")
    # Build a new object, so that the caller's message does not change.
    if isinstance(function, Mapping):
        return {**call, "function": _with_object(function, f"{name}.function")}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{name}.arguments") if arguments.strip() else None
    if arguments is None:  # OpenAI's clients write null or empty text for no arguments
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"has {a_kind(arguments)} as {name}.arguments, which must be an object")
    return {**call, "arguments": arguments}


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has {name} that are not JSON: {error}: {text[:60]!r}") from error


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of `tool_calls_of` with its arguments as JSON text."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _as_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def function_name(call: Mapping[str, Any]) -> str:
    """Return the name of the called function; empty text if the call has none."""
    function = call.get("function")
    # OpenAI's API nests the name in `function`; some data sets write it next to the arguments.
    named = call if function is None else function
    name = named.get("name") if isinstance(named, Mapping) else None
    return name if isinstance(name, str) else ""


def load_with_transformers(model_dir: Path) -> Any:
    """Return transformers' tokenizer, without running code of the model. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        # mistral_format=False: for Mistral's tekken.json transformers would use mistral-common,
        # which has no chat template and no backend.
        return AutoTokenizer.from_pretrained(
            str(model_dir), trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # the readers of damaged files raise many types
        raise DataError(
            model_dir,
            None,
            f"has a tokenizer that transformers cannot load: {error}",
            "restore its tokenizer files and config.json from the model's source",
        ) from error


class ChatTemplate:
    """A chat template and its options.

    `template`: text of the template; None uses the model's. `options`: variables of the template.
    `tools`: JSON schemas of the functions in every conversation. `backend`: transformers' tokenizer
    of the model; None loads it for the first message.
    """

    def __init__(
        self,
        model_dir: Path,
        template: str | None,
        options: Mapping[str, Any],
        tools: Sequence[Any] = (),
        backend: Any = None,
    ) -> None:
        self._dir = model_dir
        self._template = template
        self._options = options
        self._tools = list(tools)
        self._loaded = backend
        self._checked = False
        self._reads: Collection[str] | None = None

    def render(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        """Return the messages as the template writes them. With `answer`, the beginning of the
        model's answer follows.

        Raises DataError if there is no template, or if the template leaves out an option, the tools
        or a part of a message. Raises ValueError for tool calls that cannot be read.
        """
        self._require_template()
        if tools:
            self._require_tools()
        # A template takes a single list of tools.
        if tools and self._tools and list(tools) != self._tools:
            raise DataError(
                self._dir,
                None,
                "would receive other tools than those of rollout.environment",
                "remove the tools from the data, or set data.tools_key: null",
            )
        written = [self._written(message) for message in messages]
        text = self._apply(written, answer=answer, tools=tools or self._tools)
        # Check the rendered text: a template drops unsupported parts without an error.
        for message in written:
            self._require_message(message, text)
        return text

    @cached_property
    def _backend(self) -> Any:
        return load_with_transformers(self._dir) if self._loaded is None else self._loaded

    @property
    def _exists(self) -> bool:
        """False if no file of the model can contain a template."""
        names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        if self._template or any((self._dir / name).exists() for name in names):
            return True
        # Search for a substring: a false positive only costs one import of transformers.
        config = self._dir / "tokenizer_config.json"
        return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id of the first special token that the template writes after an answer, such as
        `<|im_end|>`; None without a template or such a token."""
        if not self._exists:
            return None
        try:
            self._require_template()
            answer = {"role": "assistant", "content": PROBE_ANSWER}
            text = self._apply([PROBE_QUESTION, answer], answer=False, tools=self._tools)
        except Exception:  # noqa: BLE001 - a template may refuse the probe; rows report the reason
            return None
        _, separator, after = text.rpartition(PROBE_ANSWER)
        # Only special tokens end a turn; the template may also write text, such as a line break.
        special = {i for i, one in self._backend.added_tokens_decoder.items() if one.special}
        special |= set(self._backend.all_special_ids)
        # A line break that the vocabulary lacks becomes the unknown token, which ends no turn.
        special -= {self._backend.unk_token_id, self._backend.bos_token_id}
        special |= {self._backend.eos_token_id}
        ids = self._backend.encode(after, add_special_tokens=False) if separator else []
        return next((int(index) for index in ids if index in special), None)

    def _apply(self, messages: ChatMessages, *, answer: bool, tools: Sequence[Any]) -> str:
        return str(
            self._backend.apply_chat_template(
                list(messages),
                chat_template=self._template,
                add_generation_prompt=answer,
                tokenize=False,
                **{**self._options, **({"tools": list(tools)} if tools else {})},
            )
        )

    def _written(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the message with tool calls and absent content in the form that the template
        takes."""
        if not message.get("tool_calls"):
            return message
        calls = tool_calls_of(message)
        content, as_text = self._call_form
        return {
            **message,
            "content": message.get("content") or content,
            "tool_calls": list(map(_as_text, calls)) if as_text else calls,
        }

    @cached_property
    def _call_form(self) -> tuple[str | None, bool]:
        """(content, as_text) of a message with tool calls and no content: the value of `content`,
        and True if the arguments must be JSON text.

        vLLM uses empty text as content; templates that recognise calls by null content need None. A
        template that prints arguments without `tojson` needs text: for an object it would print
        Python's representation, or fail.
        """
        text = json.dumps(PROBE_ARGUMENTS)
        # Empty text comes first: it is preferred if both work, because vLLM renders it.
        for content in ("", None):
            written = self._probed(content, PROBE_ARGUMENTS)
            # Python's representation means that the template printed the object without `tojson`.
            if PROBE_NAME in written and repr(PROBE_ARGUMENTS) not in written:
                return content, False
            # The JSON text must appear unchanged; `tojson` of text would add escapes.
            if text in self._probed(content, text):
                return content, True
        return "", False

    def _probed(self, content: str | None, arguments: Any) -> str:
        """Return a tool call as the template writes it; empty text if the template raises."""
        function = {"name": PROBE_NAME, "arguments": arguments}
        call = {"id": "probe0000", "type": "function", "function": function}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            return self._apply([PROBE_QUESTION, message], answer=False, tools=self._tools)
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            return ""

    @cached_property
    def _left_out(self) -> frozenset[str]:
        """Roles, of `system` and `tool`, whose messages the template leaves out. A template may
        change a text, for example to JSON, but hardly a text of two letters and a digit."""
        function = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
        call = {"id": "probe0000", "type": "function", "function": function}
        called = self._written({"role": "assistant", "content": "", "tool_calls": [call]})
        result = {"role": "tool", "name": PROBE_NAME, "tool_call_id": call["id"]}
        probes: dict[str, list[Mapping[str, Any]]] = {
            "system": [{"role": "system", "content": PROBE_ANSWER}, PROBE_QUESTION],
            "tool": [PROBE_QUESTION, called, {**result, "content": PROBE_ANSWER}],
        }
        found = set()
        for role, messages in probes.items():
            # A template that raises reports the role itself.
            with contextlib.suppress(Exception):
                text = self._apply(messages, answer=True, tools=self._tools)
                if PROBE_ANSWER not in text:
                    found.add(role)
        return frozenset(found)

    def _names(self, role: str) -> bool:
        """Return True if the template contains the role, or if the model has several templates."""
        template = self._template or self._backend.chat_template
        return (
            not isinstance(template, str)
            or re.search(rf"\b{re.escape(role)}\b", template) is not None
        )

    def _require_message(self, message: Mapping[str, Any], text: str) -> None:
        """Raise DataError for a message that the template leaves out because of its role, or whose
        tool calls the template does not write."""
        role, content = message.get("role"), message.get("content")
        absent = not isinstance(content, str) or content.strip() not in text
        # Both: a template may change a text, and it may write a role only with the tools of a row.
        if content and absent and role in self._left_out:
            raise DataError(
                self._dir,
                None,
                f"has a chat template that leaves out messages of the role {role!r}",
                "set data.chat_template to a template that writes them, or move the text into the"
                " user's message",
            )
        if role not in ROLES:
            left_out = isinstance(content, str) and content.strip() not in text
            # A template that writes any role would also write a misspelt one.
            unknown = role not in FURTHER_ROLES and not self._names(str(role))
            if left_out or unknown:
                near = difflib.get_close_matches(str(role), ROLES, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                does = "leaves out messages of" if left_out else "does not name"
                raise DataError(
                    self._dir,
                    None,
                    f"has a chat template that {does} the role {role!r}",
                    f"{hint}use one of the roles {', '.join(ROLES)}, or set data.chat_template to a"
                    " template that names the role",
                )
        for call in message.get("tool_calls") or ():
            if function_name(call) not in text:
                raise DataError(
                    self._dir,
                    None,
                    "has a chat template that does not write `tool_calls`, here of"
                    f" {function_name(call)!r}",
                    "set data.chat_template to a template that does, or write the call as content",
                )

    def _require_template(self) -> None:
        if self._checked:
            return
        template = self._template or self._backend.chat_template
        if not template:
            raise DataError(
                self._dir,
                None,
                "has no chat template, and a prompt is a list of messages",
                "set data.chat_template, add chat_template.jinja to the model directory, or"
                " write the prompt as plain text, without data.as_chat",
            )
        # Check the template once: it does not change, and parsing Jinja is slow.
        self._require_options(template)
        self._checked = True

    def _require_options(self, template: Any) -> None:
        """Raise DataError for an option that the template does not read, and which would therefore
        have no effect."""
        self._reads = read = _variables(template)
        if read is None:
            return
        if self._tools:
            self._require_tools()
        for name in self._options:
            if name not in read:
                near = difflib.get_close_matches(name, sorted(read), n=1)
                fix = f"did you mean {near[0]}? " if near else ""
                raise DataError(
                    self._dir,
                    None,
                    f"has a chat template that does not read {name!r}",
                    f"{fix}remove it from data.chat_template_options; the template reads"
                    f" {', '.join(sorted(read))}",
                )

    def _require_tools(self) -> None:
        if self._reads is not None and "tools" not in self._reads:
            raise DataError(
                self._dir,
                None,
                "has a chat template that does not read `tools`, so the model would see no tools",
                "set data.chat_template to a template that does, or describe the tools in the"
                " prompts as plain text; for tools of the data also set data.tools_key: null",
            )


def _variables(template: Any) -> Collection[str] | None:
    """Return the variables that the template reads. Return None for several templates, and for a
    template with extensions of transformers; rendering then reports faults."""
    if not isinstance(template, str):
        return None
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Use the sandbox of transformers, because a model's template is untrusted code.
    environment = ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateError:
        return None

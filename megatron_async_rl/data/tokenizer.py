"""Text to token ids and back, straight on `tokenizers` (tokenizer.json) or `sentencepiece`
(tokenizer.model).

Invariants:
- ids are those `transformers.AutoTokenizer` gives for the same directory, special tokens around the
  text included;
- importing this file imports neither torch nor transformers; only a chat prompt loads transformers,
  for its template;
- `eos_ids[0]` is the token that ends a supervised response; every id in `eos_ids` ends a sampled
  one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.files import kind

ChatMessages = Sequence[Mapping[str, Any]]


_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Marks of transformers' own around what the assistant says."""
ROLES = ("system", "user", "assistant", "tool")
"""Of messages, as every template has them."""


def content_of(message: Mapping[str, Any]) -> str | None:
    """The text of a chat message, whose content may be a list of texts; null beside `tool_calls`.
    Raises ValueError for what no text model reads, as what the message has."""
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                given = part.get("type") if isinstance(part, Mapping) else kind(part)
                raise ValueError(
                    f"has content[{index}] of type {given}: the model reads text alone"
                )
        return "\n".join(part["text"] for part in content)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    given = "no content" if content is None else f"a {kind(content)} as its content"
    raise ValueError(f"has {given}, and is to have text")


class Tokenizer(Protocol):
    """The part of a tokenizer that the package uses."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int:
        """Ids lie in 0 .. vocab_size - 1."""
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """`special_tokens` puts around the text whatever the model's tokenizer puts there (a BOS,
        for many models)."""
        ...

    def encode_many(
        self, texts: Sequence[str], *, special_tokens: bool = True
    ) -> list[list[int]]: ...

    def render_chat(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        """The messages as the chat template writes them, up to where the model's answer begins, or
        to the end of the last one. `tools`: JSON schemas of functions that the model may call."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered text, which has its special tokens in it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...


def load_tokenizer(
    model_dir: Path,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
) -> Tokenizer:
    """`template`: of chat prompts, null takes the model's; `options`: its variables; `tools`: schemas
    of functions that every chat prompt names. Raises DataError if the directory has no tokenizer,
    or names no end-of-sequence token."""
    model_dir = Path(model_dir)
    chat = ChatTemplate(model_dir, template, options or {}, tools)
    if (model_dir / "tokenizer.json").is_file():
        return JsonTokenizer(model_dir, chat)
    if (model_dir / "tokenizer.model").is_file():
        return SentencePieceTokenizer(model_dir, chat)
    raise DataError(
        model_dir,
        None,
        "holds neither tokenizer.json nor tokenizer.model",
        "point model.path at a Hugging Face model directory with its tokenizer files",
    )


def tokenizer_of(model_dir: Path, data: DataConfig, tools: Sequence[Any] = ()) -> Tokenizer:
    """With the chat template and the options that `data` names, and `tools`."""
    return load_tokenizer(model_dir, data.chat_template, data.chat_template_options, tools)


class ChatTemplate:
    """A template and its options, on transformers' tokenizer of the model, which is loaded with
    the first message."""

    def __init__(
        self,
        model_dir: Path,
        template: str | None,
        options: Mapping[str, Any],
        tools: Sequence[Any] = (),
    ) -> None:
        self._dir = model_dir
        self._tools = list(tools)
        self._template = template
        self._options = options
        self._tokenizer: Any = None
        self._reads: Collection[str] | None = None

    def render(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        """Raises DataError where there is no template, it does not read an option or the tools, or it
        passes over a message for its role."""
        tokenizer = self._loaded()
        if tools:
            self._require_tools()
        if tools and self._tools and list(tools) != self._tools:
            raise DataError(
                self._dir,
                None,
                "is to be told of other tools than those of rollout.environment",
                "remove them from the data, or set data.tools_key: null",
            )
        text = str(
            tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                add_generation_prompt=answer,
                tokenize=False,
                **{
                    **self._options,
                    **({"tools": tools or self._tools} if tools or self._tools else {}),
                },
            )
        )
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in ROLES and isinstance(content, str) and content.strip() not in text:
                near = difflib.get_close_matches(str(role), ROLES, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise DataError(
                    self._dir,
                    None,
                    f"has a chat template that leaves out messages of the role {role!r}",
                    f"{hint}the usual roles are {', '.join(ROLES)}",
                )
        return text

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._loaded().encode(text, add_special_tokens=False)]

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(self._dir))
            template = self._template or tokenizer.chat_template
            if not template:
                raise DataError(
                    self._dir,
                    None,
                    "has no chat template, and a prompt is a list of messages",
                    "set data.chat_template, add chat_template.jinja to the model directory, or"
                    " write the prompt as plain text, without data.as_chat",
                )
            self._require_options(template)
            self._tokenizer = tokenizer
        return self._tokenizer

    def _require_options(self, template: Any) -> None:
        """A template ignores what it does not read, and a user would not know."""
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
                "has a chat template that does not read `tools`, so that the model would know of none",
                "give data.chat_template one that does, or say in the prompts which tools there are,"
                " as plain text (those of the data: data.tools_key: null)",
            )


def _variables(template: Any) -> Collection[str] | None:
    """Those that the template reads; null where it is in a dialect of transformers' own, or is
    several: rendering will say."""
    if not isinstance(template, str):
        return None
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateError:
        return None


class JsonTokenizer:
    """A `tokenizer.json`. Its own post-processor alone decides what stands around a text, as in
    transformers."""

    def __init__(self, model_dir: Path, chat: ChatTemplate) -> None:
        from tokenizers import Tokenizer as Backend

        path = model_dir / "tokenizer.json"
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception for every kind of bad file
            raise DataError(
                path, None, f"is not a tokenizer: {error}", "save it again with transformers"
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat = chat
        self._eos_ids = _eos_ids(model_dir, self._backend.token_to_id)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return self.encode_many([text], special_tokens=special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._backend.encode_batch_fast(
                list(texts), add_special_tokens=special_tokens
            )
        ]

    def render_chat(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        return self._chat.render(messages, answer=answer, tools=tools)

    def encode_rendered(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


class SentencePieceTokenizer:
    """A SentencePiece `tokenizer.model`, BOS and EOS as tokenizer_config.json's `add_bos_token` and
    `add_eos_token` say.

    Special-token texts inside a plain prompt stay plain text.
    """

    def __init__(self, model_dir: Path, chat: ChatTemplate) -> None:
        from sentencepiece import SentencePieceProcessor

        path = model_dir / "tokenizer.model"
        try:
            self._backend = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(
                path,
                None,
                f"is not a SentencePiece model: {error}",
                "save it again with sentencepiece",
            ) from error
        self._chat = chat
        self._frame = _frame(model_dir, self._id)
        self._eos_ids = _eos_ids(model_dir, self._id)

    def _id(self, piece: str) -> int | None:
        index = int(self._backend.piece_to_id(piece))
        return index if self._backend.id_to_piece(index) == piece else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_piece_size())

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return self.encode_many([text], special_tokens=special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        before, after = self._frame if special_tokens else ((), ())
        return [[*before, *ids, *after] for ids in self._backend.encode(list(texts), out_type=int)]

    def render_chat(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        return self._chat.render(messages, answer=answer, tools=tools)

    def encode_rendered(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode([int(i) for i in ids]))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            path, None, f"is not JSON: {error}", "restore the file from the model's source"
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            path, None, "is not a JSON object", "restore the file from the model's source"
        )
    return content


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a special token as text, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _frame(model_dir: Path, token_id: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after a text; none where tokenizer_config.json is silent."""
    config = _read_json(model_dir / "tokenizer_config.json")
    frame = []
    for switch, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        text = _token_text(config.get(name)) if config.get(switch) else None
        index = None if text is None else token_id(text)
        frame.append(() if index is None else (int(index),))
    return frame[0], frame[1]


def _eos_ids(model_dir: Path, token_id: Any) -> tuple[int, ...]:
    """Every id that ends a sequence. The tokenizer's own eos comes first: for chat models it is the
    one that ends a turn."""
    found: list[int] = []
    named = _token_text(_read_json(model_dir / "tokenizer_config.json").get("eos_token"))
    own = None if named is None else token_id(named)
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(model_dir / name).get("eos_token_id")
        if listed is not None:
            found = [int(i) for i in (listed if isinstance(listed, list) else [listed])]
            break
    if own is not None:
        found.insert(0, int(own))
    if not found:
        raise DataError(
            model_dir,
            None,
            "names no end-of-sequence token",
            "set eos_token_id in generation_config.json or config.json, or eos_token in"
            " tokenizer_config.json",
        )
    return tuple(dict.fromkeys(found))

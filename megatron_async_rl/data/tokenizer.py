"""Conversion of text to token ids, and back.

Invariants:
- ids and text are equal to those of `transformers.AutoTokenizer` for the same directory, which may
  rebuild the tokenizer for a model's class, add tokens of other files, change flags of tokens and
  clean up decoded text. Because an import of transformers takes seconds, tokenizer.json is read
  without it if every setting of the directory is in PLAIN_SETTINGS and the other short lists below;
- every id that `encode*` returns has a row in the model. A tokenizer may have more entries than the
  model (Gemma 3's image token, an added pad token); text with such a token is refused;
- `decode` accepts every id that the model can sample, also rows without a token;
- the import of this file loads neither torch nor transformers. Chat templates, and tokenizers with
  more than a plain tokenizer.json, load transformers;
- `eos_ids[0]` is the tokenizer's own end-of-sequence token. Every id in `eos_ids` ends a sampled
  response, including the chat template's end of a turn.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.chat_template import (
    ChatMessages,
    ChatTemplate,
    load_with_transformers,
)
from megatron_async_rl.data.files import a_kind, kind

FILES = ("tokenizer.json", "tokenizer.model")


def content_of(message: Mapping[str, Any]) -> str | None:
    """Return the text of a chat message, whose content may be a list of texts; None for a message
    with `tool_calls` and without content. Raises ValueError for content that a text model cannot
    read; the text of the error continues "a message of the user ..."."""
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, Mapping):
                form = 'it must be an object {"type": "text", "text": ...}'
                raise ValueError(f"has content[{index}] of type {kind(part)}: {form}")
            if not isinstance(part.get("text"), str):
                given = part.get("type")
                raise ValueError(
                    f"has no text in content[{index}]"
                    if given in (None, "text")
                    else f"has content[{index}] of type {given}: the model reads only text"
                )
        # vLLM joins the parts of a message with line breaks, and training must see the same text.
        return "\n".join(part["text"] for part in content)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    given = "no content" if content is None else f"{a_kind(content)} as its content"
    raise ValueError(f"has {given}, which must be text")


class Tokenizer(Protocol):
    """Interface of a tokenizer that the package uses."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int:
        """Number of ids: 0 .. vocab_size - 1."""
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. With `special_tokens`, they include the tokens that the model's
        tokenizer adds to a text, such as a BOS."""
        ...

    def encode_many(
        self, texts: Sequence[str], *, special_tokens: bool = True
    ) -> list[list[int]]: ...

    def render_chat(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        """Return the messages as the chat template writes them. With `answer`, the beginning of the
        model's answer follows. `tools`: JSON schemas of the functions that the model may call."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered text, which already contains its special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special tokens and without ids that have no token."""
        ...


def load_tokenizer(
    model_dir: Path,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
) -> Tokenizer:
    """Return the tokenizer of a model directory.

    `template`: chat template; None uses the model's. `options`: variables of the template. `tools`:
    JSON schemas of the functions in every chat prompt. Raises DataError if the directory has no
    tokenizer or no end-of-sequence token, or if the model has no row for this token.
    """
    model_dir = Path(model_dir)
    if not any((model_dir / name).is_file() for name in FILES):
        raise DataError(
            model_dir,
            None,
            "contains neither tokenizer.json nor tokenizer.model",
            "set model.path to a Hugging Face model directory with its tokenizer files",
        )
    backend, loaded = _load_backend(model_dir)
    chat = ChatTemplate(model_dir, template, options or {}, tools, loaded)
    return ModelTokenizer(model_dir, backend, chat)


def tokenizer_of(model_dir: Path, data: DataConfig, tools: Sequence[Any] = ()) -> Tokenizer:
    """Return the model's tokenizer with the chat template and options of `data`, and `tools`."""
    return load_tokenizer(model_dir, data.chat_template, data.chat_template_options, tools)


def unwritten_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the special token of `text` that decoded text never shows; None if there is
    none, or if this token ends every response."""
    text = text.strip()  # a tokenizer may remove spaces at the ends
    try:
        ids = tokenizer.encode(text, special_tokens=False)
    except Exception:  # noqa: BLE001 - the vocabulary does not cover the text
        return None
    if text in tokenizer.decode(ids):
        return None
    special = next((one for one in ids if not tokenizer.decode([one])), None)
    return None if special in tokenizer.eos_ids else special


def encode_rows(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    place_of: Callable[[int], tuple[Path | str, int | None]],
    *,
    special_tokens: bool = True,
) -> list[list[int]]:
    """Return the ids of each text. `place_of`: index of a text -> its file and place. Raises
    DataError with the place of the first text that cannot be tokenized."""
    try:
        return tokenizer.encode_many(texts, special_tokens=special_tokens)
    except Exception:  # tokenizers raise bare Exception, which does not name the faulty text
        # Tokenize one text at a time to find the faulty text. This is slow, but only after a
        # failure.
        for index, text in enumerate(texts):
            try:
                tokenizer.encode(text, special_tokens=special_tokens)
            except Exception as error:
                fix = "use only text that the model's vocabulary covers"
                what = str(error)
                if isinstance(error, DataError):
                    what, fix = f"{error.path} {error.what}", error.fix
                raise DataError(*place_of(index), f"cannot be tokenized: {what}", fix) from error
        raise


class ModelTokenizer:
    """Tokenizer of a model directory."""

    def __init__(self, model_dir: Path, backend: TokenizerBackend, chat: ChatTemplate) -> None:
        self._dir = model_dir
        self._backend = backend
        self._chat = chat
        vocabulary = backend.vocabulary()
        # Ids may have gaps, so the size may exceed the number of entries.
        self._size = max(vocabulary.values()) + 1
        # The model may have more rows, as padding of its embedding, or fewer.
        self._rows = _model_rows(model_dir) or self._size
        self._own_eos_ids = _eos_ids(model_dir, vocabulary)
        for index in self._own_eos_ids:
            if index >= self._rows:
                raise DataError(
                    model_dir,
                    None,
                    f"ends sequences with token {index}, and the model has {self._rows} rows",
                    "correct eos_token in tokenizer_config.json or eos_token_id in"
                    " generation_config.json, or use the tokenizer of this model",
                )

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        # Computed on first use, because it may load transformers, which plain text does not need.
        turn = self._chat.end_of_turn
        # The model cannot sample a token without a row.
        more = () if turn is None or turn >= self._rows else (turn,)
        return tuple(dict.fromkeys((*self._own_eos_ids, *more)))

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return self.encode_many([text], special_tokens=special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        encoded = self._backend.encode(texts, special_tokens=special_tokens)
        # Skip the check for a model with a row for each token, which is the common case.
        if self._size > self._rows:
            for ids in encoded:
                self._require_rows(ids)
        return encoded

    def _require_rows(self, ids: Sequence[int]) -> None:
        """Raise DataError for an id without a row, on which policy and engines would fail."""
        for index in ids:
            if index >= self._rows:
                text = self._backend.token(index)
                raise DataError(
                    self._dir,
                    None,
                    f"has no row for token {index} ({text!r}): its vocab_size is {self._rows}",
                    f"remove {text!r} from the text, or use the tokenizer of this model",
                )

    def render_chat(self, messages: ChatMessages, *, answer: bool, tools: Any = None) -> str:
        return self._chat.render(messages, answer=answer, tools=tools)

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        # An untrained model also samples the padding rows of its vocabulary.
        known = [int(index) for index in ids if 0 <= index < self._size]
        return self._backend.decode(known)


def _load_backend(model_dir: Path) -> tuple[TokenizerBackend, Any]:
    """Return (backend, transformers' tokenizer) of a directory; the latter is None if
    transformers is not loaded."""
    from tokenizers import Tokenizer as Backend

    # Require an end-of-sequence token here: defaults of tokenizer classes would add a token that
    # the model has never seen.
    if _eos_text(model_dir) is None and not _eos_listed(model_dir):
        raise _damaged_file(model_dir) or _no_eos(model_dir)
    path = model_dir / FILES[0]
    if path.is_file():
        try:
            plain = Backend.from_file(str(path))
        except Exception as error:
            raise _damaged_file(model_dir) or error from error
        config = _read_json(model_dir / "tokenizer_config.json")
        model_type = _read_json(model_dir / "config.json").get("model_type")
        # The ids must equal those of transformers, so a single unknown setting excludes this path.
        if is_plain(model_dir, plain, config, model_type):
            return FileBackend(plain), None
    try:
        loaded = load_with_transformers(model_dir)
    except DataError as error:
        raise _damaged_file(model_dir) or error from error
    # A tokenizer in pure Python cannot encode batches.
    if not loaded.is_fast:
        raise DataError(
            model_dir,
            None,
            f"has a tokenizer in pure Python, {type(loaded).__name__}",
            "add its tokenizer.json, which transformers' save_pretrained writes",
        )
    return TransformersBackend(loaded), loaded


def _damaged_file(model_dir: Path) -> DataError | None:
    """Return the error for a tokenizer file that its own library cannot read; None if it can."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as Backend

    fast, pieces = (model_dir / name for name in FILES)
    try:
        if fast.is_file():
            Backend.from_file(str(fast))
        else:
            SentencePieceProcessor(model_file=str(pieces))
    except Exception as error:  # noqa: BLE001 - the Rust code raises bare Exception for bad files
        path, what, library = (
            (fast, "tokenizer", "transformers")
            if fast.is_file()
            else (pieces, "SentencePiece model", "sentencepiece")
        )
        return DataError(path, None, f"is not a {what}: {error}", f"save it again with {library}")
    return None


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


def _model_rows(model_dir: Path) -> int | None:
    """Return the number of rows of the model's embedding; None if config.json does not state it."""
    config = _read_json(model_dir / "config.json")
    # Multimodal models nest the language model's settings.
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def _token_text(value: Any) -> str | None:
    """Return the text of a token, which is text or an object with `content`; None for other
    values."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_text(model_dir: Path) -> str | None:
    """Return the text of the tokenizer's own end-of-sequence token; None if it has none."""
    files = ("tokenizer_config.json", "special_tokens_map.json")
    named = (_token_text(_read_json(model_dir / name).get("eos_token")) for name in files)
    return next((text for text in named if text is not None), None)


def _eos_listed(model_dir: Path) -> list[int]:
    # generation_config.json comes first, because vLLM stops at its tokens.
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(model_dir / name).get("eos_token_id")
        if listed is not None:
            return [int(i) for i in (listed if isinstance(listed, list) else [listed])]
    return []


def _eos_ids(model_dir: Path, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return every id that ends a sequence. The tokenizer's own token comes first, because most
    chat models end a turn with it. Raises DataError if there is no such id."""
    # `eos_ids[0]` ends given responses, so the tokenizer's own token must stay first.
    own = _eos_text(model_dir)
    named = [vocabulary[own]] if own is not None and own in vocabulary else []
    ids = tuple(dict.fromkeys((*named, *_eos_listed(model_dir))))
    if not ids:
        raise _no_eos(model_dir)
    return ids


def _no_eos(model_dir: Path) -> DataError:
    return DataError(
        model_dir,
        None,
        "has no end-of-sequence token",
        "set eos_token_id in generation_config.json or config.json, or eos_token in"
        " tokenizer_config.json",
    )


PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of `tokenizer_class` for which transformers reads tokenizer.json unchanged."""
PLAIN_FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3_text")
"""Values of `model_type` for which transformers uses `tokenizer_class`. For qwen2, for example, it
uses its own class."""
PLAIN_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PLAIN_SETTINGS = {
    *("tokenizer_class", "chat_template", "model_max_length", "padding_side", "truncation_side"),
    *PLAIN_TOKENS,
}
"""Keys of tokenizer_config.json that do not change ids or text. `is_plain` checks the tokens."""
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model", "tekken.json")
"""Files next to tokenizer.json from which transformers may add tokens."""
PATCHED_SIZE = 100_000
"""Vocabulary size above which transformers may replace Mistral's regular expression."""


class TokenizerBackend(ABC):
    """Interface of a tokenizer library, without the rules of this package. `tokenizer`: an object
    of the library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token, added tokens included."""

    @abstractmethod
    def token(self, index: int) -> str | None: ...

    @abstractmethod
    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of known ids without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class FileBackend(TokenizerBackend):
    """Backend for a tokenizer.json that transformers would read unchanged. It uses the library
    `tokenizers`."""

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def token(self, index: int) -> str | None:
        text: str | None = self._tokenizer.id_to_token(index)
        return text

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encoded]


class TransformersBackend(TokenizerBackend):
    """Backend that uses transformers' tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        # `encode` neither truncates nor pads, whatever the file states. Without these settings it
        # changes no state, so several threads may encode.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        super().__init__(tokenizer)
        own = type(tokenizer)._encode_plus
        # A class with its own rules, such as Code Llama's infilling, applies them only to a single
        # text, so do not encode its texts in batches.
        self._in_batches = own is PreTrainedTokenizerFast._encode_plus

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def token(self, index: int) -> str | None:
        text: str | None = self._tokenizer.convert_ids_to_tokens(index)
        return text

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        if not self._in_batches:
            return [
                self._tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False)
                for text in texts
            ]
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def is_plain(
    model_dir: Path, tokenizer: Any, config: Mapping[str, Any], model_type: object
) -> bool:
    """Return True if transformers would read the tokenizer.json of a directory unchanged.

    `tokenizer`: object of the library `tokenizers`, read from this file. `config`: content of
    tokenizer_config.json. `model_type`: value in config.json.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {one.content for one in added if one.special}
    named = [config[name] for name in PLAIN_TOKENS if config.get(name) is not None]
    return (
        # Each condition excludes one way in which transformers changes ids or text.
        model_type in PLAIN_FAMILIES
        and config.get("tokenizer_class") in PLAIN_CLASSES
        and config.keys() <= PLAIN_SETTINGS
        and not any((model_dir / name).exists() for name in OTHER_FILES)
        # transformers sets its own flags for named tokens.
        and not any(one.lstrip or one.rstrip or one.single_word or one.normalized for one in added)
        and all(isinstance(one, str) and one in special for one in named)
        and tokenizer.truncation is None
        and tokenizer.padding is None
        and tokenizer.get_vocab_size() <= PATCHED_SIZE
    )

"""Backends of a tokenizer: transformers' `AutoTokenizer`, and tokenizer.json alone where it is the
same.

Invariants:
- `AutoTokenizer` defines ids and text: it may rebuild the tokenizer for a model's class, add tokens
  of other files, change flags of tokens and clean up decoded text;
- tokenizer.json is read without it only in a directory whose every setting is in the short lists
  below, which transformers takes unchanged. Anything else in the directory needs no judgement here:
  transformers reads it. Importing transformers takes seconds, and the built-in examples need none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of `tokenizer_class` for which transformers reads tokenizer.json as it is."""
PLAIN_FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3_text")
"""Values of `model_type` with which it heeds PLAIN_CLASSES; for qwen2, it takes its own class."""
PLAIN_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PLAIN_SETTINGS = {
    *("tokenizer_class", "chat_template", "model_max_length", "padding_side", "truncation_side"),
    *PLAIN_TOKENS,
}
"""Keys of tokenizer_config.json that change no id and no text, once the named tokens are
checked."""
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model", "tekken.json")
"""Files next to tokenizer.json from which transformers may take tokens."""
PATCHED_SIZE = 100_000
"""Entries above which transformers may replace Mistral's regular expression."""


class TokenizerBackend(Protocol):
    """Ids and text, without the rules of this package."""

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token, added tokens included."""
        ...

    def token(self, index: int) -> str | None: ...

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of known ids without special tokens."""
        ...


class FileBackend:
    """A tokenizer.json that transformers would read as it is.

    tokenizer: of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def vocabulary(self) -> Mapping[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def token(self, index: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(index)
        return found

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class TransformersBackend:
    """transformers' tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        # Truncation and padding of the file do not hold for `encode`; without them it changes no
        # state, so that several threads may encode.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._tokenizer = tokenizer
        own = type(tokenizer)._encode_plus
        # A class with rules of its own, such as Code Llama's infilling, applies them to a single
        # text.
        self._in_batches = own is PreTrainedTokenizerFast._encode_plus

    def vocabulary(self) -> Mapping[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def token(self, index: int) -> str | None:
        found: str | None = self._tokenizer.convert_ids_to_tokens(index)
        return found

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
        found: list[list[int]] = encoded["input_ids"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def is_plain(
    model_dir: Path, tokenizer: Any, config: Mapping[str, Any], model_type: object
) -> bool:
    """Return whether transformers would read the tokenizer.json of a directory as it is.

    tokenizer: of the library `tokenizers`, read from that file. config: tokenizer_config.json.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {one.content for one in added if one.special}
    named = [config[name] for name in PLAIN_TOKENS if config.get(name) is not None]
    return (
        model_type in PLAIN_FAMILIES
        and config.get("tokenizer_class") in PLAIN_CLASSES
        and config.keys() <= PLAIN_SETTINGS
        and not any((model_dir / name).exists() for name in OTHER_FILES)
        # transformers gives named tokens flags of its own.
        and not any(one.lstrip or one.rstrip or one.single_word or one.normalized for one in added)
        and all(isinstance(one, str) and one in special for one in named)
        and tokenizer.truncation is None
        and tokenizer.padding is None
        and tokenizer.get_vocab_size() <= PATCHED_SIZE
    )

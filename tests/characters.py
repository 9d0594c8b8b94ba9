"""A tokenizer on disk with one token per character, whose id is the character's number; `<end>` is
token 1 and ends a turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_async_rl.data.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template without tools: the arguments of tool calls appear in no message."""


def save_characters(directory: Path, special: Sequence[str] = ()) -> Path:
    """Write the tokenizer. `special`: more tokens like `<end>`, from number 2 on."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = {chr(code): code for code in (10, *range(32, 127))}
    plain = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    named = {text: number for number, text in enumerate(("<end>", *special), 1)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True, **plain}
            for text, number in named.items()
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": named | letters, "unk_token": "?"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def characters(directory: Path, template: str = TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    return load_tokenizer(save_characters(directory, special), template)


def read(ids: object) -> str:
    """Return the text of the ids, with `<end>` as \\x01."""
    return "".join(map(chr, ids))  # type: ignore[arg-type, call-overload]

"""Models that think before they answer, which need longer responses than others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_async_rl.data.hub import name_of, parse

MARKS = ("<think>", "[THINK]", "enable_thinking")
"""Parts of the chat templates of such models."""
NAMES = re.compile(
    r"thinking|reason|\bqwq\b|\br1\b|magistral|qwen3-[\d.]+b(-a\d+b)?\b", re.IGNORECASE
)
NOT_THINKING = re.compile(r"\b(base|instruct)\b", re.IGNORECASE)
"""Qwen3's base models have the template of the others."""


def thinks(model: Path) -> bool:
    """True for a model whose chat template opens or closes a thought, and that is not a base model;
    where its template is not here, for a model with such a name."""
    name = _name(model)
    if NOT_THINKING.search(name):
        return False
    template = _template(model)
    if template is not None:
        return any(mark in template for mark in MARKS)
    return NAMES.search(name) is not None


def _name(model: Path) -> str:
    """The last part of its name: of the hub where it is from there."""
    on_hub = parse(model) or parse(Path(name_of(model) or model))
    return on_hub.id.rpartition("/")[2] if on_hub is not None else model.name


def _template(model: Path) -> str | None:
    """The text of its chat templates; null where it has none."""
    file = model / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = settings.get("chat_template") if isinstance(settings, dict) else None
    # Several templates are a list of {name, template}.
    return None if found is None else json.dumps(found, ensure_ascii=False)

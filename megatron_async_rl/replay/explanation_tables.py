"""Output of `mar replay --explain`: tables for the terminal, and decoded text in explanation.json.

The trainer writes token ids; only this process needs the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.durable import reading, write_file
from megatron_async_rl.config.problem import DataError, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.metrics.replay_record import EXPLANATION_FILE
from megatron_async_rl.report.samples import visible

SHOWN = 10
"""Number of rows of each printed table; the file has more."""
PROMPT_CHARACTERS = 40
CONTEXT_TOKENS = 6
"""Number of response tokens before a token that its table shows."""

TokensToText = Callable[[Sequence[int]], str]


def show_explanation(config: Config, console: Console) -> None:
    """Print the explanation that the trainer of `config` wrote, and add decoded text to its
    file."""
    path = config.run.dir / EXPLANATION_FILE
    try:
        with reading(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        assert config.run.replay is not None
        step = config.run.replay.last
        _print(
            console, f"step {step} has no gradient to explain: its batch has nothing to learn from"
        )
        return
    decode = _decoder(config.model.path)
    if decode is None:
        _print(console, "note: the model has no readable tokenizer, so tokens are shown as ids")
    else:
        for update in content["updates"]:
            _add_text(update, decode)
        write_file(path, json.dumps(content, indent=1, ensure_ascii=False))
    for number, update in enumerate(content["updates"], 1):
        several = f", optimizer step {number}" if len(content["updates"]) > 1 else ""
        _print(console, f"gradient of step {content['step']}{several}, before the controls:")
        _show_update(update, console)
    _print(console, f"all samples and more tokens: {path}")


def _decoder(model: Path) -> TokensToText | None:
    try:
        return load_tokenizer(model).decode
    except (DataError, UserError):
        return None


def _add_text(update: dict[str, Any], decode: TokensToText) -> None:
    for ids in update["texts"].values():
        ids["prompt"], ids["response"] = decode(ids["prompt_ids"]), decode(ids["response_ids"])
    for token in update["tokens"]:
        token["text"] = decode([token["token_id"]])
        ids = update["texts"][token["sample"]]["response_ids"]
        begin = max(0, token["position"] - CONTEXT_TOKENS)
        token["before"] = decode(ids[begin : token["position"]])


def _show_update(update: Mapping[str, Any], console: Console) -> None:
    parameters = ", ".join(
        f"{one['name']} {_percent(one['share'])}" for one in update["parameters"][:3]
    )
    _print(console, f"norm {_number(update['norm'])}; largest shares of its square: {parameters}")
    rest = update["sum_of_shares"]
    if isinstance(rest, float) and abs(rest - 1.0) > 0.01 and update["norm"]:
        _print(console, f"the shares of all samples add up to {_percent(rest)}")
    texts = update["texts"]
    groups = _table("group", "samples", "reward", "norm", "share of norms", "share of gradient")
    for one in update["groups"][:SHOWN]:
        groups.add_row(
            *map(str, (one["group"], one["samples"])), _number(one["reward"]), *_shares(one)
        )
    samples = _table("sample", "reward", "lag", "norm", "share of norms", "share of gradient")
    samples.add_column("prompt → response")
    for one in update["samples"][:SHOWN]:
        facts = (one["id"], _number(one["reward"]), str(one["lag_max"]))
        samples.add_row(*map(Text, facts), *_shares(one), _text_of(texts.get(one["id"])))
    tokens = _table("token", "position", "sample", "size", "dL/dlogp", "advantage", "log-ratio")
    tokens.add_column("after: prompt → response")
    for one in update["tokens"][:SHOWN]:
        tokens.add_row(
            # Special tokens decode to nothing.
            Text(_line(one.get("text", "")) or f"id {one['token_id']}"),
            str(one["position"]),
            Text(one["sample"]),
            *(_number(one[name]) for name in ("size", "derivative", "advantage", "log_ratio")),
            _context(texts[one["sample"]], _line(one.get("before", ""))),
        )
    for title, table in (("groups", groups), ("samples", samples), ("tokens", tokens)):
        if table.row_count:
            _print(console, title)
            console.print(table)


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _shares(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return _number(one["norm"]), _percent(one["norm_share"]), _percent(one["share"])


def _text_of(ids: Mapping[str, Any] | None) -> Text:
    if ids is None or "prompt" not in ids:
        return Text("")
    return _context(ids, _line(ids["response"])[:PROMPT_CHARACTERS])


def _context(ids: Mapping[str, Any], response: str) -> Text:
    if "prompt" not in ids:
        return Text("")
    prompt = _line(ids["prompt"])
    # The end of a prompt is the question; its beginning is often a system message.
    short = prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}"
    return Text(f"{short} → {response}")


def _line(text: str) -> str:
    return visible(text).replace("\n", "⏎").replace("\t", "→|")


def _percent(value: float | str) -> str:
    # Numbers that are not finite are text.
    return value if isinstance(value, str) else f"{value:.1%}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

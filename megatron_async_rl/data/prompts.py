"""JSONL lines to Prompts, and the order in which they are asked.

Invariants of `PromptSource`:
- every prompt is handed out exactly once per epoch;
- the order of an epoch depends on (seed, epoch) alone, so a saved position continues with the very
  same sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.samples.types import Prompt


def read_prompts(
    path: Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int | None = None,
    limit: int | None = None,
    required: tuple[str, ...] = ("prompt",),
) -> list[Prompt]:
    """Each non-blank line is an object with `prompt` (text, or a list of chat messages) and,
    optionally, a unique `id`.

    `required`: keys every line must have; keys other than `prompt` and `id` become `Prompt.fields`.
    `limit`: at most this many prompts, from the start. Raises DataError naming file, line, fault
    and fix.
    """
    path = Path(path)
    rows = list(_rows(path, limit, required))
    if not rows:
        raise DataError(
            path,
            None,
            "holds no prompts",
            'write one JSON object per line, such as {"prompt": "1+1="}',
        )
    plain = [row["prompt"] for _, row in rows if isinstance(row["prompt"], str)]
    try:
        encoded = iter(tokenizer.encode_many(plain))
    except Exception as error:  # tokenizers raise bare Exception where a character is not in a vocabulary without <unk>
        raise DataError(
            path,
            None,
            f"cannot be tokenized: {error}",
            "use only text the model's vocabulary covers",
        ) from error
    prompts: list[Prompt] = []
    lines_by_id: dict[str, int] = {}
    for line, row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            text, ids = prompt, next(encoded)
        else:
            text, ids = _chat(path, line, prompt, tokenizer)
        if not ids:
            raise DataError(
                path,
                line,
                "`prompt` has no tokens",
                "write a prompt the model's tokenizer can encode",
            )
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            raise DataError(
                path,
                line,
                f"`prompt` has {len(ids)} tokens, the limit is {max_prompt_tokens}",
                "shorten the prompt, or leave it more room: raise rollout.max_context or lower"
                " rollout.sampling.max_tokens",
            )
        prompt_id = str(row.get("id", f"{path.name}:{line}"))
        if not _is_text(prompt_id):
            raise DataError(
                path, line, f"`id` {prompt_id!r} is no valid Unicode", "use other characters"
            )
        if prompt_id in lines_by_id:
            raise DataError(
                path,
                line,
                f"`id` {prompt_id!r} is also that of line {lines_by_id[prompt_id]}",
                "make ids unique",
            )
        lines_by_id[prompt_id] = line
        fields = {key: value for key, value in row.items() if key not in ("prompt", "id")}
        prompts.append(Prompt(id=prompt_id, text=text, token_ids=tuple(ids), fields=fields))
    return prompts


def _is_text(value: str) -> bool:
    """False with half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rows(
    path: Path, limit: int | None, required: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            path, None, f"cannot be read: {reason}", "check data.train and data.eval"
        ) from error
    count = 0
    for line, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        if count == limit:
            return
        count += 1
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            what = f"is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1}"
            raise DataError(path, line, what, "save the file as UTF-8") from error
        try:
            row = json.loads(text)
        except ValueError as error:
            raise DataError(
                path, line, f"is not JSON: {error}", "write one complete JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                path, line, f"is a JSON {_kind(row)}, not an object", 'write {"prompt": "...", ...}'
            )
        for key in dict.fromkeys(("prompt", *required)):
            if key not in row:
                raise DataError(
                    path,
                    line,
                    f"has no `{key}` (its keys: {', '.join(row) or 'none'})",
                    f"add `{key}` to this line",
                )
        if not isinstance(row["prompt"], (str, list)):
            what = f"`prompt` is a {_kind(row['prompt'])}"
            raise DataError(path, line, what, "make it text, or a list of chat messages")
        if not row["prompt"] or (isinstance(row["prompt"], str) and not row["prompt"].strip()):
            raise DataError(
                path, line, "`prompt` is empty", "write the question, or remove the line"
            )
        if "id" in row and not isinstance(row["id"], (str, int)):
            raise DataError(
                path, line, f"`id` is a {_kind(row['id'])}", "make it text or a whole number"
            )
        yield line, row


def _chat(
    path: Path, line: int, messages: list[Any], tokenizer: Tokenizer
) -> tuple[str, list[int]]:
    for message in messages:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and "content" in message
        ):
            what = (
                "a chat message must be an object with `role` and `content`, got"
                f" {json.dumps(message)[:80]}"
            )
            raise DataError(path, line, what, 'write [{"role": "user", "content": "..."}]')
    try:
        return tokenizer.encode_chat(messages)
    except DataError as error:
        raise DataError(
            path, line, f"cannot be rendered: {error.path} {error.what}", error.fix
        ) from error
    except Exception as error:  # a template is a program: it may raise anything
        raise DataError(
            path,
            line,
            f"the model's chat template refuses it: {error}",
            "follow the template's rules",
        ) from error


def _kind(value: Any) -> str:
    names = {
        dict: "object",
        list: "list",
        str: "text",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


class Order:
    """Positions of `count` items, one permutation per epoch (or file order without `shuffle`)."""

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute()

    def _permute(self) -> Sequence[int]:
        if not self._shuffle:
            return range(self._count)
        permutation: list[int] = (
            np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()
        )
        return permutation

    def next(self) -> int:
        if self._position == self._count:
            self._epoch += 1
            self._position = 0
            self._permutation = self._permute()
        item = self._permutation[self._position]
        self._position += 1
        return item

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the saved position belongs to another order: it would repeat or
        lose items."""
        for key, mine in (("count", self._count), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise ValueError(
                    f"the saved data position was made with {key}={state[key]}, this run has"
                    f" {key}={mine}: resume with the same data file, run.seed and data.shuffle, or"
                    " start in a new run.dir"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._permutation = self._permute()


class PromptSource:
    """Endless prompts with a position that can be saved and restored."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = tuple(prompts)
        self._order = Order(len(self._prompts), seed=seed, shuffle=shuffle)

    def next(self) -> Prompt:
        return self._prompts[self._order.next()]

    def state(self) -> dict[str, Any]:
        """Plain JSON: what `load_state` needs to continue with the next unasked prompt."""
        return self._order.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._order.load_state(state)

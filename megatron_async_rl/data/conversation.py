"""Given conversations as tokens with a mask: which of them the assistant wrote.

Invariants:
- a message's tokens are those between the renderings of the messages before it, up to where an
  answer begins, and of the messages up to it; both must be prefixes of the whole, token by token,
  so that what is learned from is what an engine would have read and written;
- of each trained message the mask ends with the token that ends it, so that stopping is learned
  and nothing behind it is;
- nothing follows the last trained message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.chat_template import PROBE_ANSWER
from megatron_async_rl.data.messages import TRAINED_KEYS, is_trained
from megatron_async_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingConversation:
    """`prompt`: text and tokens before the first trained message. `ids` int32 and `mask` uint8,
    [T]: all that follows, 1 where it is trained on; `text`: as it was rendered."""

    prompt: str
    prompt_ids: tuple[int, ...]
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    text: str


def conversation(
    file: Path,
    place: int,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> TrainingConversation:
    """`tools`: schemas of functions that the assistant may call. Raises DataError, naming the
    message, for a message that cannot be separated from the others."""
    trained = _trained(file, place, messages)
    plain = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in messages]
    last = trained[-1]
    render = partial(tokenizer.render_chat, tools=tools)
    whole = render(plain[: last + 1], answer=False)
    tokens = tokenizer.encode_rendered(whole)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    ends = set(tokenizer.eos_ids)
    starts: list[str] = []
    first = 0
    for index in trained:
        before = render(plain[:index], answer=True)
        limit = whole if index == last else render(plain[: index + 1], answer=False)
        if limit == before:
            what = f"messages[{index}] is empty, and the chat template writes nothing for it"
            raise DataError(file, place, what, "write the assistant's content, or remove the row")
        begin, end = tokenizer.encode_rendered(before), tokenizer.encode_rendered(limit)
        if not starts:
            first = len(begin)
        starts.append(before)
        if tokens[: len(begin)] != begin or tokens[: len(end)] != end or len(begin) >= len(end):
            raise DataError(
                file,
                place,
                f"the chat template writes what is before or in messages[{index}] in another way"
                " when more follows, so that its tokens cannot be separated from the others",
                "train on the last message alone (`train: false` in the others), or give"
                " data.chat_template a template that writes a message in one way",
            )
        stop = len(end)
        while stop > len(begin) and tokens[stop - 1] not in ends:
            stop -= 1
        mask[len(begin) : stop if stop > len(begin) else len(end)] = 1
    length = int(np.flatnonzero(mask)[-1]) + 1
    ids = tokens[first:length]
    marks = mask[first:length].tolist()
    if ids[-1] not in ends:
        ids, marks = [*ids, tokenizer.eos_ids[0]], [*marks, 1]
    return TrainingConversation(
        prompt=starts[0],
        prompt_ids=tuple(tokens[:first]),
        ids=np.asarray(ids, dtype=np.int32),
        mask=np.asarray(marks, dtype=np.uint8),
        text=whole[len(starts[0]) :],
    )


def answered(
    file: Path,
    place: int,
    messages: Sequence[Mapping[str, Any]],
    response: str,
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> TrainingConversation:
    """Return a response to chat messages; all of its tokens are trained on.

    The response is the text as it is given, and ends as the chat template ends a turn: with the
    template's own token, or with the tokenizer's end of sequence where the template writes none.
    Raises DataError where the template leaves out answers.
    """
    prompt = tokenizer.render_chat(messages, answer=True, tools=tools)
    probe = [*messages, {"role": "assistant", "content": PROBE_ANSWER}]
    whole = tokenizer.render_chat(probe, answer=False, tools=tools)
    before, found, after = whole.rpartition(PROBE_ANSWER)
    if not found:
        what = "the chat template leaves out the assistant's messages"
        raise DataError(file, place, what, "give data.chat_template a template that writes them")
    # Llama 2's template writes a space before an answer; thoughts that a template adds do not
    # belong to the given response.
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    lead = lead if lead.isspace() else ""
    ends = set(tokenizer.eos_ids)
    tail = tokenizer.encode_rendered(after)
    length = next((index for index, one in enumerate(tail) if one in ends), -1) + 1

    prompt_ids = tokenizer.encode_rendered(prompt)
    ids = tokenizer.encode_rendered(prompt + lead + response + after)
    if ids[: len(prompt_ids)] == prompt_ids and (not tail or ids[-len(tail) :] == tail):
        ids = ids[len(prompt_ids) : len(ids) - len(tail)]
    else:
        ids = tokenizer.encode_rendered(lead + response)
    end = tail[:length] if length else [tokenizer.eos_ids[0]]
    tokens = np.asarray([*ids, *end], dtype=np.int32)
    return TrainingConversation(
        prompt=prompt,
        prompt_ids=tuple(prompt_ids),
        ids=tokens,
        mask=np.ones(len(tokens), dtype=np.uint8),
        text=response,
    )


def response_text(file: Path | str, place: int | None, value: Any) -> str:
    """Return the text of a given response, which may be a whole number, such as Parquet keeps an
    answer as: rewards take these two alike. Raises DataError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value
    fix = "give every row a `response` text for `loss: sft`, or name its column: data.answer_key"
    raise DataError(file, place, f"`response` is {value!r:.80}", fix)


def loss_weight(file: Path | str, place: int | None, fields: Mapping[str, Any]) -> float:
    """Return the weight of a row with a given response. Raises DataError."""
    weight = fields.get("weight", 1.0)
    if isinstance(weight, str):  # cells of CSV are text
        with contextlib.suppress(ValueError):
            weight = float(weight)
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 0 <= weight < float("inf"):
        fix = "make it a finite number >= 0, or leave it out"
        raise DataError(file, place, f"`weight` is {weight!r}", fix)
    return float(weight)


def _trained(file: Path, place: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Messages that the loss is on."""
    found = []
    for index, message in enumerate(messages):
        try:
            train = is_trained(message)
        except ValueError as error:
            fix = (
                "train on messages of the assistant; `train` is true or false, `weight` and"
                " `step_loss_mask` are 0 or 1, and one of them is enough"
            )
            raise DataError(file, place, f"messages[{index}] {error}", fix) from error
        if train and index == 0:
            what = "messages[0] is the assistant's, and nothing is before it"
            fix = "begin with a message of the system or the user, or give it `train`: false"
            raise DataError(file, place, what, fix)
        if train:
            found.append(index)
    if not found:
        fix = "give the conversation a message of the assistant, or remove it"
        raise DataError(file, place, "has no message of the assistant to train on", fix)
    return found

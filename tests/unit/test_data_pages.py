"""Whole results of reading rows: the prompts, or the error, of every form of a row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.data import DataError, read_training
from megatron_async_rl.data.files import read_rows
from megatron_async_rl.data.locations import _rests, names_split, split_of
from megatron_async_rl.data.messages import (
    MessagesFault,
    TrainingConversation,
    _begins_as_messages,
    loss_weight,
    messages_in,
)
from megatron_async_rl.data.row_columns import Required
from megatron_async_rl.data.tokenizer import Tokenizer, load_tokenizer
from tests.characters import TEMPLATE, save_characters
from tests.stored_pages import require_page


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_characters(folder)
    return load_tokenizer(folder, TEMPLATE)


USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ROWS: Mapping[str, Sequence[Any]] = {
    "text": [{"prompt": "1+1="}, {"prompt": "2+2=", "id": "two", "level": 2}],
    "ids": [{"prompt": "1", "id": 7}, {"prompt": "2", "id": ""}, {"prompt": "3", "id": None}],
    "equal ids": [{"prompt": "1", "id": "a"}, {"prompt": "2", "id": "a"}],
    "an id of another kind": [{"prompt": "1", "id": 1.5}],
    "an id that is true": [{"prompt": "1", "id": True}],
    "an id with half a pair": [{"prompt": "1", "id": "\ud800"}],
    "no prompt": [{"question": "1+1=", "answer": "2"}],
    "a misspelt prompt": [{"promt": "1+1="}],
    "an inner prompt": [{"extra": {"question": "1+1=", "n": 1}}],
    "messages in another column": [{"conversation": [USER]}],
    "nothing": [],
    "no columns": [{}],
    "an empty prompt": [{"prompt": ""}],
    "a blank prompt": [{"prompt": " \n"}],
    "a number": [{"prompt": 7}],
    "null": [{"prompt": None}],
    "an object": [{"prompt": {"a": 1}}],
    "half a pair": [{"prompt": "a\udc00"}],
    "a row that is a list": [["prompt", "1"]],
    "messages": [{"prompt": [USER]}],
    "messages as text": [{"prompt": json.dumps([USER])}],
    "a message": [{"prompt": USER}],
    "text encoded twice": [{"prompt": json.dumps(json.dumps([USER]))}],
    "messages as Python's text": [{"prompt": str([USER])}],
    "two conversations": [{"prompt": [[USER], [USER]]}],
    "an object with messages": [{"prompt": {"messages": [USER], "id": 1}}],
    "empty messages": [{"prompt": [{"role": "user", "content": " "}]}],
    "no content": [{"prompt": [{"role": "user"}]}],
    "no role": [{"prompt": [{"content": "1"}, USER]}],
    "another role": [{"prompt": [{"role": "judge", "content": "1"}, USER]}],
    "a role in capitals": [{"prompt": [{"role": " User ", "content": "1"}]}],
    "ShareGPT": [{"prompt": [{"from": "human", "value": "1+1="}]}],
    "an unknown speaker": [{"prompt": [{"from": "judge", "value": "1"}, USER]}],
    "two contents": [{"prompt": [{"from": "human", "value": "1", "content": "2"}]}],
    "a call": [{"prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}],
    "a call of ShareGPT": [
        {"prompt": [USER, {"from": "function_call", "value": '{"name": "add"}'}, USER]}
    ],
    "no call of ShareGPT": [{"prompt": [USER, {"from": "function_call", "value": "add(1)"}, USER]}],
    "a call without a name": [
        {"prompt": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, USER]}
    ],
    "a call with parameters": [
        {
            "prompt": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "add", "parameters": {"a": 1}, "arguments": {}}}
                    ],
                },
                USER,
            ]
        }
    ],
    "an old call": [
        {"prompt": [USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]}
    ],
    "null content": [{"prompt": [{"role": "user", "content": None}]}],
    "content in parts": [
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]}
    ],
    "half a pair in a message": [{"prompt": [{"role": "user", "content": "\ud800"}]}],
    "the assistant's turn": [{"prompt": [USER, ANSWER]}],
    "a role that is a number": [{"prompt": [{"role": 7, "content": "1"}, USER]}],
    "no calls as text": [{"prompt": [USER, {**ANSWER, "tool_calls": " "}, USER]}],
    "calls that are not JSON": [{"prompt": [USER, {**ANSWER, "tool_calls": "add"}, USER]}],
    "calls that are no list": [{"prompt": [USER, {**ANSWER, "tool_calls": "7"}, USER]}],
    "arguments that are a list": [
        {"prompt": [USER, {**ANSWER, "tool_calls": [{"name": "add", "arguments": [1]}]}, USER]}
    ],
    "arguments that are not JSON": [
        {"prompt": [USER, {**ANSWER, "tool_calls": [{"name": "add", "arguments": "{1"}]}, USER]}
    ],
}
GIVEN: Mapping[str, Sequence[Any]] = {
    "text": [{"prompt": "1+1=", "response": "2"}],
    "a number": [{"prompt": "1+1=", "response": 2}],
    "a fraction": [{"prompt": "1+1=", "response": 2.5}],
    "true": [{"prompt": "1+1=", "response": True}],
    "none": [{"prompt": "1+1="}],
    "another column": [{"prompt": "1+1=", "completion": "2"}],
    "messages to text": [{"prompt": "1+1=", "response": [ANSWER]}],
    "text to messages": [{"prompt": [USER], "response": "2"}],
    "messages to messages": [{"prompt": [USER], "response": [ANSWER]}],
    "several messages": [{"prompt": [USER], "response": [ANSWER, USER, ANSWER]}],
    "no message of the assistant": [{"prompt": [USER], "response": [USER]}],
    "two conversations": [{"prompt": [USER], "response": [[ANSWER], [ANSWER]]}],
    "weights": [
        {"prompt": "1", "response": "2", "weight": weight, "id": str(at)}
        for at, weight in enumerate((0, 1, 0.5, "2.5"))
    ],
    "a negative weight": [{"prompt": "1", "response": "2", "weight": -0.1}],
    "an infinite weight": [{"prompt": "1", "response": "2", "weight": "inf"}],
    "a weight that is text": [{"prompt": "1", "response": "2", "weight": "high"}],
    "a weight that is true": [{"prompt": "1", "response": "2", "weight": True}],
}
CONVERSATIONS: Mapping[str, Sequence[Any]] = {
    "one answer": [{"messages": [USER, ANSWER]}],
    "two answers": [{"messages": [USER, ANSWER, USER, {**ANSWER, "content": "34"}]}],
    "the last alone": [{"messages": [USER, {**ANSWER, "train": False}, USER, ANSWER]}],
    "by weight": [{"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}],
    "a later message": [{"messages": [USER, ANSWER, USER]}],
    "a weight of 2": [{"messages": [USER, {**ANSWER, "weight": 2}]}],
    "keys that disagree": [{"messages": [USER, {**ANSWER, "weight": 1, "train": False}]}],
    "the user's, trained": [{"messages": [{**USER, "train": True}, ANSWER]}],
    "the assistant's first": [{"messages": [ANSWER, USER]}],
    "no answer": [{"messages": [USER]}],
    "nothing trained": [{"messages": [USER, {**ANSWER, "train": False}]}],
    "an empty answer": [{"messages": [USER, {**ANSWER, "content": ""}]}],
    "text": [{"messages": "1+1="}],
    "no column": [{"prompt": "1+1="}],
}


def shown(value: Any) -> Any:
    if isinstance(value, TrainingConversation):
        values = asdict(value) | {"ids": value.ids.tolist(), "mask": value.mask.tolist()}
        return " ".join(f"{key}={one!r}" for key, one in values.items())
    return value


def read(folder: Path, rows: Sequence[Any], tokenizer: Tokenizer, **settings: Any) -> str:
    """Return the prompts of a file with these rows, or the error."""
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    required = Required(settings.pop("required", lambda fields: ()), lambda fields: None)
    supervised, room = settings.pop("supervised", False), settings.pop("room", None)
    config = DataConfig.model_validate({"train": file, **settings})
    try:
        found = read_training(
            config, tokenizer, required=required, supervised=supervised, room=room
        )
    except DataError as error:
        text = f"{error}\n".replace(str(folder), "FOLDER")
        return re.sub(r"/\S*/tokenizer\d+", "TOKENIZER", text)
    text = "".join(
        f"  {one.id}: {one.text!r} {list(one.token_ids)}"
        f" { ({key: shown(value) for key, value in one.fields.items()}) }\n"
        for one in found.prompts
    )
    return text + (f"  {found.too_long} too long\n" if found.too_long else "")


def require(page: str, cases: Mapping[str, str]) -> None:
    require_page(f"data/{page}", "".join(f"$ {name}\n{text}" for name, text in cases.items()))


def test_every_form_of_a_prompt_is_read_as_on_its_page(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cases = {name: read(tmp_path, rows, tokenizer) for name, rows in ROWS.items()}
    settings: Mapping[str, Mapping[str, Any]] = {
        "as chat": {"as_chat": True},
        "with a system prompt": {"as_chat": True, "system_prompt": "Be brief."},
        "a system prompt of text": {"system_prompt": "Be brief."},
        "another column": {"prompt_key": "id"},
        "an answer": {"answer_key": "level"},
        "1 token": {"max_prompt_tokens": 1},
        "room for 4 tokens": {"room": 4},
        "room for 3 tokens": {"room": 3},
        "a reward's column": {"required": lambda fields: ("level", "prompt")},
        "a reward without a part": {"required": lambda fields: None},
    }
    for name, one in settings.items():
        cases[f"text, {name}"] = read(tmp_path, ROWS["text"], tokenizer, **one)
    longer = [{"prompt": "1"}, {"prompt": "1+1=2+3"}, {"prompt": "2"}]
    cases["two of three"] = read(tmp_path, longer, tokenizer, max_prompt_tokens=1)
    own = [{"prompt": [{"role": "system", "content": "S"}, USER]}, {"prompt": [USER]}]
    cases["a row's system message"] = read(tmp_path, own, tokenizer, system_prompt="Be brief.")
    refusing = load_tokenizer(
        save_characters(tmp_path / "refusing"), "{{ raise_exception('no ' + messages[0].role) }}"
    )
    cases["a template that refuses"] = read(tmp_path, ROWS["messages"], refusing)
    paths = [{"a": {"b": {"c": "1+1=", "d": "2"}}}, {"a.b": '{"c": "2", "d": 3}'}]
    cases["paths"] = read(tmp_path, paths, tokenizer, prompt_key="a.b.c", answer_key="a.b.d")
    require("prompts", cases)


def test_every_form_of_a_given_response_is_read_as_on_its_page(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cases = {name: read(tmp_path, rows, tokenizer, supervised=True) for name, rows in GIVEN.items()}
    named = [{"prompt": "1", "label": "2"}]
    cases["by its column"] = read(tmp_path, named, tokenizer, supervised=True, answer_key="label")
    cases |= {
        f"conversation, {name}": read(
            tmp_path, rows, tokenizer, supervised=True, messages_key="messages"
        )
        for name, rows in CONVERSATIONS.items()
    }
    cases["conversation and answers"] = read(
        tmp_path,
        CONVERSATIONS["one answer"],
        tokenizer,
        supervised=True,
        messages_key="messages",
        answer_key="answer",
    )
    for name, template in {
        "a template without answers": "{% for m in messages if m.role == 'user' %}{{ m.content }}"
        "{% endfor %}<|assistant|>",
        "a template with a space before answers": "{% for m in messages %}<|{{ m.role }}|>"
        "{{ ' ' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "a template with thoughts": "{% for m in messages %}<|{{ m.role }}|>"
        "{{ '(so) ' if m.role == 'assistant' }}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    }.items():
        other = load_tokenizer(save_characters(tmp_path / name), template)
        cases[name] = read(tmp_path, GIVEN["text to messages"], other, supervised=True)
    require("responses", cases)
    assert loss_weight("file", 1, {}) == 1.0


def test_text_that_begins_as_messages_is_refused_and_other_text_is_a_question() -> None:
    texts = (
        *("[{", "[{'role': 'user'", '[{"a": 1', "{'role': 'user', 'content': 1}", "{'a': 1}"),
        *('{"role": "user"} is an object', '[{"role": "user", "content": "x"}] is it', "[1, 2"),
        *('[{"from": "human"', '[{"content": "x"', "[{}]", '"{\\"role\\": 1', '{"messages": ['),
        *("[ { name", "{role: user}", "plain", '[{"a": 1}] has one object', '{"conversations":['),
    )
    found = {}
    for text in texts:
        try:
            value = repr(messages_in(text) != text)
        except MessagesFault as error:
            value = f"{error.what.partition(':')[0]}; {error.fix}"
        found[text] = f"  {_begins_as_messages(text)} {value}\n"
    require("beginnings", found)


def test_names_of_files_have_the_splits_on_their_page() -> None:
    names = (
        *("train", "test", "latest", "gsm8kTrain", "data-train-00001-of-00004", "dev_tools"),
        *("train_val", "my.validation.set", "TEST", "heldout", "train_test_split", "a-train-b"),
    )
    text = ""
    for name in names:
        rests = [(rest, split) for rest, split in _rests(Path("d") / f"{name}.jsonl")]
        text += f"{name}: {split_of(name)} {rests}"
        text += f" {names_split(name, 'train')} {names_split(name, 'test')}\n"
    require_page("data/splits", text)


def test_files_that_cannot_be_read_have_the_errors_on_their_page(tmp_path: Path) -> None:
    contents: Mapping[str, bytes] = {
        "a.jsonl": b'{"prompt": "1"}\n\n{"prompt": 2',
        "b.jsonl": b"\xff\n",
        "c.json": b'{"prompt": "1"}',
        "d.json": b"[1]",
        "e.json": b'[{"prompt": "1"}, {"prompt": "2"}]',
        "f.csv": b"prompt,answer\n1,2,3\n",
        "g.csv": b"prompt,prompt\n1,2\n",
        "h.csv": b"prompt,answer\n1\n2,3\n",
        "i.csv": b"",
        "j.jsonl": b"",
        "k.parquet": b"PAR1",
        "l.txt": b"1\n",
        "m.jsonl": b'{"prompt": "1", "prompt": "2"}\n',
        "n.jsonl": b'{"prompt": NaN}\n',
        "o.jsonl.gz": b"no gzip",
        "p.jsonl": b'\xef\xbb\xbf{"prompt": "1"}\n',
    }
    text = ""
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        try:
            found = [
                f"{file.name}:{place} {values}"
                for file, place, values in read_rows(tmp_path / name)
            ]
        except DataError as error:
            found = [str(error).replace(str(tmp_path), "FOLDER")]
        text += f"$ {name} {content!r}\n" + "".join(f"  {one}\n" for one in found)
    require_page("data/files", text)

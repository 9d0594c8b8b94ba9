"""Chat messages in the forms of data sets and other projects: tool calls, and the ends of
responses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.data import DataConfig
from megatron_async_rl.data import DataError, SupervisedSource, read_training
from megatron_async_rl.data.tokenizer import load_tokenizer
from tests.cases import looped
from tests.characters import TEMPLATE, characters, save_characters
from tests.train_batches import samples_in
from tests.unit.test_data import as_json, as_jsonl, as_parquet, asks, read, turns


@looped("key", ["prompt_key", "messages_key"])
@looped("ending", ["jsonl", "csv", "parquet"])
def test_messages_may_be_json_text(tmp_path: Path, key: str, ending: str) -> None:
    chat = [{"weight": 1, "role": "user", "content": 'a "b", é'}, {"from": "human", "value": "c"}]
    path = tmp_path / f"d.{ending}"
    if ending == "csv":
        quoted = json.dumps(chat).replace('"', '""')
        path.write_text(f'chat\r\n"{quoted}"\r\n', encoding="utf-8-sig")
    else:
        (as_jsonl if ending == "jsonl" else as_parquet)(path, [{"chat": json.dumps(chat)}])
    (prompt,) = read(path, **{key: "chat"}).prompts
    assert prompt.text == 'u:a "b", é\x01\nu:c\x01\na:'


def test_messages_as_text_that_is_not_json_are_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    for text in (
        str(chat),
        str([{"weight": 0, "from": "human", "value": "a"}]),
        json.dumps(chat)[:-1],
        '[{"role": "user", "role": "user"}]',
        '[{"content": "{x}", "role": "user"',
        '[{"role: "user", "content": "a"}]',
        '[{role: "user", content: "a"}]',
        '[{"content": "hi", "ro',
        str(chat[0]),
        json.dumps(chat[0])[:-1],
        json.dumps(json.dumps(chat))[:-1],
        json.dumps(json.dumps(chat))[:-4],
        json.dumps(chat) + ",",
        f"{json.dumps(chat[0])}\n{json.dumps(chat[0])}",
        json.dumps({"messages": chat})[:-1],
        "\ufeff" + json.dumps(chat)[:-1],
        '[{""role"": ""user"", ""content"": ""a""}]',
    ):
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": text}])
        with pytest.raises(DataError, match=r"d.jsonl:1: `prompt` has chat messages as text that"):
            read(tmp_path)
        with pytest.raises(DataError, match=r"d.jsonl:1: `prompt` has chat messages as text"):
            read(tmp_path, as_chat=True)
    for text in (
        *("[1, 2]", '{"role": "user"}', "[{x}]", '["a"]', '"Stop!" he said', "[]", "{}", "["),
        '[{"value": 3}, {"value": 4}] is a list. What is the sum?',
        "[{'value': 1}, {'value': 2}] What does this print?",
        '[{"name": "Ann", "role": "engineer"}]',
        '[{"name": "Ann", "role": "engineer"}] Who is Ann?',
        '{"from": "a@b.c", "to": "d", "content": "x"} Classify this mail.',
        '{"from": "a@b.c", "content": "x"}',
    ):
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": text}])
        assert read(tmp_path).prompts[0].text == text, "a question like any other"


def test_messages_are_read_in_every_lossless_wrapping(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    text = json.dumps(chat)
    for value in (
        *(text, f"\ufeff{text}", f"\n {text}\n", json.dumps(text), json.dumps(json.dumps(text))),
        *(chat[0], json.dumps(chat[0]), [json.dumps(chat[0])], json.dumps([json.dumps(chat[0])])),
    ):
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": value}])
        for as_chat in (False, True):
            assert read(tmp_path, as_chat=as_chat).prompts[0].text == "u:a\x01\na:", value


def test_a_wrapping_with_other_content_is_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    both = {"messages": chat, "tools": []}
    for value, what, fix in (
        (both, "is an object, and the chat messages are in its `messages`", "prompt.messages"),
        ([chat], "is a list of conversations", "one row for each conversation"),
        ([both], "is a list of conversations", "one row for each conversation"),
        ([*chat, "b"], 'a chat message must be an object .*got "b"', '"role": "user"'),
    ):
        for given in (value, json.dumps(value), json.dumps(json.dumps(value))):
            as_jsonl(tmp_path / "d.jsonl", [{"prompt": given}])
            for as_chat in (False, True):
                with pytest.raises(DataError, match=f"d.jsonl:1: .*{what}") as caught:
                    read(tmp_path, as_chat=as_chat)
                assert fix in caught.value.fix
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": json.dumps(both)}])
    assert read(tmp_path, messages_key="prompt.messages").prompts[0].text == "u:a\x01\na:"


def test_a_role_that_the_template_does_not_name_is_refused(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path / "model", TEMPLATE)

    def text(role: str, template: str | None = None) -> str:
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": [*asks("a", role)[:1], *asks("b")[:1]]}])
        chosen = tokenizer if template is None else load_tokenizer(tmp_path / "model", template)
        (prompt,) = read_training(DataConfig(train=tmp_path / "d.jsonl"), chosen).prompts
        return prompt.text.partition("a<end>")[0]

    assert text("developer") == "<|developer|>"
    for given, role in (("human", "user"), ("GPT", "assistant"), ("observation", "tool")):
        assert text(given) == f"<|{role}|>"
    with pytest.raises(
        DataError, match=r"d.jsonl:1: .*does not name the role 'asistant'"
    ) as caught:
        text("asistant")
    assert "did you mean 'assistant'?" in caught.value.fix
    assert text("critic", "{# user or critic #}" + TEMPLATE) == "<|critic|>"


def test_keys_of_the_two_forms_may_be_mixed(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    call = {"name": "f", "arguments": {}}
    texts = set()
    for who, what in (("from", "content"), ("role", "value"), ("from", "value")):
        one = [{who: "human", what: "a"}, {who: "gpt", what: "b"}, {who: "user", what: "c"}]
        for rows in ([one], [one, [{"role": "user", "content": "x", "from": None, "value": None}]]):
            as_parquet(tmp_path / "d.parquet", [{"prompt": row} for row in rows])
            texts.add(read(tmp_path / "d.parquet").prompts[0].text)
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": [{who: "function_call", what: call}]}])
        with pytest.raises(DataError, match="the last message is the assistant's"):
            read(tmp_path / "d.jsonl")
    assert texts == {"u:a\x01\na:b\x01\nu:c\x01\na:"}
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": [{"from": "human", "value": "a", "content": "b"}]}])
    with pytest.raises(DataError, match="`from` human has both `value` and `content`"):
        read(tmp_path / "d.jsonl")
    scored = [{**plain[0], "value": 0.5}]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": scored}])
    assert read(tmp_path / "d.jsonl").prompts[0].text == "u:a\x01\na:"


def test_messages_of_sharegpt_are_converted(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    chat = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "no", "weight": 0},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "yes"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or () %}"
        "{{ c.function | tojson }}{% endfor %}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = characters(tmp_path / "model", template)
    for write in (as_jsonl, as_parquet):
        path = tmp_path / ("d.parquet" if write is as_parquet else "d.jsonl")
        write(path, [{"conversations": chat}])
        data = {"train": path, "messages_key": "conversations"}
        (prompt,) = read_training(
            DataConfig.model_validate(data), tokenizer, supervised=True
        ).prompts
        assert prompt.text == "system:be brief<end>\nuser:q<end>\nassistant:"
        given = prompt.fields["response"]
        trained = given.ids[given.mask == 1].tolist()
        assert shown(trained) == json.dumps(call) + "$yes$"
    for wrong, what in (
        ({"from": "bot", "value": "x"}, "a chat message is `from` 'bot'"),
        (
            {"from": "function_call", "value": "f(1)"},
            "a message `from` function_call is not a JSON object",
        ),
        ({"from": "human"}, "a message of the user has no content"),
        ({"from": "human", "value": ["x"]}, r"content\[0\] of type text"),
    ):
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": [wrong]}])
        with pytest.raises(DataError, match=f"d.jsonl:1: .*{what}"):
            read(tmp_path / "d.jsonl")


def shown(ids: Sequence[int]) -> str:
    return "".join("$" if one == 1 else chr(one) for one in ids)


CALLS = {
    "tojson": "{{ c.function.arguments | tojson }}",
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "text": "{{ c.function.arguments }}",
    "joined": "{{ 'f' + c.function.arguments }}",
    "either": "{{ c.function.arguments if c.function.arguments is string"
    " else c.function.arguments | tojson }}",
}
"""Ways in which templates render the arguments of a call."""


CONTENTS = {
    "or": "{{ m.content or '' }}",
    "printed": "{{ m.content }}",
    "searched": "{% if '</think>' not in m.content %}{{ m.content }}{% endif %}",
    "none": "{% if m.tool_calls and m.content is not none %}{{ raise_exception('') }}{% endif %}"
    "{{ m.content or '' }}",
}
"""Ways in which templates render the content of a message."""


@looped("content", CONTENTS)
@looped("way", CALLS)
def test_arguments_of_a_call_are_encoded_once_in_every_form(
    tmp_path: Path, way: str, content: str
) -> None:
    tokenizer = characters(
        tmp_path / "model",
        f"{{% for m in messages %}}{{{{ m.role }}}}:{CONTENTS[content]}"
        f"{{% for c in m.tool_calls or () %}}{{{{ c.function.name }}}}{CALLS[way]}"
        "{% endfor %}<end>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    )
    own = {"a": 1, "b": "x y", "big": 2**63 + 1}
    written = {"items": f"a=1;b=x y;big={2**63 + 1};", "joined": "f" + json.dumps(own)}
    texts = set()
    call = {"type": "function", "function": {"name": "f", "arguments": own}}
    as_text = {"type": "function", "function": {"name": "f", "arguments": json.dumps(own)}}
    for calls in ([call], [as_text], json.dumps([call]), json.dumps([as_text])):
        for content in ({}, {"content": None}, {"content": ""}):
            chat = [
                {"role": "user", "content": "q"},
                {"role": "assistant", **content, "tool_calls": calls},
            ]
            as_jsonl(tmp_path / "d.jsonl", [{"messages": chat}])
            data = DataConfig(train=tmp_path / "d.jsonl", messages_key="messages")
            (prompt,) = read_training(data, tokenizer, supervised=True).prompts
            texts.add(prompt.fields["response"].text)
            as_jsonl(tmp_path / "d.jsonl", [{"messages": [*chat, chat[0]]}])
            (prompt,) = read_training(data, tokenizer).prompts
            texts.add(prompt.text.removeprefix("user:q<end>assistant:").partition("user")[0])
    assert texts == {f"f{written.get(way, json.dumps(own))}<end>"}


@looped(
    ("message", "what"),
    [
        ({"tool_calls": "f(1)"}, "has tool_calls that are not JSON"),
        ({"tool_calls": ["f"]}, r"has tool_calls that are not a list of objects: \['f'\]"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "a=1"}}]},
            r"has tool_calls\[0\].function.arguments that are not JSON",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            r"has a list as tool_calls\[0\].function.arguments, which must be an object",
        ),
        ({"content": "x", "function_call": {"name": "f"}}, "has a `function_call`, OpenAI's old"),
        ({"tool_calls": [{"id": "1"}]}, r"has no function name in tool_calls\[0\]"),
        ({"tool_calls": [{"function": "f"}]}, r"has no function name in tool_calls\[0\]"),
        (
            {"content": "", "tool_calls": json.dumps([{"function": {"name": ""}}])},
            r"has no function name in tool_calls\[0\]",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "parameters": {"a": 1}}}]},
            r"has `parameters` instead of `arguments` in tool_calls\[0\]",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            r"has a number as tool_calls\[0\].function.arguments, which must be an object",
        ),
        ({"content": None, "tool_calls": []}, "has no content"),
        ({"tool_calls": []}, "a chat message must be an object with `role` and `content`"),
    ],
)
def test_an_unreadable_call_is_refused(tmp_path: Path, message: dict[str, Any], what: str) -> None:
    rows = [{"role": "user", "content": "q"}, {"role": "assistant", **message}]
    as_jsonl(tmp_path / "d.jsonl", [{"messages": rows}])
    with pytest.raises(DataError, match=f"d.jsonl:1: .*{what}"):
        read(tmp_path, messages_key="messages", supervised=True)


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path / "model", TEMPLATE)
    calls = [{"function": {"name": "weather", "arguments": {}}}]
    rows = asks("a", "assistant", tool_calls=calls)
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": [{"role": "user", "content": "q"}, *rows]}])
    with pytest.raises(DataError, match=r"d.jsonl:1: .*does not write `tool_calls`, here of 'wea"):
        read_training(DataConfig(train=tmp_path / "d.jsonl"), tokenizer)


@looped("key", [{"weight": 0}, {"weight": 0.0}, {"step_loss_mask": 0}])
@looped("write", [as_jsonl, as_parquet])
def test_a_message_of_weight_zero_is_not_trained_on(
    tmp_path: Path, key: dict[str, Any], write: Any
) -> None:
    messages = turns("hi", "yes", "why", "so")
    messages[1] |= key
    path = tmp_path / ("d.parquet" if write is as_parquet else "d.jsonl")
    write(path, [{"messages": messages}])
    (prompt,) = read(path, supervised=True, messages_key="messages").prompts
    assert prompt.text == "u:hi\x01\na:yes\x01\nu:why\x01\na:"
    messages[3] |= dict.fromkeys(key, 1)
    messages[2] |= dict.fromkeys(key, 1)  # has no effect on a message of the user
    messages[1] |= {"train": False}
    write(path, [{"messages": messages}])
    assert read(path, supervised=True, messages_key="messages").prompts[0].text == prompt.text


def end_of(tmp_path: Path, template: str, **data: Any) -> list[str]:
    """Return the trained tokens of each row; `$` stands for `<end>`, the end of a sequence, and `!`
    for `<stop>`."""
    save_characters(tmp_path / "model", ("<stop>",))
    tokenizer = load_tokenizer(tmp_path / "model", template)
    config = DataConfig.model_validate({"train": tmp_path / "d.jsonl", **data})
    found = read_training(config, tokenizer, supervised=True)
    source = SupervisedSource(
        found.prompts, tokenizer, prompts_per_step=1, seed=0, shuffle=False, max_context=None
    )
    return [
        "".join({1: "$", 2: "!"}.get(i, chr(i)) for i in one.response_ids[one.loss_mask == 1])
        for batch in source.once(0)
        for one in samples_in(batch)
    ]


@looped(
    ("answer", "ended"),
    [
        ("{{ m.content }}<stop>\n", "yes!"),
        ("{{ m.content }}<end>\n", "yes$"),
        (" {{ m.content }} <stop>", " yes !"),
        ("{{ m.content }}<stop>\n<end>", "yes!"),
        ("{{ m.content }}\n", "yes$"),
        ("thought:{{ m.content | trim }}<stop>", "yes!"),
    ],
)
def test_a_response_to_a_chat_ends_as_the_template_ends_a_turn(
    tmp_path: Path, answer: str, ended: str
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
        f"{answer}{{% else %}}{{{{ m.content }}}}<stop>\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "hi", "response": "yes"},
        {"prompt": chat, "response": "yes"},
    ]
    if (
        "thought" not in answer and answer[0] != " "
    ):  # the template writes the whole of given messages
        rows.append({"prompt": chat, "response": [{"role": "assistant", "content": "yes"}]})
    as_jsonl(tmp_path / "d.jsonl", rows)
    found = end_of(tmp_path, template, as_chat=True)
    assert found[:2] == [ended] * 2
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "hi", "response": "yes"}])
    assert end_of(tmp_path, template) == ["yes$"], "a plain text has no turns"


def test_a_response_whose_beginning_merges_with_the_prompt_is_encoded_alone(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:<{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:<{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": chat, "response": text} for text in ("stop>a", "b")])
    assert end_of(tmp_path, template) == ["stop>a$", "b$"]


def test_a_completion_may_be_messages_as_in_trl(tmp_path: Path) -> None:
    prompt = turns("hi", "no", "why", weight=1)
    completion = [{"role": "assistant", "content": "so"}]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": prompt, "completion": completion}])
    assert end_of(tmp_path, TEMPLATE, answer_key="completion") == ["so$"]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": turns("hi", "yes"), "response": "so"}])
    with pytest.raises(DataError, match=r"d.jsonl:1: the last message is the assistant's"):
        end_of(tmp_path, TEMPLATE)
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": prompt, "response": {"a": 1}}])
    with pytest.raises(DataError, match=r"d.jsonl:1: `response` is \{'a': 1\}"):
        end_of(tmp_path, TEMPLATE)
    for messages in (completion, json.dumps(completion)):
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": "hi", "response": messages}])
        with pytest.raises(DataError, match=r"d.jsonl:1: `response` has chat messages, and"):
            end_of(tmp_path, TEMPLATE)
        assert end_of(tmp_path, TEMPLATE, as_chat=True) == ["so$"]


def examples_of_other_projects() -> list[Any]:
    """Return the rows on docs/coming_from.md, each with the keys that read it."""
    text = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    pairs = re.findall(r"```json\n(.*?)```\n\n```yaml\n(.*?)```", text, re.DOTALL)
    assert len(pairs) == text.count("```json")
    return [pytest.param(json.loads(row), yaml.safe_load(keys)) for row, keys in pairs]


@looped(("row", "tree"), examples_of_other_projects())
def test_data_of_other_projects_is_read_with_the_keys_that_the_page_names(
    tmp_path: Path, row: dict[str, Any], tree: dict[str, Any]
) -> None:
    template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}:{{ m.content or"
        " '' }}{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}<end>{% endfor"
        " %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = characters(tmp_path / "model", template)
    supervised = tree.get("objective", {}).get("loss") == "sft"
    found = set()
    for write, name in ((as_jsonl, "d.jsonl"), (as_json, "d.json"), (as_parquet, "d.parquet")):
        write(tmp_path / name, [row])
        data = DataConfig.model_validate({**tree["data"], "train": tmp_path / name})
        (prompt,) = read_training(data, tokenizer, supervised=supervised).prompts
        assert "1+1" in prompt.text
        if not supervised:
            assert prompt.fields["answer"] == "2"
            continue
        given = prompt.fields["response"]
        found.add((prompt.text, shown(given.ids[given.mask == 1])))
    assert len(found) == supervised
    call = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
    ended = ("2$", "1+1=2\n#### 2$", f"{call}$It is 2.$", f"{call}$")
    assert all(text in ended for _, text in found)

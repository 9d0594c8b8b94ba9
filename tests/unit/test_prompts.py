"""Prompts of JSONL files, and the order in which a source yields them."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.data import DataError, PromptSource, SupervisedSource, read_prompts
from megatron_async_rl.samples import Prompt
from tests.cases import looped
from tests.thorough import thorough
from tests.train_batches import groups_of, samples_in


class Bytes:
    """Tokenizer with one token per UTF-8 byte, shifted by two; 0 is BOS, 1 is EOS."""

    eos_ids = (1, 300)
    vocab_size = 301

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [0] * special_tokens + [byte + 2 for byte in text.encode()]

    def encode_many(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, special_tokens=special_tokens) for text in texts]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, tools: Any = None
    ) -> str:
        turns = "".join(f"{one['role'][0]}:{one['content']}\x01\n" for one in messages)
        return turns + "a:" * answer

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of the bytes; a byte of value 1 is EOS, the end of a message."""
        return [1 if byte == 1 else byte + 2 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 2 for i in ids if i > 1).decode()


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_other_keys_become_fields_and_lines_without_id_are_named_by_file_and_line(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "2+2=", "id": "four", "answer": 4}',
    )
    first, second = read_prompts(path, Bytes())
    assert (first.id, first.text, dict(first.fields)) == ("data.jsonl:1", "1+1=", {"answer": "2"})
    assert (second.id, dict(second.fields)) == ("four", {"answer": 4})
    assert first.token_ids == (0, *(ord(c) + 2 for c in "1+1="))


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in read_prompts(path, Bytes())] == ["a", "b"]


def test_the_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\nnot json')
    assert [prompt.text for prompt in read_prompts(path, Bytes(), limit=2)] == ["a", "b"]


@looped(
    ("content", "line", "what"),
    [
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"', 2, "is not JSON"),
        ('{"prompt": "a", "answer": 1}\n["b"]', 2, "is a JSON list, not an object"),
        ('{"question": "a"}', 1, "has no `prompt` .*question"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"}', 2, "has no `answer`"),
        ('{"prompt": 3, "answer": 1}', 1, "`prompt` is a number"),
        ('{"prompt": null, "answer": 1}', 1, "`prompt` is null"),
        ('\n\n{"prompt": " ", "answer": 1}', 3, "`prompt` is empty"),
        ('{"prompt": [], "answer": 1}', 1, "`prompt` is empty"),
        (
            '{"prompt": ["hi"], "answer": 1}',
            1,
            "a chat message must be an object with `role` and `content`",
        ),
        ('{"prompt": "abcdefghi", "answer": 1}', 1, "`prompt` has 10 tokens, and the limit is 8"),
        (
            b'{"prompt": "a", "answer": 1}\n{"prompt": "\xff", "answer": 1}',
            2,
            "is not UTF-8: byte 0xff at column 13",
        ),
        (
            '{"prompt": "a", "id": 1, "answer": 1}\n{"prompt": "b", "id": "1", "answer": 1}',
            2,
            "is also the id of line 1",
        ),
        ('{"prompt": "a", "id": [], "answer": 1}', 1, "`id` is a list"),
        ('{"prompt": "a", "id": "\\ud83d", "answer": 1}', 1, "is not valid Unicode"),
        ('{"prompt": "a\\ud83d", "answer": 1}', 1, "`prompt` is not valid Unicode"),
        ('{"prompt": "a", "answer": "\\ud83d"}', 1, "`answer` is not valid Unicode"),
        ("", None, "contains no prompts"),
        ("\n \n", None, "contains no prompts"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_fault_and_fix(
    tmp_path: Path, content: str | bytes, line: int | None, what: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(DataError, match=what) as caught:
        read_prompts(path, Bytes(), max_prompt_tokens=8, required=("prompt", "answer"))
    assert caught.value.path == path
    assert caught.value.line == line
    assert caught.value.fix
    assert str(caught.value).startswith(str(path) if line is None else f"{path}:{line}: ")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl: cannot be read: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl", Bytes())


def test_a_data_error_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(DataError("a.jsonl", 3, "is wrong", "right it")))
    assert str(error) == "a.jsonl:3: is wrong\n  fix: right it"


@thorough
def test_a_hundred_thousand_lines_are_read_in_seconds(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(100_000)),
    )
    started = time.process_time()
    assert len(read_prompts(path, Bytes(), required=("prompt", "answer"))) == 100_000
    assert time.process_time() - started < 60, "of a slow core; by squares it would be hours"


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=str(i), text=str(i), token_ids=(i,), fields={"response": "ab", "weight": 1 + i})
        for i in range(count)
    ]


@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    pieces=st.lists(st.integers(0, 15), min_size=1, max_size=8),
)
def test_saving_and_loading_anywhere_gives_the_uninterrupted_sequence(
    count: int, seed: int, shuffle: bool, pieces: list[int]
) -> None:
    whole = PromptSource(prompts(count), seed=seed, shuffle=shuffle)
    uninterrupted = [whole.next().id for _ in range(sum(pieces))]
    broken: list[str] = []
    state = PromptSource(prompts(count), seed=seed, shuffle=shuffle).state()
    for piece in pieces:
        source = PromptSource(prompts(count), seed=seed, shuffle=shuffle)
        source.load_state(json.loads(json.dumps(state)))
        broken += [source.next().id for _ in range(piece)]
        state = source.state()
    assert broken == uninterrupted


@settings(deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_prompt_comes_exactly_once_per_epoch(count: int, seed: int, epochs: int) -> None:
    source = PromptSource(prompts(count), seed=seed, shuffle=True)
    for _ in range(epochs):
        assert sorted(int(source.next().id) for _ in range(count)) == list(range(count))


def test_epochs_differ_in_order_and_seeds_too() -> None:
    def sequence(seed: int) -> list[str]:
        source = PromptSource(prompts(50), seed=seed, shuffle=True)
        return [source.next().id for _ in range(100)]

    assert sequence(1)[:50] != sequence(1)[50:]
    assert sequence(1) != sequence(2)
    assert sequence(1) == sequence(1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"count": 4}, "5 prompts there, 4 here"),
        ({"count": 6}, "5 prompts there, 6 here"),
        ({"seed": 2}, "seed="),
        ({"shuffle": False}, "shuffle="),
    ],
)
def test_a_position_of_other_data_is_refused(change: dict[str, int], what: str) -> None:
    settings = {"count": 5, "seed": 1, "shuffle": True}
    saved = PromptSource(prompts(5), seed=1, shuffle=True).state()
    now = {**settings, **change}
    source = PromptSource(prompts(now["count"]), seed=now["seed"], shuffle=bool(now["shuffle"]))
    with pytest.raises(DataError, match=what):
        source.load_state(saved)


def test_a_position_of_other_prompts_of_equal_number_is_refused() -> None:
    saved = PromptSource(prompts(5), seed=1, shuffle=True).state()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"text": "?"}, "other text, columns or order"),
        ({"fields": {"answer": "8"}}, "other text, columns or order"),
        ({"token_ids": (7,)}, "with other tokens"),
    ]
    for change, what in changes:
        changed = [*prompts(4), replace(prompts(5)[4], **change)]
        with pytest.raises(DataError, match=what):
            PromptSource(changed, seed=1, shuffle=True).load_state(saved)
    swapped = [prompts(5)[index] for index in (1, 0, 2, 3, 4)]
    with pytest.raises(DataError, match="order"):
        PromptSource(swapped, seed=1, shuffle=True).load_state(saved)


def test_positions_of_renamed_data_and_earlier_releases_load() -> None:
    saved = PromptSource(prompts(5), seed=1, shuffle=True).state()
    renamed = [replace(one, id=f"other.jsonl:{one.id}") for one in prompts(5)]
    PromptSource(renamed, seed=1, shuffle=True).load_state(saved)
    earlier = {key: value for key, value in saved.items() if key not in ("rows", "tokens")}
    PromptSource(renamed, seed=1, shuffle=True).load_state(earlier)


def test_a_position_of_other_given_responses_is_refused() -> None:
    saved = supervised(prompts(5)).state()
    changed = replace(prompts(5)[2], fields={**prompts(5)[2].fields, "response": "b"})
    with pytest.raises(DataError, match="other text"):
        supervised([*prompts(2), changed, *prompts(5)[3:]]).load_state(saved)


def supervised(items: Sequence[Prompt], **changes: object) -> SupervisedSource:
    settings: dict[str, object] = {
        "prompts_per_step": 3,
        "seed": 1,
        "shuffle": True,
        "max_context": 4,
        **changes,
    }
    return SupervisedSource(items, Bytes(), **settings)  # type: ignore[arg-type]


def test_a_supervised_sample_is_the_response_with_one_end_of_sequence() -> None:
    batch = supervised(prompts(5)).next_batch(7)
    assert batch.version == 7
    assert [sample.id for (sample,) in groups_of(batch)] == ["0-0", "1-0", "2-0"]
    for sample in samples_in(batch):
        assert sample.response_ids.tolist() == [ord("a") + 2, ord("b") + 2, 1]
        assert sample.versions.tolist() == [7, 7, 7]
        assert sample.loss_mask.tolist() == [1, 1, 1]
        assert sample.finish_reason == "given"
        assert sample.weight == 1 + int(sample.prompt.id)


def test_a_weight_may_be_the_text_of_a_cell() -> None:
    row = Prompt(id="a", text="a", token_ids=(1,), fields={"response": "a", "weight": "0.5"})
    (sample,) = samples_in(supervised([row], prompts_per_step=1).next_batch(0))
    assert sample.weight == 0.5


def test_a_response_may_be_an_integer_of_parquet() -> None:
    rows = [Prompt(id="a", text="a", token_ids=(1,), fields={"response": one}) for one in (0, "0")]
    number, text = samples_in(supervised(rows, prompts_per_step=2, shuffle=False).next_batch(0))
    assert (number.text, number.response_ids.tolist()) == (text.text, text.response_ids.tolist())


def test_a_supervised_source_resumes_where_it_was() -> None:
    source = supervised(prompts(5))
    source.next_batch(0)
    state = json.loads(json.dumps(source.state()))
    resumed = supervised(prompts(5))
    resumed.load_state(state)
    for version in (1, 2, 3):
        ours, theirs = resumed.next_batch(version), source.next_batch(version)
        assert ours.samples == theirs.samples


def test_held_out_responses_come_once_and_move_no_position() -> None:
    source = supervised(prompts(7))
    before = source.state()
    for version in (0, 4):
        batches = list(source.once(version))
        assert [batch.version for batch in batches] == [version] * 3
        rows = [[sample.prompt.id for sample in samples_in(batch)] for batch in batches]
        assert rows == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert source.state() == before


@looped(
    ("fields", "what"),
    [
        ({}, "`response` is None"),
        ({"response": 3.5}, "`response` is 3.5"),
        ({"response": True}, "`response` is True"),
        ({"response": " "}, "`response` is ' '"),
        ({"response": "a", "weight": 10**400}, "`weight` is 1000"),
        ({"response": "a", "weight": -1}, "`weight` is -1"),
        ({"response": "a", "weight": "heavy"}, "`weight` is 'heavy'"),
        ({"response": "a", "weight": 0}, "every `weight` is 0"),
        ({"response": "abcd"}, "6 tokens together, and only 4 fit the model and a micro-batch"),
    ],
)
def test_a_bad_given_response_is_refused_with_its_line(
    fields: dict[str, object], what: str
) -> None:
    with pytest.raises(DataError, match=what) as caught:
        supervised([Prompt(id="sft.jsonl:9", text="q", token_ids=(5,), fields=fields)])
    assert str(caught.value).startswith("sft.jsonl:9: ")

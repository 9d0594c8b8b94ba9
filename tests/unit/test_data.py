"""User data: formats, columns, chat options, filters, mixtures, and conversations with masks."""

from __future__ import annotations

import gzip
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pyarrow
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_async_rl.config.data import DataConfig, FileConfig
from megatron_async_rl.data import (
    DataError,
    PromptSet,
    PromptSource,
    SupervisedSource,
    chat_template,
    fitting,
    log_too_long,
    read_set,
    read_training,
)
from megatron_async_rl.data.chat_template import ChatTemplate
from megatron_async_rl.data.files import count_rows, read_rows
from megatron_async_rl.data.messages import TrainingConversation
from megatron_async_rl.data.prompts import MixturePart
from megatron_async_rl.data.row_columns import Required, nothing_more
from megatron_async_rl.data.source import Mixture
from megatron_async_rl.data.tokenizer import load_tokenizer
from tests.cases import looped
from tests.characters import TEMPLATE, characters, save_characters
from tests.damaged_run import permissions_count
from tests.thorough import examples
from tests.train_batches import samples_in
from tests.unit.test_prompts import Bytes, prompts

ROWS = [{"question": "1+1=", "solution": "2", "level": 1}, {"question": "2+2=", "solution": "4"}]


def read(path: Path, *, supervised: bool = False, limit: int | None = None, **data: Any) -> Any:
    config = DataConfig.model_validate({"train": path, **data})
    return read_training(config, Bytes(), supervised=supervised, limit=limit)


def as_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps(rows))


def as_parquet(path: Path, rows: Sequence[Any]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def as_csv(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(
        "question,solution\n" + "".join(f"{r['question']},{r['solution']}\n" for r in rows)
    )


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("jsonl", as_jsonl),
        ("json", as_json),
        ("json", as_jsonl),
        ("parquet", as_parquet),
        ("csv", as_csv),
    ],
)
def test_every_format_gives_the_same_prompts(
    tmp_path: Path, ending: str, write: Callable[[Path, Sequence[Any]], None]
) -> None:
    path = tmp_path / f"d.{ending}"
    write(path, ROWS)
    found = read(path, prompt_key="question", answer_key="solution").prompts
    assert [(one.text, one.fields["answer"]) for one in found] == [("1+1=", "2"), ("2+2=", "4")]
    assert found[1].id == f"d.{ending}:{3 if ending == 'csv' else 2}"
    assert len(read(path, prompt_key="question", limit=1).prompts) == 1


def test_the_name_of_an_existing_folder_is_not_a_pattern(tmp_path: Path) -> None:
    names = ("data[v2]", "{raw}", "{a,b}", "x[1]{2}*?")
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        as_jsonl(folder / "train-[1].jsonl", [{"prompt": "one"}])
        as_jsonl(folder / "train-2.jsonl", [{"prompt": "two"}])
        whole = [folder, folder / "*.jsonl", folder / "train-{[1],2}.jsonl", folder / "*"]
        for location in whole:
            assert {one.text for one in read(location).prompts} == {"one", "two"}, location
        assert [one.text for one in read(folder / "train-[1].jsonl").prompts] == ["one"]
        assert [one.text for one in read(folder / "t*-[1].jsonl").prompts] == ["one"]
        with pytest.raises(DataError, match=r"gone.jsonl: cannot be read: No such file"):
            read(folder / "gone.jsonl")
    every = tmp_path / "*" / "data[v2]" / "*.jsonl"
    (tmp_path / "more" / "data[v2]").mkdir(parents=True)
    as_jsonl(tmp_path / "more" / "data[v2]" / "a.jsonl", [{"prompt": "deep"}])
    assert [one.text for one in read(every).prompts] == ["deep"]


@looped(
    ("names", "splits"),
    [
        (("train_a", "devices"), None),
        (("train", "evaluator", "testimony", "valley", "contest"), None),
        (("train-00000-of-00002", "train-00001-of-00002", "training_2"), None),
        (("a_train", "b_TEST"), "test and train"),
        (("train", "testset"), "test and train"),
        (("train", "tests"), "test and train"),
        (("trainA", "devB"), "train and validation"),
        (("gsm8kTrain", "gsm8kTest"), "test and train"),
        (("gsm8k.train", "gsm8k.val"), "train and validation"),
        (("train", "held-out-dev2"), "train and validation"),
        (("train", "dev_tools"), None),
        (("train", "test_results", "evaluation_prompts", "val-something", "latest"), None),
        (("train-00000-of-00002", "test-00000-of-00001-a09b74b3ef9c3b56"), "test and train"),
        (("train", "validation_0"), "train and validation"),
        (("train_gsm8k", "test_gsm8k", "more"), "test and train"),
        (("math_train_hard", "math_val_hard"), "train and validation"),
        (
            ("train_sft-00000-of-00001", "test_sft-00000-of-00002-a09b74b3ef9c3b56"),
            "test and train",
        ),
    ],
)
def test_splits_are_words_in_the_names_of_files(
    tmp_path: Path, names: Sequence[str], splits: str | None
) -> None:
    for name in names:
        as_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    if splits is None:
        assert len(read(tmp_path).prompts) == len(names)
        return
    with pytest.raises(DataError, match=f"several splits: {splits} ") as caught:
        read(tmp_path)
    suggested = caught.value.fix.removeprefix("name one split, such as ").partition(", or")[0]
    assert len(read(Path(suggested)).prompts) == 1, "what is suggested can be read"


@pytest.mark.parametrize("held_out", ["test", "gsm8k-test", "validation_0", "devset"])
def test_held_out_files_in_a_training_folder_are_refused(tmp_path: Path, held_out: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    as_jsonl(folder / f"{held_out}.jsonl", [{"prompt": "held out"}])
    for location in (folder, folder / "*.jsonl"):
        with pytest.raises(DataError, match=f"is training data and contains .*: {held_out}.jsonl"):
            read(location)
    as_jsonl(folder / "questions.jsonl", [{"prompt": "question"}])
    for location in (folder, folder / "*.jsonl"):
        with pytest.raises(DataError, match=f"is training data .*{held_out}.jsonl") as caught:
            read(location)
        suggested = caught.value.fix.partition("such as ")[2]
        assert [one.text for one in read(Path(suggested)).prompts] == ["question"]
    data = DataConfig(train=folder / "questions.jsonl")
    whole = FileConfig(path=folder)
    assert len(read_set(data, whole, Bytes()).prompts) == 2, "an evaluation may read both"
    assert len(read(folder / f"{held_out}.jsonl").prompts) == 1, "named, it is meant"


def test_a_folder_or_a_pattern_may_name_the_split_that_is_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    for number in range(2):
        as_jsonl(folder / f"test-{number}.jsonl", [{"prompt": str(number)}])
    for location in (folder, folder / "*.jsonl", tmp_path / "*" / "test-*.jsonl"):
        assert len(read(location).prompts) == 2, location


def test_a_folder_with_unsupported_data_files_is_refused(tmp_path: Path) -> None:
    def fault(*names: str) -> str:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        as_jsonl(folder / "a.jsonl", [{"prompt": "a"}])
        for name in names:
            (folder / name).write_bytes(b"{}")
        with pytest.raises(DataError) as caught:
            read(folder)
        assert caught.value.path == folder
        return str(caught.value)

    known = ("README.md", "dataset_info.json", "state.json", ".hidden.jsonl", "notes.txt")
    for name in known:
        (tmp_path / name).write_text("{}")
    as_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert len(read(tmp_path).prompts) == 1, "descriptions of the data are no data"
    (tmp_path / "a.jsonl").unlink()
    assert "b.jsonl.gz, and .gz is not a supported format" in fault("b.jsonl.gz")
    assert "decompress it, or name the other files" in fault("c.jsonl.gz")
    assert "write it as Parquet" in fault("data-00000-of-00001.arrow")
    assert "rename it to .jsonl" in fault("b.ndjson")
    assert "a.csv and a.jsonl, which are probably the same rows" in fault("a.csv")
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    with pytest.raises(DataError, match=r"empty: contains no data file\n") as caught:
        read(tmp_path / "empty")
    assert caught.value.fix.startswith("name a file, or a folder with data files (.jsonl")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"links/a.jsonl: cannot be read: No such file"):
        read(tmp_path / "links")
    (tmp_path / "links" / "a.jsonl").unlink()
    (tmp_path / "links" / "a.jsonl").symlink_to("a.jsonl")
    with pytest.raises(DataError, match=r"links/a.jsonl: cannot be read: Too many levels"):
        read(tmp_path / "links")
    with pytest.raises(DataError, match="contains no data file, only folders: ") as caught:
        read(tmp_path)
    assert "name one of the folders" in caught.value.fix


def test_a_missing_column_of_bytes_is_reported_as_bytes(tmp_path: Path) -> None:
    row = {"prompt": b"1+1", "answer": "2", "extra": {"raw": b"x", "n": 1}}
    as_parquet(tmp_path / "d.parquet", [row])
    with pytest.raises(DataError, match="column `prompt` of bytes") as caught:
        read(tmp_path)
    assert 'df["prompt"].str.decode("utf-8")' in caught.value.fix
    with pytest.raises(DataError, match=r"column `extra.n` of bytes"):
        read(tmp_path, prompt_key="answer", answer_key="extra.n")
    with pytest.raises(
        DataError, match=r"its columns: answer; left out because .* bytes: prompt, extra"
    ):
        read(tmp_path, prompt_key="question")


def test_cells_of_csv_stay_text_and_may_have_commas_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('\ufeffprompt,answer\r\n"a, b\nc",007\r\nd,\r\n')
    first, second = read(path).prompts
    assert (first.text, first.fields["answer"]) == ("a, b\nc", "007")
    assert (second.id, second.fields["answer"]) == ("d.csv:4", "")


def test_fields_of_a_table_are_json_values(tmp_path: Path) -> None:
    row = {
        "prompt": "a",
        "at": datetime(2026, 1, 2),
        "in": [{"price": Decimal("1.50")}],
        "raw": b"x",
    }
    as_parquet(tmp_path / "d.parquet", [row])
    (prompt,) = read(tmp_path).prompts
    assert json.loads(json.dumps(dict(prompt.fields))) == {
        "at": "2026-01-02 00:00:00",
        "in": [{"price": "1.50"}],
    }


def test_nested_bytes_and_extension_types_become_json_values(
    tmp_path: Path,
) -> None:
    name = uuid.UUID(int=7)
    columns = {
        "prompt": pyarrow.array(["a"]).dictionary_encode(),
        "image": pyarrow.array([b"x"]).dictionary_encode(),
        "uuid": pyarrow.ExtensionArray.from_storage(
            pyarrow.uuid(), pyarrow.array([name.bytes], pyarrow.binary(16))
        ),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "d.parquet")
    (one,) = read(tmp_path).prompts
    assert (one.text, dict(one.fields)) == ("a", {"uuid": str(name)})
    times = {"prompt": ["a"], "at": pyarrow.array([1], pyarrow.timestamp("ns"))}
    parquet.write_table(pyarrow.table(times), tmp_path / "d.parquet")
    (one,) = read(tmp_path).prompts
    assert dict(one.fields) == {"at": "1970-01-01 00:00:00.000000001"}, "pandas has nanoseconds"
    late = {"prompt": ["a"], "at": pyarrow.array([10**15], pyarrow.timestamp("s"))}
    parquet.write_table(pyarrow.table(late), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"(?s)d.parquet: has a value in at outside .*as text"):
        read(tmp_path)


def test_arrow_text_types_are_read_and_byte_types_left_out(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    texts = [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()]
    texts += [pyarrow.dictionary(pyarrow.int32(), one) for one in texts[:2]]
    for kind in texts:
        prompt = pyarrow.array(["a"], pyarrow.string()).cast(kind)
        inside = pyarrow.StructArray.from_arrays([prompt], ["x"])
        parquet.write_table(pyarrow.table({"prompt": prompt, "in": inside}), path)
        (one,) = read(path).prompts
        assert (one.text, dict(one.fields)) == ("a", {"in": {"x": "a"}}), kind
    raw = [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(1)]
    for kind in [*raw, *(pyarrow.list_(one) for one in raw)]:
        value: Any = [b"a"] if pyarrow.types.is_list(kind) else b"a"
        columns = {"prompt": ["a"], "raw": pyarrow.array([value], kind)}
        parquet.write_table(pyarrow.table(columns), path)
        (one,) = read(path).prompts
        assert dict(one.fields) == {}, kind
        with pytest.raises(DataError, match="column `raw` of bytes"):
            read(path, prompt_key="raw")


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    chat = [[[("role", "user"), ("content", "q")]]]
    numbers = pyarrow.array([[(1, "x")]], pyarrow.map_(pyarrow.int32(), pyarrow.string()))
    columns = {"messages": pyarrow.array(chat, pyarrow.list_(kind)), "n": numbers}
    parquet.write_table(pyarrow.table(columns), path)
    (one,) = read(path, messages_key="messages").prompts
    assert (one.text, dict(one.fields)) == ("u:q\x01\na:", {"n": {"1": "x"}})
    twice = pyarrow.array([[("a", "1"), ("a", "2")]], kind)
    parquet.write_table(pyarrow.table({"prompt": ["q"], "m": twice}), path)
    with pytest.raises(DataError, match="has a map with a duplicate key"):
        read(path)


def test_a_folder_or_table_that_the_system_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_parquet(tmp_path / "d.parquet", [{"prompt": "a" * 100}] * 100)
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:4] + bytes(60) + whole[64:])
    with pytest.raises(DataError, match=r"d.parquet: cannot be read: "):
        read(tmp_path / "d.parquet")

    for name in ("a.json", "a.jsonl", "a.csv", "a.parquet"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
        for reads in (read, count_rows):
            with pytest.raises(DataError, match=f"{name}: cannot be read: No such file"):
                reads(tmp_path / name)
    for name in ("b.json", "b.csv"):
        (tmp_path / name).write_text("[]")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", Mock(side_effect=OSError(5, "Input/output error")))
            with pytest.raises(DataError, match=f"{name}: cannot be read: Input/output error"):
                read(tmp_path / name)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0)
    with permissions_count(), pytest.raises(DataError, match="locked: cannot be read: Permission"):
        read(folder)


def test_a_duplicate_column_of_a_table_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match="names the column 'prompt' twice"):
        read(tmp_path / "d.parquet")


def test_blank_lines_and_empty_ids_of_csv_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("\n\nprompt,id\na,\n\nb,\nc,7\n")
    assert [one.id for one in read(tmp_path / "d.csv").prompts] == ["d.csv:4", "d.csv:6", "7"]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": [{"role": "user", "content": ""}]}, "every chat message is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, r"no text in content\[0\]"),
        ({"prompt": [{"role": "", "content": "a"}]}, "must be an object with `role`"),
        ({"prompt": {"a": 1}}, "`prompt` is an object"),
        ({"prompt": {}}, "`prompt` is empty"),
    ],
)
def test_an_empty_prompt_is_refused(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(DataError, match=f"d.jsonl:2: .*{what}"):
        read(tmp_path / "d.jsonl")


def test_faults_of_given_responses_are_reported_by_file_and_line(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"response": None}, "`response` is None"),
        ({"response": ["b"]}, r"`response` is \['b'\]"),
        ({"response": "b", "weight": "heavy"}, "`weight` is 'heavy'"),
        ({"response": "b", "weight": None}, "`weight` is None"),
    )
    for more, what in rows:
        for prompt in ("a", chat):
            as_jsonl(tmp_path / "d.jsonl", [{"id": "x", "prompt": prompt, **more}])
            with pytest.raises(DataError, match=f"d.jsonl:1: {what}"):
                read(tmp_path / "d.jsonl", supervised=True)


def test_a_cell_of_csv_may_exceed_the_module_limit(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(f"prompt,answer\n{'x' * 200_000},1\n")
    assert len(read(tmp_path).prompts[0].text) == 200_000


def test_the_first_rows_are_read_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 2)
    os.truncate(path, 1 << 42)  # larger than any memory
    assert [row["prompt"] for _, _, row in read_rows(path, 2)] == ["a", "a"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
LIKE_OTHERS = st.sampled_from(["1", "2020-01-02", "NA", "", "true", 1, 1.0, 2**64, True, None])
"""Values that a reader with one type per column would change."""


@settings(deadline=None, max_examples=examples(100, 30))
@example([{"a": []}])
@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON_VALUES | LIKE_OTHERS), max_size=4))
def test_rows_of_json_are_read_unchanged(rows: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        for name, write in (("d.jsonl", as_jsonl), ("d.json", as_json), ("l.json", as_jsonl)):
            path = Path(folder) / name
            write(path, rows)
            found = [row for _, _, row in read_rows(path)]
            # Compare repr, because 1 == 1.0 == True.
            assert repr(found) == repr(rows), name


def test_datasets_changes_or_refuses_rows_that_are_read_here(tmp_path: Path) -> None:
    """These are the reasons for the readers in data/files.py."""
    import datasets  # imported here, because every worker collects this file
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()

    def differs(kind: str, path: Path) -> bool:
        written = [row for _, _, row in read_rows(path)]
        try:
            found = datasets.load_dataset(
                kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
            )
        except (ValueError, DatasetGenerationError):
            return True
        return repr([*found]) != repr(written)

    same = [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}]
    as_jsonl(tmp_path / "same.jsonl", same)
    assert not differs("json", tmp_path / "same.jsonl"), "the comparison itself"
    columns: tuple[tuple[Any, ...], ...] = ((1, "1"), ("2020-01-02 03:04:05",), (2**53 + 1, 0.5))
    for number, values in enumerate(columns):
        path = tmp_path / f"{number}.jsonl"
        as_jsonl(path, [{"a": value} for value in values])
        assert differs("json", path), values
    as_jsonl(tmp_path / "keys.jsonl", [{"a": 1, "b": 1}, {"a": 2}])
    assert differs("json", tmp_path / "keys.jsonl"), "a key that a row lacks becomes null"

    (tmp_path / "zeros.csv").write_text("prompt,answer\na,007\nb,NA\n")
    assert differs("csv", tmp_path / "zeros.csv"), "NA becomes null"
    short = tmp_path / "short.csv"
    short.write_text("prompt,answer\na,1\nb\n")
    with pytest.raises(DataError, match=r"short.csv:3: has 1 cells"):
        read(short)
    wide = tmp_path / "wide.csv"
    wide.write_text("prompt,answer\na,1,\nb,2,\n")
    with pytest.raises(DataError, match=r"wide.csv:2: has 3 cells"):
        read(wide)
    for path, prompts_there in ((short, ["a", "b"]), (wide, [1, 2])):
        found = datasets.load_dataset(
            "csv", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert found["prompt"][:] == prompts_there, "cells that lack or shift are not errors"

    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table({"m": pyarrow.array([[("k", "v")]], kind)})
    parquet.write_table(table, tmp_path / "map.parquet")
    assert differs("parquet", tmp_path / "map.parquet"), "maps are refused"


def test_files_of_a_folder_and_a_pattern_are_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        as_jsonl(tmp_path / f"train-{name}.jsonl", [{"prompt": name}])
    (tmp_path / "README.md").write_text("# not data")
    (tmp_path / "._train-a.jsonl").write_bytes(b"\0 left by a file manager")
    for location in (tmp_path, tmp_path / "train-*.jsonl"):
        assert [one.id for one in read(location).prompts] == ["train-a.jsonl:1", "train-b.jsonl:1"]
    as_jsonl(tmp_path / "test-a.jsonl", [{"prompt": "held out"}])
    with pytest.raises(DataError, match="several splits: test and train") as caught:
        read(tmp_path)
    assert f"{tmp_path}/train*.jsonl" in caught.value.fix


DEEP = b"[" * 100_000 + b"]" * 100_000


@looped(
    ("name", "content", "what"),
    [
        ("d.txt", b"a", r"d.txt: has the extension .txt, which is not a supported format"),
        ("d.json", b"[1, 2", r"d.json: is not JSON"),
        ("d.json", b'[{"prompt": "a"}, 3]', r"d.json:2: is a JSON number, not an object"),
        ("d.parquet", b"PAR?", r"d.parquet: is not Parquet"),
        ("d.csv", b"prompt,answer\na,1\nb\n", r"d.csv:3: has 1 cells, and the first line names 2"),
        ("d.csv", b"prompt,prompt\na,1\n", r"d.csv:1: names the column 'prompt' twice"),
        ("d.csv", b'prompt\n"a\n', r"is not CSV"),
        ("d.csv", b"prompt;answer\na;1\n", r"d.csv:1: has no comma in its first line"),
        (
            "d.json",
            b'{"data":\n [{"prompt": "a"}]}',
            r"is one JSON object, .*\n.*the list of `data`",
        ),
        ("d.json", "[]".encode("utf-16"), r"d.json:1: is not UTF-8"),
        ("d.json", b'[{"prompt": "a", "x": ' + DEEP + b"}]", r"d.json: is not JSON: maximum"),
        ("d.jsonl", b'{"prompt": "a", "x": ' + DEEP + b"}", r"d.jsonl:1: is not JSON: maximum"),
        ("d.jsonl", b'{"prompt": "a", "prompt": "b"}', r"d.jsonl:1: .*the key 'prompt' twice"),
        ("d.json", b'[{"prompt": "a", "x": {"y": 1, "y": 1}}]', r"d.json: .*the key 'y' twice"),
        ("d.csv", b"prompt\na\xff\n", r"d.csv:2: is not UTF-8"),
        ("d.json", b"5", r"d.json:1: is a JSON number, not an object"),
        ("d.json", b'{"data": [{"prompt": "a"}]}', r"is one JSON object, .*\n.*the list of `data`"),
        ("d.jsonl", b'[{"prompt": "a"}]', r"d.jsonl:1: is a JSON list, .*\n.*rename .* to .json"),
        ("d.jsonl", b'[\n{"prompt": "a"}]', r"d.jsonl:1: is not JSON: .*\n.*rename .* to .json"),
        ("d.jsonl", b'{"prompt": "a"}\n{"a": 1},', r"d.jsonl:2: .*at column 9\n.*without a comma"),
        ("d.jsonl", b'\n{"prompt": "a"}\r\nnull\r\n', r"d.jsonl:3: is a JSON null, not an object"),
        ("d.jsonl", gzip.compress(b"{}", mtime=0), r"d.jsonl: is compressed with gzip"),
        ("d.csv", gzip.compress(b"a,b", mtime=0), r"d.csv: is compressed with gzip"),
        ("d.jsonl.gz", b"", r"d.jsonl.gz: has the extension .gz, .*\n.*decompress it"),
        ("d.arrow", b"", r"d.arrow: has the extension .arrow, .*\n.*write it as Parquet"),
        ("d.jsonl", b"", r"contains no prompts"),
        ("d.csv", b"\xef\xbb\xbf", r"contains no prompts"),
        ("none-*.jsonl", None, r"contains no data file"),
        ("nowhere.parquet", None, r"nowhere.parquet: cannot be read: No such file"),
    ],
)
def test_an_unreadable_file_is_refused_with_place_and_fault(
    tmp_path: Path, name: str, content: bytes | None, what: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=what):
        read(tmp_path / name)


def test_a_prompt_of_another_type_is_refused_with_the_valid_types(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    as_jsonl(path, [{"prompt": 7, "answer": "a"}])
    for keys, fix in (
        ({}, "write text, or a list of chat messages"),
        ({"messages_key": "prompt"}, "write a list of chat messages, or name a column of text"),
    ):
        with pytest.raises(DataError, match=rf"d.jsonl:1: `prompt` is a number\n.*{fix}"):
            read(path, **keys)


@pytest.mark.parametrize(
    ("row", "data", "fix"),
    [
        ({"question": "a"}, {}, "data.prompt_key=question"),
        ({"promt": "a"}, {}, "data.prompt_key=promt"),
        ({"messages": []}, {}, "data.messages_key=messages"),
        ({"prompt": "a", "solution": 1}, {"answer_key": "answer"}, "data.answer_key=solution"),
        ({"conversations": []}, {"messages_key": "messages"}, "data.messages_key=conversations"),
    ],
)
def test_the_error_for_a_missing_column_names_the_nearest(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], fix: str
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [row])
    with pytest.raises(DataError, match="has no `") as caught:
        read(tmp_path / "d.jsonl", **data)
    assert fix in caught.value.fix


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"answer": "1+1=2 #### 2", "index": 0, "split": "train"},
}


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_a_key_may_name_a_value_inside_a_column(tmp_path: Path, write: Any) -> None:
    path = tmp_path / ("d.parquet" if write is as_parquet else "d.jsonl")
    write(path, [VERL])
    (prompt,) = read(path, answer_key="reward_model.ground_truth").prompts
    assert prompt.fields["answer"] == "2"
    assert prompt.fields["reward_model"] == VERL["reward_model"], "for rewards that read it whole"
    (prompt,) = read(path, prompt_key="extra_info.answer").prompts
    assert prompt.text == "1+1=2 #### 2"
    with pytest.raises(DataError, match=r"no `reward_model.truth` .*reward_model.style") as caught:
        read(path, answer_key="reward_model.truth")
    assert "data.answer_key=reward_model.ground_truth" in caught.value.fix


def test_a_column_with_a_dot_takes_precedence_over_a_path(tmp_path: Path) -> None:
    row = {"prompt": "a", "x.y": "1", "x": {"y": "2", "z.w": "3"}, "t": '{"u": {"v": "4"}}'}
    as_jsonl(tmp_path / "d.jsonl", [row])
    for key, value in (("x.y", "1"), ("x.z.w", "3"), ("t.u.v", "4")):
        assert read(tmp_path, answer_key=key).prompts[0].fields["answer"] == value, key
    for key in ("x.y.z", "x.", ".y", "x.u", "t.u.v.w"):
        with pytest.raises(DataError, match=f"has no `{key}`"):
            read(tmp_path, answer_key=key)


def test_a_suggested_fix_does_not_cause_the_next_error(tmp_path: Path) -> None:
    """Data of several projects loads after the fixes that the errors suggest, and nothing else."""

    def wants(fields: Mapping[str, Any]) -> Sequence[str]:
        return ("answer",)

    chat = [{"from": "human", "value": "1+1="}]
    rows: dict[str, tuple[dict[str, Any], tuple[str, Any]]] = {
        "verl": (VERL, ("u:1+1=\x01\na:", "2")),
        "slime": ({"text": "1+1=", "label": "2", "metadata": {}}, ("1+1=", "2")),
        "sharegpt": ({"conversations": chat, "meta": {"gold": 2}}, ("u:1+1=\x01\na:", 2)),
        "nested": ({"task": {"question": "1+1=", "target": "2"}}, ("1+1=", "2")),
        "decoy": ({"input": None, "problem": "1+1=", "solution": [], "gold": "2"}, ("1+1=", "2")),
    }
    for name, (row, expected) in rows.items():
        as_jsonl(tmp_path / f"{name}.jsonl", [row])
        keys: dict[str, Any] = {}
        fault = fault_of(tmp_path / f"{name}.jsonl", wants, keys)
        while fault is not None:
            key, _, value = fault.fix.partition("data.")[2].partition(" ")[0].partition("=")
            assert value not in ("", "COLUMN"), (name, str(fault))
            assert key not in keys, (name, str(fault))
            keys[key] = value
            fault = fault_of(tmp_path / f"{name}.jsonl", wants, keys)
        (prompt,) = read(tmp_path / f"{name}.jsonl", **keys).prompts
        assert (prompt.text, prompt.fields["answer"]) == expected, name


def fault_of(path: Path, required: Any, keys: Mapping[str, Any]) -> DataError | None:
    try:
        data = DataConfig.model_validate({"train": path, **keys})
        read_training(data, Bytes(), required=Required(required))
    except DataError as error:
        return error
    return None


def test_text_may_become_a_chat_with_a_system_prompt(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b", "name": None}]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": own}])
    texts = [one.text for one in read(tmp_path, as_chat=True, system_prompt="be brief").prompts]
    assert texts == ["s:be brief\x01\nu:a\x01\na:", "s:own\x01\nu:b\x01\na:"]
    with pytest.raises(
        DataError, match=r"plain text, and data.system_prompt is for chat"
    ) as caught:
        read(tmp_path, system_prompt="be brief")
    assert "data.as_chat: true" in caught.value.fix


def asks(content: Any, role: str = "user", **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (asks([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "u:a\nb"),
        (asks(None, "assistant", tool_calls=[{"function": {"name": "f"}}]), "a:None"),
    ],
)
def test_the_content_of_a_message_may_be_a_list_of_texts_or_a_call(
    tmp_path: Path, messages: list[dict[str, Any]], text: str
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": messages}])
    assert read(tmp_path).prompts[0].text == f"{text}\x01\nu:b\x01\na:"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (asks([{"type": "image_url", "image_url": "a"}]), r"content\[0\] of type image_url"),
        (asks(["a"]), r"content\[0\] of type text: "),
        (asks(7), r"the user has a number as its content"),
        (asks(None), r"the user has no content"),
        (asks("a\ud83d"), r"a message of the user is not valid Unicode"),
    ],
)
def test_a_message_that_a_template_would_ignore_is_refused(
    tmp_path: Path, messages: list[dict[str, Any]], what: str
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": messages}])
    with pytest.raises(DataError, match=rf"d.jsonl:2: .*{what}"):
        read(tmp_path)


def test_a_role_that_the_template_leaves_out_is_refused_with_the_nearest(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role in ('system', 'user') %}<{{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer = characters(tmp_path / "model", template)
    rows = [{"prompt": asks("a", "system")}, {"prompt": asks("no", "usr")}]
    as_jsonl(tmp_path / "d.jsonl", rows)
    data = DataConfig.model_validate({"train": tmp_path / "d.jsonl"})
    with pytest.raises(DataError, match="leaves out messages of the role 'usr'") as caught:
        read_training(data, tokenizer)
    assert (caught.value.line, caught.value.fix[:21]) == (2, "did you mean 'user'? ")


def test_a_template_without_system_or_tool_messages_is_refused(tmp_path: Path) -> None:
    """Otherwise data.system_prompt, for example, would have no effect."""
    template = (
        "{% for m in messages if m.role in ('assistant', 'user') %}<{{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer = characters(tmp_path / "model", template)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    tool = {"role": "tool", "content": "42 degrees", "tool_call_id": "c"}
    for role, messages in {
        "system": [{"role": "system", "content": "In French."}, *asks("a")],
        "tool": [*asks("a")[:1], {"role": "assistant", "content": "f", "tool_calls": [call]}, tool],
    }.items():
        as_jsonl(tmp_path / "d.jsonl", [{"prompt": messages}])
        data = DataConfig.model_validate({"train": tmp_path / "d.jsonl"})
        with pytest.raises(DataError, match=f"leaves out messages of the role '{role}'"):
            read_training(data, tokenizer)


def test_a_prompt_that_ends_with_an_answer_is_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    as_parquet(tmp_path / "d.parquet", [{"messages": turns}])
    with pytest.raises(DataError, match=r"d.parquet:1: the last message is the assistant's"):
        read(tmp_path, messages_key="messages")


def test_an_option_that_the_template_does_not_read_is_refused() -> None:
    def template(**options: Any) -> ChatTemplate:
        return ChatTemplate(Path("model"), None, options)

    text = "{% if enable_thinking %}{{ messages[0].content }}{% endif %}"
    template(enable_thinking=False)._require_options(text)
    # Only rendering shows which options these templates read.
    for unknown in ({"default": text}, "{% of_an_extension %}"):
        template(enable_thinkin=False)._require_options(unknown)
    with pytest.raises(DataError, match="does not read 'enable_thinkin'") as caught:
        template(enable_thinkin=False)._require_options(text)
    assert "did you mean enable_thinking?" in caught.value.fix
    marked = f"{{% generation %}}{text}{{%- endgeneration -%}}"
    with pytest.raises(DataError, match="does not read 'enable_thinkin'"):
        template(enable_thinkin=False)._require_options(marked)


def test_a_template_is_parsed_for_its_options_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    read = chat_template._variables
    monkeypatch.setattr(chat_template, "_variables", lambda text: parsed.append(text) or read(text))
    tokenizer = load_tokenizer(save_characters(tmp_path), TEMPLATE)
    for _ in range(3):
        tokenizer.render_chat([{"role": "user", "content": "a"}], answer=True)
    assert parsed == [TEMPLATE]


def test_tools_of_a_row_take_precedence_over_the_template_option(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_characters(tmp_path), TEMPLATE, {"tools": [{"name": "f"}]})
    messages = [{"role": "user", "content": "q"}]
    rendered = "<|user|>q<end>\n"
    with_tools = f'[{{"name": "g"}}]{rendered}'
    assert tokenizer.render_chat(messages, answer=False) == f'[{{"name": "f"}}]{rendered}'
    assert tokenizer.render_chat(messages, answer=False, tools=[{"name": "g"}]) == with_tools


@looped("write", [as_jsonl, as_parquet])
@looped(
    ("shown", "answer"),
    [
        (lambda tools: tools, {}),
        (json.dumps, {}),
        (lambda tools: [json.dumps(one) for one in tools], {}),
        (lambda tools: tools, {"supervised": True}),
    ],
)
def test_the_template_gets_the_tools_of_each_row(
    tmp_path: Path, write: Any, shown: Any, answer: dict[str, bool]
) -> None:
    path = tmp_path / ("d.parquet" if write is as_parquet else "d.jsonl")
    f = {"name": "f", "parameters": {"a": {"type": "string"}}}
    g = {"name": "g", "parameters": {"b": {"type": "number"}}}
    own = [[f], [f, g], None]
    messages = turns("q", "yes") if answer else turns("q")
    write(path, [{"chat": messages, "functions": tools and shown(tools)} for tools in own])
    tokenizer = characters(tmp_path / "model", TEMPLATE)

    def rendered(**data: Any) -> list[str]:
        config = DataConfig.model_validate({"train": path, "messages_key": "chat", **data})
        return [one.text for one in read_training(config, tokenizer, **answer).prompts]

    plain = rendered()
    before = [json.dumps([f]), json.dumps([f, g]), ""]
    assert rendered(tools_key="functions") == [
        tools + text for tools, text in zip(before, plain, strict=True)
    ]
    assert rendered(tools_key=None) == plain
    assert rendered(train=None, sources=[{"path": path, "tools_key": "functions"}]) == rendered(
        tools_key="functions"
    )


@looped("none", ["", " ", "null", "[]", [], None])
def test_a_row_may_have_no_tools(tmp_path: Path, none: Any) -> None:
    tokenizer = characters(tmp_path / "model", TEMPLATE)
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": turns("q"), "tools": none}, {"prompt": turns("q")}])
    one, other = read_training(DataConfig(train=tmp_path / "d.jsonl"), tokenizer).prompts
    assert one.text == other.text


@pytest.mark.parametrize(
    ("row", "data", "what", "fix"),
    [
        ({"tools": "f"}, {}, "`tools` is not a list of JSON schemas: 'f'", "data.tools_key: null"),
        ({"tools": ["f"]}, {}, r"`tools` is not a list of JSON schemas: \['f'\]", "data.tools_key"),
        (
            {"functions": []},
            {"tools_key": "function"},
            "has no `function`",
            "data.tools_key=functions",
        ),
        (
            {"functions": [], "prompt": "q"},
            {"tools_key": "functions"},
            "the prompt is plain text, and data.tools_key is for chat messages",
            "data.as_chat: true",
        ),
    ],
)
def test_a_column_without_schemas_of_tools_is_refused(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], what: str, fix: str
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": turns("q"), **row}])
    with pytest.raises(DataError, match=rf"d.jsonl:1: {what}") as caught:
        read(tmp_path / "d.jsonl", **data)
    assert fix in caught.value.fix


def test_tools_that_the_environment_lacks_are_refused(tmp_path: Path) -> None:
    f, g = ({"name": name} for name in "fg")
    tokenizer = load_tokenizer(save_characters(tmp_path / "model"), TEMPLATE, tools=[f])
    config = DataConfig(train=tmp_path / "d.jsonl")
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": turns("q"), "tools": [f]}])
    (prompt,) = read_training(config, tokenizer).prompts
    assert prompt.text.startswith(json.dumps([f]))
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": turns("q"), "tools": [g]}])
    with pytest.raises(DataError, match=r"d.jsonl:1: .*other tools than .*environment"):
        read_training(config, tokenizer)


def test_a_call_in_a_table_has_only_its_own_arguments(tmp_path: Path) -> None:
    """Each call in a table has the arguments of all calls, as nulls."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )

    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "q"}, calls]}

    tokenizer = characters(tmp_path / "model", template)
    own: list[dict[str, Any]] = [{"a": 1}, {"city": "x", "more": [{"b": 2}, {"c": 3}]}]
    as_parquet(tmp_path / "d.parquet", [row(one) for one in own])
    as_jsonl(tmp_path / "d.jsonl", [row({"a": None})])

    def arguments_in(name: str) -> list[Any]:
        data = {"train": tmp_path / name, "messages_key": "messages"}
        found = read_training(DataConfig.model_validate(data), tokenizer, supervised=True)
        texts = [one.fields["response"].text for one in found.prompts]
        return [json.loads(text.removesuffix("<end>"))["arguments"] for text in texts]

    assert arguments_in("d.parquet") == own
    assert arguments_in("d.jsonl") == [{"a": None}]


def test_prompts_above_the_limit_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a" * length} for length in (1, 9, 2, 9)])
    found = read(tmp_path, max_prompt_tokens=5)
    assert ([one.text for one in found.prompts], found.too_long) == (["a", "aa"], 2)
    log_too_long(found)
    log_too_long(read(tmp_path))
    assert [one.getMessage() for one in caplog.records] == [
        "2 rows are longer than data.max_prompt_tokens or data.max_tokens and are left out; 2 rows"
        " remain"
    ]
    with pytest.raises(DataError, match="no prompt of at most 1 tokens: all 4 are longer"):
        read(tmp_path, max_prompt_tokens=1)


def test_given_rows_above_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "response": "b" * n} for n in (1, 9, 2, 3)]
    as_jsonl(tmp_path / "a.jsonl", rows)
    as_jsonl(tmp_path / "b.jsonl", [{"prompt": "b" * n, "response": "b"} for n in (5, 1)])
    sources = [{"path": tmp_path / name, "weight": 2} for name in ("a.jsonl", "b.jsonl")]
    config = DataConfig.model_validate({"sources": sources, "max_prompt_tokens": 8})
    whole = read_training(config, Bytes(), supervised=True)
    found = fitting(whole, Bytes(), 6)
    assert [one.text for one in found.prompts] == ["a", "aa", "b"], "(1 + 2) + 2 + 1"
    assert [(part.count, part.too_long, part.weight) for part in found.parts] == [
        (2, 2, 2),
        (1, 1, 2),
    ]
    assert fitting(whole, Bytes(), None) is whole
    batch = SupervisedSource(
        found.prompts,
        Bytes(),
        prompts_per_step=3,
        seed=0,
        shuffle=False,
        max_context=6,
        parts=found.parts,
    ).next_batch(0)
    assert sorted(len(one.response_ids) for one in samples_in(batch)) == [2, 2, 3]
    with pytest.raises(DataError, match="a: has no row of at most 2 tokens: all 3 are longer"):
        fitting(whole, Bytes(), 2)


def test_rows_need_only_the_columns_of_their_own_reward(
    tmp_path: Path,
) -> None:
    as_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "kind": "x"}])
    as_jsonl(tmp_path / "b.jsonl", [{"prompt": "c"}])
    sources = [
        {"path": tmp_path / "b.jsonl", "fields": {"kind": "code"}},
        {"path": tmp_path / "a.jsonl"},
    ]

    def needed(row: Mapping[str, Any]) -> tuple[str, ...] | None:
        return {"code": (), "x": ("tests",), "math": ("answer",)}.get(row.get("kind", "math"))

    def read_with(required: Any, **changes: Any) -> PromptSet:
        files = [sources[0], sources[1] | changes]
        return read_training(
            DataConfig.model_validate({"sources": files}), Bytes(), required=required
        )

    assert [dict(one.fields) for one in read_with(nothing_more).prompts] == [
        {"kind": "code"},
        {"answer": "1"},
        {"kind": "x"},
    ]
    seen: list[Any] = []
    read_with(
        Required(lambda row: seen.append(row) or ()), prompt_key="prompt", answer_key="prompt"
    )
    assert [sorted(row) for row in seen] == [["kind"], ["answer"], ["answer", "kind"]], (
        "just what the prompts have as fields"
    )
    with pytest.raises(ValueError, match="contains a value that JSON does not have"):
        read_with(nothing_more, fields={"day": datetime(2026, 1, 2)})
    with pytest.raises(DataError, match=r"a.jsonl:2: has no `tests`"):
        read_with(Required(needed))
    with pytest.raises(DataError, match=r"a.jsonl:1: matches the `where` of no part of the reward"):
        read_with(Required(lambda row: () if row.get("kind") == "code" else None))
    with pytest.raises(DataError, match=r"a.jsonl:2: has its own column `kind`: 'x'"):
        read_with(nothing_more, fields={"kind": "math"})


# Mixtures


def test_the_parts_of_a_mixture_keep_their_own_columns_and_their_ids_apart(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "a.jsonl", [{"id": 1, "prompt": "a"}])
    as_jsonl(tmp_path / "b.jsonl", [{"id": 1, "question": "b", "solution": "B"}])
    sources = [
        {"path": tmp_path / "a.jsonl", "weight": 3},
        {
            "path": tmp_path / "b.jsonl",
            "prompt_key": "question",
            "answer_key": "solution",
            "name": "z",
        },
    ]
    found = read_training(DataConfig.model_validate({"sources": sources}), Bytes())
    assert [(one.id, one.text, dict(one.fields)) for one in found.prompts] == [
        ("a/1", "a", {}),
        ("z/1", "b", {"solution": "B", "answer": "B"}),
    ]
    assert [(part.label, part.weight, part.count) for part in found.parts] == [
        ("a", 3, 1),
        ("z", 1, 1),
    ]


def source(counts: Sequence[int], weights: Sequence[float]) -> PromptSource:
    pairs = enumerate(zip(counts, weights, strict=True))
    parts = [MixturePart(label=str(i), count=count, weight=weight) for i, (count, weight) in pairs]
    return PromptSource(prompts(sum(counts)), seed=3, shuffle=True, parts=parts)


@settings(deadline=None, max_examples=examples(50, 20))
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 9)), min_size=1, max_size=4))
def test_no_part_is_ever_a_whole_prompt_from_its_share(
    parts: list[tuple[int, float]],
) -> None:
    mixture = Mixture(
        [MixturePart(label=str(i), count=n, weight=w) for i, (n, w) in enumerate(parts)],
        seed=1,
        shuffle=True,
    )
    ends = [sum(n for n, _ in parts[: i + 1]) for i in range(len(parts))]
    given: Counter[int] = Counter()
    for total in range(1, 60):
        item = mixture.next()
        given[next(i for i, end in enumerate(ends) if item < end)] += 1
        for index, (_, weight) in enumerate(parts):
            share = weight / sum(w for _, w in parts) * total
            assert given[index] < share + 1, "never a whole prompt ahead"
            assert given[index] > share - len(parts), "and never far behind"


def test_a_mixture_needs_labels_that_differ() -> None:
    parts = [MixturePart(label="a", count=2), MixturePart(label="a", count=3)]
    with pytest.raises(ValueError, match="labels of a mixture differ"):
        Mixture(parts, seed=0, shuffle=False)


def test_files_of_one_name_in_several_folders_have_different_ids(tmp_path: Path) -> None:
    for folder in ("en", "fr"):
        (tmp_path / folder).mkdir()
        as_jsonl(tmp_path / folder / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    found = read(tmp_path, train=tmp_path / "{en,fr}" / "a.jsonl")
    assert [one.id for one in found.prompts] == [
        *("a.jsonl:1", "a.jsonl:2"),
        *("fr/a.jsonl:1", "fr/a.jsonl:2"),
    ]


def test_a_link_to_a_file_of_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    as_jsonl(folder / "v3.jsonl", [{"prompt": "a"}])
    (folder / "latest.jsonl").symlink_to("v3.jsonl")
    with pytest.raises(DataError, match=r"latest.jsonl, a link to v3.jsonl: the same rows twice"):
        read(tmp_path, train=folder)
    (folder / "v3.jsonl").rename(tmp_path / "v3.jsonl")
    (folder / "latest.jsonl").unlink()
    (folder / "latest.jsonl").symlink_to(tmp_path / "v3.jsonl")
    assert len(read(tmp_path, train=folder).prompts) == 1


def test_an_id_may_be_a_whole_number_that_is_stored_as_a_float(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "id": 1.0}, {"prompt": "b", "id": "x"}])
    assert [one.id for one in read(tmp_path).prompts] == ["1", "x"]
    as_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "id": 1.5}])
    with pytest.raises(DataError, match="`id` is a number"):
        read(tmp_path)


def test_a_mixture_continues_only_with_the_same_sources() -> None:
    whole = source([3, 5], [1.0, 2.5])
    expected = [whole.next().id for _ in range(40)]
    first = source([3, 5], [1.0, 2.5])
    begun = [first.next().id for _ in range(17)]
    second = source([3, 5], [1.0, 2.5])
    second.load_state(json.loads(json.dumps(first.state())))
    assert begun + [second.next().id for _ in range(23)] == expected
    with pytest.raises(DataError, match="has the sources 0, 1, and this run has 0, 1, 2"):
        source([3, 5, 2], [1, 1, 1]).load_state(first.state())
    with pytest.raises(DataError, match="3 prompts there, 4 here"):
        source([4, 5], [1.0, 2.5]).load_state(first.state())


def test_a_mixture_continues_with_renamed_sources_in_their_order() -> None:
    first = source([3, 5], [1.0, 2.5])
    state = first.state()
    renamed = {"sources": dict(zip("ab", state["sources"].values(), strict=True))}
    source([3, 5], [1.0, 2.5]).load_state(renamed)
    exchanged = {"sources": dict(reversed(state["sources"].items()))}
    with pytest.raises(DataError, match="5 prompts there, 3 here"):
        source([3, 5], [1.0, 2.5]).load_state(exchanged)


def test_a_mixture_of_one_has_the_state_of_a_single_file() -> None:
    assert source([5], [1.0]).state() == PromptSource(prompts(5), seed=3, shuffle=True).state()
    assert set(source([5], [1.0]).state()) == {
        "epoch",
        "position",
        "count",
        "seed",
        "shuffle",
        "rows",
        "tokens",
    }


@looped(
    ("data", "what"),
    [
        ({}, "set one of them"),
        ({"train": "a", "sources": [{"path": "b"}]}, "set one of them"),
        ({"sources": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}, "two sources are called x"),
        ({"train": "a", "prompt_key": "q", "messages_key": "m"}, "both name the column"),
        (
            {"sources": [{"path": "a", "prompt_key": "q", "messages_key": "m"}]},
            "both name the column",
        ),
        ({"train": "a", "chat_template_options": {"tokenize": True}}, "set by the run itself"),
    ],
)
def test_contradictory_settings_of_data_are_refused(data: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DataConfig.model_validate(data)


# Conversations


def turns(*texts: str, **last: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    found: list[dict[str, Any]] = [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    found[-1] |= last
    return found


def conversations(tmp_path: Path, *rows: list[dict[str, Any]]) -> PromptSet:
    as_jsonl(tmp_path / "d.jsonl", [{"messages": row} for row in rows])
    found: PromptSet = read(tmp_path / "d.jsonl", supervised=True, messages_key="messages")
    return found


def masked(tmp_path: Path, messages: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the prompt, and the following text with `.` for each token that is not trained on."""
    (prompt,) = conversations(tmp_path, messages).prompts
    given = prompt.fields["response"]
    assert isinstance(given, TrainingConversation)
    assert given.prompt_ids == prompt.token_ids
    tokens = ["$" if i == 1 else chr(i - 2) for i in given.ids]
    shown = "".join(one if keep else "." for one, keep in zip(tokens, given.mask, strict=True))
    return prompt.text, "".join(tokens), shown


def test_the_loss_covers_the_assistant_and_its_end_of_turn(tmp_path: Path) -> None:
    assert masked(tmp_path, turns("hi", "yes", "why", "so", "thanks")) == (
        "u:hi\x01\na:",
        "yes$\nu:why$\na:so$",
        "yes$..........so$",
    )
    messages = turns("hi", "yes", "why", "so")
    messages[1]["train"] = False
    assert masked(tmp_path, messages) == (
        "u:hi\x01\na:yes\x01\nu:why\x01\na:",
        "so$",
        "so$",
    )


def test_a_conversation_trains_like_a_given_response(tmp_path: Path) -> None:
    found = conversations(tmp_path, turns("hi", "yes", "why", "so"))
    source = SupervisedSource(
        found.prompts, Bytes(), prompts_per_step=1, seed=1, shuffle=False, max_context=None
    )
    (sample,) = samples_in(source.next_batch(2))
    assert sample.loss_mask.tolist() == [1] * 4 + [0] * 10 + [1] * 3
    assert sample.versions.tolist() == [2] * 17


def test_a_position_of_other_responses_to_a_chat_is_refused(tmp_path: Path) -> None:
    def source(answer: str) -> SupervisedSource:
        rows = [{"prompt": turns("hi"), "response": answer}]
        as_jsonl(tmp_path / "d.jsonl", rows)
        found = read(tmp_path / "d.jsonl", supervised=True).prompts
        assert isinstance(found[0].fields["response"], TrainingConversation)
        return SupervisedSource(
            found, Bytes(), prompts_per_step=1, seed=1, shuffle=False, max_context=None
        )

    saved = source("so").state()
    source("so").load_state(saved)
    with pytest.raises(DataError, match="1 prompts there and here, with other text"):
        source("no").load_state(saved)


class Forgetful(Bytes):
    """Template that shortens an answer if a message follows, as templates that drop thoughts do."""

    def render_chat(self, messages: Any, *, answer: bool, tools: Any = None) -> str:
        kept = [
            one | {"content": "-"}
            if one["role"] == "assistant" and (answer or one is not messages[-1])
            else one
            for one in messages
        ]
        return super().render_chat(kept, answer=answer)


class Thoughtful(Bytes):
    """Template whose beginning of an answer is not a prefix of a written answer."""

    def render_chat(self, messages: Any, *, answer: bool, tools: Any = None) -> str:
        return super().render_chat(messages, answer=answer) + "?" * answer


@pytest.mark.parametrize("tokenizer", [Forgetful(), Thoughtful()])
def test_a_template_with_other_prefixes_is_refused_with_the_message(
    tmp_path: Path, tokenizer: Bytes
) -> None:
    as_jsonl(tmp_path / "d.jsonl", [{"messages": turns("hi", "yes", "why", "so")}])
    config = DataConfig(train=tmp_path / "d.jsonl", messages_key="messages")
    with pytest.raises(DataError, match=r"d.jsonl:1: .*messages\[1\] differently") as caught:
        read_training(config, tokenizer, supervised=True)
    assert "`train: false` in the others" in caught.value.fix


@looped(
    ("messages", "what"),
    [
        (turns("hi"), "has no message of the assistant to train on"),
        (turns("hi", "yes", train=False), "has no message of the assistant to train on"),
        (turns("hi", "yes", train="no"), r"messages\[1\] has `train`: 'no'"),
        (
            turns("hi", "yes", "why", train=True),
            r"messages\[2\] is the user's and has `train`: true",
        ),
        (turns("hi", "yes", weight=0.5), r"messages\[1\] has `weight`: 0.5"),
        (turns("hi", "yes", weight=0), "has no message of the assistant to train on"),
        (
            turns("hi", "yes", weight=0, train=True),
            r"messages\[1\] has `train`: True and `weight`: 0",
        ),
        ([{"role": "assistant", "content": "yes"}], r"messages\[0\] is the assistant's"),
    ],
)
def test_a_conversation_without_trained_messages_is_refused(
    tmp_path: Path, messages: list[dict[str, Any]], what: str
) -> None:
    with pytest.raises(DataError, match=rf"d.jsonl:1: {what}"):
        conversations(tmp_path, messages)


def test_an_empty_answer_without_an_end_of_turn_is_named(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = characters(tmp_path / "model", template)
    as_jsonl(tmp_path / "d.jsonl", [{"messages": turns("hi", "", "why", "so")}])
    config = DataConfig(train=tmp_path / "d.jsonl", messages_key="messages")
    with pytest.raises(
        DataError, match=r"d.jsonl:1: messages\[1\] is empty, and the chat template"
    ):
        read_training(config, tokenizer, supervised=True)

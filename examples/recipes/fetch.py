"""Fetch what a recipe needs, once: its model and its data.

    python examples/recipes/fetch.py RECIPE.yaml

The model is `Qwen/NAME` on the Hugging Face hub, where NAME is the last part of `model.path`. DATA
names the data set, under the name of `data.train`'s folder. Prompts are chat messages, so that
the model's own template is used. Files that exist stay. HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are the hub library's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download, snapshot_download

from megatron_async_rl.config.yaml_tree import read_tree

ASKED = "Work it out step by step, and write the answer, a number, in \\boxed{}."
READY = ".fetched"
"""A file in the model's folder: all of it is there."""


def after_rule(answer: str) -> str:
    """GSM8K's answers follow `####` in their last line."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def whole_number(answer: str) -> str:
    """Answers of contests have leading zeros, such as 033."""
    return str(int(answer)) if answer.strip().isdecimal() else answer.strip()


@dataclass(frozen=True)
class Table:
    """A Parquet file of a data set on the hub, its columns of problems and answers, and how to read
    an answer."""

    repository: str
    file: str
    problem: str
    answer: str
    read: Callable[[str], str]


DATA: Mapping[str, Mapping[str, Table]] = {
    "gsm8k": {  # 8,792 word problems of grade school
        "train.jsonl": Table(
            "openai/gsm8k", "main/train-00000-of-00001.parquet", "question", "answer", after_rule
        ),
        "test.jsonl": Table(
            "openai/gsm8k", "main/test-00000-of-00001.parquet", "question", "answer", after_rule
        ),
    },
    # 14,116 contest problems in English, without duplicates, and the 30 of AIME 2024.
    "dapo_math_17k": {
        "train.jsonl": Table(
            "open-r1/DAPO-Math-17k-Processed",
            "en/train-00000-of-00001.parquet",
            "prompt",
            "solution",
            whole_number,
        ),
        "aime24.jsonl": Table(
            "HuggingFaceH4/aime_2024",
            "data/train-00000-of-00001.parquet",
            "problem",
            "answer",
            whole_number,
        ),
    },
}
"""Folder of the data -> its files."""


def prompts(table: Table, rows: Iterable[Mapping[str, str]]) -> list[dict[str, object]]:
    """Lines of a data file from the rows of a table."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{row[table.problem].strip()}\n{ASKED}"}],
            "answer": table.read(row[table.answer]),
        }
        for row in rows
    ]


def fetch_data(folder: Path) -> None:
    if folder.name not in DATA:
        sys.exit(f"fetch.py: the folder of data.train is {folder.name}, none of {', '.join(DATA)}")
    for name, table in DATA[folder.name].items():
        file = folder / name
        if file.exists():
            continue
        fetched = hf_hub_download(table.repository, table.file, repo_type="dataset")
        lines = [json.dumps(line) for line in prompts(table, pq.read_table(fetched).to_pylist())]
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.replace(file)


def fetch_model(folder: Path) -> None:
    if not (folder / READY).exists():
        files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        snapshot_download(f"Qwen/{folder.name}", local_dir=folder, allow_patterns=files)
        (folder / READY).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    file = parser.parse_args().recipe.resolve()
    recipe = read_tree(file.read_text(encoding="utf-8"))[0]
    data, model = (file.parent / recipe[a][b] for a, b in (("data", "train"), ("model", "path")))
    try:
        fetch_data(data.resolve().parent)
        fetch_model(model.resolve())
    except OSError as error:  # the hub library's own errors, of the network and of the disk
        sys.exit(
            f"fetch.py: {type(error).__name__}: {error}\n"
            f"Without the hub, put the model into {model.resolve()} (and an empty file {READY}"
            " in it) and the data into"
            f" {data.resolve().parent}"
        )


if __name__ == "__main__":
    main()

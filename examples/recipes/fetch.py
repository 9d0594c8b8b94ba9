"""Fetches what a recipe needs, once: its model, and GSM8K (8,792 word problems with their answers).

    python examples/recipes/fetch.py RECIPE.yaml

The model named by the last part of `model.path` comes from Qwen's pages of the Hugging Face hub; prompts are chat messages, so
that the model's own template is used. What is there already stays. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
are the hub library's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download, snapshot_download

from megatron_async_rl.config.yaml_tree import read_tree

ASKED = "Work it out step by step, and write the answer, a number, in \\boxed{}."
READY = ".fetched"
"""A file in the model's folder: all of it is there."""


def prompts(rows: Iterable[Mapping[str, str]]) -> list[dict[str, object]]:
    """Lines of a data file from GSM8K's rows, whose answer follows `####` in their last line."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{row['question'].strip()}\n{ASKED}"}],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }
        for row in rows
    ]


def fetch_data(folder: Path) -> None:
    for part in ("train", "test"):
        file = folder / f"{part}.jsonl"
        if file.exists():
            continue
        table = hf_hub_download(
            "openai/gsm8k", f"main/{part}-00000-of-00001.parquet", repo_type="dataset"
        )
        lines = [json.dumps(line) for line in prompts(pq.read_table(table).to_pylist())]
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
            f"Without the hub, put the model into {model.resolve()} (and an empty file {READY} beside it) and the data into"
            f" {data.resolve().parent}"
        )


if __name__ == "__main__":
    main()

"""The container command of docs/one_gpu_node.md mounts the files of its config and reserves the
shared memory that the plan counts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.dev_shm import shared_memory, shm_size
from megatron_async_rl.plan.machine import GIB, described_machine
from megatron_async_rl.plan.memory import engine_memory
from megatron_async_rl.plan.model_files import ModelShape, read_model
from tests.written_run import write_model, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "one_gpu_node.md").read_text()
DENSE = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
QWEN3: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": dict(zip(SIZES, (1024, 28, 16, 3072), strict=True)),
    "Qwen3-1.7B": dict(zip(SIZES, (2048, 28, 16, 6144), strict=True)),
    "Qwen3-4B": dict(zip(SIZES, (2560, 36, 32, 9728), strict=True)),
    "Qwen3-8B": dict(zip(SIZES, (4096, 36, 32, 12288), strict=True))
    | {"tie_word_embeddings": False},
    "Qwen3-32B": dict(zip(SIZES, (5120, 64, 64, 25600), strict=True))
    | {"tie_word_embeddings": False},
}
"""Values of each model's published config.json."""
ROWS = re.findall(r"^\| (Qwen3-\S+) \| ([\d.]+) GiB \| `(--shm-size=\d+g)` \|$", PAGE, re.MULTILINE)


def shape(tmp_path: Path, name: str) -> ModelShape:
    model, problems = read_model(write_model(tmp_path / "shape", **DENSE | QWEN3[name]))
    assert model is not None, problems
    return model


def needed(tmp_path: Path, name: str, file: Path | None = None) -> tuple[int, str]:
    """Return the bytes of weights in /dev/shm, and Docker's option."""
    model = shape(tmp_path, name)
    config = load(file or write_run(tmp_path), ["model.dtype=bfloat16"])
    engine = engine_memory(config, model, on_gpu=True)
    machine = described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    longest = config.rollout.max_context if config.rollout is not None else 0
    weights, store, _ = shared_memory(config, engine, machine, longest or 1)
    return weights, shm_size(weights, store)


def command() -> list[str]:
    (line,) = re.findall(r"^docker run .*$", PAGE, re.MULTILINE)
    return shlex.split(line.replace("$PWD", "/here"))


def math_yaml() -> str:
    (text,) = re.findall(r"```yaml\n(# math\.yaml\n.*?)```", PAGE, re.DOTALL)
    return str(text)


def test_the_table_lists_every_model() -> None:
    assert [name for name, _, _ in ROWS] == list(QWEN3)


@pytest.mark.parametrize(("name", "versions", "option"), ROWS)
def test_the_documented_shared_memory_is_that_of_the_plan(
    tmp_path: Path, name: str, versions: str, option: str
) -> None:
    weights, wanted = needed(tmp_path, name)
    assert (f"{weights / GIB:.1f}", option) == (versions, wanted)


def test_the_command_reserves_enough_shared_memory_for_its_config(tmp_path: Path) -> None:
    (option,) = (word for word in command() if word.startswith("--shm-size="))
    (tmp_path / "math.yaml").write_text(math_yaml())
    name = Path(yaml.safe_load(math_yaml())["model"]["path"]).name
    assert option == needed(tmp_path, name, tmp_path / "math.yaml")[1]


def test_all_files_of_the_config_are_mounted_and_written_as_the_caller() -> None:
    words = command()
    values = [words[at + 1] for at, word in enumerate(words) if word == "-v"]
    mounts = {parts[1]: parts[2:] for parts in (value.split(":") for value in values)}
    tree = yaml.safe_load(math_yaml())
    read = [tree["model"]["path"], tree["data"]["train"], tree["data"]["eval"]]
    for path in read:
        assert any(path.startswith(f"{mount}/") for mount in mounts), path
    written = [mount for mount in mounts if tree["run"]["dir"].startswith(f"{mount}/")]
    assert [mounts[mount] for mount in written] == [[]], "not read-only"
    assert words[words.index("-w") + 1] in mounts, "math.yaml"
    assert words[words.index("--user") + 1] == "$(id -u):$(id -g)"

"""The parameters of published 32B models, cut over TP=8 and PP=4, against those of transformers'
model of the same configuration; both on the meta device."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parallel.ranks import run_alone
from tests.published_models import write_config

pytestmark = pytest.mark.parallel

TENSORS = {"Qwen3-32B": 707, "Qwen2.5-32B": 771}
STAGES, TENSOR = 4, 8
LAYOUT = {"tensor": TENSOR, "pipeline": STAGES, "sequence": "true"}
DATA = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parameter_map")
    (folder / "run.yaml").write_text(
        json.dumps(
            {
                "run": {"dir": "runs/x", "steps": 1},
                "model": {"path": "nowhere", "dtype": "bfloat16"},
                "data": {"train": "train.jsonl"},
                "flow": {"prompts_per_step": 64, "group_size": 8, "async_ratio": 1},
                "rollout": {"sampling": {"max_tokens": 8}, "reward": {"name": "arithmetic"}},
            }
        )
    )

    def of(name: str, data: int) -> tuple[str, list[str]]:
        sizes = LAYOUT | {"ranks": STAGES * TENSOR * data}
        overrides = [f"policy.parallel.{key}={value}" for key, value in sizes.items()]
        return str(folder / "run.yaml"), [f"model.path={folder / name}", *overrides]

    for name in TENSORS:
        write_config(folder / name, name)
    models = [*(of(name, 1) for name in TENSORS), of("Qwen3-32B", DATA)]
    output = folder / "mapped.json"
    run_alone("tests.parallel.map_program", [json.dumps(models), output])
    read = json.loads(output.read_text())
    return dict(zip(TENSORS, read["mapped"], strict=True)) | {"adam": read["adam"][0], "at": folder}


def reference(folder: Path) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def cover_once(shape: list[int], starts: np.ndarray, stops: np.ndarray, name: str) -> None:
    assert (stops <= np.array(shape)).all(), name
    assert prod(shape) == (stops - starts).prod(axis=1).sum(), name
    for one, (start, stop) in enumerate(zip(starts[:-1], stops[:-1], strict=True)):
        beside = (starts[one + 1 :] >= stop) | (stops[one + 1 :] <= start)
        assert beside.any(axis=1).all(), name


@pytest.mark.parametrize("name", TENSORS)
def test_stages_have_the_names_and_shapes_of_transformers_once(found, name):
    expected, entries = reference(found["at"] / name), found[name]["entries"]
    assert len(expected) == TENSORS[name]
    stages = [entries[stage * TENSOR] for stage in range(STAGES)]
    pairs = [pair for own in stages for entry in own for pair in entry[1].items()]
    assert len(pairs) == TENSORS[name]
    assert dict(pairs) == expected
    here = [[entry[:-1] for entry in own] for own in entries]
    assert all(here[rank] == here[rank // TENSOR * TENSOR] for rank in range(STAGES * TENSOR))


@pytest.mark.parametrize("name", TENSORS)
def test_shards_of_tensor_parallel_ranks_add_up_to_each_tensor(found, name):
    for own in found[name]["entries"]:
        for parameter, whole, shard, cut, _ in own:
            ranks = TENSOR if cut is not None else 1
            assert ranks * prod(shard) == sum(map(prod, whole.values())), parameter


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_parallel_ranks_read_every_element_of_the_files_once(found, name):
    """Of what is not cut, each reads all."""
    shapes = reference(found["at"] / name)
    for stage in range(STAGES):
        places: dict[str, set[Any]] = {}
        for own in found[name]["entries"][stage * TENSOR : (stage + 1) * TENSOR]:
            for *_, read in own:
                for tensor, offsets, size in read:
                    places.setdefault(tensor, set()).add((*offsets, *size))
        for tensor, boxes in places.items():
            held = np.array(sorted(boxes))
            shape = shapes[tensor] + [1] * (2 - len(shapes[tensor]))
            cover_once(shape, held[:, :2], held[:, :2] + held[:, 2:], tensor)


@pytest.mark.parametrize("name", TENSORS)
def test_what_ranks_write_covers_every_element_once(found, name):
    boxes, elements = found[name]["boxes"], 0
    for key, (shape, held) in boxes.items():
        starts = np.array([offsets for offsets, _ in held])
        cover_once(shape, starts, starts + np.array([size for _, size in held]), key)
        elements += prod(shape)
    assert elements == sum(map(prod, reference(found["at"] / name).values()))


def test_replicas_adams_have_every_element_of_a_ranks_parameters_once(found):
    sizes, parts = {}, {}
    for own in found["adam"]:
        for name, elements, start, end in own:
            sizes[name] = elements
            parts.setdefault(name, []).append((start, end))
    assert len(found["adam"]) == DATA
    # Two replicas cut one parameter between them, and have others whole.
    assert {len(held) for held in parts.values()} == {1, 2}
    assert len(sizes) == len(found["Qwen3-32B"]["entries"][0])
    for name, held in parts.items():
        ends = [0, *(place for part in sorted(held) for place in part), sizes[name]]
        assert all(a == b for a, b in list(pairwise(ends))[::2]), name

"""The parameters of published 32B models, cut over TP=8 and PP=4, and of every recipe's model on
its layout, against those of transformers' model of the same configuration; both on the meta
device."""

from __future__ import annotations

import functools
import itertools
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parallel.ranks import run_alone
from tests.published_models import write_config
from tests.thorough import THOROUGH, chosen

pytestmark = pytest.mark.parallel

TENSORS = {"Qwen3-32B": 707, "Qwen2.5-32B": 771}
LAYERS = None if THOROUGH else 8
"""Layers of each model; None: as many as are published."""
STAGES, TENSOR = 4, 8
LAYOUT = {"tensor": TENSOR, "pipeline": STAGES, "sequence": "true"}
DATA = 2
RECIPES = {
    "qwen2.5_32b": "Qwen2.5-32B",
    "qwen3_0.6b": "Qwen3-0.6B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_32b_fp8": "Qwen3-32B",
    "qwen3_8b": "Qwen3-8B",
    "qwen3_8b_colocated": "Qwen3-8B",
}
"""Cases whose model or layout differs."""
MODELS = chosen({name: name for name in TENSORS} | RECIPES, "Qwen3-32B", "qwen3_30b_a3b")
"""The gate has one with each way to cut a stage: tensor-parallel ranks, and ranks with experts."""


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
    for name in {"Qwen3-32B", *MODELS.values()}:
        write_config(folder / name, name)
        if LAYERS is not None:
            file = folder / name / "config.json"
            settings = json.loads(file.read_text())
            file.write_text(json.dumps(settings | {"num_hidden_layers": LAYERS}))

    def of(name: str, data: int) -> tuple[str, list[str]]:
        sizes = LAYOUT | {"ranks": STAGES * TENSOR * data}
        overrides = [f"policy.parallel.{key}={value}" for key, value in sizes.items()]
        return str(folder / "run.yaml"), [f"model.path={folder / name}", *overrides]

    recipes = Path(__file__).parents[2] / "examples" / "recipes"
    models = [of(name, 1) for name in MODELS if name in TENSORS]
    for recipe, name in ((recipe, name) for recipe, name in MODELS.items() if recipe in RECIPES):
        # In 8 bits a parameter has the same name, shape and part.
        overrides = [f"model.path={folder / name}", "policy.fp8=null", "policy.layers=local"]
        models.append((str(recipes / f"{recipe}.yaml"), overrides))
    output = folder / "mapped.json"
    arguments = [json.dumps(models), json.dumps(of("Qwen3-32B", DATA)), output]
    run_alone("tests.parallel.map_program", arguments)
    read = json.loads(output.read_text())
    return dict(zip(MODELS, read["mapped"], strict=True)) | {"adam": read["adam"], "at": folder}


@functools.cache
def reference(folder: Path) -> dict[str, list[int]]:
    """Names and shapes in files. A tied output layer is in none, and experts, which transformers
    has in one tensor, lie there one by one."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    for name in [name for name in found if ".mlp.experts." in name]:
        count, rows, columns = found.pop(name)
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, part in itertools.product(range(count), parts):
            found[f"{prefix}.{expert}.{part}.weight"] = [rows // len(parts), columns]
    return found


def cover_once(shape: list[int], starts: np.ndarray, stops: np.ndarray, name: str) -> None:
    assert (stops <= np.array(shape)).all(), name
    assert prod(shape) == (stops - starts).prod(axis=1).sum(), name
    for one, (start, stop) in enumerate(zip(starts[:-1], stops[:-1], strict=True)):
        beside = (starts[one + 1 :] >= stop) | (stops[one + 1 :] <= start)
        assert beside.any(axis=1).all(), name


def tensors_of(found: dict[str, Any], name: str) -> dict[str, list[int]]:
    return reference(found["at"] / MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_names_and_shapes_of_transformers_once(found, name):
    expected, read = tensors_of(found, name), found[name]
    if LAYERS is None:
        assert len(expected) == TENSORS.get(name, len(expected))
    stages: list[dict[str, list[int]]] = [{} for _ in set(read["stages"])]
    for stage, own in zip(read["stages"], read["entries"], strict=True):
        for _, tensors, *_ in own:
            for tensor, shape in tensors.items():
                assert stages[stage].setdefault(tensor, shape) == shape
    assert sum(map(len, stages)) == len(expected)
    assert {tensor: shape for own in stages for tensor, shape in own.items()} == expected


@pytest.mark.parametrize("name", MODELS)
def test_ranks_read_every_element_of_the_files_once(found, name):
    """Ranks that hold the same elements all read them."""
    shapes, places = tensors_of(found, name), {}
    for own in found[name]["entries"]:
        for *_, read in own:
            for tensor, offsets, size in read:
                places.setdefault(tensor, set()).add((*offsets, *size))
    assert places.keys() == shapes.keys()
    for tensor, boxes in places.items():
        held = np.array(sorted(boxes))
        shape = shapes[tensor] + [1] * (2 - len(shapes[tensor]))
        cover_once(shape, held[:, :2], held[:, :2] + held[:, 2:], tensor)


@pytest.mark.parametrize("name", MODELS)
def test_what_ranks_write_covers_every_element_once(found, name):
    boxes, elements = found[name]["boxes"], 0
    for key, (shape, held) in boxes.items():
        starts = np.array([offsets for offsets, _ in held])
        cover_once(shape, starts, starts + np.array([size for _, size in held]), key)
        elements += prod(shape)
    assert elements == sum(map(prod, tensors_of(found, name).values()))


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
        assert all(a == b for a, b in list(itertools.pairwise(ends))[::2]), name

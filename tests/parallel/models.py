"""Data of the model tests: tiny checkpoints, sequences, and each layout's results, computed once
per test session."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_async_rl.samples.types import Prompt, Sample
from tests.parallel.ranks import run_ranks
from tests.thorough import THOROUGH, chosen
from tests.tiny_models import FAMILIES, save_tiny_model

LAYOUTS = chosen(
    {
        "single": {"ranks": 1},
        "tensor": {"ranks": 2, "tensor": 2},
        "sequence": {"ranks": 2, "tensor": 2, "sequence": True},
        "pipeline": {"ranks": 2, "pipeline": 2},
        "virtual_pipeline": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
        "tensor_pipeline": {"ranks": 4, "tensor": 2, "pipeline": 2},
        "data": {"ranks": 2, "distributed_optimizer": True},
    },
    "single",
    "sequence",
    "virtual_pipeline",
    "data",
)
"""The gate divides in one dimension at a time. Virtual stages include pipeline stages, and sequence
parallelism includes tensor parallelism."""
MIXTURE_LAYOUTS = chosen(
    {
        "mixture_single": {"ranks": 1},
        "expert": {"ranks": 2, "expert": 2},
        "expert_pipeline": {"ranks": 4, "expert": 2, "pipeline": 2},
        "expert_tensor": {"ranks": 4, "expert": 2, "tensor": 2, "sequence": True},
    },
    "mixture_single",
    "expert",
)
"""These run models with experts, the others dense ones."""
ALL_LAYOUTS = {**LAYOUTS, **MIXTURE_LAYOUTS}
LOADS_FROM = {
    "single": "tensor_pipeline" if THOROUGH else "virtual_pipeline",
    "tensor": "sequence",
    "sequence": "",
    "pipeline": "data",
    "virtual_pipeline": "sequence",
    "tensor_pipeline": "sequence",
    "data": "virtual_pipeline",
    "mixture_single": "expert",
    "expert": "",
    "expert_pipeline": "mixture_single",
    "expert_tensor": "expert",
}
"""Whose checkpoint a layout also loads: always another layout's, in an order without circles."""
VOCABULARY = 96
LAYERS = 4
"""Enough for two pipeline ranks with two virtual stages each."""
TEMPERATURE = 0.7
CHECKPOINTED = {"dense": "qwen3-tied-odd", "mixture": "mixture"}
"""The models that are trained a little, saved and loaded."""
FAULTY = ("qwen3-untied", "mixture-not-normalised")
"""The models whose staged weights are damaged."""
DENSE = (
    "llama-untied",
    "llama-tied",
    "qwen2-untied",
    "qwen2-tied",
    "qwen3-untied",
    "qwen3-tied",
    "qwen3-tied-odd",
    "qwen2-untied-odd",
    "llama-llama3-rope",
    "llama-linear-rope",
)
MIXTURES = ("mixture", "mixture-not-normalised")
CUT_ALIKE = (
    "llama-untied",
    "llama-tied",
    "qwen2-untied",
    "qwen2-tied",
    "llama-llama3-rope",
    "llama-linear-rope",
)
"""Models whose tensors are cut as those of other models are: they lack a bias or the norms of
queries and keys, or have another rotation, which no rank divides. The gate runs them on one
rank."""


def models_of(layout: str) -> tuple[str, ...]:
    """Return the models that a layout runs in float32."""
    if layout in MIXTURE_LAYOUTS:
        return MIXTURES
    alike = () if THOROUGH or layout == "single" else CUT_ALIKE
    return tuple(model for model in DENSE if model not in alike)


CASES = [(layout, model) for layout in ALL_LAYOUTS for model in models_of(layout)]

_directories: list[tempfile.TemporaryDirectory] = []


def temporary() -> Path:
    _directories.append(tempfile.TemporaryDirectory(prefix="mar-models-"))
    return Path(_directories[-1].name)


def kind_of(layout: str) -> str:
    return "mixture" if layout in MIXTURE_LAYOUTS else "dense"


def source_of(model: str) -> Path:
    return material("mixture" if model in MIXTURES else "dense") / model


@functools.cache
def material(kind: str) -> Path:
    directory = temporary()
    torch.save(sequences(), directory / "samples.pt")
    if kind == "mixture":
        save_tiny_model(
            directory / "mixture", "qwen3_moe", tied=True, vocab_size=VOCABULARY + 1, seed=8
        )
        save_tiny_model(
            directory / "mixture-not-normalised",
            "qwen3_moe",
            vocab_size=VOCABULARY,
            seed=9,
            norm_topk_prob=False,
        )
        return directory
    for family in FAMILIES:
        for tied in (False, True):
            save_tiny_model(
                directory / f"{family}-{'tied' if tied else 'untied'}",
                family,
                tied=tied,
                vocab_size=VOCABULARY,
                layers=LAYERS,
                seed=len(family),
            )
    save_tiny_model(
        directory / "qwen3-tied-odd",
        "qwen3",
        tied=True,
        vocab_size=VOCABULARY + 1,
        layers=LAYERS,
        seed=5,
    )
    save_tiny_model(
        directory / "qwen2-untied-odd",
        "qwen2",
        vocab_size=VOCABULARY + 1,
        layers=LAYERS,
        seed=6,
        max_shard_size="20KB",
    )
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    save_tiny_model(
        directory / "llama-llama3-rope",
        "llama",
        rope_parameters={**llama3, "original_max_position_embeddings": 8192},
        layers=LAYERS,
        max_position_embeddings=65536,
    )
    save_tiny_model(
        directory / "llama-linear-rope",
        "llama",
        layers=LAYERS,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    )
    save_tiny_model(directory / "one-layer", "qwen3", tied=True, layers=1, seed=10)
    save_tiny_model(
        directory / "qwen3-bfloat16",
        "qwen3",
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        layers=LAYERS,
        seed=7,
    )
    return directory


def sequences() -> list[Sample]:
    rng = np.random.default_rng(3)
    samples = []
    for index, (prompt, response) in enumerate([(3, 5), (7, 1), (1, 12), (9, 30), (2, 2), (5, 17)]):
        ids = rng.integers(0, VOCABULARY, prompt + response)
        samples.append(
            Sample(
                id=str(index),
                prompt=Prompt(
                    id=str(index), text="", token_ids=tuple(int(i) for i in ids[:prompt])
                ),
                response_ids=ids[prompt:].astype(np.int32),
                behavior_logprobs=np.zeros(response, np.float32),
                versions=np.zeros(response, np.int32),
                loss_mask=np.ones(response, np.uint8),
                text="",
                finish_reason="stop",
                reward=0.0,
            )
        )
    return samples


def results(layout: str) -> list[dict]:
    """Per rank, what model_program measured. A layout that failed once fails at once for every
    later test."""
    outcome = _outcome(layout)
    if isinstance(outcome, AssertionError):
        raise outcome
    return outcome


@functools.cache
def _outcome(layout: str) -> list[dict] | AssertionError:
    output = directory_of(layout)
    other = directory_of(LOADS_FROM[layout]) / "checkpoint" if LOADS_FROM[layout] else ""
    settings, kind = ALL_LAYOUTS[layout], kind_of(layout)
    models = models_of(layout) + (() if kind == "mixture" else ("qwen3-bfloat16",))
    try:
        if LOADS_FROM[layout]:
            results(LOADS_FROM[layout])
        run_ranks(
            settings["ranks"],
            "tests.parallel.model_program",
            [material(kind), json.dumps(settings), output, other, *models],
        )
    except AssertionError as failure:
        return failure
    return [
        torch.load(output / f"results_{rank}.pt", weights_only=False)
        for rank in range(settings["ranks"])
    ]


@functools.cache
def directory_of(layout: str) -> Path:
    return temporary()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors in the safetensors files of a model directory."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def as_transformers_loads(directory: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory after transformers has read it, under the names it writes;
    nothing may be missing."""
    import transformers

    model, problems = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(
        problems[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    model.save_pretrained(scratch)
    return tensors_of(scratch)


@functools.cache
def reference_logprobs(model: str) -> list[torch.Tensor]:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source_of(model), dtype=torch.float32
    )
    found = []
    for sample in sequences():
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids.tolist()]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1] / TEMPERATURE
        found.append(
            torch.log_softmax(logits, -1).gather(1, ids[0, len(sample.prompt.token_ids) :, None])[
                :, 0
            ]
        )
    return found

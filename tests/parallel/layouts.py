"""Models, batches and layouts of the layout tests, and each layout's results, computed once per
test session."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_async_rl.samples.rows import TrainBatch
from tests.parallel.layout_program import TEMPERATURE
from tests.parallel.ranks import run_ranks
from tests.ports import rank_stores
from tests.thorough import THOROUGH, chosen
from tests.tiny_models import save_tiny_model
from tests.train_batches import groups_of, ragged_batch

VOCABULARY = 97
"""Odd, so that two tensor-parallel ranks need a padding row."""
BLANK = VOCABULARY - 1
"""A token whose embedding is all zeros in the models named `..._blank`, as that of padding is."""
MAX_LAYERS = 4
"""Layers of the models of `make test-all` and of tests/gpu."""
LAYERS = MAX_LAYERS if THOROUGH else 2
"""Enough for two pipeline ranks, and in `make test-all` for two virtual stages on each. In the
gate, test_wide_layouts.py and test_differential.py have virtual stages."""
LAYOUTS = {
    "single": {"ranks": 1},
    "tensor": {"ranks": 2, "tensor": 2},
    "sequence": {"ranks": 2, "tensor": 2, "sequence": True},
    "pipeline": {"ranks": 2, "pipeline": 2},
    "virtual_pipeline": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "data_distributed_optimizer": {"ranks": 2, "distributed_optimizer": True},
    "data_replicated_optimizer": {"ranks": 2, "distributed_optimizer": False},
    "tensor_pipeline": {"ranks": 4, "tensor": 2, "pipeline": 2},
}
DISTINCT = {
    name: LAYOUTS[name]
    for name in LAYOUTS
    if name not in ("tensor", "pipeline" if THOROUGH else "virtual_pipeline")
}
"""Layouts of programs that need not run on every layout: `sequence`, `virtual_pipeline` (in the
gate `pipeline`) and `tensor_pipeline` also cover tensor and pipeline parallelism alone."""
MIXTURE_LAYOUTS = {
    "mixture_single": {"ranks": 1},
    "expert": {"ranks": 2, "expert": 2},
    "expert_replicated_optimizer": {"ranks": 2, "expert": 2, "distributed_optimizer": False},
    "expert_tensor": {"ranks": 4, "expert": 2, "tensor": 2, "sequence": True},
}
"""Layouts of the model with experts."""
ALL_LAYOUTS = {**LAYOUTS, **MIXTURE_LAYOUTS}
CONTEXT_LAYOUTS = {"context": {"ranks": 2, "context": 2}}
"""Layouts of the tied dense model."""
EVERY_LAYOUT = {**ALL_LAYOUTS, **CONTEXT_LAYOUTS}
GRADIENT_LAYOUTS = chosen(
    {
        "context_replicated": {"ranks": 2, "context": 2, "distributed_optimizer": False},
        "context_tensor": {"ranks": 4, "context": 2, "tensor": 2, "sequence": True},
        "context_pipeline_replicated": {
            "ranks": 4,
            "context": 2,
            "pipeline": 2,
            "distributed_optimizer": False,
        },
        "context_virtual_pipeline": {
            "ranks": 4,
            "context": 2,
            "pipeline": 2,
            "virtual_pipeline": 2,
            "distributed_optimizer": False,
        },
        "expert_context": {"ranks": 4, "expert": 2, "context": 2, "distributed_optimizer": False},
        "data_tensor_replicated": {"ranks": 4, "tensor": 2, "distributed_optimizer": False},
        "data_tensor_distributed": {"ranks": 4, "tensor": 2},
        "data_pipeline_replicated": {"ranks": 4, "pipeline": 2, "distributed_optimizer": False},
        "data_pipeline_distributed": {"ranks": 4, "pipeline": 2},
        "virtual_pipeline_tensor": {"ranks": 4, "pipeline": 2, "virtual_pipeline": 2, "tensor": 2},
        "expert_replicas": {"ranks": 4, "expert": 2, "distributed_optimizer": False},
        "expert_replicas_distributed": {"ranks": 4, "expert": 2},
        "expert_pipeline": {
            "ranks": 4,
            "expert": 2,
            "pipeline": 2,
            "distributed_optimizer": False,
        },
        "expert_tensor_pipeline": {
            "ranks": 4,
            "expert": 2,
            "tensor": 2,
            "sequence": True,
            "pipeline": 2,
        },
    },
    "context_pipeline_replicated",
    "expert_context",
    "data_tensor_distributed",
    "expert_tensor_pipeline",
)
"""Two dimensions at a time: what decides where a gradient is counted. `objective_program` measures
the gradient alone on these. Those named `expert...` run the model with experts.

The gate keeps four, the last in place of `expert_tensor`. Each part of `GradientShard.counted`
decides on at least one of them (`rules_of` in test_gradient_view.py): tied embeddings, context
replicas and data replicas of a replicated optimizer on the first; replicas of experts on the
second; tensor-parallel copies with a distributed optimizer on the third; and tied embeddings,
copies and experts on the last.
"""


FEW = ("single", "data_distributed_optimizer", "tensor_pipeline" if THOROUGH else "pipeline")
"""Layouts of results that depend on samples and their log-probs alone: divided samples, and a
divided model."""
BEFORE_THE_OPTIMIZER = {
    name: settings
    for name, settings in (DISTINCT | MIXTURE_LAYOUTS | CONTEXT_LAYOUTS).items()
    if settings.get("distributed_optimizer", True)
}
"""Layouts of the forward and backward pass."""


def _named(*names: str) -> dict[str, dict[str, Any]]:
    return {name: EVERY_LAYOUT[name] for name in names}


OFFERED = {
    "layout_program": chosen(
        LAYOUTS | CONTEXT_LAYOUTS,
        "single",
        "sequence",
        "pipeline",
        "data_distributed_optimizer",
        "data_replicated_optimizer",
    ),
    "objective_program": chosen(
        ALL_LAYOUTS,
        "single",
        "pipeline",
        "data_distributed_optimizer",
        "mixture_single",
        "expert",
    )
    | GRADIENT_LAYOUTS,
    "displacement_program": chosen(
        {k: v for k, v in (DISTINCT | MIXTURE_LAYOUTS).items() if v["ranks"] <= 2},
        "single",
        "sequence",
        "data_distributed_optimizer",
    ),
    "packing_program": chosen(
        BEFORE_THE_OPTIMIZER,
        "single",
        "sequence",
        "context",
        "mixture_single",
        "expert",
    ),
    "recompute_program": chosen(BEFORE_THE_OPTIMIZER, "single", "sequence"),
    "lora_program": chosen(
        _named(
            "single",
            "tensor",
            "sequence",
            "virtual_pipeline" if THOROUGH else "pipeline",
            "tensor_pipeline",
            "data_distributed_optimizer",
            "data_replicated_optimizer",
            "context",
            "mixture_single",
            "expert",
            "expert_tensor",
        ),
        "single",
        "tensor",
        "sequence",
        "data_distributed_optimizer",
        "mixture_single",
        "expert",
    ),
    "fp8_program": chosen(
        _named(
            "single",
            "sequence",
            "virtual_pipeline",
            "data_distributed_optimizer",
            "data_replicated_optimizer",
            "context",
            "expert",
            "expert_replicated_optimizer",
        ),
        "single",
        "sequence",
        "data_distributed_optimizer",
        "expert",
    ),
    "minibatch_program": chosen(DISTINCT, "single", "data_distributed_optimizer"),
    "reference_program": chosen(
        {name: settings for name, settings in DISTINCT.items() if settings["ranks"] <= 2},
        "single",
        "pipeline",
        "data_distributed_optimizer",
    ),
    "streamed_program": chosen(
        {name: v for name, v in BEFORE_THE_OPTIMIZER.items() if name != "mixture_single"}
        | _named("data_replicated_optimizer"),
        "data_distributed_optimizer",
        "expert",
    ),
    "value_head_program": chosen(DISTINCT, "single", "sequence", "pipeline"),
    "opob_program": chosen(
        DISTINCT | _named("pipeline"), "single", "sequence", "data_distributed_optimizer"
    ),
}
"""The layouts of each program.

The gate divides a program's samples or model in the ways that its facts depend on most, on as few
ranks as that takes: tensor-parallel ranks with sequence parallelism, which also cut activations;
two pipeline stages; a distributed optimizer, which also cuts parameters. Pairs of dimensions on
four ranks are `objective_program`'s: the gradient there is whole, so what a later part of the step
makes of it depends on one dimension at a time. A program runs on those that it depends on. Other
files of the gate have pipeline stages with packed rows, streamed groups and value heads
(test_wide_layouts.py), with recomputation (test_model_families.py) and with adapters and references
(test_differential.py). Interleaved stages train in test_wide_layouts.py and test_differential.py,
and are saved, loaded and exported in test_checkpoint.py and test_export.py.
"""


_directories: list[tempfile.TemporaryDirectory] = []


def temporary() -> Path:
    """A directory that goes when the test process does."""
    _directories.append(tempfile.TemporaryDirectory(prefix="mar-layouts-"))
    return Path(_directories[-1].name)


def material(layers: int = LAYERS) -> Path:
    """Return a directory with three models, and batches whose behaviour log-probs are near the tied
    model's own, or the mixture's. layers: of the models without experts."""
    return _material(layers)


@functools.cache
def _material(layers: int) -> Path:
    directory = temporary()
    for name, tied in (("tied", True), ("untied", False)):
        save_tiny_model(
            directory / name, tied=tied, seed=1, vocab_size=VOCABULARY, layers=layers, scale=2.0
        )
    save_tiny_model(
        directory / "mixture", "qwen3_moe", tied=True, seed=2, vocab_size=VOCABULARY, scale=2.0
    )
    for name in ("tied", "mixture"):
        save_with_a_blank_token(directory / name, directory / f"{name}_blank")
    raw = [ragged_batch(vocabulary=VOCABULARY, seed=seed) for seed in (0, 1)]
    a, b = (with_behavior(directory / "tied", batch) for batch in raw)
    mixture_a, mixture_b = (with_behavior(directory / "mixture", batch) for batch in raw)
    batches = {
        "a": a,
        "b": b,
        "mixture_a": mixture_a,
        "mixture_routed": with_random_experts(directory / "mixture", mixture_a),
        "mixture_b": mixture_b,
        "a_permuted": permuted(a),
        "usual": without_blank(a),
        "one_blank": with_one_blank(without_blank(a)),
        "mixture_usual": without_blank(mixture_a),
        "mixture_one_blank": with_one_blank(without_blank(mixture_a)),
        "poisoned": replaced(
            a, lambda s: {"behavior_logprobs": np.full(s.length, np.nan, np.float32)}
        ),
        "one_poisoned": replaced(
            a,
            lambda s: {
                "behavior_logprobs": np.full(s.length, np.nan, np.float32)
                if s.id == blamed(a)
                else s.behavior_logprobs
            },
        ),
        "equal": replaced(a, lambda s: {"reward": 0.3}),
        "failed": replaced(a, lambda s: {"reward_error": "raised"}),
        "given": replaced(
            a,
            lambda s: {
                "finish_reason": "given",
                "weight": 0.5 + len(s.id) % 3,
                "reward_error": None,
            },
        ),
    }
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    return directory


def batch(name: str) -> TrainBatch:
    return pickle.loads((material() / "batches.pickle").read_bytes())[name]


@functools.cache
def results(layout: str, program: str = "layout_program") -> dict:
    """The measurements of `program` on this layout."""
    outcome = _results_of_all((EVERY_LAYOUT | GRADIENT_LAYOUTS)[layout]["ranks"], program)
    if isinstance(outcome, AssertionError):
        raise outcome
    return outcome[layout]


@functools.cache
def _results_of_all(ranks: int, program: str) -> dict[str, dict] | AssertionError:
    """The layouts of this many ranks share one start of the processes, which takes longer than the
    steps.
    """
    return run_program(program, material(), OFFERED[program], ranks)


def run_program(
    program: str, material: Path, offered: Mapping[str, Mapping[str, Any]], ranks: int
) -> dict[str, dict] | AssertionError:
    """The measurements of `program` on the layouts of this many ranks, in one start of the
    processes. A failure is returned, so that a cache keeps it: it is waited for once and not by
    every test."""
    chosen = [name for name, settings in offered.items() if settings["ranks"] == ranks]
    output, stores = temporary(), rank_stores(len(chosen))
    arguments = {
        name: (store.port, offered[name]) for name, store in zip(chosen, stores, strict=True)
    }
    try:
        run_ranks(ranks, f"tests.parallel.{program}", [material, json.dumps(arguments), output])
    except AssertionError as failure:
        return failure
    return {name: torch.load(output / f"{name}.pt", weights_only=False) for name in chosen}


def reference_logprobs(model, sample) -> tuple[torch.Tensor, torch.Tensor]:
    """([T] log-probs, [T] entropies) of a sample's response under transformers, at the tests'
    temperature."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids.tolist()]])
    logits = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1] / TEMPERATURE
    distribution = torch.log_softmax(logits, dim=-1)
    picked = distribution.gather(1, ids[0, len(sample.prompt.token_ids) :, None])[:, 0]
    return picked, -(distribution.exp() * distribution).sum(-1)


def reference_model(name: str):
    return loaded(material() / name)


def loaded(model_path: Path):
    """The model under transformers, in float64, which the grouped products that it has for experts
    do not take."""
    import transformers

    experts = {"experts_implementation": "eager"} if model_path.name.startswith("mixture") else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float64, **experts
    )


def save_with_a_blank_token(source: Path, target: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.get_input_embeddings().weight[BLANK] = 0.0
    model.save_pretrained(target)


def without_blank(source: TrainBatch) -> TrainBatch:
    return replaced(
        source,
        lambda s: {
            "prompt": dataclasses.replace(
                s.prompt, token_ids=tuple(min(t, BLANK - 1) for t in s.prompt.token_ids)
            ),
            "response_ids": np.minimum(s.response_ids, BLANK - 1),
        },
    )


def with_one_blank(source: TrainBatch) -> TrainBatch:
    """One trained sample, `blamed`, has sampled the blank token, not as its last."""
    chosen = blamed(source)

    def sampled(sample):
        ids = sample.response_ids.copy()
        ids[1] = BLANK if sample.id == chosen else ids[1]
        return {"response_ids": ids}

    return replaced(source, sampled)


def blamed(source: TrainBatch) -> str:
    """The longest trained sample."""
    trained = [s for group in groups_of(source) for s in group if s.valid]
    return max(trained, key=lambda s: int(s.loss_mask.sum())).id


def replaced(source: TrainBatch, changes) -> TrainBatch:
    groups = [[dataclasses.replace(s, **changes(s)) for s in group] for group in groups_of(source)]
    return TrainBatch.of(source.version, groups)


def permuted(source: TrainBatch) -> TrainBatch:
    rng = np.random.default_rng(5)
    groups = groups_of(source)
    shuffled = [
        [group[k] for k in rng.permutation(len(group))]
        for group in (groups[k] for k in rng.permutation(len(groups)))
    ]
    return TrainBatch.of(source.version, shuffled)


def with_random_experts(model_path: Path, source: TrainBatch) -> TrainBatch:
    """Routed experts that no router chose, so that a shift by one place shows."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model_path)
    rng = np.random.default_rng(4)

    def routed(sample):
        shape = (sample.total_length - 1, config.num_hidden_layers, config.num_experts)
        chosen = rng.random(shape).argsort(axis=-1)[..., : config.num_experts_per_tok]
        return {"routed_experts": chosen.astype(np.uint8).tobytes()}

    return replaced(source, routed)


def experts_of(sample, layers: int) -> torch.Tensor:
    """[layers, tokens but the last, experts per token]."""
    read = torch.frombuffer(bytearray(sample.routed_experts), dtype=torch.uint8).long()
    return read.view(sample.total_length - 1, layers, -1).transpose(0, 1)


def with_behavior(model_path: Path, source: TrainBatch) -> TrainBatch:
    model = loaded(model_path)
    rng = np.random.default_rng(9)

    @torch.no_grad()
    def noisy(sample):
        return {
            "behavior_logprobs": (
                reference_logprobs(model, sample)[0].numpy() + 0.2 * rng.normal(size=sample.length)
            ).astype(np.float32)
        }

    return replaced(source, noisy)

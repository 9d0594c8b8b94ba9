"""One rank of the tests of low-rank adapters; arguments as those of layout_program.

Mixture layouts run the model with experts, the others the untied dense one. One rank alone saves a
checkpoint into the material, which the other dense layouts continue from.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_async_rl.config.controls import DisplacementControl, GacControl
from megatron_async_rl.config.objective import (
    KlConfig,
    ObjectiveConfig,
    ReferenceConfig,
    ValueConfig,
)
from megatron_async_rl.config.policy import ATTENTION, LoraConfig, ParallelConfig
from megatron_async_rl.policy.adam_view import adam_shards, optimizer_parameters
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.weights.convert import export_adapter
from megatron_async_rl.weights.export import WeightExporter
from tests.parallel.layout_program import (
    Rank,
    exporter_of,
    received,
    run_each,
    save,
    scorable,
)
from tests.parallel.layouts import MIXTURE_LAYOUTS
from tests.parallel.staged_weights import staged_as_exported
from tests.train_batches import groups_of

LORA = LoraConfig(rank=3, alpha=4.5)
DROPPED = LORA.model_copy(update={"dropout": 0.5})
CHECKPOINT = "lora_checkpoint"
DROPS = ("tensor", "tensor_pipeline", "sequence")
"""Layouts whose ranks draw masks of the same inputs, and (`sequence`) of different ones."""
OBJECTIVE = ObjectiveConfig(
    kl=KlConfig(coef=0.1), reference=ReferenceConfig(), proximal="ewma", ewma_decay=0.6
)
GAC = GacControl(c_low=0.15)


def policy(rank: Rank, model: str, **settings):
    settings = {"lora": LORA, "controls": (GAC,), "objective": OBJECTIVE, **settings}
    return rank.policy(model, lr=2e-2, **settings)


def bits(trained) -> list[torch.Tensor]:
    """Every parameter of the rank."""
    return [p.detach().clone() for c in trained.model.chunks for p in c.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def replicas_agree(rank: Rank, trained) -> bool:
    """True where the copies that tensor-parallel ranks have of one tensor are the same."""
    copies = [
        p.detach()
        for chunk in trained.model.chunks
        for p in chunk.parameters()
        if p.requires_grad and not p.tensor_model_parallel
    ]
    everyone: list = [None] * rank.layout.tp_size
    dist.all_gather_object(everyone, copies, group=rank.layout.tp_group)
    return all(same(copies, each) for each in everyone)


def held(trained) -> dict[str, int]:
    """Elements on this rank."""
    parameters = [p for chunk in trained.model.chunks for p in chunk.parameters()]
    return {
        "parameters": sum(p.numel() for p in parameters),
        "gradients": sum(p.main_grad.numel() for p in parameters if hasattr(p, "main_grad")),
        "optimizer": sum(p.numel() for p in optimizer_parameters(trained.optimizer)),
        "moments": sum(p.numel() for p in adam_shards(trained.optimizer, "adam.exp_avg")),
        "copies": sum(t.numel() for c in trained.references.trained.tensors for t in c.values()),
    }


def base_of(trained) -> list[torch.Tensor]:
    return [
        p.detach()
        for chunk in trained.model.chunks
        for p in chunk.parameters()
        if not p.requires_grad
    ]


def without_times(steps: list[dict]) -> list[dict]:
    return [{k: v for k, v in step.items() if not k.startswith("time/")} for step in steps]


def resumes(rank: Rank, trained, model: str, folder: Path) -> dict:
    """A policy that began with other adapters continues from the checkpoint of `trained`."""
    trained.save(folder, 3, {"version": 3}, keep=1)
    again = policy(rank, model, seed=9)
    started_otherwise = not same(bits(again), bits(trained))
    again.load(folder)
    loaded = same(bits(again), bits(trained))
    one, other = (rank.train(each, ["a", "b"]) for each in (trained, again))
    return {
        "started_otherwise": started_otherwise,
        "loaded": loaded,
        "same_steps": without_times(one["steps"]) == without_times(other["steps"]),
        "same_bits": same(bits(trained), bits(again)),
        "next": one | {"adapters": rank.weights(trained, adapters=True)},
    }


def dropouts(rank: Rank, model: str) -> dict:
    """Results of a policy with dropout, the same again, a policy resumed from its checkpoint, and a
    policy without dropout. Ranks have one set of generators, so one policy follows the other."""
    settings = {"lora": DROPPED, "controls": ()}
    first = policy(rank, model, **settings)
    steps = without_times(rank.train(first, ["a", "b"])["steps"])
    scores = [first.score(received(first, rank.batches["a"])) for _ in range(2)]
    first.save(rank.scratch / "dropout", 2, {}, keep=1)
    last = without_times(rank.train(first, ["a"])["steps"])
    again = without_times(rank.train(policy(rank, model, **settings), ["a", "b"])["steps"])
    resumed = policy(rank, model, **settings, seed=1)
    resumed.load(rank.scratch / "dropout")
    on = without_times(rank.train(resumed, ["a"])["steps"])
    return {
        "steps": steps,
        "plain": rank.train(policy(rank, model, controls=()), ["a", "b"])["steps"],
        "repeated": steps == again,
        "scores_repeated": all((a == b).all() for a, b in zip(*scores, strict=True)),
        "resumed": on == last,
    }


def recomputes(rank: Rank, model: str) -> bool:
    """True where recomputed layers, in bfloat16 and under dropout, take the same steps to the
    bit."""
    found = []
    for recompute in ("none", "full"):
        trained = policy(rank, model, lora=DROPPED, dtype="bfloat16", recompute=recompute)
        steps = without_times(rank.train(trained, ["a", "b"])["steps"])
        found.append((steps, bits(trained)))
    (steps, plain), (again, recomputed) = found
    return steps == again and same(plain, recomputed)


def refusals(rank: Rank, model: str, folder: Path, output: Path) -> dict:
    """The refusals to load over base models with one other number, and with two numbers of a matrix
    or two matrices exchanged, and where the adapters are not expected."""
    name = "model.layers.{}.mlp.up_proj.weight".format

    def one_number(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name(1)][1, 2] += 1e-3

    def two_numbers(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name(1)][1, [2, 3]] = tensors[name(1)][1, [3, 2]]

    def matrices(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name(0)], tensors[name(1)] = tensors[name(1)], tensors[name(0)]

    tried: dict[str, tuple[Any, LoraConfig | None]] = {"whole": (model, None)}
    for change in (one_number, two_numbers, matrices):
        other = output / change.__name__
        shutil.copytree(rank.material / model, other)
        tensors = load_file(other / "model.safetensors")
        change(tensors)
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        tried[change.__name__] = (other, LORA)
    found = {}
    for case, (source, lora) in tried.items():
        try:
            policy(rank, source, lora=lora).load(folder)
            found[case] = None
        except CheckpointBroken as error:
            found[case] = error.problems[0]
    return found


def with_parts(rank: Rank, model: str) -> dict:
    """Steps of objectives and controls that look at parameters, their copies or their gradients
    themselves."""
    parts = {
        "opob": {
            "objective": ObjectiveConfig(
                advantage="opob", loss="reinforce", aggregation="seq-mean-token-mean"
            )
        },
        "value": {"objective": ObjectiveConfig(advantage="gae", value=ValueConfig())},
        "displacement": {"controls": (DisplacementControl(),)},
        "snapshot": {"objective": ObjectiveConfig(proximal="snapshot", snapshots=8)},
    }
    found = {}
    for name, settings in parts.items():
        trained = policy(rank, model, **{"objective": ObjectiveConfig(), **settings})
        frozen = [p.clone() for p in base_of(trained)]
        groups = [
            [dataclasses.replace(s, versions=np.zeros_like(s.versions)) for s in group]
            for group in groups_of(rank.batches["a"])
        ]
        # Version 0 sampled every batch, so that the second has a displacement.
        steps = [
            trained.train_step(received(trained, TrainBatch.of(version, groups)))
            for version in range(2 if name == "displacement" else 1)
        ]
        head = trained.model.value_head
        found[name] = {
            "steps": without_times(steps),
            "frozen_kept": same(frozen, base_of(trained)),
            "head_moved": head is not None and bool(head.weight.any()),
        }
    return found


def alone(rank: Rank, model: str, folder: Path, output: Path) -> dict:
    """Measurements that need one rank alone."""
    gradient = policy(rank, model, controls=(), objective=ObjectiveConfig(), clip_grad=None, seed=5)
    gradient.load(folder)
    adapters = rank.weights(gradient, adapters=True)
    merged = rank.weights(gradient)
    staged_as_exported(exporter_of(gradient), rank.layout, merged)
    export_adapter(gradient.model, output / "adapter")
    scores = gradient.score(received(gradient, scorable(rank.batches["a"])))
    step = rank.train(gradient, ["a"])["steps"][0]
    chunk = gradient.model.chunks[0]
    names = gradient.model.bridge.global_names(chunk)
    bridge = gradient.model.bridge
    return {
        "reference": {
            "adapters": adapters,
            "merged": merged,
            "scores": scores,
            "step": step,
            "gradients": {
                bridge.to_hugging_face(names[name], p)[0][0]: p.main_grad.clone()
                for name, p in chunk.named_parameters()
                if p.requires_grad
            },
        },
        "parts": with_parts(rank, model),
        "refusals": refusals(rank, model, folder, output),
        "folder": output / "adapter",
    }


def trained_policy(
    rank: Rank, model: str, names: list[str], checkpoint: Path | None = None, **settings
) -> tuple[Any, dict]:
    """checkpoint: continues from there, where adapters are no longer near zero."""
    trained = policy(rank, model, **settings)
    frozen, before = [p.clone() for p in base_of(trained)], rank.weights(trained, adapters=True)
    if checkpoint is not None:
        trained.load(checkpoint)
    found = rank.train(trained, names) | {"before": before}
    found["adapters"] = rank.weights(trained, adapters=True)
    found["frozen_kept"] = same(frozen, base_of(trained))
    return trained, found


def merges(rank: Rank, model: str, batch: str, **settings) -> dict:
    """One step in bfloat16: the weights before, when B is 0, and after, merged in bfloat16 and in
    float32, as engines would get them."""
    trained = policy(rank, model, dtype="bfloat16", controls=(), **settings)
    base = rank.weights(trained)
    rank.train(trained, [batch])
    exporter = WeightExporter(trained.model.bridge, trained.model.chunks, dtype=torch.float32)
    exact = {}
    for bucket in exporter.buckets(5000):
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
            if tensor is not None:
                exact[name] = tensor.clone()
    staged_as_exported(exporter, rank.layout, exact)
    return {
        "base": base,
        "rounded": rank.weights(trained),
        "exact": exact,
        "adapters": rank.weights(trained, adapters=True),
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    layout, model = output.stem, "untied"
    if layout in MIXTURE_LAYOUTS:
        attention = LORA.model_copy(update={"targets": ATTENTION})
        names = ["mixture_a", "mixture_a", "mixture_b"]
        trained, results = trained_policy(rank, "mixture", names, lora=attention)
    elif layout == "single":
        trained, results = trained_policy(rank, model, ["a", "a", "b"])
    else:
        trained, results = trained_policy(rank, model, ["a", "b"], material / CHECKPOINT)
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(everyone, (rank.layout.pp_rank, held(trained)))
    results["held"] = everyone
    results["replicas_agree"] = replicas_agree(rank, trained)
    mixture = layout in MIXTURE_LAYOUTS
    results["merged"] = (
        merges(rank, "mixture", "mixture_a", lora=LORA.model_copy(update={"targets": ATTENTION}))
        if mixture
        else merges(rank, model, "a")
    )

    if layout == "single":
        recomputed, again = trained_policy(rank, model, ["a", "a", "b"], recompute="full")
        results["recomputed"] = without_times(again["steps"]) == without_times(
            results["steps"]
        ) and same(bits(recomputed), bits(trained))
        results["resumed"] = resumes(rank, trained, model, material / CHECKPOINT)
        results["recomputed"] = {
            "float32": results["recomputed"],
            "bfloat16": recomputes(rank, model),
        }
        results["dropout"] = dropouts(rank, model)
        results |= alone(rank, model, material / CHECKPOINT, output.parent)
    if layout == "data_distributed_optimizer":
        results["resumed"] = resumes(rank, trained, model, rank.scratch / "checkpoint")
    if layout in DROPS:
        dropped = policy(rank, model, lora=DROPPED, controls=())
        rank.train(dropped, ["a"])
        results["replicas_agree_after_dropout"] = replicas_agree(rank, dropped)
    save(rank, results, [results["steps"]], output)


if __name__ == "__main__":
    run_each(run_layout)

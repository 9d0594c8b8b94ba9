"""One rank of the tests of the control `displacement`; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async_rl.config.controls import DisplacementControl
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.gradients import products_of
from megatron_async_rl.objectives.objective import valid_samples
from megatron_async_rl.policy.adam_view import gradients_of, optimizer_parameters
from megatron_async_rl.policy.model import DTYPES
from megatron_async_rl.policy.past_weights import start_shares
from tests.parallel.layout_program import Rank, received, run_each, save
from tests.parallel.reference_program import at_version
from tests.parallel.whole_tensors import cut
from tests.thorough import THOROUGH

CONTROLS = {
    "zero": DisplacementControl(),
    "threshold": DisplacementControl(target="threshold", c_low=0.05),
    "idle": DisplacementControl(c_low=0.99),
    "spared": DisplacementControl(tolerated_kl=0.005),
}


def runs_of(ranks: int) -> tuple[str, ...]:
    """Names of the controls that a layout of so many ranks tries. `threshold` and `idle` differ
    from `zero` in numbers alone, so in the gate only one rank tries them."""
    return tuple(CONTROLS) if THOROUGH or ranks == 1 else ("zero", "spared")


ADDED = [("threshold", "float32"), ("zero", "bfloat16")]
"""The steps that are looked into on several ranks; on one, every control in every dtype."""


def trained(rank: Rank, model: str, names, control, **settings):
    """A policy, and its steps on batches of the versions 0, 1, ..., whose samples began under any
    version so far."""
    policy = rank.policy(model, controls=(control,), log_update_norm=True, **settings)
    return policy, [
        policy.train_step(received(policy, at_version(rank.batches[name], version)))
        for version, name in enumerate(names)
    ]


def of_the_model(policy) -> list[torch.Tensor]:
    """This rank's shards of the weights that the model computes with, in float32."""
    present = [
        {name: p.detach() for name, p in chunk.named_parameters()} for chunk in policy.model.chunks
    ]
    shards = cut(present, policy.optimizer, policy.model)
    return [shard.float().clone() for shard in shards]


def added_by_a_step(rank: Rank, model: str, a: str, b: str, control, dtype: str, lr: float) -> dict:
    """Effect of a step on a stale batch on the optimizer's own parameters, computed without the
    control."""
    policy = rank.policy(model, controls=(control,), log_update_norm=True, dtype=dtype, lr=lr)
    held, past, past_in_model = optimizer_parameters(policy.optimizer), [], []
    for version, name in enumerate([a, b, a]):
        past.append([parameter.detach().clone() for parameter in held])
        past_in_model.append(of_the_model(policy))
        policy.train_step(received(policy, at_version(rank.batches[name], version)))
    batch = received(policy, at_version(rank.batches[a], 3))
    before, in_model = [parameter.detach().clone() for parameter in held], of_the_model(policy)
    metrics = policy.train_step(batch)
    shares = start_shares(valid_samples(batch))
    shares.pop(3, None)
    ways, rounded = (
        [
            sum(share * (now - then[version][index]) for version, share in shares.items())
            for index, now in enumerate(present)
        ]
        for present, then in ((before, past), (in_model, past_in_model))
    )
    gradients = gradients_of(policy.optimizer, rank.layout)
    agreement, true, seen = products_of(gradients, ways, rounded)
    group_of = {id(p): group for group in policy.optimizer.param_groups for p in group["params"]}
    made = [
        parameter.detach()
        - old * (1.0 - group_of[id(parameter)]["lr"] * group_of[id(parameter)]["weight_decay"])
        for parameter, old in zip(held, before, strict=True)
    ]
    product, update, way = products_of(gradients, made, ways)
    follows = all(
        torch.equal(mine, main.detach().to(DTYPES[dtype]).float())
        for mine, main in zip(of_the_model(policy), held, strict=True)
    )
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(everyone, follows)
    return {
        "step": metrics,
        "cosine": product / math.sqrt(update * way),
        "norm": math.sqrt(update),
        "cosine_of_the_models_own": agreement / math.sqrt(true * seen),
        "model_follows": all(everyone),
    }


def resumed(rank: Rank, model: str, a: str, b: str) -> dict:
    """Steps on stale batches after a checkpoint, of the policy that wrote it and of the policy that
    read it."""
    settings = {"dtype": "bfloat16", "lr": 1e-5}
    policy, _ = trained(rank, model, [a, b], CONTROLS["zero"], **settings)
    policy.save(rank.scratch / "checkpoint", 2, {"version": 2}, keep=1)
    again, _ = trained(rank, model, [], CONTROLS["zero"], **settings)
    again.load(rank.scratch / "checkpoint")
    batch = received(policy, at_version(rank.batches[a], 2))
    return {
        "steps": [p.train_step(batch) for p in (policy, again)],
        "oldest": again.references.oldest(2),
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("tied", "a", "b")
    results: dict = {}
    runs = runs_of(rank.layout.world_size)
    for name in runs:
        policy, steps = trained(rank, model, [a, b, a, b], CONTROLS[name])
        results[name] = {"steps": steps, "weights": rank.weights(policy)}
    results["added"] = {
        (name, dtype): added_by_a_step(rank, model, a, b, CONTROLS[name], dtype, lr)
        for name in ("zero", "threshold")
        for dtype, lr in (("float32", 5e-3), ("bfloat16", 1e-5))
        if (name, dtype) in ADDED or rank.layout.world_size == 1
    }
    results["resumed"] = resumed(rank, model, a, b)
    save(rank, results, [results[name]["steps"] for name in runs], output)


if __name__ == "__main__":
    run_each(run_layout)

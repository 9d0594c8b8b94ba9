"""One rank of the tests of the control `displacement`; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async_rl.config.controls import DisplacementControl
from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.controls.inner_product import products_of
from megatron_async_rl.policy.displacement import start_shares
from megatron_async_rl.policy.optimizer import gradients_of, optimizer_parameters
from megatron_async_rl.policy.parameter_state import cut
from tests.parallel.layout_program import Rank, run_each
from tests.parallel.reference_program import at_version

CONTROLS = {
    "zero": DisplacementControl(),
    "threshold": DisplacementControl(target="threshold", c_low=0.05),
    "idle": DisplacementControl(c_low=0.99),
}


def trained(rank: Rank, model: str, names, control, **settings):
    """A policy, and its steps on batches of the versions 0, 1, ..., whose samples began under any version so far."""
    policy = rank.policy(model, controls=(control,), **settings)
    return policy, [policy.train_step(at_version(rank.batches[name], version)) for version, name in enumerate(names)]


def added_by_a_step(rank: Rank, model: str, a: str, b: str, control, dtype: str) -> dict:
    """What the optimizer's own parameters show of a step on a stale batch, found without the control's help."""
    policy, _ = trained(rank, model, [a, b, a], control, dtype=dtype, lr=5e-3)
    batch = at_version(rank.batches[a], 3)
    held = optimizer_parameters(policy.optimizer)
    before = [parameter.detach().clone() for parameter in held]
    copies = [{name: p.detach().clone() for name, p in chunk.named_parameters()} for chunk in policy.model.chunks]
    ways = [part.float() for part in cut(copies, policy.model, policy.optimizer)]
    metrics = policy.train_step(batch)
    for version, share in start_shares([s for s in batch.samples() if s.valid]).items():
        then = cut(policy.others.past.of(version, current=3).tensors, policy.model, policy.optimizer)
        ways = [way - share * part.float() for way, part in zip(ways, then, strict=True)]
    group_of = {id(p): group for group in policy.optimizer.param_groups for p in group["params"]}
    made = [
        parameter.detach() - old * (1.0 - group_of[id(parameter)]["lr"] * group_of[id(parameter)]["weight_decay"])
        for parameter, old in zip(held, before, strict=True)
    ]
    product, update, way = products_of(gradients_of(policy.optimizer, rank.layout), made, ways)
    present = [{name: p.detach() for name, p in chunk.named_parameters()} for chunk in policy.model.chunks]
    follows = all(
        torch.equal(mine, main.detach().to(mine.dtype))
        for mine, main in zip(cut(present, policy.model, policy.optimizer), held, strict=True)
    )
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(everyone, follows)
    return {
        "step": metrics,
        "cosine": product / math.sqrt(update * way),
        "norm": math.sqrt(update),
        "model_follows": all(everyone),
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("tied", "a", "b")
    results: dict = {}
    for name, control in CONTROLS.items():
        policy, steps = trained(rank, model, [a, b, a, b], control)
        results[name] = {"steps": steps, "weights": rank.weights(policy)}
    results["added"] = {
        (name, dtype): added_by_a_step(rank, model, a, b, CONTROLS[name], dtype)
        for name in ("zero", "threshold")
        for dtype in ("float32", "bfloat16")
    }
    told: list = [None] * rank.layout.world_size
    mine = [[{k: v for k, v in s.items() if not k.startswith("time/")} for s in results[name]["steps"]] for name in CONTROLS]
    dist.all_gather_object(told, json.dumps(mine))
    if rank.layout.rank == 0:
        results["ranks_agree"] = len(set(told)) == 1
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

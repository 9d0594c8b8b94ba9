"""One rank of the value-head tests: trains a tiny policy with a value head on one parallel layout.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port,
ParallelConfig), all of this number of ranks and run one after the other, and the output directory.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async_rl.config.objective import ObjectiveConfig, ValueConfig
from megatron_async_rl.config.policy import ParallelConfig
from tests.parallel.layout_program import Rank, run_each


def objective(**value) -> ObjectiveConfig:
    """Every token's return is its sequence's reward (gamma and lambda 1), which the head can be
    checked against by hand."""
    gae = {"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False}
    return ObjectiveConfig(advantage=gae, loss="reinforce", value=ValueConfig(**value))


def head(policy) -> dict[str, torch.Tensor]:
    """The value head's parameters and its reduced gradients, on every rank that has one."""
    module = policy.model.value_head
    if module is None:
        return {}
    found = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return found | {
        f"{name}.gradient": parameter.main_grad.clone()
        for name, parameter in module.named_parameters()
    }


def ranks(rank: Rank, found) -> list:
    gathered: list = [None] * rank.layout.world_size
    dist.all_gather_object(gathered, found)
    return gathered


def measured(rank: Rank, model: str, batches, *, started=False, lr=1e-3, **value) -> dict:
    """`started`: from a head that is not zero, so that the hidden states feel it in the first
    step."""
    policy = rank.policy(
        model, controls=(), objective=objective(**value), lr=lr, weight_decay=0.0, clip_grad=None
    )
    if started and policy.model.value_head is not None:
        weight = policy.model.value_head.weight
        weight.data.copy_(0.2 * torch.sin(torch.arange(weight.shape[1])))
        policy.optimizer.reload_model_params()
    result = rank.train(policy, batches)
    return {**result, "head": ranks(rank, head(policy)), "exported": sorted(result["weights"])}


def resumed(rank: Rank, dtype: str) -> dict:
    policy, again = (rank.policy(objective=objective(), controls=(), dtype=dtype) for _ in range(2))
    rank.train(policy, ["a"])
    policy.save(rank.scratch / dtype, 1, {}, keep=1)
    again.load(rank.scratch / dtype)
    before = (ranks(rank, head(policy)), ranks(rank, head(again)))
    return {
        "saved": before[0],
        "loaded": before[1],
        "steps": [rank.train(p, ["b"])["steps"][0] for p in (policy, again)],
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    # Coefficients keep the terms of each loss below 4, because compare_steps() allows a loss the
    # rounding of terms of that size: with a coefficient of 5 the two terms of a step cancelled.
    results = {
        "tied": measured(rank, "tied", ["a", "b"]),
        "untied": measured(rank, "untied", ["a", "b"], clip=0.2),
        "started": measured(rank, "tied", ["a", "b"], started=True, coef=1.0),
        "detached": measured(rank, "tied", ["a"], started=True, detach=True, coef=1.0),
        "resumed": {dtype: resumed(rank, dtype) for dtype in ("float32", "bfloat16")},
    }
    if rank.layout.world_size == 1:
        results["barely"] = measured(rank, "tied", ["a"], started=True, detach=True, coef=0.01)
        results["long"] = measured(rank, "tied", ["a"] * 20, lr=0.02, coef=5.0)
        results["plain"] = rank.train(rank.policy(controls=()), ["a"])
    if rank.layout.rank == 0:
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

"""One rank of the tests of whole-batch decisions and step controls; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.policy import step
from tests.parallel.layout_program import GAC, Rank, run_each

OBJECTIVES = {
    "m2po": ObjectiveConfig(loss={"name": "m2po", "second_moment": 0.01}),
    "bapo": ObjectiveConfig(loss="bapo"),
    "whitened": ObjectiveConfig(advantage={"name": "reinforce_pp", "gamma": 0.9}),
    "opob": ObjectiveConfig(advantage="opob", loss="reinforce", aggregation="seq-mean-token-mean"),
}
CONTROLS = (GAC, EssLrControl())


class Recorder:
    """Keeps what the objective of a policy decided about each batch."""

    def __init__(self, policy) -> None:
        self.prepare = policy.objective.prepare
        self.decisions: list[dict] = []
        policy.objective.prepare = self

    def __call__(self, *args, **kwargs):
        targets = self.prepare(*args, **kwargs)
        decided = targets.whole.decided
        self.decisions.append(
            {
                "advantages": targets.whole.advantages.clone(),
                "scalars": dict(decided.scalars),
                **{name: value.clone() for name, value in (decided.tokens | decided.sequences).items()},
            }
        )
        return targets


def measured(rank: Rank, policy, names) -> dict:
    recorder = Recorder(policy)
    result = rank.train(policy, names)
    return {**result, "decisions": recorder.decisions, "norms": rank.norms(policy)}


def every_shard_counted(rank: Rank, policy, names) -> dict:
    """The mistake: what several ranks hold counts on each of them."""
    right = step.gradients_of

    def wrong(*args):
        gradients = right(*args)
        return replace(gradients, shards=tuple(replace(shard, counted=True) for shard in gradients.shards))

    step.gradients_of = wrong
    try:
        return rank.train(policy, names)
    finally:
        step.gradients_of = right


def collectives_of_a_step(rank: Rank, policy, name) -> dict:
    """Collectives over the world, which decisions and controls use; the schedule's own run in other groups."""
    original, calls = dist.all_reduce, 0

    def counting(*args, **kwargs):
        nonlocal calls
        calls += kwargs.get("group") is rank.layout.world_group
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        (taken,) = rank.train(policy, [name])["steps"]
    finally:
        dist.all_reduce = original
    return {"calls": calls, "micro_batches": taken["policy/micro_batches"]}


def resumed(rank: Rank, model: str, a: str, b: str) -> dict:
    policy, again = (rank.policy(model, schedule="linear") for _ in range(2))
    rank.train(policy, [a, b])
    policy.save(rank.scratch / "checkpoint", 2, {"version": 2}, keep=1)
    again.load(rank.scratch / "checkpoint")
    return {
        "loaded": rank.weights(again),
        "saved": rank.weights(policy),
        "runs": [rank.train(p, [a, b]) for p in (policy, again)],
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("tied", "a", "b")
    results = {"controls": measured(rank, rank.policy(model, controls=CONTROLS), [a, a, b])}
    for name, objective in OBJECTIVES.items():
        results[name] = measured(rank, rank.policy(model, objective=objective), [a, b])
    # Without clipping, which would make a wrong norm a different second step.
    results["once"] = rank.train(rank.policy(model, clip_grad=None), [a, a])
    results["twice"] = every_shard_counted(rank, rank.policy(model, clip_grad=None), [a, a])
    results["collectives"] = [
        collectives_of_a_step(rank, rank.policy(model, objective=OBJECTIVES["m2po"], controls=CONTROLS, budget=budget), a)
        for budget in (26, 4096)
    ]
    if mixture:
        results["scores"] = rank.policy(model).score(list(rank.batches[a].samples()))
        results["resumed"] = resumed(rank, model, a, b)
    told: list = [None] * rank.layout.world_size
    steps = [results[name]["steps"] for name in ("controls", *OBJECTIVES)]
    decisions = [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in decision.items()}
        for name in OBJECTIVES
        for decision in results[name]["decisions"]
    ]
    mine = [[{k: v for k, v in taken.items() if not k.startswith("time/")} for taken in run] for run in steps]
    dist.all_gather_object(told, json.dumps([mine, decisions]))
    if rank.layout.rank == 0:
        results["ranks_agree"] = len(set(told)) == 1
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

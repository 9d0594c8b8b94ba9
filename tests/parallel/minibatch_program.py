"""One rank of the tests of several optimizer steps per batch; arguments as those of
layout_program."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from megatron_async_rl.config.controls import DisplacementControl, EssLrControl, GacControl
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import policy as policy_module
from tests.parallel.layout_program import Rank, received, run_each, save
from tests.parallel.layouts import FEW
from tests.parallel.reference_program import at_version

CLIP = 0.02
"""Narrow, so that tokens leave it within a batch."""
LEARNING = {"lr": 0.01, "weight_decay": 0.0, "schedule": "linear"}
WATCHING = GacControl(c_low=0.99)
"""Measures cosines and changes nothing."""


def ppo(minibatches=3, epochs=2, **more):
    return ObjectiveConfig(
        minibatches=minibatches,
        epochs=epochs,
        proximal="recompute",
        loss={"name": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP},
        **more,
    )


OBJECTIVES = {
    "ppo": ppo(),
    "one_epoch": ppo(epochs=1),
    "m2po": ObjectiveConfig(minibatches=2, epochs=2, loss={"name": "m2po", "second_moment": 0.002}),
    "normalized": ppo(
        2,
        2,
        corrections=({"name": "tis", "normalize": True}, {"name": "opsm", "delta": 0.001}),
        aggregation="seq-mean-token-mean",
    ),
    "value": ppo(2, 2, advantage="gae", value={"clip": 0.01}),
    "measured": ObjectiveConfig(
        minibatches=2,
        epochs=2,
        advantage={"name": "opob", "mode": "exact"},
        loss="reinforce",
        aggregation="seq-mean-token-mean",
    ),
    "more_minibatches_than_groups": ppo(minibatches=7, epochs=1),
}
EVERYWHERE = ("ppo", "one_epoch")
"""The others are on the layouts `FEW`."""
SMALL = {"lr": 1e-3, "weight_decay": 1.0}
"""Steps after which layouts still agree where a threshold decides."""


def steps_of(policy, batch):
    """The metrics of the batch, and of each of its optimizer steps."""
    found = []

    def recorded(steps):
        found.extend(dict(step) for step in steps)
        return over_steps(steps)

    over_steps = policy_module.over_steps
    with mock.patch.object(policy_module, "over_steps", recorded):
        metrics = policy.train_step(batch)
    return metrics, found


def train(rank: Rank, policy, names) -> dict:
    batches, steps = [], []
    for name in names:
        metrics, each = steps_of(policy, received(policy, rank.batches[name]))
        batches.append(metrics)
        steps += each
    return {"batches": batches, "steps": steps, "weights": rank.weights(policy)}


def controlled(rank: Rank) -> dict:
    policy = rank.policy(
        objective=ppo(snapshots=5),
        controls=(GacControl(), EssLrControl(reference_ratio="auto"), DisplacementControl()),
        **SMALL,
    )
    batch = received(policy, at_version(rank.batches["a"], 0))
    metrics, steps = steps_of(policy, batch)
    return {"batches": [metrics], "steps": steps, "weights": rank.weights(policy)}


def resumed_equals_uninterrupted(rank: Rank) -> bool:
    """Bit for bit: weights and every metric but times."""
    build = {"objective": ppo(), "controls": (GacControl(), EssLrControl()), **LEARNING}
    through, again = rank.policy(**build), rank.policy(**build)
    train(rank, through, ["a"])
    through.save(rank.scratch / "checkpoint", 1, {"version": 1}, keep=1)
    again.load(rank.scratch / "checkpoint")
    ends = [train(rank, policy, ["b"]) for policy in (through, again)]
    metrics = [
        [{k: v for k, v in step.items() if not k.startswith("time/")} for step in end["steps"]]
        for end in ends
    ]
    return metrics[0] == metrics[1] and all(
        torch.equal(tensor, ends[1]["weights"][name]) for name, tensor in ends[0]["weights"].items()
    )


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    results = {}
    for name in EVERYWHERE:
        policy = rank.policy(objective=OBJECTIVES[name], controls=(WATCHING,), **LEARNING)
        results[name] = train(rank, policy, ["a", "b"])
    if output.stem in FEW:
        for name in OBJECTIVES:
            if name in EVERYWHERE:
                continue
            policy = rank.policy(objective=OBJECTIVES[name], controls=(), **SMALL)
            results[name] = train(rank, policy, ["a", "b"])
        results["controlled"] = controlled(rank)
    results["resumes"] = resumed_equals_uninterrupted(rank)
    runs = [result["steps"] for result in results.values() if isinstance(result, dict)]
    save(rank, results, runs, output)


if __name__ == "__main__":
    run_each(run_layout)

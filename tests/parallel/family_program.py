"""One rank of the model families' tests: each tiny model's log-probs and exported weights, the
gradient of one supervised step, and the weights of a checkpoint; arguments as those of
layout_program.

The material also has `models.json`: layout -> names of its models."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from tests.parallel.layout_program import (
    Rank,
    exporter_of,
    received,
    run_each,
    save,
    scorable,
)
from tests.parallel.opob_program import exported_gradient
from tests.parallel.staged_weights import staged_as_exported

CONTEXT_MODELS = ("mistral-window", "gemma3")
"""Models whose sequences are also divided over ranks: one whose window reaches over the start of
a part, and one whose layers have different windows."""


def supervised(rank: Rank, model: str, **settings):
    return rank.policy(
        model,
        controls=(),
        objective=ObjectiveConfig(loss="sft", advantage="none"),
        clip_grad=None,
        weight_decay=0.0,
        **settings,
    )


def trained(rank: Rank, policy) -> tuple[dict, dict]:
    """A step's metrics and its gradient."""
    gradient = {}
    take = policy.step.take

    def watched_take(*arguments):
        gradient.update(exported_gradient(rank, policy))
        return take(*arguments)

    policy.step.take = watched_take
    return policy.train_step(received(policy, rank.batches["given"])), gradient


def measured(rank: Rank, model: str) -> dict:
    policy, packed = supervised(rank, model), rank.policy(model, sequence="packed")
    batch = scorable(rank.batches["a"])
    found = {
        "scores": policy.score(received(policy, batch)),
        "packed_scores": packed.score(received(packed, batch)),
        "weights": rank.weights(policy),
    }
    staged_as_exported(exporter_of(policy), rank.layout, found["weights"])
    step, found["gradient"] = trained(rank, policy)
    found["steps"] = [step]
    _, found["recomputed_gradient"] = trained(rank, supervised(rank, model, recompute="full"))

    policy.save(rank.scratch / model, 1, {"version": 1}, keep=1)
    found["trained"] = rank.weights(policy)
    resumed = supervised(rank, model)
    resumed.load(rank.scratch / model)
    found["resumed"] = rank.weights(resumed)
    return found


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    chosen = json.loads((material / "models.json").read_text())[output.stem]
    results = {model: measured(rank, model) for model in chosen}
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

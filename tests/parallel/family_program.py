"""One rank of the model families' tests: each tiny model's log-probs, exported weights and gradient
of one supervised step; arguments as those of layout_program."""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.schema import ParallelConfig
from tests.parallel.layout_program import Rank, received, run_each, save, scorable
from tests.parallel.opob_program import exported_gradient


def measured(rank: Rank, model: str) -> dict:
    policy = rank.policy(
        model,
        controls=(),
        objective=ObjectiveConfig(loss="sft", advantage="none"),
        clip_grad=None,
        weight_decay=0.0,
    )
    found = {
        "scores": policy.score(received(policy, scorable(rank.batches["a"]))),
        "weights": rank.weights(policy),
    }
    packed = rank.policy(model, sequence="packed")
    found["packed_scores"] = packed.score(received(packed, scorable(rank.batches["a"])))
    take = policy.step.take

    def watched_take(*arguments):
        found["gradient"] = exported_gradient(rank, policy)
        return take(*arguments)

    policy.step.take = watched_take
    found["steps"] = [policy.train_step(received(policy, rank.batches["given"]))]
    return found


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    chosen = sorted(path.name for path in material.iterdir() if path.is_dir())
    mixture = output.stem.startswith(("mixture", "expert"))
    results = {
        model: measured(rank, model) for model in chosen if model.startswith("mixture") == mixture
    }
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

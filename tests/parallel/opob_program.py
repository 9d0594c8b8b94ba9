"""One rank of the measured-baseline tests: steps of a tiny policy with advantage `opob`, mode
`exact`, on one parallel layout.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port,
ParallelConfig), all of this number of ranks and run one after the other, and the output directory.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.samples.rows import TrainBatch
from tests.parallel.layout_program import Rank, received, run_each
from tests.train_batches import groups_of, ragged_batch

CAP = 1.1
ENTROPY_BONUS = 0.3
OBJECTIVES = {
    "plain": {"aggregation": "seq-mean-token-mean"},
    "weighed": {
        "aggregation": "seq-mean-token-mean",
        "corrections": ({"name": "tis", "level": "sequence", "cap": CAP},),
        "proximal": "recompute",
    },
    "with_entropy": {"aggregation": "token-mean", "entropy_bonus": ENTROPY_BONUS},
    "normalized": {"advantage": {"name": "opob", "mode": "exact", "normalize_std": True}},
}


def objective(name: str) -> ObjectiveConfig:
    return ObjectiveConfig(
        **{"advantage": {"name": "opob", "mode": "exact"}, "loss": "reinforce", **OBJECTIVES[name]}
    )


def many(vocabulary: int) -> TrainBatch:
    """Enough sequences for a correlation."""
    return ragged_batch(groups=16, group_size=4, vocabulary=vocabulary, seed=3)


def one_group(batch: TrainBatch) -> TrainBatch:
    return TrainBatch.of(batch.version, groups_of(batch)[:1])


def exported_gradient(rank: Rank, policy) -> dict[str, torch.Tensor]:
    """The gradient, under the names of Hugging Face's files."""
    parameters = [parameter for chunk in policy.model.chunks for parameter in chunk.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    found = rank.weights(policy)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return found


class Watched:
    """A policy that keeps what it measured and its gradient before the step, under the names of
    Hugging Face's files."""

    def __init__(self, rank: Rank, model: str, name: str) -> None:
        self.rank = rank
        self.policy = rank.policy(
            model, controls=(), objective=objective(name), clip_grad=None, weight_decay=0.0
        )
        self.measured = None
        self.gradient: dict[str, torch.Tensor] = {}
        accumulate, take = self.policy.baseline.accumulate, self.policy.step.take

        def watched_accumulate(*arguments):
            self.measured = accumulate(*arguments)
            return self.measured

        def watched_take(*arguments):
            self.gradient = exported_gradient(self.rank, self.policy)
            return take(*arguments)

        self.policy.baseline.accumulate = watched_accumulate
        self.policy.step.take = watched_take

    def train(self, batch: TrainBatch) -> dict:
        step = self.policy.train_step(received(self.policy, batch))
        told = {
            "norms": self.measured.norms,
            "baselines": self.measured.baselines,
            "advantages": self.measured.advantages,
        }
        everyone: list = [None] * self.rank.layout.world_size
        dist.all_gather_object(everyone, [t.tolist() for t in told.values()])
        return {
            "step": step,
            "measured": told,
            "ranks_agree": all(each == everyone[0] for each in everyone),
            "gradient": self.gradient,
            "weights": self.rank.weights(self.policy),
        }


def refusal(rank: Rank) -> str:
    try:
        rank.policy(controls=(), objective=objective("plain"))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def steps(rank: Rank) -> dict:
    batches = rank.batches
    results = {
        f"{name}-{model}": Watched(rank, model, name).train(batches["a"])
        for name in OBJECTIVES
        for model in ("tied", "untied")
        # A layout sums an untied model's gradient alike whatever the loss is.
        if model == "tied" or name == "plain" or rank.layout.world_size == 1
    }
    results["equal"] = Watched(rank, "tied", "weighed").train(batches["equal"])
    results["one_group"] = Watched(rank, "tied", "plain").train(one_group(batches["a"]))
    if rank.layout.world_size == 1:
        results["many"] = Watched(rank, "tied", "plain").train(many(97))
    return results


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    results = {"refusal": refusal(rank)} if parallel.virtual_pipeline > 1 else steps(rank)
    if rank.layout.rank == 0:
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

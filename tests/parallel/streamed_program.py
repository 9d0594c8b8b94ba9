"""One rank of the tests of streamed groups: gradients of batches that arrive whole, in parts, and
complete with their parts; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy.adam_view import gradients_of
from tests.parallel.layout_program import CONTROLS, Rank, received, run_each, save
from tests.thorough import chosen
from tests.train_batches import streamed

PARTS = ((3,), (0, 2), (1, 4))
OBJECTIVES = chosen(
    {
        "tokens": ObjectiveConfig(),
        "sequences": ObjectiveConfig(loss="gspo", advantage="rloo"),
        "other policies": ObjectiveConfig(
            loss="decoupled_ppo",
            proximal="ewma",
            kl=KlConfig(coef=0.1),
            reference=ReferenceConfig(ema=0.7),
            entropy_bonus=0.01,
            aggregation="seq-mean-token-mean",
        ),
    },
    "tokens",
    "other policies",
)


def whole(policy, batch):
    return policy.train_step(received(policy, batch))


def in_parts(policy, batch):
    parts, complete = streamed(batch, PARTS)
    for part in parts[:-1]:
        policy.accumulate(received(policy, part))
    return policy.train_step(received(policy, complete))


def with_parts(policy, batch):
    """A complete batch, as in a replay."""
    return policy.train_step(received(policy, streamed(batch, PARTS)[1]))


class Gradients:
    """This rank's shards of the gradient of every step of a policy, before the controls."""

    def __init__(self, policy, layout) -> None:
        self.steps: list[list[torch.Tensor]] = []
        take = policy.step.take

        def kept(*arguments):
            policy.optimizer.prepare_grads()
            self.last = gradients_of(policy.optimizer, layout)
            self.steps.append([shard.grad.double().clone() for shard in self.last.shards])
            return take(*arguments)

        policy.step.take = mock.Mock(side_effect=kept)

    def square(self, tensors) -> float:
        """The sum of squares over all ranks, each parameter once."""
        # A rank may have no shard that counts; its 0 has the dtype of the other ranks, too.
        shards = zip(self.last.shards, tensors, strict=True)
        total = sum((each.square().sum() for shard, each in shards if shard.counted), start=0.0)
        return float(
            self.last.all_reduce_sum(torch.as_tensor(total, dtype=torch.float64).reshape(1))[0]
        )


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, prefix = ("mixture", "mixture_") if mixture else ("tied", "")
    results = {}
    for name, objective in OBJECTIVES.items():
        runs = {}
        for way in (whole, in_parts, with_parts):
            policy = rank.policy(model, objective=objective, controls=CONTROLS, budget=96)
            gradients = Gradients(policy, rank.layout)
            steps = [way(policy, rank.batches[f"{prefix}{batch}"]) for batch in ("a", "b")]
            runs[way.__name__] = (steps, gradients, rank.weights(policy))
        steps, expected, _ = runs["whole"]
        found = runs["in_parts"][1]
        differences = [
            [one - other for one, other in zip(*pair, strict=True)]
            for pair in zip(found.steps, expected.steps, strict=True)
        ]
        results[name] = {
            "whole": steps,
            "steps": runs["in_parts"][0],
            "squares": [expected.square(one) for one in expected.steps],
            "differences": [expected.square(one) for one in differences],
            "weights": [runs[way][2] for way in ("in_parts", "with_parts")],
        }
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

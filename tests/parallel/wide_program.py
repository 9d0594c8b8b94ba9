"""One rank of the tests of layouts with three and four shards; arguments as those of
layout_program.

Layouts named `expert...` or `mixture...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.config.objective import ObjectiveConfig, ValueConfig
from megatron_async_rl.config.policy import ParallelConfig
from tests.parallel.layout_program import CONTROLS, Rank, received, run_each, save
from tests.train_batches import streamed

SEVERAL_STEPS = ObjectiveConfig(
    proximal="recompute", aggregation="seq-mean-token-mean", advantage="rloo", minibatches=2
)

VALUED = ObjectiveConfig(advantage="gae", loss="reinforce", value=ValueConfig())
PARTS = ((3,), (0, 2, 5), (1, 4))
"""Groups of each part of a batch that arrives in parts."""


def in_parts(rank: Rank, model: str) -> dict:
    """Take one step on a batch in parts: each stage runs its schedule once per part."""
    policy = rank.policy(model)
    parts, complete = streamed(rank.batches["a"], PARTS)
    for part in parts[:-1]:
        policy.accumulate(received(policy, part))
    step = policy.train_step(received(policy, complete))
    return {"steps": [step], "weights": rank.weights(policy)}


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    model = "mixture" if output.stem.startswith(("expert", "mixture")) else "tied"
    policy = rank.policy(model, controls=CONTROLS)
    results = {
        "controlled": {**rank.train(policy, ["a", "a", "b"]), "norms": rank.norms(policy)},
        "minibatches": rank.train(rank.policy(model, objective=SEVERAL_STEPS), ["a"]),
    }
    if output.stem in ("single", "virtual_pipeline"):
        results["value"] = rank.train(rank.policy(model, objective=VALUED), ["a"])
        results["streamed"] = in_parts(rank, model)
    if parallel.context == 1 or model == "tied":
        packed = rank.policy(model, controls=CONTROLS, sequence="packed")
        results["packed"] = rank.train(packed, ["a", "b"])
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

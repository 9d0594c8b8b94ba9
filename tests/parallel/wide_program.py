"""One rank of the tests of layouts with three and four shards; arguments as those of
layout_program.

Layouts named `expert...` or `mixture...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from tests.parallel.layout_program import CONTROLS, Rank, run_each, save

SEVERAL_STEPS = ObjectiveConfig(
    proximal="recompute", aggregation="seq-mean-token-mean", advantage="rloo", minibatches=2
)


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    model = "mixture" if output.stem.startswith(("expert", "mixture")) else "tied"
    policy = rank.policy(model, controls=CONTROLS)
    results = {
        "controlled": {**rank.train(policy, ["a", "a", "b"]), "norms": rank.norms(policy)},
        "minibatches": rank.train(rank.policy(model, objective=SEVERAL_STEPS), ["a"]),
    }
    if parallel.context == 1 or model == "tied":
        packed = rank.policy(model, controls=CONTROLS, sequence="packed")
        results["packed"] = rank.train(packed, ["a", "b"])
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

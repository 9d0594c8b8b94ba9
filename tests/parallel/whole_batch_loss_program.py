"""One rank of the tests of losses that decide on the whole batch: trains a tiny policy with each on one parallel layout.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port, ParallelConfig), all of this
number of ranks and run one after the other, and the output directory.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.schema import ParallelConfig
from tests.parallel.layout_program import Rank, run_each

# With bounds at which the material's batches have tokens on both sides.
LOSSES = {
    "m2po_mask": {"loss": {"name": "m2po", "second_moment": 0.002}},
    "m2po_cap": {"loss": {"name": "m2po", "mode": "cap", "second_moment": 0.002}},
    "bapo": {"loss": {"name": "bapo", "target_share": 0.5, "low": [0.9, 0.99, 0.01], "high": [1.01, 1.2, 0.01]}},
    "oapl": {"loss": "oapl", "advantage": "none"},
    "kimi": {"loss": "kimi", "advantage": "none"},
    "trajectory_balance": {"loss": "trajectory_balance", "advantage": "none", "reference": {}},
}


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    results = {}
    for name, objective in LOSSES.items():
        for cut, budget in {"": 64, "_one_by_one": 26}.items():
            if not cut or rank.layout.world_size == 1:
                policy = rank.policy(controls=(), objective=ObjectiveConfig(**objective), budget=budget)
                results[name + cut] = rank.train(policy, ["a", "b"])
    if rank.layout.rank == 0:
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

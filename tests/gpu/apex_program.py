"""Local layers in bfloat16 with and without Apex's kernels: log-probs, a gradient over several
micro-batches, and a step of each case. On the CPU, torch's operations implement Apex's interface.

Arguments: cpu or cuda, the directory of the test data (tests/parallel/layouts.py), the directory
for the output, the ParallelConfig as JSON, and the cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

from megatron_async_rl.config.policy import LoraConfig, ParallelConfig
from megatron_async_rl.policy import device, layers
from tests import apex_stand_in
from tests.gpu.train_program import SMOOTH, cpu
from tests.parallel.layout_program import Rank, received, scorable
from tests.parallel.objective_program import ReducedGradient

CASES = {
    "padded": ("tied", "a", {}),
    "packed": ("tied", "a", {"sequence": "packed", "recompute": "full"}),
    "narrow": ("tied", "a", {"gradient_dtype": "bfloat16"}),
    "mixture": ("mixture", "mixture_a", {}),
}
"""Name -> model, batch, settings of the policy."""
PLAIN = {
    "float32": {"dtype": "float32"},
    "lora": {"dtype": "bfloat16", "lora": LoraConfig(rank=2)},
}
"""Policies that do not support a fused gradient."""


def measured(rank: Rank, case: str) -> dict:
    model, batch, settings = CASES[case]
    settings = {"dtype": "bfloat16", "budget": 48, **settings}
    smooth = rank.policy(model, objective=SMOOTH, **settings)
    gradient = ReducedGradient(rank, smooth, batch).whole()
    policy = rank.policy(model, **settings)
    scores = policy.score(received(policy, scorable(rank.batches[batch])))
    step = policy.train_step(received(policy, rank.batches[batch]))
    return {
        "fused": policy.model.config.gradient_accumulation_fusion,
        "gradient": None if gradient is None else cpu(gradient),
        "scores": scores,
        "step": step,
    }


def main() -> None:
    kind, material, output, parallel, *cases = sys.argv[1:]
    config = ParallelConfig.model_validate_json(parallel)
    rank = Rank(Path(material), config, Path(output), kind)
    there = mock.patch.object(layers, "apex_applies", lambda dtype, _: dtype == torch.bfloat16)
    away = mock.patch.object(layers, "apex_applies", return_value=False)
    results: dict = {case: [] for case in cases}
    for case, found in results.items():
        with away:
            found.append(measured(rank, case))
        before = dict(apex_stand_in.CALLS)
        with there:
            found.append(measured(rank, case))
        found[1]["calls"] = {
            name: count - before.get(name, 0) for name, count in apex_stand_in.CALLS.items()
        }
    with there:
        results["plain"] = {
            name: rank.policy(**settings).model.config.gradient_accumulation_fusion
            for name, settings in PLAIN.items()
        }
    if rank.layout.rank == 0:
        torch.save(results, Path(output) / "apex.pt")
    rank.layout.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        apex_stand_in.install()
    device.install(sys.argv[1])
    main()

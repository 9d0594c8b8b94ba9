"""Training steps of a tiny policy on one device: scores, steps under GAC, the gradient of a second
batch and the weights.

Arguments: cpu or cuda, the models' dtype, the material's directory (tests/parallel/layouts.py), and
the file to write.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.policy import device
from tests.parallel.layout_program import Rank, received, scorable
from tests.parallel.objective_program import ReducedGradient


def cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def main() -> None:
    kind, dtype, material, output = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    rank = Rank(Path(material), ParallelConfig(), Path(output).with_suffix(".scratch"), kind)
    results = {}
    for name, model, sequence, a, b in (
        ("tied", "tied", "padded", "a", "b"),
        ("packed", "tied", "packed", "a", "b"),
        ("mixture", "mixture", "padded", "mixture_a", "mixture_b"),
    ):
        policy = rank.policy(model, dtype=dtype, lr=1e-3, sequence=sequence)
        gradient = cpu(ReducedGradient(rank, policy, a).whole())
        scores = policy.score(received(policy, scorable(rank.batches[a])))
        trained = rank.train(policy, [a, a, b])
        results[name] = {
            "gradient": gradient,
            "scores": scores,
            "steps": trained["steps"],
            "weights": cpu(trained["weights"]),
            "devices": {str(p.device.type) for p in policy.model.chunks[0].parameters()},
            "dtypes": {str(p.dtype) for p in policy.model.chunks[0].parameters()},
        }
    torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    device.install(sys.argv[1])
    main()

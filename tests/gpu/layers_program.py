"""One step of a tiny bfloat16 policy with layers of either family and the same weights, and each
family's checkpoint loaded by the other.

Arguments: cpu or cuda, the directory of the test data (tests/parallel/layouts.py), the file to
write, and the two families, as values of policy.layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import adam_names, adam_shards
from megatron_async_rl.policy.parameters import whole_model_names
from tests.gpu.train_program import SMOOTH, cpu
from tests.parallel.layout_program import Rank, received, scorable
from tests.parallel.objective_program import ReducedGradient
from tests.parallel.whole_tensors import assembled

CASES = {
    "tied": ("tied", "padded", "a"),
    "packed": ("tied", "packed", "a"),
    "mixture": ("mixture", "padded", "mixture_a"),
}
"""Name -> model, sequence layout, batch."""


def state_of(policy) -> dict[str, torch.Tensor]:
    """Return Adam's moments and float32 weights, by canonical name."""
    model, found = policy.model, {}
    for kind in adam_names(model):
        (tensors,) = assembled(adam_shards(policy.optimizer, kind), model, policy.optimizer)
        own = {id(p): name for name, p in model.chunks[0].named_parameters()}
        for parameter, name in whole_model_names(model.bridge, model.chunks[0]):
            found[f"{kind}/{name}"] = tensors[own[id(parameter)]]
    return found


def held(rank: Rank, policy) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": cpu(rank.weights(policy)), "state": cpu(state_of(policy))}


def main() -> None:
    kind, material, output, *families = sys.argv[1:]
    scratch = Path(output).with_suffix(".scratch")
    rank = Rank(Path(material), ParallelConfig(), scratch, kind)
    results = {}
    for name, (model, sequence, batch) in CASES.items():
        found = []
        for number, layers in enumerate(families):
            settings = {"dtype": "bfloat16", "sequence": sequence, "layers": layers}
            smooth = rank.policy(model, objective=SMOOTH, **settings)
            gradient = cpu(ReducedGradient(rank, smooth, batch).whole())
            policy = rank.policy(model, **settings)
            scores = policy.score(received(policy, scorable(rank.batches[batch])))
            (step,) = rank.train(policy, [batch])["steps"]
            policy.save(scratch / f"{name}-{number}", 1, {}, keep=1)
            found.append(
                {
                    "layers": policy.model.bridge.layers.name,
                    "gradient": gradient,
                    "scores": scores,
                    "step": step,
                    "saved": held(rank, policy),
                }
            )
        for number, layers in enumerate(families):
            policy = rank.policy(model, dtype="bfloat16", sequence=sequence, layers=layers)
            policy.load(scratch / f"{name}-{1 - number}")
            found[number]["from_other"] = held(rank, policy)
            found[number]["next"] = rank.train(policy, [batch])["steps"][0]
        results[name] = found
    torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    device.install(sys.argv[1])
    main()

"""One rank of the differential test: trains a policy as a case specifies, and writes every
optimizer step's whole gradient and the final weights; arguments as those of layout_program.

The material also has `cases.json`: case name -> model, objective, controls, optimizer and batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import LoraConfig, ParallelConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.policy.adam_view import gradients_of
from tests.parallel.layout_program import Rank, received, run_each
from tests.parallel.whole_tensors import assembled


class Watched:
    """A policy whose optimizer steps are recorded."""

    def __init__(self, rank: Rank, policy: Any, *, adapters: bool) -> None:
        self.rank, self.policy, self.adapters = rank, policy, adapters
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.parts: list[list[str]] = []
        prepare, step = policy.optimizer.prepare_grads, policy._optimizer_step

        def prepared() -> Any:
            overflow = prepare()
            self.gradients.append(self._whole_gradient())
            return overflow

        def stepped(minibatch: Any, *given: Any, **settings: Any) -> Any:
            self.parts.append(minibatch.samples.ids.to_pylist())
            return step(minibatch, *given, **settings)

        policy.optimizer.prepare_grads, policy._optimizer_step = prepared, stepped

    def _whole_gradient(self) -> dict[str, torch.Tensor]:
        """Under the names of Hugging Face's files: exported instead of the weights."""
        policy = self.policy
        shards = [
            one.grad.clone() for one in gradients_of(policy.optimizer, self.rank.layout).shards
        ]
        tensors = assembled(shards, policy.model, policy.optimizer)
        held = [dict(chunk.named_parameters()) for chunk in policy.model.chunks]
        weights = [{name: p.detach().clone() for name, p in own.items()} for own in held]
        self._write(held, tensors)
        found = self.rank.weights(policy, adapters=self.adapters)
        self._write(held, weights)
        return found

    @staticmethod
    def _write(held: Any, tensors: Any) -> None:
        for own, given in zip(held, tensors, strict=True):
            for name, parameter in own.items():
                parameter.data.copy_(given[name])


def run_case(material: Path, parallel: ParallelConfig, output: Path) -> None:
    case = json.loads((material / "cases.json").read_text())[output.stem]
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    controls = TypeAdapter(Config.model_fields["controls"].annotation)
    policy = rank.policy(
        case["model"],
        objective=ObjectiveConfig.model_validate(case["objective"]),
        controls=controls.validate_python(tuple(case["controls"])),
        budget=case["budget"],
        sequence=case["sequence"],
        recompute=case["recompute"],
        lora=case["lora"] and LoraConfig(**case["lora"]),
        **case["optimizer"],
    )
    adapters = case["lora"] is not None
    first = rank.weights(policy, adapters=adapters)
    watched = Watched(rank, policy, adapters=adapters)
    losses = [
        policy.train_step(received(policy, rank.batches[name]))["policy/loss"]
        for name in case["batches"]
    ]
    weights = rank.weights(policy, adapters=adapters)
    if rank.layout.rank == 0:
        torch.save(
            {
                "first": first,
                "losses": losses,
                "parts": watched.parts,
                "gradients": watched.gradients,
                "weights": weights,
            },
            output,
        )
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_case)

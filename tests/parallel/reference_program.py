"""One rank of the tests of reference and proximal policies: the precomputed columns, against scores
under the same weights.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port,
ParallelConfig), all of this number of ranks and run one after the other, and the output directory.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.objectives.objective import valid_samples
from megatron_async_rl.policy.parameters import load_hf
from megatron_async_rl.samples.rows import TrainBatch
from tests.parallel.layout_program import Rank, received, run_each
from tests.train_batches import groups_of, samples_in

KL = KlConfig(coef=0.1)
DECAY = 0.6


def at_version(batch: TrainBatch, version: int) -> TrainBatch:
    """The batch as version `version` would train it: tokens of the versions 0..version, several in
    one response."""
    groups = [
        [
            dataclasses.replace(s, versions=np.minimum(s.versions, version).astype(np.int32))
            for s in group
        ]
        for group in groups_of(batch)
    ]
    return TrainBatch.of(version, groups)


class Watched:
    """A policy with a plain objective, and its precomputed columns, and the weights after each."""

    def __init__(self, rank: Rank, model: str, objective: ObjectiveConfig) -> None:
        self.policy = rank.policy(model, controls=(), objective=objective, lr=5e-3)
        self.precomputed: list[dict[str, torch.Tensor]] = []
        self.untouched: list[bool] = []
        self.rank = rank
        prepare = self.policy.objective.prepare

        def watched(batch, columns):
            self.precomputed.append({name: values.clone() for name, values in columns.items()})
            mine = all(
                torch.equal(now, then)
                for now, then in zip(self.parameters(), self.before, strict=True)
            )
            everyone: list = [None] * rank.layout.world_size
            dist.all_gather_object(everyone, mine)
            self.untouched.append(all(everyone))
            return prepare(batch, columns)

        self.policy.objective.prepare = watched

    def parameters(self) -> list[torch.Tensor]:
        return [
            parameter.detach().clone()
            for chunk in self.policy.model.chunks
            for parameter in chunk.parameters()
        ]

    def set(self, parameters) -> None:
        with torch.no_grad():
            held = [
                parameter for chunk in self.policy.model.chunks for parameter in chunk.parameters()
            ]
            for parameter, value in zip(held, parameters, strict=True):
                parameter.copy_(value)

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        samples = valid_samples(received(self.policy, batch))
        return torch.from_numpy(np.concatenate(self.policy.score(samples)))

    def train(self, batch: TrainBatch) -> dict[str, float]:
        self.before = self.parameters()
        return self.policy.train_step(received(self.policy, batch))


def reference(rank: Rank, model: str, **settings) -> dict:
    """Three steps; scores of the same batch before each, under the weights in training."""
    watched = Watched(rank, model, ObjectiveConfig(kl=KL, reference=ReferenceConfig(**settings)))
    batch = rank.batches["a"]
    scores, steps = [], []
    for _ in range(3):
        scores.append(watched.scores(batch))
        steps.append(watched.train(batch))
    return {
        "scores": scores,
        "steps": steps,
        "precomputed": watched.precomputed,
        "untouched": watched.untouched,
    }


def from_another_directory(rank: Rank) -> dict:
    path = rank.scratch / "other"
    if rank.layout.rank == 0:
        shutil.copytree(rank.material / "tied", path)
        tensors = {
            name: 0.9 * tensor for name, tensor in load_file(path / "model.safetensors").items()
        }
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    rank.layout.barrier()
    found = reference(rank, "tied", path=path)
    other = Watched(rank, "tied", ObjectiveConfig())
    load_hf(other.policy.model.bridge, other.policy.model.chunks, path)
    return {**found, "expected": other.scores(rank.batches["a"])}


def snapshot(rank: Rank, model: str) -> dict:
    """Versions 0, 1 and 2, and the log-probs that the trainer itself computes at each; the last
    also from a checkpoint."""
    objective = ObjectiveConfig(proximal="snapshot", snapshots=3)
    watched, resumed = Watched(rank, model, objective), Watched(rank, model, objective)
    scores, steps = [], []
    for version in range(3):
        batch = at_version(rank.batches["a"], version)
        if version == 2:
            watched.policy.save(rank.scratch / "snapshots", version, {}, keep=1)
            resumed.policy.load(rank.scratch / "snapshots")
            oldest = resumed.policy.references.oldest(version)
            resumed.train(batch)
        scores.append(watched.scores(batch))
        steps.append(watched.train(batch))
    versions = torch.from_numpy(np.concatenate([s.versions for s in samples_in(batch) if s.valid]))
    expected = torch.stack(scores).gather(0, versions.long()[None])[0]
    try:
        watched.train(at_version(rank.batches["a"], 3))
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "scores": scores,
        "steps": steps,
        "precomputed": watched.precomputed,
        "untouched": watched.untouched,
        "expected": expected,
        "versions": versions,
        "refused": refused,
        "resumed": resumed.precomputed[0],
        "oldest": oldest,
    }


def average(rank: Rank, model: str) -> dict:
    watched = Watched(rank, model, ObjectiveConfig(proximal="ewma", ewma_decay=DECAY))
    batch, steps = rank.batches["a"], []
    mean = watched.parameters()
    for step in range(3):
        if step:
            mean = [
                DECAY * old + (1 - DECAY) * now
                for old, now in zip(mean, watched.parameters(), strict=True)
            ]
        steps.append(watched.train(batch))
    scores = watched.scores(batch)
    watched.set(mean)
    return {
        "steps": steps,
        "precomputed": watched.precomputed,
        "untouched": watched.untouched,
        "expected": watched.scores(batch),
        "scores": [scores],
    }


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    results = {
        "frozen": reference(rank, "tied"),
        "refreshed": reference(rank, "untied", refresh_every=2),
        "path": from_another_directory(rank),
        "snapshot": snapshot(rank, "tied"),
        "average": average(rank, "untied"),
    }
    if rank.layout.rank == 0:
        torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    run_each(run_layout)

"""One rank of a layout test: trains tiny policies for a few steps on given batches and writes what
it measured.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port,
ParallelConfig), all of this number of ranks and run one after the other, and the output directory.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_async_rl.config.controls import EssLrControl, GacControl
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.gradients import squared_norm
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import gradients_of, optimizer_parameters
from megatron_async_rl.policy.anomaly import NonFiniteError
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.weights.export import WeightExporter
from tests.train_batches import groups_of

TEMPERATURE = 0.7
VERSIONS = 8
"""Number of past weight versions that a policy keeps if its objective names none."""
GAC = GacControl(c_low=0.15)
CONTROLS = (GAC, EssLrControl())


class Rank:
    def __init__(
        self, material: Path, parallel: ParallelConfig, scratch: Path, device_type: str = "cpu"
    ) -> None:
        self.material = material
        self.scratch = scratch
        self.parallel = parallel
        self.layout = initialise(parallel, device_type, timeout_s=600)
        self.batches = pickle.loads((material / "batches.pickle").read_bytes())

    def policy(
        self,
        model="tied",
        *,
        controls=(GAC,),
        budget=160,
        objective=None,
        temperature=TEMPERATURE,
        dtype="float32",
        on_anomaly="report",
        max_nonfinite_steps=5,
        anomalies=None,
        explained=None,
        sequence="padded",
        sharing="auto",
        layers="local",
        recompute="none",
        routing_replay="none",
        lora=None,
        fp8=None,
        seed=0,
        **optimizer,
    ):
        # A large epsilon keeps Adam smooth: with a tiny one the update of a near-zero gradient is
        # its rounding's sign.
        optimizer = {"lr": 1e-3, "eps": 0.01, "weight_decay": 1.0, "clip_grad": 0.5, **optimizer}
        objective = objective or ObjectiveConfig()
        if objective.snapshots is None:
            objective = objective.model_copy(update={"snapshots": VERSIONS})
        return Policy.build(
            ModelConfig(path=self.material / model, dtype=dtype),
            PolicyConfig(
                parallel=self.parallel,
                optimizer=OptimizerConfig(**optimizer),
                sequence=sequence,
                prefix_sharing=sharing,
                layers=layers,
                tokens_per_micro_batch=budget,
                logprob_chunk_tokens=16,
                on_anomaly=on_anomaly,
                max_nonfinite_steps=max_nonfinite_steps,
                recompute=recompute,
                routing_replay=routing_replay,
                lora=lora,
                fp8=fp8,
            ),
            objective,
            controls,
            layout=self.layout,
            temperature=temperature,
            total_steps=10,
            seed=seed,
            anomalies=anomalies,
            explained=explained,
        )

    def weights(self, policy, *, adapters=False):
        exporter = exporter_of(policy, adapters=adapters)
        tensors = {}
        for bucket in exporter.buckets(2**30):
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                if tensor is not None:
                    tensors[name] = tensor.clone()
        return tensors

    def train(self, policy, names):
        steps = [policy.train_step(received(policy, self.batches[name])) for name in names]
        return {"steps": steps, "weights": self.weights(policy)}

    def norms(self, policy):
        """The same gradient through our helper and through Megatron's."""
        return {
            "ours": squared_norm(gradients_of(policy.optimizer, self.layout)) ** 0.5,
            "megatron": policy.optimizer.get_grad_norm(),
        }


def exporter_of(policy, *, adapters=False):
    return WeightExporter(policy.model.bridge, policy.model.chunks, adapters=adapters)


def received(policy, batch):
    """Receive the batch as in a run, where only rank 0 has it."""
    return policy.receive(lambda: batch)


def scorable(batch):
    """The batch with the samples, too, whose reward failed: they belong to no rank."""
    groups = [
        [dataclasses.replace(s, reward_error=None) for s in group] for group in groups_of(batch)
    ]
    return TrainBatch.of(batch.version, groups)


def held_out(policy, batch):
    """The loss of the batch, taken two groups at a time."""
    groups = groups_of(batch)
    parts = [groups[start : start + 2] for start in range(0, len(groups), 2)]
    batches = iter([TrainBatch.of(batch.version, part) for part in parts])
    return policy.mean_loss(lambda: next(batches, None))


def tokens_by_rank(rank: Rank, policy, batch) -> list[tuple[int, list[str]]]:
    """Each rank of the world: its data-parallel rank, and the samples that it has tokens of."""
    mine = received(policy, batch)
    own = mine.ids.take(pa.array(np.flatnonzero(mine.token_starts >= 0))).to_pylist()
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(everyone, (rank.layout.dp_rank, own))
    return everyone


def spoil_rank_zeros_gradient(policy):
    if policy.layout.rank == 0:
        for parameter in policy.model.chunks[0].parameters():
            parameter.main_grad.fill_(float("nan"))


def everywhere(rank: Rank) -> dict:
    """Results on which all layouts must agree."""
    results = {}
    for model in ("tied", "untied"):
        policy = rank.policy(model, controls=CONTROLS)
        scores = policy.score(received(policy, scorable(rank.batches["a"])))
        results[model] = {
            "scores": scores,
            "held_out": held_out(policy, rank.batches["given"]),
            **rank.train(policy, ["a", "a", "b"]),
            "norms": rank.norms(policy),
        }
    recompute = ObjectiveConfig(
        proximal="recompute", aggregation="seq-mean-token-mean", advantage="rloo"
    )
    results["recompute"] = rank.train(rank.policy(objective=recompute), ["a"])

    policy = rank.policy(controls=(GacControl(c_low=0.15, c_high=0.5, max_consecutive_skips=1),))
    first = rank.train(policy, ["a"])
    adam = [
        {k: torch.as_tensor(v).clone() for k, v in state.items()}
        for _, state in policy.optimizer.optimizer.state.items()
    ]
    skipped = rank.train(policy, ["a"])
    untouched = all(
        torch.equal(torch.as_tensor(now[key]), before[key])
        for now, before in zip(policy.optimizer.optimizer.state.values(), adam, strict=True)
        for key in before
    )
    results["skip"] = {
        "before": first["weights"],
        **skipped,
        "adam_untouched": untouched,
        "adam_states": len(adam),
    }
    results["after_skip"] = rank.train(policy, ["a"])

    traced = rank.scratch / "not_finite.jsonl"
    rank.scratch.mkdir(exist_ok=True)
    policy = rank.policy(anomalies=traced, max_nonfinite_steps=2)
    runs = [rank.train(policy, names) for names in (["a"], ["one_poisoned"], ["a", "a"])]
    whole = policy.schedule.forward_backward
    policy.schedule.forward_backward = lambda *args: (
        whole(*args),
        spoil_rank_zeros_gradient(policy),
    )
    runs.append(rank.train(policy, ["a"]))
    policy.schedule.forward_backward = whole
    runs.append(rank.train(policy, ["a", "a"]))
    results["bad"] = {
        "steps": [step for run in runs for step in run["steps"]],
        "around_loss": [run["weights"] for run in runs[:2]],
        "around_gradient": [run["weights"] for run in runs[2:4]],
        **ruined(rank, policy),
    }
    lines = traced.read_text().splitlines() if rank.layout.rank == 0 else []
    results["bad"]["written"] = [json.loads(line) for line in lines]

    policy, resumed = rank.policy(schedule="linear"), rank.policy(schedule="linear")
    through = rank.train(policy, ["a", "b"])
    policy.save(rank.scratch / "checkpoint", 2, {"version": 2, "note": "kept"}, keep=1)
    state = resumed.load(rank.scratch / "checkpoint")
    results["uninterrupted"] = {"before": through["weights"], **rank.train(policy, ["a", "b"])}
    results["resumed"] = {
        "state": state,
        "loaded": rank.weights(resumed),
        "held_out": held_out(resumed, rank.batches["given"]),
        **rank.train(resumed, ["a", "b"]),
    }
    results["tokens_of"] = tokens_by_rank(rank, policy, rank.batches["a"])
    results["nothing_saved"] = {"state": resumed.load(rank.scratch / "nowhere")}

    policy = rank.policy(controls=(), clip_grad=None)
    results["decay"] = {"before": rank.weights(policy), **rank.train(policy, ["equal"])}
    results["empty"] = {"before": rank.weights(policy), **rank.train(policy, ["failed"])}
    return results


def ruined(rank: Rank, policy: Policy) -> dict:
    """Two steps in a row that are not finite, and then weights that are spoiled on one rank, after
    a checkpoint of good ones."""
    folder, refused = rank.scratch / "ruined", []

    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
        except NonFiniteError as error:
            refused.append(str(error))
        else:
            refused.append("")

    attempt(lambda: policy.save(folder, 1, {"version": 1}, keep=1))
    attempt(policy.require_finite_steps)
    rank.train(policy, ["one_poisoned", "one_poisoned"])
    attempt(policy.require_finite_steps)
    if rank.layout.rank == rank.layout.world_size - 1:
        optimizer_parameters(policy.optimizer)[0].data.view(-1)[0] = math.nan
    attempt(lambda: policy.save(folder, 2, {"version": 2}, keep=1))
    return {"refused": refused, "kept": sorted(path.name for path in folder.iterdir())}


def alone(rank: Rank) -> dict:
    """Results that one rank suffices for: cuts, orders and the absence of clipping do not
    matter."""
    variants = {
        "one_by_one": rank.policy(controls=CONTROLS, budget=26),
        "smaller": rank.policy(controls=CONTROLS, budget=96),
        "permuted": rank.policy(controls=CONTROLS),
        "given": rank.policy(objective=ObjectiveConfig(loss="sft", advantage="none")),
    }
    names = {"permuted": ["a_permuted", "a_permuted", "b"], "given": ["given"]}
    results = {
        name: rank.train(policy, names.get(name, ["a", "a", "b"]))
        for name, policy in variants.items()
    }
    unclipped = rank.policy(controls=(), clip_grad=None)
    results["unclipped"] = {
        **rank.train(unclipped, ["a"]),
        "gradient": unclipped.optimizer.get_grad_norm(),
    }
    return results


def announced(*args: Any) -> None:
    raise AssertionError("a pipeline stage announced the shape of a tensor, which all stages know")


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    with mock.patch.object(P2PCommunicator, "_communicate_shapes", announced):
        results = everywhere(rank)
    if rank.layout.world_size == 1:
        results |= alone(rank)
    save(
        rank, results, [result["steps"] for result in results.values() if "steps" in result], output
    )


def save(
    rank: Rank, results: dict, runs: list[list[dict]], output: Path, others: Any = None
) -> None:
    """Ends the layout. `ranks_agree`: every rank got the same metrics in the steps of `runs`, times
    aside, and the same `others`, to the bit."""
    steps = [
        [{k: v for k, v in step.items() if not k.startswith("time/")} for step in run]
        for run in runs
    ]
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(everyone, json.dumps([steps, others]))
    if rank.layout.rank == 0:
        results["ranks_agree"] = len(set(everyone)) == 1
        torch.save(results, output)
    rank.layout.shutdown()


def run_each(run: Callable[[Path, ParallelConfig, Path], None]) -> None:
    """A program's whole main: `run(material, parallel, file to save to)` for each layout of the
    command line in turn."""
    material, parallels, output = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    device.install("cpu")
    for name, (port, parallel) in parallels.items():
        # A store keeps the addresses of groups that are gone, so each layout meets in a store of
        # its own.
        os.environ["MASTER_PORT"] = str(port)
        run(material, ParallelConfig(**parallel), output / f"{name}.pt")
        # Policies are circles of references, and hold the layout's process groups: each group is a
        # thread that wakes up a hundred times a second.
        gc.collect()


if __name__ == "__main__":
    run_each(run_layout)

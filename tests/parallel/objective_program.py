"""One rank of the tests of whole-batch decisions and gradient controls; arguments as those of
layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.gradients import clip_to, products_with, squared_norm
from megatron_async_rl.policy import adam_view
from megatron_async_rl.policy.adam_view import gradients_of
from megatron_async_rl.policy.packing import Padded
from megatron_async_rl.policy.parallel import Layout
from tests.parallel.layout_program import CONTROLS, Rank, received, run_each, save, scorable
from tests.parallel.layouts import DISTINCT, FEW, LAYOUTS, MIXTURE_LAYOUTS, replaced
from tests.parallel.whole_tensors import assembled
from tests.thorough import THOROUGH, chosen

# With bounds at which the material's batches have tokens on both sides.
OBJECTIVES = {
    "m2po": ObjectiveConfig(loss={"name": "m2po", "second_moment": 0.002}),
    "bapo": ObjectiveConfig(
        loss={
            "name": "bapo",
            "target_share": 0.5,
            "low": [0.9, 0.99, 0.01],
            "high": [1.01, 1.2, 0.01],
        }
    ),
    "whitened": ObjectiveConfig(advantage={"name": "reinforce_pp", "gamma": 0.9}),
    "renormalized": ObjectiveConfig(
        proximal="recompute",
        corrections=({"name": "reject", "statistic": "k2", "level": "token", "high": 0.02},),
        renormalize=True,
        aggregation="seq-mean-token-mean",
    ),
    "opob": ObjectiveConfig(advantage="opob", loss="reinforce", aggregation="seq-mean-token-mean"),
}
DENSE_OBJECTIVES = {
    "m2po_cap": ObjectiveConfig(loss={"name": "m2po", "mode": "cap", "second_moment": 0.002}),
    "oapl": ObjectiveConfig(loss="oapl", advantage="none"),
    "kimi": ObjectiveConfig(loss="kimi", advantage="none"),
    "trajectory_balance": ObjectiveConfig(
        loss="trajectory_balance", advantage="none", reference={}
    ),
}
"""Losses that decide on the whole batch and do not depend on experts; on the layouts `FEW`."""
REPLAYED = ObjectiveConfig(loss="reinforce", advantage="none")
SEVERAL_STEPS = ObjectiveConfig(minibatches=2, epochs=2, proximal="recompute")
REPLAYS = {
    "padded": {},
    "packed_recomputed": {"sequence": "packed", "recompute": "full"},
}
"""Settings of the policies that replay given experts."""
DECIDING = chosen(
    DISTINCT | MIXTURE_LAYOUTS,
    "single",
    "pipeline",
    "data_distributed_optimizer",
    "mixture_single",
    "expert",
)
"""Layouts that decide on whole batches. Decisions come before the optimizer step, so the gate
leaves out layouts that differ only in the optimizer. It also leaves out tensor-parallel layouts,
whose ranks have the same log-probs, and layouts of four ranks."""
WHOLE_BATCH = ("m2po", "bapo", *DENSE_OBJECTIVES)
SKIPPING = (
    ("single", "tensor_pipeline", "mixture_single", "expert_tensor")
    if THOROUGH
    else ("single", "pipeline", "mixture_single", "expert")
)
"""Layouts that skip an anomalous step. The layouts on which GAC skips steps show that a skipped
step changes nothing."""
ANOMALOUS = (
    *SKIPPING,
    "data_distributed_optimizer",
    *(["expert_replicated_optimizer"] if THOROUGH else []),
)
"""Layouts that trace one."""


UNTIED = chosen(LAYOUTS, "single", "pipeline")
"""Layouts that measure the gradient of an output layer of its own, too."""


class Recorder:
    """Keeps what the objective of a policy decided about each optimizer step."""

    def __init__(self, policy) -> None:
        self.decide = policy.objective.decide
        self.decisions: list[dict] = []
        policy.objective.decide = self

    def __call__(self, *args, **kwargs):
        targets = self.decide(*args, **kwargs)
        decided = targets.whole.decided
        self.decisions.append(
            {
                "advantages": targets.whole.advantages.clone(),
                "scalars": dict(decided.scalars),
                **{
                    name: value.clone()
                    for name, value in (decided.tokens | decided.sequences).items()
                },
            }
        )
        return targets


class ReducedGradient:
    """The reduced gradient of a batch before any control or step has seen it."""

    def __init__(self, rank: Rank, policy, name: str) -> None:
        self.rank, self.policy = rank, policy
        take = policy.step.take
        # Without a step there is no norm of the gradient.
        policy.step.take = lambda *args: {
            "policy/skipped": float(policy.optimizer.prepare_grads()),
            "policy/grad_norm": 0.0,
        }
        try:
            self.metrics = policy.train_step(received(policy, rank.batches[name]))
            assert self.metrics["policy/skipped"] == 0.0
        finally:
            policy.step.take = take
        # Asked for under the rule in force, which a test may have broken.
        self.view = lambda optimizer=policy.optimizer, layout=rank.layout: gradients_of(
            optimizer, layout
        )

    def shards(self) -> list[torch.Tensor]:
        return [shard.grad.clone() for shard in self.view().shards]

    def whole(self) -> dict[str, torch.Tensor]:
        """Under the names of Hugging Face's files, on rank 0."""
        policy, chunks = self.policy, self.policy.model.chunks
        tensors = assembled(self.shards(), policy.model, policy.optimizer)
        parameters = [dict(chunk.named_parameters()) for chunk in chunks]
        weights = [{n: p.detach().clone() for n, p in own.items()} for own in parameters]
        self._write(parameters, tensors)
        found = self.rank.weights(policy)
        self._write(parameters, weights)
        return found

    @staticmethod
    def _write(parameters, tensors) -> None:
        for own, given in zip(parameters, tensors, strict=True):
            for name, parameter in own.items():
                parameter.data.copy_(given[name])


@contextmanager
def always(name: str):
    """Megatron's answer of that name is true of every parameter."""
    with mock.patch.object(adam_view, name, return_value=True):
        yield


def broken_rules(gradient: ReducedGradient, reference) -> dict[str, tuple]:
    """The products as they would be with one part of the rule of `GradientShard.counted` wrong."""
    optimizer, layout = gradient.policy.optimizer, gradient.rank.layout
    sliced = optimizer.config.use_distributed_optimizer
    swapped = SimpleNamespace(
        config=SimpleNamespace(use_distributed_optimizer=not sliced),
        param_groups=optimizer.param_groups,
    )
    found = {}
    with always("param_is_not_shared"):
        found["tied twice"] = products_with(gradient.view(), reference)
    with always("param_is_not_tensor_parallel_duplicate"):
        found["tensor copies"] = products_with(gradient.view(), reference)
    found["slices as replicas" if sliced else "replicas as slices"] = products_with(
        gradient.view(swapped), reference
    )
    with mock.patch.object(Layout, "expert_replica", property(lambda self: self.replica)):
        found["experts as the rest"] = products_with(gradient.view(), reference)
    with mock.patch.object(Layout, "expert_replica", 0):
        found["every expert replica"] = products_with(gradient.view(), reference)
    with mock.patch.object(Layout, "replica", property(lambda self: self.dp_rank)):
        found["every context replica"] = products_with(gradient.view(), reference)
    found["every data replica"] = products_with(
        gradient.view(layout=replace(layout, dp_rank=0, cp_rank=0)), reference
    )
    return found


def measured_gradients(rank: Rank, model: str, a: str, b: str) -> dict:
    """Gradients of two batches at the same weights, g of b and r of a and b together: <g, r>,
    |g|^2 and |r|^2, the whole g, and g after clipping."""
    policy = rank.policy(model, controls=(), clip_grad=None)
    reference = ReducedGradient(rank, policy, a).shards()
    gradient = ReducedGradient(rank, policy, b)
    reference = [one + other for one, other in zip(reference, gradient.shards(), strict=True)]
    found = {
        "products": products_with(gradient.view(), reference),
        "broken": broken_rules(gradient, reference),
        "norms": rank.norms(policy),
        "whole": gradient.whole(),
    }
    norm = found["norms"]["ours"]
    clip_to(gradient.view(), norm, norm / 4)
    return found | {
        "clipped": squared_norm(gradient.view()) ** 0.5,
        "clipped_whole": gradient.whole(),
    }


def models_of(layout: str) -> tuple[str, ...]:
    """Whose gradient is measured. The one with experts is tied, too; what is not tied is counted
    like any parameter, so one dimension at a time shows it, and in the gate the pipeline alone."""
    if layout.startswith(("mixture", "expert")):
        return ("mixture",)
    return ("tied", "untied") if layout in UNTIED else ("tied",)


def objectives_of(layout: str) -> dict[str, ObjectiveConfig]:
    return OBJECTIVES | DENSE_OBJECTIVES if layout in FEW else OBJECTIVES


def measured(rank: Rank, policy, names) -> dict:
    recorder = Recorder(policy)
    result = rank.train(policy, names)
    return {**result, "decisions": recorder.decisions}


def collectives_of_a_step(rank: Rank, policy, name) -> dict:
    """Collectives over the world, which decisions and controls use; the schedule's own run in other
    groups."""
    original, calls = dist.all_reduce, 0

    def counting(*args, **kwargs):
        nonlocal calls
        calls += kwargs.get("group") is rank.layout.world_group
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        (taken,) = rank.train(policy, [name])["steps"]
    finally:
        dist.all_reduce = original
    return {"calls": calls, "micro_batches": taken["policy/micro_batches"]}


def resumed(rank: Rank, model: str, a: str, b: str, **settings) -> dict:
    policy, again = (rank.policy(model, schedule="linear", **settings) for _ in range(2))
    rank.train(policy, [a, b])
    policy.save(rank.scratch / "checkpoint", 2, {"version": 2}, keep=1)
    again.load(rank.scratch / "checkpoint")
    return {
        "loaded": rank.weights(again),
        "saved": rank.weights(policy),
        "runs": [rank.train(p, [a, b]) for p in (policy, again)],
    }


def anomalous(rank: Rank, prefix: str, on_anomaly: str) -> dict:
    """Six steps on usual samples, and one in which a sample has sampled a token that the model
    embeds as zeros."""
    file = rank.scratch / f"{on_anomaly}.jsonl"
    rank.scratch.mkdir(exist_ok=True)
    policy = rank.policy(
        "mixture_blank" if prefix else "tied_blank",
        controls=(),
        lr=1e-7,
        weight_decay=0.0,
        # All micro-batches in one: what is looked for does not depend on the cut.
        budget=256,
        on_anomaly=on_anomaly,
        anomalies=file,
    )
    usual = rank.train(policy, [f"{prefix}usual"] * 6)
    spoiled = rank.train(policy, [f"{prefix}one_blank"])
    written = file.read_text() if rank.layout.rank == 0 else ""
    return {
        "usual": usual["steps"],
        "before": usual["weights"],
        "step": spoiled["steps"][0],
        "after": spoiled["weights"],
        "written": [json.loads(line) for line in written.splitlines()],
    }


def explained(rank: Rank, model: str, batch: str) -> dict:
    """The explanation of a first step, and the weights after it."""
    file = rank.scratch / "explanation.json"
    rank.scratch.mkdir(exist_ok=True)
    policy = rank.policy(model, explained=(rank.batches[batch].version + 1, file))
    trained = rank.train(policy, [batch])
    written = json.loads(file.read_text()) if rank.layout.rank == 0 else {}
    plain = rank.train(rank.policy(model), [batch])
    return {"written": written, "trained": trained, "plain": plain}


def replayed(rank: Rank, settings: dict) -> dict:
    """Log-probs, and the gradient of a step, with the experts that came with the samples."""
    policy = rank.policy(
        "mixture",
        objective=REPLAYED,
        routing_replay="rollout",
        controls=(),
        clip_grad=None,
        **settings,
    )
    scores = policy.score(received(policy, scorable(rank.batches["mixture_routed"])))
    gradient = ReducedGradient(rank, policy, "mixture_routed")
    return {
        "scores": scores,
        "gradient": gradient.whole(),
        "rerouted": gradient.metrics["policy/rerouted"],
    }


def several_steps(rank: Rank, batch: str, replay: str, objective=SEVERAL_STEPS) -> dict:
    """On a model that moves far within the batch."""
    policy = rank.policy(
        "mixture", objective=objective, routing_replay=replay, controls=(), lr=0.02
    )
    return rank.train(policy, [batch])


def with_own_choice(rank: Rank, name: str) -> None:
    """Adds the batch `..._own`: with the experts that the model itself chooses, padded and
    alone."""
    policy = rank.policy("mixture", routing_replay="proximal")
    routing = policy.schedule.routing
    mine = received(policy, scorable(rank.batches[name]))
    chosen = {}
    for micro_batch in policy.batcher.of(mine).micro_batches:
        policy.schedule.forward([micro_batch], "record")
        layers = routing.recorded[micro_batch]
        rows, length = micro_batch.tokens.shape
        by_row = torch.stack([layers[layer].view(length, rows, -1) for layer in sorted(layers)], 2)
        for row, sample in enumerate(micro_batch.samples):
            read = by_row[: mine.fed[sample], row]
            chosen[mine.ids[sample].as_py()] = read.contiguous().numpy().tobytes()
    rank.batches[f"{name}_own"] = replaced(
        rank.batches[name], lambda sample: {"routed_experts": chosen[sample.id]}
    )


def counting_routers(rank: Rank, sequence: str) -> dict:
    """The gradient of a step whose routers add Megatron's losses on their use of experts, of the
    batch as one micro-batch."""
    policy = rank.policy(
        "mixture",
        objective=REPLAYED,
        controls=(),
        clip_grad=None,
        budget=4096,
        sequence=sequence,
        # These losses count the tokens of shared prefixes once.
        sharing="never",
    )
    config = policy.model.config
    config.moe_aux_loss_coeff = 0.1
    # Under sequence parallelism Megatron takes the mean of ranks' means, whose tokens differ.
    config.moe_z_loss_coeff = None if config.sequence_parallel else 0.1
    for chunk in policy.model.chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.routing_type = "aux_loss"

    def together(self, share, segments, budget):
        return [tuple(share[(-segments.fed[share]).argsort(kind="stable")].tolist())]

    with mock.patch.object(Padded, "cut", together):
        return ReducedGradient(rank, policy, "mixture_a").whole()


def routing(rank: Rank) -> dict:
    """The model of experts, replayed."""
    found = {name: replayed(rank, settings) for name, settings in REPLAYS.items()}
    found["counted"] = {kind: counting_routers(rank, kind) for kind in ("padded", "packed")}
    found["proximal"] = several_steps(rank, "mixture_a", "proximal")
    if rank.layout.world_size == 1:
        with_own_choice(rank, "mixture_a")
        for replay in ("none", "rollout"):
            found[replay] = several_steps(rank, "mixture_a_own", replay)
            one = several_steps(rank, "mixture_a_own", replay, ObjectiveConfig())
            found[f"one_step_{replay}"] = one
    return found


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("tied", "a", "b")
    results: dict = {
        "gradients": {name: measured_gradients(rank, name, a, b) for name in models_of(output.stem)}
    }
    if mixture:
        results["routing"] = routing(rank)
    prefix = "mixture_" if mixture else ""
    kinds = {"report": ANOMALOUS, "skip": SKIPPING}
    results["anomalous"] = {
        kind: anomalous(rank, prefix, kind) for kind, on in kinds.items() if output.stem in on
    }
    if output.stem in ANOMALOUS:
        results["explained"] = explained(rank, model, a)
    if output.stem not in DECIDING:
        if rank.layout.rank == 0:
            torch.save(results, output)
        rank.layout.shutdown()
        return
    objectives = objectives_of(output.stem)
    for name, objective in objectives.items():
        results[name] = measured(rank, rank.policy(model, objective=objective), [a, b])
    if output.stem == "single":
        for name in WHOLE_BATCH:
            one_by_one = rank.policy(model, objective=objectives[name], budget=26)
            results[f"{name}_one_by_one"] = rank.train(one_by_one, [a, b])
    results["collectives"] = [
        collectives_of_a_step(
            rank,
            rank.policy(model, objective=OBJECTIVES["m2po"], controls=CONTROLS, budget=budget),
            a,
        )
        for budget in (26, 4096)
    ]
    if mixture:
        # Of the dense model layout_program measures these.
        results["controls"] = measured(rank, rank.policy(model, controls=CONTROLS), [a, a, b])
        policy = rank.policy(model)
        results["scores"] = policy.score(received(policy, scorable(rank.batches[a])))
        results["resumed"] = resumed(rank, model, a, b)
    steps = [results[name]["steps"] for name in (*objectives, *(["controls"] if mixture else []))]
    decisions = [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in decision.items()
        }
        for name in objectives
        for decision in results[name]["decisions"]
    ]
    save(rank, results, steps, output, decisions)


if __name__ == "__main__":
    run_each(run_layout)

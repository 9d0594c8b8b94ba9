"""Training steps of a tiny policy on one device: scores, steps under each control, gradients,
weights, recomputation, and checkpoints of this and of another process.

Arguments: cpu or cuda, the models' dtype, the directory of the test data
(tests/parallel/layouts.py), the file to write, and the directory of the other's checkpoint, which
is written if it is absent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest import mock

import torch

from megatron_async_rl.config.controls import (
    Beta1Control,
    DisplacementControl,
    EssLrControl,
    GacControl,
    MatchedLrControl,
    MatchedNormControl,
    MomentumByAlignmentControl,
)
from megatron_async_rl.config.losses import ReinforceLoss
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.controls.gac import Gac
from megatron_async_rl.objectives import objective as objective_module
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import (
    AdamView,
    StateMissing,
    TakenStep,
    adam_shards,
    gradients_of,
    optimizer_parameters,
)
from megatron_async_rl.policy.megatron_private import gradient_buffers, optimizer_parts
from tests import gradients
from tests.gpu.host_syncs import host_syncs
from tests.parallel import displacement_program, objective_program, recompute_program
from tests.parallel.layout_program import Rank, received, scorable
from tests.parallel.objective_program import ReducedGradient
from tests.parallel.parameter_state_program import with_room
from tests.parallel.whole_tensors import assembled

CONTROLS = (
    GacControl(c_low=0.15),
    MatchedNormControl(c_low=0.15),
    MatchedLrControl(target_update_norm=0.05),
    Beta1Control(),
    MomentumByAlignmentControl(),
    EssLrControl(),
    DisplacementControl(),
)


SMOOTH = ObjectiveConfig(loss=ReinforceLoss())
"""Objective for the comparison of gradients: with a clipped one, rounding may move a token across
the bound, which changes the gradient by that token's whole part."""
LEAN = {"moment_dtype": "bfloat16", "moment_offload": "cpu"}
"""Settings with the least moment memory on the device; with BF16 models gradients are also summed
in BF16."""


def cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def controlled(rank: Rank, control, dtype: str) -> dict:
    """Return three steps on batches of samples that began under any version so far."""
    policy, steps = displacement_program.trained(
        rank, "tied", ["a", "a", "b"], control, dtype=dtype, lr=1e-3
    )
    return {"steps": steps, "weights": cpu(rank.weights(policy))}


def cosines(rank: Rank, dtype: str) -> tuple[float, float]:
    """Return GAC's cosine of two batches' gradients, and that of the same shards in float64."""
    policy = rank.policy(controls=(), dtype=dtype)
    control, whole = Gac(GacControl(c_low=0.15)), []
    for name in ("a", "b"):
        gradient = ReducedGradient(rank, policy, name)
        (parameters,) = assembled(gradient.shards(), policy.model, policy.optimizer)
        whole.append(torch.cat([each.double().cpu().flatten() for each in parameters.values()]))
        measured = control.apply(gradients.step(gradient.view())).metrics
    return measured["gac/cosine"], gradients.cosine(*whole)


def waits(rank: Rank, kind: str, dtype: str, sequence: str) -> dict:
    """Return host syncs and uploads of the targets during a step's micro-batches, after a first
    step."""
    # A budget that divides the batch into more than two micro-batches.
    policy = rank.policy(dtype=dtype, sequence=sequence, budget=64)
    batch, run, steps = received(policy, rank.batches["a"]), policy.schedule.forward_backward, []

    def watched(micro_batches, consume) -> None:
        with (
            host_syncs(kind) as seen,
            mock.patch.object(
                objective_module, "on_device", wraps=objective_module.on_device
            ) as uploads,
        ):
            run(micro_batches, consume)
        steps.append((seen, len(micro_batches), uploads.call_count))

    policy.schedule.forward_backward = watched
    for _ in range(2):
        policy.train_step(batch)
    return dict(zip(("seen", "micro_batches", "uploads"), steps[1], strict=True))


def refusals(rank: Rank, dtype: str) -> dict[str, dict[str, str]]:
    """Return errors of AdamView's accessors with and without the distributed optimizer, over
    Megatron's Adam and over BlockAdam."""
    found, whole = {}, rank.parallel
    for distributed, settings in product((True, False), ({}, LEAN)):
        rank.parallel = whole.model_copy(update={"distributed_optimizer": distributed})
        policy = rank.policy(dtype=dtype, controls=(), **settings)
        policy.train_step(received(policy, rank.batches["a"]))
        ReducedGradient(rank, policy, "a")
        (part,) = optimizer_parts(policy.optimizer)
        adam = type(part.optimizer).__name__ if settings else "Adam"
        found[f"{type(part).__name__} over {adam}"] = said_of(policy, part)
    rank.parallel = whole
    return found


def lean(rank: Rank, dtype: str, **settings: str) -> dict:
    """Return the steps of the tied policy with moments in bfloat16, and the moments' (device,
    dtype, True if page-locked)."""
    policy = rank.policy(dtype=dtype, lr=1e-3, **settings)
    trained = rank.train(policy, ["a", "a", "b"])
    moments = [
        moment
        for name in ("adam.exp_avg", "adam.exp_avg_sq")
        for moment in adam_shards(policy.optimizer, name)
    ]
    return {
        "steps": trained["steps"],
        "weights": cpu(trained["weights"]),
        "moments": {
            (m.device.type, str(m.dtype), m.device.type == "cpu" and m.is_pinned()) for m in moments
        },
        "buffers": {str(each.dtype) for each in gradient_buffers(policy.schedule.chunks)},
    }


def said_of(policy, part) -> dict[str, str]:
    """Return the errors with all of the state, and with each part removed from one parameter."""
    view = AdamView(policy.optimizer, policy.config.optimizer, 1, TakenStep(1e-3, 0.9))
    asked = {
        "gradient": lambda: gradients_of(policy.optimizer, policy.layout),
        "update": lambda: list(view.next_update()),
        "moment": view.momentum,
        "saved": lambda: adam_shards(policy.optimizer, "adam.exp_avg_sq"),
        "master": lambda: adam_shards(policy.optimizer, "adam.master"),
    }
    said = {f"{name} there": answer(ask) for name, ask in asked.items()}
    parameter = optimizer_parameters(policy.optimizer)[-1]
    state, gradient = part.optimizer.state[parameter], parameter.grad
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].half(), None
    said |= {name: answer(asked[name]) for name in ("moment", "saved")}
    parameter.grad, parameter.decoupled_grad = None, gradient
    said |= {name: answer(asked[name]) for name in ("gradient", "update")}
    parameter.data = parameter.data.bfloat16()
    return said | {"master": answer(asked["master"])}


def answer(ask: Callable[[], object]) -> str:
    try:
        ask()
    except StateMissing as missing:
        return str(missing)
    return "fine"


def furthest(found: dict, plain: dict) -> float:
    """Return the largest difference of gradient buffers and weights; 0 if all bits are equal."""
    return max(
        float((one.float() - other.float()).abs().max())
        for what in ("buffers", "weights")
        for one, other in zip(found[what], plain[what], strict=True)
    )


def carried(rank: Rank, dtype: str, checkpoint: Path) -> dict:
    """Return the step after a checkpoint, and the weights with which it began."""
    policy = rank.policy(dtype=dtype)
    if not checkpoint.exists():
        rank.train(policy, ["a", "a"])
        policy.save(checkpoint, 2, {"version": 2}, keep=1)
    policy = rank.policy(dtype=dtype)
    state = policy.load(checkpoint)
    begun = cpu(rank.weights(policy))
    after = rank.train(policy, ["b"])
    return {"state": state, "begun": begun, **after, "weights": cpu(after["weights"])}


def main() -> None:
    kind, dtype, material, output, checkpoint = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    rank = Rank(Path(material), ParallelConfig(), Path(output).with_suffix(".scratch"), kind)
    results = {}
    for name, model, sequence, a, b in (
        ("tied", "tied", "padded", "a", "b"),
        ("packed", "tied", "packed", "a", "b"),
        ("mixture", "mixture", "padded", "mixture_a", "mixture_b"),
    ):
        policy = rank.policy(model, dtype=dtype, lr=1e-3, sequence=sequence)
        smooth = rank.policy(model, dtype=dtype, sequence=sequence, objective=SMOOTH)
        gradient = cpu(ReducedGradient(rank, smooth, a).whole())
        scores = policy.score(received(policy, scorable(rank.batches[a])))
        trained = rank.train(policy, [a, a, b])
        results[name] = {
            "gradient": gradient,
            "scores": scores,
            "steps": trained["steps"],
            "weights": cpu(trained["weights"]),
            "devices": {str(p.device.type) for p in policy.model.chunks[0].parameters()},
            "dtypes": {str(p.dtype) for p in policy.model.chunks[0].parameters()},
            "adam": {
                type(part.optimizer).__module__.partition(".")[0]
                for part in optimizer_parts(policy.optimizer)
            },
        }
    results["controls"] = {each.name: controlled(rank, each, dtype) for each in CONTROLS}
    results["cosines"] = cosines(rank, dtype)
    recomputed = {
        each: recompute_program.steps(rank, each, "tied", ["a", "b"], dtype)
        for each in recompute_program.KINDS
    }
    results["recompute"] = {
        each: {
            "same": recompute_program.same(found, recomputed["none"]),
            "furthest": furthest(found, recomputed["none"]),
            "peak": found["peak"],
        }
        for each, found in recomputed.items()
    }
    results["resumed"] = objective_program.resumed(rank, "tied", "a", "b", dtype=dtype)
    results["host_syncs"] = {each: waits(rank, kind, dtype, each) for each in ("padded", "packed")}
    results["refusals"] = refusals(rank, dtype)
    summed = {"gradient_dtype": "bfloat16"} if dtype == "bfloat16" else {}
    results["lean"] = {
        place: lean(rank, dtype, **{**LEAN, "moment_offload": place}, **summed)
        for place in ("none", "cpu")
    }
    results["room"] = with_room(rank, dtype, rank.scratch)
    results["carried"] = carried(rank, dtype, Path(checkpoint))
    torch.save(results, output)
    rank.layout.shutdown()


if __name__ == "__main__":
    device.install(sys.argv[1])
    main()

"""One rank of the parameter-state tests: saves a policy in the middle of a run, and continues from
checkpoints of any layout.

Arguments: the material's directory (see layouts.py), a JSON of layout name -> (free port,
ParallelConfig), all of this number of ranks and run one after the other, the directory of all
layouts' checkpoints, the output directory, and a JSON of what to do: the layouts to "save", and the
models and layouts whose checkpoints to "load".
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_async_rl.config.controls import (
    DisplacementControl,
    GacControl,
    MomentumByAlignmentControl,
)
from megatron_async_rl.config.load import load
from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import (
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.gradients import products_with
from megatron_async_rl.plan.fit import memory_ran_out
from megatron_async_rl.policy import blocks, device, forward
from megatron_async_rl.policy.adam_view import (
    AdamView,
    TakenStep,
    adam_names,
    adam_shards,
    optimizer_parameters,
    optimizer_slices,
    optimizer_state,
)
from megatron_async_rl.policy.block_files import read, write
from megatron_async_rl.policy.blocks import ModelBlocks
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken
from megatron_async_rl.policy.device_memory import StateReleased
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.model import DTYPES, build_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from tests.gradients import cosine
from tests.parallel.allocations import Allocations
from tests.parallel.layout_program import Rank, received
from tests.parallel.model_program import BLOCK
from tests.parallel.objective_program import ReducedGradient
from tests.parallel.reference_program import at_version
from tests.parallel.whole_tensors import assembled
from tests.thorough import THOROUGH
from tests.written_run import write_run

OBJECTIVE = ObjectiveConfig(
    kl=KlConfig(coef=0.1), reference=ReferenceConfig(ema=0.7), proximal="ewma", ewma_decay=0.6
)
"""Everything that moves besides the model: two averages of the weights, and GAC's gradient."""
GAC = GacControl(c_low=0.15)
MODELS = ("untied", "uneven")
"""The second, which is tied, lies next to the checkpoints: the distributed optimizer cuts through
one of its matrices."""

LEAN = {
    "dtype": "bfloat16",
    "gradient_dtype": "bfloat16",
    "moment_dtype": "bfloat16",
    "moment_offload": "cpu",
}
"""The least that gradients and moments take."""
LEAN_LAYOUTS = (
    "single",
    "data_distributed_optimizer",
    *(("data_replicated_optimizer", "sequence", "pipeline") if THOROUGH else ()),
)
TRAINED = {"weights": None, "adapters": LoraConfig(rank=4)}
WHOLE = ("single", "data_distributed_optimizer", "data_replicated_optimizer")
"""Layouts whose ranks have the whole model: the optimizer's three kinds of masters."""


def directory(rank: Rank, model: str, all_checkpoints: Path) -> Path:
    return (rank.material if model == "untied" else all_checkpoints) / model


def policy(rank: Rank, model: str | Path):
    return rank.policy(model, controls=(GAC,), objective=OBJECTIVE, lr=5e-3)


def saved(rank: Rank, checkpoints: Path) -> dict:
    """Per model, on one rank: what an uninterrupted run does after the moment that was saved."""
    found = {}
    for model in MODELS:
        trained = policy(rank, directory(rank, model, checkpoints.parent))
        rank.train(trained, ["b", "a"])
        trained.save(checkpoints / model, 2, {"version": 2}, keep=1)
        if rank.layout.world_size == 1:
            found[model] = rank.train(trained, ["a", "b"])
    return found


def resumed(rank: Rank, checkpoints: Path, models: Sequence[str]) -> dict:
    found = {}
    for model in models:
        again = policy(rank, directory(rank, model, checkpoints.parent))
        again.load(checkpoints / model)
        found[model] = rank.train(again, ["a", "b"])
    return found


def moved_there_and_back(rank: Rank, path: Path, dtype: str) -> dict[str, bool]:
    """same: Adam's parameters make up the model's, and what files hold of them gives Adam's again,
    on every rank. parts: some rank has a part of a parameter."""
    settings = PolicyConfig(parallel=rank.parallel, optimizer=OptimizerConfig())
    model = build_model(ModelConfig(path=path, dtype=dtype), settings, rank.layout)
    optimizer = build_optimizer(wrap_for_gradients(model.chunks, settings), settings, DTYPES[dtype])
    shards = [parameter.detach() for parameter in optimizer_parameters(optimizer)]
    tensors = assembled(shards, model, optimizer)
    whole = all(
        torch.equal(tensors[i][name], parameter.detach().float())
        for i, chunk in enumerate(model.chunks)
        for name, parameter in chunk.named_parameters()
    )
    # Other numbers than the parameters', so that a shard left as it was would show.
    doubled = optimizer_state(optimizer, [2 * shard for shard in shards])
    found = optimizer_state(optimizer, [torch.empty(shard.shape) for shard in shards])
    folder, blocks = rank.scratch / f"there_{dtype}", ModelBlocks(model)
    write(folder, blocks.state({"doubled": doubled}, writes=True), rank.layout.cpu_group)
    read(folder, blocks.state({"doubled": found}, writes=False), rank.layout.cpu_group, None)
    back = all(torch.equal(a, b) for (_, a), (_, b) in zip(found, doubled, strict=True))
    sizes = {parameter.numel() for chunk in model.chunks for parameter in chunk.parameters()}
    everyone: list = [None] * rank.layout.world_size
    dist.all_gather_object(
        everyone, (whole and back and len(shards) > 0, any(s.numel() not in sizes for s in shards))
    )
    return {"same": all(same for same, _ in everyone), "parts": any(parts for _, parts in everyone)}


def lean_policy(rank: Rank, trained: str):
    """Policy with controls that read gradients, moments, and the coming update."""
    controls = (GAC, MomentumByAlignmentControl(), DisplacementControl())
    objective = ObjectiveConfig(snapshots=5)
    return rank.policy(
        controls=controls, objective=objective, lora=TRAINED[trained], lr=1e-3, **LEAN
    )


def lean_steps(rank: Rank, policy, version: int) -> list[dict]:
    found = [
        policy.train_step(received(policy, at_version(rank.batches[name], version + later)))
        for later, name in enumerate(("a", "b"))
    ]
    return [{k: v for k, v in step.items() if not k.startswith("time/")} for step in found]


def lean(rank: Rank, checkpoints: Path) -> dict:
    """Per `TRAINED`: what a policy with all three settings does, resumed in the middle."""
    found = {}
    for trained in TRAINED:
        first = lean_policy(rank, trained)
        early = lean_steps(rank, first, 0)
        first.memory.release()
        first.save(checkpoints / f"lean_{trained}", 2, {}, keep=1)
        first.memory.restore()
        again = lean_policy(rank, trained)
        again.load(checkpoints / f"lean_{trained}")
        late = [lean_steps(rank, each, 2) for each in (first, again)]
        names = adam_names(first.model)
        mine, theirs = ([adam_shards(p.optimizer, n) for n in names] for p in (first, again))
        same = late[0] == late[1] and all(
            torch.equal(a, b)
            for pair in zip(mine, theirs, strict=True)
            for a, b in zip(*pair, strict=True)
        )
        everyone: list = [None] * rank.layout.world_size
        dist.all_gather_object(everyone, same)
        found[trained] = {
            "steps": early + late[0],
            "resumed": all(everyone),
            "moments": {tensor.dtype for shards in mine[:2] for tensor in shards},
            "masters": {tensor.dtype for tensor in mine[2]},
            "buffers": {buffer.dtype for buffer in gradient_buffers(first.schedule.chunks)},
            "cosines": cosines_with_momentum(rank, first),
            "head": gradients_of_the_head(rank, first),
        }
    return found


def lean_memory(rank: Rank, scratch: Path) -> dict[str, list]:
    """Memory with GAC's gradient and a moving reference: bytes of the largest tensor that each
    rank makes to save and to load, of the largest run of elements that is its own in float32,
    and of the largest parameter."""
    objective = ObjectiveConfig(kl=KlConfig(coef=0.1), reference=ReferenceConfig(ema=0.7))
    first, again = (
        rank.policy(controls=(GAC,), objective=objective, lr=1e-3, **LEAN) for _ in range(2)
    )
    first.train_step(received(first, rank.batches["a"]))
    with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK):
        with Allocations() as saving:
            first.save(scratch / "lean_memory", 1, {}, keep=1)
        with Allocations() as loading:
            again.load(scratch / "lean_memory")
    own = max((each.end - each.start for each in optimizer_slices(first.optimizer)), default=0)
    whole = max(p.numel() for chunk in first.model.chunks for p in chunk.parameters())
    mine = (max(saving.sizes), max(loading.sizes), 4 * own, 4 * whole)
    columns = zip(*rank.layout.gathered(mine), strict=True)
    return dict(zip(("saving", "loading", "own", "whole"), map(list, columns), strict=True))


def gradients_of_the_head(rank: Rank, policy) -> list[tuple[int, set]]:
    """Output-layer gradients of each rank of a last stage: the micro-batches of a step, and the
    dtypes of the tensors to which the gradient is added in them. After `cosines_with_momentum`,
    on its batch."""
    given = []

    def noted(*args, weight_gradient, **options):
        given.append(weight_gradient)
        return vocab_parallel_logprobs(*args, weight_gradient=weight_gradient, **options)

    with mock.patch.object(forward, "vocab_parallel_logprobs", noted):
        ReducedGradient(rank, policy, "next")
    places = {None if each is None else (each.data_ptr(), str(each.dtype)) for each in given}
    everyone = rank.layout.gathered((len(given), places))
    return [each for each in everyone if each[0]]


def cosines_with_momentum(rank: Rank, policy) -> tuple[float, float]:
    """Numbers of the next gradient: as controls see it, and of the shards of both put together in
    float64, which are the whole model's where no rank has a part of it alone."""
    rank.batches["next"] = at_version(rank.batches["a"], 4)
    gradient = ReducedGradient(rank, policy, "next")
    view = AdamView(policy.optimizer, policy.config.optimizer, 4, TakenStep(1e-3, 0.9))
    product, norm, other = products_with(gradient.view(), view.momentum())
    wholes = [
        torch.cat([each.double().flatten() for own in chunks for each in own.values()])
        for chunks in (
            assembled(shards, policy.model, policy.optimizer)
            for shards in (gradient.shards(), adam_shards(policy.optimizer, "adam.exp_avg"))
        )
    ]
    return product / math.sqrt(norm * other), cosine(*wholes)


def with_room(rank: Rank, dtype: str, scratch: Path) -> dict:
    """Steps of a policy that makes room after each, against those of a policy that never does:
    `same` on every rank. Also its memory before and after it made room, and its refusals in
    that state."""
    control = GAC.model_copy(update={"reference_dtype": "fp8" if dtype == "bfloat16" else "fp32"})
    plain, roomy = (rank.policy(controls=(control,), dtype=dtype, lr=1e-3) for _ in range(2))
    found: dict = {"same": True}
    for version, name in enumerate(("a", "b", "a")):
        steps = [
            policy.train_step(received(policy, at_version(rank.batches[name], version)))
            for policy in (plain, roomy)
        ]
        state = [list(whole_state(policy)) for policy in (plain, roomy)]
        found["before"] = roomy.memory.held()
        roomy.memory.release()
        roomy.memory.release()
        found["released"] = roomy.memory.held()
        state.append(list(whole_state(roomy)))
        roomy.save(scratch / f"room_{dtype}", version + 1, {}, keep=1)
        try:
            roomy.train_step(received(roomy, rank.batches["a"]))
        except StateReleased as refused:
            found["refused"] = str(refused)
        roomy.memory.restore()
        state.append(list(whole_state(roomy)))
        alike = [{k: v for k, v in step.items() if not k.startswith("time/")} for step in steps]
        found["same"] &= alike[0] == alike[1] and all(
            torch.equal(mine, theirs)
            for other in state[1:]
            for mine, theirs in zip(other, state[0], strict=True)
        )
    again = rank.policy(controls=(control,), dtype=dtype, lr=1e-3)
    again.load(scratch / f"room_{dtype}")
    found["saved"] = all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(adam_state(again), adam_state(plain), strict=True)
    )
    everyone = rank.layout.gathered((found["same"], found["saved"]))
    found["same"], found["saved"] = (all(column) for column in zip(*everyone, strict=True))
    return found


def adam_state(policy) -> list[torch.Tensor]:
    names = adam_names(policy.model)
    return [shard for name in names for shard in adam_shards(policy.optimizer, name)]


def whole_state(policy):
    """Copies, on the CPU, of all that a step changes on this rank, wherever it lies."""
    tensors = [p.detach() for chunk in policy.model.chunks for p in chunk.parameters()]
    tensors += adam_state(policy)
    for control in policy.controls.values():
        tensors += [part.view(torch.uint8) for part in control.device_state()]
    yield from (tensor.to("cpu", copy=True) for tensor in tensors)


def out_of_memory(rank: Rank) -> tuple[str, str]:
    """The error of a forward pass that runs out of memory, and its fix."""
    policy = rank.policy(controls=(GAC,))
    policy.train_step(received(policy, rank.batches["a"]))
    config = load(write_run(rank.scratch / "run"), ["policy.tokens_per_micro_batch=96"])

    def no_room(*arguments, **options):
        raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")

    with mock.patch.object(type(policy.model.chunks[0]), "forward", no_room):
        try:
            policy.train_step(received(policy, rank.batches["b"]))
        except torch.OutOfMemoryError as error:
            told = memory_ran_out(error, config, "train", policy.memory.held, on_cpu=False)
    return str(told), told.fix


def refused_moments(rank: Rank, checkpoints: Path) -> str:
    """A policy whose moments are float32 on a checkpoint of those in bfloat16."""
    try:
        rank.policy(dtype="bfloat16").load(checkpoints / "lean_weights")
    except CheckpointBroken as broken:
        return str(broken)
    return ""


def lean_from(rank: Rank, checkpoints: Path) -> list[dict]:
    policy = lean_policy(rank, "weights")
    policy.load(checkpoints / "lean_weights")
    return lean_steps(rank, policy, 2)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def absences(rank: Rank, scratch: Path) -> dict:
    """Checkpoints that lack what the resumed policy has."""
    heard = _Heard()
    logging.getLogger("megatron_async_rl").addHandler(heard)
    early = policy(rank, "tied")
    early.save(scratch / "early", 0, {}, keep=1)
    plain = rank.policy("tied", controls=())
    rank.train(plain, ["a", "b"])
    plain.save(scratch / "plain", 2, {}, keep=1)
    first = policy(rank, "tied")
    first.load(scratch / "early")
    said_early = list(heard.messages)
    second = policy(rank, "tied")
    second.load(scratch / "plain")
    later = rank.policy("tied", controls=())
    later.load(scratch / "early")
    return {
        "early": [rank.train(each, ["a", "b"])["steps"] for each in (early, first)],
        "said_early": said_early,
        "added": rank.train(second, ["a", "b"])["steps"],
        "said": heard.messages[len(said_early) :],
        "removed": rank.train(later, ["a"])["steps"],
    }


def run_layout(
    name: str, material: Path, parallel: ParallelConfig, checkpoints: Path, output: Path, todo: dict
) -> None:
    rank = Rank(material, parallel, output / f"{name}.scratch")
    results: dict = {}
    if name in todo["save"]:
        results["uninterrupted"] = saved(rank, checkpoints / name)
    if todo["save"]:
        results["there_and_back"] = {
            dtype: moved_there_and_back(rank, checkpoints / "uneven", dtype)
            for dtype in ("float32", "bfloat16")
        }
        if name in LEAN_LAYOUTS:
            results["lean"] = lean(rank, checkpoints / name)
            results["lean_memory"] = lean_memory(rank, rank.scratch)
        if name in WHOLE:
            results["room"] = {
                dtype: with_room(rank, dtype, rank.scratch) for dtype in ("float32", "bfloat16")
            }
    results["lean_from"] = {
        origin: lean_from(rank, checkpoints / origin)
        for origin in todo["load"]
        if origin in LEAN_LAYOUTS and todo["save"]
    }
    results["resumed"] = {
        origin: resumed(rank, checkpoints / origin, models)
        for origin, models in todo["load"].items()
    }
    if rank.layout.world_size == 1:
        results["absences"] = absences(rank, rank.scratch)
        results["out_of_memory"] = out_of_memory(rank)
        if "lean" in results:
            results["refused_moments"] = refused_moments(rank, checkpoints / name)
    if rank.layout.rank == 0:
        torch.save(results, output / f"{name}.pt")
    rank.layout.shutdown()


def main() -> None:
    material, parallels, checkpoints, output, todo = sys.argv[1:]
    device.install("cpu")
    for name, (port, parallel) in json.loads(parallels).items():
        # A store keeps the addresses of groups that are gone, so each layout meets in a store of
        # its own.
        os.environ["MASTER_PORT"] = str(port)
        run_layout(
            name,
            Path(material),
            ParallelConfig(**parallel),
            Path(checkpoints),
            Path(output),
            json.loads(todo),
        )


if __name__ == "__main__":
    main()

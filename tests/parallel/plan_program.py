"""The bytes that Megatron and the policy give to one rank of a layout whose other ranks are not
there: to weights, gradients, optimizer, controls and copies of the weights on the meta device,
where nothing is computed or stored, so that the model may be large; and to what the model keeps for
the backward pass of one micro-batch on the CPU.

Arguments: a JSON of two lists, each of [a configuration's file, its overrides, [ranks]] and of the
same with a micro-batch's rows and tokens of each instead of the ranks; the file to write.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async_rl.config.controls import AlignmentSettings
from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.controls import reference as gradient_reference
from megatron_async_rl.controls.reference import GradientReference
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import (
    MASTER,
    adam_names,
    adam_shards,
    gradient_of,
    optimizer_parameters,
)
from megatron_async_rl.policy.forward import Schedule
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.model import assemble_model
from megatron_async_rl.policy.opob import exact_baseline
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.packed_sequences import PackedSequences
from megatron_async_rl.policy.packing import Packed, Segments
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.past_weights import MasterSnapshot, Snapshots
from megatron_async_rl.policy.references import ReferencePolicies
from tests.parallel.allocations import Allocations

META, CPU = torch.device("meta"), torch.device("cpu")


JOIN, GROUP = dist.init_process_group, dist.new_group


def layout_of(config: Config, rank: int, on: torch.device) -> Layout:
    """One rank's place in a world whose messages go nowhere."""
    parallel = config.policy.parallel
    os.environ |= {"WORLD_SIZE": str(parallel.ranks), "RANK": str(rank)}
    dist.init_process_group = lambda *_, **__: JOIN(
        "fake", rank=rank, world_size=parallel.ranks, store=FakeStore()
    )
    dist.new_group = lambda ranks=None, *_, **__: GROUP(ranks, backend="fake")
    return replace(initialise(parallel, "cpu", timeout_s=600), device=on)


def leave() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory, once where several show the same."""
    memory = [tensor.untyped_storage() for tensor in tensors]
    return sum({each._cdata: each.nbytes() for each in memory}.values())


def held(config: Config, rank: int) -> dict[str, int]:
    layout = layout_of(config, rank, META)
    model = assemble_model(config.model, config.policy, layout, config.objective.value)
    wrapped = wrap_for_gradients(model.chunks, config.policy)
    optimizer = build_optimizer(wrapped, config.policy, model.config.params_dtype)
    optimizer.prepare_grads()
    shards = optimizer_parameters(optimizer)
    adam = {name: nbytes(adam_shards(optimizer, name)) for name in adam_names(model)}
    schedule = Schedule(wrapped, model, layout, temperature=1.0, logprob_chunk_tokens=1)
    gradients = nbytes([*gradient_buffers(wrapped), *map(gradient_of, shards)])
    found = {
        "parameters": nbytes(p for chunk in model.chunks for p in chunk.parameters()),
        "gradients": gradients + accumulators(config, schedule),
        "optimizer": sum(adam.values()),
        "moments": sum(adam.values()) - adam.get(MASTER, 0),
        "references": sum(
            nbytes(reference(control, map(gradient_of, shards)))
            for control in config.controls
            if isinstance(control, AlignmentSettings)
        ),
        "held": copies(config, model, optimizer),
    }
    leave()
    return found


def reference(
    control: AlignmentSettings, gradient: Iterable[torch.Tensor]
) -> Iterable[torch.Tensor]:
    """The gradient, as the control keeps it until the next step."""
    shards = list(gradient)
    kept = GradientReference(control.reference_dtype, META, None, [one.shape for one in shards])
    # The meta device has no numbers to round, and the shapes of each block take a while.
    with mock.patch.object(gradient_reference, "write"):
        kept.put(shards)
    return [part for written in kept.written() for part in written]


def copies(config: Config, model: Any, optimizer: Any) -> int:
    """Bytes of the copies of the weights, once there are as many versions as the run keeps."""
    objective = config.resolved_objective
    past = any(control.needs_past_weights for control in config.controls)
    with META:
        masters = (
            Snapshots(lambda: MasterSnapshot(optimizer), objective.past_versions) if past else None
        )
        needs = Objective(objective).needs
        held = ReferencePolicies(objective, needs, model, past_masters=masters)
        for version in range(objective.past_versions):
            held.begin(version)
    kept = [held.trained, held.reference, held.average]
    kept += held.snapshots.versions.values() if held.snapshots is not None else []
    tensors = [part for copy in kept if copy is not None for part in copy.tensors]
    found = [each for part in tensors for each in part.values()]
    if masters is not None:
        found += [each for copy in masters.versions.values() for each in copy.shards]
    return nbytes(found)


def accumulators(config: Config, schedule: Schedule) -> int:
    """Bytes that the measured baseline makes for gradients, before the first sequence."""
    # What it computes with lies on the host; gradients do not.
    schedule.layout = replace(schedule.layout, device=CPU)
    baseline = exact_baseline(config.objective, schedule, schedule.layout)
    if baseline is None:
        return 0
    nothing = torch.zeros(0)
    whole = SimpleNamespace(require=lambda name: nothing, group_centred=lambda rewards: rewards)
    with Allocations() as using:
        baseline.accumulate(SimpleNamespace(whole=whole, samples=NoSamples()), None, None)
    return sum(using.sizes)


class NoSamples(tuple[()]):
    owner = group = np.zeros(0, dtype=np.int64)


def kept(config: Config, rows: int, tokens: int) -> int:
    """Bytes of memory that autograd keeps of a micro-batch in the model's only chunk and in what
    makes log-probs of its hidden states, parameters and logits apart."""
    layout = layout_of(config, 0, CPU)
    model = assemble_model(config.model, config.policy, layout, config.objective.value)
    (chunk,) = model.chunks
    own = {parameter.untyped_storage()._cdata for parameter in chunk.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in own and tensor.shape[-1:] != model.output_weight().shape[:1]:
            found[memory._cdata] = memory
        return tensor

    tokens //= config.policy.parallel.context
    packing, places = None, torch.arange(tokens).expand(rows, tokens)
    if config.policy.sequence == "packed":
        lengths = np.array([tokens // 2, tokens // 4, tokens // 4])
        places = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
        packing = PackedSequences.of(lengths, CPU)
    responses, rest = config.flow.group_size, config.rollout.sampling.max_tokens
    if config.policy.min_sharing is not None and responses * rest < tokens:
        prefix = tokens - responses * rest
        fed = np.full(responses, prefix + rest)
        same = np.zeros(responses, dtype=np.int64)
        segments = Segments(fed, np.ones_like(fed), same, np.full(responses, prefix), same)
        arranged = Packed().arrange(segments)
        places, packing = torch.from_numpy(arranged.positions)[None], arranged.packing
    trained = torch.arange(rows * tokens)
    micro_batch = SimpleNamespace(
        rows=trained, targets=torch.zeros_like(trained), places=None, packing=packing
    )
    schedule = Schedule([chunk], model, layout, temperature=1.0, logprob_chunk_tokens=tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = chunk.train()(torch.zeros_like(places), places, None, packed_seq_params=packing)
        outputs = schedule._outputs(micro_batch, hidden)
    leave()
    del outputs
    return sum(memory.nbytes() for memory in found.values())


def build_on_meta() -> None:
    """Redirect Megatron's CUDA tensors to the meta device; its optimizers sort parameters by the
    name of their type."""
    device._CPU = META
    named = torch.Tensor.type

    def named_type(self: torch.Tensor, *to: torch.dtype) -> Any:
        return named(self, *to) if to else named(self).replace("meta.", "")

    torch.Tensor.type = named_type


def main() -> None:
    (large, small), output = json.loads(sys.argv[1]), sys.argv[2]
    device.install("cpu")
    found = {
        "kept": [kept(load(Path(file), overrides), *sizes) for file, overrides, sizes in small]
    }
    build_on_meta()
    found["held"] = [
        [held(load(Path(file), overrides), rank) for rank in ranks]
        for file, overrides, ranks in large
    ]
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

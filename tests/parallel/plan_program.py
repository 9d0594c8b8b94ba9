"""The bytes that Megatron gives to one rank of a layout whose other ranks are not there: to weights,
gradients and optimizer on the meta device, where nothing is computed or stored, so that the model may
be large; and to what its layers keep for the backward pass of one sequence on the CPU.

Arguments: a JSON of two lists, each of [a configuration's file, its overrides, [ranks]] and of the
same with a number of tokens in the place of the ranks; the file to write.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import gradient_of, optimizer_parameters
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.model import assemble_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.parameter_state import adam_names, adam_shards

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
    model = assemble_model(config.model, config.policy, layout_of(config, rank, META))
    wrapped = wrap_for_gradients(model.chunks, config.policy)
    optimizer = build_optimizer(wrapped, config.policy, model.config.params_dtype)
    optimizer.prepare_grads()
    shards = optimizer_parameters(optimizer)
    found = {
        "parameters": nbytes(p for chunk in model.chunks for p in chunk.parameters()),
        "gradients": nbytes([*gradient_buffers(wrapped), *map(gradient_of, shards)]),
        "optimizer": nbytes(
            shard for name in adam_names(model) for shard in adam_shards(optimizer, name)
        ),
    }
    leave()
    return found


def kept(config: Config, tokens: int) -> int:
    """Bytes of memory that autograd keeps of the model's only chunk, its parameters apart."""
    model = assemble_model(config.model, config.policy, layout_of(config, 0, CPU))
    (chunk,) = model.chunks
    own = {parameter.untyped_storage()._cdata for parameter in chunk.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in own:
            found[memory._cdata] = memory
        return tensor

    tokens //= config.policy.parallel.context
    places = torch.arange(tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk.train()(torch.zeros_like(places), places, None)
    leave()
    return sum(memory.nbytes() for memory in found.values())


def main() -> None:
    (large, small), output = json.loads(sys.argv[1]), sys.argv[2]
    device.install("cpu")
    found = {
        "kept": [kept(load(Path(file), overrides), tokens) for file, overrides, tokens in small]
    }
    # What Megatron makes on CUDA is made there from here on; its optimizers sort parameters by the
    # name of their type.
    device._CPU = META
    named = torch.Tensor.type

    def named_type(self: torch.Tensor, *to: torch.dtype) -> Any:
        return named(self, *to) if to else named(self).replace("meta.", "")

    torch.Tensor.type = named_type
    found["held"] = [
        [held(load(Path(file), overrides), rank) for rank in ranks]
        for file, overrides, ranks in large
    ]
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

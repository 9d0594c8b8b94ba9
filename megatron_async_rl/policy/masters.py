"""The optimizer's float32 weights: from a model directory in its files' own precision, and the
model's weights from them.

Megatron makes them from the model's parameters, which were rounded to bfloat16 when they were
loaded, or further: of a weight kept in 8 bits it takes what its memory held before that.

Invariants:
- at a run's start Adam's float32 weights are the files' tensors, and at a resume the checkpoint's;
- the model's weights are the rounding of those, at any time between two steps: so a copy of the
  float32 ones is a copy of the model, and exact where bytes and scales of 8-bit weights would have
  to be made again.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_async_rl.policy.fp8 import is_quantised
from megatron_async_rl.policy.megatron_private import (
    model_slices,
    optimizer_parts,
    weights_from_masters,
)
from megatron_async_rl.policy.parameters import HuggingFaceTensors, local_entries, shard_of

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel


def load_masters(
    optimizer: MegatronOptimizer, model: PolicyModel, directory: Path, *, every: bool = False
) -> None:
    """Writes the float32 weights of this rank's shards from the tensors in `directory`, which fit
    the model; every: also where the loaded parameter has all of the file's precision. Weights kept
    in 8 bits are then made of them, for which it is collective over the world."""
    bridge, chunks = model.bridge, model.chunks
    entries = {
        id(chunks[entry.chunk].get_parameter(entry.local_name)): entry
        for entry in local_entries(bridge, chunks)
    }
    with ExitStack() as stack, torch.no_grad():
        tensors = HuggingFaceTensors(directory, stack)
        for part in optimizer_parts(optimizer):
            for shard, parameter, start, end in model_slices(part):
                entry = entries.get(id(parameter))
                if entry is None or (parameter.dtype == torch.float32 and not every):
                    continue
                coarser = {tensors.dtype(name) for name in entry.hf_names} - {parameter.dtype}
                if every or coarser or is_quantised(parameter):
                    whole = shard_of(bridge, entry, [tensors[name] for name in entry.hf_names])
                    shard.view(-1).copy_(whole.reshape(-1)[start:end])
    if every or model.config.fp8_param:
        weights_from_masters(optimizer)

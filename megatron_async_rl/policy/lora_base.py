"""The base model that adapters (lora.py) are trained over: its digest, and the refusal of a
checkpoint over any other.

A checkpoint of adapters holds no weight of the base model, which is read again from its directory,
and identifies those weights by a digest. The digest is the sum, modulo 2^64, over all frozen
weights, of a hash of the weight's bits times one of its place (tensor of the model, index in it).

Invariants:
- the digest is the same on every parallel layout: places are those of checkpoints
  (blocks.py), and the zeros that pad a vocabulary add nothing;
- every weight is hashed where it lies, on one of the ranks that hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.gradients import block_elements
from megatron_async_rl.policy.blocks import Block, Content, ModelBlocks
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout

_digests: WeakKeyDictionary[PolicyModel, str] = WeakKeyDictionary()


def base_entries(model: PolicyModel) -> dict[str, Any]:
    """Entries of about.json on the weights that are not saved; none without adapters. Collective
    over the world."""
    if model.lora is None:
        return {}
    if model not in _digests:
        # Frozen weights stay as they are.
        _digests[model] = base_digest(model)
    return {"lora": model.lora.model_dump(mode="json"), "base_digest": _digests[model]}


def refuse_other_base(path: Path, content: Mapping[str, Any], model: PolicyModel) -> None:
    """Raises CheckpointBroken where the checkpoint is of other adapters than the model has, or of
    adapters trained over other weights. content: its about.json. Collective over the world."""
    own = base_entries(model)
    if own.get("lora") != content.get("lora"):
        trained = "adapters" if "lora" in content else "whole weights"
        raise CheckpointBroken.of(
            "policy.lora",
            f"{path} holds {trained} (lora: {content.get('lora')}), and the model is built with"
            f" lora: {own.get('lora')}",
            "set it as it was, or choose another run.dir",
        )
    if own and own["base_digest"] != content.get("base_digest"):
        raise CheckpointBroken.of(
            "model.path",
            f"{path} holds adapters that were trained over other weights than those of"
            f" {model.source} (digest {content.get('base_digest')}, here {own['base_digest']})",
            f"put the model of {content['model_path']} back, or choose another run.dir",
        )


def base_digest(model: PolicyModel) -> str:
    """Digest of the model's frozen weights. Collective over the world."""
    return placed_digest(ModelBlocks(model, frozen=True).model(writes=True), model.bridge.layout)


@torch.no_grad()
def placed_digest(content: Content, layout: Layout) -> str:
    """Digest of tensors; each rank has the blocks that it would write; the same on every layout.
    Collective over the world."""
    total = torch.zeros((), dtype=torch.int64, device=layout.device)
    for key, blocks in content.items():
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        for block in blocks:
            for values, places in _pieces(block):
                # Odd, so that no weight is lost.
                part = (_mixed(_bits(values)) * (_mixed(places + seed) | 1)).sum()
                total += part.to(layout.device)
    dist.all_reduce(total, group=layout.world_group)
    return f"{int(total) % 2**64:016x}"


def _pieces(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a block short enough to be worked on in one go, and the index of each element in the
    tensor of the model, int64."""
    sizes = block.tensor.shape
    cut = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
    rows = max(1, block_elements(block.tensor.device) // max(1, prod(sizes[cut + 1 :])))
    offsets = list(block.offsets)
    for part in block.tensor.split(rows, cut) if sizes else (block.tensor,):
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            along = offsets[dim] + torch.arange(size, device=part.device)
            places = places.unsqueeze(-1) + along * prod(block.shape[dim + 1 :])
        yield part, places
        if offsets:
            offsets[cut] += part.shape[cut]


def _bits(values: Tensor) -> Tensor:
    """The numbers' bits, int64; 0 of a zero."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.view(kind).to(torch.int64)


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of each number, modulo 2^64; 0 of 0."""
    numbers = numbers * -7046029254386353131
    numbers = (numbers ^ (numbers >> 29)) * -4658895280553007687
    return numbers ^ (numbers >> 32)

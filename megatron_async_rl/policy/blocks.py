"""Slices of this rank's parameters as blocks of the whole model's tensors, and the digest of
blocks. Files of blocks are in block_files.py.

Megatron's `sharded_state_dict` maps each parameter to its part of a tensor of the model, and shows
which parameters are copies of one another, and how fused ones are split. A slice of a parameter is
a run of its elements. In the tensor it is not one box but a few: a part of a row, rows, a part of a
row.

    slice        . . . x x      the end of a row
                 x x x x x      rows
                 x x x x x
                 x x . . .      the beginning of a row

A file records each block's position in the model's tensor and nothing about ranks. Every layout
that can hold the model can therefore read it, and each rank reads the overlap of other ranks'
blocks with its own.

Invariants:
- every rank writes and reads only its own slices: if replicas hold the same elements, each writes
  its share of them;
- no tensor is assembled: blocks are views of the slices, and no block has more than BLOCK_BYTES,
  except for a single row, so reading needs no more host memory than that.

A checkpoint of adapters contains no weight of the base model, which is read again from its
directory, and identifies those weights by a digest. The digest is the sum, modulo 2^64, over all
frozen weights, of a hash of the weight's bits times a hash of its position (tensor of the model,
index in it).

Invariants of the digest:
- the digest is the same with every parallel layout: positions are those in checkpoints, and the
  zeros that pad a vocabulary add nothing;
- every weight is hashed on one of the ranks that hold it, without being moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_async_rl.gradients import block_elements
from megatron_async_rl.policy.adam_view import Slice, Sliced, replica_part
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken
from megatron_async_rl.policy.fp8 import is_quantised
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout

BLOCK_BYTES = 64 * 2**20
STATE = "parameter_state"
"""Prefix of the keys of the parameters' state."""


@dataclass(frozen=True, eq=False)
class Block:
    """A box of a tensor of the model, which has `shape`. `offsets`: position of its first element.
    padded: in another layout the tensor may have more or fewer rows, which are zeros."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    padded: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class Blocks(list[Block]):
    """This rank's blocks of one tensor of the model. Implements the interface of torch's
    checkpoints for objects that are stored in chunks."""

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, torch.Size(block.offsets), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=block.chunk,
                    properties=TensorProperties.create_from_tensor(block.tensor),
                    size=torch.Size(block.shape),
                ),
            )
            for index, block in enumerate(self)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [block.chunk for block in self]

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the block at the position of `index`; a global plan renumbers blocks."""
        assert index.offset is not None
        return self._by_offsets()[tuple(index.offset)]

    def _by_offsets(self) -> dict[tuple[int, ...], Tensor]:
        if not hasattr(self, "_index"):
            self._index = {block.offsets: block.tensor for block in self}
        return self._index


Content = dict[str, Blocks]
"""Tensors of the model by key, as far as this rank has them."""


class ModelBlocks:
    """Positions of this rank's trained parameters and buffers in the model's tensors. Made again
    for each save or load. A model with FP8 weights only supports `state`. frozen: use the
    parameters that are not trained instead."""

    def __init__(self, model: PolicyModel, *, frozen: bool = False) -> None:
        self._layout = model.bridge.layout
        self._model: list[tuple[Slice, Tensor]] = []
        self._parts: dict[int, list[tuple[int, ShardedTensor]]] = {}
        for chunk in model.chunks:
            parameters = dict(chunk.named_parameters())
            for name, entry in chunk.sharded_state_dict().items():
                if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                    continue  # state of layers that is not a tensor; for delayed scaling see fp8.py
                tensor = parameters.get(name, entry.data)
                trained = name not in parameters or tensor.requires_grad
                if trained == frozen:
                    continue
                self._parts[id(tensor)] = _parts_of(entry)
                # The whole tensor on every replica; `writes` divides it.
                self._model.append((Slice(tensor, 0, tensor.numel(), own=False), tensor.detach()))

    def model(self, *, writes: bool) -> Content:
        """Return the blocks of the model's own parameters and buffers."""
        return self._content("", self._model, writes=writes)

    def state(self, named: Mapping[str, Sliced], *, writes: bool) -> Content:
        """Return the blocks of state by name. The same names on every rank."""
        found: Content = {}
        for name, sliced in named.items():
            found |= self._content(f"{STATE}.{name}.", sliced, writes=writes)
        return found

    def _content(self, prefix: str, sliced: Sliced, *, writes: bool) -> Content:
        """Return the blocks of `sliced`. writes: only those that this rank writes."""
        found: Content = {}
        for place, tensor in sliced:
            start, end = place.start, place.end
            if writes and not place.own:
                group = self._layout.replicas_of(place.parameter)
                # Replicas hold the same elements: each writes its part, so every element is
                # written once.
                mine = replica_part(place.parameter.numel(), dist.get_rank(group), group.size())
                start, end = max(start, mine[0]), min(end, mine[1])
            flat = tensor.detach().view(-1)
            for first, part in self._parts[id(place.parameter)]:
                # The last number counts replicas, over which slices are already divided. Of copies
                # on tensor- or pipeline-parallel ranks, the first is written.
                if writes and any(part.replica_id[:-1]):
                    continue
                last = first + prod(part.local_shape)
                a, b = max(start, first), min(end, last)
                if a >= b:
                    continue
                # A view: nothing is copied before it is staged or written.
                run = flat[a - place.start : b - place.start]
                found.setdefault(prefix + part.key, Blocks()).extend(_blocks(run, a - first, part))
        return found


def _parts_of(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, ShardedTensor]]:
    """Return (first element in the flattened parameter, position in the model) of the parts that
    are boxes of one tensor of the model; there is only one, except for fused parameters."""
    if isinstance(entry, ShardedTensor):
        return [(0, entry.without_data())]
    whole = entry.data.detach()
    if is_quantised(whole):
        # An empty tensor of the same shape, because its parts are made again.
        whole = torch.empty(whole.shape, dtype=whole.dtype)
    parts = list(nested_values(replace(entry, data=whole).build()))
    for part in parts:
        data = part.data
        inside = data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        # Blocks are runs of elements, so a transposed part would be saved scrambled.
        if not (inside and data.is_contiguous()):
            raise ValueError(f"{part.key} is not a run of the elements of its parameter")
    return [
        (part.data.storage_offset() - whole.storage_offset(), part.without_data()) for part in parts
    ]


def _blocks(run: Tensor, first: int, part: ShardedTensor) -> Iterator[Block]:
    """Yield the blocks of `run`, the elements of `part` from `first` on."""
    outer = part.prepend_axis_num
    done = 0
    for place, size in boxes(part.local_shape, first, first + run.numel(), run.itemsize):
        elements = prod(size)
        offsets = (0,) * outer + place
        yield Block(
            tensor=run[done : done + elements].view((1,) * outer + size),
            offsets=tuple(a + b for a, b in zip(part.global_offset, offsets, strict=True)),
            shape=tuple(part.global_shape),
            padded=part.allow_shape_mismatch,
        )
        done += elements


def boxes(
    shape: Sequence[int], start: int, end: int, itemsize: int = 1
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (position, size) of the boxes, in order, that contain elements start..end of a
    contiguous tensor of `shape`. Each is a run of elements, and has at most BLOCK_BYTES if a row
    has."""
    if start == end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    rows = range(-(-start // row), end // row)
    # Start and end are in the same row.
    if rows.start > rows.stop:
        yield from _within_row(shape, rows.stop, start, end, itemsize)
        return
    yield from _within_row(shape, rows.start - 1, start, rows.start * row, itemsize)
    maximum = max(1, BLOCK_BYTES // (row * itemsize))
    for at in range(rows.start, rows.stop, maximum):
        yield (at, *(0,) * (len(shape) - 1)), (min(maximum, rows.stop - at), *shape[1:])
    yield from _within_row(shape, rows.stop, rows.stop * row, end, itemsize)


def _within_row(
    shape: Sequence[int], row: int, start: int, end: int, itemsize: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * prod(shape[1:])
    for place, size in boxes(shape[1:], start - before, end - before, itemsize):
        yield (row, *place), (1, *size)


def staged(content: Content) -> Content:
    """Return a copy in host memory, which is independent of later steps. On CUDA it is
    page-locked."""
    if not any(block.tensor.is_cuda for blocks in content.values() for block in blocks):
        return {
            key: Blocks(replace(block, tensor=block.tensor.clone()) for block in blocks)
            for key, blocks in content.items()
        }
    copied = {
        key: Blocks(replace(block, tensor=_host_copy(block.tensor)) for block in blocks)
        for key, blocks in content.items()
    }
    # The copies above are asynchronous, and the next step changes their sources.
    torch.cuda.synchronize()
    return copied


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


_digests: WeakKeyDictionary[PolicyModel, str] = WeakKeyDictionary()


def base_entries(model: PolicyModel) -> dict[str, Any]:
    """Return the entries of about.json about weights that are not saved; none without adapters.
    Collective over the world."""
    if model.lora is None:
        return {}
    if model not in _digests:
        # Once per model, because this reads every frozen weight, and frozen weights do not change.
        _digests[model] = base_digest(model)
    return {"lora": model.lora.model_dump(mode="json"), "base_digest": _digests[model]}


def refuse_other_base(path: Path, content: Mapping[str, Any], model: PolicyModel) -> None:
    """Raise CheckpointBroken if the checkpoint contains other adapters than the model has, or
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
    """Return the digest of the model's frozen weights. Collective over the world."""
    return placed_digest(ModelBlocks(model, frozen=True).model(writes=True), model.bridge.layout)


@torch.no_grad()
def placed_digest(content: Content, layout: Layout) -> str:
    """Return the digest of tensors, the same with every layout. Each rank has the blocks that it
    would write. Collective over the world."""
    total = torch.zeros((), dtype=torch.int64, device=layout.device)
    for key, blocks in content.items():
        # A stable hash, because Python's own differs between processes.
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        for block in blocks:
            for values, places in _pieces(block):
                # Odd, so that no weight's contribution is lost.
                part = (_mixed(_bits(values)) * (_mixed(places + seed) | 1)).sum()
                total += part.to(layout.device)
    # Integer sums modulo 2^64 are the same in any order, and so with any layout.
    dist.all_reduce(total, group=layout.world_group)
    return f"{int(total) % 2**64:016x}"


def _pieces(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a block that are small enough to process at once, and the index of each
    element in the tensor of the model, int64."""
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
    """Return the bits of the numbers, int64; 0 for a zero of either sign."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.view(kind).to(torch.int64)


def _mixed(numbers: Tensor) -> Tensor:
    """Return a hash of each number, modulo 2^64; 0 for 0."""
    numbers = numbers * -7046029254386353131
    numbers = (numbers ^ (numbers >> 29)) * -4658895280553007687
    return numbers ^ (numbers >> 32)

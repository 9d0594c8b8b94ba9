"""Slices of this rank's parameters as blocks of the whole model's tensors, in files of torch's
distributed checkpoints.

Megatron's `sharded_state_dict` maps each parameter to its part of a tensor of the model, and shows
which are copies of one another, and how fused ones split. A slice of a parameter is a run of its
elements, which is not one box of that tensor but a few boxes: a part of a row, rows, a part of a
row.

    slice        . . . x x      the end of a row
                 x x x x x      rows
                 x x x x x
                 x x . . .      the beginning of a row

A file knows of each block its place in the model's tensor and nothing of ranks, so whatever layout
can hold the model can read it, and each rank reads of other ranks' blocks what overlaps its own.

Invariants:
- every rank writes and reads its own slices and no others: where replicas hold the same elements,
  each writes its share of them;
- no tensor is put together: blocks are views of the slices, and no block has more than BLOCK_BYTES,
  but for a single row, so reading takes no more host memory than that either;
- what is written covers every tensor once, and what is read is all there, or it is refused;
- a block is digested as it is written, read back from its file, and checked whenever it is read;
- reading runs no code from the files.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Buffer, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_async_rl.config.durable import Digest
from megatron_async_rl.policy.digested_folder import (
    BlockReader,
    StoredBlock,
    StoredFile,
    block_fault,
)
from megatron_async_rl.policy.fp8 import is_quantised
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parameter_state import Slice, Sliced, replica_part

BLOCK_BYTES = 64 * 2**20
STATE = "parameter_state"
"""Beginning of the keys of what goes with the parameters."""
READABLE = {
    "pathlib": ("PosixPath",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""Module -> names that an index of blocks may use, besides torch's dtypes."""


class BlocksUnreadable(Exception):
    """The files hold other tensors than the model has. Raised on every rank."""


class BlocksDamaged(Exception):
    """A file is missing or damaged. Raised on every rank."""


class BlocksUnwritten(Exception):
    """Some rank could not write its blocks. Raised on every rank."""


@dataclass(frozen=True, eq=False)
class Block:
    """tensor: a box of a tensor of the model, which has `shape`; `offsets`: its first element's
    place. padded: another layout's tensor may have more or fewer rows, which are zeros."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    padded: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class Blocks(list[Block]):
    """Blocks that this rank has of one tensor of the model. Implements what torch's checkpoints ask
    of an object that is stored in chunks."""

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
        """The block that begins at the place of `index`; a global plan numbers blocks anew."""
        assert index.offset is not None
        return self._by_offsets()[tuple(index.offset)]

    def _by_offsets(self) -> dict[tuple[int, ...], Tensor]:
        if not hasattr(self, "_index"):
            self._index = {block.offsets: block.tensor for block in self}
        return self._index


Content = dict[str, Blocks]
"""Tensors of the model by key, as far as this rank has them."""


class ModelBlocks:
    """Positions of this rank's trained parameters and buffers in the model's tensors. Made anew
    for each save or load. A model with FP8 weights supports `state` alone. frozen: use the
    parameters that are not trained instead."""

    def __init__(self, model: PolicyModel, *, frozen: bool = False) -> None:
        self._layout = model.bridge.layout
        self._model: list[tuple[Slice, Tensor]] = []
        self._parts: dict[int, list[tuple[int, ShardedTensor]]] = {}
        for chunk in model.chunks:
            parameters = dict(chunk.named_parameters())
            for name, entry in chunk.sharded_state_dict().items():
                if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                    continue  # state of layers other than tensors; of delayed scaling see fp8.py
                tensor = parameters.get(name, entry.data)
                trained = name not in parameters or tensor.requires_grad
                if trained == frozen:
                    continue
                self._parts[id(tensor)] = _parts_of(entry)
                self._model.append((Slice(tensor, 0, tensor.numel(), own=False), tensor.detach()))

    def model(self, *, writes: bool) -> Content:
        """The model's own parameters and buffers."""
        return self._content("", self._model, writes=writes)

    def state(self, named: Mapping[str, Sliced], *, writes: bool) -> Content:
        """State by name. The same names on every rank."""
        found: Content = {}
        for name, sliced in named.items():
            found |= self._content(f"{STATE}.{name}.", sliced, writes=writes)
        return found

    def _content(self, prefix: str, sliced: Sliced, *, writes: bool) -> Content:
        """writes: only what this rank writes of it."""
        found: Content = {}
        for place, tensor in sliced:
            start, end = place.start, place.end
            if writes and not place.own:
                group = self._layout.replicas_of(place.parameter)
                mine = replica_part(place.parameter.numel(), dist.get_rank(group), group.size())
                start, end = max(start, mine[0]), min(end, mine[1])
            flat = tensor.detach().view(-1)
            for first, part in self._parts[id(place.parameter)]:
                # The last number counts replicas, over which slices are divided already.
                if writes and any(part.replica_id[:-1]):
                    continue
                last = first + prod(part.local_shape)
                a, b = max(start, first), min(end, last)
                if a >= b:
                    continue
                run = flat[a - place.start : b - place.start]
                found.setdefault(prefix + part.key, Blocks()).extend(_blocks(run, a - first, part))
        return found


def _parts_of(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, ShardedTensor]]:
    """(first element in the flattened parameter, place in the model) of the parts that are boxes of
    one tensor of the model; one, but for fused parameters."""
    if isinstance(entry, ShardedTensor):
        return [(0, entry.without_data())]
    whole = entry.data.detach()
    if is_quantised(whole):
        # Of its shape: parts of it would be made anew.
        whole = torch.empty(whole.shape, dtype=whole.dtype)
    parts = list(nested_values(replace(entry, data=whole).build()))
    for part in parts:
        data = part.data
        inside = data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not (inside and data.is_contiguous()):
            raise ValueError(f"{part.key} is not a run of the elements of its parameter")
    return [
        (part.data.storage_offset() - whole.storage_offset(), part.without_data()) for part in parts
    ]


def _blocks(run: Tensor, first: int, part: ShardedTensor) -> Iterator[Block]:
    """run: the elements of `part` from `first` on."""
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
    """(place, size) of the boxes, in order, that make up elements start..end of a contiguous tensor
    of `shape`; each a run of elements itself, and of at most BLOCK_BYTES, if a row is."""
    if start == end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    rows = range(-(-start // row), end // row)
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
    """A copy in host memory, which the step may no longer change. On CUDA it is page-locked."""
    if not any(block.tensor.is_cuda for blocks in content.values() for block in blocks):
        return {
            key: Blocks(replace(block, tensor=block.tensor.clone()) for block in blocks)
            for key, blocks in content.items()
        }
    copied = {
        key: Blocks(replace(block, tensor=_host_copy(block.tensor)) for block in blocks)
        for key, blocks in content.items()
    }
    torch.cuda.synchronize()
    return copied


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def write(folder: Path, content: Content, group: Any) -> dict[str, StoredFile]:
    """Write what all ranks of `group` (gloo) have, and read it back. Collective over it. Return the
    files of all ranks on rank 0, none elsewhere. Raises BlocksUnwritten."""
    # Copying ahead asks CUDA for a stream, and a thread's own device is the first of the machine.
    files = _BlockFileWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    try:
        dcp.save(
            dict(content),
            storage_writer=files,
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:
        _, first = _first_failure(error)
        raise BlocksUnwritten(_text(error)) from first
    return files.stored


def read(
    folder: Path, content: Content, group: Any, files: Mapping[str, StoredFile] | None
) -> None:
    """Fill the blocks. Collective over `group` (gloo). files: those of `folder`, whose digests are
    checked; null in checkpoints without any. Raises BlocksUnreadable, BlocksDamaged."""
    for blocks in content.values():
        for block in blocks:
            if block.padded:
                block.tensor.zero_()
    try:
        dcp.load(
            dict(content),
            storage_reader=_BlockFileReader(folder, files),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:
        _, first = _first_failure(error)
        unfit = isinstance(first, _Unfit)
        raise (BlocksUnreadable if unfit else BlocksDamaged)(_text(error)) from error


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _text(error: CheckpointException) -> str:
    rank, first = _first_failure(error)
    if isinstance(first, _Fault):
        return str(first)
    return f"rank {rank}: {type(first).__name__}: {first}"


def _named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


class _Unfit(ValueError):
    """The files hold no such tensor."""


class _Fault(OSError):
    """A file does not hold what was written to it; the message names file and tensor."""


class _BlockStream(io.IOBase):
    """Bytes of one block on their way to its file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = Digest()

    def write(self, content: Buffer) -> int:
        self.digest.add(content)
        written: int = self._file.write(content)
        return written


class _BlockStreams(_StorageWriterTransforms):
    def __init__(self) -> None:
        super().__init__()
        self.by_index: dict[MetadataIndex, _BlockStream] = {}

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> Any:
        stream = self.by_index[write_item.index] = _BlockStream(raw_stream)
        return stream, []


@dataclass(frozen=True)
class _WrittenBlock(WriteResult):
    digest: str

    @property
    def block(self) -> StoredBlock:
        place = self.storage_data
        return StoredBlock(place.offset, place.length, self.digest, self.index.fqn)


class _BlockFileWriter(dcp.FileSystemWriter):
    """Writes and syncs a file, then reads it back. `stored`: the files of all ranks, on rank 0."""

    stored: dict[str, StoredFile]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.stored = {}
        self.transforms = streams = _BlockStreams()
        results = [
            _WrittenBlock(one.index, one.size_in_bytes, one.storage_data, stream.digest.text)
            for one in super().write_data(plan, planner).wait()
            for stream in (streams.by_index[one.index],)
        ]
        reader = BlockReader()
        for one in results:
            path = Path(self.path) / one.storage_data.relative_path
            with path.open("rb") as file:
                fault = block_fault(reader.read(file, one.block), one.block)
            if fault is not None:
                raise _Fault(f"{_named(path)}: {fault}, right after it was written")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        blocks = defaultdict(list)
        for one in (each for rank in results for each in rank):
            blocks[one.storage_data.relative_path].append(one.block)
        self.stored = {name: StoredFile.of_blocks(held) for name, held in blocks.items()}
        super().finish(metadata, results)


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        # The default would look for tensors in it.
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Raises _Unfit for what the files do not hold."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for key, blocks in self.state_dict.items():
            if key not in saved:
                raise _Unfit(f"it holds no {key}")
            for shape in {block.shape for block in blocks if not block.padded}:
                if shape != tuple(saved[key].size):
                    there = list(saved[key].size)
                    raise _Unfit(f"{key} has shape {there} there and {list(shape)} here")
        plan = super().create_local_plan()
        found = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            found[item.dest_index.fqn] += prod(item.lengths)
        for key, blocks in self.state_dict.items():
            wanted = sum(_elements_in(block, saved[key].size) for block in blocks)
            if found[key] != wanted:
                raise _Unfit(f"{key}: it holds {found[key]} of {wanted} elements")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].at(index)
        return tensor


def _elements_in(block: Block, shape: Sequence[int]) -> int:
    """Elements of the block in a tensor of `shape`, which may have fewer rows."""
    sizes = zip(block.offsets, block.tensor.shape, shape, strict=True)
    return prod(max(0, min(offset + size, whole) - offset) for offset, size, whole in sizes)


class _Bytes(io.RawIOBase):
    """A file of these bytes, without a copy of them."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._content)}
        self._place = base[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, into: Any) -> int:
        found = self._content[self._place : self._place + len(into)]
        into[: len(found)] = found
        self._place += len(found)
        return len(found)


class _BlockFileReader(dcp.FileSystemReader):
    """Checks each block that it reads. files: null in checkpoints without digests."""

    def __init__(self, folder: Path, files: Mapping[str, StoredFile] | None) -> None:
        super().__init__(folder)
        self._files = files
        self._reader = BlockReader()
        self._blocks = {
            (name, block.offset, block.length): block
            for name, file in (files or {}).items()
            for block in file.blocks
        }

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        path = Path(self.path) / ".metadata"
        content = path.read_bytes()
        if self._files is not None:
            known = self._files.get(path.name)
            if (fault := "unknown" if known is None else known.fault(content)) is not None:
                raise _Fault(f"{_named(path)}: {fault}")
        return _Index(io.BytesIO(content)).load()

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        if self._files is None:
            return super()._slice_file(file, sinfo)
        path = Path(self.path) / sinfo.relative_path
        block = self._blocks.get((sinfo.relative_path, sinfo.offset, sinfo.length))
        if block is None:
            raise _Fault(f"{_named(path)}: no block is known at byte {sinfo.offset}")
        content = self._reader.read(file, block)
        if (fault := block_fault(content, block)) is not None:
            raise _Fault(f"{_named(path)}: {fault}")
        return _Bytes(content)


class _Index(pickle.Unpickler):
    """An index of blocks as torch writes it: its own classes and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in READABLE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index of blocks has no {module}.{name}")

"""Files of blocks (blocks.py), in the format of torch's distributed checkpoints.

Invariants:
- the written files contain every tensor once, and a read finds every tensor whole or is refused;
- a block's digest is computed as it is written, compared with the file afterwards, and compared at
  every read;
- reading runs no code from the files.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Buffer, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_async_rl.config.durable import Digest
from megatron_async_rl.policy.blocks import Block, Content
from megatron_async_rl.policy.digested_folder import (
    BlockReader,
    StoredBlock,
    StoredFile,
    block_fault,
)

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
"""Module -> names that an index of blocks may use, in addition to torch's dtypes."""


class BlocksUnreadable(Exception):
    """The files contain other tensors than the model has. Raised on every rank."""


class BlocksDamaged(Exception):
    """A file is missing or damaged. Raised on every rank."""


class BlocksUnwritten(Exception):
    """A rank could not write its blocks. Raised on every rank."""


def write(folder: Path, content: Content, group: Any) -> dict[str, StoredFile]:
    """Write the content of all ranks of `group` (gloo), and read it back. Collective over it.
    Return the files of all ranks on rank 0, none on the others. Raises BlocksUnwritten."""
    # Copying ahead needs a CUDA stream, and a thread's default device is the first of the machine.
    # Synced, because `latest` must not name files that a power loss can still empty.
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
                # Another layout may have saved fewer padding rows; rows that no file has are 0.
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
        # A model of another shape is a mistake of the user, unlike damage.
        unfit = isinstance(first, _Unfit)
        raise (BlocksUnreadable if unfit else BlocksDamaged)(_text(error)) from error


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    # The lowest rank that failed is the same on every rank, so all raise the same error.
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _text(error: CheckpointException) -> str:
    rank, first = _first_failure(error)
    if isinstance(first, _Fault | _Unfit):
        return str(first)
    return f"rank {rank}: {type(first).__name__}: {first}"


def _named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


class _Unfit(ValueError):
    """The files contain no such tensor."""


class _Fault(OSError):
    """A file differs from what was written to it; the message names file and tensor."""


class _BlockStream(io.IOBase):
    """Stream of one block's bytes to its file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = Digest()

    def write(self, content: Buffer) -> int:
        # Digested during the write, because reading memory again would cost as much as writing.
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
            # torch writes and syncs; the streams have digested every byte on the way.
            for one in super().write_data(plan, planner).wait()
            for stream in (streams.by_index[one.index],)
        ]
        reader = BlockReader()
        for one in results:
            # Read back from the file, so that a disk that drops writes is noticed before `latest`
            # names the checkpoint.
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
        if isinstance(metadata, Exception):
            raise metadata
        # The default would search it for tensors.
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Raise _Unfit for tensors that the files do not contain."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for key, blocks in self.state_dict.items():
            if key not in saved:
                raise _Unfit(f"it holds no {key}")
            # Padded tensors may have different rows in different layouts; all others must have
            # their saved shape.
            for shape in {block.shape for block in blocks if not block.padded}:
                if shape != tuple(saved[key].size):
                    there = list(saved[key].size)
                    raise _Unfit(f"{key} has shape {there} there and {list(shape)} here")
        plan = super().create_local_plan()
        found = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            # Overlaps are disjoint boxes, so if nothing is missing their sizes add up to the
            # block's.
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
    """Return the number of the block's elements in a tensor of `shape`, which may have fewer
    rows."""
    sizes = zip(block.offsets, block.tensor.shape, shape, strict=True)
    return prod(max(0, min(offset + size, whole) - offset) for offset, size, whole in sizes)


class _Bytes(io.RawIOBase):
    """File object over these bytes, without a copy."""

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
    """Reader that checks each block. files: null in checkpoints without digests."""

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
        """Return the index, or an error that `_LoadPlanner` raises: torch replaces errors that are
        raised here."""
        try:
            return self._index()
        except Exception as error:  # noqa: BLE001 - the planner raises it
            return error

    def _index(self) -> Any:
        path = Path(self.path) / ".metadata"
        content = path.read_bytes()
        if self._files is not None:
            known = self._files.get(path.name)
            if (fault := "unknown" if known is None else known.fault(content)) is not None:
                raise _Fault(f"{_named(path)}: {fault}")
        try:
            return _Index(io.BytesIO(content)).load()
        except Exception as error:  # a damaged pickle raises many types
            fault = f"it cannot be read ({type(error).__name__}: {error})"
            raise _Fault(f"{_named(path)}: {fault}") from error

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        if self._files is None:
            return super()._slice_file(file, sinfo)
        path = Path(self.path) / sinfo.relative_path
        # An index that points between blocks is damaged, although its numbers are plausible.
        block = self._blocks.get((sinfo.relative_path, sinfo.offset, sinfo.length))
        if block is None:
            raise _Fault(f"{_named(path)}: no block is known at byte {sinfo.offset}")
        content = self._reader.read(file, block)
        if (fault := block_fault(content, block)) is not None:
            raise _Fault(f"{_named(path)}: {fault}")
        return _Bytes(content)


class _Index(pickle.Unpickler):
    """Reader of an index of blocks as torch writes it: torch's own classes and numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        # Dtypes are attributes of torch, not classes.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in READABLE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index of blocks has no {module}.{name}")

"""The model's parameters: their names and shapes in Megatron and in Hugging Face's files, over all
pipeline stages; and loading of this rank's part from a Hugging Face directory.

`bridge` is the policy's mbridge bridge: it maps names and cuts fused tensors, so no code here
depends on a model type.

Names are canonical (layers.py), except `local_name`. They number experts over the whole model,
while a rank's module numbers its own from 0. With expert parallelism one local parameter stands for
one parameter of the model on each expert-parallel rank, and each of these is an entry with an
owner.

A rank's shard of a Megatron parameter has some rows and columns of Hugging Face's tensors (`Cuts`):

    shard of qkv, rank 1 of 2: rows q q k v | q q k v <-> q_proj rows 4..7, k_proj, v_proj 2..3
    shard of linear_proj:      columns 2nd half       <-> o_proj columns 2nd half

The bridge determines which: once for each kind of parameter, it maps numbers instead of weights.
The cuts read files into shards, and write shards into staged versions (weights/export.py).

Invariants of loading:
- every parameter of every stage is loaded and every tensor of the directory is used, or
  WeightsDoNotFit names the others;
- the check comes first, is equal on all ranks, and only reads the files' headers: a model is never
  left half loaded;
- a rank only reads the parts of the files that it keeps, in blocks of rows: it never holds a whole
  tensor, neither for the model nor for Adam's float32 weights at a run's start. Only the shard of
  an FP8 weight is read whole, because its scales are computed from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_async_rl.policy.fp8 import is_quantised

NOT_EXPORTED = ("value_head.",)
"""Prefixes of the names of parameters that only training has: they are in no Hugging Face directory
and in no engine."""
ADAPTER = ".adapters."
"""Part of the names of low-rank adapter parameters (lora.py). Hugging Face directories and
engines hold adapters merged into the weights; PEFT's files hold them separately."""
EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")
"""Number of an expert in a canonical parameter name."""
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in safetensors."""
BLOCK_ELEMENTS = 2**24
"""Largest number of elements of a file that are read at a time, unless a single row has more."""
DERIVED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that old checkpoints store although the configuration determines them."""


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter. `name` is global (layers numbered over the whole model), `local_name`
    is that in its chunk.

    owner: the expert-parallel rank that holds it; None for a parameter that all of them hold.
    shard_shape: on each tensor-parallel rank. partition_dim: the dimension that is cut over them,
    None if replicated. hf_names, hf_shapes: the full tensors that it combines, in the bridge's
    order.
    """

    stage: int
    owner: int | None
    chunk: int
    local_name: str
    name: str
    dtype: torch.dtype
    shard_shape: tuple[int, ...]
    partition_dim: int | None
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]

    @property
    def shard_elements(self) -> int:
        return prod(self.shard_shape)

    @property
    def hf_bytes(self) -> int:
        return sum(prod(shape) for shape in self.hf_shapes) * self.dtype.itemsize

    def like(self) -> SimpleNamespace:
        """Return the attributes of a parameter that the bridge reads when it merges shards."""
        return SimpleNamespace(
            tensor_model_parallel=self.partition_dim is not None, partition_dim=self.partition_dim
        )


@dataclass(frozen=True, eq=False)
class Cut:
    """Part of a Hugging Face tensor in a tensor-parallel rank's shard of its parameter.

    tensor: index of the tensor. first, column: where the part begins in the tensor, in its first
    and second dimension. source: the part's rows in the shard, or a vector's elements, in order.
    """

    tensor: int
    first: int
    column: int
    source: Tensor

    def share(self, holder: int, holders: int) -> Cut:
        """Return one of `holders` equal parts by rows."""
        start, end = (len(self.source) * number // holders for number in (holder, holder + 1))
        return Cut(self.tensor, self.first + start, self.column, self.source[start:end])

    def rows(self, device: torch.device) -> slice | Tensor:
        """Return the part's rows as an index of the shard; a slice, which costs no copy, if they
        are contiguous."""
        start, count = int(self.source[0]), len(self.source)
        if torch.equal(self.source, torch.arange(start, start + count)):
            return slice(start, start + count)
        return self.source.to(device)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first row in the tensor, first row in the shard, number of rows) of each run that
        is contiguous in both."""
        first = self.first
        for run in _runs(self.source):
            yield first, int(run[0]), len(run)
            first += len(run)


class Cuts:
    """Cuts of this tensor-parallel rank's shards, computed once per kind of parameter."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._known: dict[Any, list[Cut]] = {}

    def of(self, entry: ParameterEntry) -> list[Cut]:
        """Return the cuts of the shard of `entry`. Raises ValueError for a parameter that does not
        consist of rows and columns of its tensors."""
        # Layers and experts of one kind have the same cuts.
        kind = (re.sub(r"\d+", "", entry.name), entry.shard_shape, entry.partition_dim)
        if kind not in self._known:
            self._known[kind] = _cuts_of(self._bridge, entry)
        return self._known[kind]


def _cuts_of(bridge: Any, entry: ParameterEntry) -> list[Cut]:
    below, *across = (_traced(bridge, entry, dim) for dim in range(len(entry.shard_shape)))
    rank = bridge.mpu.tp_rank
    cuts = []
    for tensor, rows in enumerate(below):
        columns = across[0][tensor] if across else torch.zeros(1, dtype=rows.dtype)
        own, own_columns = (
            torch.nonzero(line // entry.shard_shape[dim] == rank).flatten()
            if dim == entry.partition_dim
            else torch.arange(len(line))
            for dim, line in enumerate((rows, columns))
        )
        wide = entry.shard_shape[1] if across else 1
        start = int(own_columns[0])
        expected = torch.arange(wide) + (wide * rank if entry.partition_dim == 1 else 0)
        # A permutation of columns cannot be represented as one block of columns.
        if not torch.equal(columns[start : start + wide], expected):
            raise _NotCut(entry)
        for run in _runs(own):
            source = rows[run] % entry.shard_shape[0]
            cuts.append(Cut(tensor, int(run[0]), start, source))
    # A row in no cut would never be loaded.
    if not _covers(bridge, entry, cuts):
        raise _NotCut(entry)
    return cuts


def _covers(bridge: Any, entry: ParameterEntry, cuts: Sequence[Cut]) -> bool:
    """Return True if each row of the shard is in one cut, except vocabulary padding at the end."""
    held = torch.cat([cut.source for cut in cuts]) if cuts else torch.arange(0)
    wanted = entry.shard_shape[0]
    if [shape[0] for shape in entry.hf_shapes] == [bridge.vocab_size]:
        before = bridge.mpu.tp_rank * wanted if entry.partition_dim == 0 else 0
        wanted = min(wanted, max(0, bridge.vocab_size - before))
    return torch.equal(held.sort().values, torch.arange(wanted))


class _NotCut(ValueError):
    def __init__(self, entry: ParameterEntry) -> None:
        super().__init__(
            f"{entry.name} is not made of whole rows and columns of {', '.join(entry.hf_names)}:"
            " policy/parameters.py cannot cut it"
        )


def _traced(bridge: Any, entry: ParameterEntry, dim: int) -> list[Tensor]:
    """Return the source index of each row or column (dimension `dim`) of the parameter's Hugging
    Face tensors, counted over the concatenated shards of all ranks."""
    size = entry.shard_shape[dim]
    ranks = bridge.mpu.tp_size if dim == entry.partition_dim else 1
    line = [1] * len(entry.shard_shape)
    line[dim] = size
    # int32 row numbers pass through the bridge instead of weights.
    numbers = torch.arange(size * ranks, dtype=torch.int32)
    shards = [one.view(line) for one in numbers.chunk(ranks)]
    places = bridge.merge(entry.name, shards, entry.like()) if ranks > 1 else shards[0]

    whole = list(places.shape)
    if dim == 1:  # rows are distinguished; their numbers are one row in memory
        # Expanded, not copied: one row of numbers stands for all rows.
        whole[0] = entry.shard_shape[0]
        if entry.partition_dim == 0:
            whole[0] *= bridge.mpu.tp_size
    found = []
    tensors = bridge.to_hugging_face(entry.name, places.expand(whole))[1]
    for tensor, shape in zip(tensors, entry.hf_shapes, strict=True):
        across = 1 - dim
        first = tensor if tensor.dim() == 1 else tensor.select(across, 0)
        equal = tensor.dim() == 1 or tensor.stride(across) == 0  # one number in memory
        if not equal and not torch.equal(tensor, first.unsqueeze(across).expand_as(tensor)):
            raise _NotCut(entry)
        if len(first) != shape[dim]:
            raise _NotCut(entry)
        found.append(first.long())
    return found


def _runs(places: Tensor) -> list[Tensor]:
    """Split where a number does not follow the one before it."""
    if not len(places):
        return []
    ends = torch.nonzero(places.diff() != 1).flatten() + 1
    return list(torch.tensor_split(places, ends))


def trainable(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield names and parameters that the optimizer updates, in module order: all of them, or
    adapters and a value head. Copies, checkpoints and gradients contain the same ones."""
    return ((name, p) for name, p in chunk.named_parameters() if p.requires_grad)


def local_entries(
    bridge: Any, chunks: Sequence[torch.nn.Module], *, adapters: bool = False
) -> list[ParameterEntry]:
    """Return the parameters that this rank holds; see `stage_entries`."""
    return [
        entry
        for entry in stage_entries(bridge, chunks, adapters=adapters)
        if entry.owner in (None, bridge.mpu.ep_rank)
    ]


def stage_entries(
    bridge: Any, chunks: Sequence[torch.nn.Module], *, adapters: bool = False
) -> list[ParameterEntry]:
    """Return the parameters of this rank's stage, in module order and by owner: those of the model,
    without those that only training has, or those of its adapters."""
    entries = []
    for index, chunk in enumerate(chunks):
        global_names = bridge.global_names(chunk)
        for local_name, parameter in chunk.named_parameters():
            if local_name.startswith(NOT_EXPORTED) or (ADAPTER in local_name) != adapters:
                continue
            numbered = global_names[local_name]
            # Megatron marks experts as cut over expert-tensor-parallel ranks; there is only one.
            cut = (
                bool(getattr(parameter, "tensor_model_parallel", False))
                and EXPERT.search(numbered) is None
            )
            dim = int(parameter.partition_dim) if cut and bridge.mpu.tp_size > 1 else None
            full = list(parameter.shape)
            if dim is not None:
                full[dim] *= bridge.mpu.tp_size
            whole = torch.empty(full, dtype=parameter.dtype, device="meta")
            for owner, name in _owners(bridge, numbered):
                hf_names, hf_tensors = bridge.to_hugging_face(name, whole)
                entries.append(
                    ParameterEntry(
                        stage=bridge.mpu.pp_rank,
                        owner=owner,
                        chunk=index,
                        local_name=local_name,
                        name=name,
                        dtype=parameter.dtype,
                        shard_shape=tuple(parameter.shape),
                        partition_dim=dim,
                        hf_names=tuple(hf_names),
                        hf_shapes=tuple(tuple(tensor.shape) for tensor in hf_tensors),
                    )
                )
    return entries


def _owners(bridge: Any, name: str) -> list[tuple[int | None, str]]:
    """Return (owner, global name) of every parameter of the model for which `name`, with its expert
    numbered locally, stands."""
    found = EXPERT.search(name)
    ranks = bridge.mpu.ep_size
    if found is None or ranks == 1:
        return [(None, name)]
    # Expert-parallel ranks hold consecutive experts.
    held = bridge.config.num_moe_experts // ranks
    return [(rank, EXPERT.sub(str(rank * held + int(found[0])), name)) for rank in range(ranks)]


def whole_model_names(
    bridge: Any, chunk: torch.nn.Module
) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield the chunk's parameters and their names in the whole model."""
    global_names = bridge.global_names(chunk)
    for local_name, parameter in chunk.named_parameters():
        owners = dict(_owners(bridge, global_names[local_name]))
        yield parameter, owners.get(bridge.mpu.ep_rank) or owners[None]


def all_entries(
    bridge: Any, chunks: Sequence[torch.nn.Module], *, adapters: bool = False
) -> list[ParameterEntry]:
    """Return the parameters of all stages, first stage first; see `stage_entries`. Collective over
    the pipeline group."""
    mine = stage_entries(bridge, chunks, adapters=adapters)
    if bridge.mpu.pp_size == 1:
        return mine
    stages: list[Any] = [None] * bridge.mpu.pp_size
    # Every stage checks the whole directory, so all ranks raise or none does.
    dist.all_gather_object(stages, mine, group=bridge.mpu.pp_group)
    return [entry for stage in stages for entry in stage]


def merged(bridge: Any, entry: ParameterEntry, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the full Hugging Face tensors of `entry` from its tensor-parallel shards, in the order
    of `hf_names`."""
    if entry.partition_dim is None:
        whole = shards[0]
    else:
        whole = bridge.merge(entry.name, list(shards), entry.like())
    tensors: list[Tensor] = bridge.to_hugging_face(entry.name, whole)[1]
    return tensors


class WeightsDoNotFit(ValueError):
    """The tensors of a model directory differ from those of the model in its config.json."""


class HuggingFaceTensors:
    """The safetensors of a directory by name. Raises FileNotFoundError or WeightsDoNotFit for a
    broken set of files."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._handles: dict[str, Any] = {}
        for file in safetensor_files(directory):
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
            except SafetensorError as error:
                raise WeightsDoNotFit(
                    f"{file} is not a complete safetensors file: {error}"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                if name in self._handles:
                    raise WeightsDoNotFit(
                        f"{directory}: tensor {name} is in two files, one of them {file.name}"
                    )
                self._handles[name] = handle

    @property
    def names(self) -> set[str]:
        return set(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's dtype; null for a name that no supported model has."""
        return FILE_DTYPES.get(self._handles[name].get_slice(name).get_dtype())

    def fill(
        self, target: Tensor, entry: ParameterEntry, cuts: Sequence[Cut], start: int = 0
    ) -> None:
        """Write this rank's shard of `entry`, row after row, into `target`, which is flat and keeps
        its dtype and device; from the shard's element `start` on, until `target` is full. Rows of
        vocabulary padding are zero."""
        width, end = prod(entry.shard_shape[1:]), start + target.numel()
        # In blocks of rows, so that a rank never holds a whole tensor.
        maximum = max(1, BLOCK_ELEMENTS // width)
        if sum(len(cut.source) for cut in cuts) < entry.shard_shape[0]:
            # Rows of vocabulary padding are in no cut.
            target.zero_()
        for cut in cuts:
            for there, here, count in cut.runs():
                last = min(here + count, -(-end // width))
                for row in range(max(here, start // width), last, maximum):
                    rows = min(maximum, last - row)
                    block = self._block(
                        entry.hf_names[cut.tensor], there + row - here, rows, cut.column, width
                    )
                    first, stop = max(row * width, start), min((row + rows) * width, end)
                    own = block.flatten()[first - row * width : stop - row * width]
                    target[first - start : stop - start].copy_(own)

    def _block(self, name: str, row: int, rows: int, column: int, width: int) -> Tensor:
        tensor = self._handles[name].get_slice(name)
        rows_of = slice(row, row + rows)
        block: Tensor = (
            tensor[rows_of]
            if len(tensor.get_shape()) == 1
            else tensor[rows_of, column : column + width]
        )
        return block


def safetensor_files(directory: Path) -> list[Path]:
    """Return the files that contain the model: those of the index if there is one, else
    model.safetensors, else all. Raises FileNotFoundError."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = [
            directory / name
            for name in sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        ]
    elif (single := directory / "model.safetensors").exists():
        files = [single]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing) or 'safetensors files'}; the model's weights"
            " must lie there"
        )
    return files


def load_hf(bridge: Any, chunks: Sequence[torch.nn.Module], directory: Path) -> None:
    """Load this rank's stage and shards. Collective over the pipeline group. Raises
    WeightsDoNotFit."""
    entries = all_entries(bridge, chunks)
    with ExitStack() as stack:
        tensors = HuggingFaceTensors(directory, stack)
        wanted = {
            name: shape
            for entry in entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
        }
        # From headers alone, before any weight is written, and equal on all ranks.
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.names)]
        problems += [
            f"{name} is in the files but not in the model"
            for name in sorted(tensors.names - wanted.keys())
            if not _implied(bridge, name)
        ]
        problems += [
            f"{name} has shape {list(tensors.shape(name))}, the model needs {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors.names and tensors.shape(name) != shape
        ]
        if problems:
            more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise WeightsDoNotFit(
                f"the weights in {directory} do not fit its config.json:"
                f" {'; '.join(problems[:8])}{more}"
            )
        with torch.no_grad():
            cuts = Cuts(bridge)
            for entry in local_entries(bridge, chunks):
                parameter = chunks[entry.chunk].get_parameter(entry.local_name)
                if not is_quantised(parameter):
                    tensors.fill(parameter.view(-1), entry, cuts.of(entry))
                    continue
                # Its scales depend on the whole shard. It is read in the parameter's own dtype if
                # the file has it, because a conversion to float32 costs memory.
                same = {tensors.dtype(name) for name in entry.hf_names} == {parameter.dtype}
                shard = torch.empty(
                    entry.shard_shape, dtype=parameter.dtype if same else torch.float32
                )
                tensors.fill(shard.view(-1), entry, cuts.of(entry))
                parameter.copy_(shard)


def _implied(bridge: Any, name: str) -> bool:
    # A tied model's lm_head is its embedding, whatever else a checkpoint stores.
    return name.endswith(DERIVED) or (bridge.tied and name == "lm_head.weight")

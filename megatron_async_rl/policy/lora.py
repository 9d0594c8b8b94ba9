"""Low-rank adapters of Megatron's linear layers (arXiv 2106.09685).

    y = W x + alpha / rank B A x        A: [rank, inputs], B: [outputs, rank]

A target is a matrix of Hugging Face's files. Megatron fuses several into one layer (query, key and
value; gate and up), and each has a separate A and B there, so that an adapter in PEFT's format is
exactly the trained one. Over tensor-parallel ranks:

    column-parallel layer   A whole on every rank, B cut by rows
    row-parallel layer      A cut by columns, B whole

Invariants:
- the run's seed and the matrix's name determine the initial A, and B starts at zero: every layout
  has the same adapters, and version 0 is the base model;
- adapters only add messages of `rank` numbers per token;
- only adapters and a value head have a gradient;
- merged weights are computed shard by shard from the rank's own data, without a message;
- dropout is active only in training passes. Masks come from Megatron's generators: tensor-parallel
  ranks with the same inputs drop the same elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_async_rl.config.policy import LoraConfig
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import ADAPTER, ParameterEntry


@dataclass(frozen=True)
class FusedRows:
    """Rows of a fused matrix on one rank: `groups` repetitions of `widths` rows of each of these
    matrices."""

    widths: Mapping[str, int]
    groups: int = 1

    def fused(self, values: Mapping[str, Tensor]) -> Tensor:
        """[..., rows] from [..., groups * width] of some matrices; 0 for the others."""
        some = next(iter(values.values()))
        shape = (*some.shape[:-1], self.groups)
        return torch.cat(
            [
                values[name].unflatten(-1, (self.groups, width))
                if name in values
                else some.new_zeros(*shape, width)
                for name, width in self.widths.items()
            ],
            dim=-1,
        ).flatten(-2)


class Adapter(nn.Module):
    """A and B of one target, or this rank's shards of them. cut: the sharded one, and its cut
    dimension; the other is whole on every tensor-parallel rank. sequence_parallel: for the whole
    one, each of those ranks has the gradient of its part of the tokens."""

    def __init__(
        self,
        rank: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        *,
        cut: tuple[str, int],
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(rank, inputs, dtype=dtype))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))
        for name, parameter in self.named_parameters():
            if name == cut[0]:
                set_tensor_model_parallel_attributes(parameter, True, cut[1], 1)
            else:
                # Megatron sums the gradients of marked parameters over tensor-parallel ranks.
                parameter.sequence_parallel = sequence_parallel


class AdaptedLayer(nn.Module):
    """A layer with adapters: mixed in before Megatron's class, whose __init__ has run when `_add`
    is called."""

    weight: Tensor
    config: Any
    tp_group: Any
    sequence_parallel: bool
    cuts: ClassVar[Mapping[str, int]]
    """Parameters of the layer and of an adapter -> the dimension that tensor parallelism cuts."""

    def _add(self, lora: LoraConfig, rows: FusedRows, inputs: int) -> None:
        own = {"lora_A", "lora_B"} & self.cuts.keys()
        (cut,) = ((name, self.cuts[name]) for name in own)
        self.scale, self.dropout, self.rows = lora.alpha / lora.rank, lora.dropout, rows
        self.adapters = nn.ModuleDict(
            {
                name: Adapter(
                    lora.rank,
                    inputs,
                    width * rows.groups,
                    self.config.params_dtype,
                    cut=cut,
                    sequence_parallel=self.sequence_parallel,
                )
                for name, width in rows.widths.items()
                if name in lora.targets
            }
        )

    def _low(self, adapter: nn.Module, inputs: Tensor, *, alike: bool) -> Tensor:
        """Return alpha / rank A x, [..., rank], of this rank's inputs. alike: tensor-parallel ranks
        have the same inputs."""
        if self.training and self.dropout:
            # Ranks with the same inputs must drop the same elements, other ranks their own.
            with nullcontext() if alike else get_cuda_rng_tracker().fork():
                inputs = F.dropout(inputs, self.dropout)
        return F.linear(inputs, adapter.lora_A) * self.scale

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + alpha / rank B A of this rank's shard, computed in float32, in `dtype`; null:
        in W's dtype."""
        products = {
            # In float32, because a bfloat16 product would lose updates below the rounding of W.
            name: (adapter.lora_B.float() @ adapter.lora_A.float()).t()
            for name, adapter in self.adapters.items()
        }
        added = self.rows.fused(products).t()
        return added.mul_(self.scale).add_(self.weight).to(dtype or self.weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        cuts = {key: self.cuts.get(key.rpartition(".")[2]) for key in self.state_dict()}
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {key: dim for key, dim in cuts.items() if dim is not None},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return entries


class AdaptedColumns(AdaptedLayer, ColumnParallelLinear):
    """A column-parallel layer with adapters on some of its matrices."""

    cuts: ClassVar = {"weight": 0, "bias": 0, "lora_B": 0}

    def __init__(self, *args: Any, lora: LoraConfig, rows: FusedRows, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add(lora, rows, self.input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        # One message for all adapters of the layer.
        low = torch.cat(
            [
                self._low(adapter, input_, alike=not self.sequence_parallel)
                for adapter in self.adapters.values()
            ],
            dim=-1,
        )
        low = (
            # Gather the low-rank activations, whose size is rank / inputs of the layer's own.
            gather_from_sequence_parallel_region(low, group=self.tp_group)
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        )
        # All adapters of a layer have the same rank.
        parts = low.chunk(len(self.adapters), dim=-1)
        added = {
            name: F.linear(part, adapter.lora_B)
            for (name, adapter), part in zip(self.adapters.items(), parts, strict=True)
        }
        return output + self.rows.fused(added), bias


class AdaptedRows(AdaptedLayer, RowParallelLinear):
    """A row-parallel layer with an adapter. output_bias: True if it has a bias although its
    configuration has none (`with_bias`)."""

    cuts: ClassVar = {"weight": 1, "lora_A": 1}

    def __init__(
        self,
        *args: Any,
        bias: bool,
        lora: LoraConfig,
        rows: FusedRows,
        output_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, bias=bias or output_bias, **kwargs)
        self._add(lora, rows, self.input_size_per_partition)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        (adapter,) = self.adapters.values()
        low = self._low(adapter, input_, alike=False)
        low = (
            # A is cut along the inputs: A x is a sum over tensor-parallel ranks, computed before B.
            reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        )
        return output + F.linear(low, adapter.lora_B), bias


def adapt(
    layer: TransformerLayerSubmodules, config: Any, lora: LoraConfig, *, output_bias: bool
) -> None:
    """Replace the targets of a transformer layer's specification by layers with adapters.

    config: Megatron's. output_bias: True if the output projection of attention has a bias. Raises
    ValueError for a target that the layer does not have.
    """
    targets = set(lora.targets)
    parallel, head = config.tensor_model_parallel_size, config.kv_channels
    groups = config.num_query_groups
    heads = {"q_proj": config.num_attention_heads // groups * head, "k_proj": head, "v_proj": head}
    attention = layer.self_attention.submodules
    if targets & heads.keys():
        # Megatron orders the fused rows by query group: q q k v | q q k v.
        rows = FusedRows(heads, groups // parallel)
        attention.linear_qkv = partial(AdaptedColumns, lora=lora, rows=rows)
    if "o_proj" in targets:
        rows = FusedRows({"o_proj": config.hidden_size})
        attention.linear_proj = partial(AdaptedRows, lora=lora, rows=rows, output_bias=output_bias)
    gated = dict.fromkeys(("gate_proj", "up_proj"), config.ffn_hidden_size // parallel)
    if not targets & {*gated, "down_proj"}:
        return

    if config.num_moe_experts is not None:
        raise ValueError(
            f"policy.lora.targets: {sorted(targets & {*gated, 'down_proj'})} are experts here,"
            " which have no adapters; name q_proj, k_proj, v_proj, o_proj alone"
        )
    feed_forward = layer.mlp.keywords["submodules"]
    if targets & gated.keys():
        feed_forward.linear_fc1 = partial(AdaptedColumns, lora=lora, rows=FusedRows(gated))
    if "down_proj" in targets:
        rows = FusedRows({"down_proj": config.hidden_size})
        feed_forward.linear_fc2 = partial(AdaptedRows, lora=lora, rows=rows)


def freeze_base(chunk: nn.Module) -> None:
    """Make only adapters and a value head trainable. Call this before gradient buffers are made."""
    for name, parameter in chunk.named_parameters():
        # DDP makes gradient buffers only for parameters that require a gradient.
        parameter.requires_grad_(ADAPTER in name or name.startswith("value_head."))


@torch.no_grad()
def initialise(
    entries: Iterable[ParameterEntry], chunks: Sequence[nn.Module], layout: Layout, seed: int
) -> None:
    """Set A to a uniform draw in +-1 / sqrt(inputs), like PEFT, from `seed` and the matrix's name,
    and B to zero. Seed the generators of dropout.

    entries: the adapters that this rank holds.
    """
    for entry in entries:
        parameter = chunks[entry.chunk].get_parameter(entry.local_name)
        (name,), (shape,) = entry.hf_names, entry.hf_shapes
        if not name.endswith("lora_A.weight"):
            # B = 0, so that training starts from the base model.
            parameter.zero_()
            continue
        # By name, not by order, so that every layout draws the same matrix.
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        whole = (2.0 * torch.rand(shape, generator=generator) - 1.0) / math.sqrt(shape[1])
        if entry.partition_dim is not None:
            # Drawn whole, then cut, so that the draw does not depend on the layout.
            whole = whole.chunk(layout.tp_size, entry.partition_dim)[layout.tp_rank]
        parameter.copy_(whole)
    # The same for tensor-parallel ranks, except for the generator that Megatron forks to; different
    # for other ranks.
    model_parallel_cuda_manual_seed(((seed << 16) + layout.rank // layout.tp_size) % 2**62)


def weight_of(layer: nn.Module, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a layer's own parameter for engines and files: with its adapters merged into it, in
    `dtype`; null: in its own. Without adapters this is the parameter itself."""
    if isinstance(layer, AdaptedLayer) and name == "weight":
        return layer.merged_weight(dtype)
    return layer.get_parameter(name).detach()

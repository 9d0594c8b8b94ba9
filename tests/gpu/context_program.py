"""One of two ranks that share rows: this package's attention, and Transformer Engine's on a GPU,
over the rank's part, compared with attention over the whole rows. Argument: cpu or cuda."""

from __future__ import annotations

import sys

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import device
from megatron_async_rl.policy.attention import (
    ContextParallelSlice,
    CoreAttention,
    TransformerEngineAttention,
)
from megatron_async_rl.policy.packed_sequences import PackedSequences
from megatron_async_rl.policy.parallel import Layout, initialise

HEADS, GROUPS, WIDTH = 4, 2, 64
PADDED = [(1, 4), (3, 24), (2, 512)]
"""(rows, length)."""
PACKED = [(4,), (24, 24, 8, 4, 4, 4, 16), (512, 128, 128, 4)]
"""Lengths of the samples of one row."""


def attention(kind: type[CoreAttention], ranks: int) -> CoreAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        context_parallel_size=ranks,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return kind(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def passed(module: CoreAttention, tensors, weights, packing) -> list[torch.Tensor]:
    """Return the output, and the gradients of its weighted sum."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = module(*leaves, None, packed_seq_params=packing)
    (output.float() * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Compare [tokens, ...] of two kernels in bfloat16 on the same numbers, each token's as a
    vector, because single numbers of a gradient are sums of far larger ones."""
    apart, size = (each.float().flatten(1).norm(dim=1) for each in (theirs - ours, ours))
    assert bool((apart <= 0.03 * (size + size.mean()) + 0.3).all()), (apart.max(), size)


def compare(layout: Layout, kind, length: int, rows: int, lengths: tuple[int, ...]) -> None:
    """Compare both kernels on one layout. lengths: of the samples of a packed row; empty for padded
    rows."""
    dtype = torch.float32 if kind is CoreAttention else torch.bfloat16
    draw = torch.Generator().manual_seed(length + rows)
    *whole, weights = (
        torch.randn(length, rows, *shape, generator=draw).to(layout.device)
        for shape in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS * WIDTH,))
    )
    whole = [each.to(dtype) for each in whole]
    sizes = np.array(lengths or (length,))
    own = torch.from_numpy(
        ContextParallelSlice(layout.cp_rank, 2).own(np.cumsum(sizes) - sizes, sizes)
    )
    own = own.to(layout.device)
    shared, alone = (
        PackedSequences.of(sizes, layout.device, ranks) if lengths else None for ranks in (2, 1)
    )
    expected = passed(attention(CoreAttention, 1), whole, weights, alone)
    parts = [each[own] for each in whole]
    found = passed(attention(kind, 2), parts, weights[own], shared)
    for mine, theirs in zip(found, expected, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs[own], atol=1e-5, rtol=1e-5)
        else:
            assert_near(mine, theirs[own])


def main(device_type: str) -> None:
    device.install(device_type)
    layout = initialise(ParallelConfig(ranks=2, context=2), device_type, timeout_s=60)
    kinds = [CoreAttention]
    if device_type == "cuda":
        kinds.append(TransformerEngineAttention)
    for kind in kinds:
        for rows, length in PADDED:
            compare(layout, kind, length, rows, ())
        for lengths in PACKED:
            compare(layout, kind, sum(lengths), 1, lengths)
    layout.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

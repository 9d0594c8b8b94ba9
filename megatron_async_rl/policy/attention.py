"""Attention and normalisation layers for Megatron's local layer spec, on torch kernels.

`CoreAttention` replaces Megatron's unfused softmax, which holds [rows, heads, length, length]
scores, by torch's scaled dot product attention. Invariants: causal, no dropout, no packing, no mask
(right padding is invisible to real tokens under the causal mask); grouped-query heads share keys
and values in order, as Megatron lays them out.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F


class CoreAttention(MegatronModule):
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if (
            attn_mask_type != AttnMaskType.causal
            or config.context_parallel_size != 1
            or config.attention_dropout
        ):
            raise ValueError(
                "CoreAttention is causal, without dropout and without context parallelism; got"
                f" {attn_mask_type}, dropout {config.attention_dropout}, context parallel size"
                f" {config.context_parallel_size}"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [length, rows, heads, head], key and value [length, rows, groups, head] -> [length,
        rows, heads * head]."""
        if (
            attention_mask is not None
            or attention_bias is not None
            or packed_seq_params is not None
        ):
            raise ValueError(
                "CoreAttention takes right-padded rows: no mask, no bias, no packed sequences"
            )
        length, rows, heads, _ = query.shape
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=heads != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).reshape(length, rows, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """No parameters."""
        return {}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under Megatron's constructor.

    Its weight is marked `sequence_parallel` so that Megatron sums its gradient over tensor-parallel
    ranks, each of which sees a part of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel

"""Attention and normalisation layers for Megatron's local layer spec, on torch kernels.

`CoreAttention` replaces Megatron's unfused softmax, which holds [rows, heads, length, length]
scores, by torch's scaled dot product attention. Invariants: causal, no dropout, no mask (right
padding is invisible to real tokens under the causal mask); a token of a packed row sees its own
sample alone, and in a layer with a sliding window the last tokens of it; grouped-query heads share
keys and values in order, as Megatron lays them out.
`ThdAttention` leaves packed rows to Transformer Engine's kernel, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

WINDOWED_QUERIES = 512
"""Queries that attend at one time where there is a sliding window."""
ALIGNED = 16
"""Tokens that the edge of a mask is rounded to."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the samples of a packed row begin and end: for Megatron and Transformer Engine on the
    device, and for attention on torch's kernels as `runs` on the host.

    runs: (samples, length) of each run of neighbours of equal length, in order.
    """

    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> PackedSequences:
        """lengths: [S], S > 0, of the row's samples in order; they add up to the row's."""
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        offsets, longest = torch.from_numpy(ends).to(device), int(lengths.max())
        first = np.flatnonzero(np.diff(lengths, prepend=-1))
        counts = np.diff(first, append=len(lengths))
        return cls(
            # A row is one of Megatron's own form, [length, 1, ...], up to the attention's kernel.
            qkv_format="sbhd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            runs=tuple(zip(counts.tolist(), lengths[first].tolist(), strict=True)),
        )


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
        self.window = window_of(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [length, rows, heads, head], key and value [length, rows, groups, head] -> [length,
        rows, heads * head]. packed_seq_params: of a single row."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("CoreAttention takes no mask and no bias")
        length, rows = query.shape[:2]
        if packed_seq_params is None:
            context = causal_attention(
                *(each.transpose(0, 1) for each in (query, key, value)),
                scale=self.softmax_scale,
                window=self.window,
            )
            return context.transpose(0, 1).reshape(length, rows, -1)

        # Samples of one length lie next to each other: each run of them is a batch of rows, and no
        # tensor is copied or padded on the way in.
        runs = packed_seq_params.runs
        parts = [
            each.squeeze(1).split([samples * tokens for samples, tokens in runs])
            for each in (query, key, value)
        ]
        contexts = [
            causal_attention(
                *(part.unflatten(0, run) for part in run_parts),
                scale=self.softmax_scale,
                window=self.window,
            ).flatten(0, 1)
            for run, *run_parts in zip(runs, *parts, strict=True)
        ]
        return torch.cat(contexts).reshape(length, 1, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """No parameters."""
        return {}


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens that each token of a layer sees, itself among them; null for all before it.
    layer_number: from 1, over the whole model, as `config.window_attn_skip_freq` counts."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    return int(config.window_size[0]) + 1


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None = None
) -> Tensor:
    """query [rows, length, heads, head], the last tokens of those of key and value [rows, at least
    length, groups, head] -> query's shape. scale: of the scores; null for 1 / sqrt(head). window:
    as `window_of`."""
    grouped = query.shape[2] != key.shape[2]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    length, before = key.shape[2], key.shape[2] - query.shape[2]
    if window is None or window >= length:
        # torch's own causal mask takes the queries for the first tokens.
        mask = (
            torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device).tril(before)
            if before
            else None
        )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=grouped,
        ).transpose(1, 2)

    if grouped and query.device.type != "cpu":
        # The only kernel of a GPU that takes grouped heads takes no mask.
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        grouped = False
    band = _band(window, query.dtype, query.device)
    behind = band.shape[1] - WINDOWED_QUERIES
    contexts = []
    for start in range(before, length, WINDOWED_QUERIES):
        stop = min(start + WINDOWED_QUERIES, length)
        # The band's first column is the token `behind` its first query, if there is one.
        left = max(0, behind - start)
        first = start - behind + left
        contexts.append(
            F.scaled_dot_product_attention(
                query[:, :, start - before : stop - before],
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=band[: stop - start, left : left + stop - first],
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(contexts, 2).transpose(1, 2)


@lru_cache(maxsize=2)
def _band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, tokens] of neighbouring queries and the tokens up to the last query's: 0 where a
    query sees a token, minus infinity elsewhere. One for all layers: what is kept for the backward
    pass is a view of it, aligned as kernels of a GPU want it."""
    behind = -(-(window - 1) // ALIGNED) * ALIGNED
    seen = torch.ones(WINDOWED_QUERIES, WINDOWED_QUERIES + behind, dtype=torch.bool, device=device)
    seen = seen.triu(behind - window + 1).tril(behind)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


class ThdAttention(CoreAttention):
    """Transformer Engine's attention over packed rows, in its format [tokens, heads, head] ("thd"):
    one kernel for samples of any length. It reads the layer's window from the configuration, as
    `window_of` does."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.kernel = TEDotProductAttention(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias
            )
        context: Tensor = self.kernel(
            *(each.squeeze(1) for each in (query, key, value)),
            attention_mask,
            # Of the row, whatever the layer was asked for: Transformer Engine takes no other here.
            AttnMaskType.causal,
            attention_bias,
            PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=packed_seq_params.cu_seqlens_q,
                cu_seqlens_kv=packed_seq_params.cu_seqlens_kv,
                max_seqlen_q=packed_seq_params.max_seqlen_q,
                max_seqlen_kv=packed_seq_params.max_seqlen_kv,
            ),
        )
        return context.reshape(query.shape[0], 1, -1)


def core_attention(device_type: str, dtype: torch.dtype, *, packed: bool) -> type[CoreAttention]:
    """The attention for these rows. Transformer Engine's packed kernels are bfloat16's."""
    thd = packed and HAVE_TE and device_type == "cuda" and dtype == torch.bfloat16
    return ThdAttention if thd else CoreAttention


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


class GemmaNorm(RMSNorm):
    """Gemma's, in float32 and with weights that stand for their distance from 1."""

    def forward(self, hidden: Tensor) -> Tensor:
        found = F.rms_norm(
            hidden.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps
        )
        return found.to(hidden.dtype)


class NormedAdd(GemmaNorm):
    """The norm of what attention or the MLP gave, and then the residual sum: in the place, and with
    the interface, of Megatron's sum with bias and dropout, of which Gemma has neither."""

    def forward(  # type: ignore[override]
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            output, _ = output_and_bias
            # Megatron turns gradients on around this sum, also where scoring has them off.
            with torch.set_grad_enabled(output.requires_grad):
                return residual + GemmaNorm.forward(self, output)

        return add

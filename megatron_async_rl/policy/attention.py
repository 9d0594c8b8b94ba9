"""Attention for Megatron's local layer spec, on torch kernels.

`CoreAttention` replaces Megatron's unfused softmax, which holds [rows, heads, length, length]
scores, by torch's scaled dot product attention. Invariants: causal, no dropout, no mask (under the
causal mask no real token attends to right padding); a token of a packed row attends only to its own
sample, whose prefix may be shared, and in a layer with a sliding window only to the last tokens of
it; grouped-query heads share keys and values in Megatron's order; under context parallelism every
rank gathers the keys and values of all. `TransformerEngineAttention` uses Transformer Engine's
kernel for packed rows and for context parallelism, if there is one.

Context parallelism cuts sequences over the ranks of a context-parallel group. A sequence is 2 *
size chunks of equal length; rank r holds chunk r, followed by chunk (2 * size - 1 - r). Megatron
and Transformer Engine cut in the same way, which gives all ranks the same work with a causal mask.
Only attention reads other tokens; everything else in a layer is local.

Invariants of context parallelism:
- a sequence's length is a multiple of `ContextParallelSlice.multiple`, which the sequence layout
  ensures;
- queries stay on their rank; keys and values are gathered, and each rank's part of their gradient
  is sent back to the rank that holds the token, and summed there;
- outputs at response tokens are whole on every rank, which computes the whole loss; the gradient of
  a token's output stays with the rank that holds the token. So ranks hold parts of the gradient,
  which add up like those of data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_async_rl.policy.packed_sequences import PackedSequences, repeat_rows
from megatron_async_rl.samples.columns import spans


@dataclass(frozen=True)
class ContextParallelSlice:
    """A rank's place among `size` context-parallel ranks."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Number of chunks of a sequence; its length is a multiple of it."""
        return 1 if self.size == 1 else 2 * self.size

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's two chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def own(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the flattened rows of the tokens that this rank holds, in its
        order. starts, lengths: of each sequence."""
        if self.size == 1:
            return spans(starts, lengths)
        # One early and one late chunk, so that all ranks have the same work under a causal mask.
        chunk = lengths // (2 * self.size)
        firsts = np.stack([starts + number * chunk for number in self.chunks], axis=1)
        return spans(firsts.ravel(), np.repeat(chunk, 2))


WHOLE = ContextParallelSlice()
"""Slice of a rank that does not share its sequences."""


def gather_sequences(part: Tensor, group: Any) -> Tensor:
    """[rows, length / ranks, ...] of this rank -> [rows, length, ...] of all ranks of `group`, in
    the sequences' order. The gradient of a token is summed over the ranks."""
    parts = tensor_parallel.gather_from_sequence_parallel_region(part, group=group)
    # Ranks in order hold the early chunks ascending and the late chunks descending.
    early, late = parts.unflatten(0, (group.size(), -1)).chunk(2, dim=2)
    return torch.cat((early, late.flip(0))).transpose(0, 1).flatten(1, 2)


def gather_outputs(own: Tensor, places: Tensor, tokens: int, group: Any) -> Tensor:
    """[K, n] at this rank's tokens -> [K, N] at all N of them, equal on all ranks of `group`.

    places: [n] int64, indices of this rank's tokens among the N. Each token is on one rank, which
    gets its gradient.
    """
    whole = own.new_zeros(len(own), tokens).index_copy(1, places, own)
    # A sum over disjoint places. Its backward pass is the identity, so each rank keeps its own
    # tokens' gradient.
    result: Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(whole, group=group)
    return result


QUERIES = 256
"""Number of queries after a shared prefix that attend at a time."""
WINDOWED_QUERIES = 512
"""Number of queries that attend at a time if there is a sliding window."""
SHORT_KEYS = SHORT_HEAD = 128
"""Largest numbers of keys and of a head's elements for which attention in bfloat16 on a CPU has a
backward pass in float32."""
ALIGNED = 16
"""Multiple to which the edge of a mask is rounded, in tokens."""


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
        if attn_mask_type != AttnMaskType.causal or config.attention_dropout:
            raise ValueError(
                f"CoreAttention is causal and without dropout; got {attn_mask_type}, dropout"
                f" {config.attention_dropout}"
            )
        self.softmax_scale = softmax_scale
        self.window = window_of(config, layer_number)
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None

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
            context = attention_of_part(
                *(each.transpose(0, 1) for each in (query, key, value)),
                scale=self.softmax_scale,
                window=self.window,
                group=self.context_group,
            )
            return context.transpose(0, 1).reshape(length, rows, -1)

        runs, sizes = packed_seq_params.runs, packed_seq_params.sizes
        parts = list(
            zip(*(each.squeeze(1).split(sizes) for each in (query, key, value)), strict=True)
        )
        # Roots of equal length are adjacent: each run of them is a batch of rows, and the inputs
        # are neither copied nor padded.
        roots = [
            [part.unflatten(0, run) for part in own]
            for run, own in zip(runs, parts[: len(runs)], strict=True)
        ]
        contexts = [
            attention_of_part(
                *own, scale=self.softmax_scale, window=self.window, group=self.context_group
            ).flatten(0, 1)
            for own in roots
        ]
        for call, filling, own in zip(
            packed_seq_params.branches,
            packed_seq_params.fillings(),
            parts[len(runs) :],
            strict=True,
        ):
            filled = [
                (part if filling is None else filling.fill(part)).unflatten(0, (call.pieces, -1))
                for part in own
            ]
            context = attention_after_prefix(
                filled[0],
                *(
                    torch.cat((call.repeated(prefix), part), dim=1)
                    for prefix, part in zip(roots[call.run][1:], filled[1:], strict=True)
                ),
                scale=self.softmax_scale,
                window=self.window,
            ).flatten(0, 1)
            contexts.append(context if filling is None else filling.unfill(context))
        return torch.cat(contexts).reshape(length, 1, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return nothing, because attention has no parameters."""
        return {}


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the number of tokens to which a token of a layer attends, including itself; null: all
    before it. layer_number: from 1, over the whole model, as `config.window_attn_skip_freq`
    counts."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    return int(config.window_size[0]) + 1


def attention_of_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    group: Any,
) -> Tensor:
    """Return `causal_attention` of sequences that `group` shares: all inputs are this rank's part,
    and so is the result. group: null if the sequences are not shared. Collective."""
    if group is None:
        return causal_attention(query, key, value, scale=scale, window=window)
    context = ContextParallelSlice(group.rank(), group.size())
    widths = key.shape[-1], value.shape[-1]
    # Keys and values in one message.
    keys, values = gather_sequences(torch.cat((key, value), dim=-1), group).split(widths, dim=-1)
    chunk = query.shape[1] // 2
    # A chunk attends to the tokens up to its own end.
    ends = ((number + 1) * chunk for number in context.chunks)
    return torch.cat(
        [
            causal_attention(part, keys[:, :end], values[:, :end], scale=scale, window=window)
            for part, end in zip(query.split(chunk, dim=1), ends, strict=True)
        ],
        dim=1,
    )


def attention_after_prefix(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Return `causal_attention` of the last tokens of sequences, QUERIES at a time: a mask does not
    save the work that it hides."""
    length, before = query.shape[1], key.shape[1] - query.shape[1]
    contexts = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        seen = slice(0, before + stop)
        part = query[:, start:stop]
        contexts.append(
            causal_attention(part, key[:, seen], value[:, seen], scale=scale, window=window)
        )
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, dim=1)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None = None
) -> Tensor:
    """Return causal attention in query's shape. query [rows, length, heads, head] has the last
    tokens of key and value [rows, at least length, groups, head]. scale: of the scores; null: 1 /
    sqrt(head). window: result of `window_of`."""
    total, before = key.shape[1], key.shape[1] - query.shape[1]
    windowed = window is not None and window < total
    if (before or windowed) and query.shape[2] != key.shape[2] and query.device.type != "cpu":
        # The only GPU kernel for grouped heads does not accept a mask.
        repeats = query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(repeats, 2) for each in (key, value))
    if window is not None and windowed:
        return _windowed_attention(query, key, value, scale, window)
    if before:
        # torch's own causal mask assumes that the queries are the first tokens.
        mask = _mask_of_last(query.shape[1], total, query.dtype, query.device)
        return _attend(query.flip(1), key, value, scale, mask).flip(1)
    return _attend(query, key, value, scale, None)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None
) -> Tensor:
    """Return attention with `mask`: [queries, tokens], added to the scores; null: torch's causal
    one."""
    if torch.is_grad_enabled() and _is_short(query, key):
        context: Tensor = _ShortAttention.apply(query, key, value, scale, mask)
        return context
    return _kernel(query, key, value, scale, mask)


def _is_short(query: Tensor, key: Tensor) -> bool:
    """Return whether the backward pass of these inputs is in float32."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and key.shape[1] <= SHORT_KEYS
        and query.shape[3] <= SHORT_HEAD
    )


class _ShortAttention(torch.autograd.Function):
    """Attention whose backward pass is in float32, because torch's in bfloat16 takes several times
    as long for short sequences (benchmarks/short_attention.py)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.mask = scale, mask
        return _kernel(query, key, value, scale, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (each.detach().float().requires_grad_() for each in ctx.saved_tensors)
        mask = None if ctx.mask is None else ctx.mask.float()
        with torch.enable_grad():
            context = _kernel(query, key, value, ctx.scale, mask)
        found = torch.autograd.grad(context, (query, key, value), gradients[0].float())
        return *(each.to(torch.bfloat16) for each in found), None, None


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None
) -> Tensor:
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)


def _windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int
) -> Tensor:
    length, before = key.shape[1], key.shape[1] - query.shape[1]
    band = _band(window, query.dtype, query.device)
    behind = band.shape[1] - WINDOWED_QUERIES
    contexts = []
    for start in range(before, length, WINDOWED_QUERIES):
        stop = min(start + WINDOWED_QUERIES, length)
        # The band's first column is `behind` tokens before its first query, if there is one.
        left = max(0, behind - start)
        first = start - behind + left
        contexts.append(
            _attend(
                query[:, start - before : stop - before],
                key[:, first:stop],
                value[:, first:stop],
                scale,
                band[: stop - start, left : left + stop - first],
            )
        )
    return torch.cat(contexts, 1)


@lru_cache(maxsize=2)
def _band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [queries, tokens] of adjacent queries and the tokens up to the last query's: 0 where a
    query attends to a token, minus infinity elsewhere. One for all layers: the backward pass keeps
    a view of it, aligned as GPU kernels require."""
    behind = -(-(window - 1) // ALIGNED) * ALIGNED
    seen = torch.ones(WINDOWED_QUERIES, WINDOWED_QUERIES + behind, dtype=torch.bool, device=device)
    seen = seen.triu(behind - window + 1).tril(behind)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


@lru_cache(maxsize=2)
def _mask_of_last(length: int, total: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [length, total], added to the scores of a sequence's last tokens, the last one
    first.

    Each of them attends to one token less than the previous one, so a row is the row above from its
    second number on. On the CPU all rows are therefore views of one line of length + total - 1
    numbers, which is all that the backward pass keeps. GPU kernels need separate rows. One for all
    layers of a micro-batch, whose parts have two lengths.
    """
    line = torch.zeros(length + total - 1, dtype=dtype, device=device)
    line[total:].fill_(-torch.inf)  # an assignment would upload the number
    mask = line.as_strided((length, total), (1, 1))
    return mask if device.type == "cpu" else mask.contiguous()


class BottomRight(Enum):
    """Transformer Engine's causal mask of queries that are the last tokens of their keys. Megatron
    passes on a mask's name, and its own enumeration lacks this one."""

    padding_causal_bottom_right = 1


class TransformerEngineAttention(CoreAttention):
    """Transformer Engine's attention over packed rows, in its format [tokens, heads, head] ("thd"):
    one kernel for samples of any length, also where several continue a shared prefix, whose keys
    and values are repeated, and under context parallelism, where it passes keys and values from
    rank to rank while it computes. It reads the layer's window from the configuration,
    like `window_of`."""

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
        if packed_seq_params is None and self.context_group is None:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias
            )
        inputs, offsets = [query, key, value], None
        # Independent of the configuration: Transformer Engine accepts no other value here.
        mask: AttnMaskType | BottomRight = AttnMaskType.causal
        if packed_seq_params is not None:
            inputs, offsets = [each.squeeze(1) for each in inputs], self._offsets(packed_seq_params)
            if packed_seq_params.keys is not None:
                keys = packed_seq_params.keys
                inputs[1:] = [repeat_rows(each, keys) for each in inputs[1:]]
                mask = BottomRight.padding_causal_bottom_right
        context: Tensor = self.kernel(*inputs, attention_mask, mask, attention_bias, offsets)
        return context.reshape(*query.shape[:2], -1)

    def _offsets(self, packing: PackedSequences) -> PackedSeqParams:
        offsets = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packing.cu_seqlens_q,
            cu_seqlens_kv=packing.cu_seqlens_kv,
            max_seqlen_q=packing.max_seqlen_q,
            max_seqlen_kv=packing.max_seqlen_kv,
            # Otherwise Transformer Engine compares both kinds of offsets on the host, twice in each
            # layer.
            pad_between_seqs=False,
        )
        if self.context_group is not None:
            # Transformer Engine requires both kinds here. They are equal, because the filler of a
            # sample belongs to the sample.
            offsets.cu_seqlens_q_padded = packing.cu_seqlens_q
            offsets.cu_seqlens_kv_padded = packing.cu_seqlens_kv
        return offsets


def core_attention(
    device_type: str,
    dtype: torch.dtype,
    *,
    packed: bool,
    context_parallel: bool = False,
    windowed: bool = False,
) -> type[CoreAttention]:
    """Return the attention for these rows. Transformer Engine's kernels for them need bfloat16, and
    pass no keys on for a sliding window."""
    supported = HAVE_TE and device_type == "cuda" and dtype == torch.bfloat16
    wanted = not windowed if context_parallel else packed
    return TransformerEngineAttention if supported and wanted else CoreAttention


class LocalOrGlobalAttention(SelfAttention):
    """Attention that rotates queries and keys according to its layer: `rotary_pos_emb` contains the
    angles of layers without and with a window, [length, 1, 1, 2 * head], as Gemma 3's
    `set_rotation` combines them."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        parts = rotary_pos_emb.chunk(4, -1)
        own = parts[window_of(self.config, self.layer_number) is not None :: 2]
        return super().forward(*args, rotary_pos_emb=torch.cat(own, -1), **kwargs)

"""Attention over a packed row: each sample as if it were alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async_rl.policy import attention
from megatron_async_rl.policy.attention import (
    CoreAttention,
    PackedSequences,
    ThdAttention,
    core_attention,
)

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH = 4, 2, 8
LENGTHS = (9, 5, 5, 5, 2, 1, 1, 4)
"""With runs of equal lengths, and one out of order."""


class ThdKernel(torch.nn.Module):
    """Transformer Engine's interface over plain tensor operations: [tokens, heads, head] in,
    [tokens, heads * head] out."""

    def __init__(self, config, layer_number, attn_mask_type, *args, **kwargs):
        super().__init__()

    def forward(self, query, key, value, mask, mask_type, bias, packed):
        assert (packed.qkv_format, mask, mask_type, bias) == (
            "thd",
            None,
            AttnMaskType.causal,
            None,
        )
        assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
        ends = packed.cu_seqlens_q.tolist()
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(np.diff(ends))
        spans = [slice(*span) for span in pairwise(ends)]
        return torch.cat([by_hand(query[s], key[s], value[s]) for s in spans])


def by_hand(query, key, value):
    """[length, heads, head] of one sample -> [length, heads * head], by the definition."""
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / WIDTH**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def built(kind, width=WIDTH):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * width,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
    )
    return kind(config, 1, AttnMaskType.causal, "self")


def drawn(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(LENGTHS), 1, heads, WIDTH, generator=draw, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.fixture(params=[CoreAttention, ThdAttention])
def attend(request, monkeypatch):
    monkeypatch.setattr(attention, "TEDotProductAttention", ThdKernel)
    module = built(request.param)
    packing = PackedSequences.of(np.array(LENGTHS), CPU)
    return lambda *tensors: module(*tensors, None, packed_seq_params=packing)


def test_outputs_and_gradients_are_those_of_each_sample_alone(attend):
    ours, theirs = ([each.requires_grad_() for each in drawn()] for _ in range(2))
    found = attend(*ours)
    parts = zip(*(each[:, 0].split(LENGTHS) for each in theirs), strict=True)
    expected = torch.cat([by_hand(*part) for part in parts])[:, None]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0.0)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    for output in (found, expected):
        (output * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=0.0)


def test_a_sample_gives_its_neighbours_nothing_and_no_gradient(attend):
    tensors = drawn()
    start = LENGTHS[0] + LENGTHS[1]
    own = slice(start, start + LENGTHS[2])
    others = [each.clone() for each in drawn(1)]
    for mine, other in zip(tensors, others, strict=True):
        other[own] = mine[own]
        mine.requires_grad_()
    output = attend(*tensors)
    assert torch.equal(output[own], attend(*others)[own])
    output[own].sum().backward()
    for each in tensors:
        reached = each.grad.abs().amax(dim=(1, 2, 3)) > 0
        assert not reached[: own.start].any()
        assert not reached[own.stop :].any()


def test_neighbours_of_one_length_are_one_run():
    packing = PackedSequences.of(np.array(LENGTHS), CPU)
    assert packing.runs == ((1, 9), (3, 5), (1, 2), (2, 1), (1, 4))
    assert packing.cu_seqlens_q.tolist() == [0, 9, 14, 19, 24, 26, 27, 28, 32]
    assert packing.cu_seqlens_kv is packing.cu_seqlens_q
    assert (packing.max_seqlen_q, packing.max_seqlen_kv) == (9, 9)


@pytest.mark.parametrize(
    ("device", "dtype", "packed", "there", "expected"),
    [
        ("cuda", torch.bfloat16, True, True, ThdAttention),
        ("cuda", torch.bfloat16, True, False, CoreAttention),
        ("cuda", torch.bfloat16, False, True, CoreAttention),
        ("cuda", torch.float32, True, True, CoreAttention),
        ("cpu", torch.bfloat16, True, True, CoreAttention),
    ],
)
def test_transformer_engine_takes_packed_bfloat16_rows_on_a_gpu(
    monkeypatch, device, dtype, packed, there, expected
):
    monkeypatch.setattr(attention, "HAVE_TE", there)
    assert core_attention(device, dtype, packed=packed) is expected


def test_rows_of_one_sample_are_not_transformer_engines(monkeypatch):
    monkeypatch.setattr(attention, "TEDotProductAttention", ThdKernel)
    tensors = drawn()
    rows = [each.view(4, -1, *each.shape[2:]) for each in tensors]
    assert torch.equal(built(ThdAttention)(*rows, None), built(CoreAttention)(*rows, None))

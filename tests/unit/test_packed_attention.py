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
    TransformerEngineAttention,
    causal_attention,
    core_attention,
    window_of,
)
from megatron_async_rl.policy.layers import GemmaNorm, NormedAdd
from megatron_async_rl.policy.packed_sequences import PackedSequences
from tests.cases import looped

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH = 4, 2, 8
LENGTHS = (9, 5, 5, 5, 2, 1, 1, 4)
"""Lengths with runs of equal ones, and one out of order."""


class ThdKernel(torch.nn.Module):
    """Transformer Engine's interface over plain tensor operations: [tokens, heads, head] in,
    [tokens, heads * head] out."""

    def __init__(self, config, layer_number, attn_mask_type, *args, **kwargs):
        super().__init__()
        self.window = window_of(config, layer_number)

    def forward(self, query, key, value, mask, mask_type, bias, packed):
        assert (packed.qkv_format, mask, mask_type, bias) == (
            "thd",
            None,
            AttnMaskType.causal,
            None,
        )
        assert packed.pad_between_seqs is False, "Transformer Engine would look on the host"
        assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
        ends = packed.cu_seqlens_q.tolist()
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(np.diff(ends))
        spans = [slice(*span) for span in pairwise(ends)]
        return torch.cat([by_hand(query[s], key[s], value[s], self.window) for s in spans])


def by_hand(query, key, value, window=None):
    """[length, heads, head] of one sample -> [length, heads * head], by the definition."""
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / WIDTH**0.5
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    unseen = (behind < 0) | (behind >= (window or len(query)))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def built(kind, width=WIDTH, window=None):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * width,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )
    return kind(config, 1, AttnMaskType.causal, "self")


def drawn(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(LENGTHS), 1, heads, WIDTH, generator=draw, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.fixture(params=[None, 1, 4])
def window(request):
    return request.param


@pytest.fixture(params=[CoreAttention, TransformerEngineAttention])
def attend(request, monkeypatch, window):
    monkeypatch.setattr(attention, "TEDotProductAttention", ThdKernel)
    module = built(request.param, window=window)
    packing = PackedSequences.of(np.array(LENGTHS), CPU)
    return lambda *tensors: module(*tensors, None, packed_seq_params=packing)


def test_outputs_and_gradients_are_those_of_each_sample_alone(attend, window):
    ours, theirs = ([each.requires_grad_() for each in drawn()] for _ in range(2))
    found = attend(*ours)
    parts = zip(*(each[:, 0].split(LENGTHS) for each in theirs), strict=True)
    expected = torch.cat([by_hand(*part, window) for part in parts])[:, None]
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
        ("cuda", torch.bfloat16, True, True, TransformerEngineAttention),
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


def test_a_window_under_context_parallelism_is_not_transformer_engines(monkeypatch):
    monkeypatch.setattr(attention, "HAVE_TE", True)
    for packed in (False, True):
        for windowed in (False, True):
            found = core_attention(
                "cuda", torch.bfloat16, packed=packed, context_parallel=True, windowed=windowed
            )
            assert found is (CoreAttention if windowed else TransformerEngineAttention)


def test_rows_of_one_sample_are_not_transformer_engines(monkeypatch):
    monkeypatch.setattr(attention, "TEDotProductAttention", ThdKernel)
    tensors = drawn()
    rows = [each.view(4, -1, *each.shape[2:]) for each in tensors]
    assert torch.equal(
        built(TransformerEngineAttention)(*rows, None), built(CoreAttention)(*rows, None)
    )


@looped("window", [None, 1, 3, 8, 9, 17, 18, 30, 31, 40])
@looped("length", [1, 7, 8, 9, 31, 50])
def test_a_token_sees_the_last_tokens_however_many_queries_attend_at_once(
    monkeypatch, window, length
):
    monkeypatch.setattr(attention, "WINDOWED_QUERIES", 8)
    attention._band.cache_clear()
    draw = torch.Generator().manual_seed(length)
    tensors = [
        torch.randn(1, length, heads, WIDTH, generator=draw, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    found = causal_attention(*tensors, scale=None, window=window)
    last = causal_attention(tensors[0][:, -3:], *tensors[1:], scale=None, window=window)
    attention._band.cache_clear()
    expected = by_hand(*(each[0] for each in tensors), window)
    torch.testing.assert_close(found[0].flatten(1), expected, atol=1e-12, rtol=0.0)
    torch.testing.assert_close(last[0].flatten(1), expected[-3:], atol=1e-12, rtol=0.0)


def test_layers_keep_one_mask_of_a_window_and_no_scores():
    length, window = 1500, 16
    query, key = (torch.randn(1, length, heads, WIDTH) for heads in (HEADS, GROUPS))
    query.requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(2):
            alive.append(causal_attention(query, key, key, scale=None, window=window))
    masks = [size for size in kept.values() if size > length * HEADS * WIDTH]
    assert masks == [attention.WINDOWED_QUERIES * (attention.WINDOWED_QUERIES + window)]


def test_a_gpu_gets_a_window_without_grouped_heads(monkeypatch):
    """Its kernels take a mask or grouped heads."""
    asked = []

    def kernel(query, key, value, attn_mask, enable_gqa, **rest):
        asked.append((query.shape == key.shape, enable_gqa))
        return torch.empty_like(query)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", kernel)
    tensors = [torch.empty(1, 9, heads, WIDTH, device="meta") for heads in (HEADS, GROUPS, GROUPS)]
    assert causal_attention(*tensors, scale=None, window=4).shape == tensors[0].shape
    assert asked == [(True, False)]


def test_layers_with_and_without_a_window_are_distinguished_by_number():
    config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=1)
    assert window_of(config, 1) is None
    config.window_size, config.window_attn_skip_freq = (4, 0), [1, 0, 1]
    assert [window_of(config, layer) for layer in (1, 2, 3)] == [5, None, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_norm_is_transformers_and_comes_before_the_residual_sum(monkeypatch, dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    config.params_dtype = dtype
    theirs, ours = Gemma3RMSNorm(WIDTH, 1e-6).to(dtype), GemmaNorm(config, WIDTH, 1e-6)
    add = NormedAdd(config, WIDTH, 1e-6)
    for norm in (theirs, ours, add):
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    hidden, residual = torch.randn(2, 5, WIDTH, dtype=dtype)
    expected = theirs(hidden)
    torch.testing.assert_close(ours(hidden), expected)
    with torch.no_grad(), torch.enable_grad():  # as Megatron calls it while scoring
        found = add(True, False)((hidden, None), residual, 0.0)
    torch.testing.assert_close(found, residual + expected)
    assert not found.requires_grad
    assert add(True, False)((hidden.requires_grad_(), None), residual, 0.0).requires_grad


def exactly(query, key, value, upstream, window):
    """Context and gradients in float64, by the definition."""
    inputs = [each.detach().double().requires_grad_() for each in (query, key, value)]
    context = causal_attention(*inputs, scale=None, window=window)
    return context, torch.autograd.grad(context, inputs, upstream.double())


@looped("window", [None, 5])
@looped("queries", [1, 7, 20])
def test_the_gradient_of_short_bfloat16_attention_is_float32s(queries, window, monkeypatch):
    generator = torch.Generator().manual_seed(queries)
    query, key, value = (
        torch.randn(3, length, heads, WIDTH, generator=generator).bfloat16().requires_grad_()
        for length, heads in ((queries, HEADS), (20, GROUPS), (20, GROUPS))
    )
    upstream = torch.randn(query.shape, generator=generator).bfloat16()
    expected, gradients = exactly(query, key, value, upstream, window)

    def errors():
        context = causal_attention(query, key, value, scale=None, window=window)
        found = torch.autograd.grad(context, (query, key, value), upstream)
        assert {each.dtype for each in (context, *found)} == {torch.bfloat16}
        return context, [
            float((one.double() - other).norm() / other.norm().clamp(min=1e-30))
            for one, other in zip(found, gradients, strict=True)
        ]

    short, own = errors()
    monkeypatch.setattr(attention, "SHORT_KEYS", 0)
    plain, torchs = errors()
    # The forward pass is torch's, bit for bit; the gradient's error is its rounding to bfloat16.
    assert torch.equal(short, plain)
    assert float((short.double() - expected).abs().max()) < 0.02
    assert max(own) < 2**-8
    assert sum(own) <= sum(torchs)
    monkeypatch.undo()


def test_attention_has_a_gradient_in_float32_only_where_it_is_short(monkeypatch):
    seen = []
    kernel = attention._kernel
    monkeypatch.setattr(
        attention, "_kernel", lambda query, *rest: seen.append(query.dtype) or kernel(query, *rest)
    )

    def dtypes(queries, keys, head, dtype=torch.bfloat16):
        seen.clear()
        query, key = (
            torch.randn(1, length, 1, head, dtype=dtype).requires_grad_()
            for length in (queries, keys)
        )
        causal_attention(query, key, key, scale=None).sum().backward()
        return seen

    assert dtypes(128, 128, 128) == [torch.bfloat16, torch.float32]
    assert dtypes(5, 128, 128) == [torch.bfloat16, torch.float32]
    for longer in ((129, 129, 128), (5, 129, 128), (5, 128, 136)):
        assert dtypes(*longer) == [torch.bfloat16]
    assert dtypes(8, 8, 8, torch.float32) == [torch.float32]
    with torch.no_grad():
        seen.clear()
        query = torch.randn(1, 8, 1, 8, dtype=torch.bfloat16)
        causal_attention(query, query, query, scale=None)
    assert seen == [torch.bfloat16]

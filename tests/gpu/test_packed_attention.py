"""Transformer Engine's kernel over a packed row, compared with this package's attention."""

import numpy as np
import pytest
import torch

from megatron_async_rl.policy.attention import (
    CoreAttention,
    TransformerEngineAttention,
)
from megatron_async_rl.policy.packed_sequences import PackedSequences, repeat_rows
from megatron_async_rl.policy.packing import Packed, Segments
from tests.gpu.context_program import assert_near
from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE
from tests.unit.test_packed_attention import LENGTHS, built

pytestmark = ON_DEVICE_WITH_TE

HEADS, GROUPS, WIDTH = 4, 2, 64
THEIRS = TransformerEngineAttention if DEVICE == "cuda" else CoreAttention
FAMILIES = {
    "groups of eight": [(300, [77, 80, 64, 200, 1, 77, 90, 3]), (55, [23] * 8), (1, [5, 9])],
    "one token": [(130, [1, 1, 1])],
    "equal responses, a whole sample": [(40, [0, 0, 7]), (17, [])],
}
"""Name -> (prefix, tokens of each response after it); without responses a sample of its own."""


def arranged(families):
    fed, shared, family = [], [], []
    for number, (prefix, rests) in enumerate(families):
        for rest in rests or [0]:
            fed.append(prefix + rest)
            shared.append(prefix if rests else 0)
            family.append(number)
    fed, shared, family = (np.array(each) for each in (fed, shared, family))
    packing = Packed(16).arrange(Segments(fed, np.ones_like(fed), family, shared, family)).packing
    packing.place({name: each.to(DEVICE) for name, each in packing.tensors().items()})
    return packing


def compare(packing, window):
    draw = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(int(packing.cu_seqlens_q[-1]), 1, heads, WIDTH, generator=draw)
        .bfloat16()
        .to(DEVICE)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    found = []
    for kind in (THEIRS, CoreAttention):
        tensors = [each.clone().requires_grad_() for each in drawn]
        output = built(kind, WIDTH, window)(*tensors, None, packed_seq_params=packing)
        output.float().square().sum().backward()
        found.append([output, *(each.grad for each in tensors)])
    for theirs, ours in zip(*found, strict=True):
        assert theirs.shape == ours.shape
        assert_near(theirs, ours)
    return found[0]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, (300,), (128,) * 5, (513, 7, 7, 1)])
def test_outputs_and_gradients_are_those_of_our_attention(lengths, window):
    packing = PackedSequences.of(np.array(lengths), torch.device(DEVICE))
    compare(packing, window)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("name", FAMILIES)
def test_responses_that_share_a_prefix_attend_as_in_our_attention(name, window):
    """Queries and keys of different lengths, aligned at the end; the same bits in each run, because
    the gradients of a prefix's repeated keys are not summed by atomic additions."""
    packing = arranged(FAMILIES[name])
    assert packing.max_seqlen_q <= packing.max_seqlen_kv
    first, again = compare(packing, window), compare(packing, window)
    assert torch.equal(first[0], again[0])


def test_rows_that_repeat_get_the_same_sum_of_gradients_in_each_run():
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(0, 50, (4000,), generator=draw).to(DEVICE)
    gradient = torch.randn(4000, 64, generator=draw).bfloat16().to(DEVICE)
    sums = []
    for _ in range(3):
        rows = torch.zeros(50, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        repeat_rows(rows, index).backward(gradient)
        sums.append(rows.grad)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    expected = torch.zeros(50, 64, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, index, gradient.double())
    torch.testing.assert_close(sums[0].double(), expected, atol=0.0, rtol=2**-8)

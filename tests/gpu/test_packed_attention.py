"""Transformer Engine's kernel over a packed row, against our own attention over the same row."""

import numpy as np
import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron_async_rl.policy.attention import (
    CoreAttention,
    PackedSequences,
    TransformerEngineAttention,
)
from tests.unit.test_packed_attention import LENGTHS, built

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and HAVE_TE),
        reason="needs a CUDA device and Transformer Engine",
    ),
]

HEADS, GROUPS, WIDTH = 4, 2, 64


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, (300,), (128,) * 5, (513, 7, 7, 1)])
def test_outputs_and_gradients_are_those_of_our_attention(lengths, window):
    packing = PackedSequences.of(np.array(lengths), torch.device("cuda"))
    draw = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(sum(lengths), 1, heads, WIDTH, generator=draw).bfloat16().cuda()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    found = []
    for kind in (TransformerEngineAttention, CoreAttention):
        tensors = [each.clone().requires_grad_() for each in drawn]
        output = built(kind, WIDTH, window)(*tensors, None, packed_seq_params=packing)
        output.float().square().sum().backward()
        found.append([output, *(each.grad for each in tensors)])
    for theirs, ours in zip(*found, strict=True):
        assert theirs.shape == ours.shape
        torch.testing.assert_close(theirs, ours, atol=0.03, rtol=0.03)

"""Transformer Engine's kernel over a packed row, compared with this package's attention."""

import numpy as np
import pytest
import torch

from megatron_async_rl.policy.attention import (
    CoreAttention,
    TransformerEngineAttention,
)
from megatron_async_rl.policy.packed_sequences import PackedSequences
from tests.gpu.context_program import assert_near
from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE
from tests.unit.test_packed_attention import LENGTHS, built

pytestmark = ON_DEVICE_WITH_TE

HEADS, GROUPS, WIDTH = 4, 2, 64
THEIRS = TransformerEngineAttention if DEVICE == "cuda" else CoreAttention


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, (300,), (128,) * 5, (513, 7, 7, 1)])
def test_outputs_and_gradients_are_those_of_our_attention(lengths, window):
    packing = PackedSequences.of(np.array(lengths), torch.device(DEVICE))
    draw = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(sum(lengths), 1, heads, WIDTH, generator=draw).bfloat16().to(DEVICE)
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

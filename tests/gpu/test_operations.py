"""Sums over long shards and log-probs of the vocabulary, on one CUDA device and on the CPU,
compared with float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_async_rl.gradients import CUDA_BLOCK, Gradients, GradientShard, products_of
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs
from tests.gpu.hardware import DEVICE, ON_DEVICE
from tests.gradients import cosine

DEVICES = ["cpu", pytest.param(DEVICE, marks=ON_DEVICE)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_cosine_of_long_shards_is_exact_to_a_millionth(device, figure):
    """The shards are longer than one block on CUDA, so that blocks are added up, too."""
    draw = torch.Generator().manual_seed(0)
    sizes = (CUDA_BLOCK + 12_345 if device == "cuda" else 300_001, 4097, 7)
    left = [torch.randn(size, generator=draw) for size in sizes]
    right = [0.3 * one + torch.randn(one.shape, generator=draw) for one in left]
    exact = cosine(torch.cat(left).double(), torch.cat(right).double())
    shards = tuple(GradientShard(one.to(device), True) for one in left)

    class Alone(Gradients):
        def all_reduce_sum(self, values):
            return values

    product, norm, other = products_of(
        Alone(shards, None, torch.device(device)),
        (shard.grad for shard in shards),
        (one.to(device) for one in right),
    )
    figure(
        "cosine of long shards, error",
        abs(product / math.sqrt(norm * other) - exact),
        at_most=1e-6,
        against="float64",
    )


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_of_bfloat16_hidden_states_and_their_gradient_are_float32s(device, figure):
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, 64, generator=draw).bfloat16()
    weight = torch.randn(1000, 64, generator=draw).bfloat16()
    targets = torch.randint(0, 1000, (96,), generator=draw)
    exact_hidden = hidden.double().requires_grad_()
    exact = torch.log_softmax(exact_hidden @ weight.double().t(), -1)
    exact = exact.gather(1, targets[:, None])[:, 0]
    exact.sum().backward()

    held = hidden.to(device).requires_grad_()
    logp, _, _ = vocab_parallel_logprobs(
        held, weight.to(device), targets.to(device), 1.0, 40, vocab_size=1000
    )
    logp.sum().backward()
    assert logp.dtype == torch.float32
    figure(
        "log-probs of bfloat16 hidden states, largest error",
        (logp.detach().double().cpu() - exact.detach()).abs().max(),
        at_most=1e-4,
        unit="nats",
        against="float64",
    )
    figure(
        "cosine of their gradient",
        cosine(held.grad.double().cpu().flatten(), exact_hidden.grad.flatten()),
        at_least=0.9999,
        against="float64",
    )

"""Measurements of the policy on canary samples: the effect of rounding on log-probs, the
distribution of first tokens, the gradient of every parameter, and other weights for a second
version.

The effect of rounding is measured, because it depends on the model: every layer's output is rounded
again, up or down by the unit roundoff of the precision, and the samples are scored again. The
difference of the log-probs is the effect of one rounding per layer. An engine computes the same
layers with other kernels, in another order, so its log-probs differ by a small multiple of this.

Invariants:
- ranks that hold the same hidden states round them alike, and ranks that hold the same parameter
  change it alike;
- everything but `scale_weights` and `fill_zeros` leaves the weights as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.forward import TokenOutputs
from megatron_async_rl.policy.fp8 import is_quantised
from megatron_async_rl.policy.gradient_coverage import GradientCoverage
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.policy.references import current_columns
from megatron_async_rl.samples.rank_batch import RankBatch

FLOAT8_ROUNDOFF = 2.0**-4
"""Unit roundoff of FP8 with three bits of mantissa (e4m3)."""
FILLING = 1e-2
"""Value of parameters that were zero, as adapters and value heads are at first: the gradient of
what precedes them would be zero, too."""


def unit_roundoff(dtype: torch.dtype, *, fp8: bool) -> float:
    """Return the largest relative error of one rounding. fp8: GEMMs of policy or engines round
    their operands to FP8."""
    return FLOAT8_ROUNDOFF if fp8 else float(torch.finfo(dtype).eps) / 2


@contextmanager
def rounded_once_more(model: PolicyModel, roundoff: float) -> Iterator[None]:
    """Round the output of every transformer layer up or down by `roundoff`, in forward passes
    within the block."""
    layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers]
    hooks = [layer.register_forward_hook(partial(_rounded, roundoff)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(roundoff: float, layer: Any, _: object, output: tuple[Tensor, Any]) -> Any:
    hidden, *rest = output
    # Seeded by the layer alone: tensor-parallel ranks hold the same hidden states and must agree.
    generator = torch.Generator(device=hidden.device).manual_seed(layer.layer_number)
    signs = torch.randint(
        0, 2, hidden.shape, generator=generator, device=hidden.device, dtype=torch.int8
    )
    # In float32, or the factor itself would be rounded to 1.
    moved = hidden.float() * (1.0 + roundoff * (2 * signs - 1).float())
    return (moved.to(hidden.dtype), *rest)


def score(policy: Policy, samples: RankBatch) -> dict[str, NDArray[np.float32]]:
    """Return `logp` and `sum_p_squared` of the response tokens of all samples, [N] each, on every
    rank. Collective over the world."""
    if policy.schedule.routing is not None:
        policy.schedule.routing.check(samples.routed_experts)
    minibatch = policy.batcher.of(samples)
    columns = current_columns(["logp", "sum_p_squared"], minibatch, policy.schedule)
    return {name: values.numpy() for name, values in columns.items()}


@torch.no_grad()
def first_token_logprobs(policy: Policy, samples: RankBatch) -> NDArray[np.float32]:
    """Return the log-probs of the whole vocabulary behind each prompt, [S, V], after temperature,
    on every rank. samples: with a response of one token each. Collective over the world."""
    layout, model = policy.layout, policy.model
    found = torch.zeros(len(samples), model.vocab_size, device=layout.device)
    for micro_batch, logits in policy.schedule.logits(policy.batcher.of(samples).micro_batches):
        if not micro_batch.samples or layout.tp_rank != 0:
            continue
        owned = micro_batch.batch_samples[micro_batch.sequence]
        # Under context parallelism, each rank computes only its own positions.
        places = owned if micro_batch.places is None else owned[micro_batch.places]
        found[places] = torch.log_softmax(logits.float(), dim=-1)
    # Each row was written by one rank and is 0 on the others.
    dist.all_reduce(found, group=layout.world_group)
    return found.cpu().numpy()


def without_gradient(policy: Policy, samples: RankBatch) -> tuple[list[str], int]:
    """Return the trainable parameters to which the mean -log p of the samples gives no gradient,
    and the number of trainable parameters. Collective over the world."""
    tokens = max(1, len(samples.rows))

    def consume(micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
        # An all-masked micro-batch has a token of padding, which must not count.
        real = float(bool(micro_batch.samples))
        loss = -outputs.logp.sum() * (real / tokens)
        if outputs.values is not None:
            loss = loss + outputs.values.sum() * (real / tokens)
        return loss

    policy.optimizer.zero_grad()
    policy.schedule.forward_backward(policy.batcher.of(samples).micro_batches, consume)
    coverage = GradientCoverage(policy.model, policy.layout)
    coverage.add()
    policy.optimizer.zero_grad()
    return coverage.missing()


@torch.no_grad()
def fill_zeros(model: PolicyModel) -> None:
    """Set the trainable parameters that are zero to FILLING."""
    for parameter in _parameters(model):
        if parameter.requires_grad and not is_quantised(parameter) and not parameter.any():
            parameter.fill_(FILLING)


@torch.no_grad()
def scale_weights(model: PolicyModel, factor: float) -> None:
    """Multiply every parameter, so that log-probs, keys and values change with every layout."""
    for parameter in _parameters(model):
        if not is_quantised(parameter):
            parameter.mul_(factor)


def _parameters(model: PolicyModel) -> Sequence[Tensor]:
    return [parameter for chunk in model.chunks for parameter in chunk.parameters()]

"""Faster output layer, norms and sampling of vLLM's models on a CPU.

A small model with a large vocabulary spends more time here than in its layers:

    hidden states -> float32 logits -> log-probs -> draw -> log-prob of the drawn token

Invariants:
- the draws of a request depend only on its seed and its logits, not on the other requests of its
  batch;
- a token of probability 0 (masked, or removed by top-k, top-p or min-p) is never drawn;
- logits of a bfloat16 model are float32 sums of exact products, as in the policy (`products.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.products import logits_into

NORMS = "mar_cpu"
"""Name under which vLLM's configuration selects the norms of `register_norms`."""
DRAWS = 32
"""Number of random numbers that one draw takes from a generator. A draw of one number takes as long
as a draw of thirty."""
BLOCK = 256
"""Number of neighbouring tokens whose probabilities `draw_tokens` adds in float32."""
BELOW_ONE = 1 - 2.0**-40
"""A share below 1 by more than the rounding errors of `draw_tokens`."""


def speed_up_sampling() -> None:
    """Replace parts of vLLM's CPU sampler and output layer by the faster ones below. Idempotent."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
    from vllm.v1.sample.sampler import Sampler

    one_by_one, apply_head = TopKTopPSampler.forward_cpu, LogitsProcessor._apply_head
    gather = Sampler.gather_logprobs
    if hasattr(one_by_one, "__wrapped__"):
        return
    draws = SeededDraws()

    @functools.wraps(one_by_one)
    def forward_cpu(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return one_by_one(self, logits, generators, k, p)
        # For greedy requests, which have no generator, vLLM discards what is drawn.
        uniform = torch.rand(len(logits), dtype=torch.float64)
        for place, number in draws.next(generators).items():
            uniform[place] = number
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        # The logits' memory is used again: vLLM reads them no more, except to count numbers that
        # are not finite (VLLM_COMPUTE_NANS_IN_LOGITS, off by default).
        return draw_tokens(torch.exp(logprobs, out=logits), uniform), logprobs

    @functools.wraps(gather)
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs or logprobs.is_cuda:
            return gather(logprobs, num_logprobs, token_ids)
        # A request without other tokens' log-probs is one of ours, which needs no ranks: vLLM reads
        # the whole vocabulary for them.
        own = token_ids[:, None]
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(own.to(torch.int32), logprobs.gather(-1, own), ranks)

    @functools.wraps(apply_head)
    def float32_logits(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Any) -> Any:
        weight = getattr(lm_head, "weight", None)
        if (
            self.head_dtype != torch.float32
            or hidden_states.is_cuda
            or weight is None
            or not hidden_states.dtype == weight.dtype == torch.bfloat16
        ):
            return apply_head(self, lm_head, hidden_states, embedding_bias)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = torch.empty(len(rows), len(weight), dtype=torch.float32)
        logits_into(logits, rows, weight)
        if embedding_bias is not None:
            logits += embedding_bias.float()
        return logits.reshape(*hidden_states.shape[:-1], -1)

    TopKTopPSampler.forward_cpu = forward_cpu
    Sampler.gather_logprobs = staticmethod(gather_logprobs)
    LogitsProcessor._apply_head = float32_logits


def draw_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return a token [B] int64 for each row of `probabilities` [B, V] float32: the first one whose
    cumulative probability exceeds `uniform` [B], float64 in [0, 1), as a share of the row's sum.

    The cumulative sum of a whole row takes several times as long as its sum. So each block of the
    row is added, in float32, and a block is drawn by the cumulative sum of blocks in float64; the
    rest of `uniform` draws a token of the block in the same way. The cumulative probabilities err
    by the rounding of a block's sum to float32.
    """
    rows, size = probabilities.shape
    whole = size // BLOCK
    sums = probabilities[:, : whole * BLOCK].view(rows, whole, BLOCK).sum(-1)
    if size % BLOCK:
        sums = torch.cat((sums, probabilities[:, whole * BLOCK :].sum(-1, keepdim=True)), dim=1)
    block, rest = _first_above(sums.double(), uniform[:, None])
    places = block * BLOCK + torch.arange(BLOCK)
    inside = probabilities.gather(1, places.clamp(max=size - 1)).double()
    # The last block may be shorter than the others.
    inside.masked_fill_(places >= size, 0.0)
    return (block * BLOCK + _first_above(inside, rest)[0])[:, 0]


def _first_above(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position [B, 1] at which the cumulative sum of `weights` [B, n] float64
    exceeds `share` [B, 1] of their sum, and where in that position's weight the share lies, from 0
    to 1. A position of weight 0 is never returned, unless all weights are 0 or one is not a
    number."""
    total = weights.cumsum(-1)
    # Below the whole sum, so that a position with weight exceeds it.
    target = share.clamp(0, BELOW_ONE) * total[:, -1:]
    position = (total <= target).sum(-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, position)
    return position, (target - total.gather(1, position) + weight) / weight


class SeededDraws:
    """Random numbers from 0 to 1 (excluded) from generators. They are drawn `DRAWS` at a time, and
    kept until they are used or their generator is freed."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Generator], list[float]]] = {}
        """`id` of a generator -> reference to it, and its unused numbers in reverse order."""

    def next(self, generators: Mapping[int, torch.Generator]) -> dict[int, float]:
        """Return the next number of each generator, under its key."""
        numbers = {}
        kept = self._kept
        for place, generator in generators.items():
            entry = kept.get(id(generator))
            if entry is None:
                entry = kept[id(generator)] = (self._weak_reference(generator), [])
            unused = entry[1]
            if not unused:
                drawn = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
                unused.extend(reversed(drawn.tolist()))
            numbers[place] = unused.pop()
        return numbers

    def _weak_reference(self, generator: torch.Generator) -> weakref.ref[torch.Generator]:
        # Removes the entry with the generator, because a later one may have the same `id`.
        key, kept = id(generator), self._kept
        return weakref.ref(generator, lambda _: kept.pop(key, None))


def register_norms() -> None:
    """Register vLLM's own CPU kernels of RMS norms, which vLLM compiles for a CPU but selects only
    on GPUs, as the implementation `NORMS`. Idempotent."""
    from vllm.ir import ops

    if NORMS in ops.rms_norm.impls:
        return

    def fits(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return variance_size is None and weight is not None and _fits(x, weight)

    def adds(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        # The kernel writes to both tensors.
        apart = x_residual is not x and x_residual.is_contiguous()
        alike = x_residual.shape == x.shape and x_residual.dtype == x.dtype
        return apart and alike and fits(x, weight, epsilon, variance_size)

    @ops.rms_norm.register_impl(NORMS, supports_args=fits)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ops.fused_add_rms_norm.register_impl(NORMS, supports_args=adds, inplace=True)
    def fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return True if the kernels compute this norm: they read contiguous rows in vectors of 8
    numbers, in one dtype."""
    size = x.shape[-1]
    return (
        x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape == (size,)
        and x.dtype == weight.dtype
        and size % 8 == 0
    )

"""Layouts that `mar init` tries, the simplest first, and the sizes in tokens of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_async_rl.config.policy import PolicyConfig
from megatron_async_rl.plan.layer_memory import FLOAT32
from megatron_async_rl.plan.machine import GIB
from megatron_async_rl.plan.model_files import ModelShape

SYNCHRONOUS = "synchronous"
TENSOR = (1, 2, 4, 8)
DEFAULT_BUDGET: int = PolicyConfig.model_fields["tokens_per_micro_batch"].default
CPU_BUDGETS = (DEFAULT_BUDGET, 8192, 4096, 2048)
"""Values of policy.tokens_per_micro_batch to try."""
STEP = 1024
"""Multiple of tokens to which other budgets are rounded up."""
CACHE_GIB = 1.0
"""rollout.kv_cache_gib, if it holds the longest sample."""
BLOCK = 128
"""Multiple of tokens of a context that fills the cache; blocks of the cache divide it."""


@dataclass(frozen=True)
class InitLayout:
    """Lines of the sections `policy` and `rollout`. `replicas`: number of data-parallel ranks.
    `colocated`: engines and policy share the GPUs. `tokens`: policy.tokens_per_micro_batch."""

    policy: str
    rollout: str
    replicas: int = 1
    colocated: bool = False
    tokens: int = DEFAULT_BUDGET


@dataclass(frozen=True, kw_only=True)
class InitSizes:
    """Sizes that a config states: `response`, rollout.sampling.max_tokens; `context`, null to leave
    it out; `budget`, policy.tokens_per_micro_batch; `cache_gib`, null on GPUs."""

    response: int
    context: int | None = None
    budget: int = DEFAULT_BUDGET
    cache_gib: float | None = None

    @classmethod
    def of(
        cls, shape: ModelShape, layout: InitLayout, response: int, longest: int, *, on_gpu: bool
    ) -> InitSizes:
        """Return the sizes for a layout. longest: tokens of the longest training or held-out
        sample, 0 if it is unknown."""
        # The trainer refuses longer samples, and a larger context needs a larger cache.
        context = min(shape.context, max(layout.tokens, longest))
        if on_gpu:
            return cls(response=response, context=context, budget=layout.tokens)
        token = shape.kv_values_per_token * FLOAT32
        held = int(CACHE_GIB * GIB) // token // BLOCK * BLOCK
        # At least room for a short prompt.
        context = min(context, max(held, longest, 2 * response))
        blocks = -(-context // BLOCK) * BLOCK
        cache_gib = max(CACHE_GIB, math.ceil(10 * blocks * token / GIB) / 10)
        return cls(response=response, context=context, budget=layout.tokens, cache_gib=cache_gib)

    @property
    def rollout(self) -> str:
        """Lines of the section `rollout`."""
        cache = f"  kv_cache_gib: {self.cache_gib}\n" if self.cache_gib is not None else ""
        return cache + (f"  max_context: {self.context}\n" if self.context is not None else "")

    @property
    def policy(self) -> str:
        """Lines of the section `policy`."""
        if self.budget == DEFAULT_BUDGET:
            return ""
        return f"  tokens_per_micro_batch: {self.budget}\n"


def init_layouts(gpus: int, style: str, longest: int = 0) -> Iterator[InitLayout]:
    """Yield the layouts to try, the simplest first. gpus: 0 for the CPU; longest: tokens of the
    longest training sample, 0 if it is unknown."""
    # Rows that were not read may be a little longer.
    least = -(-longest // STEP) * STEP
    if not gpus:
        # Activations share the memory of the host with everything else.
        budgets = list(dict.fromkeys(max(least, tokens) for tokens in CPU_BUDGETS))
        for tokens in budgets:
            yield InitLayout("  device: cpu\n", "", tokens=tokens)
        yield InitLayout("  device: cpu\n  recompute: full\n", "", tokens=budgets[-1])
        return
    tokens = max(least, DEFAULT_BUDGET)
    for layout in _on_gpus(gpus, style):
        yield replace(layout, tokens=tokens)


def _on_gpus(gpus: int, style: str) -> Iterator[InitLayout]:
    if style == SYNCHRONOUS:
        # Colocated first: engines of a synchronous run idle while the policy trains.
        yield from _colocated(gpus)
        yield from _disaggregated(gpus)
    else:
        yield from _disaggregated(gpus)
        yield from _colocated(gpus)


def _disaggregated(gpus: int) -> Iterator[InitLayout]:
    # Small tensor-parallel sizes first, because they communicate least.
    for tensor in TENSOR:
        for recompute in ("none", "full"):
            if 2 * tensor <= gpus:
                # Half of the GPUs for training, rounded down to whole replicas.
                ranks = gpus // 2 // tensor * tensor
                engines = (gpus - ranks) // tensor
                yield InitLayout(
                    f"  device: cuda\n  parallel: {_parallel(ranks, tensor)}\n"
                    f"  sequence: packed\n  recompute: {recompute}\n",
                    f"  engines: {engines}\n  tensor: {tensor}\n",
                    replicas=ranks // tensor,
                )


def _colocated(gpus: int) -> Iterator[InitLayout]:
    for tensor in TENSOR:
        if gpus % tensor == 0:
            yield InitLayout(
                f"  device: cuda\n  parallel: {_parallel(gpus, tensor)}\n"
                "  sequence: packed\n  recompute: full\n",
                f"  placement: colocated\n  engines: {gpus // tensor}\n  tensor: {tensor}\n"
                "  gpu_memory_utilization: 0.5\n",
                replicas=gpus // tensor,
                colocated=True,
            )


def _parallel(ranks: int, tensor: int) -> str:
    ranks_text = f"ranks: {ranks}, tensor: {tensor}"
    return f"{{{ranks_text}, sequence: true}}" if tensor > 1 else f"{{{ranks_text}}}"

"""Key-value cache without which an engine does not start: vLLM requires room for one sequence of
the context limit, however short the samples are."""

from __future__ import annotations

import math

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.machine import GIB
from megatron_async_rl.plan.memory import EngineMemory, engine_memory
from megatron_async_rl.plan.model_files import read_model

CONTEXT_STEP = 256
"""Multiple of tokens to which a proposed rollout.max_context is rounded up."""


def proposed_context(longest: int, limit: int) -> int:
    """Return a rollout.max_context for samples of up to `longest` tokens; at most `limit`, the
    model's context."""
    # Rows that were not read, and prompts of agents, may be longer.
    return min(limit, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)


def cache_problems(config: Config, engine: EngineMemory, longest: int) -> list[Problem]:
    """Return the problem of an engine on a CPU whose cache holds less than one sequence of the
    context limit; or none. longest: tokens of the longest training or held-out sample."""
    rollout = config.rollout
    if rollout is None or engine.cache is None or engine.context is None:
        return []
    has, needed = engine.cache // rollout.workers, engine.sequence_of_worker(rollout)
    if needed <= has:
        return []
    limit = min(rollout.max_context or engine.context, engine.context)
    # vLLM reserves whole blocks.
    block = rollout.cache_block
    room = has // engine.token_of_worker(rollout) // block * block
    size = f"rollout.kv_cache_gib: {_gib(needed * rollout.workers):g}"
    fix = f"set rollout.max_context: {room} (the longest sample has {longest} tokens), or {size}"
    if longest > room:
        context = proposed_context(longest, limit)
        blocks = -(-context // block) * block
        smaller = _gib(blocks * engine.token_of_worker(rollout) * rollout.workers)
        fix = f"set {size}"
        if context < limit:
            fix = f"set rollout.max_context: {context} and rollout.kv_cache_gib: {smaller:g}"
    return [
        Problem(
            key="rollout.kv_cache_gib",
            what=(
                f"{rollout.kv_cache_gib:g} GiB hold {room} tokens, and vLLM starts only if one"
                f" sequence of the context limit, {limit} tokens, fits"
            ),
            fix=fix,
        )
    ]


def holds_a_sequence(config: Config) -> bool:
    """Return False if engines on a CPU would not start for lack of cache."""
    shape, _ = read_model(config.model.path, weights=False)
    if shape is None or config.rollout is None:
        return True
    return not cache_problems(config, engine_memory(config, shape, on_gpu=False), longest=1)


def _gib(count: int) -> float:
    # Rounded up, so that the proposal is enough.
    return math.ceil(100 * count / GIB) / 100

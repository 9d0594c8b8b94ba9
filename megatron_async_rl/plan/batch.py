"""A batch: its samples and micro-batches, the tokens of a sample, and settings under which either
does not fit. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layout import number_of
from megatron_async_rl.plan.model_files import ModelShape


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """Tokens of what the data holds: the longest prompt, the mean prompt, and how many prompts were
    read."""

    longest: int
    mean: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one version. Micro-batch counts are per data-parallel rank, for going through
    it once, with responses of half and of full length. `prompt` and `response`: tokens of a sample
    at half length."""

    samples: int
    data_parallel: int
    longest: int
    prompt: int
    response: int
    micro_batches_half: int
    micro_batches_full: int

    @property
    def samples_per_rank(self) -> int:
        return self.samples // self.data_parallel


def context_limit(config: Config, shape: ModelShape) -> int:
    """Tokens of prompt + response: the model's own limit, or `rollout.max_context` below it."""
    if config.rollout is None or config.rollout.max_context is None:
        return shape.context
    return min(config.rollout.max_context, shape.context)


def longest_sample(config: Config, shape: ModelShape | None, lengths: PromptLengths | None) -> int:
    """Tokens of the longest prompt + response that can come up, as far as it is known."""
    # Data with a longer one are refused: a micro-batch holds whole samples.
    limit = config.policy.tokens_per_micro_batch
    if shape is not None:
        limit = min(limit, context_limit(config, shape))
    if config.rollout is None or lengths is None:
        return limit
    return min(limit, lengths.longest + config.rollout.sampling.max_tokens)


def batch_of(
    config: Config, data_parallel: int, longest: int, lengths: PromptLengths | None
) -> Batch:
    samples = config.flow.prompts_per_step * config.flow.group_size
    budget, parts = config.policy.tokens_per_micro_batch, config.objective.minibatches

    def micro_batches(length: int) -> int:
        share = samples / parts / data_parallel
        if config.policy.sequence == "packed":
            return parts * math.ceil(share * length / budget)
        return parts * math.ceil(share / max(1, budget // max(1, length)))

    half = response = longest // 2
    if config.rollout is not None:
        response = math.ceil(config.rollout.sampling.max_tokens / 2)
        if lengths is not None:
            half = math.ceil(lengths.mean + config.rollout.sampling.max_tokens / 2)
    return Batch(
        samples=samples,
        data_parallel=data_parallel,
        longest=longest,
        prompt=max(0, half - response),
        response=response,
        micro_batches_half=micro_batches(half),
        micro_batches_full=micro_batches(longest),
    )


def batch_problems(config: Config, lengths: PromptLengths | None) -> list[Problem]:
    found = []
    parallel, flow = config.policy.parallel, config.flow
    samples = flow.prompts_per_step * flow.group_size
    data_parallel = max(1, parallel.data)
    if samples % data_parallel:
        found.append(
            Problem(
                key="flow.prompts_per_step",
                what=(
                    f"{flow.prompts_per_step} x group_size {flow.group_size} ="
                    f" {number_of('sample', samples)} per step do not divide over"
                    f" {data_parallel} data-parallel ranks"
                ),
                fix=(
                    f"make prompts_per_step x group_size a multiple of {data_parallel}, or change"
                    " policy.parallel.ranks"
                ),
            )
        )
    smallest = flow.prompts_per_step // config.objective.minibatches * flow.group_size
    if 0 < smallest < data_parallel <= samples:
        most_minibatches = flow.prompts_per_step // math.ceil(data_parallel / flow.group_size)
        found.append(
            Problem(
                key="objective.minibatches",
                what=(
                    f"{config.objective.minibatches} minibatches of {flow.prompts_per_step} prompts"
                    f" leave {number_of('sample', smallest)} in one for {data_parallel}"
                    " data-parallel ranks"
                ),
                fix=(
                    f"set it to at most {most_minibatches}, raise flow.prompts_per_step, or"
                    " lower policy.parallel.ranks"
                ),
            )
        )
    if config.rollout is not None:
        maximum = (lengths.longest if lengths else 1) + config.rollout.sampling.max_tokens
        # The last token is not fed, and rows are rounded up.
        multiple = config.policy.row_multiple
        segments = config.rollout.max_segments
        needed = segments * max(maximum, -(-(maximum - 1) // multiple) * multiple)
        several = f", in {segments} rollout.environment.max_segments" if segments > 1 else ""
        if needed > config.policy.tokens_per_micro_batch:
            found.append(
                Problem(
                    key="policy.tokens_per_micro_batch",
                    what=(
                        f"{config.policy.tokens_per_micro_batch} tokens cannot hold one sample of"
                        f" up to {maximum} tokens (prompt + rollout.sampling.max_tokens){several}"
                    ),
                    fix=f"set it to at least {needed}",
                )
            )
    return found


def context_problems(config: Config, shape: ModelShape) -> list[Problem]:
    rollout = config.rollout
    if rollout is None:
        return []
    found = []
    if rollout.max_context is not None and rollout.max_context > shape.context:
        found.append(
            Problem(
                key="rollout.max_context",
                what=(
                    f"{rollout.max_context} tokens, but the model takes {shape.context}"
                    " (max_position_embeddings)"
                ),
                fix=f"set it to at most {shape.context}, or null for the model's own limit",
            )
        )
    limit = context_limit(config, shape)
    if rollout.sampling.max_tokens >= limit:
        found.append(
            Problem(
                key="rollout.sampling.max_tokens",
                what=(
                    f"{rollout.sampling.max_tokens} response tokens leave no room for a prompt in a"
                    f" context of {limit}"
                ),
                fix=f"set it below {limit} minus the longest prompt",
            )
        )
    return found

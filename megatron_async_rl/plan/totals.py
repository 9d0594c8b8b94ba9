"""Sums of a batch and of a whole run: samples, micro-batches, time, GPU-hours, tokens, epochs and
bytes on disk; also problems of a sample or a batch that does not fit.

Responses are assumed to have half of rollout.sampling.max_tokens, as in the estimate of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async_rl.config.problem import Problem, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layer_memory import value_bytes
from megatron_async_rl.plan.layout import Device, gpus_used
from megatron_async_rl.plan.machine import GIB, MIB, Machine, size
from megatron_async_rl.plan.memory import saved_bytes, trained_parameters
from megatron_async_rl.plan.model_files import ModelShape

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """Rows of one source of the training data, and its weight in the mixture."""

    label: str
    rows: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over `steps` steps. `gpus`: GPUs of all machines, 0 on CPUs; `used`: those with a rank
    or an engine. `sampled`: response tokens. `trained`: tokens of prompts and responses in the
    policy's training passes. `checkpoints`: largest number that exist at once, including the one
    being written."""

    steps: int
    gpus: int
    used: int
    prompts: int
    sampled: int
    trained: int
    sources: tuple[TrainingSource, ...]
    checkpoint: int
    checkpoints: int
    export: int
    samples: int

    def epochs(self, source: TrainingSource) -> float:
        """Return the passes over the rows of a source."""
        # Shares are relative weights, as the mixture draws them.
        weights = sum(one.weight for one in self.sources)
        return self.prompts * source.weight / weights / source.rows

    @property
    def disk(self) -> int:
        """Largest size of run.dir in bytes, without logs and metrics."""
        # The export is written while all checkpoints still exist.
        return self.checkpoints * self.checkpoint + self.export + self.samples

    def hours(self, step_s: float) -> float:
        return self.steps * step_s / HOUR_S

    def as_text(self, step_s: float | None) -> str:
        """Return lines for a screen. `step_s`: seconds of a step, null if unknown."""
        lines = [_time(self, step_s)]
        if idle := max(0, self.gpus - self.used):
            lines.append(
                f"idle           {_gpus(idle)} of {self.gpus}: ranks and engines take {self.used}"
                " (policy.parallel.ranks, rollout.engines)"
            )
        sampled = f"{_count(self.sampled)} sampled, " if self.sampled else ""
        lines.append(f"tokens         {sampled}{_count(self.trained)} trained on")
        if self.sources:
            each = [
                f"{self.epochs(one):.2g} of {one.label} ({one.rows:,} rows)" for one in self.sources
            ]
            lines.append(f"epochs         {', '.join(each)}; {self.prompts:,} prompts in all")
        else:
            lines.append(
                f"epochs         not known without the data; {self.prompts:,} prompts in all"
            )
        written = ", one of them being written" if self.checkpoints > 1 else ""
        lines.append(
            f"checkpoints    {_bytes(self.checkpoint)} each, up to {self.checkpoints} at once"
            f"{written}: {_bytes(self.checkpoint * self.checkpoints)}"
        )
        lines.append(
            f"run.dir        up to {_bytes(self.disk)}: checkpoints, the exported model"
            f" {_bytes(self.export)}, samples {_bytes(self.samples)}"
        )
        return "\n".join(lines)


def totals(
    config: Config,
    machine: Machine,
    device: Device,
    shape: ModelShape,
    batch: Batch,
    sources: Sequence[TrainingSource],
) -> Totals:
    steps, rollout = config.run.steps, config.rollout
    segments = rollout.max_segments if rollout is not None else 1
    samples = steps * batch.samples
    parameters = trained_parameters(config, shape)
    adapter = parameters if config.policy.lora is not None else 0
    return Totals(
        steps=steps,
        gpus=len(machine.gpus) * (machine.nodes + machine.engine_nodes) if device == "cuda" else 0,
        used=gpus_used(config, machine) if device == "cuda" else 0,
        prompts=steps * config.flow.prompts_per_step,
        # Half of max_tokens per response, because the true mean is known only afterwards.
        sampled=samples * segments * batch.response if rollout is not None else 0,
        trained=samples * segments * (batch.prompt + batch.response) * config.objective.epochs,
        sources=tuple(one for one in sources if one.rows),
        # Frozen weights are not saved; they come from model.path again.
        checkpoint=parameters * saved_bytes(config),
        checkpoints=checkpoints_at_once(config),
        export=(shape.parameters + adapter) * value_bytes(config),
        samples=config.samples.keep_mib * MIB,
    )


def checkpoints_at_once(config: Config) -> int:
    """Largest number of checkpoints on disk: an old one is removed only when a new one is whole."""
    every, steps = config.checkpoint.every, config.run.steps
    saved = math.ceil(steps / every) if every else 1
    # The new one is complete before the oldest is removed.
    return min(saved, config.checkpoint.keep + 1)


def _time(sums: Totals, step_s: float | None) -> str:
    if step_s is None:
        return f"time           not known; {sums.steps:,} steps"
    hours = sums.hours(step_s)
    gpus = f", {_number(hours * sums.gpus)} GPU-hours on {_gpus(sums.gpus)}" if sums.gpus else ""
    long = f"{_number(hours)} h" if hours >= 1 else f"{hours * 60:.3g} min"
    return (
        f"time           {long} for {sums.steps:,} steps{gpus}; without starts, evaluations and"
        " checkpoints"
    )


def _gpus(count: int) -> str:
    return number_of("GPU", count)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(tokens: int) -> str:
    """Format a number of tokens: `512`, `3.4 thousand`, `1.2 million`, `5.1 billion`."""
    for unit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if tokens >= unit:
            return f"{tokens / unit:.3g} {word}"
    return str(tokens)


def _bytes(count: int) -> str:
    if count >= 1024 * GIB:
        return f"{count / GIB / 1024:.2f} TiB"
    return size(count)


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """Token counts of the data: the longest prompt, the mean prompt, and the number of prompts
    read."""

    longest: int
    mean: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one version. Micro-batch counts are per data-parallel rank, for one pass, with
    responses of half and of full length. `prompt` and `response`: tokens of a sample at half
    length."""

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
    """Return the tokens of prompt + response: the model's limit, or `rollout.max_context` below
    it."""
    if config.rollout is None or config.rollout.max_context is None:
        return shape.context
    return min(config.rollout.max_context, shape.context)


def longest_sample(config: Config, shape: ModelShape | None, lengths: PromptLengths | None) -> int:
    """Return the tokens of the longest possible prompt + response, as far as known."""
    # A longer sample is refused, because a sample is never divided over micro-batches.
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
        # Samples of one optimizer step on one replica.
        share = samples / parts / data_parallel
        if config.policy.sequence == "packed":
            # Packed rows hold samples without padding.
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
    # Ranks must run the same number of samples, or a collective would hang.
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
    # A replica without samples would still have to join every collective.
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
        # Rounded up as rows are, for context and sequence parallelism and FP8.
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

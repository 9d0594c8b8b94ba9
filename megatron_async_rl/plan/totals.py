"""Sums over a batch and over a whole run: samples, micro-batches, time, GPU-hours, tokens, epochs
and bytes on disk; and problems of samples, batches and checkpoints that do not fit.

The mean length of a response is assumed to be half of rollout.sampling.max_tokens, as in the
estimate of a step.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_async_rl.config.problem import Problem, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layer_memory import value_bytes
from megatron_async_rl.plan.layout import Device, gpus_used
from megatron_async_rl.plan.machine import GIB, MIB, Machine, size
from megatron_async_rl.plan.memory import saved_bytes, trained_parameters
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.sharing import GroupTokens, longest_group
from megatron_async_rl.policy.checkpoint_folder import steps

HOUR_S = 3600.0
CHECKPOINTS, UNFINISHED, UNFINISHED_EXPORT = "checkpoint", "unfinished_*", "hf.unfinished"
"""Folder in run.dir, names of checkpoints in it that a save did not complete, and the same of the
exported model."""
MIN_CHECKPOINTS = 3
"""Number of checkpoints that exist during a save with the smallest checkpoint.keep."""


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """Rows of one source of the training data, and its weight in the mixture."""

    label: str
    rows: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the `steps` steps of a run."""

    steps: int
    gpus: int
    """Number of GPUs of all machines; 0 on CPUs."""
    used: int
    """Number of GPUs with a rank or an engine."""
    prompts: int
    sampled: int
    """Response tokens."""
    trained: int
    """Tokens of prompts and responses in training passes."""
    sources: tuple[TrainingSource, ...]
    checkpoint: int
    """Bytes of one checkpoint."""
    checkpoints: int
    """Largest number of checkpoints that exist at a time, including the one being written."""
    export: int
    """Bytes of the exported model."""
    samples: int
    """Largest size of the sample log in bytes."""

    def epochs(self, source: TrainingSource) -> float:
        """Return the number of passes over the rows of a source."""
        # The mixture draws from each source in proportion to its weight.
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
                f"idle           {_gpus(idle)} of {self.gpus}: ranks and engines use {self.used}"
                " (policy.parallel.ranks, rollout.engines)"
            )
        sampled = f"{_count(self.sampled)} sampled, " if self.sampled else ""
        lines.append(f"tokens         {sampled}{_count(self.trained)} trained")
        if self.sources:
            each = [
                f"{self.epochs(one):.2g} of {one.label} ({one.rows:,} rows)" for one in self.sources
            ]
            lines.append(f"epochs         {', '.join(each)}; {self.prompts:,} prompts in total")
        else:
            lines.append(
                f"epochs         unknown without the data; {self.prompts:,} prompts in total"
            )
        written = ", including the one being written" if self.checkpoints > 1 else ""
        lines.append(
            f"checkpoints    {_bytes(self.checkpoint)} each, up to {self.checkpoints} at a time"
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
    count, sequences = config.run.steps, config.run.steps * batch.sequences
    parameters = trained_parameters(config, shape)
    adapter = parameters if config.policy.lora is not None else 0
    return Totals(
        steps=count,
        gpus=len(machine.gpus) * (machine.nodes + machine.engine_nodes) if device == "cuda" else 0,
        used=gpus_used(config, machine) if device == "cuda" else 0,
        prompts=count * config.flow.prompts_per_step,
        # Half of max_tokens per response; the true mean is unknown before the run.
        sampled=sequences * batch.response if config.rollout is not None else 0,
        trained=sequences * (batch.prompt + batch.response) * config.objective.epochs,
        sources=tuple(one for one in sources if one.rows),
        # Frozen weights are not saved: a resumed run reads them from model.path.
        checkpoint=parameters * saved_bytes(config),
        checkpoints=checkpoints_at_once(config),
        export=(shape.parameters + adapter) * value_bytes(config),
        samples=config.samples.keep_mib * MIB,
    )


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """Bytes that a run will write to one folder."""

    folder: Path
    """The folder, or its nearest parent that exists. It may be a link to another disk."""
    what: str
    written: int
    """Largest size at a time, without what exists already."""
    kept: int
    """Part of `written` that stays after the run."""
    removed: int
    """Bytes that the run removes there before it writes."""


def disk_needs(config: Config, sums: Totals) -> list[DiskNeed]:
    """Return the needs of a run: checkpoints and the exported model. The samples' log, whose
    size is an upper limit, does not count, and neither do checkpoints that exist."""
    # A comparison of log-probs writes neither.
    if config.run.numerics is not None:
        return []
    folder = config.run.dir
    saved = folder / CHECKPOINTS
    # A new checkpoint is complete before the oldest is removed, so one more always needs space.
    missing = max(1, sums.checkpoints - len(steps(saved)))
    staying = min(sums.checkpoints, max(config.checkpoint.keep, MIN_CHECKPOINTS - 1))
    return [
        DiskNeed(
            folder=_existing(saved),
            what=number_of("more checkpoint", missing),
            written=missing * sums.checkpoint,
            kept=max(0, staying - len(steps(saved))) * sums.checkpoint,
            # A run removes what an interrupted one left before it writes the same.
            removed=_size(saved.glob(UNFINISHED)),
        ),
        DiskNeed(
            folder=_existing(folder),
            what="the exported model",
            # A new export is complete before an existing one is removed.
            written=sums.export,
            kept=sums.export,
            removed=_size(folder.glob(UNFINISHED_EXPORT)),
        ),
    ]


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def free_disk_problems(config: Config, sums: Totals | None) -> list[Problem]:
    """Return the problems of file systems that have too little free space for a run; or none."""
    if sums is None:
        return []
    fixes = ["free space there", "set run.dir to a folder on a larger disk"]
    if sums.checkpoints > MIN_CHECKPOINTS:
        fixes.insert(1, "set checkpoint.keep: 1")
    return [
        Problem(
            key="run.dir",
            what=f"{_bytes(needed)} are needed for {' and '.join(one.what for one in parts)},"
            f" and the disk of {parts[0].folder} has {_bytes(free)} free",
            fix=f"{', '.join(fixes[:-1])}, or {fixes[-1]}",
        )
        for parts, needed, free in _too_small(disk_needs(config, sums), jobs=0)
    ]


def study_disk_problems(needs: Sequence[DiskNeed], runs: int, jobs: int) -> list[Problem]:
    """Return the problems of file systems that have too little free space for what several runs
    keep, and for what `jobs` of them write at a time; or none."""
    return [
        Problem(
            key="runs",
            what=f"{_bytes(needed)} are needed for checkpoints and exported models of"
            f" {number_of('run', runs)}, and the disk of {parts[0].folder} has {_bytes(free)} free",
            fix="free space there, set `runs` to a folder on a larger disk, or select fewer runs"
            " with --only",
        )
        for parts, needed, free in _too_small(needs, jobs=jobs)
    ]


def _too_small(needs: Sequence[DiskNeed], *, jobs: int) -> list[tuple[list[DiskNeed], int, int]]:
    """Return the needs of each file system that has too little free space, their bytes, and its
    free bytes. `jobs`: number of runs that write at a time; 0 for a single run."""
    disks: dict[int, list[DiskNeed]] = {}
    for one in needs:
        disks.setdefault(one.folder.stat().st_dev, []).append(one)
    found = []
    for parts in disks.values():
        disk = shutil.disk_usage(parts[0].folder)
        # Of runs that write at different times only what they keep adds up.
        extra = sorted((one.written - one.kept for one in parts), reverse=True)
        needed = sum(one.kept for one in parts) + sum(extra[: jobs or None])
        free = disk.free + sum(one.removed for one in parts)
        # Some network file systems do not report their size.
        if disk.total and needed > free:
            found.append((parts, needed, free))
    return found


def _size(paths: Iterable[Path]) -> int:
    """Return the bytes of all files in these folders."""
    files = (file for path in paths for file in path.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def checkpoints_at_once(config: Config) -> int:
    """Return the largest number of checkpoints that exist at a time."""
    every = config.checkpoint.every
    saved = math.ceil(config.run.steps / every) if every else 1
    # The new one is complete before the oldest is removed. The checkpoint before it always stays,
    # because no step has confirmed the newest weights.
    return min(saved, max(config.checkpoint.keep + 1, MIN_CHECKPOINTS))


def _time(sums: Totals, step_s: float | None) -> str:
    if step_s is None:
        return f"time           unknown; {sums.steps:,} steps"
    hours = sums.hours(step_s)
    gpus = f", {_number(hours * sums.gpus)} GPU-hours on {_gpus(sums.gpus)}" if sums.gpus else ""
    long = f"{_number(hours)} h" if hours >= 1 else f"{hours * 60:.3g} min"
    return (
        f"time           {long} for {sums.steps:,} steps{gpus}, without starts, evaluations and"
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
    """Lengths of the training prompts in tokens, with given responses those of prompt, response and
    end-of-sequence: the longest and the mean; and the number of prompts that were read."""

    longest: int
    mean: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one training step. `segments`: largest number of sequences of a sample. `prompt`,
    `response`: tokens of a sequence with a response of half length. `micro_batches_*`: number per
    data-parallel rank and pass, with responses of half and of full length."""

    samples: int
    data_parallel: int
    longest: int
    prompt: int
    response: int
    micro_batches_half: int
    micro_batches_full: int
    segments: int = 1

    @property
    def sequences(self) -> int:
        """Largest number of sequences that a step samples and trains on."""
        return self.samples * self.segments

    @property
    def samples_per_rank(self) -> int:
        return self.samples // self.data_parallel


def context_limit(config: Config, shape: ModelShape) -> int:
    """Return the largest number of tokens of prompt + response: `rollout.max_context`, at most the
    model's limit."""
    if config.rollout is None or config.rollout.max_context is None:
        return shape.context
    return min(config.rollout.max_context, shape.context)


def longest_sample(config: Config, shape: ModelShape | None, lengths: PromptLengths | None) -> int:
    """Return the largest possible number of tokens of prompt + response."""
    # A longer sample is refused, because it cannot be divided over micro-batches.
    limit = config.policy.tokens_per_micro_batch
    if shape is not None:
        limit = min(limit, context_limit(config, shape))
    if lengths is None:
        return limit
    sampled = 0 if config.rollout is None else config.rollout.sampling.max_tokens
    return min(limit, lengths.longest + sampled)


def batch_of(
    config: Config, data_parallel: int, longest: int, lengths: PromptLengths | None
) -> Batch:
    samples = config.flow.prompts_per_step * config.flow.group_size
    budget, parts = config.policy.tokens_per_micro_batch, config.objective.minibatches
    segments = config.rollout.max_segments if config.rollout is not None else 1

    def micro_batches(length: int, group: GroupTokens) -> int:
        # Samples of one optimizer step on one replica.
        share = samples / parts / data_parallel
        if config.policy.sequence == "packed":
            # Packed rows hold samples without padding, and a shared prompt once.
            each = segments * (group.budgeted if group.shared else length)
            return parts * math.ceil(share * each / budget)
        # A sample is never divided, so all its sequences are rows of one micro-batch.
        return parts * math.ceil(share / max(1, budget // max(1, segments * length)))

    half = response = longest // 2
    if config.rollout is None and lengths is not None:
        # Given responses; the sums are for prompt and response together.
        half = response = min(longest, math.ceil(lengths.mean))
    if config.rollout is not None:
        response = math.ceil(config.rollout.sampling.max_tokens / 2)
        if lengths is not None:
            half = math.ceil(lengths.mean + config.rollout.sampling.max_tokens / 2)
    prompt = max(0, half - response)
    return Batch(
        samples=samples,
        data_parallel=data_parallel,
        longest=longest,
        prompt=prompt,
        response=response,
        micro_batches_half=micro_batches(half, GroupTokens.of(config, prompt, response)),
        micro_batches_full=micro_batches(longest, longest_group(config, longest, samples)),
        segments=segments,
    )


def batch_problems(config: Config, lengths: PromptLengths | None) -> list[Problem]:
    """Return problems of a batch that does not divide, or of samples that do not fit."""
    found = []
    parallel, flow = config.policy.parallel, config.flow
    samples = flow.prompts_per_step * flow.group_size
    data_parallel = max(1, parallel.data)
    # All ranks must train on the same number of samples, or a collective would hang.
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
    # Each replica needs at least one sample in every minibatch.
    if 0 < smallest < data_parallel <= samples:
        max_minibatches = flow.prompts_per_step // math.ceil(data_parallel / flow.group_size)
        found.append(
            Problem(
                key="objective.minibatches",
                what=(
                    f"with {config.objective.minibatches} minibatches of {flow.prompts_per_step}"
                    f" prompts, a minibatch has {number_of('sample', smallest)} for {data_parallel}"
                    " data-parallel ranks"
                ),
                fix=(
                    f"set it to at most {max_minibatches}, raise flow.prompts_per_step, or"
                    " lower policy.parallel.ranks"
                ),
            )
        )
    if config.rollout is not None:
        maximum = (lengths.longest if lengths else 1) + config.rollout.sampling.max_tokens
        multiple = config.policy.row_multiple
        segments = config.rollout.max_segments
        # The last token is a target only. Rows are padded to a multiple, for context and sequence
        # parallelism and FP8.
        needed = segments * max(maximum, -(-(maximum - 1) // multiple) * multiple)
        several = f", in {segments} rollout.environment.max_segments" if segments > 1 else ""
        if needed > config.policy.tokens_per_micro_batch:
            found.append(
                Problem(
                    key="policy.tokens_per_micro_batch",
                    what=(
                        f"{config.policy.tokens_per_micro_batch} tokens are too few for a sample of"
                        f" up to {maximum} tokens (prompt + rollout.sampling.max_tokens){several}"
                    ),
                    fix=f"set it to at least {needed}",
                )
            )
    return found


def context_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Return problems of limits on tokens that exceed the model's context."""
    rollout = config.rollout
    if rollout is None:
        return []
    found = []
    if rollout.max_context is not None and rollout.max_context > shape.context:
        found.append(
            Problem(
                key="rollout.max_context",
                what=(
                    f"{rollout.max_context} tokens, but the model supports {shape.context}"
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
                fix=f"set it below {limit} minus the length of the longest prompt",
            )
        )
    return found

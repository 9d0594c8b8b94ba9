"""Seconds of a step, from the measured seconds of its parts in a run (`Overlap`), or from the GPUs'
data sheets (`Estimate`).

Benefit of sampling and training at the same time:

    T_engines = T_gen + pause          all engines sample one batch; each stops once for weights
    T_trainer = T_train + publish      the optimizer step, and publishing its weights
    one after another                  T_gen + T_train + publish
    at the same time, at best          max(T_engines, T_trainer)

A run-ahead r below 1 is between these: while the policy trains, the engines may sample only that
share of the next batch, so the trainer waits for the rest: max(T_engines, T_trainer + (1 - r)
T_gen). Pure arithmetic; all times are in seconds.

An estimate counts operations as in operations.py. The speed of decoding is that of reading the
engine's weights and the key-value cache of its responses. Values that no data sheet contains are
constants below, and are shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_async_rl.config.flow import ExactLag
from megatron_async_rl.config.problem import number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.plan.layer_memory import engine_bytes
from megatron_async_rl.plan.layout import Device, engine_count, engines_elsewhere, rank_coordinates
from megatron_async_rl.plan.machine import CHIPS, Chip, Machine, chip_of
from megatron_async_rl.plan.memory import engine_memory, product_bytes
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.operations import (
    forward_passes,
    prompt_operations,
    token_operations,
    training_operations,
)
from megatron_async_rl.plan.sharing import GroupTokens
from megatron_async_rl.plan.totals import Batch

COMPUTE_SHARE = 0.4
"""Assumed MFU of training (with recomputation) and of prefill."""
READ_SHARE = 0.6
"""Assumed share of the HBM bandwidth that decoding reaches."""
COPY_RATE = 10e9
"""Bytes per second between one GPU and shared memory, which is not page-locked."""
RELAY_RATE = 2.5e9
"""Bytes per second over TCP from rank 0's machine to each other one, all at the same time."""
NETWORK_RATE = 35e9
"""Bytes per second of one GPU over its own network card, of 400 Gb/s."""
IPC_RATE = 60e9
"""Bytes per second of buckets that the GPUs of a machine gather over NVLink and that engines on
these GPUs load."""
STOP_STEPS = 10
"""Interval between two lines of metrics, in median steps, above which the run must have stopped in
between."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Times of a step's parts, and the step times that follow from them."""

    generate_s: float
    """T_gen with `engines` engines."""
    train_s: float
    publish_s: float
    pause_s: float
    engines: int
    run_ahead: float
    """r, 0 to 1."""

    @property
    def engines_s(self) -> float:
        return self.generate_s + self.pause_s

    @property
    def trainer_s(self) -> float:
        return self.train_s + self.publish_s

    @property
    def synchronous_s(self) -> float:
        return self.generate_s + self.train_s + self.publish_s

    @property
    def bound_s(self) -> float:
        """Lower bound of a step's time for all placements and values of async_ratio."""
        return max(self.engines_s, self.trainer_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step at this run-ahead."""
        # The trainer waits for the part that cannot be sampled ahead: with run_ahead 1 the longer
        # side decides.
        return max(self.engines_s, self.trainer_s + (1.0 - self.run_ahead) * self.generate_s)

    @property
    def balanced_engines(self) -> int | None:
        """Smallest number of engines that sample a batch while the trainer makes a step; null if
        their pause alone takes as long."""
        # Engines can sample only while they are not loading weights.
        free = self.trainer_s - self.pause_s
        return (
            max(1, math.ceil(round(self.generate_s * self.engines / free, 6))) if free > 0 else None
        )

    def as_text(self) -> str:
        speed_up = self.synchronous_s / self.bound_s
        lines = [
            (
                f"parts          generate {_s(self.generate_s)}, train {_s(self.train_s)}, publish"
                f" {_s(self.publish_s)}, pause of an engine {_s(self.pause_s)}"
            ),
            f"synchronous    {_s(self.synchronous_s)} a step: generate, train, publish",
            (
                f"disaggregated  {_s(self.bound_s)} a step at best, {speed_up:.2f} times as fast:"
                f" the longer of engines {_s(self.engines_s)} and trainer {_s(self.trainer_s)}"
            ),
            (
                f"colocated      {_s(self.synchronous_s)} a step: engines and policy alternate on"
                " the same devices"
            ),
            (
                f"this config    {_s(self.step_s)} a step, {self.synchronous_s / self.step_s:.2f}"
                f" times as fast as synchronous: while the policy trains, {self.run_ahead:.0%} of"
                " the next batch may be sampled"
            ),
        ]
        balanced = self.balanced_engines
        if balanced is not None:
            have = "as here" if balanced == self.engines else f"instead of {self.engines}"
            lines.append(
                f"balance        {number_of('engine', balanced)}, {have}, sample a batch"
                " while the policy trains on one"
            )
        return "\n".join(lines)


def run_ahead(config: Config) -> float:
    """Return the share of the next batch that the engines may sample while the policy trains on
    one."""
    colocated = config.rollout is not None and config.rollout.placement == "colocated"
    # With exact_lag each response comes from one version, so none runs while the weights change.
    idle = colocated or isinstance(config.flow.selection, ExactLag)
    return 0.0 if idle else min(1.0, config.flow.async_ratio)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated times of a step's parts, in seconds, and the step times that follow from them."""

    chip: Chip
    batch: Batch
    version: int
    """Bytes of one version of the weights."""
    generate_s: float
    """Sampling of one batch."""
    train_s: float
    """Training on one batch."""
    staged_s: float
    """Writing of a version into shared memory by the ranks."""
    relayed_s: float | None
    """Sending of a version to other machines, concurrent with all other parts; null if all engines
    are on rank 0's machine."""
    sending: str
    """Text on the assumed speed of sending."""
    ipc: bool
    """True if weights do not pass through host memory."""
    loaded_s: float
    """Loading of a version by an engine."""
    decoding: float
    """Number of responses that an engine decodes at a time."""
    tokens_per_s: float
    """Tokens per second that an engine samples."""
    run_ahead: float
    fp8: bool
    passes: float
    """Number of forward passes over the batch besides training, part of `train_s`."""

    @property
    def publish_s(self) -> float:
        """Time from the end of a step until engines have its version."""
        return self.staged_s + (self.relayed_s or 0.0) + self.loaded_s

    @property
    def synchronous_s(self) -> float:
        return self.generate_s + self.train_s + self.publish_s

    @property
    def overlapped_s(self) -> float:
        """Seconds of a step without waits: the longest of engines, trainer and weight carrier."""
        engines_s, trainer_s = self.generate_s + self.loaded_s, self.train_s + self.staged_s
        return max(engines_s, trainer_s, self.relayed_s or 0.0)

    @property
    def step_s(self) -> float:
        """Seconds per step with this config: engines may sample the share `run_ahead` of a batch
        ahead of the trainer."""
        # Only this part of sampling and publishing makes the trainer wait.
        waits_s = (1.0 - self.run_ahead) * (self.synchronous_s - self.train_s - self.staged_s)
        return max(self.overlapped_s, self.train_s + self.staged_s + waits_s)

    def as_text(self) -> str:
        chip, batch = self.chip, self.batch
        relayed = f", send {_s(self.relayed_s)}" if self.relayed_s is not None else ""
        rates = f"{chip.bfloat16 / 1e12:.0f} TFLOP/s in bfloat16"
        if self.fp8 and chip.fp8 is not None:
            rates += f", {chip.fp8 / 1e12:.0f} in FP8"
        to_others = f", {self.sending}" if self.sending else ""
        copied = f"{COPY_RATE / 1e9:g} GB/s between a GPU and shared memory"
        if self.ipc:
            copied = f"{IPC_RATE / 1e9:g} GB/s of buckets from the ranks to engines on their GPUs"
        scored = f", {self.passes:g} forward passes besides training" if self.passes else ""
        return (
            f"parts          generate {_s(self.generate_s)}, train {_s(self.train_s)}; publish"
            f" {_s(self.publish_s)} (stage {_s(self.staged_s)}{relayed}, load {_s(self.loaded_s)})"
            f" for {self.version / 1e9:.1f} GB\n"
            f"this config    {_s(self.step_s)} a step; synchronous {_s(self.synchronous_s)},"
            f" overlapped at best {_s(self.overlapped_s)}\n"
            f"an engine      {self.tokens_per_s:,.0f} tokens/s, {round(self.decoding, 1):g}"
            " responses at a"
            " time\n"
            f"assumed        {chip.name.upper()} by its data sheet: {COMPUTE_SHARE:.0%} of {rates},"
            f" {READ_SHARE:.0%} of {chip.memory_rate / 1e12:g} TB/s; {copied}{to_others}; prompts"
            " of"
            f" {batch.prompt} and responses of {batch.response} tokens, none much longer{scored};"
            " without padding and time for rewards"
        )


def estimate(
    config: Config, machine: Machine, device: Device, shape: ModelShape | None, batch: Batch | None
) -> Estimate | str:
    """Return the estimate of a step for a plan without problems, or the reason why there is none as
    text for the screen."""
    rollout = config.rollout
    if device == "cpu":
        return "unknown: CPUs have no data sheet rates; use the rates of a run (--from RUN)"
    if shape is None or batch is None or rollout is None:
        return "unknown: estimates exist for runs with engines only"
    chip = chip_of(machine)
    if chip is None:
        name = machine.gpus[0].name if machine.gpus else "no GPU"
        return f"unknown: {name} is not one of {', '.join(CHIPS)} (--gpus NUMBER --gpu NAME)"
    if config.engine_dtype == "float32":
        key = "model.dtype" if config.model.dtype == "float32" else "policy.lora.merge"
        return f"unknown: no rate is assumed for float32 GEMMs ({key}: float32)"

    version, elsewhere = shape.parameters * engine_bytes(config), engines_elsewhere(config, machine)
    ipc = config.weights.carrier.ipc
    # An on-demand version is read once for its digests, and again bucket by bucket.
    reads_s = version / (config.policy.parallel.ranks * READ_SHARE * chip.memory_rate)
    decoding, tokens_per_s = _decoding(config, machine, chip, shape, batch)
    # Responses divide evenly, because the router fills the engine with the fewest.
    responses = batch.sequences / rollout.engines
    # The responses of a group share the keys and values of their prompt.
    reading = prompt_operations(shape, batch.prompt) / config.flow.group_size
    reading_s = responses * reading / (rollout.workers * COMPUTE_SHARE * chip.bfloat16)
    return Estimate(
        chip=chip,
        batch=batch,
        version=version,
        generate_s=reading_s + responses * batch.response / tokens_per_s,
        train_s=_train_s(config, chip, shape, batch),
        staged_s=reads_s if ipc else version / (_writers(config, machine) * COPY_RATE),
        relayed_s=_sent_s(config, version) if elsewhere else None,
        sending=_sending(config) if elsewhere else "",
        ipc=ipc,
        loaded_s=version / (IPC_RATE if ipc else rollout.workers * COPY_RATE),
        decoding=decoding,
        tokens_per_s=tokens_per_s,
        run_ahead=run_ahead(config),
        fp8=config.policy.fp8 is not None,
        passes=forward_passes(config),
    )


def _sent_s(config: Config, version: int) -> float:
    """Return the seconds to send a version of `version` bytes: to one engine after another, or to
    all machines at once."""
    if config.weights.carrier.per_engine:
        return engine_count(config) * version / NETWORK_RATE
    return version / RELAY_RATE


def _sending(config: Config) -> str:
    """Return a text on the assumed speed of sending."""
    if config.weights.carrier.per_engine:
        return f"{NETWORK_RATE / 1e9:g} GB/s to one engine after the other"
    return f"{RELAY_RATE / 1e9:g} GB/s to each other machine"


def _train_s(config: Config, chip: Chip, shape: ModelShape, batch: Batch) -> float:
    """Return the seconds of one batch: training passes, forward passes before them, and the time
    that pipeline stages wait for the first and the last micro-batch of each optimizer step."""
    policy, parallel, objective = config.policy, config.policy.parallel, config.objective
    group = GroupTokens.of(config, batch.prompt, batch.response)
    operations = training_operations(config, shape, group, fp8_speed=chip.fp8_speed)
    total = batch.sequences * operations / (parallel.ranks * COMPUTE_SHARE * chip.bfloat16)

    of_a_step = batch.samples_per_rank * batch.segments * group.computed / objective.minibatches
    micro_batch = min(1.0, policy.tokens_per_micro_batch / of_a_step)
    # The pipeline's bubble: (p - 1) / v micro-batches per optimizer step.
    return total * (1 + (parallel.pipeline - 1) / parallel.virtual_pipeline * micro_batch)


def _decoding(
    config: Config, machine: Machine, chip: Chip, shape: ModelShape, batch: Batch
) -> tuple[float, float]:
    """Return the number of responses that an engine decodes at a time, as far as its cache holds
    them, and the tokens per second that it samples for them."""
    rollout = config.rollout
    assert rollout is not None
    own = engine_bytes(config)
    # On average a running response has half of its tokens.
    cached = (batch.prompt + batch.response / 2) * shape.kv_values_per_token * own
    room = rollout.gpu_memory_utilization * machine.gpus[0].memory * rollout.workers
    maximum = max(1.0, (room - engine_memory(config, shape, on_gpu=True).kept) / cached)
    count = min(rollout.max_concurrent, batch.samples / rollout.engines, maximum)
    head = shape.vocabulary * shape.hidden
    matrices = shape.layers * shape.layer_sharded
    if shape.experts:
        # Experts that no token visits are not read. Probability that no token of the batch visits a
        # given expert:
        missed = (1 - shape.experts_per_token / shape.experts) ** count
        matrices += int(shape.layers * shape.layer_experts * (1 - missed))
    read = matrices * product_bytes(config) + (shape.layers * shape.layer_replicated + head) * own
    # Each stage reads its weights again for every batch in flight, and there are as many as stages.
    reading_s = (read + count * cached / rollout.pipeline) / (READ_SHARE * chip.memory_rate)
    computing_s = count * token_operations(shape, 0) / (COMPUTE_SHARE * chip.bfloat16)
    return count, count * rollout.tensor / max(reading_s, computing_s / rollout.pipeline)


def _writers(config: Config, machine: Machine) -> int:
    """Return the number of ranks that stage a version: those of rank 0's node, if they hold the
    whole model."""
    parallel = config.policy.parallel
    here = parallel.ranks // machine.nodes
    stages = {rank_coordinates(config, rank)[-1] for rank in range(here)}
    # Only ranks of rank 0's node can write into its shared memory.
    whole = len(stages) == parallel.pipeline and here >= max(parallel.tensor, parallel.expert)
    return here if whole else 1


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """Rates of a run's last steps."""

    steps: int
    train_s: float
    """Median over the steps, like the other seconds."""
    publish_s: float
    pause_s: float
    """Longest pause of an engine."""
    tokens_per_step: float
    """Mean number of response tokens that the engines sampled."""
    tokens_per_busy_s: float
    """Tokens that one engine samples per busy second, mean over the run's engines."""

    def generate_s(self, engines: int) -> float:
        """Return the seconds that `engines` engines, always busy, need for one step's tokens."""
        return self.tokens_per_step / (engines * self.tokens_per_busy_s)


def measure(rows: Sequence[MetricRow]) -> MeasuredRates | None:
    """Return the measured rates; None if the run has no timeline of its engines for two steps."""
    step_s = _logged(rows, "time/step_s")
    if len(step_s) < 2:
        return None
    longest = STOP_STEPS * median(step_s)
    tokens = busy_s = 0.0
    intervals = 0
    for before, row in itertools.pairwise(rows):
        shares, finished = row.get("engine/busy_shares"), row.get("engine/tokens")
        # A longer interval contains a stop, and its shares do not describe the steps.
        interval = (number(row, "time") or 0.0) - (number(before, "time") or 0.0)
        if isinstance(shares, list) and isinstance(finished, list) and 0 < interval <= longest:
            tokens += sum(finished)
            busy_s += interval * sum(shares)
            intervals += 1
    train = _logged(rows, "time/train_s")
    if not intervals or tokens <= 0 or busy_s <= 0 or not train:
        return None
    return MeasuredRates(
        steps=len(rows),
        train_s=median(train),
        publish_s=median(_logged(rows, "time/publish_s") or [0.0]),
        pause_s=median(_logged(rows, "weights/pause_s") or [0.0]),
        tokens_per_step=tokens / intervals,
        tokens_per_busy_s=tokens / busy_s,
    )


def update_per_lr(rows: Sequence[MetricRow]) -> float | None:
    """Return the median ratio of an update's L2 norm to its learning rate, G of the planning rule;
    None if no control measured updates."""
    ratios = []
    for row in rows:
        norm, lr = (
            number(row, "update/norm"),
            (number(row, "policy/lr") or 0.0) * (number(row, "policy/lr_scale") or 1.0),
        )
        # `update/norm` is a mean over the steps of a batch, with 0 for skipped steps.
        made = 1.0 - (number(row, "policy/skipped") or 0.0)
        if norm and lr > 0 and made > 0:
            ratios.append(norm / made / lr)
    return median(ratios) if ratios else None


def _logged(rows: Sequence[MetricRow], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]

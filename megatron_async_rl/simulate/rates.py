"""Times of a simulated run's parts: `SimulationRates` and `ResponseLengths`. This file derives them
for a run that has not run, from the model's sizes, the config, and stated hardware; calibrate.py
derives them from a run's logs.

    decoding a token    each GPU of an engine reads its weights and the keys and values of its
                        responses, or computes, whichever takes longer
    a training step     operations as in plan/operations.py; then gradients are reduced and weights
                        gathered
    weights             staged by the ranks of the first machine, sent to the engines' machines in
                        buckets, loaded bucket by bucket

Invariant: every number of `Hardware` is an assumption, and `mar simulate` prints it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import CARRIERS
from megatron_async_rl.plan.estimate import (
    COMPUTE_SHARE,
    COPY_RATE,
    NETWORK_RATE,
    READ_SHARE,
    RELAY_RATE,
)
from megatron_async_rl.plan.layer_memory import engine_bytes, stage_adapters, value_bytes
from megatron_async_rl.plan.machine import CHIPS, GIB, MIB
from megatron_async_rl.plan.memory import engine_memory
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.operations import (
    prompt_operations,
    token_operations,
    training_operations,
)
from megatron_async_rl.plan.sharing import GroupTokens

GB = 1e9
GROUPS = 1000
"""Number of groups whose lengths are drawn in advance; a simulation draws from them."""


@dataclass(frozen=True, kw_only=True)
class SimulationRates:
    """Seconds that the parts of a run take."""

    decode: tuple[tuple[float, float], ...]
    """Pairs (fixed, each). A step of an engine that decodes n responses takes the longest of fixed
    + each x n; in it each response grows by a token."""
    places: int
    """Number of responses that an engine decodes at a time."""
    prompt_s: float = 0.0
    """Time in which an engine processes the prompt of a response and decodes nothing; mean over the
    responses of a group."""
    ask_s: float = 0.0
    """Time from the admission of a request until its engine has it."""
    take_s: float = 0.0
    """Time of the trainer between the last response for which a batch waited and the beginning of
    its step."""
    train_s: float = 0.0
    """Time of the trainer for a batch, whatever its size."""
    train_token_s: float = 0.0
    """Time of the trainer per token of a batch, including prompts."""
    train_spread: tuple[float, ...] = (1.0,)
    """Factors of the training time; each step uses one of them."""
    publish_s: float = 0.0
    """Time of the trainer to stage a version."""
    send_s: float = 0.0
    """Time of a version to the engines' machines; 0 if it is staged there."""
    load_s: float = 0.0
    """Time in which an engine loads a version and samples nothing."""
    trainer_beside: float = 1.0
    """Speed of the trainer while an engine works; below 1 if they share cores."""
    engine_beside: float = 1.0
    """Speed of an engine while the trainer works."""

    def token_s(self, responses: int) -> float:
        # Decoding is limited by memory at first and by arithmetic beyond some number of responses.
        return max(fixed + each * responses for fixed, each in self.decode)


@dataclass(frozen=True, kw_only=True)
class ResponseLengths:
    """Lengths from which the simulation draws, a whole group at a time, because responses to one
    prompt are similar.

    groups: response tokens of each group's samples; prompts: tokens of its prompt; equal: share of
    groups whose rewards are all equal."""

    groups: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    equal: float = 0.0

    def draw(self, size: int, chance: np.random.Generator) -> tuple[int, list[int]]:
        """Return the tokens of a prompt, and of `size` responses to it."""
        index = int(chance.integers(len(self.groups)))
        seen = self.groups[index]
        # The whole measured group, because its responses are correlated.
        if len(seen) == size:
            return self.prompts[index], list(seen)
        return self.prompts[index], chance.choice(seen, size, replace=len(seen) < size).tolist()

    @property
    def mean(self) -> float:
        """Return the mean number of tokens of a response."""
        return float(np.mean(np.concatenate(self.groups)))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A chip's data sheet, and assumed shares of it."""

    tflops: float
    """Peak of a GPU, dense, in bfloat16."""
    fp8_speed: float = 1.0
    """The same in FP8, relative to bfloat16's; for `policy.fp8`."""
    memory_gib: float
    memory_tb_s: float
    gpus_per_machine: int = 8
    train_share: float = COMPUTE_SHARE
    """Share of tflops in training."""
    prefill_share: float = 0.5
    """Share of tflops in reading prompts and decoding large batches."""
    read_share: float = READ_SHARE
    """Share of memory_tb_s in decoding."""
    decode_step_ms: float = 3.0
    """Time of a decoding step, whatever its size."""
    gpu_network_gb_s: float = NETWORK_RATE / GB
    """Rate of one GPU, for gradients and collectives."""
    machine_network_gb_s: float = 17.5
    """Rate of one machine, over TCP."""
    stream_gb_s: float = RELAY_RATE / GB
    """Rate of one machine's copy over TCP."""
    copy_gb_s: float = COPY_RATE / GB
    """Rate between one GPU and its machine's shared memory."""
    bucket_ms: float = 5.0
    """Latency of each bucket in transit, and of each that an engine loads."""
    take_s: float = 0.3
    """Time from the last response of a batch to the beginning of its step."""
    prompt_tokens: int = 200
    response_share: float = 0.3
    """Mean tokens of a response, before the limit, as a share of rollout.sampling.max_tokens."""
    response_sigma: float = 0.8
    """Standard deviation of the logarithm of a response's tokens."""
    alike: float = 0.5
    """Share of that variance between prompts."""
    carrier: str = ""
    """Carrier that goes through host memory, or `tree`, which this project does not have; empty:
    weights.transport."""

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in vars(self).items() if value != "")


NAMED = {
    name: Hardware(
        tflops=chip.bfloat16 / 1e12,
        fp8_speed=chip.fp8_speed,
        memory_gib=float(chip.sizes[0]),
        memory_tb_s=chip.memory_rate / 1e12,
    )
    for name, chip in CHIPS.items()
}
TREE = "tree"
"""A carrier that this project does not have: from GPU to GPU down a tree."""
ZERO = ("decode_step_ms", "bucket_ms", "take_s", "prompt_tokens", "response_sigma", "alike")
"""Numbers of `Hardware` that may be 0; the simulation divides by the others."""
HIGHEST = {
    **dict.fromkeys(("train_share", "prefill_share", "read_share", "alike"), 1.0),
    "response_sigma": 5.0,
}
"""Largest values of shares, and of the deviation of a logarithm, whose exponential must be
finite."""
SIMULATED = (*(name for name, one in CARRIERS.items() if not one.ipc), TREE)
"""Values of `carrier`."""


def assumed(name: str, changes: Iterable[str]) -> Hardware:
    """Return the assumed hardware. `changes`: KEY=VALUE. Raises UserError."""
    if name not in NAMED:
        raise UserError.of("--hardware", f"{name!r} is not known", f"one of {', '.join(NAMED)}")
    hardware = NAMED[name]
    kinds = {one.name: type(getattr(hardware, one.name)) for one in fields(Hardware)}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise UserError.of("--assume", f"{key!r} is not known", f"did you mean {near}?")
        try:
            value = kinds[key](text)
        except ValueError:
            # Not a number: the range check below refuses it.
            value = -1
        if key == "carrier":
            fits, fix = value in SIMULATED, f"one of {', '.join(SIMULATED)}"
        else:
            highest = HIGHEST.get(key, math.inf)
            fits = (value >= 0 if key in ZERO else value > 0) and value <= highest
            fits = fits and value < math.inf
            fix = "a number, 0 or more" if key in ZERO else "a number above 0"
            fix += f", at most {highest:g}" if highest < math.inf else ""
        if not fits:
            raise UserError.of("--assume", f"{text!r} does not fit {key}", fix)
        hardware = replace(hardware, **{key: value})
    return hardware


def lengths_of(config: Config, hardware: Hardware, seed: int = 0) -> ResponseLengths:
    """Return log-normal lengths, cut at the token limit."""
    assert config.rollout is not None
    limit, size, sigma = (
        config.rollout.sampling.max_tokens,
        config.flow.group_size,
        hardware.response_sigma,
    )
    chance = np.random.default_rng(seed)
    spread = math.sqrt(hardware.alike) * chance.standard_normal((GROUPS, 1))
    spread = spread + math.sqrt(1 - hardware.alike) * chance.standard_normal((GROUPS, size))
    # The mean of a log-normal is its median times exp(sigma^2 / 2).
    median = hardware.response_share * limit / math.exp(sigma**2 / 2)
    tokens = np.clip(np.round(median * np.exp(sigma * spread)), 1, limit).astype(int)
    prompts = (hardware.prompt_tokens,) * GROUPS
    return ResponseLengths(groups=tuple(map(tuple, tokens.tolist())), prompts=prompts)


def rates_of(
    config: Config, shape: ModelShape, hardware: Hardware, lengths: ResponseLengths
) -> SimulationRates:
    """Return the assumed rates. Raises UserError if an engine's weights leave no room for a
    response."""
    rollout = config.rollout
    assert rollout is not None
    tokens = np.concatenate(lengths.groups).astype(float)
    # Length of a response at a random moment; longer responses are more frequent then.
    context = hardware.prompt_tokens + float((tokens**2).mean() / (2 * tokens.mean()))
    weights = engine_memory(config, shape, on_gpu=True).kept
    cached = context * shape.kv_values_per_token * engine_bytes(config)
    room = rollout.workers * hardware.memory_gib * GIB * rollout.gpu_memory_utilization - weights
    places = min(rollout.max_concurrent, int(room / cached))
    if places < 1:
        what = f"the weights leave no room for a response on {rollout.workers} GPUs"
        raise UserError.of("rollout.tensor", what, "set it higher")
    # Tensor workers read their parts of a layer concurrently; stages read one after another.
    read = rollout.tensor * hardware.memory_tb_s * 1e12 * hardware.read_share
    compute = rollout.workers * hardware.tflops * 1e12 * hardware.prefill_share
    # As many batches are in flight as an engine has stages, and each stage reads its weights for
    # each of them.
    fixed_s = hardware.decode_step_ms / 1e3 * rollout.pipeline
    return SimulationRates(
        decode=(
            (fixed_s + weights / read, cached / read / rollout.pipeline),
            (fixed_s, token_operations(shape, context) / compute),
        ),
        places=places,
        # The responses of a group share the keys and values of their prompt.
        prompt_s=prompt_operations(shape, hardware.prompt_tokens)
        / config.flow.group_size
        / compute,
        take_s=hardware.take_s,
        **_training(config, shape, hardware, lengths),
        **_weights(config, weights, hardware),
    )


def _training(
    config: Config, shape: ModelShape, hardware: Hardware, lengths: ResponseLengths
) -> dict[str, Any]:
    parallel, objective, flow = config.policy.parallel, config.objective, config.flow
    group = GroupTokens.of(config, hardware.prompt_tokens, lengths.mean)
    # A simulation counts every token of a sample, although a shared prompt is computed once.
    operations = training_operations(config, shape, group, fp8_speed=hardware.fp8_speed)
    operations /= group.prompt + group.response
    samples = flow.prompts_per_step * flow.group_size
    share = samples * group.computed / parallel.data / objective.minibatches
    micro_batches = max(1.0, share / config.policy.tokens_per_micro_batch)
    # Stages are idle while the pipeline fills and empties.
    bubble = 1 + (parallel.pipeline - 1) / parallel.virtual_pipeline / micro_batches
    speed = parallel.ranks * hardware.tflops * 1e12 * hardware.train_share
    token_s = operations * bubble / speed
    if (lora := config.policy.lora) is None:
        own = shape.parameters / parallel.pipeline / max(parallel.tensor, parallel.expert)
    else:
        # Frozen weights have neither gradients nor optimizer state.
        own = stage_adapters(lora, shape, pipeline=parallel.pipeline, tensor=parallel.tensor)
    copies = parallel.data * parallel.context
    # Gradients in float32 are reduced over the copies, and weights gathered.
    moved = own * (4 + value_bytes(config)) * (copies - 1) / copies
    reduce_s = moved / (hardware.gpu_network_gb_s * 1e9)
    state_s = own * 20 / copies / (hardware.memory_tb_s * 1e12 * hardware.read_share)
    return {
        "train_token_s": token_s,
        "train_s": objective.steps_per_batch * (reduce_s + state_s),
    }


def _weights(config: Config, nbytes: float, hardware: Hardware) -> dict[str, Any]:
    rollout = config.rollout
    assert rollout is not None
    name = hardware.carrier or config.weights.transport
    bucket = min(config.weights.bucket_mib * MIB, nbytes)
    buckets, each_s = math.ceil(nbytes / bucket), hardware.bucket_ms / 1e3
    copy = hardware.copy_gb_s * 1e9
    machines = math.ceil(rollout.engines * rollout.workers / hardware.gpus_per_machine)
    writers = min(config.policy.parallel.ranks, hardware.gpus_per_machine)
    staged = {
        "publish_s": nbytes / (writers * copy),
        # A bucket is copied while the previous one is loaded.
        "load_s": nbytes / rollout.workers / copy + buckets * each_s + bucket / copy,
    }
    if name == TREE:
        # From GPU to GPU down a tree, bucket after bucket; then loaded in GPU memory.
        hop_s = bucket / (hardware.gpu_network_gb_s * 1e9) + each_s
        depth = math.ceil(math.log2(machines + 1))
        on_gpu = hardware.memory_tb_s * 1e12 * hardware.read_share
        return {
            "publish_s": each_s,
            "send_s": (buckets + depth) * hop_s,
            "load_s": 2 * nbytes / rollout.workers / on_gpu,
        }
    if CARRIERS[name].per_engine:
        # One engine after another, two buckets at a time.
        each = (nbytes + bucket) / (hardware.gpu_network_gb_s * 1e9) + buckets * each_s / 2
        return staged | {"send_s": rollout.engines * each}
    if CARRIERS[name].other_machines:
        # The first machine sends to each of the others, four buckets at a time.
        slowest = min(hardware.stream_gb_s, hardware.machine_network_gb_s / machines) * 1e9
        return staged | {"send_s": (nbytes + bucket) / slowest + buckets * each_s / 4}
    return staged


def best_bucket(config: Config, shape: ModelShape, hardware: Hardware) -> int:
    """Return in MiB the smallest bucket, because it uses memory, with which weights need at most 10
    % more than the shortest time."""
    weights = shape.parameters * engine_bytes(config)
    times = {}
    for mib in (2**power for power in range(4, 13)):
        sized = config.weights.model_copy(update={"bucket_mib": mib})
        parts = _weights(config.model_copy(update={"weights": sized}), weights, hardware)
        times[mib] = parts.get("send_s", 0.0) + parts["load_s"]
    return min(mib for mib, seconds in times.items() if seconds <= 1.1 * min(times.values()))

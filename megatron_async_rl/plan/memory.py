"""Bytes that each trainer rank and each engine needs, by arithmetic on the model's sizes.

Weights, gradients, optimizer state and KV cache are exact up to padding; activations are counted in
layer_memory.py. With policy.fp8 weights count twice, in both orientations.

Memory of CUDA processes besides tensors is estimated from the libraries' documentation and sources
and from reports of their users; this project has not measured it. According to vLLM's source, an
engine's context and communicators are outside the share of `rollout.gpu_memory_utilization`, and
its graphs are inside. Sleep releases only weights and cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.controls import AlignmentSettings
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layer_memory import (
    FLOAT32,
    activations,
    engine_bytes,
    fp8_copies,
    layer_activations,
    layers_in_flight,
    stage_adapters,
    value_bytes,
)
from megatron_async_rl.plan.machine import GIB
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.sharing import longest_group
from megatron_async_rl.policy.families import LayerFamily

REFERENCE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4.0 / 128}
"""Bytes per parameter, by `reference_dtype`; fp8 has a float32 scale for 128 numbers."""
LOGIT_COPIES = 3
"""Chunks of float32 logits whose memory the log-probs use; policy/logprobs.py respects it."""
TARGET_BYTES = 50
"""Bytes per token that a rank trains on in a step; losses need 36 to 49."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank of pipeline stage `stage`; ranks of the same stage need the same.

    Host memory that is not part of `total`: `held`, copies of the weights (reference, proximal
    policies), divided over the ranks that hold the same parameters; `offloaded`, Adam's moments and
    a control's gradient that are offloaded from a GPU; `staged`, the copy that an asynchronous
    checkpoint makes first.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    controls: int
    activations: int
    logprobs: int
    held: int
    staged: int
    offloaded: int = 0
    fp8: int = 0
    """Bytes that FP8 weights add to `parameters`; negative if they save memory."""

    # Sums are properties, so that no part can change without its total.
    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.fp8
            + self.gradients
            + self.optimizer
            + self.controls
            + self.activations
            + self.logprobs
        )

    @property
    def host(self) -> int:
        return self.held + self.offloaded + self.staged


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one engine. `weights`: all weights, as the trainer sends them. As the engine stores
    them: `layer`, one of its `layers` layers; `embedding`, with the last norm; `output`, an output
    layer that is not the embedding. `largest`: the largest tensor. `logits`: those of one token, as
    float32. `cache`: null on a GPU, where
    the cache uses the rest of `rollout.gpu_memory_utilization`. `context`: the model's limit in
    tokens; null if a sliding window limits the cache of a sequence."""

    weights: int
    layers: int
    layer: int
    embedding: int
    output: int
    largest: int
    logits: int
    cache: int | None
    cache_tokens: int | None
    bytes_per_token: int
    context: int | None

    @property
    def kept(self) -> int:
        return self.embedding + self.layers * self.layer + self.output

    def of_worker(self, rollout: RolloutConfig) -> int:
        """Return the weights of a worker of the largest stage: the first has the embedding, the
        last the output layer."""
        # If the layers do not divide, some stages have one more; the largest stage decides.
        layers = -(-self.layers // rollout.pipeline) * self.layer
        output = self.output if rollout.pipeline == 1 else 0
        return (self.embedding + layers + output) // rollout.tensor

    def token_of_worker(self, rollout: RolloutConfig) -> int:
        """Return the bytes of a token in the cache of a worker of the largest stage."""
        layers = -(-self.layers // rollout.pipeline)
        return self.bytes_per_token * layers // self.layers // rollout.tensor

    def sequence_of_worker(self, rollout: RolloutConfig) -> int:
        """Return the bytes of the cache that a worker of the largest stage needs for a sequence of
        the context limit; 0 if they are unknown."""
        # The model's window or another dtype may need less.
        if self.context is None or rollout.vllm.get("kv_cache_dtype", "auto") != "auto":
            return 0
        tokens = min(rollout.max_context or self.context, self.context)
        if self.cache is not None:
            tokens = -(-tokens // rollout.cache_block) * rollout.cache_block
        return tokens * self.token_of_worker(rollout)


def stage_experts(shape: ModelShape, *, pipeline: int, expert: int) -> int:
    """Return the number of expert parameters on one rank of a stage."""
    return shape.layers // pipeline * shape.layer_experts // expert


def stage_parameters(shape: ModelShape, *, stage: int, pipeline: int, tensor: int) -> int:
    """Return the number of parameters on one rank of a stage, without experts. With tied embeddings
    the last stage has a copy of the first stage's."""
    count = shape.layers // pipeline * (shape.layer_sharded // tensor + shape.layer_replicated)
    embedding = -(-shape.vocabulary // tensor) * shape.hidden
    first, last = stage == 0, stage == pipeline - 1
    # Tied embeddings on one stage share storage; on two stages each has a copy.
    if first:
        count += embedding
    if last:
        count += shape.hidden
        if not (first and shape.tied):
            count += embedding
    return count


def rank_memory(
    config: Config,
    shape: ModelShape,
    *,
    stage: int,
    data_parallel: int,
    longest: int,
    on_gpu: bool = False,
    layers: LayerFamily = "local",
) -> RankMemory:
    """Return the memory of a rank. `longest`: tokens of the longest prompt + response.

    Gradients, optimizer state and copies exist for trained parameters, with policy.lora for the
    adapters. AdamW has two moments and, with bfloat16, a float32 copy of the weights. The
    distributed optimizer shards these, not the gradient buffer, over the ranks that hold the same
    parameters (other ranks for experts). With a bfloat16 buffer, the gradient of the parameters
    that this rank's optimizer updates also exists in float32."""
    parallel = config.policy.parallel
    dense = stage_parameters(shape, stage=stage, pipeline=parallel.pipeline, tensor=parallel.tensor)
    experts = stage_experts(shape, pipeline=parallel.pipeline, expert=parallel.expert)
    frozen, lora = 0, config.policy.lora
    if lora is not None:
        # Frozen weights have neither gradients nor optimizer state.
        frozen, experts = dense + experts, 0
        dense = stage_adapters(lora, shape, pipeline=parallel.pipeline, tensor=parallel.tensor)
    if config.objective.value is not None and stage == parallel.pipeline - 1:
        dense += shape.hidden + 1
    trained = dense + experts
    # Context-parallel ranks hold the same parameters, so they shard optimizer state, too.
    copies = data_parallel * parallel.context
    replicas = (
        max(1, copies * parallel.tensor // parallel.expert) if parallel.expert > 1 else copies
    )
    share = -(-dense // copies) + -(-experts // replicas)
    # Number of parameters whose optimizer state this rank holds.
    own = share if parallel.distributed_optimizer else trained
    prompts = -(-config.flow.prompts_per_step // config.objective.minibatches)
    samples = -(-prompts * config.flow.group_size // data_parallel)
    segments = config.rollout.max_segments if config.rollout is not None else 1
    group = longest_group(config, longest, samples)
    computed = longest
    if group.shared and segments == 1 and not (config.rollout and config.rollout.environment):
        computed = math.ceil(group.computed)
    maximum = samples * segments * computed
    # A micro-batch is never larger than the rank's samples.
    tokens = -(-min(config.policy.tokens_per_micro_batch, maximum) // parallel.context)
    chunk = (
        min(tokens, config.policy.logprob_chunk_tokens)
        * shape.vocabulary
        // parallel.tensor
        * FLOAT32
        * LOGIT_COPIES
    )
    if config.policy.recompute == "full":
        # Logits are freed before the first layer is recomputed, which reuses their memory.
        recomputed = layer_activations(config, shape, tokens, longest, on_gpu=on_gpu, layers=layers)
        chunk = max(0, chunk - recomputed)
    head = 0
    narrow = config.policy.optimizer.gradient_dtype == "bfloat16"
    if (parallel.overlap_grad_reduce or narrow) and lora is None:
        # Gradient of the output layer's weight, and autograd's copy in the model's dtype.
        by_autograd = parallel.overlap_grad_reduce and config.model.dtype == "bfloat16"
        copied = value_bytes(config) if by_autograd else 0
        head = shape.vocabulary // parallel.tensor * shape.hidden * (FLOAT32 + copied)
    # Offloading only moves the moments; the float32 weights stay on the device.
    moments = own * moment_bytes(config)
    offloaded = moments if on_gpu and config.policy.optimizer.moment_offload == "cpu" else 0
    kept, away = reference_bytes(config, own, on_gpu=on_gpu)
    of_layers = partial(
        activations, config, shape, stage, longest=longest, on_gpu=on_gpu, layers=layers
    )
    # Number of micro-batches of an optimizer step; each has up to `tokens`.
    count = -(-maximum // config.policy.tokens_per_micro_batch)
    if parallel.virtual_pipeline > 1:
        # The interleaved schedule adds empty ones.
        count = -(-count // parallel.pipeline) * parallel.pipeline
    activated, accumulators = of_layers(tokens, micro_batches=count), 0
    if measures_baseline(config):
        # With the accumulators there is one sequence at a time. Whole micro-batches (terms added to
        # the loss, samples behind an anomaly) run without the accumulators.
        accumulators = 2 * trained * FLOAT32
        alone = of_layers(-(-segments * longest // parallel.context), micro_batches=1)
        activated = max(alone, activated - accumulators)
    step = config.rollout.sampling.max_tokens if config.rollout is not None else longest
    targets = TARGET_BYTES * samples * segments * step
    return RankMemory(
        stage=stage,
        parameters=(frozen + trained) * value_bytes(config),
        gradients=gradient_bytes(config, trained, own) + accumulators,
        optimizer=own * state_bytes(config) - offloaded,
        controls=kept + update_bytes(config, own, largest_parameter(shape, parallel.tensor)),
        activations=activated,
        # Only the last stage has logits.
        logprobs=chunk + head + targets if stage == parallel.pipeline - 1 else 0,
        held=share * held_bytes(config) + own * past_master_bytes(config),
        staged=share * staged_bytes(config),
        offloaded=offloaded + away,
        fp8=fp8_copies(
            config, shape, stage=stage, in_flight=layers_in_flight(config, shape, stage, count)
        ),
    )


def measures_baseline(config: Config) -> bool:
    """Return True if there are two float32 accumulators besides the gradient buffers
    (policy/opob.py)."""
    advantage = config.objective.advantage
    return isinstance(advantage, OpobAdvantage) and advantage.mode == "exact"


def gradient_bytes(config: Config, trained: int, own: int) -> int:
    """Return the bytes of Megatron's gradient buffers for `trained` parameters of a rank and, with
    bfloat16 buffers, of the float32 gradient of the `own` parameters that its optimizer updates."""
    narrow = config.policy.optimizer.gradient_dtype == "bfloat16"
    # Controls and Adam read a float32 copy of the rank's own shard.
    return trained * 2 + own * FLOAT32 if narrow else trained * FLOAT32


def staged_bytes(config: Config) -> int:
    """Return the bytes, per parameter that a rank writes, of the copy from which an asynchronous
    checkpoint is written."""
    return saved_bytes(config) if config.checkpoint.asynchronous else 0


def saved_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint per trained parameter: weights, optimizer state, past
    gradients in float32, and the copies of the weights that a resumed run needs."""
    objective, own = config.resolved_objective, copy_bytes(config)
    reference = objective.reference if objective.needs_reference else None
    copied = state_bytes(config) + (0 if keeps_8_bits(config) else own)
    copied += FLOAT32 * sum(isinstance(control, AlignmentSettings) for control in config.controls)
    if reference is not None and reference.ema is not None:
        copied += FLOAT32
    elif reference is not None and reference.refresh_every is not None:
        copied += own
    if _compares(config) and objective.proximal == "ewma":
        copied += FLOAT32
    # The newest snapshot equals the checkpoint's weights and is not saved twice.
    if _compares(config) and objective.proximal == "snapshot":
        copied += (objective.past_versions - 1) * own
    return copied + past_master_bytes(config, kept=objective.past_versions - 1)


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """Return the number of trained parameters of the whole model: all, or those of its adapters."""
    value_head = shape.hidden + 1 if config.objective.value is not None else 0
    if config.policy.lora is None:
        return shape.parameters + value_head
    return stage_adapters(config.policy.lora, shape, pipeline=1, tensor=1) + value_head


def keeps_8_bits(config: Config) -> bool:
    return config.policy.fp8 is not None and config.policy.fp8.primary_weights


def copy_bytes(config: Config) -> int:
    """Return the bytes per parameter of a copy of the weights; FP8 weights are copied as the
    float32 weights from which they are computed."""
    return FLOAT32 if keeps_8_bits(config) else value_bytes(config)


def state_bytes(config: Config) -> int:
    """Return the bytes of AdamW's state per parameter: two moments and, with bfloat16, a master."""
    return moment_bytes(config) + (FLOAT32 if config.model.dtype == "bfloat16" else 0)


def moment_bytes(config: Config) -> int:
    """Return the bytes per parameter of both moments."""
    return 2 * (2 if config.policy.optimizer.moment_dtype == "bfloat16" else FLOAT32)


def held_bytes(config: Config) -> int:
    """Return the bytes per parameter of copies of the weights in host memory. An average is
    float32; the others have the model's dtype, as has the copy of the trained weights while another
    policy's are in place."""
    objective, own = config.objective, copy_bytes(config)
    ema = objective.reference is not None and objective.reference.ema is not None
    # A bfloat16 average would stop changing, because its steps round to zero.
    held = (FLOAT32 if ema else own) if objective.needs_reference else 0
    if _compares(config) and objective.proximal == "ewma":
        held += FLOAT32
    proximal = _compares(config) and objective.proximal == "snapshot"
    # During a pass of another policy, host memory contains the trained weights, which it replaces.
    placed = own if held or proximal else 0
    if proximal:
        held += config.resolved_objective.past_versions * own
    return held + placed


def _compares(config: Config) -> bool:
    return config.objective.loss.uses_proximal or bool(config.objective.corrections)


def past_master_bytes(config: Config, kept: int | None = None) -> int:
    """Return the bytes, in host memory, of the `kept` past versions (null: all) of the optimizer's
    parameters that a control reads, per parameter whose optimizer state a rank has."""
    versions = config.resolved_objective.past_versions if kept is None else kept
    needed = any(control.needs_past_weights for control in config.controls)
    return versions * FLOAT32 if needed else 0


def reference_bytes(config: Config, own: int, *, on_gpu: bool) -> tuple[int, int]:
    """Return the bytes of the previous gradient of gac or matched_norm, for the `own` parameters
    whose optimizer state a rank has: on the device, and in host memory if it is offloaded from a
    GPU."""
    kept = {False: 0.0, True: 0.0}
    for control in config.controls:
        if isinstance(control, AlignmentSettings):
            away = on_gpu and control.reference_offload == "cpu"
            kept[away] += REFERENCE_BYTES[control.reference_dtype]
    return int(own * kept[False]), int(own * kept[True])


def update_bytes(config: Config, own: int, largest: int) -> int:
    """Return the further bytes that gradient controls need: for the last update and its
    denominator, or for the coming update and the displacement, in float32 and one parameter at a
    time. `largest`: elements of the largest parameter."""
    # Controls process one parameter at a time.
    return 2 * FLOAT32 * min(own, largest) if config.controls else 0


def largest_parameter(shape: ModelShape, tensor: int) -> int:
    """Return the elements of the largest weight on one rank: the embedding or the gated half of an
    MLP."""
    return max(-(-shape.vocabulary // tensor), 2 * shape.intermediate // tensor) * shape.hidden


def product_bytes(config: Config) -> int:
    """Return the bytes in which an engine keeps a number of its layers' matrices."""
    quantised = config.rollout is not None and config.rollout.quantised
    return 1 if quantised else engine_bytes(config)


def engine_memory(config: Config, shape: ModelShape, *, on_gpu: bool) -> EngineMemory:
    rollout = config.rollout
    if rollout is None:
        raise ValueError("a supervised run does not have engines")
    per_token = shape.kv_values_per_token * engine_bytes(config)
    # On a GPU vLLM uses the remaining memory for the cache, which is not known here.
    cache = None if on_gpu else int(rollout.kv_cache_gib * GIB)
    tokens = None if cache is None else cache // per_token
    largest = max(shape.vocabulary, shape.intermediate, shape.heads * shape.head_dim)
    products = shape.layer_sharded + shape.layer_experts
    table = shape.vocabulary * shape.hidden * engine_bytes(config)
    return EngineMemory(
        weights=shape.parameters * engine_bytes(config),
        layers=shape.layers,
        layer=products * product_bytes(config) + shape.layer_replicated * engine_bytes(config),
        embedding=table + shape.hidden * engine_bytes(config),
        output=0 if shape.tied else table,
        largest=largest * shape.hidden * engine_bytes(config),
        logits=shape.vocabulary * FLOAT32,
        cache=cache,
        cache_tokens=tokens,
        bytes_per_token=per_token,
        context=None if shape.windowed else shape.context,
    )


CONTEXT_BYTES = GIB // 2
"""A process's CUDA context with its loaded kernels."""
NCCL_OF_RANK_BYTES = GIB
"""Channels of the communicators of a rank: the world, and those of data, tensor, pipeline, context
and expert parallelism."""
NCCL_OF_WORKER_BYTES = GIB // 2
"""Channels of the communicators between the workers of an engine."""
WORKSPACE_BYTES = GIB // 4
"""Workspaces of cuBLAS (32 MiB for each handle and stream on Hopper), cuDNN and Transformer
Engine."""
GRAPH_BYTES = 5 * GIB // 4
"""CUDA graphs and lasting buffers of an engine."""

OverheadParts = tuple[tuple[str, int], ...]
"""(name, bytes) of each part."""


def rank_overhead(config: Config) -> OverheadParts:
    """Return parts of the GPU of a trainer rank. A world of one has no communicator."""
    several = config.policy.parallel.ranks > 1
    return (
        ("the rank's CUDA context", CONTEXT_BYTES),
        ("the rank's NCCL channels", NCCL_OF_RANK_BYTES * several),
        ("the rank's workspaces", WORKSPACE_BYTES),
    )


def engine_overhead(rollout: RolloutConfig) -> OverheadParts:
    """Return parts of each GPU of an engine, outside its share."""
    return (
        ("the engine's CUDA context", CONTEXT_BYTES),
        ("the engine's NCCL channels", NCCL_OF_WORKER_BYTES * (rollout.workers > 1)),
    )


def sleeping_overhead(rollout: RolloutConfig) -> OverheadParts:
    """Return parts of each GPU of an engine that sleeps, or has only woken its weights."""
    eager = bool(rollout.vllm.get("enforce_eager"))
    return (*engine_overhead(rollout), ("the engine's CUDA graphs", GRAPH_BYTES * (not eager)))

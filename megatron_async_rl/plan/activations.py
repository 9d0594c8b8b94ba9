"""Bytes of what a rank's layers keep of a micro-batch for its backward pass: within 5 % of what
autograd is seen to keep on a CPU, by reading of the kernels on a GPU. With policy.lora it is an
estimate: frozen products keep no input, and dropout keeps a copy of each adapter's.

Attention is torch's fused kernel, which keeps no scores; only float32 with grouped-query heads on a
GPU has no such kernel. With policy.fp8 inputs of products are counted in 8 bits (layers.py).
"""

from __future__ import annotations

from functools import partial

from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layers import fp8_inputs
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.policy.supported import LayerFamily

FLOAT32 = 4


def value_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else FLOAT32


def activations(
    config: Config,
    shape: ModelShape,
    stage: int,
    tokens: int,
    longest: int,
    *,
    on_gpu: bool,
    layers: LayerFamily,
) -> int:
    """Bytes of a rank's layers in flight, and of the last norm. With policy.recompute: full each
    layer keeps its input alone, and one at a time is computed again; `selective` keeps what attention
    keeps, but no scores, and one layer's at a time."""
    count = layers_in_flight(config, shape, stage)
    recompute, parallel = config.policy.recompute, config.policy.parallel
    kept = partial(_layer_activations, config, shape, tokens, longest, on_gpu=on_gpu, layers=layers)
    numbers = tokens * shape.hidden // (parallel.tensor if parallel.sequence else 1)
    beside = -fp8_inputs(config, shape, stage=stage, tokens=tokens, layers=count)
    if stage == parallel.pipeline - 1:
        beside += numbers * _norm_bytes(config, shape, on_gpu=on_gpu)
    if recompute == "none":
        return count * kept() + beside
    if recompute == "selective":
        without = kept(core=False)
        return count * without + (kept() - without) + beside
    return count * numbers * value_bytes(config) + kept() + beside


def layers_in_flight(config: Config, shape: ModelShape, stage: int) -> int:
    """Layers of a rank that hold a micro-batch's activations at one time, summed over
    micro-batches.

    1F1B: one micro-batch in each later stage and in this one. Interleaved: of the last virtual
    stage twice the distance to the last rank and one, and a full round of the pipeline in each
    earlier virtual stage.
    """
    pipeline, virtual = config.policy.parallel.pipeline, config.policy.parallel.virtual_pipeline
    later = pipeline - stage - 1
    chunks = later + 1 if virtual == 1 else 2 * later + (virtual - 1) * pipeline + 1
    return chunks * (shape.layers // (pipeline * virtual))


def stores_scores(config: Config, shape: ModelShape, *, on_gpu: bool) -> bool:
    """True where torch's attention falls back to the kernel that keeps [heads, length, length]."""
    return on_gpu and config.model.dtype == "float32" and shape.heads != shape.kv_heads


def _norm_bytes(config: Config, shape: ModelShape, *, on_gpu: bool) -> int:
    """Bytes that a norm keeps of each number. One kernel, on GPUs, keeps its input; torch's on a CPU
    that and the normalised one, both in float32."""
    if not on_gpu:
        return 2 * FLOAT32
    return FLOAT32 if shape.family.float32_norms else value_bytes(config)


def _layer_activations(
    config: Config,
    shape: ModelShape,
    tokens: int,
    longest: int,
    *,
    on_gpu: bool,
    layers: LayerFamily,
    core: bool = True,
) -> int:
    """Bytes one layer keeps of a micro-batch of `tokens` of this rank: the inputs of its norms,
    products, attention and gate. core: with what attention keeps between its projections."""
    parallel, own, fused = config.policy.parallel, value_bytes(config), layers != "local"
    norm = _norm_bytes(config, shape, on_gpu=on_gpu)
    whole = shape.hidden * (shape.family.layer_norms * norm + 2 * own)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    divided = 3 * (queries + keys) * own + shape.heads * FLOAT32
    if parallel.context > 1 and core:
        # Queries, half of them in reverse, and the attention of two pieces, alone and put together;
        # keys and values of all ranks (Transformer Engine keeps this rank's alone). On GPUs torch's
        # kernels want as many heads of these as of queries.
        divided += queries * own // 2 - 3 * keys * own
        divided += 2 * parallel.context * (queries if on_gpu else keys) * own
    if shape.family.head_norms:
        # In float32 the keys are a view of what the projection gave.
        keys_too = not on_gpu or own < norm
        divided += queries * norm + (keys * (norm if own < FLOAT32 else FLOAT32) if keys_too else 0)
    # A gate keeps its two inputs, the activation, the other factor once more, and its output; the
    # fused one inputs and output alone. Experts get copies of their tokens, and weigh what they
    # give.
    if shape.experts:
        gate = (3 if fused else 6) * shape.intermediate + shape.hidden
        divided += shape.experts_per_token * gate * own
    else:
        divided += (3 if fused else 5) * shape.intermediate * own
    if core and stores_scores(config, shape, on_gpu=on_gpu):
        divided += 2 * shape.heads * longest * own
    # Cosine and sine of each place, for queries and for keys, which padded rows share.
    places = 0 if fused else min(tokens, -(-longest // parallel.context))
    if config.policy.sequence == "packed":
        places = tokens
        # The samples' attention once more, put together to a row.
        divided += queries * own
    rotation = 4 * shape.head_dim * own * places
    per_token = (
        (whole + divided) // parallel.tensor
        if parallel.sequence
        else whole + divided // parallel.tensor
    )
    return tokens * per_token + rotation

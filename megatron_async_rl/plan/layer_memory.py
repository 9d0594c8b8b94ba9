"""Bytes of a micro-batch that a rank's layers keep for its backward pass, and bytes of FP8 weights
and adapters. For local layers on a CPU, activations are within 5 % of the bytes that autograd
keeps. On a GPU, with Transformer Engine's layers and with FP8, they follow the kernels' source and
are not measured.

Attention is torch's fused kernel, which keeps no scores; only float32 with grouped-query heads on a
GPU has no such kernel. With policy.fp8 inputs of GEMMs are counted in FP8.

FP8 memory follows the source of Transformer Engine 2.12 and Megatron-Core 0.19.2. A GEMM keeps its
input for the backward pass once, in FP8. The output projection of attention instead keeps the
bfloat16 tensor that attention keeps anyway, except under `delayed`, which keeps both.
"""

from __future__ import annotations

from functools import partial

from megatron_async_rl.config.policy import ROW_PARALLEL, Fp8Config, LoraConfig, Target
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.sharing import longest_group
from megatron_async_rl.policy.families import LayerFamily

FLOAT32 = 4


def value_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else FLOAT32


def engine_bytes(config: Config) -> int:
    """Return the bytes of a number in the engines, in weights that are not quantised and in the
    cache."""
    return 2 if config.engine_dtype == "bfloat16" else FLOAT32


def activations(
    config: Config,
    shape: ModelShape,
    stage: int,
    tokens: int,
    *,
    longest: int,
    on_gpu: bool,
    layers: LayerFamily,
    micro_batches: int,
) -> int:
    """Return the bytes of a rank's layers in flight, of the last norm, and of the hidden states
    from which log-probs and values are computed. `micro_batches`: number of micro-batches in an
    optimizer step.

    With policy.recompute: full each layer keeps only its input, and one layer at a time is
    recomputed. With `selective` each layer leaves out the tensors between the projections of
    attention, and one layer at a time recomputes them."""
    count = layers_in_flight(config, shape, stage, micro_batches)
    recompute, parallel = config.policy.recompute, config.policy.parallel
    kept = partial(layer_activations, config, shape, tokens, longest, on_gpu=on_gpu, layers=layers)
    numbers = tokens * shape.hidden // (parallel.tensor if parallel.sequence else 1)
    others = -fp8_inputs(config, shape, stage=stage, tokens=tokens, layers=count)
    if stage == parallel.pipeline - 1:
        others += numbers * _norm_bytes(config, shape, on_gpu=on_gpu)
        # Whole on every tensor-parallel rank; the value head computes with a float32 copy.
        valued = config.objective.value is not None and config.model.dtype != "float32"
        others += tokens * shape.hidden * (value_bytes(config) + (FLOAT32 if valued else 0))
    others += context_masks(config, tokens, longest, on_gpu=on_gpu, layers=layers, count=count)
    if recompute == "none":
        return count * kept() + others
    if recompute == "selective":
        without = kept(core=False)
        return count * without + (kept() - without) + others
    # Each layer keeps its input; one layer at a time is recomputed.
    return count * numbers * value_bytes(config) + kept() + others


def context_masks(
    config: Config, tokens: int, longest: int, *, on_gpu: bool, layers: LayerFamily, count: int
) -> int:
    """Return the bytes of the masks of torch's attention under context parallelism on a GPU
    (Transformer Engine's kernel needs none): one for each of the two parts of a row that a rank
    has, [part, tokens up to its end]. Padded rows and all layers share them; with several samples
    in a row, each has its own in each of `count` layers."""
    context = config.policy.parallel.context
    if not on_gpu or context == 1 or layers == "transformer_engine":
        return 0
    part = -(-longest // (2 * context))
    both = part * part * (2 * context + 1) * value_bytes(config)
    samples = -(-tokens * context // longest) if config.policy.sequence == "packed" else 1
    return both if samples == 1 else both * samples * count


def layers_in_flight(config: Config, shape: ModelShape, stage: int, micro_batches: int) -> int:
    """Return the number of layers of a rank that hold a micro-batch's activations at one time,
    summed over micro-batches. `micro_batches`: their number in an optimizer step.

    1F1B: one micro-batch in this stage and in each later one. Interleaved: in the last virtual
    stage twice the distance to the last rank plus one, and in each earlier virtual stage a full
    round of the pipeline.
    """
    pipeline, virtual = config.policy.parallel.pipeline, config.policy.parallel.virtual_pipeline
    # Micro-batches that later stages hold when this one begins its backward pass.
    later = pipeline - stage - 1
    chunks = later + 1 if virtual == 1 else 2 * later + (virtual - 1) * pipeline + 1
    # A step may have fewer micro-batches than the schedule could hold.
    return min(chunks, micro_batches * virtual) * (shape.layers // (pipeline * virtual))


def stores_scores(config: Config, shape: ModelShape, *, on_gpu: bool) -> bool:
    """Return True if torch's attention falls back to the kernel that keeps [heads, length,
    length]."""
    return on_gpu and config.model.dtype == "float32" and shape.heads != shape.kv_heads


def _norm_bytes(config: Config, shape: ModelShape, *, on_gpu: bool) -> int:
    """Return the bytes that a norm keeps of each number. The fused kernel, on GPUs, keeps its
    input; torch's on a CPU keeps the input and, for a trained weight, the normalised input, in
    float32."""
    if not on_gpu:
        return FLOAT32 if config.policy.lora is not None else 2 * FLOAT32
    return FLOAT32 if shape.family.float32_norms else value_bytes(config)


def layer_activations(
    config: Config,
    shape: ModelShape,
    tokens: int,
    longest: int,
    *,
    on_gpu: bool,
    layers: LayerFamily,
    core: bool = True,
) -> int:
    """Return the bytes that one layer keeps of a micro-batch of `tokens` of this rank: the inputs
    of its norms, GEMMs, attention and gate. core: include the tensors that attention keeps between
    its projections."""
    parallel, own, fused = config.policy.parallel, value_bytes(config), layers != "local"
    lora = config.policy.lora
    norm = _norm_bytes(config, shape, on_gpu=on_gpu)
    inputs = partial(_input_bytes, lora, own, on_gpu=on_gpu)
    # A mixture's router always keeps its input.
    gated = own if shape.experts else inputs("gate_proj", "up_proj")
    whole = shape.hidden * (
        shape.family.layer_norms * norm + inputs("q_proj", "k_proj", "v_proj") + gated
    )
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    divided = 3 * (queries + keys) * own + shape.heads * FLOAT32
    if parallel.context > 1 and core:
        # Queries, half of them in reverse, and the attention of two pieces, separate and combined;
        # keys and values of all ranks (Transformer Engine keeps only this rank's). On GPUs, torch's
        # kernels need keys and values of every query head.
        divided += queries * own // 2 - 3 * keys * own
        divided += 2 * parallel.context * (queries if on_gpu else keys) * own
    if shape.family.head_norms:
        # In float32 the keys are a view of the projection's output.
        keys_too = not on_gpu or own < norm
        divided += queries * norm + (keys * (norm if own < FLOAT32 else FLOAT32) if keys_too else 0)
    # A gate keeps its two inputs, the activation, a copy of the other factor, and its output; the
    # fused one only inputs and output. Experts get copies of their tokens, and weight their
    # outputs.
    if shape.experts:
        gate = (2 if fused else 5) * shape.intermediate
        gate += shape.intermediate + shape.hidden if lora is None else 0
        divided += shape.experts_per_token * gate * own
    else:
        divided += shape.intermediate * ((2 if fused else 4) * own + inputs("down_proj"))
    if core and stores_scores(config, shape, on_gpu=on_gpu):
        divided += 2 * shape.heads * longest * own
    # Cosine and sine of each position, for queries and for keys, which padded rows share.
    places = 0 if fused else min(tokens, -(-longest // parallel.context))
    # Transformer Engine reads a packed row directly, and its positions are one tensor for all
    # layers.
    packed = config.policy.sequence == "packed" and not fused
    if packed:
        places = tokens
    group = longest_group(config, longest, config.flow.group_size)
    if core and group.shared:
        # Keys and values of each response, after those of the prompt; torch's kernels also get
        # copies of the queries.
        copied = 2 * group.repeated_keys * keys
        divided += int((copied + (0 if fused else group.copied_queries * queries)) * own)
    if packed or (lora is not None and lora.dropout):
        # The samples' attention again, combined to a row.
        divided += queries * inputs("o_proj")
    rotation = 4 * shape.head_dim * own * places
    narrow = 0
    if lora is not None:
        # Inputs of adapters' second matrices, in addition to column-parallel products of all
        # tokens.
        columns = sum(target not in ROW_PARALLEL for target in lora.targets)
        narrow = lora.rank * own * columns
        whole += lora.rank * own * (len(lora.targets) - columns)
    per_token = (
        (whole + divided) // parallel.tensor
        if parallel.sequence
        else whole + divided // parallel.tensor
    )
    return tokens * (per_token + narrow) + rotation


def _input_bytes(lora: LoraConfig | None, own: int, *matrices: Target, on_gpu: bool) -> int:
    """Return the bytes kept of each input number of these matrices together. A frozen matrix keeps
    none. Its adapters keep one input for all or, with dropout, each the remaining input and its
    mask."""
    if lora is None:
        return own
    count = len(set(matrices) & set(lora.targets))
    return count * (own + (1 if on_gpu else own)) if lora.dropout else own * min(1, count)


ORIENTATIONS = 2
"""Copies of an FP8 weight, one in its own orientation and one transposed: Hopper multiplies in only
one orientation, and blocks have different scales in each."""
BFLOAT16 = 2
"""Bytes per number."""
SCALE_BYTES = {"tensorwise": 0.0, "delayed": 0.0, "blockwise": 4 / 128**2, "mxfp8": 1 / 32}
"""Bytes of scales per weight, by recipe: a float32 per 128 x 128 block, a byte per 32 weights,
or a negligible one per tensor."""
INPUT_SCALE_BYTES = {**SCALE_BYTES, "blockwise": 4 / 128}
"""The same for each input, whose blocks are 1 x 128."""


def product_sizes(shape: ModelShape, *, tensor: int) -> dict[str, int]:
    """Return the sides of a layer's weights on one rank by name. Experts stay whole."""
    columns = shape.intermediate if shape.experts else shape.intermediate // tensor
    queries = shape.heads * shape.head_dim // tensor
    keys = shape.kv_heads * shape.head_dim // tensor
    return {
        "hidden size": shape.hidden,
        "queries, keys and values of a rank": queries + 2 * keys,
        "attention outputs of a rank": queries,
        "columns of an expert" if shape.experts else "MLP columns of a rank": columns,
    }


def layer_weights(shape: ModelShape, *, tensor: int, expert: int) -> int:
    """Return the number of weights of one layer's GEMMs on one rank, without biases."""
    _, qkv, outputs, columns = product_sizes(shape, tensor=tensor).values()
    held = shape.experts // expert if shape.experts else 1
    return shape.hidden * (qkv + outputs + held * 3 * columns)


def fp8_layers(fp8: Fp8Config, layers: int, *, stage: int, pipeline: int) -> int:
    """Return the number of layers of a stage that compute in FP8."""
    own = layers // pipeline
    first = stage * own
    kept = fp8.first_last_layers_bf16
    return max(0, min(first + own, layers - kept) - max(first, kept))


def weight_bytes(fp8: Fp8Config) -> float:
    """Return the bytes of one FP8 weight, in both orientations, with its share of the scales."""
    return ORIENTATIONS * (1 + SCALE_BYTES[fp8.recipe])


def fp8_copies(config: Config, shape: ModelShape, *, stage: int, in_flight: int) -> int:
    """Return the bytes that FP8 weights add on a rank of the stage to those in bfloat16; negative
    if they save memory.

    Primary weights replace bfloat16 ones. Others are computed in each forward pass and kept until
    its backward pass: once for every layer in flight (`in_flight`: layers that hold a micro-batch's
    activations, summed over micro-batches), with recompute: full for one layer.
    """
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return 0
    own = shape.layers // parallel.pipeline
    count = fp8_layers(fp8, shape.layers, stage=stage, pipeline=parallel.pipeline)
    weights = layer_weights(shape, tensor=parallel.tensor, expert=parallel.expert)
    each = weight_bytes(fp8)
    if fp8.primary_weights:
        return int(count * weights * (each - BFLOAT16))
    held = 1.0 if config.policy.recompute == "full" else in_flight * count / own
    return int(held * weights * each)


def fp8_inputs(config: Config, shape: ModelShape, *, stage: int, tokens: int, layers: int) -> int:
    """Return the bytes that inputs of GEMMs save in FP8 compared with bfloat16, on a rank of the
    stage with micro-batches of `tokens`. layers: those of the rank that hold a micro-batch's
    activations, summed over micro-batches; with recompute: full that is one."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return 0
    own = shape.layers // parallel.pipeline
    rounded = fp8_layers(fp8, shape.layers, stage=stage, pipeline=parallel.pipeline)
    if config.policy.recompute == "full":
        # The largest of the layers, which are recomputed one at a time.
        rounded, layers = own * (rounded == own), 1
    saved = BFLOAT16 - 1 - INPUT_SCALE_BYTES[fp8.recipe]
    experts = shape.experts_per_token
    # Queries, keys and values, and a dense MLP; experts get copies of their tokens.
    whole = shape.hidden * (1 if experts else 2) * saved
    divided = ((experts * shape.hidden) + max(1, experts) * shape.intermediate) * saved
    if fp8.recipe == "delayed":
        divided -= shape.heads * shape.head_dim
    whole /= parallel.tensor if parallel.sequence else 1
    return int(layers * rounded / own * tokens * (whole + divided / parallel.tensor))


def sides(shape: ModelShape, target: Target) -> tuple[int, int]:
    """Return (inputs, outputs) of the matrix in each layer."""
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, shape.intermediate),
        "up_proj": (hidden, shape.intermediate),
        "down_proj": (shape.intermediate, hidden),
    }[target]


def stage_adapters(lora: LoraConfig, shape: ModelShape, *, pipeline: int, tensor: int) -> int:
    """Return the number of adapter parameters on one rank: tensor parallelism divides the outputs
    of a column-parallel matrix's adapter, and the inputs of a row-parallel one's."""
    layer = 0
    for target in lora.targets:
        inputs, outputs = sides(shape, target)
        if target in ROW_PARALLEL:
            layer += lora.rank * (inputs // tensor + outputs)
        else:
            layer += lora.rank * (inputs + outputs // tensor)
    return shape.layers // pipeline * layer

"""Settings of a policy's layers on a machine and a model of given sizes, low-rank adapters and FP8
GEMMs: their obstacles, and their memory.

The memory of products in 8 bits was read in the source of Transformer Engine 2.12 and Megatron-Core
0.19.2, and not measured. A product keeps its input for the backward pass once, in 8 bits; but the
output projection of attention keeps the bfloat16 tensor that attention keeps anyway, except under
`delayed`, which keeps both.
"""

from __future__ import annotations

from megatron_async_rl.config.policy import (
    ATTENTION,
    MLP,
    ROW_PARALLEL,
    Fp8Config,
    LoraConfig,
    Target,
    lacking,
    needed,
)
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import ModelShape

ORIENTATIONS = 2
"""Copies of a weight in 8 bits, one as it lies and one transposed: Hopper multiplies in one
orientation alone, and blocks have scales of their own in each."""
BFLOAT16 = 2
"""Bytes."""
SCALE_BYTES = {"tensorwise": 0.0, "delayed": 0.0, "blockwise": 4 / 128**2, "mxfp8": 1 / 32}
"""Bytes of scales per weight, by recipe: a float32 per 128 x 128 block, a byte per 32 weights,
or a negligible one per tensor."""
INPUT_SCALE_BYTES = {**SCALE_BYTES, "blockwise": 4 / 128}
"""The same for each input: blocks are of 1 x 128."""


def product_sizes(shape: ModelShape, *, tensor: int) -> dict[str, int]:
    """The sides of a layer's weights on one rank, by what they are. Experts are not cut."""
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
    """Weights of one layer's products on one rank, without biases."""
    _, qkv, outputs, columns = product_sizes(shape, tensor=tensor).values()
    held = shape.experts // expert if shape.experts else 1
    return shape.hidden * (qkv + outputs + held * 3 * columns)


def fp8_layers(fp8: Fp8Config, layers: int, *, stage: int, pipeline: int) -> int:
    """Layers of a stage that compute in 8 bits."""
    own = layers // pipeline
    first = stage * own
    kept = fp8.first_last_layers_bf16
    return max(0, min(first + own, layers - kept) - max(first, kept))


def weight_bytes(fp8: Fp8Config) -> float:
    """Bytes of one weight in 8 bits, in both orientations, with its share of the scales."""
    return ORIENTATIONS * (1 + SCALE_BYTES[fp8.recipe])


def fp8_copies(config: Config, shape: ModelShape, *, stage: int, in_flight: int) -> int:
    """Bytes that FP8 weights add on a rank of the stage to those in bfloat16, or take off.

    Primary weights take the place of bfloat16 ones. Others are made in each forward pass and kept
    until its backward pass: for every layer in flight once (`in_flight`: layers that hold a
    micro-batch's activations, summed over micro-batches), with recompute: full for one layer.
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
    """Bytes that inputs of products take less in 8 bits than in bfloat16, on a rank of the stage
    with micro-batches of `tokens`. layers: those of the rank that hold a micro-batch's activations,
    summed over micro-batches; with recompute: full that is one."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return 0
    own = shape.layers // parallel.pipeline
    rounded = fp8_layers(fp8, shape.layers, stage=stage, pipeline=parallel.pipeline)
    if config.policy.recompute == "full":
        # The largest of the layers, which are computed again one at a time.
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


def fp8_problems(config: Config, machine: Machine, shape: ModelShape) -> list[Problem]:
    """A recipe that the machine's GPUs lack, sizes that it does not divide, and more layers in
    bfloat16 than there are."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return []
    found = []
    why = next(
        (why for gpu in machine.gpus if (why := lacking(fp8.recipe, gpu.capability, None))), ""
    )
    if why:
        fitting = _fitting(machine)
        fix = f"set it to {' or '.join(fitting)}" if fitting else "set policy.fp8: null"
        found.append(Problem(key="policy.fp8.recipe", what=why, fix=fix))

    multiple = fp8.facts.sizes
    sizes = product_sizes(shape, tensor=parallel.tensor)
    wrong = [f"{size} ({name})" for name, size in sizes.items() if size % multiple]
    if wrong:
        ways = ["lower policy.parallel.tensor"] if parallel.tensor > 1 else []
        ways += ["take a recipe of finer multiples (tensorwise: 16)"] if multiple > 16 else []
        found.append(
            Problem(
                key="policy.fp8.recipe",
                what=f"{fp8.recipe} takes multiples of {multiple}, and the model has"
                f" {', '.join(wrong)}",
                fix=", or ".join([*ways, "set policy.fp8: null"]),
            )
        )

    kept, held = fp8.first_last_layers_bf16, shape.layers // parallel.pipeline
    maximum = min(held, (shape.layers - 1) // 2)
    if kept > maximum:
        what = (
            f"{kept} layers at each end are not within the {held} of a pipeline stage, or leave"
            f" none of {shape.layers} in 8 bits"
        )
        fix = f"set it to at most {maximum}"
        found.append(Problem(key="policy.fp8.first_last_layers_bf16", what=what, fix=fix))
    return found


def fp8_warnings(config: Config, machine: Machine) -> list[str]:
    """Demands on the run's GPUs, where it is not known here that they are met."""
    fp8 = config.policy.fp8
    if fp8 is None or all(gpu.capability is not None for gpu in machine.gpus):
        return []
    return [
        f"policy.fp8.recipe: {fp8.recipe} needs GPUs of {needed(fp8.recipe)}; those of the run are"
        " not known here, and the ranks will look"
    ]


def _fitting(machine: Machine) -> list[str]:
    return [
        recipe
        for recipe in ("tensorwise", "blockwise", "mxfp8")
        if not any(lacking(recipe, gpu.capability, None) for gpu in machine.gpus)
    ]


def sides(shape: ModelShape, target: Target) -> tuple[int, int]:
    """(inputs, outputs) of the matrix in each layer."""
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
    """Adapter parameters on one rank: tensor parallelism divides the outputs of a column-parallel
    matrix's adapter, and the inputs of a row-parallel one's."""
    layer = 0
    for target in lora.targets:
        inputs, outputs = sides(shape, target)
        if target in ROW_PARALLEL:
            layer += lora.rank * (inputs // tensor + outputs)
        else:
            layer += lora.rank * (inputs + outputs // tensor)
    return shape.layers // pipeline * layer


def lora_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Targets that the model does not have, and a rank that a target has no room for."""
    lora = config.policy.lora
    if lora is None:
        return []
    experts = [target for target in lora.targets if shape.experts and target in MLP]
    if experts:
        rest = [target for target in lora.targets if target in ATTENTION] or ATTENTION
        what = f"{', '.join(experts)} are experts in this model, which have no adapters"
        fix = f"set it to [{', '.join(rest)}]"
        return [Problem(key="policy.lora.targets", what=what, fix=fix)]
    maximum, target = min((min(sides(shape, target)), target) for target in lora.targets)
    if lora.rank <= maximum:
        return []
    what = f"{lora.rank} is more than {maximum}, the smaller side of {target}"
    fix = f"set it to at most {maximum}, far below to save anything"
    return [Problem(key="policy.lora.rank", what=what, fix=fix)]

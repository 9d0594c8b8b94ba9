"""Low-rank adapters on a model of given sizes: how many numbers a rank trains, and what cannot be
adapted."""

from __future__ import annotations

from megatron_async_rl.config.lora import ATTENTION, MLP, ROW_PARALLEL, LoraConfig, Target
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.model_files import ModelShape

KEY = "policy.lora"


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
        return [Problem(key=f"{KEY}.targets", what=what, fix=fix)]
    most, target = min((min(sides(shape, target)), target) for target in lora.targets)
    if lora.rank <= most:
        return []
    what = f"{lora.rank} is more than {most}, the smaller side of {target}"
    fix = f"set it to at most {most}, far below to save anything"
    return [Problem(key=f"{KEY}.rank", what=what, fix=fix)]

"""Problems of a layout on a machine: sizes that do not divide the model, too few GPUs, and FP8
recipes or adapters that the model or the machine does not support."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_async_rl.config.engine_options import cpu_head_sizes
from megatron_async_rl.config.policy import ATTENTION, MLP, lacking, needed
from megatron_async_rl.config.problem import Problem, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER, carriers
from megatron_async_rl.plan.layer_memory import product_sizes, sides
from megatron_async_rl.plan.layout import (
    PARALLEL,
    Device,
    device_of,
    engine_count,
    engine_room,
    engines_elsewhere,
    gpus_required,
)
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import ModelShape

ELSEWHERE = carriers(other_machines=True)
"""Values of weights.transport that permit engines on machines other than rank 0's, as text."""
QUANTISED_ROUTER = ("fp8_per_channel", "fp8_per_block")
"""Quantisations for which vLLM 0.32 failed on a GPU at the start of a mixture of 4 experts, in the
router's layer (docs/gpu.md)."""
ROUTER_MULTIPLE = 16
"""Divisor of the number of experts with these: the code that failed pads or refuses other sizes."""
FP8_CACHE_MULTIPLE = 32
"""Divisor of the head size with an FP8 key-value cache on a CPU: vLLM's CPU attention
(v1/attention/backends/cpu_attn.py) raises for other sizes."""


def layout_problems(config: Config, machine: Machine, shape: ModelShape | None) -> list[Problem]:
    """Return all problems of the layout. `shape`: null if the model's sizes are unknown, which
    leaves the checks against them out."""
    parallel = config.policy.parallel
    found: list[Problem] = []
    tensor, context, pipeline = parallel.tensor, parallel.context, parallel.pipeline
    replica, with_context = parallel.replica_ranks, context > 1
    # All problems are collected, because a user may have to change several sizes together.
    if parallel.ranks % replica:
        product = (
            f"tensor {tensor} x {f'context {context} x ' if with_context else ''}pipeline"
            f" {pipeline}"
        )
        found.append(
            Problem(
                key=f"{PARALLEL}.ranks",
                what=f"{number_of('rank', parallel.ranks, 'does', 'do')} not divide into {product}"
                f" = {replica}",
                fix=(
                    f"set ranks to a multiple of {replica}, or lower tensor"
                    f"{', context' if with_context else ''} or pipeline"
                ),
            )
        )
    if parallel.ranks % machine.nodes:
        found.append(
            Problem(
                key=f"{PARALLEL}.ranks",
                what=f"{number_of('rank', parallel.ranks, 'does', 'do')} not divide over"
                f" {machine.nodes} nodes (--nnodes)",
                fix=(
                    f"set ranks to a multiple of {math.lcm(replica, machine.nodes)}, or change"
                    " --nnodes"
                ),
            )
        )
    if parallel.sequence and tensor == 1:
        what = "sequence parallelism requires tensor parallelism, and tensor is 1"
        found.append(
            Problem(
                key=f"{PARALLEL}.sequence",
                what=what,
                fix="set it to false, or set policy.parallel.tensor above 1",
            )
        )
    if parallel.virtual_pipeline > 1 and pipeline == 1:
        what = "virtual stages require pipeline parallelism, and pipeline is 1"
        found.append(
            Problem(
                key=f"{PARALLEL}.virtual_pipeline",
                what=what,
                fix="set it to 1, or set policy.parallel.pipeline above 1",
            )
        )
    # Without the model's config.json only the layout itself can be checked.
    if shape is not None:
        found += _shape_problems(config, shape) + _engine_problems(config, machine, shape)
    if config.policy.device == "cuda" and not machine.gpus:
        fix = (
            "set it to auto or cpu, plan for other machines with --gpus 8 --gpu-memory 80, or run"
            " `mar doctor` to find out why CUDA is unavailable"
        )
        found.append(Problem(key="policy.device", what="cuda, but no GPU was found", fix=fix))
    # This check does not need the model's sizes.
    found += gpu_problems(config, machine)
    if machine.engine_nodes and not (config.rollout and engines_elsewhere(config, machine)):
        are = "is" if machine.engine_nodes == 1 else "are"
        what = f"{number_of('machine', machine.engine_nodes)} {are} for engines only, and "
        what += "all engines run on rank 0's" if config.rollout else "the run has no engines"
        fix = f"set weights.transport to {ELSEWHERE}" if config.rollout else "remove the option"
        found.append(Problem(key="--trainer-nodes", what=what, fix=fix))
    if config.weights.carrier.ipc:
        found += _ipc_problems(config, machine)
    return found


def gpu_problems(config: Config, machine: Machine) -> list[Problem]:
    """Return the problem of ranks and engines that require more GPUs than exist, or none."""
    if not machine.gpus or device_of(config, machine) != "cuda":
        return []
    # Too few GPUs on a node also explain a lack of room for engines, so that is reported alone.
    return _beyond_gpus(config, machine) or _room_problems(config, machine)


def _beyond_gpus(config: Config, machine: Machine) -> list[Problem]:
    """Return the problem of a node that requires more GPUs than it has, or none."""
    # Rounded up for the node with most ranks, because the ranks may not divide over the nodes.
    ranks, rollout = -(-config.policy.parallel.ranks // machine.nodes), config.rollout
    workers = rollout.workers if rollout else 1
    colocated = rollout is not None and rollout.placement == "colocated"
    # An engine elsewhere requires only its own GPUs on one machine; machines are assumed equal.
    elsewhere = engines_elsewhere(config, machine)
    needed_gpus = max(gpus_required(config, machine), workers if elsewhere else 0)
    if needed_gpus <= len(machine.gpus):
        return []
    engines = number_of("engine", engine_count(config))
    engines += f" of {workers} GPUs" if workers > 1 else ""
    shared = " on the same devices" if colocated else " on any machine" if elsewhere else ""
    each = " a node" if machine.nodes > 1 else ""
    has = "a node has" if machine.nodes > 1 or machine.described else "this machine has"
    what = (
        f"{number_of('rank', ranks)}{each} and {engines}{shared} need"
        f" {number_of('GPU', needed_gpus)}, and {has} {len(machine.gpus)}"
    )
    # The fix names only keys whose value can be lowered.
    lower = ["policy.parallel.ranks", "rollout.engines", *_divided(config)]
    fix = (
        f"lower {', '.join(lower[:-1])} or {lower[-1]}"
        if lower[2:]
        else f"lower {', '.join(lower)}"
    )
    if rollout is not None and not colocated and not elsewhere:
        fix += f"; or set weights.transport to {ELSEWHERE} and start a Ray cluster, for engines on"
        fix += " other machines"
    if ranks > len(machine.gpus):
        fix += "; or divide the ranks over more machines (--nodes; NNODES of the launcher)"
    return [Problem(key=f"{PARALLEL}.ranks", what=what, fix=fix)]


def _room_problems(config: Config, machine: Machine) -> list[Problem]:
    """Return the problem of more engines than the machines have GPUs for, or none."""
    # If the run joins an existing cluster, the number of its machines is unknown here.
    rollout, known = config.rollout, machine.described or machine.engine_nodes
    if rollout is None or not known or not engines_elsewhere(config, machine):
        return []
    ranks, has = -(-config.policy.parallel.ranks // machine.nodes), len(machine.gpus)
    with_ranks, alone = engine_room(config, has - ranks), engine_room(config, has)
    room = machine.nodes * with_ranks + machine.engine_nodes * alone
    engines = engine_count(config)
    if engines <= room:
        return []
    workers = f" of {rollout.workers} GPUs" if rollout.workers > 1 else ""
    more = machine.nodes + machine.engine_nodes + -(-(engines - room) // alone)
    what = (
        f"{number_of('engine', engines)}{workers}, and there is room for {room}: {with_ranks} on a"
        " node with ranks"
    )
    what += f", {alone} on each of {machine.engine_nodes} without" if machine.engine_nodes else ""
    fix = (
        f"set it to at most {room - engines + rollout.engines}, or "
        if room > engines - rollout.engines
        else ""
    )
    fix += (
        f"plan for {more} machines, {machine.nodes} of them with ranks (--nodes {more}"
        f" --trainer-nodes {machine.nodes})"
    )
    return [Problem(key="rollout.engines", what=what, fix=fix)]


def _divided(config: Config) -> list[str]:
    """Return the keys that divide an engine over several GPUs."""
    rollout = config.rollout
    sizes = {} if rollout is None else {"tensor": rollout.tensor, "pipeline": rollout.pipeline}
    return [f"rollout.{name}" for name, size in sizes.items() if size > 1]


def _ipc_problems(config: Config, machine: Machine) -> list[Problem]:
    """Return the problem of engines that could not map a rank's memory, or none."""
    key, ranks = "weights.transport", config.policy.parallel.ranks
    name = config.weights.transport
    if machine.nodes > 1:
        nodes = machine.nodes
        what = f"{name} transfers weights within one machine, and the ranks are on {nodes} nodes"
        return [Problem(key=key, what=what, fix=f"set it to {DEFAULT_CARRIER}")]
    if config.rollout is None or device_of(config, machine) != "cuda":
        return []
    workers = config.rollout.workers
    gpus = engine_count(config) * workers
    if gpus <= ranks:
        return []
    engines = number_of("engine", engine_count(config))
    engines += f" of {workers} GPUs" if workers > 1 else ""
    what = (
        f"{name} transfers weights from a rank to an engine on the same GPU, and {engines}"
        f" {'uses' if engine_count(config) == 1 else 'use'} {number_of('GPU', gpus)}, but only"
        f" {ranks} {'has' if ranks == 1 else 'have'} a rank"
    )
    fix = (
        f"set rollout.engines to at most {ranks // workers}, policy.parallel.ranks to {gpus}, or"
        f" weights.transport to {DEFAULT_CARRIER}"
        if ranks >= workers
        else f"set policy.parallel.ranks to {gpus}, or weights.transport to {DEFAULT_CARRIER}"
    )
    return [Problem(key=key, what=what, fix=fix)]


def head_size_problems(
    shape: ModelShape, device: Device, options: Mapping[str, Any]
) -> list[Problem]:
    """Return the problem of attention heads for which vLLM has no CPU kernel, or none. `options`:
    rollout.vllm."""
    # Without this check engines would start, and fail at the first request after every restart.
    sizes, size = cpu_head_sizes(), shape.head_dim
    if device != "cpu" or not sizes:
        return []
    if size not in sizes:
        return [
            Problem(
                key="model.path",
                what=(
                    f"an attention head has {size} elements (head_dim); vLLM's CPU kernels support"
                    f" {', '.join(map(str, sizes))}"
                ),
                fix="use a model with one of these sizes, or GPUs (policy.device: cuda)",
            )
        ]
    quantised = str(options.get("kv_cache_dtype", "auto")).startswith("fp8")
    if quantised and size % FP8_CACHE_MULTIPLE:
        what = (
            f"fp8 on a CPU requires attention heads of a multiple of {FP8_CACHE_MULTIPLE} elements,"
            f" and the model's heads have {size}"
        )
        return [Problem(key="rollout.vllm.kv_cache_dtype", what=what, fix="remove it")]
    return []


def _engine_problems(config: Config, machine: Machine, shape: ModelShape) -> list[Problem]:
    if config.rollout is None:
        return []
    tensor, pipeline = config.rollout.tensor, config.rollout.pipeline
    found = head_size_problems(shape, device_of(config, machine), config.rollout.vllm)
    if config.rollout.vllm.get("enable_expert_parallel") and shape.experts < tensor:
        what = f"{tensor} workers cannot divide the model's {shape.experts} experts"
        key = "rollout.vllm.enable_expert_parallel"
        found.append(Problem(key=key, what=what, fix="remove it"))
    if config.rollout.quantised and shape.experts:
        found += _quantised_experts(config, machine, shape.experts)
    if pipeline > shape.layers:
        what = f"{pipeline} stages, but the model has only {shape.layers} layers"
        fix = f"set it to at most {shape.layers}"
        found.append(Problem(key="rollout.pipeline", what=what, fix=fix))
    counts = [(shape.heads, "attention heads"), (shape.kv_heads, "key-value heads")]
    # Tensor parallelism does not divide the columns of an expert.
    if not shape.experts:
        counts.append((shape.intermediate, "MLP columns"))
    wrong = [f"{count} {noun}" for count, noun in counts if count % tensor]
    if not wrong:
        return found
    # Every proposed value divides all sizes that rollout.tensor must divide.
    fitting = [
        one for one in range(1, shape.kv_heads + 1) if not any(count % one for count, _ in counts)
    ]
    what = f"{tensor} does not divide the model's {' and '.join(wrong)}"
    return [
        *found,
        Problem(
            key="rollout.tensor", what=what, fix=f"set it to one of: {', '.join(map(str, fitting))}"
        ),
    ]


def _quantised_experts(config: Config, machine: Machine, experts: int) -> list[Problem]:
    """Return the problem of a mixture of experts that engines cannot quantise; or none."""
    assert config.rollout is not None
    method = config.rollout.vllm["quantization"]
    if device_of(config, machine) == "cpu":
        what = "on a CPU, vLLM cannot load new weights into a quantised mixture of experts"
        fix = "remove it"
    elif method in QUANTISED_ROUTER and experts % ROUTER_MULTIPLE:
        what = (
            f"{method} requires a multiple of {ROUTER_MULTIPLE} experts, and a layer of the model"
            f" has {experts}"
        )
        fix = "set it to fp8_per_tensor, or remove it"
    else:
        return []
    return [Problem(key="rollout.vllm.quantization", what=what, fix=fix)]


def _shape_problems(config: Config, shape: ModelShape) -> list[Problem]:
    parallel = config.policy.parallel
    divided = [
        ("tensor", parallel.tensor, shape.heads, "attention heads"),
        ("tensor", parallel.tensor, shape.kv_heads, "key-value heads"),
        ("pipeline", parallel.pipeline, shape.layers, "layers"),
    ]
    if not shape.experts:
        divided.append(("tensor", parallel.tensor, shape.intermediate, "MLP columns"))
    found = []
    for name in ("tensor", "pipeline"):
        wrong = [
            (count, noun) for key, size, count, noun in divided if key == name and count % size
        ]
        if not wrong:
            continue
        size = getattr(parallel, name)
        counts = [count for key, _, count, _ in divided if key == name]
        fitting = [
            one for one in range(1, min(counts) + 1) if not any(count % one for count in counts)
        ]
        found.append(
            Problem(
                key=f"{PARALLEL}.{name}",
                what=f"{size} does not divide the model's "
                + " and ".join(f"{count} {noun}" for count, noun in wrong),
                fix=f"set it to one of: {', '.join(map(str, fitting[:12]))}",
            )
        )
    return (
        found
        + _virtual_problems(config, shape)
        + _expert_problems(config, shape)
        + _routing_problems(config, shape)
        + lora_problems(config, shape)
    )


def _virtual_problems(config: Config, shape: ModelShape) -> list[Problem]:
    pipeline, virtual = config.policy.parallel.pipeline, config.policy.parallel.virtual_pipeline
    # Problems of the pipeline itself are reported under its own key.
    if pipeline == 1 or shape.layers % pipeline or not shape.layers // pipeline % virtual:
        return []
    # All chunks of a rank must have the same number of layers.
    held = shape.layers // pipeline
    fitting = [one for one in range(1, held + 1) if not held % one]
    what = (
        f"{virtual} chunks do not divide the {held} layers of a pipeline rank ({shape.layers}"
        f" layers over {pipeline})"
    )
    fix = f"set it to one of: {', '.join(map(str, fitting[:12]))}"
    return [Problem(key=f"{PARALLEL}.virtual_pipeline", what=what, fix=fix)]


def _routing_problems(config: Config, shape: ModelShape) -> list[Problem]:
    # Without experts the setting would be ignored silently.
    if config.policy.routing_replay == "none" or shape.experts:
        return []
    what = f"{config.policy.routing_replay}, but the model has no experts"
    return [Problem(key="policy.routing_replay", what=what, fix="set it to none")]


def _expert_problems(config: Config, shape: ModelShape) -> list[Problem]:
    parallel = config.policy.parallel
    key, expert = f"{PARALLEL}.expert", parallel.expert
    if not shape.experts:
        what = f"{expert}, but the model has no experts"
        return [Problem(key=key, what=what, fix="set it to 1")] if expert > 1 else []
    found = []
    # Expert parallelism spans all ranks of a pipeline stage, not only data-parallel ranks.
    stage = parallel.ranks // parallel.pipeline
    fitting = [
        one for one in range(1, shape.experts + 1) if not shape.experts % one and not stage % one
    ]
    if expert not in fitting:
        what = (
            f"{expert} does not divide both the {shape.experts} experts of a layer and the {stage}"
            " ranks of a pipeline stage"
        )
        found.append(
            Problem(
                key=key, what=what, fix=f"set it to one of: {', '.join(map(str, fitting[:12]))}"
            )
        )
    if parallel.tensor > 1 and expert == 1:
        # Each tensor-parallel rank would train all experts on its part of the tokens, and Megatron
        # would not sum their gradients over those ranks.
        what = "a mixture of experts with tensor parallelism requires a value above 1"
        fix = f"set it to {fitting[-1]}" if fitting[1:] else "set policy.parallel.tensor to 1"
        found.append(Problem(key=key, what=what, fix=fix))
    # Megatron dispatches tokens from sequence-parallel parts.
    if parallel.tensor > 1 and not parallel.sequence:
        what = "false, but a mixture of experts with tensor parallelism requires it"
        found.append(
            Problem(
                key=f"{PARALLEL}.sequence",
                what=what,
                fix="set it to true, or set policy.parallel.tensor to 1",
            )
        )
    return found


def fp8_problems(config: Config, machine: Machine, shape: ModelShape) -> list[Problem]:
    """Return problems of policy.fp8: a recipe that a GPU does not support, matrix sizes that the
    recipe does not support, and too many layers in bfloat16."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return []
    found = []
    # Every GPU must support the recipe, because a rank may run on any of them.
    why = next(
        (why for gpu in machine.gpus if (why := lacking(fp8.recipe, gpu.capability, None))), ""
    )
    if why:
        fitting = _supported_recipes(machine)
        fix = f"set it to {' or '.join(fitting)}" if fitting else "set policy.fp8: null"
        found.append(Problem(key="policy.fp8.recipe", what=why, fix=fix))

    multiple = fp8.facts.sizes
    sizes = product_sizes(shape, tensor=parallel.tensor)
    # Transformer Engine pads the tokens of a batch, but not weight matrices.
    wrong = [f"{size} ({name})" for name, size in sizes.items() if size % multiple]
    if wrong:
        ways = ["lower policy.parallel.tensor"] if parallel.tensor > 1 else []
        ways += ["use a recipe with a smaller multiple (tensorwise: 16)"] if multiple > 16 else []
        found.append(
            Problem(
                key="policy.fp8.recipe",
                what=f"{fp8.recipe} requires multiples of {multiple}, and the model has"
                f" {', '.join(wrong)}",
                fix=", or ".join([*ways, "set policy.fp8: null"]),
            )
        )

    kept, held = fp8.first_last_layers_bf16, shape.layers // parallel.pipeline
    # At least one layer must stay in FP8, and the first and the last stage must contain the layers
    # that do not.
    maximum = min(held, (shape.layers - 1) // 2)
    if kept > maximum:
        what = (
            f"{kept} layers at each end exceed the {held} layers of a pipeline stage, or leave"
            f" none of the {shape.layers} layers in FP8"
        )
        fix = f"set it to at most {maximum}"
        found.append(Problem(key="policy.fp8.first_last_layers_bf16", what=what, fix=fix))
    return found


def fp8_warnings(config: Config, machine: Machine) -> list[str]:
    """Return notes on requirements that cannot be checked because the run's GPUs are unknown."""
    fp8 = config.policy.fp8
    # fp8_problems checks GPUs whose capability is known.
    if fp8 is None or all(gpu.capability is not None for gpu in machine.gpus):
        return []
    return [
        f"policy.fp8.recipe: {fp8.recipe} requires GPUs of {needed(fp8.recipe)}; the run's GPUs"
        " are unknown here, and the ranks will check them"
    ]


def _supported_recipes(machine: Machine) -> list[str]:
    return [
        recipe
        for recipe in ("tensorwise", "blockwise", "mxfp8")
        if not any(lacking(recipe, gpu.capability, None) for gpu in machine.gpus)
    ]


def lora_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Return the problem of adapter targets without adapters in this model, or of a rank above a
    target's size; or none."""
    lora = config.policy.lora
    if lora is None:
        return []
    # Experts are computed as one grouped GEMM, without a module per expert for an adapter to wrap.
    experts = [target for target in lora.targets if shape.experts and target in MLP]
    if experts:
        rest = [target for target in lora.targets if target in ATTENTION] or ATTENTION
        what = f"{', '.join(experts)} are experts in this model, which cannot have adapters"
        fix = f"set it to [{', '.join(rest)}]"
        return [Problem(key="policy.lora.targets", what=what, fix=fix)]
    # Above the smaller side of the matrix, a larger rank adds parameters but no expressiveness.
    maximum, target = min((min(sides(shape, target)), target) for target in lora.targets)
    if lora.rank <= maximum:
        return []
    what = f"{lora.rank} is more than {maximum}, the smaller side of {target}"
    fix = f"set it to at most {maximum}, or far lower to save memory"
    return [Problem(key="policy.lora.rank", what=what, fix=fix)]

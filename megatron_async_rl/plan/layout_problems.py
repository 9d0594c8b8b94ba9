"""Problems of a layout on a machine: sizes that do not divide the model, missing GPUs, and FP8
recipes or adapters that the model or the machine cannot have."""

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
    gpus_wanted,
)
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import ModelShape

ELSEWHERE = carriers(other_machines=True)
"""Carriers with which engines may run on machines other than rank 0's."""
FP8_CACHE_MULTIPLE = 32
"""Elements of a head: vLLM's CPU attention (v1/attention/backends/cpu_attn.py) raises for others
with a key-value cache in FP8."""


def layout_problems(config: Config, machine: Machine, shape: ModelShape | None) -> list[Problem]:
    parallel = config.policy.parallel
    found: list[Problem] = []
    tensor, context, pipeline = parallel.tensor, parallel.context, parallel.pipeline
    cell, shared = parallel.replica_ranks, context > 1
    # All problems are collected, since a user may have to change several sizes at once.
    if parallel.ranks % cell:
        product = (
            f"tensor {tensor} x {f'context {context} x ' if shared else ''}pipeline {pipeline}"
        )
        found.append(
            Problem(
                key=f"{PARALLEL}.ranks",
                what=f"{number_of('rank', parallel.ranks, 'does', 'do')} not divide into {product}"
                f" = {cell}",
                fix=(
                    f"set ranks to a multiple of {cell}, or lower tensor"
                    f"{', context' if shared else ''} or pipeline"
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
                    f"set ranks to a multiple of {math.lcm(cell, machine.nodes)}, or change"
                    " --nnodes"
                ),
            )
        )
    if parallel.sequence and tensor == 1:
        what = "sequence parallelism divides over tensor-parallel ranks, and tensor is 1"
        found.append(
            Problem(
                key=f"{PARALLEL}.sequence",
                what=what,
                fix="set it to false, or policy.parallel.tensor above 1",
            )
        )
    if parallel.virtual_pipeline > 1 and pipeline == 1:
        what = "virtual stages are turns that pipeline ranks take, and pipeline is 1"
        found.append(
            Problem(
                key=f"{PARALLEL}.virtual_pipeline",
                what=what,
                fix="set it to 1, or policy.parallel.pipeline above 1",
            )
        )
    # Without the model's config.json only sizes of the layout can be checked.
    if shape is not None:
        found += _shape_problems(config, shape) + _engine_problems(config, machine, shape)
    if config.policy.device == "cuda" and not machine.gpus:
        fix = (
            "set it to auto or cpu, plan for other machines with --gpus 8 --gpu-memory 80, or see"
            " `mar doctor` for what makes CUDA unavailable"
        )
        found.append(Problem(key="policy.device", what="cuda, but there is no GPU", fix=fix))
    # Also without a model: too few GPUs is worth knowing first.
    found += gpu_problems(config, machine)
    if machine.engine_nodes and not (config.rollout and engines_elsewhere(config, machine)):
        are = "is" if machine.engine_nodes == 1 else "are"
        what = f"{number_of('machine', machine.engine_nodes)} {are} for engines alone, and "
        what += "all engines are on rank 0's" if config.rollout else "the run has no engines"
        fix = f"set weights.transport to {ELSEWHERE}" if config.rollout else "leave it out"
        found.append(Problem(key="--trainer-nodes", what=what, fix=fix))
    if config.weights.carrier.ipc:
        found += _lending_problems(config, machine)
    return found


def gpu_problems(config: Config, machine: Machine) -> list[Problem]:
    """Problems of ranks and engines that need more GPUs than there are."""
    if not machine.gpus or device_of(config, machine) != "cuda":
        return []
    # A node that is too small explains the lack of room.
    return _beyond_gpus(config, machine) or _room_problems(config, machine)


def _beyond_gpus(config: Config, machine: Machine) -> list[Problem]:
    # Rounded up: the layout may not divide, and still the fullest node counts.
    ranks, rollout = -(-config.policy.parallel.ranks // machine.nodes), config.rollout
    workers = rollout.workers if rollout else 1
    colocated = rollout is not None and rollout.placement == "colocated"
    # Unless by shared memory an engine finds its GPUs on any machine; these are taken to be alike.
    elsewhere = engines_elsewhere(config, machine)
    wanted = max(gpus_wanted(config, machine), workers if elsewhere else 0)
    if wanted <= len(machine.gpus):
        return []
    held = number_of("engine", engine_count(config))
    held += f" of {workers} GPUs" if workers > 1 else ""
    shared = " on the same devices" if colocated else " on any machine" if elsewhere else ""
    each = " a node" if machine.nodes > 1 else ""
    has = "a node has" if machine.nodes > 1 or machine.described else "this machine shows"
    what = (
        f"{number_of('rank', ranks)}{each} and {held}{shared} need {number_of('GPU', wanted)}, and"
        f" {has} {len(machine.gpus)}"
    )
    # Only keys whose value can be lowered.
    lower = ["policy.parallel.ranks", "rollout.engines", *_divided(config)]
    fix = (
        f"lower {', '.join(lower[:-1])} or {lower[-1]}"
        if lower[2:]
        else f"lower {', '.join(lower)}"
    )
    if rollout is not None and not colocated and not elsewhere:
        fix += f"; with weights.transport: {ELSEWHERE} and a Ray cluster engines may be on other"
        fix += " machines"
    if ranks > len(machine.gpus):
        fix += "; or divide the ranks over more machines (--nodes; NNODES of the launcher)"
    return [Problem(key=f"{PARALLEL}.ranks", what=what, fix=fix)]


def _room_problems(config: Config, machine: Machine) -> list[Problem]:
    """Problem of more engines than the described or counted machines have GPUs for. Of another
    cluster that is joined only Ray knows the machines."""
    rollout, known = config.rollout, machine.described or machine.engine_nodes
    if rollout is None or not known or not engines_elsewhere(config, machine):
        return []
    ranks, has = -(-config.policy.parallel.ranks // machine.nodes), len(machine.gpus)
    beside, alone = engine_room(config, has - ranks), engine_room(config, has)
    room = machine.nodes * beside + machine.engine_nodes * alone
    wanted = engine_count(config)
    if wanted <= room:
        return []
    workers = f" of {rollout.workers} GPUs" if rollout.workers > 1 else ""
    more = machine.nodes + machine.engine_nodes + -(-(wanted - room) // alone)
    what = (
        f"{number_of('engine', wanted)}{workers}, and there is room for {room}: {beside} on a node"
        " with ranks"
    )
    what += f", {alone} on each of {machine.engine_nodes} without" if machine.engine_nodes else ""
    fix = (
        f"set it to at most {room - wanted + rollout.engines}, or "
        if room > wanted - rollout.engines
        else ""
    )
    fix += (
        f"plan for {more} machines, and {machine.nodes} of them have ranks (--nodes {more}"
        f" --trainer-nodes {machine.nodes})"
    )
    return [Problem(key="rollout.engines", what=what, fix=fix)]


def _divided(config: Config) -> list[str]:
    """Keys that give an engine more than one worker."""
    rollout = config.rollout
    sizes = {} if rollout is None else {"tensor": rollout.tensor, "pipeline": rollout.pipeline}
    return [f"rollout.{name}" for name, size in sizes.items() if size > 1]


def _lending_problems(config: Config, machine: Machine) -> list[Problem]:
    """Problems of engines that could not map the memory of a rank."""
    key, ranks = "weights.transport", config.policy.parallel.ranks
    name = config.weights.transport
    if machine.nodes > 1:
        nodes = machine.nodes
        what = f"{name} passes weights within one machine, and the ranks are on {nodes} nodes"
        return [Problem(key=key, what=what, fix=f"set it to {DEFAULT_CARRIER}")]
    if config.rollout is None or device_of(config, machine) != "cuda":
        return []
    workers = config.rollout.workers
    taken = engine_count(config) * workers
    if taken <= ranks:
        return []
    engines = number_of("engine", engine_count(config))
    engines += f" of {workers} GPUs" if workers > 1 else ""
    what = (
        f"{name} passes weights from a rank to an engine on the same GPU, and {engines}"
        f" {'takes' if engine_count(config) == 1 else 'take'} {number_of('GPU', taken)}, and"
        f" {ranks} {'has' if ranks == 1 else 'have'} a rank"
    )
    fix = (
        f"set rollout.engines to at most {ranks // workers}, policy.parallel.ranks to {taken}, or"
        f" this to {DEFAULT_CARRIER}"
        if ranks >= workers
        else f"set policy.parallel.ranks to {taken}, or this to {DEFAULT_CARRIER}"
    )
    return [Problem(key=key, what=what, fix=fix)]


def head_size_problems(
    shape: ModelShape, device: Device, options: Mapping[str, Any]
) -> list[Problem]:
    """Problems of attention heads for which vLLM has no CPU kernel. Its engine would start, and
    fail at the first request after every restart. options: those of rollout.vllm."""
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
            f"fp8 on a CPU needs attention heads of a multiple of {FP8_CACHE_MULTIPLE} elements,"
            f" and the model's have {size}"
        )
        return [Problem(key="rollout.vllm.kv_cache_dtype", what=what, fix="remove it")]
    return []


def _engine_problems(config: Config, machine: Machine, shape: ModelShape) -> list[Problem]:
    if config.rollout is None:
        return []
    tensor, pipeline = config.rollout.tensor, config.rollout.pipeline
    found = head_size_problems(shape, device_of(config, machine), config.rollout.vllm)
    if config.rollout.vllm.get("enable_expert_parallel") and shape.experts < tensor:
        what = f"{tensor} workers to divide the model's {shape.experts} experts"
        key = "rollout.vllm.enable_expert_parallel"
        found.append(Problem(key=key, what=what, fix="remove it"))
    if config.rollout.quantised and shape.experts and device_of(config, machine) == "cpu":
        what = "on a CPU vLLM cannot load new weights into a mixture of experts that it quantises"
        found.append(Problem(key="rollout.vllm.quantization", what=what, fix="remove it"))
    if pipeline > shape.layers:
        what = f"{pipeline} stages, and the model has {shape.layers} layers"
        fix = f"set it to at most {shape.layers}"
        found.append(Problem(key="rollout.pipeline", what=what, fix=fix))
    counts = [(shape.heads, "attention heads"), (shape.kv_heads, "key-value heads")]
    # Experts are whole, so nothing divides their columns.
    if not shape.experts:
        counts.append((shape.intermediate, "MLP columns"))
    wrong = [f"{count} {noun}" for count, noun in counts if count % tensor]
    if not wrong:
        return found
    # Every proposed value divides all sizes that the key must divide.
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
    # Faults of the pipeline itself are reported by its own key.
    if pipeline == 1 or shape.layers % pipeline or not shape.layers // pipeline % virtual:
        return []
    # Chunks of a rank must have equally many layers.
    held = shape.layers // pipeline
    fitting = [one for one in range(1, held + 1) if not held % one]
    what = (
        f"{virtual} chunks do not divide the {held} layers of a pipeline rank ({shape.layers}"
        f" layers over {pipeline})"
    )
    fix = f"set it to one of: {', '.join(map(str, fitting[:12]))}"
    return [Problem(key=f"{PARALLEL}.virtual_pipeline", what=what, fix=fix)]


def _routing_problems(config: Config, shape: ModelShape) -> list[Problem]:
    # Replay of nothing would be a silent no-op.
    if config.policy.routing_replay == "none" or shape.experts:
        return []
    what = f"{config.policy.routing_replay}, and the model has no experts to choose among"
    return [Problem(key="policy.routing_replay", what=what, fix="set it to none")]


def _expert_problems(config: Config, shape: ModelShape) -> list[Problem]:
    parallel = config.policy.parallel
    key, expert = f"{PARALLEL}.expert", parallel.expert
    if not shape.experts:
        what = f"{expert} ranks to share experts, and the model has none"
        return [Problem(key=key, what=what, fix="set it to 1")] if expert > 1 else []
    found = []
    # Expert parallelism spans all ranks of a stage, not only data-parallel ones.
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
        # would not sum over them.
        what = (
            "a mixture of experts under tensor parallelism has its experts divided, and expert is 1"
        )
        fix = f"set it to {fitting[-1]}" if fitting[1:] else "set policy.parallel.tensor to 1"
        found.append(Problem(key=key, what=what, fix=fix))
    # Megatron dispatches tokens by the sequence-parallel split.
    if parallel.tensor > 1 and not parallel.sequence:
        what = (
            "false, but a mixture of experts under tensor parallelism divides tokens over those"
            " ranks"
        )
        found.append(
            Problem(
                key=f"{PARALLEL}.sequence",
                what=what,
                fix="set it to true, or policy.parallel.tensor to 1",
            )
        )
    return found


def fp8_problems(config: Config, machine: Machine, shape: ModelShape) -> list[Problem]:
    """Problems of a recipe that the machine's GPUs lack, of sizes that it does not divide, and of
    more layers in bfloat16 than the model has."""
    fp8, parallel = config.policy.fp8, config.policy.parallel
    if fp8 is None:
        return []
    found = []
    # One GPU that lacks the recipe is enough: any rank may get it.
    why = next(
        (why for gpu in machine.gpus if (why := lacking(fp8.recipe, gpu.capability, None))), ""
    )
    if why:
        fitting = _fitting(machine)
        fix = f"set it to {' or '.join(fitting)}" if fitting else "set policy.fp8: null"
        found.append(Problem(key="policy.fp8.recipe", what=why, fix=fix))

    multiple = fp8.facts.sizes
    sizes = product_sizes(shape, tensor=parallel.tensor)
    # Transformer Engine pads rows of tokens, never sides of weights.
    wrong = [f"{size} ({name})" for name, size in sizes.items() if size % multiple]
    if wrong:
        ways = ["lower policy.parallel.tensor"] if parallel.tensor > 1 else []
        ways += ["use a recipe with finer multiples (tensorwise: 16)"] if multiple > 16 else []
        found.append(
            Problem(
                key="policy.fp8.recipe",
                what=f"{fp8.recipe} takes multiples of {multiple}, and the model has"
                f" {', '.join(wrong)}",
                fix=", or ".join([*ways, "set policy.fp8: null"]),
            )
        )

    kept, held = fp8.first_last_layers_bf16, shape.layers // parallel.pipeline
    # At least one layer must stay in FP8, and the first and last stage hold all of them.
    maximum = min(held, (shape.layers - 1) // 2)
    if kept > maximum:
        what = (
            f"{kept} layers at each end are not within the {held} of a pipeline stage, or leave"
            f" none of {shape.layers} in FP8"
        )
        fix = f"set it to at most {maximum}"
        found.append(Problem(key="policy.fp8.first_last_layers_bf16", what=what, fix=fix))
    return found


def fp8_warnings(config: Config, machine: Machine) -> list[str]:
    """Notes on requirements that cannot be checked, because the run's GPUs are not known here."""
    fp8 = config.policy.fp8
    # Known capabilities were judged by fp8_problems.
    if fp8 is None or all(gpu.capability is not None for gpu in machine.gpus):
        return []
    return [
        f"policy.fp8.recipe: {fp8.recipe} needs GPUs of {needed(fp8.recipe)}; those of the run are"
        " not known here, and the ranks will check them"
    ]


def _fitting(machine: Machine) -> list[str]:
    return [
        recipe
        for recipe in ("tensorwise", "blockwise", "mxfp8")
        if not any(lacking(recipe, gpu.capability, None) for gpu in machine.gpus)
    ]


def lora_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Problems of adapter targets that the model lacks, and of a rank above a target's size."""
    lora = config.policy.lora
    if lora is None:
        return []
    # Grouped experts have no module per expert that an adapter could wrap.
    experts = [target for target in lora.targets if shape.experts and target in MLP]
    if experts:
        rest = [target for target in lora.targets if target in ATTENTION] or ATTENTION
        what = f"{', '.join(experts)} are experts in this model, which have no adapters"
        fix = f"set it to [{', '.join(rest)}]"
        return [Problem(key="policy.lora.targets", what=what, fix=fix)]
    # A rank above the smaller side adds parameters without adding rank.
    maximum, target = min((min(sides(shape, target)), target) for target in lora.targets)
    if lora.rank <= maximum:
        return []
    what = f"{lora.rank} is more than {maximum}, the smaller side of {target}"
    fix = f"set it to at most {maximum}, far below it to save memory"
    return [Problem(key="policy.lora.rank", what=what, fix=fix)]

"""Places of the processes, and the check that the layout divides the model: tensor x context x
pipeline x data, as Megatron-Core orders ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_async_rl.config.engine_options import cpu_head_sizes
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER, carriers
from megatron_async_rl.plan.layers import lora_problems
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.policy.supported import ChosenLayers, choose_layers
from megatron_async_rl.rollout.cluster import CONNECTIONS

Device = Literal["cpu", "cuda"]
PARALLEL = "policy.parallel"
ELSEWHERE = carriers(other_machines=True)
"""Carriers with which engines may run on machines other than rank 0's."""
FP8_CACHE_MULTIPLE = 32
"""Elements of a head: vLLM's CPU attention (v1/attention/backends/cpu_attn.py) raises for others
with a key-value cache in FP8."""
PLANNED_DEVICE = "MEGATRON_ASYNC_RL_DEVICE"
"""Variable of ranks: on which device the plan has them."""


@dataclass(frozen=True)
class PlannedProcess:
    """`kind`: what it is and what starts it; `device`: the GPU it owns, or its threads."""

    name: str
    kind: str
    device: str


def device_of(config: Config, machine: Machine) -> Device:
    if config.policy.device == "auto":
        return "cuda" if machine.gpus else "cpu"
    return config.policy.device


def rank_environment(config: Config, machine: Machine) -> dict[str, str]:
    """Variables that trainer ranks want here. Ranks planned for GPUs run on no CPU unsaid.
    Megatron-Core launches a message of tensor or context parallelism before the kernels with which
    it overlaps; up to Hopper the GPU keeps that order only with one queue."""
    parallel = config.policy.parallel
    if device_of(config, machine) != "cuda":
        return {}
    blackwell = all((gpu.capability or (0, 0)) >= (10, 0) for gpu in machine.gpus)
    ordered = blackwell or max(parallel.tensor, parallel.context) == 1
    return {PLANNED_DEVICE: "cuda"} | ({} if ordered else {CONNECTIONS: "1"})


def layers_of(config: Config, machine: Machine, shape: ModelShape) -> ChosenLayers:
    """Raises UserError for layers that cannot be had."""
    policy = config.policy
    return choose_layers(
        policy.layers,
        model_type=shape.family.model_type,
        dtype=config.model.dtype,
        device=device_of(config, machine),
        lora=policy.lora is not None,
        engine=machine.transformer_engine,
        fp8=policy.fp8 is not None,
    )


def rank_coordinates(config: Config, rank: int) -> tuple[int, int, int, int]:
    """(tensor, context, data, pipeline) coordinates: tensor varies fastest, pipeline slowest."""
    parallel = config.policy.parallel
    rank, tensor = divmod(rank, parallel.tensor)
    rank, context = divmod(rank, parallel.context)
    pipeline, data = divmod(rank, parallel.data)
    return tensor, context, data, pipeline


def processes(config: Config, device: Device, machine: Machine) -> tuple[PlannedProcess, ...]:
    """Every process of a run, in the order in which they start; empty for a layout that does not
    divide."""
    parallel, rollout = config.policy.parallel, config.rollout
    if parallel.ranks % parallel.replica_ranks or parallel.ranks % machine.nodes:
        return ()
    listed = []
    share = parallel.ranks // machine.nodes
    for rank in range(parallel.ranks):
        tensor, context, data, pipeline = rank_coordinates(config, rank)
        kind = f"torchrun: tensor {tensor}, "
        kind += f"context {context}, " if parallel.context > 1 else ""
        kind += f"pipeline {pipeline}, data {data}"
        place = f"GPU {rank % share}" if device == "cuda" else "1 thread"
        place += f" of node {rank // share}" if machine.nodes > 1 else ""
        listed.append(PlannedProcess(f"rank {rank}", kind, place))
    if rollout is not None:
        listed.append(
            PlannedProcess("controller", "Ray actor: prompts, admission, batches", "1 thread")
        )
        for engine in range(engine_count(config)):
            kind = "Ray actor: vLLM and its core process, rewards"
            if rollout.workers > 1:
                kind = f"Ray actor: vLLM, its core process and {rollout.workers} workers, rewards"
            listed.append(
                PlannedProcess(
                    f"engine {engine}",
                    kind,
                    _engine_place(config, device, engine, share, machine),
                )
            )
        if config.weights.carrier.per_engine:
            where = "rank 0's machine" + (", on its GPU" if device == "cuda" else "")
            listed.append(
                PlannedProcess("sender", "Ray actor: sends each engine the weights", where)
            )
        elif config.weights.carrier.other_machines:
            kind = "Ray actor: two versions of the weights in /dev/shm"
            listed.append(PlannedProcess("relays", kind, "each other machine with engines"))
    return tuple(listed)


def engines_elsewhere(config: Config, machine: Machine) -> bool:
    """True where engines may be on other machines than rank 0's: with a carrier that goes there, in
    a Ray cluster that is joined. Machines that are described, or counted, are taken to be one."""
    joins = machine.described or machine.engine_nodes or os.environ.get("RAY_ADDRESS")
    return config.weights.carrier.other_machines and bool(joins)


def engine_count(config: Config) -> int:
    """Engines of training, and those that do nothing but evaluate."""
    engines = config.rollout.engines if config.rollout else 0
    return engines + (config.eval.engines if config.eval else 0)


def _engine_place(config: Config, device: Device, engine: int, ranks: int, machine: Machine) -> str:
    """Behind the `ranks` ranks of its node; unless by shared memory, any machine of the Ray
    cluster."""
    assert config.rollout is not None
    workers = config.rollout.workers
    if engines_elsewhere(config, machine):
        what = "GPU" if device == "cuda" else "thread"
        place = f"{workers} {what}{'s' if workers > 1 else ''} of any machine"
        return f"{place} with as many free" if device == "cuda" else place
    if device == "cpu":
        return "1 thread" if workers == 1 else f"{workers} threads"
    first = engine * workers + (0 if config.rollout.placement == "colocated" else ranks)
    return f"GPU {first}" if workers == 1 else f"GPU {first}-{first + workers - 1}"


def by_node(config: Config, device: Device, machine: Machine) -> tuple[tuple[str, str], ...]:
    """Names of the machines of a run over several, and what is on each; those with engines alone
    together. Empty for a layout that does not divide."""
    ranks, rollout = config.policy.parallel.ranks, config.rollout
    if machine.nodes + machine.engine_nodes == 1 or ranks % machine.nodes:
        return ()
    share, has = ranks // machine.nodes, len(machine.gpus)
    on_gpu, elsewhere = device == "cuda", rollout is not None and engines_elsewhere(config, machine)
    found = []
    for node in range(machine.nodes):
        parts = [counted("rank", node * share, share)]
        parts[0] += f" on {counted('GPU', 0, share)}" if on_gpu else ""
        if node == 0 and rollout is not None:
            parts += ["the controller"] + ["the engines"] * (not elsewhere)
        if on_gpu and elsewhere and has > share:
            room = engine_room(config, has - share)
            parts.append(f"{counted('GPU', share, has - share)} for engines, {room} at most")
        found.append((f"node {node}", "; ".join(parts)))
    if machine.engine_nodes:
        name = counted("node", machine.nodes, machine.engine_nodes)
        maximum = (
            f", {engine_room(config, has)} at most on each"
            if on_gpu and rollout is not None
            else ""
        )
        found.append((name, f"engines alone{maximum}"))
    return tuple(found)


def counted(noun: str, first: int, count: int) -> str:
    """`count` things that are numbered from `first`."""
    if count == 1:
        return f"{noun} {first}"
    plural = noun if noun == "GPU" else f"{noun}s"
    return f"{plural} {first}-{first + count - 1}"


def number_of(noun: str, count: int, singular: str = "", plural: str = "") -> str:
    """`count` things, and the form of the verb: `1 rank does`, `2 ranks do`."""
    ending = "es" if noun.endswith("ch") else "s"
    text = (noun, singular) if count == 1 else (f"{noun}{ending}", plural)
    return " ".join((str(count), *filter(None, text)))


def engine_room(config: Config, gpus: int) -> int:
    """Engines that fit on `gpus` GPUs of a machine; one does not reach over two."""
    assert config.rollout is not None
    return max(0, gpus) // config.rollout.workers


def layout_problems(config: Config, machine: Machine, shape: ModelShape | None) -> list[Problem]:
    parallel = config.policy.parallel
    found: list[Problem] = []
    tensor, context, pipeline = parallel.tensor, parallel.context, parallel.pipeline
    cell, shared = parallel.replica_ranks, context > 1
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
    if shape is not None:
        found += _shape_problems(config, shape) + _engine_problems(config, machine, shape)
    if config.policy.device == "cuda" and not machine.gpus:
        fix = (
            "set it to auto or cpu, plan for other machines with --gpus 8 --gpu-memory 80, or see"
            " `mar doctor` for what keeps CUDA away"
        )
        found.append(Problem(key="policy.device", what="cuda, but there is no GPU", fix=fix))
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


def gpus_wanted(config: Config, machine: Machine, node: int = 0) -> int:
    """GPUs of machine number `node` that its ranks take, from the first, and engines after them,
    but for engines that may be anywhere."""
    ranks, rollout = -(-config.policy.parallel.ranks // machine.nodes), config.rollout
    if rollout is None or node > 0 or engines_elsewhere(config, machine):
        return ranks
    engines = engine_count(config) * rollout.workers
    return max(ranks, engines) if rollout.placement == "colocated" else ranks + engines


def gpu_problems(config: Config, machine: Machine) -> list[Problem]:
    """Problems of ranks and engines that need more GPUs than there are."""
    if not machine.gpus or device_of(config, machine) != "cuda":
        return []
    return _beyond_gpus(config, machine) or _room_problems(config, machine)


def gpus_used(config: Config, machine: Machine) -> int:
    """GPUs of all machines that ranks and engines take."""
    ranks, rollout = config.policy.parallel.ranks, config.rollout
    if rollout is None:
        return ranks
    engines = engine_count(config) * rollout.workers
    return max(ranks, engines) if rollout.placement == "colocated" else ranks + engines


def _beyond_gpus(config: Config, machine: Machine) -> list[Problem]:
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
    """More engines than there are GPUs for on the machines that are described or counted. Of
    another cluster that is joined only Ray knows the machines."""
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


def spread_notes(config: Config, device: Device, machine: Machine) -> list[str]:
    """Notes on what is slow between machines."""
    parallel = config.policy.parallel
    share = parallel.ranks // machine.nodes
    group = parallel.tensor * parallel.context
    if device == "cpu" or machine.nodes == 1 or parallel.ranks % machine.nodes or not share % group:
        return []
    context = f" x context {parallel.context}" if parallel.context > 1 else ""
    return [
        f"policy.parallel.tensor: {parallel.tensor}{context} ranks exchange activations in every"
        f" layer, and a node has {share} of them, so this passes over the network between machines:"
        " give each more ranks (fewer --trainer-nodes), or lower it"
    ]


def _divided(config: Config) -> list[str]:
    """Keys that give an engine more than one worker."""
    rollout = config.rollout
    sizes = {} if rollout is None else {"tensor": rollout.tensor, "pipeline": rollout.pipeline}
    return [f"rollout.{name}" for name, size in sizes.items() if size > 1]


def _lending_problems(config: Config, machine: Machine) -> list[Problem]:
    """Engines that could not map the memory of a rank."""
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
        " this to shared_memory"
        if ranks >= workers
        else f"set policy.parallel.ranks to {taken}, or this to shared_memory"
    )
    return [Problem(key=key, what=what, fix=fix)]


def head_size_problems(
    shape: ModelShape, device: Device, options: Mapping[str, Any]
) -> list[Problem]:
    """Attention heads for which vLLM has no kernel on a CPU. Its engine would start all the same,
    and end at the first request, each time it is restarted. options: those of rollout.vllm."""
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
    if not shape.experts:
        counts.append((shape.intermediate, "MLP columns"))
    wrong = [f"{count} {noun}" for count, noun in counts if count % tensor]
    if not wrong:
        return found
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
    if pipeline == 1 or shape.layers % pipeline or not shape.layers // pipeline % virtual:
        return []
    held = shape.layers // pipeline
    fitting = [one for one in range(1, held + 1) if not held % one]
    what = (
        f"{virtual} chunks do not divide the {held} layers of a pipeline rank ({shape.layers}"
        f" layers over {pipeline})"
    )
    fix = f"set it to one of: {', '.join(map(str, fitting[:12]))}"
    return [Problem(key=f"{PARALLEL}.virtual_pipeline", what=what, fix=fix)]


def _routing_problems(config: Config, shape: ModelShape) -> list[Problem]:
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

"""Host memory of each machine of a run: its ranks, its engines and /dev/shm.

Invariants:
- `certain` parts are sizes of tensors that the run allocates. A plan is refused only if these parts
  alone exceed a machine's memory. The other parts are estimates: if the total with them exceeds the
  memory, the plan only has a note. A start is refused if the free memory is less than the certain
  parts and 1 - DOUBT of the estimates;
- /dev/shm is part of the machine's memory, so its content counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.staleness import admitted_limit
from megatron_async_rl.plan.dev_shm import in_shared_memory
from megatron_async_rl.plan.fit import (
    gib,
    host_fix,
    twin_bytes,
    with_value,
)
from megatron_async_rl.plan.layout import (
    Device,
    counted,
    engine_count,
    engine_room,
    engines_elsewhere,
    rank_coordinates,
)
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.memory import EngineMemory, RankMemory
from megatron_async_rl.rollout.cluster import object_store_bytes
from megatron_async_rl.watchdog.host_memory import largest_processes

KEY = "host memory"
DOUBT = 0.25
"""Share of the estimated parts that a run may not need: caches fill, and the demo used 3.7 of 4.6
GiB."""
PROCESS_BYTES = GIB
"""Estimated memory of a process on a GPU without its tensors: Python, CUDA and other libraries."""
RANK_BYTES = GIB // 2
"""The same of a rank on a CPU, which shares libraries with the server from which it is forked."""
KERNEL_BYTES = 3 * GIB // 10
"""Estimated memory of the kernels that oneDNN compiles in a rank in bfloat16 on a CPU. They grow
for the first tens of steps (benchmarks/results.md)."""
ENGINE_BYTES = GIB
"""The same of an engine's process on a CPU, with vLLM's working memory except for the logits."""
LOGIT_COPIES = 20
"""Number of arrays with the logits of all running responses that fit in the memory with which an
engine on a CPU samples. Arrays of other numbers of responses leave gaps in it. 16 to 24 were
measured, with 32 to 256 responses and 49,152 or 151,936 tokens (benchmarks/results.md)."""
LAUNCHER_BYTES = GIB
"""Estimated memory of the launcher, of torchrun and of the servers that fork ranks and engines."""
CHAT_BYTES = GIB // 2
"""Estimated memory of transformers and torch in the launcher, which applies a chat template."""
CONTROLLER_BYTES = 3 * GIB // 4
"""Estimated memory of the controller, of one engine's actor, of rewards and of Ray."""
PARTS_NAMED = 4


@dataclass(frozen=True)
class HostPart:
    """One use of host memory. `size`: bytes, summed over the processes of a machine. `certain`:
    False for an estimate. `shared`: True for memory in /dev/shm."""

    name: str
    size: int
    certain: bool = True
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory of each of `count` equal machines; `first` is the number of the first one."""

    first: int
    count: int
    parts: tuple[HostPart, ...]

    @property
    def machines(self) -> str:
        return counted("node", self.first, self.count)

    @property
    def total(self) -> int:
        """Expected use of one of these machines, in bytes."""
        return sum(part.size for part in self.parts)

    @property
    def certain(self) -> int:
        return sum(part.size for part in self.parts if part.certain)

    @property
    def shared_memory(self) -> int:
        """Bytes in /dev/shm, included in `total`."""
        return sum(part.size for part in self.parts if part.shared)


def host_memory(
    config: Config,
    machine: Machine,
    device: Device,
    ranks: Sequence[RankMemory],
    engine: EngineMemory | None,
    *,
    longest: int,
    routed_bytes: int = 0,
) -> tuple[HostMemory, ...]:
    """Return the memory of all machines; adjacent equal machines are one entry.

    `ranks`: memory of a rank of each pipeline stage; empty for a layout that does not divide, for
    which the result is empty, too. `longest`: tokens of the longest prompt + response.
    `routed_bytes`: bytes per token for the recorded experts."""
    parallel = config.policy.parallel
    # With such a layout it is undefined which ranks share a machine.
    if not ranks or parallel.ranks % machine.nodes or parallel.ranks % parallel.replica_ranks:
        return ()
    each = [
        (
            *_of_ranks(config, machine, device, ranks, node),
            *_of_engines(config, machine, device, engine, node),
        )
        for node in range(machine.nodes + machine.engine_nodes)
    ]
    if config.rollout is not None and engine is not None:
        each = [
            (*parts, *_shared(config, machine, device, engine, node, longest, routed_bytes))
            for node, parts in enumerate(each)
        ]
    hosts, first = [], 0
    for parts, equal in groupby(tuple(part for part in one if part.size) for one in each):
        count = len(list(equal))
        hosts.append(HostMemory(first=first, count=count, parts=parts))
        first += count
    return tuple(hosts)


def _of_ranks(
    config: Config, machine: Machine, device: Device, ranks: Sequence[RankMemory], node: int
) -> Iterator[HostPart]:
    """Yield the memory of the ranks of machine number `node`."""
    share = config.policy.parallel.ranks // machine.nodes
    # Machines with engines only have the highest numbers.
    if node >= machine.nodes:
        return
    here = [
        ranks[rank_coordinates(config, rank)[-1]]
        for rank in range(node * share, (node + 1) * share)
    ]
    if device == "cpu":
        # Estimates are a separate part, because they must not refuse a run.
        estimated = sum(one.activations + one.logprobs for one in here)
        yield HostPart("the ranks' training state", sum(one.total for one in here) - estimated)
        yield HostPart("activations and log-probs", estimated, certain=False)
    else:
        twins = sum(twin_bytes(config, one) for one in here)
        yield HostPart("training state while engines generate", twins)
    yield HostPart("reference, proximal and past weights", sum(one.held for one in here))
    yield HostPart("offloaded moments and gradients", sum(one.offloaded for one in here))
    yield HostPart("copies for asynchronous checkpoints", sum(one.staged for one in here))
    each = RANK_BYTES if device == "cpu" else PROCESS_BYTES
    if device == "cpu" and config.model.dtype == "bfloat16":
        each += KERNEL_BYTES
    yield HostPart("processes of ranks", share * each, certain=False)
    launcher = LAUNCHER_BYTES + (CHAT_BYTES if config.data.as_chat else 0)
    yield HostPart("launcher", launcher, certain=False)


def _of_engines(
    config: Config, machine: Machine, device: Device, engine: EngineMemory | None, node: int
) -> Iterator[HostPart]:
    """Yield the memory of the engines that may run on machine number `node`."""
    rollout = config.rollout
    if rollout is None or engine is None:
        return
    count = engines_on(config, machine, device, node)
    if device == "cpu":
        yield HostPart("engines' weights", count * engine.weights)
        # vLLM reserves the cache, but the kernel allocates its pages only as it fills.
        yield HostPart("engines' key-value caches", count * (engine.cache or 0), certain=False)
    several = rollout.workers if rollout.workers > 1 else 0
    if device == "cuda":
        # The Ray actor, vLLM's engine core, and its workers.
        size = count * PROCESS_BYTES * (2 + several)
    else:
        size = count * ENGINE_BYTES * max(1, several)
        # vLLM gathers the logits on every worker of the last stage, and each of them samples.
        running = _running(config, engine, count)
        sampling = LOGIT_COPIES * running * engine.logits * rollout.tensor
        yield HostPart("logits in engines", sampling, certain=False)
    yield HostPart("processes of engines", size, certain=False)
    if node == 0:
        yield HostPart("controller, rewards and Ray", CONTROLLER_BYTES, certain=False)


def _running(config: Config, engine: EngineMemory, engines: int) -> int:
    """Return the number of responses to training prompts that may run at the same time in a number
    of engines on a CPU."""
    flow, rollout = config.flow, config.rollout
    assert rollout is not None
    # Every response has a block of its own, the last one. Other responses wait in the engine.
    blocks = (engine.cache_tokens or 0) // rollout.cache_block
    places = engines * min(rollout.max_concurrent, blocks)
    groups = admitted_limit(
        0, flow.prompts_per_step, flow.async_ratio, fresh_steps=0, oversample=flow.oversample
    )
    return min(places, groups * flow.group_size)


def engines_on(config: Config, machine: Machine, device: Device, node: int) -> int:
    """Return the largest number of engines on machine number `node`."""
    engines = engine_count(config)
    if not engines_elsewhere(config, machine):
        return engines if node == 0 else 0
    if device == "cuda":
        ranks = config.policy.parallel.ranks // machine.nodes if node < machine.nodes else 0
        # Ray may place as many engines on one node as fit, so the plan assumes that it does.
        return min(engines, engine_room(config, len(machine.gpus) - ranks))
    if machine.engine_nodes:
        return -(-engines // machine.engine_nodes) if node >= machine.nodes else 0
    return -(-engines // machine.nodes)


def _shared(
    config: Config,
    machine: Machine,
    device: Device,
    engine: EngineMemory,
    node: int,
    longest: int,
    routed_bytes: int,
) -> Iterator[HostPart]:
    """Yield the parts in the /dev/shm of machine number `node`."""
    assert config.rollout is not None
    # Two versions: engines read one while the trainer writes the next.
    weights = 2 * engine.weights
    # The controller and Ray's head node run on machine 0, with the objects of a batch.
    if node == 0:
        weights, _ = in_shared_memory(config, engine, machine)
    elsewhere = engines_elsewhere(config, machine)
    count = engines_on(config, machine, device, node)
    if elsewhere and config.weights.carrier.per_engine:
        weights = (2 * engine.weights if node == 0 else 0) + count * 2 * engine.weights
    elif node > 0 and not (elsewhere and count):
        weights = 0
    yield HostPart("staged weights in /dev/shm", weights, shared=True)
    if node == 0:
        responses = config.flow.prompts_per_step * config.flow.group_size
        tokens = config.rollout.max_segments * longest
        store = object_store_bytes(responses, tokens)
        yield HostPart("Ray's object store in /dev/shm", store, certain=False, shared=True)
        routed = routed_bytes * responses * tokens
        yield HostPart("experts chosen by engines", routed, certain=False)


def host_problems(
    config: Config,
    machine: Machine,
    hosts: Sequence[HostMemory],
    hosts_of: Callable[[Config], Sequence[HostMemory]],
) -> tuple[list[Problem], list[str]]:
    """Return problems of machines whose memory the certain parts exceed, and notes on machines
    whose memory only the total with estimates exceeds. `hosts_of`: returns the memory of another
    config; empty for a config that cannot run."""
    problems, notes = [], []
    for host in hosts if machine.memory else ():
        named = f"{host.machines}: " if len(hosts) > 1 else ""
        # Estimates must not refuse a run.
        refused = host.certain > machine.memory
        blamed = [part for part in host.parts if part.certain or not refused]
        largest = sorted(blamed, key=lambda part: -part.size)[:PARTS_NAMED]
        parts = ", ".join(f"{part.name} {gib(part.size)}" for part in largest)
        what = (
            f"{named}about {gib(host.total)} of host memory are needed, more than the available"
            f" {gib(machine.memory)} ({parts})"
        )
        if refused:
            problems.append(Problem(key=KEY, what=what, fix=_fix(config, host, hosts_of)))
        elif host.total > machine.memory:
            notes.append(what)
    return problems, notes


def free_memory_problems(
    config: Config,
    machine: Machine,
    device: Device,
    hosts: Sequence[HostMemory],
    node: int = 0,
    *,
    idle: bool = False,
) -> list[Problem]:
    """Return the problem that this machine, number `node` of the run, has too little free memory
    because other programs use it; or none. `idle`: assume that no other program runs."""
    here = next((host for host in hosts if host.first <= node < host.first + host.count), None)
    # The free memory of a described machine is unknown.
    if machine.free_memory is None or here is None:
        return []
    available = machine.memory if idle else machine.free_memory
    # Free memory and the estimates are uncertain: a doubtful case is not refused.
    minimum = here.certain + (1 - DOUBT) * (here.total - here.certain)
    if minimum <= available:
        return []
    what = f"about {gib(here.total)} of host memory are needed, but "
    if idle:
        what += f"the machine has {gib(available)}"
    else:
        what += f"only {gib(available)} are free; largest processes:"
        what += f" {'; '.join(largest_processes())}"
    return [Problem(key=KEY, what=what, fix=host_fix(config, device))]


def _fix(
    config: Config, host: HostMemory, hosts_of: Callable[[Config], Sequence[HostMemory]]
) -> str:
    """Return a fix that names the settings which lower the memory of this machine, the most
    effective first."""
    helpful = []
    for key, value in (
        ("checkpoint.asynchronous", False),
        ("policy.optimizer.moment_dtype", "bfloat16"),
        ("policy.optimizer.moment_offload", "none"),
        ("rollout.kv_cache_gib", 0.5),
    ):
        # A supervised run has no engines.
        if config.rollout is None and key.startswith("rollout."):
            continue
        changed = with_value(config, key, value)
        hosts = hosts_of(changed) if changed is not None else ()
        then = next((one.total for one in hosts if one.first == host.first), host.total)
        if then < host.total:
            helpful.append((then, f"{key}: {json.dumps(value).strip(chr(34))} (then {gib(then)})"))
    larger = "use machines with more memory, or more machines"
    if not helpful:
        return larger
    return f"set {' or '.join(text for _, text in sorted(helpful))}, or {larger}"

"""Comparison of the memory that ranks and engines need with the memory of a GPU in each device
phase; and changes of the config that lower the need, also for a run whose memory ran out.

The phases are those of flow/device_phases.py. If engines have their own GPUs, the peak of a rank
is in `train`, and an engine has only its share.

Invariants:
- a plan is refused only if it needs more than the available memory; within the error of the
  estimate it has a note;
- a plan proposes only values that need less memory and with which this config can run on this
  machine; after memory ran out, only values that the config's rules accept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.device_phases import Phase
from megatron_async_rl.plan.cache import holds_a_sequence, proposed_context
from megatron_async_rl.plan.layout import (
    Device,
    engine_count,
    rank_coordinates,
)
from megatron_async_rl.plan.machine import GIB, MIB, Machine, size
from megatron_async_rl.plan.memory import (
    CONTEXT_BYTES,
    EngineMemory,
    RankMemory,
    engine_overhead,
    rank_overhead,
    sleeping_overhead,
)
from megatron_async_rl.watchdog.events import described, out_of_memory
from megatron_async_rl.watchdog.host_memory import state_text
from megatron_async_rl.weights.manifest import IN_FLIGHT

ESTIMATE_ERROR = 0.05
PARTS_SHOWN = 3
HOLDERS_SHOWN = 5
LINES_SHOWN = 2
"""Number of lines of an error that are shown: the failed start of an engine, and the cause."""
LESS = 0.1
"""Reduction of an engine's share of a GPU in the fix for a GPU whose memory ran out."""
KEYS_SHOWN = 6

GpuNeedPhase = Phase | Literal["engine", "engine's GPU"]
"""A phase, or an engine's share of a GPU, or a GPU that only an engine uses."""
RanksOf = Callable[[Config], Sequence[RankMemory]]
"""Memory of the ranks, one per stage; none for a config that cannot run on this machine."""


@dataclass(frozen=True, kw_only=True)
class GpuNeed:
    """Bytes that one GPU must hold at one time. `has`: available bytes, described by `of`."""

    key: str
    what: str
    parts: tuple[tuple[str, int], ...]
    has: int
    of: str = "that a GPU has"

    @property
    def total(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def beyond(self) -> int:
        return self.total - self.has

    @property
    def largest(self) -> str:
        """Text on the largest parts."""
        # The largest parts, because these are worth changing.
        shown = sorted(self.parts, key=lambda part: -part[1])[:PARTS_SHOWN]
        return ", ".join(f"{name} {gib(count)}" for name, count in shown if count)

    def __str__(self) -> str:
        return (
            # Rounded up, so that 80.04 of 80.0 GiB does not read as a fit.
            f"{self.what}: about {gib(self.total, up=True)} are needed of the {gib(self.has)}"
            f" {self.of} ({self.largest})"
        )


def gpu_memory(
    config: Config, machine: Machine, engine: EngineMemory | None, ranks_of: RanksOf, longest: int
) -> tuple[list[Problem], list[str], dict[Phase, GpuNeed]]:
    """Return problems of GPUs with too little memory, notes on those with barely enough and, if
    engines and policy alternate, the peak of each phase in order. longest: tokens of the longest
    training or held-out sample."""
    problems, notes = [], []
    needs = _needs(config, machine, engine, ranks_of(config))
    for phase, need in needs.items():
        if need.beyond > 0:
            fix = _fix(config, machine, engine, ranks_of, longest, phase, needs)
            problems.append(Problem(key=need.key, what=str(need), fix=fix))
        # An estimate below the available memory never refuses a run.
        elif need.total > (1 - ESTIMATE_ERROR) * need.has:
            notes.append(f"{need}, and the error of the estimate may be {ESTIMATE_ERROR:.0%}")
    # Only colocated runs have phases that a user can see.
    order: tuple[Phase, ...] = ("generate", "train", "publish") if "generate" in needs else ()
    return problems, notes, {phase: needs[phase] for phase in order}


def _needs(
    config: Config, machine: Machine, engine: EngineMemory | None, ranks: Sequence[RankMemory]
) -> dict[GpuNeedPhase, GpuNeed]:
    """Return the largest need of each phase."""
    has = _gpu_bytes(machine)
    found: dict[GpuNeedPhase, GpuNeed] = {}
    rollout = config.rollout
    shared = rollout is not None and rollout.placement == "colocated"
    asleep = sleeping_overhead(rollout) if rollout is not None and shared else ()
    if ranks:
        # The sender shares rank 0's GPU, so the fullest rank may not be the largest.
        largest = max(ranks, key=lambda rank: rank.total + _sender(config, rank))
        found["train"] = GpuNeed(
            key="policy.parallel",
            what=f"each rank{_of_stage(largest, ranks)}, training",
            parts=(
                ("parameters", largest.parameters + largest.fp8),
                ("gradients", largest.gradients),
                ("optimizer", largest.optimizer),
                ("controls", largest.controls),
                ("activations", largest.activations),
                ("log-probs and targets", largest.logprobs),
                ("the sender of weights", _sender(config, largest)),
                *rank_overhead(config),
                *asleep,
            ),
            has=has,
        )
    if rollout is None or engine is None:
        return found
    share = int(rollout.gpu_memory_utilization * has)
    # vLLM refuses to start without its weights and the cache of one sequence in its share.
    found["engine"] = GpuNeed(
        key="rollout.gpu_memory_utilization",
        what="each GPU of an engine",
        parts=(
            ("weights", engine.of_worker(rollout)),
            ("cache of one sequence of the context limit", engine.sequence_of_worker(rollout)),
        ),
        has=share,
        of=f"that {rollout.gpu_memory_utilization:g} of a GPU gives",
    )
    if not shared:
        # The CUDA context and NCCL are outside the share.
        found["engine's GPU"] = GpuNeed(
            key="rollout.gpu_memory_utilization",
            what="the GPU of an engine",
            parts=(("the engine", share), *engine_overhead(rollout)),
            has=has,
        )
    if ranks and shared:
        # The first node's ranks that share their GPUs with engines.
        sharing = min(
            -(-config.policy.parallel.ranks // machine.nodes), rollout.engines * rollout.workers
        )
        stages = {rank_coordinates(config, rank)[-1] for rank in range(sharing)}
        # The stage that keeps most memory while an engine is active decides.
        kept = max((rank for rank in ranks if rank.stage in stages), key=_kept)
        # While loading, an engine holds new weights in addition to the policy's parameters.
        found["publish"] = GpuNeed(
            key="rollout.tensor",
            what=f"an engine, loading next to a rank{_of_stage(kept, ranks)}",
            parts=(
                ("the engine's weights", engine.of_worker(rollout)),
                ("the policy's parameters", _kept(kept)),
                ("buckets in flight", ipc_bucket_bytes(config, engine)),
                *rank_overhead(config),
                *asleep,
            ),
            has=has,
        )
        found["generate"] = GpuNeed(
            key="rollout.gpu_memory_utilization",
            what=f"an engine, generating next to a rank{_of_stage(kept, ranks)}",
            # A restarted engine holds new weights in addition to its cache.
            parts=(
                ("the engine", share),
                ("the policy's parameters", _kept(kept)),
                ("buckets in flight", ipc_bucket_bytes(config, engine)),
                *rank_overhead(config),
                *engine_overhead(rollout),
            ),
            has=has,
        )
    return found


def twin_bytes(config: Config, rank: RankMemory) -> int:
    """Return the largest number of bytes of host memory that the training state of a GPU's rank
    needs while engines are active; `controls` includes a small part that is not kept."""
    # Only colocated policies move their state to the host.
    colocated = config.rollout is not None and config.rollout.placement == "colocated"
    return rank.optimizer + rank.controls if colocated else 0


def _kept(rank: RankMemory) -> int:
    """Return the bytes that a rank keeps on a GPU after it released memory for an engine."""
    return rank.parameters + min(0, rank.fp8)


def ipc_bucket_bytes(config: Config, engine: EngineMemory) -> int:
    """Return the bytes of the buckets from which an engine loads on a device that it shares with
    the policy: each has at most weights.bucket_mib, or one tensor that is larger."""
    if not config.weights.carrier.ipc:
        return 0
    # A tensor larger than a bucket is sent in a bucket of its own size.
    return IN_FLIGHT * min(max(config.weights.bucket_mib * MIB, engine.largest), engine.weights)


def _sender(config: Config, rank: RankMemory) -> int:
    """Return the bytes of the process that sends each engine its own copy of the weights from rank
    0's GPU: its CUDA context, and the buckets in flight to each engine."""
    if config.rollout is None or not config.weights.carrier.per_engine or rank.stage > 0:
        return 0
    return CONTEXT_BYTES + engine_count(config) * IN_FLIGHT * config.weights.bucket_mib * MIB


def _of_stage(rank: RankMemory, ranks: Sequence[RankMemory]) -> str:
    return f" of stage {rank.stage}" if len(ranks) > 1 else ""


def _fix(
    config: Config,
    machine: Machine,
    engine: EngineMemory | None,
    ranks_of: RanksOf,
    longest: int,
    phase: GpuNeedPhase,
    needs: dict[GpuNeedPhase, GpuNeed],
) -> str:
    """Return the changes that help, the most helpful first."""
    helpful = []
    share = _share(config, machine, phase, needs[phase])
    context = proposed_context(longest, engine.context) if engine and engine.context else None
    for key, value in _changes(config, phase, share, context):
        # Every proposal is planned like the config itself, because a fix must work.
        changed = with_value(config, key, value)
        ranks = ranks_of(changed) if changed is not None else ()
        if changed is None or not ranks:
            continue
        then = _needs(changed, machine, engine, ranks)
        # A change may not move the shortage to another phase.
        worse = any(one.beyond > max(0, needs[name].beyond) for name, one in then.items())
        if not worse and then[phase].beyond < needs[phase].beyond:
            shown = json.dumps(value).strip('"')
            left = f"then {gib(then[phase].total, up=True)}"
            if then[phase].has != needs[phase].has:
                left += f" of {gib(then[phase].has)}"
            # First, because no sample is longer.
            costs = key != "rollout.max_context"
            helpful.append((costs, then[phase].beyond, f"{key}: {shown} ({left})"))
    larger = "use GPUs with more memory, or more of them for policy.parallel.ranks"
    if not helpful:
        return larger
    named = ", ".join(text for _, _, text in sorted(helpful)[:KEYS_SHOWN])
    fix = f"set {named}" if len(helpful) == 1 else f"set one or several of {named}"
    # No single change is enough, so larger GPUs are named as well.
    return fix if min(beyond for _, beyond, _ in helpful) <= 0 else f"{fix}; or {larger}"


def _changes(
    config: Config,
    phase: GpuNeedPhase,
    share: float | None = None,
    context: int | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of changes that may help; the caller checks them. `share`, `context`:
    proposed values of rollout.gpu_memory_utilization and rollout.max_context."""
    policy, rollout = config.policy, config.rollout
    if phase == "train":
        yield "policy.recompute", "full"
        half = policy.tokens_per_micro_batch // 2
        if rollout is None or half > rollout.sampling.max_tokens:
            yield "policy.tokens_per_micro_batch", half
        if policy.parallel.data * policy.parallel.context > 1:
            yield "policy.parallel.distributed_optimizer", True
        yield "policy.optimizer.moment_dtype", "bfloat16"
        yield "policy.optimizer.moment_offload", "cpu"
        yield "weights.bucket_mib", math.ceil(config.weights.bucket_mib / 2)
    if phase != "train" and rollout is not None:
        if phase == "engine" and context is not None:
            yield "rollout.max_context", context
        if phase != "publish" and share is not None:
            yield "rollout.gpu_memory_utilization", round(share, 4)
        yield "rollout.tensor", 2 * rollout.tensor
        yield "rollout.pipeline", 2 * rollout.pipeline
        if config.weights.carrier.ipc:
            yield "weights.bucket_mib", math.ceil(config.weights.bucket_mib / 4)
    shared = rollout is not None and rollout.placement == "colocated" and phase != "engine"
    if phase == "train" or shared:
        yield "policy.parallel.tensor", 2 * policy.parallel.tensor
        yield "policy.parallel.pipeline", 2 * policy.parallel.pipeline
        yield "policy.parallel.ranks", 2 * policy.parallel.ranks


def _share(config: Config, machine: Machine, phase: GpuNeedPhase, need: GpuNeed) -> float | None:
    """Return the share of a GPU at which an engine would fit."""
    if config.rollout is None:
        return None
    # In hundredths, rounded so that the proposal is enough.
    off = math.ceil(100 * need.beyond / _gpu_bytes(machine)) / 100
    return config.rollout.gpu_memory_utilization + (off if phase == "engine" else -off)


class DeviceMemoryOut(RuntimeError):
    """A device's memory ran out in `phase`. `held`: bytes in use, by purpose. `fix`: keys that
    help."""

    def __init__(self, message: str, phase: Phase, held: Mapping[str, int], fix: str) -> None:
        largest = sorted(held.items(), key=lambda part: -part[1])[:HOLDERS_SHOWN]
        parts = ", ".join(f"{name} {size(count)}" for name, count in largest if count)
        super().__init__(
            f"a device's memory ran out in phase {phase}; this rank's holds {parts or 'nothing'}."
            f" Error: {message}"
        )
        self.phase = phase
        self.held = held
        self.fix = fix


class HostMemoryOut(RuntimeError):
    """A machine's memory ran out in `phase`. `fix`: a change that helps."""

    def __init__(self, message: str, phase: Phase, state: str, fix: str) -> None:
        super().__init__(
            f"host memory ran out in phase {phase}. Error: {message}. On rank 0's machine now:"
            f" {state}"
        )
        self.phase = phase
        self.fix = fix


def memory_ran_out(
    error: BaseException,
    config: Config,
    phase: Phase,
    held: Callable[[], Mapping[str, int]],
    *,
    on_cpu: bool,
) -> DeviceMemoryOut | HostMemoryOut | None:
    """Return the error for the user if memory ran out in a rank or an engine; None for any other
    error. `phase`: present phase of the rank. `held`: returns the bytes in use on its device, by
    purpose. `on_cpu`: True if policy and engines run on CPUs, whose memory is the host's."""
    memory = out_of_memory(error)
    if memory is None:
        return None
    # An engine's error has its own phase, because the ranks may be in another phase by now.
    phase = getattr(error, "phase", phase)
    # On a CPU device memory is host memory, and device keys would not help.
    if memory == "host" or on_cpu:
        message = " ".join(described(error).splitlines()[:LINES_SHOWN]).rstrip(".")
        fix = host_fix(config, "cpu" if on_cpu else "cuda")
        return HostMemoryOut(message, phase, state_text(), fix)
    share = config.rollout.gpu_memory_utilization if config.rollout is not None else 0.0
    named = [
        f"{key}: {json.dumps(value).strip(chr(34))}"
        for key, value in _changes(config, phase, share - LESS if share > LESS else None)
        if _value(config, key) != value and with_value(config, key, value) is not None
    ]
    larger = "use devices with more memory"
    fix = f"set one or several of {', '.join(named)}, or {larger}" if named else larger
    message = " ".join(described(error).splitlines()[:LINES_SHOWN])
    return DeviceMemoryOut(message, phase, held(), fix)


def host_fix(config: Config, device: Device) -> str:
    """Return a fix that lowers the host memory of a run."""
    named = [
        f"{key}: {json.dumps(value).strip(chr(34))}"
        for key, value in _host_changes(config, device)
        if _value(config, key) != value
        and (changed := with_value(config, key, value)) is not None
        and (device == "cuda" or holds_a_sequence(changed))
    ]
    fix = "end other programs on that machine, or give it more memory"
    return f"{fix}; or set one or several of {', '.join(named)}" if named else fix


def _host_changes(config: Config, device: Device) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of changes that need less host memory."""
    # On a CPU, host memory also contains weights, caches and activations. All ranks share it, so
    # more ranks would not help.
    policy, rollout = config.policy, config.rollout
    if device == "cpu":
        if rollout is not None:
            yield "rollout.kv_cache_gib", rollout.kv_cache_gib / 2
            yield "rollout.max_concurrent", max(1, rollout.max_concurrent // 4)
            yield "rollout.engines", max(1, rollout.engines // 2)
        half = policy.tokens_per_micro_batch // 2
        if rollout is None or half > rollout.sampling.max_tokens:
            yield "policy.tokens_per_micro_batch", half
        yield "policy.recompute", "full"
        yield "policy.optimizer.moment_dtype", "bfloat16"
        yield "model.dtype", "bfloat16"
    else:
        yield "policy.optimizer.moment_offload", "none"
    yield "checkpoint.asynchronous", False
    if rollout is not None:
        yield "rollout.reward.workers", max(1, rollout.reward.workers // 2)


def _gpu_bytes(machine: Machine) -> int:
    """Return the memory of the largest GPU in bytes."""
    # The largest, because it is unknown which GPU a process gets.
    return max(gpu.memory for gpu in machine.gpus)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_value(config: Config, key: str, value: Any) -> Config | None:
    """Return the config with another value; null if its rules refuse it."""
    tree = config.model_dump(mode="json")
    *sections, name = key.split(".")
    place = tree
    for section in sections:
        place = place[section]
    # A change of the tree, because a Config is frozen and its rules must be checked again.
    place[name] = value
    try:
        return validated(tree)
    except ValidationError:
        return None


def gib(count: int, *, up: bool = False) -> str:
    """Return a number of bytes in GiB, as text. `up`: round up, so that a need above the available
    memory does not look equal to it."""
    tenths = 10 * count / GIB
    return f"{(math.ceil(tenths) if up else round(tenths)) / 10:.1f} GiB"

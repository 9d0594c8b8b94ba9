"""Layout of a model over ranks: process groups over Megatron's parallel state, and the shards of a
gradient.

Invariants:
- every collective of the policy runs in a group of this layout, with the deadline passed to
  `initialise`;
- ranks are ordered tensor fastest, then context, data and pipeline (Megatron's order); a pipeline
  rank holds `virtual_stages` model chunks, chunk v of rank p being stage v * pp_size + p of the
  model;
- experts are whole (never cut by tensor parallelism): a stage's ranks in order form expert-parallel
  groups of `ep_size`. For experts, the other groups are replicas, like context- and data-parallel
  ranks for other parameters;
- context-parallel ranks train the samples of one data-parallel rank, each a part of every sequence;
  their gradients add up like those of data-parallel ranks;
- exactly one rank of the world counts an element of the model's gradient
  (`GradientShard.counted`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.watchdog.events import timed_out

LONG_WAIT_TIMEOUT = timedelta(days=7)
"""Deadline of ranks while they wait for rank 0, whatever it waits for. Rank 0 notices if its own
wait makes no progress, and the watchdog notices if rank 0 makes none."""


class RankZeroFailed(RuntimeError):
    """Rank 0 raised while the other ranks waited for its result. `timed_out`: True if its error was
    an exceeded deadline."""

    consequence = True

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


@dataclass(frozen=True)
class Layout:
    """This rank's position in the layout. Groups are torch process groups; `cpu_group` is the world
    over gloo, for Python objects."""

    device_type: str
    device: torch.device
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    virtual_stages: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    tp_group: Any
    cp_group: Any
    pp_group: Any
    ep_group: Any
    replica_group: Any
    expert_replica_group: Any
    world_group: Any
    cpu_group: Any
    patient_group: Any
    """The world over gloo, for waits as long as rank 0's."""
    writing_group: Any
    """The same, for the thread that writes checkpoints."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    def dp_rank_of(self, rank: int) -> int:
        """Return the data-parallel rank of a rank of the world."""
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    @property
    def replica(self) -> int:
        """Index from 0 of this rank's copy of its parameters, except experts: its rank among the
        data- and context-parallel ranks."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def expert_replica(self) -> int:
        """Index from 0 of this rank's copy of its experts: its rank among the stage's ranks with
        the same experts."""
        return (self.replica * self.tp_size + self.tp_rank) // self.ep_size

    def replicas_of(self, parameter: torch.Tensor) -> Any:
        """Return the group of ranks that hold the same elements of a parameter, experts or not."""
        # Megatron marks experts, which have other replicas than the rest of a stage.
        divided = not getattr(parameter, "allreduce", True)
        return self.expert_replica_group if divided else self.replica_group

    @property
    def records_outputs(self) -> bool:
        """True on one of the ranks of a stage that compute the same outputs of the same samples."""
        return self.tp_rank == 0 and self.cp_rank == 0

    def is_first_chunk(self, virtual_stage: int) -> bool:
        """Return True for the chunk with the embedding."""
        return self.is_first_stage and virtual_stage == 0

    def is_last_chunk(self, virtual_stage: int) -> bool:
        """Return True for the chunk with the final norm and the output layer."""
        return self.is_last_stage and virtual_stage == self.virtual_stages - 1

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def from_rank_zero[T](self, make: Callable[[], T], group: Any = None) -> T:
        """Return the (pickled) result of `make` on every rank. It runs on rank 0 alone, as long as
        it takes. Collective. group: null for `patient_group`.

        Raises `make`'s error on rank 0, and RankZeroFailed with its text on the others.
        """
        if self.world_size == 1:
            return make()
        message: list[Any] = [None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                message = [("result", make(), False)]
            except BaseException as error:  # noqa: BLE001 - raised again below, once the other ranks are notified
                failure = error
                # As text, because an exception of a library may not survive pickling.
                message = [("failure", f"{type(error).__name__}: {error}", timed_out(error))]
        # Always reached, even after a failure, because the other ranks wait in this broadcast.
        dist.broadcast_object_list(message, src=0, group=group or self.patient_group)
        if failure is not None:
            # Only after the broadcast, so that no rank waits forever.
            raise failure
        kind, value, over = message[0]
        if kind == "failure":
            raise RankZeroFailed(value, timed_out=over)
        return value

    def gathered[T](self, mine: T, group: Any = None) -> list[T]:
        """Return the (pickled) argument of each rank, in their order. Collective over the world.
        group: null for `cpu_group`."""
        found: list[Any] = [mine] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, mine, group=group or self.cpu_group)
        return found

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add up integers over the world in place, modulo 2^64; return them. Collective."""
        if self.world_size > 1:
            on_host = numbers.device.type == "cpu"
            dist.all_reduce(numbers, group=self.cpu_group if on_host else self.world_group)
        return numbers

    def barrier(self, group: Any = None) -> None:
        """Wait for all ranks of the world. Collective. group: null for `cpu_group`."""
        if self.world_size > 1:
            dist.barrier(group=group or self.cpu_group)

    def shutdown(self) -> None:
        """Destroy the process groups; afterwards the layout is unusable."""
        from megatron.core import parallel_state

        # Megatron's groups first, because they are subgroups of the world.
        parallel_state.destroy_model_parallel()
        # Megatron-Core 0.19 keeps every group here, and with it three threads of gloo.
        parallel_state._global_process_group_list = None
        dist.destroy_process_group()


def initialise(parallel: ParallelConfig, device_type: str, timeout_s: float) -> Layout:
    """Join the ranks that torchrun started (or a world of one without torchrun). Collective.

    `timeout_s`: deadline of every collective except `from_rank_zero`. Raises ValueError if the
    ranks do not fit `parallel`.
    """
    from megatron.core import parallel_state

    from megatron_async_rl.policy import device

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != parallel.ranks:
        raise ValueError(
            f"policy.parallel.ranks is {parallel.ranks}, but {world_size} ranks were started; they"
            " must be equal"
        )
    if world_size % parallel.replica_ranks:
        raise ValueError(
            f"policy.parallel: tensor ({parallel.tensor}) x context ({parallel.context}) x pipeline"
            f" ({parallel.pipeline}) must divide ranks ({world_size})"
        )
    if world_size // parallel.pipeline % parallel.expert:
        raise ValueError(
            f"policy.parallel.expert ({parallel.expert}) must divide a stage's ranks: ranks"
            f" ({world_size}) over pipeline ({parallel.pipeline})"
        )
    # Checks precede the first collective, in which a wrong world size would hang.
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo" if device_type == "cpu" else "nccl"
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        # All ranks are on this machine, so gloo need not resolve the host's name, which containers
        # often cannot.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    return Layout(
        device_type=device_type,
        device=device.device(),
        rank=dist.get_rank(),
        world_size=world_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel.context,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel.pipeline,
        virtual_stages=parallel.virtual_pipeline,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel.expert,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_replica_group=parallel_state.get_expert_data_parallel_group(),
        world_group=dist.group.WORLD,
        cpu_group=(
            dist.group.WORLD
            if backend == "gloo"
            else dist.new_group(backend="gloo", timeout=timeout)
        ),
        # Creating groups is collective: every rank does it in this order.
        patient_group=dist.new_group(backend="gloo", timeout=LONG_WAIT_TIMEOUT),
        writing_group=dist.new_group(backend="gloo", timeout=LONG_WAIT_TIMEOUT),
    )

"""What pipeline stages send each other under the interleaved schedule, where micro-batches differ in shape.

Megatron 0.16.1 announces each tensor's shape by a message of its own. Between two interleaved stages that goes wrong twice: the
next stage is also the previous one, so that the shape of a gradient is taken for that of an activation; and a stage that waits
until its announcement is read keeps one waiting that sends to it. Nothing has to be announced here: every rank of a pipeline
knows the micro-batches, and the schedule says in which order their tensors come.

    activations   of every (micro-batch, chunk) in the schedule's order; to the first rank, which gets them from the last one for
                  its own next chunk, those of all chunks but the last
    gradients     the same, with the last rank in the place of the first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection


class StageMessages(P2PCommunicator):
    """For one run of the schedule. shapes: [length, rows, hidden] of each micro-batch's tensor between stages, in order."""

    def __init__(self, pp_group: Any, config: Any, shapes: Sequence[list[int]]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        chunks = config.virtual_pipeline_model_parallel_size
        table = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage)
        every = [shapes[micro_batch] for micro_batch, _ in table]
        round_the_ring = [shapes[micro_batch] for micro_batch, chunk in table if chunk < chunks - 1]
        rank, last = pp_group.rank(), pp_group.size() - 1
        self._activations: Iterator[list[int]] = iter(round_the_ring if rank == 0 else every)
        self._gradients: Iterator[list[int]] = iter(round_the_ring if rank == last else every)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(self._activations) if recv_prev else [0, 0, 0], next(self._gradients) if recv_next else [0, 0, 0]


def stage_messages(config: Any, micro_batches: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Keyword arguments of Megatron's schedule: the communicator, and the groups it then wants too.

    config: Megatron's, of the model. micro_batches: (rows, length) of each.
    """
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[length // parts, rows, config.hidden_size] for rows, length in micro_batches]
    return {"p2p_communicator": StageMessages(groups.pp, config, shapes), "pg_collection": groups}

"""What pipeline stages say to each other under the interleaved schedule, where micro-batches differ in shape.

Megatron 0.16.1 sends the shape of a tensor before the tensor, one batch of messages for all four directions of a rank. With two
pipeline stages the next stage is also the previous one: messages to one peer arrive in the order in which they were sent, and the
shape of a gradient (to the previous stage) would be taken for that of an activation (from it). Here activations' shapes go first,
then gradients', so that each message meets its own receiver; with more stages the order makes no difference.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


class StageMessages(P2PCommunicator):
    """Megatron's communicator with shapes exchanged one direction after the other."""

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        activation, _ = super()._communicate_shapes(tensor_send_next, None, recv_prev, False)
        _, gradient = super()._communicate_shapes(None, tensor_send_prev, False, recv_next)
        return activation, gradient


def stage_messages(config: Any) -> dict[str, Any]:
    """Keyword arguments of Megatron's schedule: the communicator, and the groups it then wants too. config: of the model."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return {"p2p_communicator": StageMessages(pp_group=groups.pp, config=config), "pg_collection": groups}

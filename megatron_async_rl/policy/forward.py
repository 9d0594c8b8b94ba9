"""Micro-batches through Megatron's schedule: hidden states -> log-probs of response tokens -> a
function that consumes them.

Invariants:
- logits exist only for positions that predict response tokens, one chunk at a time, and only on the
  last pipeline stage;
- the schedule (plain, or 1F1B over pipeline stages, interleaved over virtual ones) is Megatron's
  own; losses are summed over micro-batches, undivided;
- every rank of a pipeline runs the same micro-batches in the same order;
- with `overlap_param_gather` weights are gathered during the forward pass after `weights_moved`,
  and at no other time, so passes on only some ranks find them gathered. Other readers call
  `gather_weights` first;
- the consumer gets the outputs of all response tokens, on every context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_async_rl.policy.attention import gather_outputs
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs
from megatron_async_rl.policy.megatron_private import (
    await_parameter,
    schedule_order,
    set_gathered,
)
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.packed_sequences import repeat_rows
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.routing_replay import RoutingPass, RoutingReplay
from megatron_async_rl.products import logits_into
from megatron_async_rl.watchdog import watch


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """The model's outputs at a micro-batch's N response tokens. logp, entropy, values: with
    gradient in training.

    values: [N] of the value head; None if the objective has none.
    """

    logp: Tensor
    entropy: Tensor
    sum_p_squared: Tensor
    values: Tensor | None = None


Consume = Callable[[MicroBatch, TokenOutputs], Tensor]
"""(micro-batch, outputs) -> its part of the loss, a scalar. Runs only on the last stage."""


class Schedule:
    """Runs micro-batches through this rank's stage. `wrapped`: the chunks of `model` inside
    Megatron's DDP. `routing`: null if every pass chooses its experts, or the model has none."""

    def __init__(
        self,
        wrapped: Sequence[Any],
        model: PolicyModel,
        layout: Layout,
        *,
        temperature: float,
        logprob_chunk_tokens: int,
        routing: RoutingReplay | None = None,
    ) -> None:
        self.chunks = wrapped
        self.routing = routing
        self.model = model
        self.layout = layout
        self.temperature = temperature
        self.logprob_chunk_tokens = logprob_chunk_tokens
        settings = getattr(wrapped[0], "ddp_config", None)
        self._head_gradient: Tensor | None = None
        self._gathers_late = settings is not None and settings.overlap_param_gather
        self._moved = False
        if self._gathers_late:
            set_gathered(wrapped, True)

    def weights_moved(self) -> None:
        """Record that the optimizer has made a step."""
        if self._gathers_late:
            self._moved = True
            set_gathered(self.chunks, False)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Gather the weights of the last step on every rank. Collective over the world."""
        if self._moved:
            self._moved = False
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], consume: Consume) -> None:
        """Compute the reduced gradient of the summed losses in the gradient buffers. Collective
        over the world."""
        self.clear()
        self.accumulate(micro_batches, consume)
        self.reduce()

    def clear(self) -> None:
        """Set the gradient buffers to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def accumulate(self, micro_batches: Sequence[MicroBatch], consume: Consume) -> None:
        """Add this rank's own part of the gradient to its buffers. Collective over the ranks of one
        model replica."""
        for chunk in self.chunks:
            chunk.train()

        def loss(
            micro_batch: MicroBatch, hidden: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            outputs = self._outputs(micro_batch, hidden)
            return (
                consume(micro_batch, outputs),
                torch.zeros((), dtype=torch.int, device=hidden.device),
                {},
            )

        config = self.model.config
        # Megatron's schedule would reduce at its end, each time. `reduce` does so once, after all
        # `accumulate` calls of a step.
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        try:
            self._run(micro_batches, loss, forward_only=False)
        finally:
            config.finalize_model_grads_func = finalize
        if self._head_gradient is not None:
            # Rounded to bfloat16 once per step instead of once per chunk of tokens.
            buffer: Any = self.model.output_weight().main_grad
            buffer.add_(self._head_gradient)
            self._head_gradient = None

    def reduce(self) -> None:
        """Sum the gradient buffers over the ranks that hold parts of the same gradient. Collective
        over the world."""
        self.model.config.finalize_model_grads_func(list(self.chunks))
        if self._gathers_late:
            # Megatron mistakes the end of a reduction for that of a step.
            set_gathered(self.chunks, True)

    def divide(self, by: int) -> None:
        """Divide the gradient buffers by a number."""
        for chunk in self.chunks:
            chunk.scale_gradients(1.0 / by)

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], routing: RoutingPass = "replay"
    ) -> list[tuple[MicroBatch, TokenOutputs]]:
        """Return the outputs of the micro-batches in order on the last stage; an empty list on the
        others. Collective over a pipeline."""

        def collect(
            micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool
        ) -> tuple[MicroBatch, TokenOutputs]:
            return micro_batch, self._outputs(micro_batch, hidden)

        for chunk in self.chunks:
            # Without dropout of adapters, so that log-probs do not depend on a random state.
            chunk.eval()
        return self._run(micro_batches, collect, forward_only=True, routing=routing)

    @torch.no_grad()
    def logits(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, Tensor]]:
        """Return [n, vocabulary] float32 logits after temperature at the n positions of each
        micro-batch that this rank computes, in order, on the last stage; an empty list on the
        others. For few positions only: the whole vocabulary is gathered. Collective over tensor-
        and pipeline-parallel ranks."""
        layout, model = self.layout, self.model

        def collect(
            micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool
        ) -> tuple[MicroBatch, Tensor]:
            selected, weight = self._selected(micro_batch, hidden), model.output_weight()
            own = selected.new_empty(len(selected), len(weight), dtype=torch.float32)
            logits_into(own, selected, weight)
            parts = [own]
            if layout.tp_size > 1:
                parts = [torch.empty_like(own) for _ in range(layout.tp_size)]
                dist.all_gather(parts, own.contiguous(), group=layout.tp_group)
            # Rows beyond the true vocabulary are padding.
            whole = torch.cat(parts, dim=-1)[:, : model.vocab_size]
            return micro_batch, whole / self.temperature

        for chunk in self.chunks:
            chunk.eval()
        return self._run(micro_batches, collect, forward_only=True)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[..., Any],
        *,
        forward_only: bool,
        routing: RoutingPass = "replay",
    ) -> list[Any]:
        # Megatron's routers count the tokens of each expert, and padding must not count.
        masked = bool(self.model.config.num_moe_experts)

        def step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches)
            watch.progress("micro-batches")
            if self.routing is not None:
                self.routing.enter(micro_batch, routing)
            output = chunk(
                micro_batch.tokens,
                micro_batch.position_ids,
                None,
                packed_seq_params=micro_batch.packing,
                padding_mask=micro_batch.padding if masked else None,
            )
            return output, partial(loss, micro_batch)

        if self.routing is not None:
            self.routing.begin(trains=not forward_only)
        # Every rank of a pipeline has micro-batches of the same shapes, in the same order.
        rows, length = micro_batches[0].tokens.shape
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(micro_batches),
            # That of the first micro-batch; `StageMessages` knows the others.
            seq_length=length * self.layout.cp_size,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **(
                stage_messages(self.model.config, [tuple(m.tokens.shape) for m in micro_batches])
                if self.layout.pp_size > 1
                else {}
            ),
        )
        if self.routing is not None:
            self.routing.end()
        return results

    def _outputs(self, micro_batch: MicroBatch, hidden: Tensor) -> TokenOutputs:
        """Return the outputs from hidden [B, L, H] of the last stage. Collective over tensor- and
        context-parallel ranks."""
        selected = self._selected(micro_batch, hidden)
        weight, places = self.model.output_weight(), micro_batch.places
        if self._gathers_late:
            await_parameter(self.chunks[-1], weight)
        logp, entropy, sum_p_squared = vocab_parallel_logprobs(
            selected,
            weight,
            micro_batch.targets if places is None else micro_batch.targets[places],
            temperature=self.temperature,
            chunk=self.logprob_chunk_tokens,
            group=self.layout.tp_group,
            vocab_size=self.model.vocab_size,
            weight_gradient=self._gradient_of(weight),
        )
        head = self.model.value_head
        values = None if head is None else head(selected)
        if places is None:
            return TokenOutputs(logp, entropy, sum_p_squared, values)
        # One gather for all outputs, because each gather is a collective per micro-batch.
        own = torch.stack((logp, entropy, sum_p_squared, *([] if values is None else [values])))
        tokens = len(micro_batch.targets)
        logp, entropy, squares, *rest = gather_outputs(own, places, tokens, self.layout.cp_group)
        # `sum_p_squared` has no gradient, but the gather gave it one.
        return TokenOutputs(logp, entropy, squares.detach(), *rest)

    @staticmethod
    def _selected(micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Return the rows [n, H] of hidden [B, L, H] that predict response tokens."""
        batch, length, width = hidden.shape
        # Rows in the memory order of the stage's output, [L, B, H], so that the selection copies
        # only the selected rows.
        position = micro_batch.rows % length * batch + micro_batch.rows // length
        by_position = hidden.transpose(0, 1).reshape(length * batch, width)
        if micro_batch.packing is not None and micro_batch.packing.shared:
            # The last token of a shared prefix predicts the next token of several samples.
            return repeat_rows(by_position, position)
        return by_position.index_select(0, position)

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the buffer to which the weight's gradient may be added directly: Megatron's; or,
        if that is bfloat16 and would round each chunk of tokens, a float32 tensor of `accumulate`.
        Null if autograd must get the gradient: while buffers are reduced during the backward pass,
        Megatron requires that it gets every one."""
        settings = getattr(self.chunks[-1], "ddp_config", None)
        buffer: Tensor | None = getattr(parameter, "main_grad", None)
        if settings is None or settings.overlap_grad_reduce or buffer is None:
            return None
        if buffer.dtype != torch.bfloat16 or not torch.is_grad_enabled():
            return buffer
        if self._head_gradient is None:
            self._head_gradient = torch.zeros_like(buffer, dtype=torch.float32)
        return self._head_gradient


class StageMessages(P2PCommunicator):
    """Messages between pipeline stages in one run of a schedule, for micro-batches of different
    shapes.

    Megatron announces each tensor's shape by a separate message, and waits for it. Between two
    interleaved stages this fails for two reasons. The next stage is also the previous one, so the
    shape of a gradient is mistaken for that of an activation. And a stage that waits until its
    announcement is read blocks a stage that sends to it. No announcement is needed here: every rank
    of a pipeline knows the micro-batches, and the schedule defines the order of their tensors.

    Activations arrive for every (micro-batch, chunk) in the schedule's order. The first rank gets
    them from the last rank for its own next chunk, so it gets those of all chunks but the last;
    with one chunk it gets none. For gradients, the first and the last rank exchange their roles.

    shapes: [length, rows, hidden] of each micro-batch's tensor between stages, in order.
    """

    def __init__(self, pp_group: Any, config: Any, shapes: Sequence[list[int]]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
        table = schedule_order(config, len(shapes))
        every = [shapes[micro_batch] for micro_batch, _ in table]
        round_the_ring = [shapes[micro_batch] for micro_batch, chunk in table if chunk < last_chunk]
        rank, last = pp_group.rank(), pp_group.size() - 1
        self._activations: Iterator[list[int]] = iter(round_the_ring if rank == 0 else every)
        self._gradients: Iterator[list[int]] = iter(round_the_ring if rank == last else every)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(self._activations) if recv_prev else [0, 0, 0], (
            next(self._gradients) if recv_next else [0, 0, 0]
        )


def stage_messages(config: Any, micro_batches: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return keyword arguments of Megatron's schedule: the communicator, and the groups that it
    then needs.

    config: Megatron's, of the model. micro_batches: (rows, length) of each.
    """
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # Sequence parallelism sends each tensor-parallel rank's part of a row.
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[length // parts, rows, config.hidden_size] for rows, length in micro_batches]
    return {"p2p_communicator": StageMessages(groups.pp, config, shapes), "pg_collection": groups}

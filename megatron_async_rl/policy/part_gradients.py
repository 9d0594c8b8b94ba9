"""Gradients of parts of a batch, from the step's own loss.

    rows of a part --> micro-batches with only these samples --> loss --> reduced gradient --> sums

A step's gradient is the sum of its samples' gradients, because its loss is a sum whose denominators
are those of the whole step. The gradient of a part is therefore exact with every layout: it has the
same targets, and other samples are left out.

Invariants:
- all ranks compute the gradients of the same parts in the same order, and get the same sums;
- after `preserved`, the gradient buffers have the same content as before, bit for bit, and the
  generators of dropout continue as if no part had been computed. Meanwhile the content is in host
  memory, because a second set of buffers may not fit on the device;
- each rank reads only samples of its own share of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async_rl.gradients import Gradients, dot, squared_norm
from megatron_async_rl.policy.adam_view import gradients_of, optimizer_slices
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.checkpoint import restore_rng, rng_state
from megatron_async_rl.policy.forward import Consume, Schedule
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import whole_model_names
from megatron_async_rl.samples.rank_batch import RankBatch

BuildRows = Callable[[tuple[int, ...]], MicroBatch]
"""Function from rows of a batch to their micro-batch; () is an all-masked one."""


class PartGradients:
    """Gradients of parts of one policy's batches."""

    def __init__(
        self,
        schedule: Schedule,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        layout: Layout,
    ) -> None:
        self._schedule = schedule
        self._model = model
        self._optimizer = optimizer
        self._layout = layout

    def _gradient_of(self, micro_batches: Sequence[MicroBatch], consume: Consume) -> Gradients:
        """Return the reduced gradient of these micro-batches, in place of the step's. Collective
        over the world: every rank has equally many."""
        self._optimizer.zero_grad()
        self._schedule.forward_backward(micro_batches, consume)
        self._optimizer.prepare_grads()
        return gradients_of(self._optimizer, self._layout)

    def _norm_of(
        self,
        part: Sequence[int],
        rows: Sequence[Sequence[int]],
        build: BuildRows,
        consume: Consume,
    ) -> float:
        """Return the norm of the gradient of a part of the batch; infinite if it is not finite.
        rows: of the batch, those of each of this rank's micro-batches."""
        # The number of micro-batches does not change, because ranks with experts or stages of one
        # another must agree on it; a micro-batch without samples is a single masked token.
        kept = [tuple(row for row in own if row in set(part)) for own in rows]
        square = squared_norm(self._gradient_of([build(own) for own in kept], consume))
        return math.sqrt(square) if math.isfinite(square) else math.inf

    def _squares_of_parameters(self, gradients: Gradients) -> dict[str, float]:
        """Return name in the whole model -> |g|^2 of that parameter, the same on every rank."""
        names = {
            id(parameter): name
            for chunk in self._model.chunks
            for parameter, name in whole_model_names(self._model.bridge, chunk)
        }
        owners = [place.parameter for place in optimizer_slices(self._optimizer)]
        own: dict[str, float] = {}
        for owner, shard in zip(owners, gradients.shards, strict=True):
            if shard.counted:
                name = names[id(owner)]
                own[name] = own.get(name, 0.0) + float(dot(shard.grad, shard.grad))
        total: dict[str, float] = {}
        # Added in the order of the ranks, so every rank gets the same bits.
        for part in self._of_all_ranks(own):
            for name, square in part.items():
                total[name] = total.get(name, 0.0) + square
        return total

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        """Restore the gradient buffers and the generators of dropout afterwards."""
        saved = [buffer.to("cpu", copy=True) for buffer in self._buffers()]
        generators = rng_state(self._layout)
        yield
        self._restored(saved)
        restore_rng(generators, self._layout)

    def _buffers(self) -> list[Tensor]:
        return gradient_buffers(self._schedule.chunks)

    def _restored(self, saved: Sequence[Tensor]) -> None:
        """Restore the content of the gradient buffers."""
        self._optimizer.zero_grad()
        for buffer, before in zip(self._buffers(), saved, strict=True):
            buffer.copy_(before)
        self._optimizer.prepare_grads()

    def _gathered(self, own: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the entries of all ranks; of a row that several ranks have, one."""
        return {
            row: described for part in self._of_all_ranks(own) for row, described in part.items()
        }

    def _of_all_ranks(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(everyone, own, group=self._layout.cpu_group)
        return everyone


def described_sample(samples: RankBatch, row: int, *, whole: bool) -> dict[str, Any]:
    """Describe an own sample. whole: with all data that is needed to train on it again."""
    summary = {
        "id": samples.ids[row].as_py(),
        "reward": float(samples.rewards[row]),
        "length": int(samples.lengths[row]),
    }
    if not whole:
        return summary
    response = slice(samples.starts[row], samples.starts[row + 1])
    start, prompt = samples.token_starts[row], samples.prompt_lengths[row]
    tokens = samples.token_ids[start : start + prompt + samples.lengths[row]]
    return summary | {
        "prompt_ids": tokens[:prompt].tolist(),
        "response_ids": tokens[prompt:].tolist(),
        "loss_mask": samples.loss_mask[response].tolist(),
        "segment_starts": samples.segment_starts[row].as_py(),
        "behavior_logprobs": samples.behavior_logprobs[response].tolist(),
        "versions": samples.versions[response].tolist(),
    }


def number_or_text(value: float) -> float | str:
    """Return the number; as text if it is not finite, because JSON has no such number."""
    return value if math.isfinite(value) else str(value)

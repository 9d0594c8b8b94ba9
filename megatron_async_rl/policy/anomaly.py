"""A gradient far outside the run's own history: how it is noticed, and what it is traced to.

    anomaly      |g| > 20 times the median of the last 50 steps' norms, before the controls
    parameter    the one that holds most of |g|^2, over all ranks' shards
    samples      the smallest part of the batch found whose gradient is at least half as long as g

A gradient is the sum of its samples', so one of two halves of a batch holds at least half of it;
the longer half is halved again while it still does. One culprit is named after as many halvings as
it takes to get to one sample, about two passes over the batch in all; a gradient that many samples
make together ends with a larger part. This is exact on every layout, since each part's gradient is
made as the step's own: same micro-batches, with the other samples left out.

Invariants:
- all ranks decide by the same all-reduced norms;
- the gradient buffers hold afterwards what they held before, bit for bit; meanwhile they wait in
  host memory;
- each rank reads only samples of its own share of the batch.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_async_rl.gradients import dot, squared_norm
from megatron_async_rl.policy.adam_view import gradients_of
from megatron_async_rl.policy.megatron_private import gradient_buffers
from megatron_async_rl.policy.parameter_state import optimizer_slices
from megatron_async_rl.policy.parameters import whole_model_names

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.gradients import Gradients
    from megatron_async_rl.policy.forward import Consume, Schedule
    from megatron_async_rl.policy.microbatch import MicroBatch
    from megatron_async_rl.policy.model import PolicyModel
    from megatron_async_rl.policy.parallel import Layout
    from megatron_async_rl.samples.rank_batch import RankBatch

log = logging.getLogger(__name__)

FACTOR = 20.0
WINDOW = 50
"""Steps whose norms the median is of."""
ENOUGH = 5
"""Norms that a median has to have; fewer say nothing about a run."""
MOST = 0.5
"""Share of the gradient's length that a part of the batch must have to be named for it."""

WHOLE = 16
"""Samples that are written with their tokens; where more make the gradient together, none is."""

FILE = "anomalies.jsonl"


@dataclass(frozen=True)
class Spike:
    """norm: of the gradient before the controls. median: of the norms before it."""

    norm: float
    median: float


class NormHistory:
    """Norms of the last WINDOW gradients, anomalous ones too: when all are, they are the run's
    own."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = deque(values, maxlen=WINDOW)

    @property
    def values(self) -> list[float]:
        return list(self._values)

    def spike(self, norm: float) -> Spike | None:
        if len(self._values) < ENOUGH:
            return None
        median = statistics.median(self._values)
        return Spike(norm, median) if norm > FACTOR * median else None

    def add(self, norm: float) -> None:
        """A batch that teaches nothing has a gradient of 0, which is not how long gradients are."""
        if norm > 0.0:
            self._values.append(norm)


class AnomalyReport:
    """Traces anomalies of one policy and writes them, one JSON object a line.

    file: null writes nothing, and then samples are not traced either.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        layout: Layout,
        file: Path | None,
    ) -> None:
        self._schedule = schedule
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        self._file = file

    def write(
        self,
        spike: Spike,
        gradients: Gradients,
        *,
        step: int,
        samples: RankBatch,
        rows: Sequence[Sequence[int]],
        build: Callable[[tuple[int, ...]], MicroBatch],
        consume: Consume,
    ) -> None:
        """Collective over the world.

        rows: of `samples`, those of each of this rank's micro-batches. build, consume: a
        micro-batch of such rows, and its part of the step's loss.
        """
        squares = self._squares_of_parameters(gradients)
        parameter = max(squares, key=lambda name: squares[name])
        share = squares[parameter] / sum(squares.values())
        if self._layout.rank == 0:
            log.warning(
                "step %d: gradient norm %.4g, %.0f times the median of the last steps (%.4g);"
                " %.0f %% of its square is in %s",
                step,
                spike.norm,
                spike.norm / spike.median,
                spike.median,
                100.0 * share,
                parameter,
            )
        if self._file is None:
            return
        found = self._culprits(spike, len(samples), rows, build, consume)
        # The named ones alone: all of a batch, with their tokens, may not fit beside the model.
        named = sorted(set(found) & {row for own in rows for row in own})
        whole = len(found) <= WHOLE
        told = self._gathered({row: _told(samples, row, whole=whole) for row in named})
        record = {
            "step": step,
            "norm": spike.norm,
            "median": spike.median,
            "parameter": parameter,
            "share": share,
            "samples": [told[row] for row in found],
        }
        if self._layout.rank == 0:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            log.warning("step %d: made by %s; see %s", step, _ids(record), self._file)

    def _squares_of_parameters(self, gradients: Gradients) -> dict[str, float]:
        """Name in the whole model -> |g|^2 of that parameter, the same on every rank."""
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
        for part in self._of_all_ranks(own):
            for name, square in part.items():
                total[name] = total.get(name, 0.0) + square
        return total

    def _culprits(
        self,
        spike: Spike,
        count: int,
        rows: Sequence[Sequence[int]],
        build: Callable[[tuple[int, ...]], MicroBatch],
        consume: Consume,
    ) -> Sequence[int]:
        buffers = gradient_buffers(self._schedule.chunks)
        saved = [buffer.to("cpu", copy=True) for buffer in buffers]

        def norm_of(part: Sequence[int]) -> float:
            # The number of micro-batches stays, which ranks with experts or stages of one another
            # must agree on; one without samples is a single masked token.
            kept = [tuple(row for row in own if row in set(part)) for own in rows]
            self._optimizer.zero_grad()
            self._schedule.forward_backward([build(own) for own in kept], consume)
            self._optimizer.prepare_grads()
            return math.sqrt(squared_norm(gradients_of(self._optimizer, self._layout)))

        found: Sequence[int] = range(count)
        while len(found) > 1:
            middle = len(found) // 2
            longest, half = max(
                ((norm_of(half), half) for half in (found[:middle], found[middle:])),
                key=lambda each: each[0],
            )
            if not longest >= MOST * spike.norm:
                break
            found = half

        self._optimizer.zero_grad()
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)
        self._optimizer.prepare_grads()
        return found

    def _gathered(self, own: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {row: told for part in self._of_all_ranks(own) for row, told in part.items()}

    def _of_all_ranks(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(everyone, own, group=self._layout.cpu_group)
        return everyone


def _told(samples: RankBatch, row: int, *, whole: bool) -> dict[str, Any]:
    """An own sample; whole: with all that it takes to train on it again."""
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


def _ids(record: Mapping[str, Any]) -> str:
    ids = [sample["id"] for sample in record["samples"]]
    shown = ", ".join(ids[:4])
    return shown if len(ids) <= 4 else f"{shown} and {len(ids) - 4} others together"

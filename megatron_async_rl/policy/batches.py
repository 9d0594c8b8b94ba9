"""A train batch on its way from rank 0 to the ranks that train it.

Rank 0 alone is handed the batch. It decides which data-parallel rank owns which sample, sends
everybody the numbers of the whole batch, and each rank the token ids of its own samples, as Arrow
buffers over the CPU group: the same way for rollouts and for given responses, and on nodes that no
Ray runs on. Then it is gone through `objective.epochs` times, each time as the same
`objective.minibatches` parts in the same order: one optimizer step each, one line of metrics of
all. So a data-parallel rank keeps its samples throughout, each minibatch is balanced over the
ranks, and two consecutive optimizer steps never share a sample unless one minibatch only has
anything to train on.

Invariants:
- a group stays whole: its responses are in one minibatch;
- the division is a pure function of the groups, the version and the number of minibatches, the same
  on every rank and layout and after a resume; nothing else in the policy is drawn at random;
- minibatches differ by at most one group; where a batch has fewer groups than there are
  minibatches (rewards have failed), some are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.metrics.catalogue import METRICS
from megatron_async_rl.policy.microbatch import assign_owners
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.samples.columns import as_stream, flat, from_stream
from megatron_async_rl.samples.rank_batch import NOBODY, RankBatch, numbers_of, tokens_of
from megatron_async_rl.samples.rows import TrainBatch


def divide(group: NDArray[np.int64], version: int, minibatches: int) -> list[NDArray[np.int64]]:
    """group: [S], of the samples that are trained on. The samples of each minibatch, by number,
    rising."""
    if minibatches == 1:
        return [np.arange(len(group))]
    drawn = np.random.default_rng(version).permutation(np.unique(group))
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(drawn, minibatches)]


def split(
    batch: TrainBatch, data_parallel: int, *, minibatches: int = 1, whole_groups: bool = False
) -> tuple[pa.RecordBatch, tuple[pa.RecordBatch, ...]]:
    """Take a batch apart: the schema NUMBERS, and for each data-parallel rank the schema TOKENS.

    Each minibatch is divided by itself, so each is balanced over the ranks. whole_groups: all of a
    group belongs to one rank. A sample whose reward failed has no owner."""
    samples = batch.samples
    owner = np.full(samples.num_rows, NOBODY, dtype=np.int64)
    trained = np.flatnonzero(samples.column("valid").to_numpy(zero_copy_only=False))
    prompts, responses = (flat(samples.column(name))[1] for name in ("prompt_ids", "response_ids"))
    lengths = (prompts + responses)[trained]
    group = samples.column("group").to_numpy()[trained]
    for rows in divide(group, batch.version, minibatches):
        owner[trained[rows]] = assign_owners(
            lengths[rows], data_parallel, group[rows] if whole_groups else None
        )
    return (
        numbers_of(samples, owner),
        tuple(tokens_of(samples, np.flatnonzero(owner == rank)) for rank in range(data_parallel)),
    )


def receive(
    take: Callable[[], TrainBatch | None],
    layout: Layout,
    *,
    minibatches: int = 1,
    whole_groups: bool = False,
) -> RankBatch | None:
    """Collective. `take` runs on rank 0 alone, as long as it takes; every rank returns its view of
    the batch, or None if there is none.

    Raises on rank 0 what `take` raised, and RankZeroFailed on the others.
    """
    parts: list[pa.RecordBatch] = []
    """On rank 0: the numbers, and the tokens of each data-parallel rank."""
    buffers: list[Tensor] = []

    def announce() -> tuple[int, list[int]] | None:
        batch = take()
        if batch is None:
            return None
        numbers, tokens = split(
            batch, layout.dp_size, minibatches=minibatches, whole_groups=whole_groups
        )
        parts.extend((numbers, *tokens))
        if layout.world_size > 1:
            buffers.extend(_tensor(part) for part in parts)
        return batch.version, [len(buffer) for buffer in buffers]

    header = layout.from_rank_zero(announce)
    if header is None:
        return None
    version, sizes = header
    if layout.world_size == 1:
        return RankBatch.of(version, *parts)

    numbers = buffers[0] if buffers else torch.empty(sizes[0], dtype=torch.uint8)
    dist.broadcast(numbers, src=0, group=layout.cpu_group)

    # The tensor- and pipeline-parallel ranks of a data-parallel rank feed or predict the same
    # tokens.
    own = 1 + layout.dp_rank
    if parts:
        requests = [
            dist.isend(buffers[1 + layout.dp_rank_of(rank)], rank, group=layout.cpu_group)
            for rank in range(1, layout.world_size)
        ]
        for request in requests:
            request.wait()
        return RankBatch.of(version, parts[0], parts[own])
    tokens = torch.empty(sizes[own], dtype=torch.uint8)
    dist.recv(tokens, 0, group=layout.cpu_group)
    return RankBatch.of(version, _batch(numbers), _batch(tokens))


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps, each by its rule in the catalogue;
    a key that some steps lack is over the others."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {
        name: _over(METRICS[name].over_steps if name in METRICS else "mean", values)
        for name, values in found.items()
    }


def _over(rule: str, values: Sequence[float]) -> float:
    if len(values) == 1 or rule == "last":
        return values[-1]
    if rule == "first":
        return values[0]
    if rule == "largest":
        return float(np.max(values))
    total = float(np.sum(values))
    return total if rule == "sum" else total / len(values)


def _tensor(batch: pa.RecordBatch) -> Tensor:
    """The batch as an Arrow stream, [bytes] uint8."""
    return torch.frombuffer(bytearray(as_stream(batch)), dtype=torch.uint8)


def _batch(buffer: Tensor) -> pa.RecordBatch:
    """Views of the buffer, which they keep."""
    return from_stream(pa.py_buffer(buffer.numpy()))

"""The path of a train batch from rank 0 to the ranks that train it, and into minibatches.

Only rank 0 gets the batch. It assigns each sample to a data-parallel rank, sends the numbers of the
whole batch to every rank, and to each rank the token ids of its own samples, as Arrow buffers over
the CPU group. This is the same for rollouts and for given responses, and works on nodes without
Ray. Ranks iterate over the batch `objective.epochs` times, each time in the same
`objective.minibatches` parts in the same order: each part is one optimizer step, and all together
give one line of metrics. So a data-parallel rank keeps its samples throughout, each minibatch is
balanced over the ranks, and two consecutive optimizer steps share a sample only if just one
minibatch has trainable tokens. A minibatch is cut into micro-batches (batching.py).

With streamed groups a batch also arrives in parts before it is complete (streamed_step.py). A part
is received like a batch.

Invariants of minibatches:
- a group stays whole: its responses are in one minibatch;
- the division is a pure function of the groups, the version and the number of minibatches, the same
  on every rank and layout and after a resume; nothing else in the policy is random;
- minibatches differ by at most one group; if a batch has fewer groups than there are minibatches
  (because rewards have failed), some are empty.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.policy.packing import balanced
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.samples.columns import as_stream, flat, from_stream
from megatron_async_rl.samples.prefixes import shared_prefixes
from megatron_async_rl.samples.rank_batch import NO_RANK, RankBatch, numbers_of, tokens_of
from megatron_async_rl.samples.rows import TrainBatch


def assign_owners(
    lengths: NDArray[np.int64], data_parallel: int, group: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the data-parallel rank that trains each sample, [S]: longest first to the rank with
    fewest tokens. group: the samples' groups, if groups must stay whole."""
    if data_parallel == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int64)
    member = np.arange(len(lengths)) if group is None else np.unique(group, return_inverse=True)[1]
    # Groups are the units of balance if they must stay whole, otherwise single samples.
    tokens = np.bincount(member, lengths).astype(np.int64)
    return balanced(tokens, data_parallel)[member]


def divide(group: NDArray[np.int64], version: int, minibatches: int) -> list[NDArray[np.int64]]:
    """Return the samples of each minibatch, by number, ascending. group: [S], of the samples that
    are trained on."""
    if minibatches == 1:
        return [np.arange(len(group))]
    # Seeded by the version alone, so that every rank, every layout and a resumed run draw the same
    # division.
    drawn = np.random.default_rng(version).permutation(np.unique(group))
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(drawn, minibatches)]


def rows_of_parts(part: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the samples of each part of a step, by number, ascending. part: [S]."""
    return [np.flatnonzero(part == number) for number in np.unique(part)]


def split(
    batch: TrainBatch,
    data_parallel: int,
    *,
    minibatches: int = 1,
    whole_groups: bool = False,
    sharing: float | None = None,
) -> tuple[pa.RecordBatch, tuple[pa.RecordBatch, ...]]:
    """Split a batch into a record batch with columns NUMBERS and, for each data-parallel rank, one
    with columns TOKENS.

    Each minibatch, and each part of it, is divided separately, so each is balanced over the ranks,
    and a part has the same owners alone as in its batch. whole_groups: all of a group belongs to
    one rank. sharing: least share of the tokens that shared prefixes must save to
    be shared; null: samples share nothing. A sample whose reward failed has no owner."""
    samples = batch.samples
    owner = np.full(samples.num_rows, NO_RANK, dtype=np.int64)
    # A sample whose reward failed is in no minibatch: its owner stays NO_RANK.
    trained = np.flatnonzero(samples.column("valid").to_numpy(zero_copy_only=False))
    place = samples.column("group").to_numpy()
    part = np.array(batch.parts, dtype=np.int64)[place] if batch.parts else np.zeros_like(place)
    shared = None
    if sharing is not None:
        # Per part, because a part that arrives alone must share what it shares in its batch.
        divided = [trained[rows] for rows in rows_of_parts(part[trained])] or [trained]
        shared = pc.coalesce(*(shared_prefixes(samples, rows, minimum=sharing) for rows in divided))
    prompts, responses = (flat(samples.column(name))[1] for name in ("prompt_ids", "response_ids"))
    lengths = (prompts + responses)[trained]
    group = place[trained]
    prefixes = np.zeros_like(lengths) if shared is None else _sums(shared)[trained]
    for rows in divide(group, batch.version, minibatches):
        for own in rows_of_parts(part[trained[rows]]):
            each = rows[own]
            # Balance over the whole batch would leave single steps and parts unbalanced.
            found = _owners(
                lengths[each], prefixes[each], group[each], data_parallel, whole_groups=whole_groups
            )
            # Rotated by part: in each, the first ranks get the longest samples and the remainder.
            owner[trained[each]] = (found + part[trained[each]]) % data_parallel
    return (
        numbers_of(samples, owner, part, shared),
        tuple(tokens_of(samples, np.flatnonzero(owner == rank)) for rank in range(data_parallel)),
    )


def _owners(
    lengths: NDArray[np.int64],
    prefixes: NDArray[np.int64],
    group: NDArray[np.int64],
    data_parallel: int,
    *,
    whole_groups: bool,
) -> NDArray[np.int64]:
    """Return `assign_owners` of samples that share `prefixes`, [S] tokens of each, with the others
    of their group on the same rank: with whole groups, unless the busiest rank then computes more
    tokens than with single samples."""

    def busiest(owner: NDArray[np.int64]) -> int:
        _, first = np.unique(np.stack((owner, group)), axis=1, return_index=True)
        tokens = np.bincount(owner, lengths - prefixes) + np.bincount(owner[first], prefixes[first])
        return int(tokens.max(initial=0))

    if not prefixes.any() or data_parallel == 1:
        return assign_owners(lengths, data_parallel, group if whole_groups else None)
    first = np.unique(group, return_index=True)[1]
    rest = lengths - prefixes
    rest[first] += prefixes[first]
    together = assign_owners(rest, data_parallel, group)
    if whole_groups:
        return together
    alone = assign_owners(lengths, data_parallel)
    return together if busiest(together) <= busiest(alone) else alone


def _sums(column: pa.ListArray) -> NDArray[np.int64]:
    """Return the sum of each list of a column; 0 for null."""
    values, counts = flat(column)
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(rows, values, minlength=len(counts)).astype(np.int64)


def receive(
    take: Callable[[], TrainBatch | None],
    layout: Layout,
    *,
    minibatches: int = 1,
    whole_groups: bool = False,
    sharing: float | None = None,
) -> RankBatch | None:
    """Receive a batch from rank 0, where alone `take` runs, as long as it takes. Every rank returns
    its view of the batch, or None if there is none. Other arguments: as of `split`. Collective.

    Raises `take`'s error on rank 0, and RankZeroFailed on the others.
    """
    parts: list[pa.RecordBatch] = []
    """On rank 0: the numbers, and the tokens of each data-parallel rank."""
    buffers: list[Tensor] = []

    def announce() -> tuple[int, bool, list[int]] | None:
        batch = take()
        if batch is None:
            return None
        numbers, tokens = split(
            batch,
            layout.dp_size,
            minibatches=minibatches,
            whole_groups=whole_groups,
            sharing=sharing,
        )
        parts.extend((numbers, *tokens))
        # Serialised here, inside rank 0's part, because the header contains the sizes.
        if layout.world_size > 1:
            buffers.extend(_tensor(part) for part in parts)
        return batch.version, batch.complete, [len(buffer) for buffer in buffers]

    header = layout.from_rank_zero(announce)
    if header is None:
        return None
    version, complete, sizes = header
    if layout.world_size == 1:
        return RankBatch.of(version, *parts, complete=complete)

    numbers = buffers[0] if buffers else torch.empty(sizes[0], dtype=torch.uint8)
    # After the header, in this order on every rank: all numbers, then own tokens.
    dist.broadcast(numbers, src=0, group=layout.cpu_group)

    # The tensor- and pipeline-parallel ranks of a data-parallel rank feed or predict the same
    # tokens.
    own = 1 + layout.dp_rank
    if parts:
        requests = [
            dist.isend(buffers[1 + layout.dp_rank_of(rank)], rank, group=layout.cpu_group)
            for rank in range(1, layout.world_size)
        ]
        # The buffers must outlive the sends.
        for request in requests:
            request.wait()
        return RankBatch.of(version, parts[0], parts[own], complete=complete)
    tokens = torch.empty(sizes[own], dtype=torch.uint8)
    dist.recv(tokens, 0, group=layout.cpu_group)
    return RankBatch.of(version, _batch(numbers), _batch(tokens), complete=complete)


def _tensor(batch: pa.RecordBatch) -> Tensor:
    """Return the batch as an Arrow stream, [bytes] uint8."""
    return torch.frombuffer(bytearray(as_stream(batch)), dtype=torch.uint8)


def _batch(buffer: Tensor) -> pa.RecordBatch:
    """Return views of the buffer, which they keep alive."""
    return from_stream(pa.py_buffer(buffer.numpy()))

"""Parts of a staged version that each rank writes: of Hugging Face's tensors, out of its own
shards.

Which rows and columns those are, policy/cuts.py knows.

Invariants:
- the parts of all ranks are each tensor exactly once: vocabulary padding is left out, a tied output
  layer is the embedding, and ranks that hold the same elements divide them;
- only ranks that reach the staged memory have parts. Where those do not hold the whole model among
  them, every tensor comes whole, through rank 0 (export.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_async_rl.policy.cuts import Cut, Cuts, ParameterEntry
from megatron_async_rl.weights.export import WeightExporter
from megatron_async_rl.weights.transport import ShardSlice, TensorSpec

log = logging.getLogger(__name__)

SMALL_BYTES = 2**18
"""A shard up to this size is one rank's; ranks that hold the same divide a larger one by rows."""


_Own = tuple[ParameterEntry, list[tuple[Cut, slice | Tensor]]]
"""A parameter that this rank holds, and its cuts with their rows."""


@dataclass(frozen=True)
class RankParameters:
    """A rank of the world, as far as the parameters that it holds go."""

    rank: int
    reaches: bool
    stage: int
    tensor: int
    expert: int

    def holds(self, entry: ParameterEntry) -> bool:
        return entry.stage == self.stage and entry.owner in (None, self.expert)


class WeightShards:
    """Made once per run and used after every step. `reached`: for each rank of the world, true
    where it can write to the staged memory."""

    def __init__(self, exporter: WeightExporter, reached: Sequence[bool], max_bytes: int) -> None:
        """Collective."""
        self._exporter = exporter
        self._max_bytes = max_bytes
        layout = exporter.bridge.layout
        own = (layout.pp_rank, layout.tp_rank, layout.ep_rank)
        seats = [
            RankParameters(rank, reached[rank], *place)
            for rank, place in enumerate(layout.gathered(own))
        ]
        self._own = [] if not reached[layout.rank] else self._cut(seats, seats[layout.rank])
        self.gathered = not all(_have(seats, entry) for entry in exporter.entries)
        """The ranks that reach the memory do not hold the whole model."""
        if self.gathered and layout.rank == 0:
            log.warning(
                "ranks on other machines hold weights that no rank on this one has: every version"
                " is gathered through rank 0"
            )
        self.buckets = buckets_of(exporter.entries, max_bytes)

    def parts(self, bucket: int | None = None) -> Iterator[ShardSlice]:
        """This rank's, of the weights as they are now; a part is valid until the next one is asked
        for. Collective where `gathered`. bucket: those of one alone; not where `gathered`."""
        if self.gathered:
            assert bucket is None, "what is gathered comes in buckets of the exporter's"
            yield from self._whole_tensors()
            return
        for entry, cuts in self._own if bucket is None else self._own_by_bucket[bucket]:
            shard = self._exporter.shard(entry)
            for cut, rows in cuts:
                part, name = shard[rows], entry.hf_names[cut.tensor]
                if part.dim() == 1:
                    yield ShardSlice(name, 0, cut.first, part.reshape(1, -1))
                else:
                    yield ShardSlice(name, cut.first, cut.column, part)

    @functools.cached_property
    def _own_by_bucket(self) -> list[list[_Own]]:
        bucket_of = {spec.name: at for at, bucket in enumerate(self.buckets) for spec in bucket}
        found: list[list[_Own]] = [[] for _ in self.buckets]
        for entry, cuts in self._own:
            apart: dict[int, list[tuple[Cut, slice | Tensor]]] = {}
            for cut in cuts:
                apart.setdefault(bucket_of[entry.hf_names[cut[0].tensor]], []).append(cut)
            for at, of_bucket in apart.items():
                found[at].append((entry, of_bucket))
        return found

    def _whole_tensors(self) -> Iterator[ShardSlice]:
        for bucket in self._exporter.buckets(self._max_bytes):
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                if tensor is not None:
                    yield ShardSlice.whole(name, tensor)

    def _cut(self, seats: Sequence[RankParameters], own: RankParameters) -> list[_Own]:
        bridge = self._exporter.bridge
        cuts_of = Cuts(bridge)
        mine: list[_Own] = []
        for number, entry in enumerate(self._exporter.entries):
            if not own.holds(entry):
                continue
            holders = [
                seat.rank
                for seat in seats
                if seat.reaches
                and seat.holds(entry)
                and (entry.partition_dim is None or seat.tensor == own.tensor)
            ]
            place, cuts = holders.index(own.rank), cuts_of.of(entry)
            if entry.shard_elements * entry.dtype.itemsize > SMALL_BYTES:
                cuts = [cut.share(place, len(holders)) for cut in cuts]
            elif number % len(holders) != place:
                cuts = []
            device = bridge.layout.device
            mine.append((entry, [(cut, cut.rows(device)) for cut in cuts if len(cut.source)]))
        return mine


def _have(seats: Sequence[RankParameters], entry: ParameterEntry) -> bool:
    holders = [seat for seat in seats if seat.reaches and seat.holds(entry)]
    if entry.partition_dim is None:
        return bool(holders)
    return {seat.tensor for seat in holders} == {seat.tensor for seat in seats}


def buckets_of(entries: Sequence[ParameterEntry], max_bytes: int) -> list[list[TensorSpec]]:
    """Every tensor once, in runs of at most `max_bytes`; a larger tensor is a run by itself."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for entry in entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            spec = TensorSpec(name, entry.dtype, shape)
            if not buckets or size + spec.nbytes > max_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(spec)
            size += spec.nbytes
    return buckets

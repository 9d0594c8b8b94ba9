"""Differences between the log-probs of trainer and engine on samples that the trained version
sampled entirely, where only rounding is expected.

Invariant: a sample with one token of an older version is left out, because its later tokens were
sampled over keys and values of older weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.policy.batching import MicroBatch
from megatron_async_rl.policy.step import COLUMNS, TERMS, StepTable
from megatron_async_rl.samples.rank_batch import RankBatch

DEPTHS = 24
"""Number of depth buckets: bucket i has the tokens whose number of tokens before them is at least
2^i and below 2^(i + 1); the last has all above."""

DIVIDED = [COLUMNS.index(name) for name in ("loss", *(f"term_{term}" for term in TERMS))]
"""Columns of a step table that contain the denominator of the loss."""


@dataclass(frozen=True, kw_only=True)
class Lag0Differences:
    """Differences |logp - logp_behavior| of one step, in nats, on trained tokens at lag 0.

    tokens, sums: number of tokens and sum of the differences, by depth bucket. ids, means: each
    sample and the mean over its tokens.
    """

    tokens: tuple[int, ...]
    sums: tuple[float, ...]
    ids: tuple[str, ...]
    means: tuple[float, ...]


class Lag0Table(StepTable):
    """Step table that also adds up the differences at lag 0, [S, 2, depths] float64."""

    def __init__(self, samples: RankBatch, device: torch.device) -> None:
        super().__init__(len(samples), device)
        self._samples = samples
        self._prompts = torch.from_numpy(samples.prompt_lengths).to(device)
        # Lengths of all samples of the batch, so every rank has the same number.
        longest = int((samples.prompt_lengths + samples.lengths).max(initial=1))
        self._depths = min(DEPTHS, longest.bit_length())
        """Number of depth buckets that the batch may have."""
        # The lower bounds of all buckets but the first.
        self._powers = 2 ** torch.arange(1, self._depths, device=device)
        shape = len(samples), 2, self._depths
        self._by_depth = torch.zeros(shape, dtype=torch.float64, device=device)
        self._completed: NDArray[np.float64] | None = None
        """`_by_depth` of all ranks, on the host."""

    def _record_depths(
        self, micro_batch: MicroBatch, tokens: TokenBatch, difference: Tensor, at_lag0: Tensor
    ) -> None:
        # Depths rise along a sequence, so each cell (sequence, bucket) is a run of tokens. Sums of
        # runs have a fixed order, and bisection finds them without a copy to the host.
        cell = tokens.sequence * self._depths + self._bucket(micro_batch, tokens)
        cells = torch.arange(tokens.sequences * self._depths + 1, device=cell.device)
        offsets = torch.searchsorted(cell, cells)
        sums = [
            torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True)
            # Selected, because tokens that do not count may have any value, such as inf.
            for values in (at_lag0.double(), torch.where(at_lag0, difference, 0.0))
        ]
        # Assigned, as in the table: a second pass over the same samples replaces the first.
        self._by_depth[micro_batch.batch_samples] = torch.stack(
            [each.view(tokens.sequences, self._depths) for each in sums], dim=1
        )

    def _bucket(self, micro_batch: MicroBatch, tokens: TokenBatch) -> Tensor:
        """Return the depth bucket of each token, [N] int64."""
        numbers = torch.arange(tokens.sequences, device=tokens.sequence.device)
        first = torch.searchsorted(tokens.sequence, numbers)
        token = torch.arange(len(tokens.sequence), device=first.device)
        begins = self._prompts[micro_batch.batch_samples] - first
        # A prompt has at least one token, so the depth is at least 1.
        return torch.bucketize(token + begins[tokens.sequence], self._powers, right=True)

    def insert(self, rows: NDArray[np.int64], part: Lag0Table, divisor: int) -> None:
        """Set the rows of the samples of `part`, a table that is not complete, whose losses were
        not divided. rows: [S of the part]."""
        on_device = torch.from_numpy(rows).to(self.values.device)
        values = part.values.clone()
        values[:, DIVIDED] /= divisor
        self.values[on_device] = values
        # A part has at most as many buckets as the whole batch.
        self._by_depth[on_device, :, : part._depths] = part._by_depth

    def complete(self, group: Any) -> NDArray[np.float64]:
        # Together with the table: a step has one such collective, and one copy to the host.
        width = self.values.shape[1]
        whole = torch.cat([self.values, self._by_depth.flatten(1)], dim=1)
        dist.all_reduce(whole, group=group)
        self.values = whole[:, :width]
        on_host = whole.cpu().numpy()
        self._completed = on_host[:, width:].reshape(len(self._samples), 2, self._depths)
        return on_host[:, :width]

    def differences(self) -> Lag0Differences | None:
        """Return the completed sums; None without a token at lag 0."""
        assert self._completed is not None, "complete comes first"
        table = self._completed
        counts, sums = table[:, 0], table[:, 1]
        per_sample = counts.sum(axis=1)
        present = np.flatnonzero(per_sample)
        # Given responses were not sampled: they have no log-probs of an engine.
        if not len(present) or not self._samples.sampled.any():
            return None
        last = int(np.flatnonzero(counts.sum(axis=0))[-1]) + 1
        return Lag0Differences(
            tokens=tuple(int(count) for count in counts.sum(axis=0)[:last]),
            sums=tuple(float(total) for total in sums.sum(axis=0)[:last]),
            ids=tuple(self._samples.ids.take(pa.array(present)).to_pylist()),
            means=tuple((sums.sum(axis=1)[present] / per_sample[present]).tolist()),
        )

"""Weight versions of sampled tokens.

Engines only load newer versions, so the versions of a response never decrease; no token is newer
than the version that trains on it, and the staleness law bounds the lag of a sample's first token
by ceil(flow.async_ratio). All three are guarantees, and the bound is 0 violations. With
`selection: replay` the law bounds only the entry into the store, so lags have no bound.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_async_rl.config.problem import number_of
from megatron_async_rl.flow.staleness import max_lag
from megatron_async_rl.samples.columns import flat
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

NAME = "in-flight updates"
REMEDY = (
    "an engine loaded older weights, or a sample with too large a lag was trained on: read"
    " events.jsonl, and compare the flow settings of the run's starts"
)


class TokenAges(RunCheck):
    """Checks the order of versions along each response, and their lag in training."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._wrong = Places()
        self._samples = self._mixed = self._oldest = self._trained = 0

    def block(self, block: SampleBlock) -> None:
        self._samples += len(block)
        versions, rows = block.versions, block.rows
        falls = np.zeros(len(versions), dtype=bool)
        falls[1:] = (versions[1:] < versions[:-1]) & (rows[1:] == rows[:-1])
        changes = np.zeros(len(versions), dtype=bool)
        changes[1:] = (versions[1:] != versions[:-1]) & (rows[1:] == rows[:-1])
        self._mixed += len(np.unique(rows[changes]))
        if falls.any():
            self._note_falls(block, np.flatnonzero(falls))

    def _note_falls(self, block: SampleBlock, tokens: np.ndarray) -> None:
        starts, counts = flat(block.batch.column("segment_starts"))
        ends = np.cumsum(counts)
        for at in tokens:
            sample = int(block.rows[at])
            segments = starts[ends[sample] - counts[sample] : ends[sample]]
            place = int(at - block.starts[sample])
            # A further segment has a context of its own, which an older version may have sampled.
            if place not in segments:
                self._wrong.add(
                    f"sample {block.ids[sample]}, token {place}: version"
                    f" {block.versions[at]} after {block.versions[at - 1]}"
                )

    def ended(self, end: EndedSample) -> None:
        if end.outcome != "trained" or not end.facts.trained:
            return
        self._trained += 1
        version, facts = end.step - 1, end.facts
        age = version - facts.start
        self._oldest = max(self._oldest, age)
        if facts.last > version:
            self._wrong.add(
                f"sample {facts.id} has tokens of version {facts.last}, and version {version}"
                " trained on it"
            )
        bound = max_lag(self._records.config_of(end.step).flow.async_ratio)
        if age > bound and not self._records.replays_at(end.step):
            self._wrong.add(
                f"sample {facts.id} had lag {age} at step {end.step}; the bound is {bound}"
            )

    def result(self) -> Iterable[ScorecardRow]:
        records, bound = self._records, "versions never decrease"
        if records.config.flow.selection.name != "replay":
            bound += f"; lag at most {max_lag(records.config.flow.async_ratio)}"
            bound += ", except from a replay store" * records.any_replays
        if not self._samples:
            yield absent(NAME, "no samples were read", bound, REMEDY)
            return
        value = (
            f"{self._mixed:,} of {self._samples:,} responses span versions; largest lag"
            f" {self._oldest}"
        )
        if self._wrong:
            value = f"{number_of('violation', self._wrong.count)}; {value}"
        yield row(NAME, value, bound, not self._wrong, REMEDY, self._wrong.first)

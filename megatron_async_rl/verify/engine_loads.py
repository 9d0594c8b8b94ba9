"""Weights in the engines' memory against the trainer's, for every version that an engine loaded.

The digest of a version covers every tensor in the form that engines receive, and an engine computes
it from its own memory after the load (weights/digest.py). Equal digests mean equal bits, so the
bound is equality: a swapped shard, a missing tensor or a stale buffer changes the digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from megatron_async_rl.config.problem import UserError, number_of
from megatron_async_rl.metrics.load_log import FILE as LOADS
from megatron_async_rl.metrics.load_log import WeightLoad, read_loads
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, damaged, lost, row

NAME = "weights in engines"
BOUND = "every load has the trainer's digest"
REMEDY = (
    "do not use samples of that engine and version; check weights.transport and the engine's log,"
    " and continue from a checkpoint before that version"
)


class EngineLoads(RunCheck):
    """Compares loads.jsonl with the digests in metrics.jsonl and starts.jsonl."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._damage: UserError | None = None

    def result(self) -> Iterable[ScorecardRow]:
        records = self._records
        if not records.config.has_engines:
            yield absent(NAME, "a supervised run has no engines", BOUND, REMEDY)
            return
        # Engines may load a start's own form of its step's weights: adapters that another layout
        # merges have other bits than those of the step. The row `chain of weights` compares them.
        kept: dict[int, str] = {}
        for start in records.starts:
            kept = {step: weights for step, weights in kept.items() if step < start.step}
            kept[start.step] = start.weights
        expected = {step: {digest} for step, digest in records.digests.items()}
        for step, digest in kept.items():
            if digest:
                expected.setdefault(step, set()).add(digest)
        yield self._row(expected)

    def _read(self) -> Iterator[WeightLoad]:
        try:
            yield from read_loads(self._records.run_dir)
        except UserError as error:
            self._damage = error

    def _row(self, expected: Mapping[int, Set[str]]) -> ScorecardRow:
        wrong = Places()
        count, unknown, engines, versions = 0, 0, set[int](), set[int]()
        for load in self._read():
            digests = expected.get(load.version)
            if not digests:
                # The newest version of a running or killed run has no line of metrics yet.
                unknown += 1
                continue
            count += 1
            engines.add(load.engine)
            versions.add(load.version)
            if load.digest not in digests:
                wrong.add(
                    f"engine {load.engine}, version {load.version}: digest {load.digest}, and the"
                    f" trainer's is {' or '.join(sorted(digests))}"
                )
        if not count and self._damage:
            return damaged(NAME, self._damage, BOUND)
        if not count and not unknown and self._records.records_engines:
            return lost(NAME, LOADS, BOUND)
        if not count:
            why = "no loads.jsonl with digests: an earlier version made the run"
            return absent(NAME, why, BOUND, REMEDY)
        value = (
            f"{number_of('load', count)} of {number_of('version', len(versions))} by"
            f" {number_of('engine', len(engines))}"
        )
        if wrong:
            value = f"{wrong.count} of {value} differ"
        if unknown:
            value += f"; {unknown} that have no digest of the trainer"
        if self._damage:
            found = damaged(NAME, self._damage, BOUND, value)
            if not wrong:
                return found
            # Wrong weights before the damaged line need their own remedy.
            value = found.value
        return row(NAME, value, BOUND, not wrong, REMEDY, wrong.first)

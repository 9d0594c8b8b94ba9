"""Weights in the engines' memory against the trainer's, for every version that an engine loaded.

The digest of a version covers every tensor in the form that engines receive, and an engine computes
it from its own memory after the load (weights/digest.py). Equal digests mean equal bits, so the
bound is equality: a swapped shard, a missing tensor or a stale buffer changes the digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_async_rl.config.problem import UserError, number_of
from megatron_async_rl.metrics.load_log import read_loads
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

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

    def result(self) -> Iterable[ScorecardRow]:
        records = self._records
        if not records.config.has_engines:
            yield absent(NAME, "a supervised run has no engines", BOUND, REMEDY)
            return
        # Version 0 has no step; its digest is that of the first start.
        expected = {start.step: start.weights for start in records.starts} | records.digests
        try:
            yield from self._rows(expected)
        except UserError as error:
            fault = error.problems[0]
            yield absent(NAME, f"{fault.key} {fault.what}", BOUND, REMEDY)

    def _rows(self, expected: Mapping[int, str]) -> Iterable[ScorecardRow]:
        """Return the row. Raises UserError for a damaged file."""
        wrong = Places()
        count, unknown, engines, versions = 0, 0, set[int](), set[int]()
        for load in read_loads(self._records.run_dir):
            digest = expected.get(load.version)
            if not digest:
                # The newest version of a running or killed run has no line of metrics yet.
                unknown += 1
                continue
            count += 1
            engines.add(load.engine)
            versions.add(load.version)
            if load.digest != digest:
                wrong.add(
                    f"engine {load.engine}, version {load.version}: digest {load.digest}, and the"
                    f" trainer's is {digest}"
                )
        if not count:
            why = "no loads.jsonl with digests: an earlier version made the run"
            yield absent(NAME, why, BOUND, REMEDY)
            return
        value = (
            f"{number_of('load', count)} of {number_of('version', len(versions))} by"
            f" {number_of('engine', len(engines))}"
        )
        if wrong:
            value = f"{wrong.count} of {value} differ"
        if unknown:
            value += f"; {unknown} that have no digest of the trainer"
        yield row(NAME, value, BOUND, not wrong, REMEDY, wrong.first)

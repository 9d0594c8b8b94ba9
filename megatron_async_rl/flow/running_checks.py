"""Checks of every batch during training: bookkeeping of tokens and repeated responses. With the
policy's own checks, they cost 0.9 % of the step of one rank on the demo's batches
(benchmarks/running_checks.py).

Invariants:
- a quantity without data is left out, never 0: given responses have no engine;
- each kind of fault is reported to the user once in a process; the metrics have every step.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_async_rl.flow.summary import MetricValue
from megatron_async_rl.samples.bookkeeping import (
    Repetitions,
    SampledTokens,
    repetitions,
    trained_after_end,
    without_logprob,
)
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.watchdog.events import note

REMEDY = "; mar verify RUN lists the faults"


class RunningChecks:
    """Checks of the batches of one process. ends: tokens that end a response; empty if they are not
    known. run_dir: of the run, for notes. replays: `flow.selection: replay` draws responses with
    repetition, so repetition is not a fault."""

    def __init__(self, run_dir: Path, ends: Collection[int], *, replays: bool = False) -> None:
        self._run_dir = run_dir
        self._replays = replays
        self._ends = ends
        self._metrics: dict[str, MetricValue] = {}
        self._repeated: Repetitions | None = None
        self._reported: set[str] = set()

    def take(self, batch: TrainBatch) -> None:
        """Check a batch that will be trained."""
        self._metrics, self._repeated = {}, None
        samples = batch.samples
        reasons = samples.column("finish_reason")
        if samples.num_rows == 0 or reasons[0].as_py() == "given":
            return
        # Read once for all checks, because reading takes a large part of their time.
        tokens = SampledTokens.of(samples)
        self._metrics = {"response/without_logprob": int(without_logprob(tokens).sum())}
        if not self._replays:
            self._repeated = repetitions(tokens)
            self._metrics |= {
                "response/repeated": self._repeated.count,
                "response/repeated_expected": self._repeated.expected,
            }
        if self._ends:
            after = trained_after_end(tokens, self._ends)
            self._metrics["response/after_end"] = int(after.sum())

    def report(self, step: int) -> dict[str, MetricValue]:
        """Return the metrics of the batch taken last, after notes about new kinds of faults."""
        found = dict(self._metrics)
        for name, text in (
            ("response/after_end", "{} trained tokens follow the end of their response"),
            ("response/without_logprob", "{} trained tokens have no log-prob of their engine"),
        ):
            count = found.get(name)
            if isinstance(count, int | float) and count > 0:
                self._note(name, f"step {step}: {text.format(int(count))}")
        repeated = self._repeated
        if repeated is not None and repeated.surprising:
            self._note(
                "response/repeated",
                f"step {step}: {repeated.count} responses repeat another one of their group, where"
                f" {repeated.expected:.2g} are expected: check the seeds",
            )
        return found

    def _note(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            note(self._run_dir, text + REMEDY)

"""Sampling distribution of the engines against the trainer's, from the log alone.

If a token is drawn from p, the expectation of -log p is the entropy of p. The trainer records the
mean entropy of its distribution, and the log the engines' -log p, so at lag 0 their difference,
added up over tokens, is a martingale: it has mean 0, and a standard deviation of at most the root
of the sum of the tokens' variances. The bound is SIGMAS standard deviations, which a healthy run
exceeds once in 1.7 million. Temperature on one side, top-p without renormalisation and penalties on
one side shift the mean, whatever the dtype.

Only steps that consist of samples at lag 0 count, and only settings that neither select samples by
their length or reward nor renormalise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

NAME = "sampling distribution"
SIGMAS = 5.0
MIN_TOKENS = 256
BOUND = f"entropy and mean -log p agree within {SIGMAS:g} standard deviations"
REMEDY = (
    "make temperature, top-p, top-k and penalties equal on both sides; an engine that samples from"
    " another distribution than the trainer assumes biases every ratio"
)


class SamplingEntropy(RunCheck):
    """Adds up -log p of the engines by step, and compares with `policy/entropy`."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._entropy: dict[int, tuple[float, int]] = {}
        """Mean entropy and number of trained tokens of each step at lag 0."""
        self._sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """Tokens, sum of -log p, and of its square, by step."""

    def measured(self, row: MetricRow) -> None:
        entropy, lag = number(row, "policy/entropy"), number(row, "lag/max")
        tokens = number(row, "tokens/trained")
        if lag == 0 and entropy is not None and tokens:
            self._entropy[int(row["step"])] = (entropy, int(tokens))  # type: ignore[arg-type]

    def ended(self, end: EndedSample) -> None:
        facts = end.facts
        if end.outcome == "trained" and end.step in self._entropy and facts.valid:
            sums = self._sums[end.step]
            sums[0] += facts.trained
            sums[1] -= facts.log_prob
            sums[2] += facts.squares

    def result(self) -> Iterable[ScorecardRow]:
        if (why := self._excluded()) is not None:
            yield absent(NAME, why, BOUND, REMEDY)
            return
        tokens = difference = variance = 0.0
        for step, (count, total, squares) in self._sums.items():
            entropy, expected = self._entropy[step]
            # A step with samples that were not read would compare different tokens.
            if count != expected:
                continue
            tokens += count
            difference += total - count * entropy
            variance += squares - total * total / count
        if tokens < MIN_TOKENS or variance <= 0 or not math.isfinite(difference):
            why = f"{int(tokens)} tokens in steps entirely at lag 0; {MIN_TOKENS} are needed"
            yield absent(NAME, why, BOUND, REMEDY)
            return
        z = difference / math.sqrt(variance)
        value = (
            f"mean -log p minus entropy {difference / tokens:+.2g} nats, {z:+.1f} standard"
            f" deviations, {int(tokens):,} tokens"
        )
        yield row(NAME, value, BOUND, abs(z) <= SIGMAS, REMEDY)

    def _excluded(self) -> str | None:
        """Return why the statistic does not apply; None if it does."""
        config = self._records.config
        if config.rollout is None or not config.has_engines:
            return "a supervised run samples nothing"
        if config.rollout.sampling.renormalised:
            settings = ", ".join(config.rollout.sampling.renormalised)
            return f"{settings}: the engine samples from another distribution on purpose"
        flow = config.flow
        if flow.dynamic_sampling or flow.late == "drop" or flow.oversample:
            return "flow selects samples by reward or length, which biases -log p"
        if flow.selection.name not in ("oldest_first", "exact_lag"):
            return f"flow.selection: {flow.selection.name} selects samples by length or reward"
        if config.objective.steps_per_batch > 1:
            return "policy/entropy is a mean over several optimizer steps"
        return None

"""Sampling distribution of the engines against the trainer's, from the log alone.

If a token is drawn from p, the expectation of -log p is the entropy of p. The trainer records the
mean entropy of its distribution, and the log the engines' -log p, so at lag 0 their difference,
added up over tokens, is a martingale: it has mean 0, and a standard deviation of at most the root
of the sum of the tokens' variances. The bound is SIGMAS standard deviations, which a healthy run
exceeds once in 1.7 million, or one rounding of the dtype per token if that is more: two sides that
round differently have slightly different entropies, which enough tokens would show. Temperature,
top-p without renormalisation and penalties on one side shift the mean, whatever the dtype.

Only steps that consist of samples at lag 0 count, and only settings that neither select samples by
their length or reward nor renormalise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.verify.logprob_differences import rounding
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

NAME = "sampling distribution"
SIGMAS = 5.0
MIN_TOKENS = 256
BOUND = f"entropy and mean -log p agree within {SIGMAS:g} standard deviations, or one rounding"
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
        self._why = _excluded(records.config)

    def measured(self, row: MetricRow) -> None:
        entropy, lag = number(row, "policy/entropy"), number(row, "lag/max")
        tokens = number(row, "tokens/trained")
        if lag != 0 or entropy is None or not tokens:
            return
        step = int(row["step"])  # type: ignore[arg-type]
        # A resume may have changed the settings.
        self._why = _excluded(self._records.config_of(step))
        if self._why is None:
            self._entropy[step] = (entropy, int(tokens))

    def ended(self, end: EndedSample) -> None:
        facts = end.facts
        if end.outcome == "trained" and end.step in self._entropy and facts.valid:
            sums = self._sums[end.step]
            sums[0] += facts.trained
            sums[1] -= facts.log_prob
            sums[2] += facts.squares

    def result(self) -> Iterable[ScorecardRow]:
        if not self._entropy and self._why is not None:
            yield absent(NAME, self._why, BOUND, REMEDY)
            return
        tokens = difference = variance = minimum = 0.0
        for step, (count, total, squares) in self._sums.items():
            entropy, expected = self._entropy[step]
            # A step with samples that were not read would compare different tokens.
            if count != expected:
                continue
            tokens += count
            difference += total - count * entropy
            variance += squares - total * total / count
            # A policy that is nearly certain has variance in tokens too rare for the sample: at
            # most two tokens with probabilities 1 - q and q give about q log(q)^2.
            small = min(max(entropy, 1e-12), 1.0)
            minimum += count * small * (1.0 - math.log(small))
        if tokens < MIN_TOKENS or not math.isfinite(difference):
            why = f"{int(tokens)} tokens in steps entirely at lag 0; {MIN_TOKENS} are needed"
            if tokens >= MIN_TOKENS:
                why = "a log-prob or an entropy is not finite"
            yield absent(NAME, why, BOUND, REMEDY)
            return
        z = difference / math.sqrt(max(variance, minimum))
        value = (
            f"mean -log p minus entropy {difference / tokens:+.2g} nats, {z:+.1f} standard"
            f" deviations, {int(tokens):,} tokens"
        )
        ok = abs(z) <= SIGMAS or abs(difference) / tokens <= rounding(self._records.config)
        yield row(NAME, value, BOUND, ok, REMEDY)


def _excluded(config: Config) -> str | None:
    """Return why the statistic does not apply; None if it does."""
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

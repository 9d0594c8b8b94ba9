"""Identical responses in a group, beyond what the policy's own probabilities explain.

The recorded log-probs give the probability p of each response. Among n independent responses to a
prompt, the expected number of identical pairs is n (n - 1) / 2 times the sum of p^2 over all
responses, and (n - 1) / 2 times the sum of p over the sampled ones estimates it without bias. Two
statistics follow; the row fails if one of them is impossible:

- long responses: identical pairs are rare. The groups with one are counted, because a fault copies
  whole groups; their number is at most a Poisson variable whose mean is the sum of min(1, expected
  pairs). It must have a probability of at least TAIL at SLACK times that mean, which covers the
  estimate's error;
- short responses: every group has identical pairs. Their number minus the expected number has mean
  0 in each group, and groups are independent, so the sum over groups must be below SIGMAS times its
  standard deviation. The sum of squares estimates the variance, except for a policy that is nearly
  certain: other responses are so rare that a run may have none. A count of n pairs whose mean is
  n s has a variance of at most n^2 s (1 - s), so the larger of the two sums is used.

Pairs of one engine and pairs across engines have a row each: engines that share a seed draw the
same numbers, so only pairs across engines become more frequent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleFacts
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

SLACK, BASE, TAIL = 1.5, 0.01, 1e-6
"""Factor and constant of the Poisson mean, and the probability below which a count fails."""
SIGMAS, MIN_EXPECTED = 5.0, 10.0
"""Bound of the second statistic, and the expected number of groups from which on it applies."""
OPEN_GROUPS = 100_000
"""Largest number of groups whose samples are kept at a time."""
DUPLICATES, SEEDS = "duplicate responses", "seeds of engines"
REMEDIES = {
    DUPLICATES: "check the seeds of the engine's requests and any cache of responses: copies count"
    " as independent samples in every advantage",
    SEEDS: "give each engine, or each request, its own seed: engines that share one draw the same"
    " responses",
}


class DuplicateResponses(RunCheck):
    """Collects each group's samples until all have ended."""

    def __init__(self, records: RunRecords) -> None:
        self._size = records.config.flow.group_size
        self._supervised = not records.config.has_engines
        # The store draws distinct responses with repetition, by their rewards.
        self._replays = records.any_replays
        self._groups: dict[int, list[SampleFacts]] = {}
        self._expected = {DUPLICATES: 0.0, SEEDS: 0.0}
        self._found = {DUPLICATES: Places(), SEEDS: Places()}
        self._counted = {DUPLICATES: 0, SEEDS: 0}
        self._excess = {DUPLICATES: [0.0, 0.0, 0.0], SEEDS: [0.0, 0.0, 0.0]}
        """Sum over the groups of identical pairs minus expected ones, of its square, and of the
        bound of its variance."""

    def ended(self, end: EndedSample) -> None:
        if end.outcome not in ("trained", "dropped") or not end.facts.trained or self._replays:
            return
        members = self._groups.setdefault(end.facts.group, [])
        members.append(end.facts)
        if len(members) >= self._size:
            self._close(end.facts.group)
        elif len(self._groups) > OPEN_GROUPS:
            # A group that was dropped early never has all its samples.
            self._close(next(iter(self._groups)))

    def _close(self, group: int) -> None:
        members = self._groups.pop(group)
        for name, same_engine in ((DUPLICATES, True), (SEEDS, False)):
            pairs = [
                (one, other)
                for place, one in enumerate(members)
                for other in members[:place]
                if (one.engine == other.engine) is same_engine
            ]
            if not pairs:
                continue
            self._counted[name] += 1
            # The mean of the two probabilities estimates the probability of this pair.
            chance = sum((_probability(one) + _probability(other)) / 2 for one, other in pairs)
            self._expected[name] += min(1.0, chance)
            equal = [pair for pair in pairs if pair[0].digest == pair[1].digest]
            excess = len(equal) - chance
            self._excess[name][0] += excess
            self._excess[name][1] += excess * excess
            # Rounded probabilities may exceed 1.
            share = min(1.0, chance / len(pairs))
            self._excess[name][2] += len(pairs) ** 2 * share * (1.0 - share)
            if equal:
                one, other = equal[0]
                self._found[name].add(
                    f"group {group}: {len(equal)} identical pairs, such as {other.id} (engine"
                    f" {other.engine}) and {one.id} (engine {one.engine}); expected {chance:.2g}"
                )

    def result(self) -> Iterable[ScorecardRow]:
        for group in list(self._groups):
            self._close(group)
        for name in (DUPLICATES, SEEDS):
            yield self._row(name)

    def _row(self, name: str) -> ScorecardRow:
        groups, found = self._counted[name], self._found[name]
        bound = f"as many as the log-probs explain (within {SIGMAS:g} standard deviations)"
        if not groups:
            why = "no group has two samples of one engine"
            if name == SEEDS:
                why = "no group has samples of two engines"
            if self._supervised:
                why = "a supervised run samples nothing"
            elif self._replays:
                why = "flow.selection: replay draws samples again"
            return absent(name, why, bound, REMEDIES[name])
        mean = SLACK * self._expected[name] + BASE
        ok = poisson_tail(found.count, mean) >= TAIL
        value = (
            f"{found.count} of {groups} groups have identical responses, expected at most"
            f" {self._expected[name]:.4g}"
        )
        total, squares, bounds = self._excess[name]
        variance = max(squares, bounds)
        # The sum is near a normal variable only if pairs are frequent.
        if self._expected[name] >= MIN_EXPECTED and variance > 0:
            sigmas = total / math.sqrt(variance)
            ok = ok and sigmas <= SIGMAS
            value += f"; pairs {sigmas:+.1f} standard deviations from expected"
        return row(name, value, bound, ok, REMEDIES[name], () if ok else found.first)


def _probability(facts: SampleFacts) -> float:
    # A log-prob that is not a number has a row of its own.
    return math.exp(min(0.0, facts.log_prob)) if math.isfinite(facts.log_prob) else 0.0


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability that a Poisson variable is at least `count`."""
    if count <= mean:
        return 1.0
    # From `count` on, each term is smaller than the one before: the sum converges fast.
    term = math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1))
    total, at = 0.0, count
    while term > total * 1e-12:
        total += term
        at += 1
        term *= mean / at
    return min(1.0, total)

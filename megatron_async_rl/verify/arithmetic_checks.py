"""Arithmetic: the numbers of metrics.jsonl against those of the sample log, and the schedule.

Tokens and samples are counts, so their bound is equality; means of rewards and lengths are sums of
the same numbers in another order, so their bound is TOLERANCE relative to their size. Steps whose
samples are not all in the log are left out.

Engines report the tokens that they sampled. Every trained token was sampled, so there are at least
as many; and every sampled token is in a finished sample, in flight, or was aborted, so there are at
most as many as those. A resume loses the counts since the last line of metrics, so the lower bound
has one window of samples for each resume. The upper bound is for runs without a resume and without
an environment, which may leave sampled tokens out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_async_rl.config.problem import number_of
from megatron_async_rl.flow.staleness import max_lag
from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.policy.learning_rate import learning_rate
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

TOLERANCE = 1e-6
COUNTS, GENERATED, SCHEDULE = "denominators", "generated tokens", "learning rate"
COUNT_BOUND = "trained tokens, rewards and lengths equal those of the log"
GENERATED_BOUND = "at least the trained tokens; at most those finished, in flight or aborted"
LR_BOUND = "each step has the rate of the schedule"
COUNT_REMEDY = (
    "the loss was divided by other counts than those of its batch: compare metrics.jsonl with"
    " `mar samples RUN --step STEP` at the named steps"
)
GENERATED_REMEDY = (
    "engines reported fewer tokens than were trained on, or reported tokens were lost: check"
    " events.jsonl and the engines' logs for lost responses"
)
LR_REMEDY = (
    "the optimizer used another learning rate than the config: check policy.optimizer and run.steps"
    " of every start"
)
MEANS = ("reward/mean", "response/length_mean")


class TokenCounts(RunCheck):
    """Adds up samples by step, and compares with the lines of metrics."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._lines: dict[int, dict[str, float]] = {}
        self._sums: dict[int, list[float]] = {}
        """Samples, valid samples, trained tokens, rewards, and lengths of valid samples."""
        self._generated = self._trained = 0
        self._finished = 0
        self._last: MetricRow = {}

    def measured(self, row: MetricRow) -> None:
        kept = ("tokens/trained", "reward/errors", *MEANS)
        values = {name: number(row, name) for name in kept}
        self._lines[int(row["step"])] = {  # type: ignore[arg-type]
            name: value for name, value in values.items() if value is not None
        }
        self._generated += int(number(row, "tokens/generated") or 0)
        self._last = row

    def block(self, block: SampleBlock) -> None:
        self._finished += int(block.mask.sum())

    def ended(self, end: EndedSample) -> None:
        if end.outcome != "trained" or end.step not in self._lines:
            return
        sums = self._sums.setdefault(end.step, [0, 0, 0, 0.0, 0])
        facts = end.facts
        self._trained += facts.trained
        sums[0] += 1
        if facts.valid:
            sums[1] += 1
            sums[2] += facts.trained
            sums[3] += facts.reward
            sums[4] += facts.tokens

    def result(self) -> Iterable[ScorecardRow]:
        yield self._counts_row()
        yield self._generated_row()

    def _counts_row(self) -> ScorecardRow:
        wrong, compared = Places(), 0
        for step, sums in sorted(self._sums.items()):
            flow = self._records.config_of(step).flow
            if self._records.replays_at(step) or sums[0] != flow.prompts_per_step * flow.group_size:
                continue
            compared += 1
            samples, valid, tokens, rewards, lengths = sums
            expected = {"tokens/trained": tokens, "reward/errors": samples - valid}
            if valid:
                expected |= {
                    "reward/mean": rewards / valid,
                    "response/length_mean": lengths / valid,
                }
            for name, summed in expected.items():
                found = self._lines[step].get(name)
                if found is not None and not _equal(found, summed, exact=name not in MEANS):
                    wrong.add(f"step {step}: {name} is {found:.9g}, and the log has {summed:.9g}")
        if not compared:
            why = "no step has all its samples in the log"
            if not self._records.config.has_engines:
                why = "a supervised run logs no samples"
            elif self._records.any_replays:
                why = "flow.selection: replay draws samples again"
            return absent(COUNTS, why, COUNT_BOUND, COUNT_REMEDY)
        value = f"{compared} of {len(self._lines)} steps compared"
        if wrong:
            value = f"{number_of('difference', wrong.count)}; {value}"
        return row(COUNTS, value, COUNT_BOUND, not wrong, COUNT_REMEDY, wrong.first)

    def _generated_row(self) -> ScorecardRow:
        config, generated = self._records.config, self._generated
        whole = len(self._sums) == len(self._lines)
        once = whole and not self._records.any_replays
        if config.rollout is None or not config.has_engines or not once:
            why = "the log does not have the samples of all steps, each once"
            if not config.has_engines:
                why = "a supervised run samples nothing"
            return absent(GENERATED, why, GENERATED_BOUND, GENERATED_REMEDY)
        starts = max(1, len(self._records.starts))
        longest = config.rollout.sampling.max_tokens
        step_tokens = config.flow.prompts_per_step * config.flow.group_size * longest
        # A resume loses the counts of at most the groups in flight.
        window = (max_lag(config.flow.async_ratio) + 2) * step_tokens
        minimum = self._trained - (starts - 1) * window
        lost = sum(number(self._last, name) or 0 for name in ("flow/in_flight", "flow/aborted"))
        lost += (number(self._last, "engine/restarts") or 0) * config.rollout.max_concurrent
        # An environment may leave sampled tokens out of its sample, or begin a response again.
        bounded = starts == 1 and config.rollout.environment is None
        maximum = self._finished + lost * longest if bounded else math.inf
        value = (
            f"{generated:,} generated; {self._trained:,} trained, {self._finished:,} in finished"
            " samples"
        )
        ok = minimum <= generated <= maximum
        return row(GENERATED, value, GENERATED_BOUND, ok, GENERATED_REMEDY)


def _equal(one: float, other: float, *, exact: bool) -> bool:
    if exact:
        return one == other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


class LearningRates(RunCheck):
    """Compares each step's learning rate with the schedule of the settings that made it."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        made_of = {config.objective.steps_per_batch for _, config in records.configs}
        # The schedule counts optimizer steps: after such a change their number is not known.
        self._unknown = len(made_of) > 1
        self._steps = 0
        self._wrong = Places()

    def measured(self, row: MetricRow) -> None:
        found = number(row, "policy/lr")
        if found is None or self._unknown:
            return
        step = int(row["step"])  # type: ignore[arg-type]
        config = self._records.config_of(step)
        each, total = config.objective.steps_per_batch, config.optimizer_steps
        rates = [
            learning_rate(config.policy.optimizer, (step - 1) * each + place, total)
            for place in range(each)
        ]
        expected = sum(rates) / each
        self._steps += 1
        if not math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-15):
            self._wrong.add(f"step {step}: {found:.9g}, and the schedule gives {expected:.9g}")

    def result(self) -> Iterable[ScorecardRow]:
        if not self._steps:
            why = "metrics.jsonl has no policy/lr"
            if self._unknown:
                why = "a resume changed the optimizer steps per batch"
            yield absent(SCHEDULE, why, LR_BOUND, LR_REMEDY)
            return
        value = number_of("step", self._steps)
        if self._wrong:
            value = f"{self._wrong.count} of {value} differ"
        yield row(SCHEDULE, value, LR_BOUND, not self._wrong, LR_REMEDY, self._wrong.first)

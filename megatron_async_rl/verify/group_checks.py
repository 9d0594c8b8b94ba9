"""Groups: their sizes, their rewards, and the groups that were dropped.

Every trained group has flow.group_size samples and is trained in one step, without exception; only
a replay store draws single samples, and draws them again. A reward that fails leaves its sample out
of training, so more than MAX_ERRORS of the samples is a fault of the reward or the data; less than
MIN_ERRORS of them show nothing.
A drop selects: dropped responses that are much longer or shorter than trained ones bias what the
policy learns. The bound applies from MIN_DROPPED of the responses on; groups of equal rewards are
left out, because they have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

SIZES, DROPPED = "groups", "dropped groups"
MAX_ERRORS = 0.05
MIN_ERRORS = 3
MIN_DROPPED = 0.05
LENGTH_RATIO = 1.5
MIN_RESPONSES = 32
KNOWN_GROUPS = 100_000
"""Number of trained groups whose steps are known."""
SIZE_REMEDY = (
    "a group of another size lost samples, so its advantages have another baseline; a group that"
    " trained again counts twice: read events.jsonl. If rewards failed, read"
    " logs/*.reward_errors.jsonl, and fix the reward or the named rows"
)
DROP_REMEDY = (
    "raise flow.async_ratio or the time limits, or set flow.late: wait. Dropping by length biases"
    " the policy towards the remaining responses"
)


class GroupSizes(RunCheck):
    """Counts the samples of each trained group, and the rewards that failed."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._size = records.config.flow.group_size
        self._open: dict[tuple[int, int], int] = {}
        self._step = 0
        self._first: int | None = None
        """First step with samples in the log."""
        self._steps: dict[int, int] = {}
        """Step in which each of the newest groups trained."""
        self._wrong, self._again = Places(), Places()
        self._groups = self._errors = self._finished = 0
        self._equal: list[float] = [0.0, 0.0]
        """Sum of the shares of groups with equal rewards, and number of steps."""

    def measured(self, row: MetricRow) -> None:
        share = number(row, "reward/equal_groups")
        if share is not None:
            self._equal[0] += share
            self._equal[1] += 1

    def ended(self, end: EndedSample) -> None:
        self._finished += 1
        self._errors += not end.facts.valid
        if end.outcome == "trained":
            self._add(end.step, end.facts.group)

    def unread(self, outcome: Mapping[str, Any]) -> None:
        # Older samples of a group may be in a segment that was deleted.
        if outcome["outcome"] == "trained":
            self._add(outcome["step"], outcome["group"])

    def _add(self, step: int, group: int) -> None:
        if self._records.replays_at(step):
            return
        if step != self._step:
            self._close()
            self._step = step
        if self._first is None:
            self._first = step
        before = self._steps.get(group, step)
        if before != step and (step, group) not in self._open:
            self._again.add(f"group {group} trained at step {before}, and again at step {step}")
        self._open[step, group] = self._open.get((step, group), 0) + 1
        self._steps[group] = step
        if len(self._steps) > KNOWN_GROUPS:
            del self._steps[next(iter(self._steps))]

    def _close(self) -> None:
        size = self._records.config_of(self._step).flow.group_size
        for (step, group), count in self._open.items():
            self._groups += 1
            # The first step of a log without its oldest segments may be there in part.
            if count != size and (step > (self._first or 0) or step == 1):
                self._wrong.add(f"step {step}, group {group}: {count} samples of {size}")
        self._open.clear()

    def result(self) -> Iterable[ScorecardRow]:
        self._close()
        maximum = f"{MAX_ERRORS:.0%} (or {MIN_ERRORS - 1})"
        bound = f"{self._size} samples and one step each; at most {maximum} reward errors"
        if not self._finished:
            yield absent(SIZES, "no samples were read", bound, SIZE_REMEDY)
            return
        errors = self._errors / self._finished
        value = f"{self._groups:,} trained groups; {errors:.1%} reward errors"
        if self._equal[1]:
            value += f"; {self._equal[0] / self._equal[1]:.0%} with equal rewards"
        if self._wrong:
            value = f"{self._wrong.count} of another size; {value}"
        if self._again:
            value = f"{self._again.count} trained again; {value}"
        many = errors > MAX_ERRORS and self._errors >= MIN_ERRORS
        details = [*self._again.first, *self._wrong.first]
        if many:
            details.insert(0, f"{self._errors:,} of {self._finished:,} rewards failed")
        yield row(
            SIZES, value, bound, not (self._wrong or self._again or many), SIZE_REMEDY, details
        )


class DroppedGroups(RunCheck):
    """Compares the lengths and rewards of dropped and of trained responses."""

    def __init__(self, records: RunRecords) -> None:
        self._supervised = not records.config.has_engines
        self._dropped, self._trained, self._equal = _Mean(), _Mean(), 0

    def ended(self, end: EndedSample) -> None:
        if end.outcome == "dropped" and end.reason == "equal":
            self._equal += 1
        elif end.outcome == "dropped":
            self._dropped.add(end)
        elif end.outcome == "trained":
            self._trained.add(end)

    def result(self) -> Iterable[ScorecardRow]:
        bound = f"lengths within a factor of {LENGTH_RATIO:g}, if {MIN_DROPPED:.0%} are dropped"
        dropped, trained = self._dropped, self._trained
        if self._supervised or not trained.count:
            yield absent(DROPPED, "no samples were read", bound, DROP_REMEDY)
            return
        share = dropped.count / (dropped.count + trained.count)
        value = f"{dropped.count:,} responses ({share:.1%}) dropped"
        if self._equal:
            value += f", and {self._equal:,} with equal rewards"
        ok = True
        if dropped.count:
            ratio = dropped.length / max(trained.length, 1e-9)
            value += (
                f"; mean length {dropped.length:.3g} against {trained.length:.3g}, mean reward"
                f" {dropped.reward:.3g} against {trained.reward:.3g}"
            )
            far = max(ratio, 1 / max(ratio, 1e-9)) > LENGTH_RATIO
            ok = not (far and share >= MIN_DROPPED and dropped.count >= MIN_RESPONSES)
        yield row(DROPPED, value, bound, ok, DROP_REMEDY)


class _Mean:
    """Mean length and reward of responses."""

    def __init__(self) -> None:
        self.count = self._tokens = self._valid = 0
        self._rewards = 0.0

    def add(self, end: EndedSample) -> None:
        self.count += 1
        self._tokens += end.facts.tokens
        if end.facts.valid:
            self._valid += 1
            self._rewards += end.facts.reward

    @property
    def length(self) -> float:
        return self._tokens / max(self.count, 1)

    @property
    def reward(self) -> float:
        return self._rewards / max(self._valid, 1)

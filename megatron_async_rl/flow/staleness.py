"""The staleness law: how many prompt groups may have been admitted, and the step at which each must
have trained.

B = prompts per step, alpha = async_ratio (may be fractional), A = ceil(alpha). Step c trains
version c and consumes B groups. Under version v, which an engine holds, groups are admitted only as
long as

    admitted - dropped  <=  (v + 1) B + ceil(alpha B)   (the budget; ROLL Flash, arXiv 2510.11345)

and a group admitted under v has the deadline v + A: the last step that may train on it. Requests of
the group go only to engines that hold v or newer weights, also after a loss, and an engine's
weights only move forward, so its first token comes from a version start >= v, whether or not
weights change while it is being sampled; a group consumed by its deadline has lag c - start <= A.
Engines need not hold the same version: a slower engine gets requests of older groups only.

Why every deadline can be met. Call the plan feasible at step c if for every c' >= c at most
(c' - c + 1) B groups that are not consumed yet have a deadline <= c'. Then some choice of B groups
for step c leaves a plan that is feasible at c + 1 (the most urgent groups are such a choice), so by
induction no deadline is ever missed. The plan is always feasible:
- Admission keeps it feasible. Step c has consumed cB groups before it. By the budget, with
  ceil(alpha B) <= A B, at most (v + 1 + A) B - cB = (d - c + 1) B groups remain, whatever their
  deadlines, where d = v + A is the deadline of the new group. The new group counts only at c' >= d,
  where this suffices; nothing changes at c' < d. The versions under which the other groups were
  admitted do not matter.
- Selection takes only batches that leave the plan feasible (`scheduler.py`). The oldest groups are
  such a batch: versions of admission never fall from one group to the next, so the oldest are the
  most urgent. Waiting keeps the plan feasible, too: pacing costs time, but never breaks the bound.
- Dropping a group permits one more admission, and reduces every count that included the group.
- Over-sampling (`oversample`) adds to the budget only up to A B, as assumed above.

With alpha = 0 a group is admitted only at the version that trains on it: synchronous.

A run may begin with F fresh steps, for controls that calibrate on synchronous data: below version F
budget and deadline are those of alpha = 0. The budget is never above the law's, so all of the above
holds; a group admitted at v < F trains at v, and a group admitted at v >= F at v or later: steps 0
.. F - 1 train on lag 0 only. (Versions of the run count: a run resumed at b has F - b fresh steps
left.)

A run may begin with groups that an earlier run left: no more than the budget permits, and only with
deadlines for which the plan is feasible at its first step. From there on all of the above holds.

The duration of a response does not occur above: the bound does not rely on timing. It bounds the
lag of data that trains as soon as it is taken; responses that a replay store returns later have any
age.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from functools import cache

from megatron_async_rl.config.flow import ExactLag, FlowConfig
from megatron_async_rl.samples.rows import SampleRow


class StalenessViolated(RuntimeError):
    """A sample is older than the law permits. By the proof above this cannot happen: it means a
    wrong version stamp."""


@cache
def max_lag(async_ratio: float) -> int:
    """Largest version_now - start_version that any consumed sample may have."""
    return math.ceil(as_written(async_ratio))


def admitted_limit(
    version: int,
    prompts_per_step: int,
    async_ratio: float,
    fresh_steps: int,
    oversample: float,
) -> int:
    """Return the number of groups that may have been admitted, in all, under `version` (0 for a new
    run)."""
    ahead = 0
    if version >= fresh_steps:
        wanted = as_written(async_ratio) + as_written(oversample)
        # The proof assumes a budget of at most A B ahead.
        share = min(wanted, Fraction(max_lag(async_ratio)))
        # ceil(alpha B), exact: `share` is a Fraction.
        ahead = math.ceil(share * prompts_per_step)
    return (version + 1) * prompts_per_step + ahead


def deadline(version: int, async_ratio: float, fresh_steps: int) -> int:
    """Return the last step that may train on a group admitted at `version`."""
    return version + (max_lag(async_ratio) if version >= fresh_steps else 0)


def is_feasible(due: Mapping[int, int], step: int, prompts_per_step: int) -> bool:
    """Return True if all groups can be consumed in time, B per step, from `step` on. `due`: number
    of groups by deadline."""
    by_then = 0
    for last in sorted(last for last, count in due.items() if count):
        # At c' = last, at most (c' - c + 1) B groups may be due.
        by_then += due[last]
        if last < step or by_then > (last - step + 1) * prompts_per_step:
            return False
    return True


def check_lags(
    samples: Iterable[SampleRow],
    version: int,
    flow: FlowConfig,
    first_versions: Collection[int],
    fresh_steps: int,
) -> None:
    """Raise StalenessViolated unless every sample may train `version`.

    `first_versions`: versions at which too few groups were waiting; groups that exact_lag admits
    under them have less lag.
    """
    exact = isinstance(flow.selection, ExactLag)
    for sample in samples:
        start = sample.start_version
        due = deadline(start, flow.async_ratio, fresh_steps)
        if version > due:
            raise StalenessViolated(
                f"sample {sample.id} starts at version {start}, {version - start} behind {version};"
                f" flow.async_ratio {flow.async_ratio:g} permits {due - start}"
                + (f" in the run's {fresh_steps} fresh steps" if start < fresh_steps else "")
            )
        if exact and (
            start != sample.last_version or (version != due and start not in first_versions)
        ):
            raise StalenessViolated(
                f"sample {sample.id} has tokens of versions {start} to {sample.last_version} and"
                f" trains {version}; flow.selection: exact_lag needs all of them to be of one"
                f" version, {due - start} before"
            )


@cache
def as_written(ratio: float) -> Fraction:
    """Return the decimal that the user wrote: in binary, 1.1 * 10 is above 11 and would admit one
    group too many."""
    return Fraction(repr(float(ratio)))

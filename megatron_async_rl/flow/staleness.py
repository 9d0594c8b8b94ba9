"""The staleness law: how many prompt groups may have been admitted, and the step at which each must
have trained.

B = prompts per step, alpha = async_ratio (may be fractional), A = ceil(alpha). Step c trains
version c and consumes B groups. Under version v, which an engine holds, groups are admitted only as
long as

    admitted - dropped  <=  (v + 1) B + ceil(alpha B)   (the budget; ROLL Flash, arXiv 2510.11345)

and a group admitted under v has the deadline v + A: the last step that may train on it. Only
engines that hold v or newer weights are asked for it, then and after a loss, and an engine's
weights only move forward, so its first token comes from a version start >= v, whether or not
weights change while it is being sampled; a group consumed by its deadline has lag c - start <= A.
Engines need not hold the same version: a slower engine gets requests of older groups only.

Why every deadline can be met. Say the plan is feasible at step c when for every c' >= c at most
(c' - c + 1) B groups that are not consumed yet have a deadline <= c'. Then some choice of B groups
for step c leaves a plan that holds at c + 1 (the most urgent first does), so by continuing no
deadline is ever missed. And the plan always holds:
- Admission keeps it. Step c has consumed cB groups before it. By the budget, with ceil(alpha B) <=
  A B, at most (v + 1 + A) B - cB = (d - c + 1) B groups of whatever deadline are left over, where
  d = v + A is the deadline of the new one. That one counts only at c' >= d, where this suffices; c'
  < d is as before. Nothing is assumed of the versions that others were admitted under.
- Selection takes only batches that leave the plan feasible (`scheduler.py`). Taking the oldest
  does: versions of admission never fall from one group to the next, so the oldest are the most
  urgent. So does waiting: pacing costs time, never a bound.
- Dropping a group makes room for one more, and takes one from every count it was in.
- Over-sampling (`oversample`) adds to the budget only up to A B, which is what the above uses.

With alpha = 0 a group is admitted only at the version that trains on it: synchronous.

A run may begin with F fresh steps, for controls that calibrate on synchronous data: below version F
budget and deadline are those of alpha = 0. The budget is never above the law's, so all of the above
holds; a group admitted at v < F trains at v, and a group admitted at v >= F at v or later: steps 0
.. F - 1 train on lag 0 only. (Versions of the run count: a run resumed at b has F - b fresh steps
left.)

A run may begin with groups that a former one left: with no more than the budget permits, and only
with such deadlines that the plan holds at its first step. From there on all of the above holds.

How long a response takes never enters: the bound does not rely on timing. It is a bound on what is
trained as soon as it is taken; what a replay store gives out again later has whatever age it has.
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
        # The proof uses a budget of at most A B ahead.
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

    `first_versions`: versions before which there was too little to wait behind; groups that
    exact_lag admits under them have less lag.
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

"""The staleness law: how many prompt groups may have been admitted while the policy is at a version.

B = prompts per step, alpha = async_ratio (may be fractional). Groups are numbered 0, 1, 2, ... in the order they are
admitted, and step c (the one that trains version c) consumes exactly the groups cB .. cB + B - 1. At version v only
groups with a number below admitted_limit(v) = (v + 1) B + ceil(alpha B) may be admitted (ROLL Flash, arXiv 2510.11345).

Why that bounds the lag of every sample by ceil(alpha). Let group i be admitted at version v and consumed at version c.
    i <= (v + 1) B + ceil(alpha B) - 1                              it was admitted
    c  = floor(i / B) <= v + 1 + floor((ceil(alpha B) - 1) / B)     it is consumed in order
       = v + ceil(ceil(alpha B) / B)                                floor((k - 1) / B) = ceil(k / B) - 1 for whole k
       = v + ceil(alpha)                                            nested ceilings
Engines load version v before the controller may admit under v, and weights only move forward, so the sample's first
token comes from a version start >= v, whether or not weights change while it is being sampled. Hence
c - start <= ceil(alpha). With alpha = 0 a group is admitted only at the version that trains on it: synchronous.

A run may begin with F fresh steps, for controls that calibrate on synchronous data: below version F the limit is that of
alpha = 0. It is never above the limit of the law, so the bound holds throughout. A group admitted at v < F has
i <= (v + 1) B - 1, so it is consumed at c <= v, and c >= v because weights only move forward: lag 0. A group admitted at
v >= F is consumed at c >= F. So steps 0 .. F - 1 train on lag 0 only. (Versions of the run count, so a run resumed at version
b has F - b fresh steps left.)

Groups may be dropped once they have finished (`flow.filter_equal_groups`), each for one more admitted: with D dropped so far the
limit is admitted_limit(v) + D. A group admitted then as number i <= (v + 1) B + ceil(alpha B) + D - 1 comes after all D of them,
so it is at most the (i - D)-th that is consumed, and i - D obeys the first line above: the bound holds as before.

How long a response takes never enters: the bound does not rely on timing, only on consuming in admission order.
"""

from __future__ import annotations

import math
from fractions import Fraction


class StalenessViolated(RuntimeError):
    """A sample is older than the law permits. The proof above says this cannot happen: it means a wrong version stamp."""


def max_lag(async_ratio: float) -> int:
    """Largest version_now - start_version that any consumed sample may have."""
    return math.ceil(_exact(async_ratio))


def admitted_limit(version: int, prompts_per_step: int, async_ratio: float, fresh_steps: int = 0) -> int:
    """Groups that may have been admitted, in all, by the time the policy is at `version` (0 for a new run)."""
    ahead = math.ceil(_exact(async_ratio) * prompts_per_step) if version >= fresh_steps else 0
    return (version + 1) * prompts_per_step + ahead


def _exact(async_ratio: float) -> Fraction:
    """The decimal the user wrote: in binary, 1.1 * 10 is above 11 and would admit one group too many."""
    return Fraction(repr(float(async_ratio)))

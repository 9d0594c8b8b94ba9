"""The comparisons that PLAN.md names, on the fresh seeds, each method at the rate that the scan
chose.

Holm's correction goes over the comparisons of a family: those that one question names at one task,
batch and lag. It counts those that have not been run, too. Of five seeds against five the smallest
two-sided p is 2/252, so that a family of more than six could never find anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from measures import Row
from rates import FRESH, Group, Measured, by_group, fresh, group_axes, measured, plateau, scanned

MIN_GAIN = 0.02
MARGIN = 0.02
"""An area that is worse by less is not inferior."""
P_VALUE = 0.05
MATCHED_LR = "matched_lr_of_"
"""Begins the names of the nulls that choose.py writes: control and norm follow."""
FAMILIES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "b": (("ppo_clip", "tis", "m2po", "ess_lr", "displacement", "beta1_0"), ("none",)),
    "c": (("gac",), ("none", "beta1_0", "matched_norm", MATCHED_LR)),
    "c, corrected": (
        ("clip_gac",),
        ("ppo_clip", "clip_beta1_0", "clip_matched_norm", MATCHED_LR),
    ),
    "displacement": (("displacement",), ("none", "beta1_0", MATCHED_LR)),
    "displacement, corrected": (
        ("clip_displacement",),
        ("ppo_clip", "clip_beta1_0", MATCHED_LR),
    ),
    "ess_lr": (("ess_lr",), ("none", "beta1_0", MATCHED_LR)),
    "2, tis_displacement": (("tis_displacement",), ("tis", "tis_beta1_0", MATCHED_LR)),
    "2, tis_spared": (("tis_spared",), ("tis", "tis_beta1_0", "tis_ess_lr", MATCHED_LR)),
    "2, clip_spared": (("clip_spared",), ("ppo_clip", "clip_beta1_0", MATCHED_LR)),
}
"""Question -> methods, and what each of them is compared with."""
NOT_INFERIOR_TO = {"displacement": "none", "clip_displacement": "ppo_clip"}
"""(d) Method at a lag -> the synchronous method that it must not be inferior to."""
LOSSES = {
    **dict.fromkeys(("tis_displacement", "tis_spared", "tis_ess_lr"), "tis"),
    "clip_spared": "ppo_clip",
}
"""Variant of the second round, or a null of one -> the loss that it may raise or widen, at the same
lag."""
BY_LAG = (("s8", "s0"), ("s24", "s0"))
"""(a) Of `none` at the same learning rate, cosine and area a family each."""
LAG_RATES = (1e-4, 4e-4)
BOTH_WAYS = ("a, cosine", "a, area")

Sample = Measured | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    family: str
    where: str
    words: str
    measure: str
    own: Sample
    others: Sample
    margin: float = 0.0
    """Above 0: is `mine` not inferior by so much, one-sided; else are they different?"""

    @property
    def counts(self) -> tuple[int, int]:
        return tuple(  # type: ignore[return-value]
            len(one.values(self.measure)) if one else 0 for one in (self.own, self.others)
        )

    @property
    def complete(self) -> bool:
        return min(self.counts) >= len(FRESH)

    @property
    def difference(self) -> float:
        assert self.own is not None
        assert self.others is not None
        return self.own.mean(self.measure) - self.others.mean(self.measure)

    @property
    def p(self) -> float:
        assert self.own is not None
        assert self.others is not None
        own = [value + self.margin for value in self.own.values(self.measure)]
        one_sided = self.margin > 0
        return permutation_p(own, self.others.values(self.measure), one_sided=one_sided)


def chosen(rows: Sequence[Row]) -> dict[Group, Measured]:
    """Group -> its fresh runs at the rate that its scan chose; at its only rate where it has no
    scan, as the nulls that follow a control."""
    scans = by_group(scanned(rows))
    found: dict[Group, list[Measured]] = {}
    for one in measured(fresh(rows)):
        found.setdefault(one.group, []).append(one)
    best = {}
    for group, rates in found.items():
        if group in scans:
            lr = plateau(scans[group])[0].lr
            rates = [one for one in rates if one.lr == lr]
        if len(rates) == 1:
            best[group] = rates[0]
    return best


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """All that are named where a fresh run is of a method that is asked about."""
    if not fresh(rows) or "method" not in (axes := group_axes(rows)):
        return []
    best = chosen(rows)
    method, lag = axes.index("method"), axes.index("lag") if "lag" in axes else None

    def at(group: Group, **changed: str) -> Group:
        return tuple(changed.get(axis, value) for axis, value in zip(axes, group, strict=True))

    places = dict.fromkeys(at(group, method="") for group in best)
    found = []
    for place in places:
        where = " ".join(value for value in place if value)
        synchronous = lag is not None and place[lag] == "s0"
        for family, (methods, rivals) in FAMILIES.items():
            if synchronous or not any(at(place, method=name) in best for name in methods):
                continue
            for name in methods:
                for rival in rivals:
                    if rival == MATCHED_LR:
                        here = [group[method] for group in best if at(group, method="") == place]
                        rival = null_of(name, here)
                    found.append(
                        Comparison(
                            family=family, where=where, words=f"{name} > {rival}", measure="area",
                            own=best.get(at(place, method=name)),
                            others=best.get(at(place, method=rival)),
                        )
                    )  # fmt: skip
        if lag is None or synchronous:
            continue
        not_inferior = [
            *(("d", name, rival, {"lag": "s0"}) for name, rival in NOT_INFERIOR_TO.items()),
            *(("2, no lower", name, rival, {}) for name, rival in LOSSES.items()),
        ]
        for family, name, rival, changed in not_inferior:
            own = best.get(at(place, method=name))
            if own is not None:
                other = f"{rival} at s0" if changed else rival
                found.append(
                    Comparison(
                        family=family, where=f"{where} {name}",
                        words=f"{name} ≥ {other}, less {MARGIN:g}", measure="area",
                        own=own, others=best.get(at(place, method=rival, **changed)),
                        margin=MARGIN,
                    )
                )  # fmt: skip
    return [*found, *by_lag(rows, axes)]


def by_lag(rows: Sequence[Row], axes: Sequence[str]) -> list[Comparison]:
    if "lag" not in axes:
        return []
    runs = {(one.group, one.lr): one for one in measured(fresh(rows))}
    lag, method = axes.index("lag"), axes.index("method")
    places = dict.fromkeys(
        (group[:lag], group[lag + 1 :])
        for group, lr in runs
        if group[method] == "none" and lr in LAG_RATES
    )
    found = []
    for measure in ("cosine", "area"):
        for (before, after), lr in itertools.product(places, LAG_RATES):
            pairs = [((*before, late, *after), (*before, early, *after)) for late, early in BY_LAG]
            for (own, others), (late, early) in zip(pairs, BY_LAG, strict=True):
                found.append(
                    Comparison(
                        family=f"a, {measure}", where=" ".join((*before, *after)),
                        words=f"{late} ≠ {early} at lr {lr:g}", measure=measure,
                        own=runs.get((own, lr)), others=runs.get((others, lr)),
                    )
                )  # fmt: skip
    return found


def null_of(control: str, methods: Sequence[str]) -> str:
    begins = f"{MATCHED_LR}{control}_at_"
    return next((name for name in methods if name.startswith(begins)), begins.removesuffix("_at_"))


def verdicts(rows: Sequence[Row]) -> list[tuple[Comparison, float | None, str]]:
    """(comparison, p after Holm, verdict) in the order of the families; None and `n of 5` where
    seeds are missing."""
    families: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons(rows):
        families.setdefault((one.family, one.where), []).append(one)
    found: list[tuple[Comparison, float | None, str]] = []
    for family in families.values():
        complete = [one for one in family if one.complete]
        corrected = holm([one.p for one in complete], of=len(family))
        by_id = dict(zip(map(id, complete), corrected, strict=True))
        for one in family:
            p = by_id.get(id(one))
            if p is None:
                found.append((one, None, f"{min(one.counts)} of {len(FRESH)}"))
                continue
            size = abs(one.difference) if one.family in BOTH_WAYS else one.difference
            large = one.margin > 0 or one.measure != "area" or size >= MIN_GAIN
            found.append((one, p, "yes" if large and p < P_VALUE else "no"))
    return found


def holm(values: Sequence[float], *, of: int) -> list[float]:
    """p values corrected for `of` comparisons, those given the first of them. Holm 1979."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (of - rank) * values[index]))
        corrected[index] = highest
    return corrected


def permutation_p(
    first: Sequence[float], second: Sequence[float], *, one_sided: bool = False
) -> float:
    """p of the difference of means: the share of all ways to deal the values into groups of these
    sizes that differ at least as much, in either direction or in this one. Exact."""
    values = np.array([*first, *second])

    def size(difference: float) -> float:
        return difference if one_sided else abs(difference)

    observed = size(fmean(first) - fmean(second))
    extreme = dealt = 0
    for picked in itertools.combinations(range(len(values)), len(first)):
        own = values[list(picked)]
        others = (values.sum() - own.sum()) / len(second)
        extreme += size(float(own.mean() - others)) >= observed - 1e-12
        dealt += 1
    return extreme / dealt

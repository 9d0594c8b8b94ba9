"""Columns out of rows of metrics and out of evaluations, and their smoothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.metrics.log import MetricRow, number

Floats = NDArray[np.float64]

MIN_SMOOTHED = 12
"""A shorter column is its own trend."""


def column(rows: Sequence[MetricRow], key: str) -> tuple[Floats, Floats]:
    """(steps, values) of the rows that have `key`, each [rows with it]."""
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def numbers(rows: Sequence[MetricRow], key: str) -> Floats:
    """[rows]: `key` of every row, NaN where absent."""
    return np.array([row.get(key, np.nan) for row in rows], dtype=np.float64)


def total(rows: Sequence[MetricRow], key: str) -> float:
    """Sum over the rows that have a finite `key`; 0 when none has."""
    return float(np.nansum(np.where(np.isfinite(values := numbers(rows, key)), values, 0.0)))


def counted(values: Sequence[float | None]) -> float:
    """Total of a count that begins again at a resume; None where it was not logged."""
    known = [value for value in values if value is not None]
    before = [0.0, *known][: len(known)]
    return sum(new - old if new >= old else new for new, old in zip(known, before, strict=True))


def summed(rows: Sequence[MetricRow], key: str) -> list[int]:
    """Sum over the rows of a key of counts, bin by bin; empty where no row has it."""
    counts: list[int] = []
    for row in rows:
        histogram = row.get(key)
        if isinstance(histogram, list):
            counts += [0] * (len(histogram) - len(counts))
            for index, count in enumerate(histogram):
                counts[index] += int(count)
    return counts


def smooth(values: Floats) -> Floats | None:
    """[n] -> [n]: Gaussian moving average, 2.5 % of the column wide; None when the column is too
    short to need one.

    Values that are not finite take no part; at the ends only the side that exists does.
    """
    if len(values) < MIN_SMOOTHED:
        return None
    width = max(1.5, 0.025 * len(values))
    reach = int(4 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    finite = np.isfinite(values)
    weighted = np.convolve(np.where(finite, values, 0.0), kernel, mode="full")[
        reach : reach + len(values)
    ]
    weights = np.convolve(finite.astype(np.float64), kernel, mode="full")[
        reach : reach + len(values)
    ]
    return np.divide(weighted, weights, out=np.full(len(values), np.nan), where=weights > 1e-12)


def thin(x: Floats, y: Floats, maximum: int) -> tuple[Floats, Floats]:
    """At most `maximum` of the points [n], in order: of each stretch the smallest and the largest,
    so that a spike stays, and the points that are not finite where a stretch has no other."""
    if len(x) <= maximum:
        return x, y
    stretches = np.array_split(np.arange(len(x)), max(1, maximum // 2))
    kept = set[int]()
    for indices in stretches:
        finite = indices[np.isfinite(y[indices])]
        if len(finite):
            kept |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            kept.add(int(indices[0]))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def per_engine(rows: Sequence[MetricRow], key: str) -> tuple[Floats, Floats]:
    """(steps [rows with it], values [engines, rows with it]) of a key with a number for each
    engine, NaN if there is none.

    `engine/versions`, taken when the row's batch was handed out, come as versions behind the policy
    that trained it, one before the row's; NaN for an engine that is gone.
    """
    having = [(row, values) for row in rows if isinstance(values := row.get(key), list)]
    table = np.full((max((len(values) for _, values in having), default=0), len(having)), np.nan)
    for index, (row, values) in enumerate(having):
        table[: len(values), index] = values
        if key == "engine/versions":
            table[:, index] = np.where(
                table[:, index] >= 0, (number(row, "version") or 0.0) - 1 - table[:, index], np.nan
            )
    return np.array([row["step"] for row, _ in having], dtype=np.float64), table


def doubling_bins(histograms: Sequence[Sequence[int]]) -> tuple[list[str], list[Floats]]:
    """Names of the bins from the first to the last that any of these `doubling counts` uses, and
    each one's shares in them."""
    used = [index for counts in histograms for index, count in enumerate(counts) if count]
    bins = range(min(used), max(used) + 1) if used else range(0)
    names = [f"{2**index:,}" + (f"–{2 ** (index + 1) - 1:,}" if index else "") for index in bins]
    shares = []
    for counts in histograms:
        inside = np.array(
            [counts[index] if index < len(counts) else 0 for index in bins], dtype=np.float64
        )
        shares.append(inside / max(1.0, inside.sum()))
    return names, shares


def histograms(rows: Sequence[MetricRow], key: str) -> tuple[Floats, Floats]:
    """(steps [rows with it], share of counts [bins, rows with it]) of a key of counts; each column
    sums to 1."""
    having = [(row["step"], counts) for row in rows if isinstance(counts := row.get(key), list)]
    shares = np.zeros((max((len(counts) for _, counts in having), default=0), len(having)))
    for index, (_, counts) in enumerate(having):
        shares[: len(counts), index] = np.array(counts, dtype=np.float64) / max(1, sum(counts))
    return np.array([step for step, _ in having], dtype=np.float64), shares


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """A run's evaluations as curves over the versions."""

    versions: NDArray[np.int64]
    """[n], growing; empty where nothing was evaluated."""
    mean: NDArray[np.float64]
    """[n]: mean reward, or loss where responses are given; nan where every reward failed."""
    pass_at: Mapping[int, NDArray[np.float64]]
    """k -> [n]: pass@k, nan for versions that were evaluated without this k."""


def evaluation_curves(lines: Sequence[Mapping[str, Any]]) -> Evaluations:
    """`lines`: of RUN/eval.jsonl, in order of versions."""
    ks = sorted({int(k) for line in lines for k in line.get("pass_at", ())})
    return Evaluations(
        versions=np.array([line["version"] for line in lines], dtype=np.int64),
        mean=np.array(
            [line.get("loss", line.get("mean_reward")) for line in lines], dtype=np.float64
        ),
        pass_at={
            k: np.array([line.get("pass_at", {}).get(str(k)) for line in lines], dtype=np.float64)
            for k in ks
        },
    )

"""Columns out of rows of metrics, and their smoothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.observe.read import Row

Floats = NDArray[np.float64]

MIN_SMOOTHED = 12
"""A shorter column is its own trend."""


def column(rows: Sequence[Row], key: str) -> tuple[Floats, Floats]:
    """(steps, values) of the rows that have `key`, each [rows with it]."""
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def numbers(rows: Sequence[Row], key: str) -> Floats:
    """[rows]: `key` of every row, NaN where absent."""
    return np.array([row.get(key, np.nan) for row in rows], dtype=np.float64)


def total(rows: Sequence[Row], key: str) -> float:
    """Sum over the rows that have a finite `key`; 0 when none has."""
    return float(np.nansum(np.where(np.isfinite(values := numbers(rows, key)), values, 0.0)))


def summed(rows: Sequence[Row], key: str) -> list[int]:
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
    """[n] -> [n]: Gaussian moving average, 2.5 % of the column wide; None when the column is too short to need one.

    Values that are not finite take no part; at the ends only the side that exists does.
    """
    if len(values) < MIN_SMOOTHED:
        return None
    width = max(1.5, 0.025 * len(values))
    reach = int(4 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    finite = np.isfinite(values)
    weighted = np.convolve(np.where(finite, values, 0.0), kernel, mode="full")[reach : reach + len(values)]
    weights = np.convolve(finite.astype(np.float64), kernel, mode="full")[reach : reach + len(values)]
    return np.divide(weighted, weights, out=np.full(len(values), np.nan), where=weights > 1e-12)


def histograms(rows: Sequence[Row], key: str) -> tuple[Floats, Floats]:
    """(steps [rows with it], share of counts [bins, rows with it]) of a key of counts; each column sums to 1."""
    having = [(row["step"], counts) for row in rows if isinstance(counts := row.get(key), list)]
    shares = np.zeros((max((len(counts) for _, counts in having), default=0), len(having)))
    for index, (_, counts) in enumerate(having):
        shares[: len(counts), index] = np.array(counts, dtype=np.float64) / max(1, sum(counts))
    return np.array([step for step, _ in having], dtype=np.float64), shares

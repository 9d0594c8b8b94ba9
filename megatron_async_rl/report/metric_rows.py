"""Metrics of a run in bounded memory, independent of the length of the run.

    blocks of rows --add--> whole rows, evenly spaced             (panels that need whole rows)
                            buckets of steps, one set per metric  (curves: extremes and means)
                            totals                                (exact, over all rows)

Invariants:
- a run of up to KEPT rows is kept completely;
- of a longer run, every 2nd, 4th, ... row is kept, and a curve has the smallest and the largest
  value of each bucket, so that spikes remain visible;
- totals, counts, maxima and last values cover all rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.metrics.catalogue import Value
from megatron_async_rl.metrics.log import MetricRow, number

Floats = NDArray[np.float64]

KEPT = 4096
"""Maximum number of whole rows that are kept."""
NEWEST = 512
"""Number of newest rows that are kept in addition."""
BUCKETS = 2048
"""Maximum number of buckets per metric."""
COUNTED_BY = "dropped/responses"
"""Metric that weights the means of dropped responses."""
CODES = "gac/regime"
MIN_SMOOTHED = 12
"""Minimum number of values of a column that is smoothed."""


class MetricRows(Sequence[MetricRow]):
    """Sequence of the kept rows in order of steps, including the newest row. Methods that return
    totals and curves cover all rows."""

    def __init__(self, rows: Iterable[MetricRow] = ()) -> None:
        self.total_rows = 0
        """Number of all rows."""
        self.newest: deque[MetricRow] = deque(maxlen=NEWEST)
        self.codes: Counter[int] = Counter()
        """Code in `gac/regime` -> number of rows."""
        self._kept: list[MetricRow] = []
        self._stride = 1
        self._totals: dict[str, _Total] = {}
        self._sums: dict[str, NDArray[np.int64]] = {}
        self._buckets: dict[str, _Buckets] = {}
        self._width = 0
        """Number of steps per bucket; 0 while all rows are kept."""
        self.add(list(rows))

    def add(self, rows: Sequence[MetricRow]) -> None:
        """Add rows. They must follow the rows of the last call."""
        if not rows:
            return
        for index, row in enumerate(rows, self.total_rows):
            # `index` counts the rows of all calls, so the spacing does not depend on the blocks.
            if index % self._stride == 0:
                self._kept.append(row)
        self.total_rows += len(rows)
        self.newest.extend(rows)
        columns = _columns(rows)
        for key, (_, values) in columns.items():
            self._totals.setdefault(key, _Total()).add(values)
        if CODES in columns:
            self.codes.update(columns[CODES][1].astype(np.int64).tolist())
        self._add_lists(rows)
        self._add_weighted(rows)

        if self._width:
            self._fill(columns, int(number(rows[-1], "step") or 0))
        elif len(self._kept) > KEPT:
            # All rows are still kept at this point, so the buckets receive every row.
            self._width = 1
            self._fill(_columns(self._kept), int(number(rows[-1], "step") or 0))
        # Drop every second row, which keeps the rows evenly spaced.
        while len(self._kept) > KEPT:
            self._kept = self._kept[::2]
            self._stride *= 2

    def _fill(self, columns: Mapping[str, tuple[NDArray[np.int64], Floats]], last: int) -> None:
        """Add columns to the buckets, which are widened first if step `last` has no bucket."""
        while last // self._width >= BUCKETS:
            # Double the width, so that two old buckets become exactly one new bucket.
            self._width *= 2
            for bucket in self._buckets.values():
                bucket.widen()
        for key, (steps, values) in columns.items():
            self._buckets.setdefault(key, _Buckets()).add(steps // self._width, steps, values)

    def _add_lists(self, rows: Sequence[MetricRow]) -> None:
        """Add the histograms of the rows to their sums."""
        by_length: dict[str, dict[int, list[Value]]] = {}
        for key in dict.fromkeys(chain.from_iterable(rows)):
            if key.endswith("histogram"):
                lengths = by_length.setdefault(key, {})
                for row in rows:
                    if isinstance(value := row.get(key), list):
                        lengths.setdefault(len(value), []).append(value)
        # Sum all lists of equal length at once; the length depends on the largest value of a row.
        for key, lengths in by_length.items():
            before = self._sums.get(key, np.zeros(0, dtype=np.int64))
            longest = max(len(before), *lengths)
            # Later rows may have bins that earlier rows lack.
            sums = self._sums[key] = np.zeros(longest, dtype=np.int64)
            sums[: len(before)] = before
            for length, lists in lengths.items():
                sums[:length] += np.array(lists, dtype=np.int64).sum(axis=0)

    def _add_weighted(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            weight = number(row, COUNTED_BY)
            if not weight:
                continue
            for key in ("dropped/length_mean", "dropped/reward_mean"):
                value = number(row, key)
                # Weight a step's mean by its number of responses, for the mean over responses.
                if value is not None and np.isfinite(value):
                    self._totals[key].weigh(value, weight)

    # Sequence of the kept rows

    def __len__(self) -> int:
        return len(self._kept) + self._adds_newest

    @property
    def _adds_newest(self) -> bool:
        # The sequence always includes the newest row, even between two multiples of the stride.
        return bool(self.newest) and self._kept[-1] is not self.newest[-1]

    @overload
    def __getitem__(self, place: int) -> MetricRow: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[MetricRow]: ...
    def __getitem__(self, place: int | slice) -> MetricRow | Sequence[MetricRow]:
        rows = [*self._kept, self.newest[-1]] if self._adds_newest else self._kept
        return rows[place]

    @property
    def thinned(self) -> bool:
        """True if the sequence omits rows."""
        return self._width > 0

    # Totals over all rows

    def names(self) -> Iterable[str]:
        """Return the names of the metrics with numbers, in order of their first row."""
        return self._totals.keys()

    def has(self, key: str) -> bool:
        """Return True if a row has a number for `key`."""
        return key in self._totals

    def total(self, key: str) -> float:
        """Return the sum of the finite values of `key`; 0 if there are none."""
        return self._totals[key].sum if key in self._totals else 0.0

    def mean(self, key: str, *, weighted: bool = False) -> float | None:
        """Return the mean of the finite values of `key`; None if there are none. `weighted`: weight
        each row by COUNTED_BY."""
        total = self._totals.get(key)
        if total is None:
            return None
        if weighted:
            return total.weighted / total.weight if total.weight else None
        return total.sum / total.finite if total.finite else None

    def largest(self, key: str) -> float | None:
        """Return the largest finite value of `key`; None if there is none."""
        total = self._totals.get(key)
        return total.largest if total is not None and total.finite else None

    def last(self, key: str) -> float | None:
        """Return the value in the newest row that has `key`; None if no row has it."""
        return self._totals[key].last if key in self._totals else None

    def counted(self, key: str) -> float:
        """Return the total of a counter over the whole run, although a resume restarts the
        counter."""
        return self._totals[key].counted if key in self._totals else 0.0

    def summed(self, key: str) -> list[int]:
        """Return the sum of a histogram over all rows, bin by bin; empty if no row has it."""
        return self._sums[key].tolist() if key in self._sums else []

    # Curves

    def column(self, key: str) -> tuple[Floats, Floats]:
        """Return (steps, values) of all rows that have `key`; for a thinned run, of the extremes of
        each bucket."""
        if not self.thinned:
            return column(self._kept, key)
        if key not in self._buckets:
            return np.zeros(0), np.zeros(0)
        return self._buckets[key].extremes()

    def curve(self, key: str, *, log: bool = False) -> tuple[Floats, Floats, Floats | None]:
        """Return (steps, values, moving average at the same steps). The moving average is None for
        a short column. `log`: use the geometric mean."""
        steps, values = self.column(key)
        centres, means = (steps, values) if not self.thinned else self._means(key)
        if log:
            # Average logarithms, so that the trend follows a curve over decades. Omit zeros.
            means = np.log(np.where(means > 0, means, np.nan))
        trend = smooth(means)
        if trend is not None and self.thinned and len(centres):
            # There is one average per bucket, but up to two points.
            trend = np.interp(steps, centres, trend)
        return steps, values, np.exp(trend) if log and trend is not None else trend

    def finite(self, key: str) -> Floats:
        """Return the finite values of `key` in order of steps; for a thinned run, the mean of each
        bucket."""
        values = self._means(key)[1] if self.thinned else self.column(key)[1]
        return values[np.isfinite(values)]

    def cumulative(self, key: str) -> tuple[Floats, Floats]:
        """Return (steps, sum of `key` up to each of these steps), starting with step 0."""
        if not self.thinned:
            steps = np.array([float(number(row, "step") or 0) for row in self._kept])
            sums = np.cumsum(np.nan_to_num(numbers(self._kept, key)))
        elif key in self._buckets:
            filled = np.flatnonzero(self._buckets[key].finite)
            # A cumulative sum belongs to the end of its bucket.
            steps = (filled.astype(np.float64) + 1) * self._width - 1
            sums = np.cumsum(self._buckets[key].sum[filled])
        else:
            steps, sums = np.array([number(self.newest[-1], "step") or 0.0]), np.zeros(1)
        return np.concatenate([[0.0], steps]), np.concatenate([[0.0], sums])

    def _means(self, key: str) -> tuple[Floats, Floats]:
        """Return (steps, means) of the buckets with finite values."""
        if key not in self._buckets:
            return np.zeros(0), np.zeros(0)
        buckets = self._buckets[key]
        filled = np.flatnonzero(buckets.finite)
        # A mean belongs to the middle of its bucket.
        steps = (filled.astype(np.float64) + 0.5) * self._width
        return steps, buckets.sum[filled] / buckets.finite[filled]


class _Total:
    """Exact statistics of one metric over all rows."""

    def __init__(self) -> None:
        self.finite = 0
        self.sum = self.counted = self.weighted = self.weight = 0.0
        self.largest = -np.inf
        self.last = np.nan

    def add(self, values: Floats) -> None:
        # A resume restarts a counter at 0, so a smaller value is itself the growth.
        growth = np.diff(values, prepend=self.last if self.last == self.last else 0.0)
        self.counted += float(np.where(growth >= 0, growth, values).sum())
        self.last = float(values[-1])
        finite = values[np.isfinite(values)]
        self.finite += len(finite)
        if len(finite):
            self.sum += float(finite.sum())
            self.largest = max(self.largest, float(finite.max()))

    def weigh(self, value: float, weight: float) -> None:
        self.weighted += value * weight
        self.weight += weight


class _Buckets:
    """Statistics of one metric per bucket of steps, in arrays of shape [BUCKETS]."""

    def __init__(self) -> None:
        self.finite = np.zeros(BUCKETS, dtype=np.int64)
        """Number of finite values."""
        self.sum = np.zeros(BUCKETS)
        self.low, self.high = np.full(BUCKETS, np.inf), np.full(BUCKETS, -np.inf)
        self.low_at, self.high_at = np.zeros(BUCKETS), np.zeros(BUCKETS)
        """Steps of the smallest and of the largest value."""
        self.odd, self.odd_at = np.zeros(BUCKETS), np.full(BUCKETS, -1.0)
        """A value that is not finite, and its step; -1 without such a value."""

    def add(self, buckets: NDArray[np.int64], steps: NDArray[np.int64], values: Floats) -> None:
        """Add values. `buckets`: index of the bucket of each value."""
        finite = np.isfinite(values)
        # Keep a value that is not finite, so that a bucket without finite values shows a gap.
        self.odd[buckets[~finite]], self.odd_at[buckets[~finite]] = values[~finite], steps[~finite]
        buckets, steps, values = buckets[finite], steps[finite], values[finite]
        if not len(buckets):
            return
        # np.add.at adds every value of a repeated index; `+=` would add only one.
        np.add.at(self.finite, buckets, 1)
        np.add.at(self.sum, buckets, values)
        # Sort by bucket, then by value, so that the extremes are at the ends of a bucket's range.
        order = np.lexsort((values, buckets))
        ordered = buckets[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        last = np.append(first[1:], len(ordered)) - 1
        for best, at, ends, better in (
            (self.low, self.low_at, order[first], np.less),
            (self.high, self.high_at, order[last], np.greater),
        ):
            where = buckets[ends]
            # Of equal extremes, keep the first.
            wins = better(values[ends], best[where])
            best[where[wins]], at[where[wins]] = values[ends][wins], steps[ends][wins]

    def widen(self) -> None:
        """Merge neighbouring pairs of buckets, which doubles the width of each bucket."""
        even, odd = slice(0, None, 2), slice(1, None, 2)
        lower = self.low[odd] < self.low[even]
        higher = self.high[odd] > self.high[even]
        missing = self.odd_at[even] < 0
        joined = {
            "finite": self.finite[even] + self.finite[odd],
            "sum": self.sum[even] + self.sum[odd],
            "low": np.where(lower, self.low[odd], self.low[even]),
            "low_at": np.where(lower, self.low_at[odd], self.low_at[even]),
            "high": np.where(higher, self.high[odd], self.high[even]),
            "high_at": np.where(higher, self.high_at[odd], self.high_at[even]),
            "odd": np.where(missing, self.odd[odd], self.odd[even]),
            "odd_at": np.where(missing, self.odd_at[odd], self.odd_at[even]),
        }
        # Reset the arrays: after the merge, their upper half is empty.
        self.__init__()  # type: ignore[misc]
        for name, values in joined.items():
            getattr(self, name)[: len(values)] = values

    def extremes(self) -> tuple[Floats, Floats]:
        """Return (steps, values) of the extremes of each bucket in order of steps. A bucket without
        finite values has one value that is not finite."""
        filled = self.finite > 0
        odd = ~filled & (self.odd_at >= 0)
        steps = np.concatenate([self.low_at[filled], self.high_at[filled], self.odd_at[odd]])
        values = np.concatenate([self.low[filled], self.high[filled], self.odd[odd]])
        order = np.argsort(steps, kind="stable")
        # Remove a repeated step: both extremes of a bucket may be the same point.
        order = order[np.diff(steps[order], prepend=-1) > 0]
        return steps[order], values[order]


def _columns(rows: Sequence[MetricRow]) -> dict[str, tuple[NDArray[np.int64], Floats]]:
    """Return metric -> (steps, values) of the rows that have a number for it, in order of steps."""
    by_keys: dict[tuple[str, ...], list[MetricRow]] = {}
    for row in rows:
        # Rows with equal keys form a table; a run has only a few different sets of keys.
        by_keys.setdefault(tuple(row), []).append(row)
    parts: dict[str, list[tuple[NDArray[np.int64], Floats]]] = {}
    for keys, table in by_keys.items():
        # Convert whole columns, because a long run has up to a hundred million values.
        columns = dict(zip(keys, zip(*(row.values() for row in table), strict=True), strict=True))
        steps = np.array(columns.get("step", [0] * len(table)), dtype=np.int64)
        for key, values in columns.items():
            # Omit lists, which are histograms or values per engine.
            if list not in set(map(type, values)):
                parts.setdefault(key, []).append((steps, np.array(values, dtype=np.float64)))
    return {key: _in_order(of_key) for key, of_key in parts.items()}


def _in_order(
    parts: Sequence[tuple[NDArray[np.int64], Floats]],
) -> tuple[NDArray[np.int64], Floats]:
    """Return the concatenated (steps, values), sorted by step."""
    if len(parts) == 1:
        return parts[0]
    steps, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(steps, kind="stable")
    return steps[order], values[order]


def column(rows: Sequence[MetricRow], key: str) -> tuple[Floats, Floats]:
    """Return (steps, values) of the rows that have `key`; shapes [rows with `key`]."""
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def numbers(rows: Sequence[MetricRow], key: str) -> Floats:
    """Return the value of `key` in every row, NaN if absent; shape [rows]."""
    return np.array([row.get(key, np.nan) for row in rows], dtype=np.float64)


def smooth(values: Floats) -> Floats | None:
    """Return the Gaussian moving average, [n] -> [n], with a standard deviation of 2.5 % of the
    column; None for a column of fewer than MIN_SMOOTHED values.

    Values that are not finite, and positions beyond the ends, have weight 0.
    """
    if len(values) < MIN_SMOOTHED:
        return None
    width = max(1.5, 0.025 * len(values))
    reach = int(4 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    finite = np.isfinite(values)
    # Normalise by the weights of the finite values, so that gaps and ends do not pull to 0.
    weighted = np.convolve(np.where(finite, values, 0.0), kernel, mode="full")[
        reach : reach + len(values)
    ]
    weights = np.convolve(finite.astype(np.float64), kernel, mode="full")[
        reach : reach + len(values)
    ]
    return np.divide(weighted, weights, out=np.full(len(values), np.nan), where=weights > 1e-12)


def thin(x: Floats, y: Floats, maximum: int) -> tuple[Floats, Floats]:
    """Return at most `maximum` of the points [n], in order: of each interval, the points with the
    smallest and the largest y, so that spikes remain. An interval without finite y has one point.
    """
    if len(x) <= maximum:
        return x, y
    intervals = np.array_split(np.arange(len(x)), max(1, maximum // 2))
    kept = set[int]()
    for indices in intervals:
        finite = indices[np.isfinite(y[indices])]
        if len(finite):
            kept |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            kept.add(int(indices[0]))
    order = np.array(sorted(kept))
    return x[order], y[order]


def per_engine(rows: Sequence[MetricRow], key: str) -> tuple[Floats, Floats]:
    """Return (steps [rows], values [engines, rows]) of the rows that have `key`, a metric per
    engine. Values of engines that had not joined are NaN.

    For `engine/versions`, the values are lags: the row's version minus 1, which trained on the
    row's batch, minus the version of the engine. An engine that is gone has NaN.
    """
    with_key = [(row, values) for row in rows if isinstance(values := row.get(key), list)]
    engines = max((len(values) for _, values in with_key), default=0)
    table = np.full((engines, len(with_key)), np.nan)
    for index, (row, values) in enumerate(with_key):
        # Rows from before an engine joined have fewer values.
        table[: len(values), index] = values
        if key == "engine/versions":
            # A negative version marks an engine that is gone.
            table[:, index] = np.where(
                table[:, index] >= 0, (number(row, "version") or 0.0) - 1 - table[:, index], np.nan
            )
    return np.array([row["step"] for row, _ in with_key], dtype=np.float64), table


def doubling_bins(histograms: Sequence[Sequence[int]]) -> tuple[list[str], list[Floats]]:
    """Return (names of the bins, shares of each histogram in them) for histograms with doubling
    bins. The bins range from the first to the last bin with a count in any histogram."""
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
    """Return (steps [rows], shares [bins, rows]) of the rows that have the histogram `key`. The
    shares of a row sum to 1."""
    with_key = [(row["step"], counts) for row in rows if isinstance(counts := row.get(key), list)]
    shares = np.zeros((max((len(counts) for _, counts in with_key), default=0), len(with_key)))
    for index, (_, counts) in enumerate(with_key):
        shares[: len(counts), index] = np.array(counts, dtype=np.float64) / max(1, sum(counts))
    return np.array([step for step, _ in with_key], dtype=np.float64), shares


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Held-out evaluations of a run as curves over the weight versions."""

    versions: NDArray[np.int64]
    """Ascending, shape [n]; empty without evaluations."""
    mean: NDArray[np.float64]
    """Mean reward, or loss of a supervised run, shape [n]; NaN if every reward failed."""
    pass_at: Mapping[int, NDArray[np.float64]]
    """k -> pass@k, shape [n]; NaN for versions that were evaluated without this k."""


def evaluation_curves(lines: Sequence[Mapping[str, Any]]) -> Evaluations:
    """Return the curves of the lines of RUN/eval.jsonl, which must be in order of versions."""
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

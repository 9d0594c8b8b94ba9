"""Log-probs of the trainer against those of the engines, on tokens of samples that the trained
version sampled entirely (lag 0): there, only rounding may differ.

Two bounds, both on means of |logp - logp_behavior| over at least MIN_TOKENS tokens:

- the rounding of the dtype. A logit between 8 and 16 has a spacing of 8 eps, so its rounding error
  has a standard deviation of 8 eps / sqrt(12); two sides differ by sqrt(2) of that: 3.9e-7 nats in
  float32, 0.026 in bfloat16. Healthy runs measure means of this size. The bound is ROUNDINGS times
  that, because a model rounds in every layer; temperature on one side, shifted log-probs and stale
  weights after large steps are far above it;
- the run's own rounding: the median over the finite cells of one kind (depths, engines, versions).
  A cell may be RATIO times the median, or FLOOR roundings of the dtype if that is larger. This
  finds a fault of one engine, of long contexts, or that grows with the versions, far below the
  first bound.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from megatron_async_rl.config.problem import UserError, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.lag0_log import FILE, Lag0Line, read_lag0
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, damaged, lost, row

EPSILONS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
FP8_EPSILON = 2.0**-5
"""Effective relative rounding of a product of FP8 numbers: each has 2^-4, and sums average it."""
ROUNDINGS = 8.0
RATIO = 4.0
FLOOR = 2.0
"""Mean, in roundings, that a cell may always have: the median of a policy that became certain is
far below the rounding of the uncertain tokens before."""
MIN_TOKENS = 64
"""Smallest number of tokens of a cell: rare large differences decide a mean of fewer."""
TREND_PARTS = 3
"""The trend compares the first and the last of this many equal parts of the versions."""
TREND_RATIO = 3.0
MIN_TREND_VERSIONS = 6
WINDOW = 64
"""Number of steps whose samples are kept while the log is read."""

EVIDENCE = "lag-0 evidence"
EVIDENCE_BOUND = f"at least {MIN_TOKENS} tokens at lag 0"
EVIDENCE_REMEDY = (
    "check a config with `mar verify CONFIG --numerics`, or run some steps with flow.async_ratio: 0"
)
NAMES = {
    "all": "log-probs at lag 0",
    "depth": "log-probs by depth",
    "engine": "log-probs by engine",
    "version": "log-probs by version",
    "trend": "log-probs over versions",
}
REMEDIES = {
    "all": "compare temperature, dtype and chat template of both sides; check that log-probs belong"
    " to their own tokens, and run `mar verify CONFIG --numerics`",
    "depth": "check attention, rotary embedding and caches of long contexts: stale key-values and a"
    " wrong rope cache show at some depths only",
    "engine": "restart that engine and compare its weights, dtype and software with the others'",
    "version": "check the publication of that version: its engines sampled with other weights, or"
    " with a prefix cache of older ones",
    "trend": "the difference grows with the versions: check that caches are cleared at every update"
    " and that no rounding accumulates (FP8 scales, merged adapters)",
}


def rounding(config: Config) -> float:
    """Return the standard deviation, in nats, of the difference of two rounded logits."""
    epsilon = max(EPSILONS[config.model.dtype], EPSILONS[config.engine_dtype])
    quantised = config.rollout is not None and config.rollout.quantised
    if quantised or config.policy.fp8 is not None:
        epsilon = max(epsilon, FP8_EPSILON)
    return 8.0 * epsilon / math.sqrt(12.0) * math.sqrt(2.0)


class _Cells:
    """Sums of differences and numbers of tokens by some key."""

    def __init__(self) -> None:
        self._sums: dict[int, float] = defaultdict(float)
        self._tokens: dict[int, float] = defaultdict(float)

    def add(self, key: int, total: float, tokens: float) -> None:
        self._sums[key] += total
        self._tokens[key] += tokens

    def means(self) -> dict[int, float]:
        """Return the mean of each cell that has enough tokens, by key in order."""
        return {
            key: self._sums[key] / tokens
            for key, tokens in sorted(self._tokens.items())
            if tokens >= MIN_TOKENS
        }


class LogprobDifferences(RunCheck):
    """Reads lag0.jsonl next to the log, which has the engine of each sample."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._config = records.config
        self._rounding = rounding(records.config)
        self._lines = self._read()
        self._damage: UserError | None = None
        self._open: dict[int, Mapping[str, float]] = {}
        self._newest = 0
        self._by_depth, self._by_engine, self._by_version = _Cells(), _Cells(), _Cells()
        self._tokens, self._sum, self._steps = 0, 0.0, 0

    def _read(self) -> Iterator[Lag0Line]:
        try:
            yield from read_lag0(self._records.run_dir)
        except UserError as error:
            self._damage = error

    def _advance(self, step: int | None) -> None:
        """Read lines up to `step`; None: all."""
        while step is None or self._newest < step:
            line = next(self._lines, None)
            if line is None:
                return
            self._newest = line.step
            self._open[line.step] = dict(zip(line.ids, line.means, strict=False))
            # Steps of a log are almost in order: older ones are complete.
            for old in [one for one in self._open if one < line.step - WINDOW]:
                del self._open[old]
            total, tokens = sum(line.sums), sum(line.tokens)
            self._steps += 1
            self._sum += total
            self._tokens += tokens
            # The step after version v trains v.
            self._by_version.add(line.step - 1, total, tokens)
            for bucket, (part, count) in enumerate(zip(line.sums, line.tokens, strict=False)):
                self._by_depth.add(bucket, part, count)

    def ended(self, end: EndedSample) -> None:
        if end.outcome != "trained":
            return
        self._advance(end.step)
        mean = self._open.get(end.step, {}).get(end.facts.id)
        if mean is not None:
            self._by_engine.add(end.facts.engine, mean * end.facts.trained, end.facts.trained)

    def result(self) -> Iterable[ScorecardRow]:
        self._advance(None)
        why = self._absence()
        if self._tokens < MIN_TOKENS:
            if self._damage:
                yield damaged(EVIDENCE, self._damage, EVIDENCE_BOUND)
            elif self._is_lost():
                yield lost(EVIDENCE, FILE, EVIDENCE_BOUND)
            else:
                yield absent(EVIDENCE, why, EVIDENCE_BOUND, EVIDENCE_REMEDY)
            for kind, name in NAMES.items():
                yield absent(name, "no evidence at lag 0", "", REMEDIES[kind])
            return
        versions = self._by_version.means()
        newest = f", the newest at step {self._newest}"
        value = f"{self._tokens:,} tokens in {number_of('step', self._steps)}{newest}"
        # A damaged line ends the reading: the other rows use the lines before it.
        if self._damage:
            yield damaged(EVIDENCE, self._damage, EVIDENCE_BOUND, value)
        else:
            yield row(EVIDENCE, value, EVIDENCE_BOUND, True, EVIDENCE_REMEDY)
        yield self._mean_row()
        yield self._cells_row(
            "depth", self._by_depth.means(), lambda one: f"depths {2**one} to {2 ** (one + 1) - 1}"
        )
        yield self._cells_row("engine", self._by_engine.means(), lambda one: f"engine {one}")
        yield self._cells_row("version", versions, lambda one: f"version {one}")
        yield self._trend_row(list(versions.values()))

    def _is_lost(self) -> bool:
        records = self._records
        present = (records.run_dir / FILE).exists()
        return records.config.has_engines and not present and records.records_engines

    def _absence(self) -> str:
        if not self._config.has_engines:
            return "a supervised run has no engines"
        if not (self._records.run_dir / FILE).exists():
            return f"no {FILE}: an earlier version made the run"
        return f"{self._tokens} tokens were trained at lag 0"

    def _mean_row(self) -> ScorecardRow:
        mean, limit = self._sum / self._tokens, ROUNDINGS * self._rounding
        bound = f"mean at most {limit:.2g} nats ({ROUNDINGS:g} roundings of {self._dtype})"
        ok = mean <= limit
        return row(NAMES["all"], f"mean {mean:.2g} nats", bound, ok, REMEDIES["all"])

    @property
    def _dtype(self) -> str:
        return self._config.engine_dtype

    def _cells_row(self, kind: str, cells: Mapping[int, float], name_of: object) -> ScorecardRow:
        if len(cells) < 2:
            why = f"evidence for {number_of(kind, len(cells))} only"
            return absent(NAMES[kind], why, "", REMEDIES[kind])
        assert callable(name_of)
        # Infinite means would raise the limit above themselves.
        finite = [mean for mean in cells.values() if math.isfinite(mean)]
        typical = median(finite) if finite else 0.0
        limit = max(RATIO * typical, FLOOR * self._rounding)
        high = {key: mean for key, mean in cells.items() if not mean <= limit}
        worst = max(cells, key=lambda key: cells[key])
        value = f"largest mean {cells[worst]:.2g} nats ({name_of(worst)})"
        value += f"; median {typical:.2g}" if finite else "; no finite mean"
        bound = f"at most {limit:.2g} nats ({RATIO:g} medians, or {FLOOR:g} roundings)"
        details = [f"{name_of(key)}: mean {mean:.2g} nats" for key, mean in high.items()]
        return row(NAMES[kind], value, bound, not high, REMEDIES[kind], details)

    def _trend_row(self, means: list[float]) -> ScorecardRow:
        if len(means) < MIN_TREND_VERSIONS:
            found = number_of("version", len(means))
            why = f"evidence for {found}; a trend needs {MIN_TREND_VERSIONS}"
            return absent(NAMES["trend"], why, "", REMEDIES["trend"])
        size = len(means) // TREND_PARTS
        # Medians, so that one version, which has a row of its own, does not make a trend.
        first, last = median(means[:size]), median(means[-size:])
        limit = max(TREND_RATIO * first, FLOOR * self._rounding)
        value = f"first third {first:.2g} nats, last third {last:.2g}"
        bound = (
            f"last third at most {limit:.2g} nats ({TREND_RATIO:g} times, or {FLOOR:g} roundings)"
        )
        ok = last <= limit and math.isfinite(last)
        return row(NAMES["trend"], value, bound, ok, REMEDIES["trend"])

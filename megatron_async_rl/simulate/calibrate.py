"""Rates and lengths of a run, from its own logs: metrics.jsonl, samples/, timeline/.

    decoding        the seconds of each response against its tokens and the responses beside it
    training        the seconds of each step against its tokens
    beside          how much slower either side is while the other works
    the rest        means, from span to span of the timelines

Invariants:
- the first fifth of the steps does not count, nor the end, when nothing more is admitted;
- what a run cannot show is assumed, and `Calibration.in_words` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.log import Row, number, read_metrics
from megatron_async_rl.metrics.timeline import Span, read_timeline
from megatron_async_rl.samples.segments import SegmentBroken, read_table
from megatron_async_rl.simulate.model import Lengths, Rates

Floats = NDArray[np.float64]

LEAST_STEPS = 6
ROUNDS = 30
SLOWER = np.linspace(0.0, 0.8, 17)
"""By how much one side may be slowed by the other."""
SEEN = 0.2
"""Standard deviation of the share of a step, or a response, beside the other side's work: with less,
nothing is learnt of what that does."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`ranks`: the trainer's, in the run. `residual`: root mean square of what the fit of decoding
    leaves, relative to a response's seconds. `assumed`: rates that the run could not show."""

    rates: Rates
    lengths: Lengths
    ranks: int
    residual: float
    assumed: tuple[str, ...]

    def rates_of(self, config: Config) -> Rates:
        """For `config`: training takes less time in proportion to the ranks."""
        assert config.rollout is not None
        share = self.ranks / config.policy.parallel.ranks
        return replace(
            self.rates,
            train_token_s=self.rates.train_token_s * share,
            places=config.rollout.max_concurrent,
        )

    def in_words(self) -> str:
        rates = self.rates
        ((fixed, each),) = rates.decode
        trainer, engine = (
            "assumed" if key in self.assumed else "measured"
            for key in ("trainer_beside", "engine_beside")
        )
        return (
            f"decoding   a token takes {fixed * 1e3:.3g} ms + {each * 1e3:.3g} ms x responses, a new"
            f" response {rates.prompt_s * 1e3:.3g} ms; the fit is {self.residual:.0%} off\n"
            f"trainer    {rates.train_token_s * 1e3:.3g} ms a token, publishing"
            f" {rates.publish_s:.3g} s; an engine loads in {rates.load_s:.3g} s\n"
            f"beside     the trainer runs at {rates.trainer_beside:.0%} while an engine works"
            f" ({trainer}), an engine at {rates.engine_beside:.0%} while it does ({engine})"
        )


def calibrate(runs: Sequence[Path], cores: int | None) -> Calibration:
    """Of runs on the same machine: one that takes turns and one that overlaps show together how
    trainer and engines slow each other. `cores`: what they shared, if anything, which says so where
    no log does. Raises UserError for a run that shows too little."""
    logs = [_Log.read(run) for run in runs]
    ranks, processes = logs[0].ranks, logs[0].ranks + len(logs[0].engines)
    if any(one.ranks != ranks for one in logs):
        raise UserError.of("--from", "the runs have different policy.parallel.ranks", "name one")
    assumed = 1.0 - min(1.0, (cores or processes) / processes)
    train_token_s, spread, slower = _fit_training(logs, assumed)
    fit = _fit_decoding(logs, assumed)
    loads = [
        one.seconds - fit.slower.by * _overlap(one, log.training)
        for log in logs
        for one in log.loading
    ]
    rates = Rates(
        decode=((fit.fixed_s, fit.each_s),),
        prompt_s=fit.prompt_s,
        places=logs[0].places,
        ask_s=_mean(logs, _Log.asks),
        take_s=_mean(logs, _Log.takes),
        train_token_s=train_token_s,
        train_spread=spread,
        publish_s=_mean(logs, _Log.publishes),
        begin_s=_mean(logs, _Log.begins),
        load_s=float(np.mean(loads)) if loads else 0.0,
        trainer_beside=1.0 - slower.by,
        engine_beside=1.0 - fit.slower.by,
    )
    both = {"trainer_beside": slower, "engine_beside": fit.slower}
    return Calibration(
        rates=rates,
        lengths=logs[0].samples.lengths(logs[0].last),
        ranks=ranks,
        residual=fit.residual,
        assumed=tuple(key for key, value in both.items() if value.assumed),
    )


def _lacks(run: Path, what: str) -> UserError:
    fix = "name a run with samples.keep_mib above 0, after some dozen steps"
    return UserError.of("--from", f"{run} holds {what}: too little to take rates from", fix)


@dataclass(frozen=True, kw_only=True)
class _Log:
    """One run: the rows and spans of the steps that count, and the samples of all."""

    ranks: int
    places: int
    rows: Sequence[Row]
    last: Row
    rank0: Sequence[Span]
    engines: Mapping[int, Sequence[Span]]
    samples: _Samples

    @classmethod
    def read(cls, run: Path) -> _Log:
        """Raises UserError."""
        if not (run / "metrics.jsonl").is_file():
            raise _lacks(run, "no metrics.jsonl")
        rows = read_metrics(run)
        try:
            tree = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
            ranks, ratio = tree["policy"]["parallel"]["ranks"], tree["flow"]["async_ratio"]
            places = tree["rollout"]["max_concurrent"]
        except (OSError, KeyError, TypeError, yaml.YAMLError):
            raise _lacks(run, "no config.yaml of a run that samples") from None
        counted = rows[len(rows) // 5 : len(rows) - math.ceil(ratio) - 1]
        if len(counted) < LEAST_STEPS:
            raise _lacks(run, f"only {len(rows)} steps")
        since, until = (number(row, "time") or 0.0 for row in (counted[0], counted[-1]))
        tracks = {
            name: [span for span in spans if since <= span.start and span.end <= until]
            for name, spans in read_timeline(run).items()
        }
        rank0 = tracks.pop("rank 0", [])
        engines = {int(name.partition("-")[2]): spans for name, spans in tracks.items() if spans}
        if not rank0 or not engines:
            raise _lacks(run, "no timeline of trainer and engines")
        return cls(
            ranks=ranks,
            places=places,
            rows=counted,
            last=rows[-1],
            rank0=rank0,
            engines=engines,
            samples=_Samples.read(run),
        )

    @property
    def training(self) -> list[Span]:
        return [span for span in self.rank0 if span.state == "training"]

    @property
    def loading(self) -> list[Span]:
        return [
            span for spans in self.engines.values() for span in spans if span.state == "loading"
        ]

    @property
    def works(self) -> list[Span]:
        """Of engines."""
        states = ("busy", "loading")
        return [span for spans in self.engines.values() for span in spans if span.state in states]

    def publishes(self) -> list[float]:
        return [span.seconds for span in self.rank0 if span.state == "publishing"]

    def takes(self) -> list[float]:
        """From the last response of a batch to its step, where the trainer waited for that one."""
        ends, found = np.sort(self.samples.ended), []
        for before, span in itertools.pairwise(self.rank0):
            place = int(np.searchsorted(ends, span.start)) - 1
            waited = span.state == "training" and before.waiting_for == "batch"
            if waited and place >= 0 and ends[place] >= before.start:
                found.append(span.start - float(ends[place]))
        return found

    def begins(self) -> list[float]:
        """From the end of publishing to the first engine that loads."""
        loads = sorted(span.start for span in self.loading)
        published = [span for span in self.rank0 if span.state == "publishing"]
        places = np.searchsorted(loads, [span.start for span in published]).tolist()
        pairs = zip(published, places, strict=True)
        return [max(0.0, loads[place] - span.end) for span, place in pairs if place < len(loads)]

    def asks(self) -> list[float]:
        """From new weights to the first response, of engines that had none meanwhile."""
        return [
            idle.seconds
            for spans in self.engines.values()
            for load, idle, busy in zip(spans, spans[1:], spans[2:], strict=False)
            if (load.state, idle.state, busy.state) == ("loading", "idle", "busy")
        ]


def _mean(logs: Sequence[_Log], of: Callable[[_Log], list[float]]) -> float:
    values = [value for log in logs for value in of(log)]
    return float(np.mean(values)) if values else 0.0


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """What the log has of each response; [n] each."""

    group: NDArray[np.int64]
    engine: NDArray[np.int64]
    prompt: NDArray[np.int64]
    length: NDArray[np.int64]
    begun: Floats
    ended: Floats

    @classmethod
    def read(cls, run: Path) -> _Samples:
        try:
            table = read_table(run, "samples")
        except SegmentBroken as error:
            raise _lacks(run, f"{error.path}, which {error.what}") from None
        table = table.filter(pc.greater_equal(table["group"], 0))
        if not len(table):
            raise _lacks(run, "no sample log")
        return cls(
            group=table["group"].to_numpy(),
            engine=table["engine"].to_numpy(),
            prompt=pc.list_value_length(table["prompt_ids"]).to_numpy(),
            length=pc.list_value_length(table["response_ids"]).to_numpy(),
            begun=table["started_at"].to_numpy(),
            ended=table["finished_at"].to_numpy(),
        )

    def where(self, kept: NDArray[np.bool_]) -> _Samples:
        return _Samples(**{name: column[kept] for name, column in vars(self).items()})

    def lengths(self, last: Row) -> Lengths:
        """Of every group, those of the first steps included: lengths are the model's, not the
        machine's."""
        order = np.argsort(self.group, kind="stable")
        cuts = np.flatnonzero(np.diff(self.group[order])) + 1
        equal = number(last, "flow/dropped_equal") or 0.0
        kept = number(last, "flow/consumed") or 0.0
        return Lengths(
            groups=tuple(tuple(group.tolist()) for group in np.split(self.length[order], cuts)),
            prompts=tuple(self.prompt[order][[0, *cuts]].tolist()),
            equal=equal / (equal + kept) if equal else 0.0,
        )


@dataclass(frozen=True)
class _Slower:
    """By how much one side is slower while the other works."""

    by: float
    assumed: bool


def _fit_training(logs: Sequence[_Log], assumed: float) -> tuple[float, tuple[float, ...], _Slower]:
    """Seconds of a token, factors by which steps vary, and how much an engine beside it matters:

    seconds of a step = tokens x seconds of a token + slower x seconds beside an engine
    """
    took, beside, counts = [], [], []
    for log in logs:
        training, works = log.training, log.works
        ends = np.array([span.end for span in training])
        for row in log.rows:
            place = int(np.searchsorted(ends, number(row, "time") or 0.0)) - 1
            tokens = (number(row, "tokens/trained") or 0.0) + (number(row, "tokens/prompt") or 0.0)
            if place >= 0 and tokens:
                took.append(training[place].seconds)
                beside.append(_overlap(training[place], works))
                counts.append(tokens)
    seconds, shared, size = np.array(took), np.array(beside), np.array(counts)
    slower = _Slower(assumed, True)
    if np.std(shared / seconds) >= SEEN:
        table = np.stack([np.ones(len(seconds)), shared / size], axis=1)
        found = np.linalg.lstsq(table, seconds / size)[0][1]
        slower = _Slower(float(np.clip(found, 0.0, SLOWER[-1])), False)
    alone = (seconds - slower.by * shared) / size
    spread = np.quantile(alone, np.linspace(0.03, 0.97, 16)).clip(0.1 * alone.mean())
    return float(alone.mean()), tuple(np.round(spread / spread.mean(), 4).tolist()), slower


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    fixed_s: float
    each_s: float
    prompt_s: float
    residual: float
    slower: _Slower


def _fit_decoding(logs: Sequence[_Log], assumed: float) -> _Decoding:
    """seconds of a response = (once + fixed x tokens + each x tokens x responses beside it)
                               / (1 - slower x share beside the trainer)

    `once` is divided over the responses that begin together."""
    parts = []
    for log in logs:
        for index, spans in log.engines.items():
            samples = log.samples
            kept = (samples.begun >= spans[0].start) & (samples.ended <= spans[-1].end)
            of = samples.where(kept & (samples.engine == index))
            parts += [_Beside(of, spans, log.training, log.places)] if len(of.begun) else []
    if not parts:
        raise UserError.of("--from", "no response of a step that counts", "name a longer run")
    share = np.concatenate([part.share for part in parts])
    slower = _Slower(assumed, True)
    if np.std(share) >= SEEN:
        least = min(SLOWER, key=lambda by: _fit_at(parts, by)[1])
        slower = _Slower(float(least), False)
    (fixed, each, once), residual = _fit_at(parts, slower.by)
    together = float(np.mean(np.concatenate([part.together for part in parts])))
    return _Decoding(
        fixed_s=fixed, each_s=each, prompt_s=once / together, residual=residual, slower=slower
    )


def _fit_at(parts: Sequence[_Beside], slower: float) -> tuple[list[float], float]:
    """(fixed, each, once) by least squares, none negative, and the relative residual."""
    best, least = [1.0, 0.0, 0.0], math.inf
    for _ in range(ROUNDS):  # which tokens came when follows from the fit
        before, rows = best, []
        for part in parts:
            seconds, beside = part.measure(best, slower)
            columns = [part.tokens, part.tokens * beside, np.ones(len(seconds))]
            rows.append(np.stack(columns, axis=1) / seconds[:, None])
        table, least = np.concatenate(rows), math.inf
        for used in ([0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            found = np.zeros(3)
            found[used] = np.linalg.lstsq(table[:, used], np.ones(len(table)))[0]
            left = float(np.sqrt(np.mean((1 - table @ found) ** 2)))
            if (found >= 0).all() and left < least:
                # Relative errors favour short times: in all it takes what was measured.
                best, least = (found * len(table) / (table @ found).sum()).tolist(), left
        if np.allclose(before, best, rtol=1e-3, atol=1e-9):
            break
    return best, least


class _Beside:
    """The responses of one engine over time, which it samples in its busy spans."""

    def __init__(
        self, samples: _Samples, spans: Sequence[Span], training: Sequence[Span], places: int
    ) -> None:
        order = np.argsort(samples.begun, kind="stable")
        begun, ended = samples.begun[order], samples.ended[order]
        # What had no place waited until enough others had ended.
        begun[places:] = np.maximum(begun[places:], np.sort(ended)[: max(0, len(ended) - places)])
        busy = [span for span in spans if span.state == "busy"]
        edges = [at for span in (*busy, *training) for at in (span.start, span.end)]
        self._times = np.unique(np.concatenate([begun, ended, edges]))
        middle = (self._times[1:] + self._times[:-1]) / 2
        self._trains = _within(middle, training)
        self._busy = np.diff(self._times) * _within(middle, busy)
        self._count = np.searchsorted(np.sort(begun), middle)
        self._count -= np.searchsorted(np.sort(ended), middle)
        self._begun, self._ended = begun, ended
        kept = self._between(self._busy) > 1e-4
        self._begun, self._ended = begun[kept], ended[kept]
        self.tokens = samples.length[order][kept].astype(np.float64)
        self.share = self._between(self._busy * self._trains) / self._between(self._busy)
        self.together = np.searchsorted(begun, self._begun + 0.1)
        self.together -= np.searchsorted(begun, self._begun - 0.1)

    def _between(self, of_interval: Floats, begun: Floats | None = None) -> Floats:
        """Sum over each response's life."""
        total = np.concatenate([[0.0], np.cumsum(of_interval)])
        start = np.interp(self._begun if begun is None else begun, self._times, total)
        found: Floats = np.interp(self._ended, self._times, total) - start
        return found

    def measure(self, fit: Sequence[float], slower: float) -> tuple[Floats, Floats]:
        """Seconds of work in each response, and how many there were on average over its tokens, the
        first of which comes after `once`."""
        work = self._busy * (1 - slower * self._trains)
        grown = work / (fit[0] + fit[1] * np.maximum(1, self._count))
        total = np.concatenate([[0.0], np.cumsum(work)])
        first = np.interp(self._begun, self._times, total) + fit[2]
        begun = np.minimum(np.interp(first, total, self._times), self._ended - 1e-5)
        tokens = np.maximum(self._between(grown, begun), 1e-12)
        return self._between(work), self._between(grown * self._count, begun) / tokens


def _within(times: Floats, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """`spans` follow each other."""
    starts, ends = ([getattr(span, key) for span in spans] for key in ("start", "end"))
    inside: NDArray[np.bool_] = np.searchsorted(starts, times) > np.searchsorted(ends, times)
    return inside


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """Seconds of `span` in which one of the others was; of several engines' at most all."""
    inside = (min(span.end, one.end) - max(span.start, one.start) for one in others)
    return min(span.seconds, sum(seconds for seconds in inside if seconds > 0))

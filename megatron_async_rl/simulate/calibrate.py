"""Rates and lengths of a run, from its own logs: metrics.jsonl, samples/, timeline/.

    decoding    fit of an engine's busy seconds to its steps, tokens and new responses
    training    fit of the seconds of each step to its tokens
    overlap     how much slower either side is while the other works
    others      means over the spans of the timelines

Invariants:
- the first fifth of the steps does not count, nor the end, when no more prompts are admitted;
- a rate that a run cannot show is assumed, and `RunCalibration.as_text` reports it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.metrics.log import number, read_newest
from megatron_async_rl.metrics.timeline import Span, read_timeline
from megatron_async_rl.report.samples import log_readable
from megatron_async_rl.samples.segments import read_table
from megatron_async_rl.simulate.rates import ResponseLengths, SimulationRates

Measurements = NDArray[np.float64]

MIN_STEPS = 6
NEWEST_STEPS = 20_000
"""Number of last steps of a longer run from which rates are derived."""
TOGETHER_S = 0.02
"""Responses that begin within this time of each other are one burst."""
SLOWER = np.linspace(0.0, 0.8, 161)
"""Candidate slow-downs of one side by the other, as shares."""
SEEN = 0.2
"""Smallest standard deviation of the share of a step, or a response, that overlaps with the other
side's work, from which its effect can be fitted."""


@dataclass(frozen=True, kw_only=True)
class RunCalibration:
    """Calibration of the simulation. `ranks`: the trainer's, in the run. `residual`: root mean
    square of the residual of the decoding fit, relative to a response's seconds. `assumed`: rates
    that the run could not show."""

    rates: SimulationRates
    lengths: ResponseLengths
    ranks: int
    residual: float
    assumed: tuple[str, ...]

    def rates_of(self, config: Config) -> SimulationRates:
        """Return the rates for `config`: the training time is inversely proportional to the
        ranks."""
        assert config.rollout is not None
        token_s = self.rates.train_token_s * self.ranks / config.policy.parallel.ranks
        # Only the part that depends on the config changes; decoding depends on the hardware.
        return replace(self.rates, train_token_s=token_s, places=config.rollout.max_concurrent)

    def as_text(self) -> str:
        rates = self.rates
        ((fixed, each),) = rates.decode
        trainer, engine = (
            "assumed" if key in self.assumed else "measured"
            for key in ("trainer_beside", "engine_beside")
        )
        return (
            f"decoding   a token takes {fixed * 1e3:.3g} ms + {each * 1e3:.3g} ms x responses, a"
            " new"
            f" response {rates.prompt_s * 1e3:.3g} ms; the fit is {self.residual:.0%} off\n"
            f"trainer    {rates.train_token_s * 1e3:.3g} ms a token, publishing"
            f" {rates.publish_s:.3g} s; an engine loads in {rates.load_s:.3g} s\n"
            f"overlap    the trainer runs at {rates.trainer_beside:.0%} while an engine works"
            f" ({trainer}), an engine at {rates.engine_beside:.0%} while it does ({engine})"
        )


def calibrate(runs: Sequence[Path], cores: int | None) -> RunCalibration:
    """Calibrate the simulation with runs on one machine. A synchronous and an overlapping run
    together show how much trainer and engines slow each other. `cores`: the cores that they shared,
    from which the slow-down follows if no log shows it; null if they shared none. Raises UserError
    for a run with too little data."""
    logs = [_RunLog(run) for run in runs]
    first, processes = logs[0], logs[0].ranks + len(logs[0].engines)
    # Times of different layouts cannot be averaged.
    if any(one.ranks != first.ranks for one in logs):
        raise UserError.of("--from", "the runs have different policy.parallel.ranks", "name one")
    # Default if no log shows the effect: processes share cores evenly.
    slower = 1.0 - min(1.0, (cores or processes) / processes)
    token_s, spread, trainer_slower = _fit_training(logs, slower)
    (fixed, each, prompt_s), residual, engine_slower = _fit_decoding(logs, slower)
    beside = {"trainer_beside": trainer_slower, "engine_beside": engine_slower}
    by = {key: slower if found is None else found for key, found in beside.items()}

    def mean(of: Callable[[_RunLog], Sequence[float]]) -> float:
        values = [value for log in logs for value in of(log)]
        return float(np.mean(values)) if values else 0.0

    rates = SimulationRates(
        decode=((fixed, each),),
        prompt_s=prompt_s,
        places=first.places,
        ask_s=mean(_RunLog.asks),
        take_s=mean(lambda log: log.takes(by["trainer_beside"])),
        train_token_s=token_s,
        train_spread=spread,
        publish_s=mean(lambda log: [span.seconds for span in log.publishing]),
        load_s=mean(lambda log: log.loads(by["engine_beside"])),
        **{key: 1.0 - value for key, value in by.items()},
    )
    return RunCalibration(
        rates=rates,
        lengths=first.lengths(),
        ranks=first.ranks,
        residual=residual,
        assumed=tuple(key for key, found in beside.items() if found is None),
    )


def _lacks(run: Path, what: str) -> UserError:
    fix = "name a run with samples.keep_mib above 0, after some dozen steps"
    return UserError.of("--from", f"{run} holds {what}: too little to derive rates", fix)


class _RunLog:
    """One run: the rows and spans of the steps that count, and the samples of all steps, an array
    [n] for each column of the log."""

    def __init__(self, run: Path) -> None:
        """Raise UserError for a run with too little data."""
        if not (run / "metrics.jsonl").is_file():
            raise _lacks(run, "no metrics.jsonl")
        rows = read_newest(run, NEWEST_STEPS)
        try:
            tree = read_tree((run / "config.yaml").read_text(encoding="utf-8"))[0]
            self.ranks, ratio = tree["policy"]["parallel"]["ranks"], tree["flow"]["async_ratio"]
            self.places = tree["rollout"]["max_concurrent"]
        except (OSError, UnicodeDecodeError, KeyError, TypeError, YamlFault):
            raise _lacks(run, "no config.yaml of a run that samples") from None
        # Without the warm-up at the start, and the end, at which engines run out of work.
        self.rows = rows[len(rows) // 5 : len(rows) - math.ceil(ratio) - 1]
        if len(self.rows) < MIN_STEPS:
            raise _lacks(run, f"only {len(rows)} steps")
        self.last = rows[-1]
        since, until = (number(row, "time") or 0.0 for row in (self.rows[0], self.rows[-1]))
        tracks = {
            name: [span for span in spans if since <= span.start and span.end <= until]
            for name, spans in read_timeline(run).items()
        }
        self.rank0 = tracks.pop("rank 0", [])
        self.engines = {
            int(name.partition("-")[2]): track for name, track in tracks.items() if track
        }
        # Both sides are needed, because rates are derived from their overlap.
        if not self.rank0 or not self.engines:
            raise _lacks(run, "no timeline of trainer and engines")
        self.training = [span for span in self.rank0 if span.state == "training"]
        self.publishing = [span for span in self.rank0 if span.state == "publishing"]
        spans = list(itertools.chain(*self.engines.values()))
        self.loading = [span for span in spans if span.state == "loading"]
        self.works = [span for span in spans if span.state in ("busy", "loading")]
        self.samples = _read_samples(run)

    def lengths(self) -> ResponseLengths:
        """Return the lengths of every group, including those of the first steps, because lengths
        depend on the model, not on the machine."""
        group = self.samples["group"]
        order = np.argsort(group, kind="stable")
        # Group by group, because responses to one prompt have similar lengths.
        cuts = np.flatnonzero(np.diff(group[order])) + 1
        length, prompt = self.samples["length"][order], self.samples["prompt"][order]
        equal, kept = (
            number(self.last, f"flow/{key}") or 0.0 for key in ("dropped_equal", "consumed")
        )
        return ResponseLengths(
            groups=tuple(tuple(group.tolist()) for group in np.split(length, cuts)),
            prompts=tuple(prompt[[0, *cuts]].tolist()),
            equal=equal / (equal + kept) if equal else 0.0,
        )

    def takes(self, slower: float) -> list[float]:
        """Return the seconds of the trainer between each batch's last response, or the end of the
        previous step if that is later, and the batch's step."""
        ends, found = np.sort(self.samples["ended"]), []
        for before, span in itertools.pairwise(self.rank0):
            if span.state in ("distributing", "training") and before.waiting_for == "batch":
                place = int(np.searchsorted(ends, span.start)) - 1
                # The wait for that response is the engines' time, not the trainer's.
                last = float(ends[place]) if place >= 0 else before.start
                # In runs of earlier versions, the wait contained the distribution.
                end = span.end if span.state == "distributing" else before.end
                own = replace(before, start=max(before.start, last), end=end)
                found.append(own.seconds - slower * _overlap(own, self.works))
        return found

    def loads(self, slower: float) -> list[float]:
        return [one.seconds - slower * _overlap(one, self.training) for one in self.loading]

    def asks(self) -> list[float]:
        """Return the times from new weights to the first response, for engines that had none
        meanwhile."""
        return [
            idle.seconds
            for spans in self.engines.values()
            for load, idle, busy in zip(spans, spans[1:], spans[2:], strict=False)
            if (load.state, idle.state, busy.state) == ("loading", "idle", "busy")
        ]


def _read_samples(run: Path) -> dict[str, NDArray[Any]]:
    with log_readable():
        table = read_table(run, "samples")
    # Negative groups are held-out evaluation.
    table = table.filter(pc.greater_equal(table["group"], 0))
    if not len(table):
        raise _lacks(run, "no sample log")
    columns = {
        "group": table["group"],
        "engine": table["engine"],
        "prompt": pc.list_value_length(table["prompt_ids"]),
        "length": pc.list_value_length(table["response_ids"]),
        "begun": table["started_at"],
        "ended": table["finished_at"],
    }
    return {name: column.to_numpy() for name, column in columns.items()}


def _fit_training(
    logs: Sequence[_RunLog], assumed: float
) -> tuple[float, tuple[float, ...], float | None]:
    """Return seconds per token, factors of the steps' variation, and the slow-down by an engine
    (None if the data does not show it)."""
    steps = []
    for log in logs:
        ends = np.array([span.end for span in log.training])
        for row in log.rows:
            place = int(np.searchsorted(ends, number(row, "time") or 0.0)) - 1
            tokens = (number(row, "tokens/trained") or 0.0) + (number(row, "tokens/prompt") or 0.0)
            if place >= 0 and tokens:
                span = log.training[place]
                steps.append((span.seconds, _overlap(span, log.works), tokens))
    seconds, shared, size = np.array(steps).T
    slower = _slower(seconds, shared, size)
    alone = (seconds - (assumed if slower is None else slower) * shared) / size
    # Sixteen quantiles keep the variation of the steps without their outliers.
    spread = np.quantile(alone, np.linspace(0.03, 0.97, 16)).clip(0.1 * alone.mean())
    return float(alone.mean()), tuple(np.round(spread / spread.mean(), 4).tolist()), slower


def _slower(seconds: Measurements, beside: Measurements, done: Measurements) -> float | None:
    """Return the slow-down of one side while the other works, as a share; None if the data does not
    show it. It is fitted to pieces of its work of `seconds`, including `beside` seconds of overlap
    with the other side:

    log(seconds of the work) = log(its seconds alone) - log(1 - slower x share of overlap)
    """
    share, used = beside / seconds, done > 0
    # Without variation of the overlap, its effect cannot be separated from the rate.
    if np.std(share) < SEEN:
        return None
    took, share, weight = np.log(seconds[used] / done[used]), share[used], seconds[used]

    def left(slower: float) -> float:
        alone = took + np.log(1 - slower * share)
        return float(np.cov(alone, aweights=weight))

    # Choose the slow-down whose residual does not correlate with the overlap.
    return float(min(SLOWER, key=left))


def _fit_decoding(
    logs: Sequence[_RunLog], assumed: float
) -> tuple[tuple[float, float, float], float, float | None]:
    """Return (fixed, each, per new response), the residual of the fit, and the slow-down of an
    engine by the trainer (None if the data does not show it), over pieces of the engines' time:

    busy seconds - slower x overlapping seconds
        = fixed x steps + each x tokens + per new response x responses that begin
    """
    pieces = [_pieces(log, index, spans) for log in logs for index, spans in log.engines.items()]
    busy, beside, steps, tokens, begun = np.concatenate(pieces, axis=1)
    if not begun.sum():
        raise UserError.of("--from", "no response of a step that counts", "name a longer run")
    table = np.stack([steps, tokens, begun], axis=1)

    def fit(slower: float) -> tuple[float, Measurements]:
        """Return the residual, relative to each piece, and the three rates, which are not
        negative."""
        work = busy - slower * beside
        best, minimum = np.zeros(3), math.inf
        for used in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            found = np.zeros(3)
            found[used] = np.linalg.lstsq((table / work[:, None])[:, used], np.ones(len(work)))[0]
            left = float(np.sqrt(np.mean((1 - table @ found / work) ** 2)))
            if (found >= 0).all() and left < minimum:
                best, minimum = found, left
        # Scaled so that an engine's total time equals the measured one.
        return minimum, best * work.sum() / (table @ best).sum()

    slower = _slower(busy, beside, begun)
    by = assumed if slower is None else slower
    for width in (0.1, 0.005) if slower is not None else ():
        near = np.clip(by + np.linspace(-width, width, 41), 0.0, SLOWER[-1])
        by = slower = float(min(near, key=lambda one: fit(one)[0]))
    left, rates = fit(by)
    fixed, each, prompt_s = rates.tolist()
    return (fixed, each, prompt_s), left, slower


def _pieces(log: _RunLog, engine: int, spans: Sequence[Span]) -> Measurements:
    """Return [5, n]: an engine's time, divided at the moments at which responses begin together or
    new weights arrive: busy seconds, seconds of overlap with the trainer, steps, tokens, responses
    that begin."""
    of, training = log.samples, log.training
    kept = (of["begun"] >= spans[0].start) & (of["ended"] <= spans[-1].end)
    kept &= of["engine"] == engine
    order = np.flatnonzero(kept)[np.argsort(of["begun"][kept], kind="stable")]
    begun, ended, length = (of[name][order] for name in ("begun", "ended", "length"))
    if not len(begun):
        return np.zeros((5, 0))
    # A response without a slot waited until enough others had ended.
    held = log.places
    begun[held:] = np.maximum(begun[held:], np.sort(ended)[: max(0, len(ended) - held)])
    spans_busy = [span for span in spans if span.state == "busy"]
    starts = [*begun[np.diff(begun, prepend=-np.inf) > TOGETHER_S], ended.max()]
    starts += [span.end for span in spans if span.state == "loading"]
    edges = [at for span in (*spans_busy, *training) for at in (span.start, span.end)]
    cuts, times = np.unique(starts), np.unique(np.concatenate([begun, ended, edges, starts]))
    middle = (times[1:] + times[:-1]) / 2
    busy = np.diff(times) * _within(middle, spans_busy)

    def until(at: Measurements, of_interval: Measurements) -> Measurements:
        total = np.concatenate([[0.0], np.cumsum(of_interval)])
        return np.asarray(np.interp(at, times, total))

    life = until(ended, busy) - until(begun, busy)
    rate = np.where(life > 1e-4, length / np.maximum(life, 1e-4), 0.0)
    running = np.searchsorted(begun, middle) - np.searchsorted(np.sort(ended), middle)
    last = np.argsort(ended)
    grown, gone = (np.concatenate([[0.0], np.cumsum(one)]) for one in (rate, rate[last]))
    rates = grown[np.searchsorted(begun, middle)] - gone[np.searchsorted(ended[last], middle)]

    sums = [
        busy,
        busy * _within(middle, training),
        busy * rates / np.maximum(1, running),
        busy * rates,
    ]
    seconds, beside, steps, tokens = (np.diff(until(cuts, one)) for one in sums)
    place = np.minimum(np.searchsorted(cuts, begun, side="right") - 1, len(cuts) - 2)
    own = until(np.minimum(ended, cuts[place + 1]), busy) - until(begun, busy)
    # A response that spans a whole piece has made a token in each step.
    np.maximum.at(steps, place, rate * own)
    begin = np.bincount(place, minlength=len(steps)).astype(np.float64)
    return np.stack([seconds, beside, steps, tokens, begin])[:, seconds > 1e-4]


def _within(times: Measurements, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return the times that are within a span. `spans` follow each other."""
    starts, ends = ([getattr(span, key) for span in spans] for key in ("start", "end"))
    inside: NDArray[np.bool_] = np.searchsorted(starts, times) > np.searchsorted(ends, times)
    return inside


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """Return the seconds of `span` in which one of the others was active; for several engines at
    most all of them."""
    inside = (min(span.end, one.end) - max(span.start, one.start) for one in others)
    return min(span.seconds, sum(seconds for seconds in inside if seconds > 0))

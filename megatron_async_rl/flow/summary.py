"""Metrics of a batch of samples (rewards, lengths, lags), of what was dropped meanwhile, and of
what engines and controller did between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.flow.engine_task import EngineSlot
from megatron_async_rl.flow.updates import Relayed, Transfer
from megatron_async_rl.samples.rank_batch import RankBatch
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Request

MetricValue = float | int | str | list[int] | list[float]


COUNTS = (
    "flow/in_flight",
    "flow/waiting",
    "flow/buffer",
    "flow/admitted",
    "flow/consumed",
    "flow/dropped_equal",
    "flow/dropped_late",
    "flow/dropped_failed",
    "flow/aborted",
    "flow/replayed",
)


def summarise(
    batch: RankBatch, max_lag: int, update_norm: float | None = None
) -> dict[str, MetricValue]:
    """Metrics of what this step trains on: the samples whose reward did not fail. Keys are
    documented in docs/metrics.md; one without data is left out.

    `lag/histogram` has one count of response tokens per lag, from 0 to at least `max_lag`.
    `update_norm`: how far the step moved the weights, where a control measured it.
    """
    errors: dict[str, MetricValue] = {"reward/errors": int((~batch.valid).sum())}
    equal = _equal_groups(batch)
    if not batch.valid.any():
        return errors
    if not batch.valid.all():
        batch = batch.select(np.flatnonzero(batch.valid))
    lags = batch.version - batch.versions
    starts = batch.version - batch.start_versions
    mixed = batch.start_versions != batch.last_versions
    metrics: dict[str, MetricValue] = {
        **errors,
        "response/length_mean": float(batch.lengths.mean()),
        "response/length_max": int(batch.lengths.max()),
        "response/truncated": float(batch.truncated.mean()),
        "response/mixed_versions": float(mixed.mean()),
        "lag/start_mean": float(starts.mean()),
        "lag/start_max": int(starts.max()),
        "lag/mean": float(lags.mean()),
        "lag/max": int(lags.max()),
        "lag/histogram": np.bincount(lags, minlength=max_lag + 1).tolist(),
        "trained/length_histogram": length_histogram(batch.lengths),
        "tokens/trained": int(batch.trained.sum()),
        "tokens/prompt": int(batch.prompt_lengths.sum()),
    }
    if not batch.loss_mask.all():
        # A turn begins where the token before is not of it: another sample's, or not trained on.
        before = np.concatenate(([0], batch.loss_mask[:-1]))
        before[batch.starts[:-1]] = 0
        metrics["response/turns_mean"] = float((batch.loss_mask > before).sum() / len(batch))
        metrics["response/environment_share"] = float(1.0 - batch.loss_mask.mean())
    if batch.segment_starts.null_count < len(batch):
        _, segments = batch.segments(np.arange(len(batch)))
        metrics["response/segments_mean"] = float(segments.mean())
    if update_norm is not None:
        metrics["staleness/drift"] = int(starts.max()) * update_norm

    if batch.sampled.any():
        metrics["reward/mean"] = float(batch.rewards.mean())
        if len(batch) > 1:
            metrics["reward/std"] = float(batch.rewards.std())
        metrics |= equal | _part_means(batch)
    return metrics


def _equal_groups(batch: RankBatch) -> dict[str, MetricValue]:
    """Over groups of several samples, one alone equals nothing. Failed rewards teach nothing
    either."""
    groups = int(batch.group.max()) + 1
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, batch.group[batch.valid], batch.rewards[batch.valid])
    np.maximum.at(highest, batch.group[batch.valid], batch.rewards[batch.valid])
    several = np.bincount(batch.group, minlength=groups) > 1
    if not several.any():
        return {}
    return {"reward/equal_groups": float(np.mean((lowest >= highest)[several]))}


def _part_means(batch: RankBatch) -> dict[str, MetricValue]:
    values: dict[str, list[float]] = {}
    for parts in batch.reward_parts.to_pylist():
        for name, value in parts or ():
            values.setdefault(name, []).append(value)
    return {
        "reward/part/NAME".replace("NAME", name): float(np.mean(every))
        for name, every in values.items()
    }


def summarise_dropped(samples: Sequence[SampleRow]) -> dict[str, MetricValue]:
    """Metrics of the responses that were sampled to their end and dropped since the last step; none
    where there were none."""
    if not samples:
        return {}
    lengths = [sample.length for sample in samples]
    metrics: dict[str, MetricValue] = {
        "dropped/responses": len(samples),
        "dropped/length_mean": float(np.mean(lengths)),
        "dropped/length_histogram": length_histogram(lengths),
    }
    rewards = [sample.reward for sample in samples if sample.valid]
    if rewards:
        metrics["dropped/reward_mean"] = float(np.mean(rewards))
    return metrics


def length_histogram(lengths: Sequence[int] | NDArray[np.int64]) -> list[int]:
    """Bin i counts the lengths from 2^i up to, and not including, 2^(i + 1); lengths are at least
    1."""
    bins: list[int] = np.bincount(np.frexp(lengths)[1] - 1).tolist()
    return bins


@dataclass(frozen=True, kw_only=True)
class EngineCounts:
    """One engine, as the controller saw it last."""

    alive: bool
    version: int
    in_flight: int
    tokens: int
    busy_s: float
    restarts: int
    generated: int = 0
    """Tokens of `tokens` that are for training."""


def engine_counts(slot: EngineSlot) -> EngineCounts:
    report = slot.report
    return EngineCounts(
        alive=slot.serving,
        version=slot.version,
        in_flight=len(slot.held),
        tokens=report.tokens if report else 0,
        generated=report.generated if report else 0,
        busy_s=report.busy_s if report else 0.0,
        restarts=slot.restarts,
    )


def describe_flow(stats: Mapping[str, Any], scoring: int) -> str:
    """Return one line for the stall report. `stats`: the controller's; `scoring`: number of groups
    that wait for their reward."""
    engines = "; ".join(
        f"engine {index}: {'version ' + str(one.version) if one.alive else 'lost'},"
        f" {one.in_flight} in flight"
        for index, one in enumerate(stats["engines"])
    )
    unscored = f" {scoring} groups wait for their reward," if scoring else ""
    return (
        f"version {stats['version']}, {stats['waiting']} waiting, {stats['buffer']} ready,"
        f"{unscored} the oldest for {stats['oldest_in_flight_s']:.0f} s; {engines}"
    )


def flow_metrics(counts: Mapping[str, float]) -> dict[str, MetricValue]:
    """`counts` by the metrics' names without `flow/`; others are passed over."""
    return {key: counts[name] for key in COUNTS if (name := key.removeprefix("flow/")) in counts}


def engine_metrics(
    now: Sequence[EngineCounts], before: Sequence[EngineCounts], seconds: float
) -> dict[str, MetricValue]:
    """Metrics of the `seconds` between `before` and `now`; engines that `before` lacks have joined
    since.

    Counts of an engine are since it started: an engine with fewer than before was restarted, and
    all its counts are new.
    """
    new = EngineCounts(alive=True, version=0, in_flight=0, tokens=0, busy_s=0.0, restarts=0)
    earlier = [*before, *[new] * (len(now) - len(before))]
    busy = [_since(new.busy_s, old.busy_s) for new, old in zip(now, earlier, strict=True)]
    shares = [min(1.0, spent / seconds) for spent in busy] if seconds > 0 else []
    busy_shares: dict[str, MetricValue] = (
        {"engine/busy_share": sum(shares) / len(shares), "engine/busy_shares": shares}
        if shares
        else {}
    )
    return {
        **busy_shares,
        "tokens/generated": int(
            sum(_since(new.generated, old.generated) for new, old in zip(now, earlier, strict=True))
        ),
        "engine/tokens": [
            _since(new.tokens, old.tokens) for new, old in zip(now, earlier, strict=True)
        ],
        "engine/in_flight": [engine.in_flight for engine in now],
        "engine/versions": [engine.version if engine.alive else -1 for engine in now],
        "engine/alive": sum(engine.alive for engine in now),
        "engine/restarts": sum(engine.restarts for engine in now),
    }


def counted(
    now: Sequence[EngineCounts], before: Sequence[EngineCounts], seconds: float
) -> list[EngineCounts]:
    """The `before` of the next `engine_metrics`: what an engine reports late, more than `seconds`,
    counts then."""
    earlier = [*(old.busy_s for old in before), *[0.0] * (len(now) - len(before))]
    limits = [
        old + seconds if new.busy_s >= old else seconds
        for new, old in zip(now, earlier, strict=True)
    ]
    return [
        replace(new, busy_s=min(new.busy_s, limit)) for new, limit in zip(now, limits, strict=True)
    ]


def _since(new: float, old: float) -> float:
    return new - old if new >= old else new


class FlowCounts:
    """Counts of all that came in so far, and of what the last line of metrics had of it."""

    def __init__(self) -> None:
        self.responses = {"samples": 0, "tokens": 0, "truncated": 0, "reward_errors": 0}
        self._logged_at = time.monotonic()
        self._engines: Sequence[EngineCounts] = ()

    def add(self, sample: SampleRow, request: Request) -> None:
        """The tokens of `request`'s prefix were counted with another response."""
        before = 0 if request.prefix is None else len(request.prefix.response_ids)
        self.responses["samples"] += 1
        self.responses["tokens"] += sample.length - before
        self.responses["truncated"] += sample.truncated
        self.responses["reward_errors"] += not sample.valid

    def stats(
        self,
        groups: Mapping[str, int],
        version: int | None,
        slots: Sequence[EngineSlot],
        *,
        waiting: int,
        oldest_s: float,
    ) -> dict[str, Any]:
        """Return counts since the start: `groups`, the scheduler's; those of responses; and
        `engines`, the EngineCounts of each of `slots`. `waiting`: requests that no engine has."""
        return {
            **groups,
            "in_flight": groups["open"] - waiting,
            "waiting": waiting,
            "buffer": groups["ready"],
            "oldest_in_flight_s": oldest_s,
            "version": version,
            "engines": [engine_counts(slot) for slot in slots],
            **self.responses,
        }

    def since_last(
        self,
        stats: Mapping[str, Any],
        slots: Sequence[EngineSlot],
        transfer: Transfer | None,
        relayed: Relayed | None = None,
    ) -> dict[str, MetricValue]:
        """Metrics of the time since the last call. `stats`: the controller's, with the counts of
        each of `slots`. `transfer`: of the version that was loaded last; `relayed`: of the version
        that reached another machine last. Keys are documented in docs/metrics.md."""
        now = time.monotonic()
        engines = [
            counts
            for counts, slot in zip(stats["engines"], slots, strict=True)
            if not slot.evaluates
        ]
        values: dict[str, MetricValue] = {
            **flow_metrics(stats),
            **engine_metrics(engines, self._engines, now - self._logged_at),
        }
        if transfer is not None:
            values |= {
                "weights/publish_s": transfer.seconds,
                "weights/publish_bytes": transfer.nbytes,
                "weights/pause_s": transfer.paused_s,
            }
        if relayed is not None:
            values |= {
                "weights/relay_s": relayed.seconds,
                "weights/relay_bytes": relayed.nbytes,
            }
        self._engines = counted(engines, self._engines, now - self._logged_at)
        self._logged_at = now
        return values


class Ages:
    """Seconds since each group was admitted, by its number. What is kept is for groups that were
    running at the last batch or were admitted since."""

    def __init__(self) -> None:
        self._admitted_at: dict[int, float] = {}

    def begin(self, group: int) -> None:
        self._admitted_at[group] = time.monotonic()

    def keep(self, groups: Iterable[int]) -> None:
        """The others run no longer."""
        self._admitted_at = {group: self._admitted_at[group] for group in groups}

    def of(self, group: int) -> float:
        return time.monotonic() - self._admitted_at[group]

    def oldest(self, groups: Iterable[int]) -> float:
        """0 if there are none."""
        now = time.monotonic()
        return now - min((self._admitted_at[group] for group in groups), default=now)

"""Metrics of a batch of samples (rewards, lengths, lags), of samples dropped meanwhile, and of the
work of engines and controller between two steps; and the groups that are late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.flow.engine_task import EngineSlot
from megatron_async_rl.flow.errors import LateGroup
from megatron_async_rl.flow.router import Requests
from megatron_async_rl.flow.scheduler import Scheduler
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
    """Return metrics of the samples that this step trains on: those whose reward did not fail.
    docs/metrics.md documents the keys; a metric without data is left out.

    `lag/histogram` has one count of response tokens per lag, from 0 to at least `max_lag`.
    `update_norm`: distance that the step moved the weights, if a control measured it.
    """
    errors: dict[str, MetricValue] = {"reward/errors": int((~batch.valid).sum())}
    equal = _equal_groups(batch)
    # The mean of an empty array would be nan.
    if not batch.valid.any():
        return errors
    if not batch.valid.all():
        batch = batch.select(np.flatnonzero(batch.valid))
    lags = batch.version - batch.versions
    # A response is as stale as its oldest token.
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
        # A turn begins where the preceding token belongs to another sample or is not trained on.
        before = np.concatenate(([0], batch.loss_mask[:-1]))
        before[batch.starts[:-1]] = 0
        metrics["response/turns_mean"] = float((batch.loss_mask > before).sum() / len(batch))
        metrics["response/environment_share"] = float(1.0 - batch.loss_mask.mean())
    if batch.segment_starts.null_count < len(batch):
        _, segments = batch.segments(np.arange(len(batch)))
        metrics["response/segments_mean"] = float(segments.mean())
    if update_norm is not None:
        metrics["staleness/drift"] = int(starts.max()) * update_norm

    # Given responses have no reward.
    if batch.sampled.any():
        metrics["reward/mean"] = float(batch.rewards.mean())
        if len(batch) > 1:
            metrics["reward/std"] = float(batch.rewards.std())
        metrics |= equal | _part_means(batch)
    return metrics


def _equal_groups(batch: RankBatch) -> dict[str, MetricValue]:
    """Return the share of groups of several samples whose rewards are all equal. Failed rewards
    count as equal, because they teach nothing, either."""
    groups = int(batch.group.max()) + 1
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, batch.group[batch.valid], batch.rewards[batch.valid])
    np.maximum.at(highest, batch.group[batch.valid], batch.rewards[batch.valid])
    # A group of one sample has no spread, and would count as equal.
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
    """Return metrics of the finished responses that were dropped since the last step; empty without
    any."""
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
    """Return counts by length: bin i counts lengths from 2^i up to, and not including, 2^(i + 1).
    Lengths are at least 1."""
    # frexp: x = m 2^e with 1/2 <= m < 1, so x is in bin e - 1. Exact, unlike a logarithm.
    bins: list[int] = np.bincount(np.frexp(lengths)[1] - 1).tolist()
    return bins


@dataclass(frozen=True, kw_only=True)
class EngineCounts:
    """Counts of one engine in its last report."""

    alive: bool
    version: int
    in_flight: int
    tokens: int
    busy_s: float
    restarts: int
    generated: int = 0
    """Number of `tokens` sampled for training."""


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
    """Return one line for the stall report. `stats`: counts of the controller; `scoring`: number of
    groups that wait for their reward."""
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
    """Return `counts` under the metrics' names with `flow/`, without unknown ones."""
    return {key: counts[name] for key in COUNTS if (name := key.removeprefix("flow/")) in counts}


def engine_metrics(
    now: Sequence[EngineCounts], before: Sequence[EngineCounts], seconds: float
) -> dict[str, MetricValue]:
    """Return metrics of the `seconds` between `before` and `now`. Engines missing in `before` have
    joined since.

    An engine counts since its start: an engine with smaller counts than before was restarted, and
    all its counts are new.
    """
    new = EngineCounts(alive=True, version=0, in_flight=0, tokens=0, busy_s=0.0, restarts=0)
    # An engine that has joined counts from zero.
    earlier = [*before, *[new] * (len(now) - len(before))]
    busy = [_since(new.busy_s, old.busy_s) for new, old in zip(now, earlier, strict=True)]
    # A report may cover a little more than the interval.
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
    """Return the `before` of the next `engine_metrics`, which then counts the busy time above
    `seconds` that an engine reported late."""
    earlier = [*(old.busy_s for old in before), *[0.0] * (len(now) - len(before))]
    # At most the interval: the rest of a late report counts in the next one.
    limits = [
        old + seconds if new.busy_s >= old else seconds
        for new, old in zip(now, earlier, strict=True)
    ]
    return [
        replace(new, busy_s=min(new.busy_s, limit)) for new, limit in zip(now, limits, strict=True)
    ]


def _since(new: float, old: float) -> float:
    # Less than before: the engine restarted and counts from zero.
    return new - old if new >= old else new


class FlowCounts:
    """Counts of all responses so far, and those at the last line of metrics."""

    def __init__(self) -> None:
        self.responses = {"samples": 0, "tokens": 0, "truncated": 0, "reward_errors": 0}
        self._logged_at = time.monotonic()
        self._engines: Sequence[EngineCounts] = ()

    def add(self, sample: SampleRow, request: Request) -> None:
        """Count a response. The tokens of `request`'s prefix were counted with another response."""
        # A continued response must not count its first tokens twice.
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
        """Return counts since the start: `groups` (the scheduler's), the counts of responses, and
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
        """Return metrics of the time since the last call; docs/metrics.md documents the keys.
        `stats`: counts of the controller, with those of each of `slots`. `transfer`: of the version
        loaded last. `relayed`: of the version that last reached another machine."""
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
        # None until the first load: metrics without data are left out.
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
        # One reading of the clock for both: intervals neither overlap nor leave gaps.
        self._engines = counted(engines, self._engines, now - self._logged_at)
        self._logged_at = now
        return values


class Ages:
    """Seconds since each group was admitted, by its number. Groups that were not running at the
    last batch are forgotten."""

    def __init__(self) -> None:
        self._admitted_at: dict[int, float] = {}

    def begin(self, group: int) -> None:
        self._admitted_at[group] = time.monotonic()

    def keep(self, groups: Iterable[int]) -> None:
        """Forget all other groups."""
        self._admitted_at = {group: self._admitted_at[group] for group in groups}

    def of(self, group: int) -> float:
        return time.monotonic() - self._admitted_at[group]

    def oldest(self, groups: Iterable[int]) -> float:
        """Return the largest age; 0 without groups."""
        now = time.monotonic()
        return now - min((self._admitted_at[group] for group in groups), default=now)


def late_groups(scheduler: Scheduler, requests: Requests, ages: Ages) -> list[LateGroup]:
    """Return the groups for which the next batch waits, oldest first."""
    return [
        LateGroup(
            index=index,
            prompt=prompt.id,
            seconds=ages.of(index),
            engines=requests.holders(index),
            unscored=scheduler.unscored(index) is not None,
        )
        for index, prompt in scheduler.running()
    ]

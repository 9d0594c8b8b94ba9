"""What the engines and the controller did between two steps, as metrics.

Counts of an engine are since that engine started: one that has fewer than before was started again, and all it has is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_async_rl.flow.slot import Slot
from megatron_async_rl.flow.summary import MetricValue

COUNTS = (
    "flow/in_flight",
    "flow/waiting",
    "flow/buffer",
    "flow/admitted",
    "flow/consumed",
    "flow/dropped_equal",
    "flow/dropped_late",
    "flow/cut",
    "flow/requeued",
    "flow/replayed",
)


@dataclass(frozen=True, kw_only=True)
class EngineCounts:
    """One engine, as the controller saw it last."""

    alive: bool
    version: int
    in_flight: int
    tokens: int
    busy_s: float
    restarts: int


def engine_counts(slot: Slot) -> EngineCounts:
    report = slot.report
    return EngineCounts(
        alive=slot.alive,
        version=report.version if report else -1,
        in_flight=len(slot.held),
        tokens=report.tokens if report else 0,
        busy_s=report.busy_s if report else 0.0,
        restarts=slot.restarts,
    )


def flow_metrics(counts: Mapping[str, float]) -> dict[str, MetricValue]:
    """`counts` by the metrics' names without `flow/`; others are passed over."""
    return {key: counts[name] for key in COUNTS if (name := key.removeprefix("flow/")) in counts}


def engine_metrics(now: Sequence[EngineCounts], before: Sequence[EngineCounts], seconds: float) -> dict[str, MetricValue]:
    """Of the `seconds` between `before` and `now`; an empty `before` is engines that have just started."""
    earlier = list(before) or [EngineCounts(alive=True, version=0, in_flight=0, tokens=0, busy_s=0.0, restarts=0)] * len(now)
    busy = [_since(new.busy_s, old.busy_s) for new, old in zip(now, earlier, strict=True)]
    shares = [min(1.0, spent / seconds) if seconds > 0 else 0.0 for spent in busy]
    return {
        "engine/busy_share": sum(shares) / len(shares),
        "engine/busy_shares": shares,
        "engine/tokens": [_since(new.tokens, old.tokens) for new, old in zip(now, earlier, strict=True)],
        "engine/in_flight": [engine.in_flight for engine in now],
        "engine/versions": [engine.version if engine.alive else -1 for engine in now],
        "engine/alive": sum(engine.alive for engine in now),
        "engine/restarts": sum(engine.restarts for engine in now),
    }


def counted(now: Sequence[EngineCounts], before: Sequence[EngineCounts], seconds: float) -> list[EngineCounts]:
    """The `before` of the next `engine_metrics`: what an engine reports late, more than `seconds`, counts then."""
    earlier = [old.busy_s for old in before] or [0.0] * len(now)
    most = [old + seconds if new.busy_s >= old else seconds for new, old in zip(now, earlier, strict=True)]
    return [replace(new, busy_s=min(new.busy_s, limit)) for new, limit in zip(now, most, strict=True)]


def _since(new: float, old: float) -> float:
    return new - old if new >= old else new

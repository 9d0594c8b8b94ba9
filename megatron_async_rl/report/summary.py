"""Totals of a run: its summary for the terminal and the report, and dropped compared with trained
samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_async_rl.metrics.log import number
from megatron_async_rl.metrics.status import Status
from megatron_async_rl.report.metric_rows import MetricRows

REGIMES = ("kept", "projected", "skipped")
"""Names by the code in `gac/regime`."""
IN_A_STEP = {
    "training": "time/train_s",
    "publishing": "time/publish_s",
    "waiting": "time/wait_batch_s",
}
"""Parts of a step of rank 0: for samples, on the optimizer step, on handing over weights."""
REASONS = {"flow/dropped_late": "late", "flow/dropped_equal": "of equal reward"}
"""Reasons for which a group was dropped."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    steps: int
    in_steps_s: float
    """Sum of the steps' seconds: start-up, evaluation, checkpoints and stops left out."""
    generated: int
    trained: int
    failed: int
    """Samples of the batches whose reward failed."""
    shares: Mapping[str, float]
    """Shares of `in_steps_s`, by what rank 0 did; sums to 1 with `other`."""
    regimes: Mapping[str, int]
    """Steps by what gradient alignment control did; empty without it."""
    busy_share: float | None
    """Mean over engines and steps; None where engines were not counted."""
    alive: tuple[int, int] | None
    """Engines that take responses at the end, and engines in all."""
    restarts: int
    lag_mean: float | None
    """Versions, mean over trained tokens of the whole run."""
    lag_max: int | None
    before: float | None
    """Held-out `measure` before the first step, and `after` the last one."""
    after: float | None
    measure: str
    """`reward`, or `loss` where responses are given."""

    @property
    def tokens_per_s(self) -> float:
        """Response tokens generated, or trained on where nothing was generated, per second in
        steps."""
        return (self.generated or self.trained) / self.in_steps_s if self.in_steps_s > 0 else 0.0


def summarise_run(rows: MetricRows, status: Status | None) -> Summary:
    in_steps = rows.total("time/step_s")
    shares = {
        name: rows.total(key) / in_steps if in_steps > 0 else 0.0 for name, key in IN_A_STEP.items()
    }
    shares["other"] = max(0.0, 1.0 - sum(shares.values())) if in_steps > 0 else 0.0
    counts = rows.summed("lag/histogram")
    largest = rows.largest("lag/max")
    return Summary(
        steps=rows.total_rows,
        in_steps_s=in_steps,
        generated=int(rows.total("tokens/generated")),
        trained=int(rows.total("tokens/trained")),
        failed=int(rows.total("reward/errors")),
        shares=shares,
        regimes=_regimes(rows),
        busy_share=rows.mean("engine/busy_share"),
        alive=_alive(rows),
        restarts=int(rows.largest("engine/restarts") or 0),
        lag_mean=sum(lag * count for lag, count in enumerate(counts)) / sum(counts)
        if sum(counts)
        else None,
        lag_max=None if largest is None else int(largest),
        before=status.before if status else None,
        after=status.after if status else None,
        measure=status.measure if status else "reward",
    )


def _regimes(rows: MetricRows) -> dict[str, int]:
    """Optimizer steps so far in each of GAC's regimes; a line may hold several; lines by their
    regime where a log has no such counts. Empty without the control."""
    if rows.has("gac/kept"):
        keys = ("gac/kept", "gac/projected", "gac/skips")
        return {name: int(rows.last(key) or 0) for name, key in zip(REGIMES, keys, strict=True)}
    codes = rows.codes
    return {name: codes[code] for code, name in enumerate(REGIMES)} if codes else {}


def _alive(rows: MetricRows) -> tuple[int, int] | None:
    last = next((row for row in reversed(rows.newest) if "engine/alive" in row), None)
    if last is None:
        return None
    engines = last.get("engine/versions")
    alive = int(number(last, "engine/alive") or 0)
    return alive, len(engines) if isinstance(engines, list) else alive


def span(seconds: float) -> str:
    """`0:07`, `12:31`, `3:05:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, kw_only=True)
class DroppedSummary:
    responses: int
    groups: dict[str, int]
    """Dropped groups by reason."""
    length: float
    """Mean tokens of a response, as `trained_length`; rewards are means too."""
    trained_length: float | None
    reward: float | None
    trained_reward: float | None

    @property
    def sentence(self) -> str:
        counted = [
            f"{count:,} {'group' if count == 1 else 'groups'} {reason}"
            for reason, count in self.groups.items()
        ]
        groups = f" ({', '.join(counted)})" if counted else ""
        parts = [f"mean length {self.length:,.1f} tokens{_against(self.trained_length, ',.1f')}"]
        if self.reward is not None:
            parts.append(f"mean reward {self.reward:.3f}{_against(self.trained_reward, '.3f')}")
        were = "response was" if self.responses == 1 else "responses were"
        whose = " of those trained on" if self.trained_length is not None else ""
        return f"{self.responses:,} {were} dropped{groups}: {', '.join(parts)}{whose}"


def compare_dropped(rows: MetricRows) -> DroppedSummary | None:
    """None where nothing was dropped."""
    responses = int(rows.total("dropped/responses"))
    length = rows.mean("dropped/length_mean", weighted=True)
    if length is None:
        return None
    groups = {reason: count for key, reason in REASONS.items() if (count := int(rows.counted(key)))}
    return DroppedSummary(
        responses=responses,
        groups=groups,
        length=length,
        trained_length=rows.mean("response/length_mean"),
        reward=rows.mean("dropped/reward_mean", weighted=True),
        trained_reward=rows.mean("reward/mean"),
    )


def _against(trained: float | None, form: str) -> str:
    return f" against {trained:{form}}" if trained is not None else ""

"""A whole run in a few numbers, for the terminal's last words and the report's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async_rl.observe.read import Row, number
from megatron_async_rl.observe.series import column, numbers, summed, total
from megatron_async_rl.observe.status import Status

REGIMES = ("kept", "projected", "skipped")
"""By the code in `gac/regime`."""
IN_A_STEP = {"training": "time/train_s", "publishing": "time/publish_s", "waiting": "time/wait_batch_s"}
"""What rank 0 spends a step on: for samples, on the optimizer step, on handing over weights."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    steps: int
    in_steps_s: float
    """Sum of the steps' seconds: start-up, evaluation, checkpoints and stops left out."""
    generated: int
    trained: int
    shares: Mapping[str, float]
    """Of `in_steps_s`, by what rank 0 did; sums to 1 with `other`."""
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
    after: float | None

    @property
    def tokens_per_s(self) -> float:
        """Response tokens generated, or trained on where nothing was generated, per second in steps."""
        return (self.generated or self.trained) / self.in_steps_s if self.in_steps_s > 0 else 0.0


def summarise_run(rows: Sequence[Row], status: Status | None) -> Summary:
    in_steps = total(rows, "time/step_s")
    shares = {name: total(rows, key) / in_steps if in_steps > 0 else 0.0 for name, key in IN_A_STEP.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values())) if in_steps > 0 else 0.0
    codes = [int(code) for row in rows if (code := number(row, "gac/regime")) is not None]
    counts = summed(rows, "lag/histogram")
    busy = column(rows, "engine/busy_share")[1]
    largest = numbers(rows, "lag/max")
    return Summary(
        steps=len(rows),
        in_steps_s=in_steps,
        generated=int(total(rows, "tokens/generated")),
        trained=int(total(rows, "tokens/trained")),
        shares=shares,
        regimes={name: codes.count(code) for code, name in enumerate(REGIMES)} if codes else {},
        busy_share=float(busy.mean()) if len(busy) else None,
        alive=_alive(rows),
        restarts=int(max((value for row in rows if (value := number(row, "engine/restarts")) is not None), default=0)),
        lag_mean=sum(lag * count for lag, count in enumerate(counts)) / sum(counts) if sum(counts) else None,
        lag_max=int(max(value for value in largest if value == value)) if any(largest == largest) else None,
        before=status.before if status else None,
        after=status.after if status else None,
    )


def _alive(rows: Sequence[Row]) -> tuple[int, int] | None:
    last = next((row for row in reversed(rows) if "engine/alive" in row), None)
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

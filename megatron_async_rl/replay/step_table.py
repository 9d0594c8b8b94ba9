"""Comparison of a replay with its run, step by step: weights, and how far the recorded samples are
from the replayed policy.

Invariant: a step's ESS and KL belong to the weights before the step. So they are the run's up to
and including the first step whose weights differ, and another policy's afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.table import Table

from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.metrics.replay_record import ReplayedStep

ESS, ESS_SHARE, KL = "ratio/ess", "ratio/ess_ratio", "ratio/kl_k2"
SHOWN = 12
"""Largest number of steps in the printed table."""


def steps_of(
    rows: Sequence[MetricRow], of_run: Mapping[int, MetricRow], verdicts: Mapping[int, bool | None]
) -> list[ReplayedStep]:
    """Return the repeated steps. rows: the replay's lines of metrics. of_run: the run's, by step.
    verdicts: step -> True if its weights have the run's bits; null if that is unknown."""
    found = []
    for row in rows:
        step = int(number(row, "step") or 0)
        there = of_run.get(step, {})
        found.append(
            ReplayedStep(
                step=step,
                identical=verdicts.get(step),
                ess=number(row, ESS),
                ess_share=number(row, ESS_SHARE),
                kl=number(row, KL),
                run_ess=number(there, ESS),
                run_ess_share=number(there, ESS_SHARE),
                run_kl=number(there, KL),
            )
        )
    return found


def show_distance(
    steps: Sequence[ReplayedStep],
    first_different: int | None,
    show: Callable[[str], None],
    draw: Callable[[Table], None],
) -> None:
    """Print how far the recorded samples are from the replayed policy once the weights differ: the
    means, and a table of at most SHOWN steps."""
    later = [one for one in steps if first_different is not None and one.step > first_different]
    known = [one for one in later if one.ess is not None and one.run_ess is not None]
    if not known:
        return
    for label, name in (("ESS", "ess"), ("KL", "kl")):
        here = [value for one in known if (value := getattr(one, name)) is not None]
        there = [value for one in known if (value := getattr(one, f"run_{name}")) is not None]
        if here and there:
            show(
                f"{label} of the recorded samples, from then on: mean"
                f" {sum(here) / len(here):.3g}, last {here[-1]:.3g}"
                f" (the run's: {sum(there) / len(there):.3g}, {there[-1]:.3g})"
            )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("step", "ESS", "share of the samples", "the run's", "KL", "the run's"):
        table.add_column(heading, justify="right")
    for one in _spread(known):
        shares = (one.ess_share, one.run_ess_share)
        ess = [_number(one.ess), *("–" if x is None else f"{x:.1%}" for x in shares)]
        table.add_row(str(one.step), *ess, _number(one.kl), _number(one.run_kl))
    draw(table)
    if len(known) > SHOWN:
        show(f"{SHOWN} of {len(known)} steps are shown; replay.json has all")


def _spread(steps: Sequence[ReplayedStep]) -> list[ReplayedStep]:
    """Return at most SHOWN steps, evenly spread, including the first and the last."""
    if len(steps) <= SHOWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(place * last / (SHOWN - 1))] for place in range(SHOWN)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"

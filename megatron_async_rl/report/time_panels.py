"""The panels that show where a run's time goes: the parts of a step, the engines, the lengths they
sampled, what each process did, and what `mar simulate` predicts at other `async_ratio`s."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.report.metric_rows import (
    Floats,
    column,
    doubling_bins,
    numbers,
    per_engine,
    smooth,
)
from megatron_async_rl.report.panel import Bar, Curve, Panel
from megatron_async_rl.report.run_data import IN_A_STEP, RunData

TRACKS_SHOWN = 12
BARS = 600
"""Resolution of a row of the timeline; it shows at most twice as many bars, and merges shorter
ones."""
ENGINES_SHOWN = 32

ENGINES = ("blue", "green", "amber", "purple", "red", "teal", "brown", "muted")
"""Colours by the engine's number; they repeat."""
TIMES = {"training": "blue", "publishing": "purple", "waiting": "amber", "other": "grey"}
STATES = {
    "training": "blue",
    "publishing": "purple",
    "evaluating": "teal",
    "checkpointing": "brown",
    "restoring": "muted",
    "releasing": "muted",
    "waiting": "sand",
    "busy": "green",
    "loading": "purple",
    "paused": "amber",
    "asleep": "grey",
    "idle": "pale",
}
"""State of a process's timeline -> colour. Another one is drawn in ink."""

SIMULATION = "simulation.json"
"""File of the run directory with `async_ratio` and each of PREDICTED, as lists of one length."""
PREDICTED = ("tokens_per_s", "engine_busy", "trainer_busy", "lag_mean")


def step_time(run: RunData) -> Panel:
    rows = [row for row in run.rows if "time/step_s" in row]
    steps, whole = column(rows, "time/step_s")
    parts = {name: np.nan_to_num(numbers(rows, key)) for name, key in IN_A_STEP.items()}
    parts["other"] = np.maximum(0.0, whole - sum(parts.values()))
    curves = [
        Curve(
            name=f"{name} {run.summary.shares[name]:.0%}",
            colour=TIMES[name],
            x=steps,
            y=values if (trend := smooth(values)) is None else trend,
        )
        for name, values in parts.items()
    ]
    return Panel(
        title="What a step's time goes into",
        unit="seconds per step",
        kind="stack",
        curves=curves,
        low=0,
        overview=True,
    )


def engine_panels(run: RunData) -> list[Panel]:
    mean = f", mean {run.summary.busy_share:.0%}" if run.summary.busy_share is not None else ""
    lines: tuple[tuple[str, str, str, Literal["number", "share", "whole"]], ...] = (
        (f"Engines busy{mean}", "share of the time between steps", "engine/busy_shares", "share"),
        ("In flight per engine", "responses", "engine/in_flight", "number"),
        ("Weights of each engine", "versions behind the policy", "engine/versions", "whole"),
        ("Tokens sampled per engine", "since the last step", "engine/tokens", "number"),
    )
    panels = []
    for title, unit, key, form in lines:
        steps, values = per_engine(run.rows, key)
        curves = [
            Curve(name=f"engine {engine}", colour=ENGINES[engine % len(ENGINES)], x=steps, y=y)
            for engine, y in enumerate(values[:ENGINES_SHOWN])
        ]
        panels.append(
            Panel(
                title=title,
                unit=unit,
                curves=curves,
                form=form,
                low=0,
                high=1.04 if form == "share" else None,
                marks=run.anomalies if key == "engine/busy_shares" else (),
                overview=key != "engine/tokens",
            )
        )
    return [*panels, _lengths(run)]


def _lengths(run: RunData) -> Panel:
    counts = [run.rows.summed(f"{side}/length_histogram") for side in ("trained", "dropped")]
    names, shares = doubling_bins(counts)
    places = np.arange(len(names), dtype=np.float64)
    curves = [
        Curve(name=name, colour=colour, x=places, y=values)
        for values, name, colour in zip(
            shares, ("trained on", "dropped"), ("blue", "red"), strict=True
        )
        if values.any()
    ]
    return Panel(
        title="Lengths of the responses",
        unit="share of the responses",
        kind="columns",
        x_label="tokens" if run.dropped else "tokens; nothing was dropped",
        categories=names,
        curves=curves,
        low=0,
        form="share",
        empty="no lengths were logged",
        overview=True,
    )


def simulation(run: RunData) -> list[Panel]:
    """Predicted speed-up, busy shares and lag over async_ratio, and a diamond for the run itself.
    None where nothing that can be read was predicted from it."""
    try:
        found = json.loads((run.run_dir / SIMULATION).read_text(encoding="utf-8"))
        ratios, *values = (
            np.array(found[key], dtype=np.float64) for key in ("async_ratio", *PREDICTED)
        )
        speed, engines, trainer, lags = (one[np.argsort(ratios)] for one in values)
        ratios, speed_up = np.sort(ratios), speed / speed[0]
    except (OSError, ValueError, TypeError, LookupError):
        return []
    summary, at = run.summary, np.array([run.lag_bound or 0.0])

    def curve(name: str, colour: str, y: Floats, measured: float | None = None) -> list[Curve]:
        found = [Curve(name=f"{name}, predicted", colour=colour, x=ratios, y=y)]
        if measured is not None:
            own, name = np.array([measured]), f"{name}, this run"
            found.append(Curve(name=name, colour=colour, x=at, y=own, style="diamonds"))
        return found

    shown: tuple[tuple[str, str, Literal["number", "share"], list[Curve]], ...] = (
        (
            "Speed-up",
            f"over async_ratio {ratios[0]:g}",
            "number",
            curve("tokens a second", "blue", speed_up, summary.tokens_per_s / speed[0]),
        ),
        (
            "Busy",
            "share of the time",
            "share",
            curve("engines", "green", engines, summary.busy_share)
            + curve("trainer", "blue", trainer),
        ),
        ("Lag", "versions, mean", "number", curve("lag", "amber", lags, summary.lag_mean)),
    )
    return [
        Panel(
            title=f"{title} over async_ratio",
            unit=unit,
            x_label="async_ratio",
            curves=curves,
            x_range=(0.0, 1.03 * max(1.0, float(ratios[-1]))),
            low=0,
            high=1.04 * max(1.0, *(float(curve.y.max()) for curve in curves)),
            form=form,
            overview=True,
        )
        for title, unit, form, curves in shown
    ]


def timeline(run: RunData) -> Panel:
    """One row of bars a process over the seconds of the last steps."""
    window = run.window
    assert window is not None
    tracks = list(window.tracks)[:TRACKS_SHOWN]
    shortest = (window.end - window.start) / BARS
    spans = [
        (row, *part)
        for row, track in enumerate(tracks)
        for part in merge_short(window.tracks[track], shortest)
    ]
    used = {state for _, state, *_ in spans}
    names: dict[str, str] = {}
    for state in (*STATES, *sorted(used - set(STATES))):
        if state in used:
            colour = STATES.get(state, "ink")
            names[colour] = f"{names[colour]}, {state}" if colour in names else state
    return Panel(
        title=f"What each process did, last {len(window.steps)} steps",
        unit="",
        kind="bars",
        x_label="seconds; an upright line is the end of a step",
        categories=tracks,
        bars=[
            Bar(
                row=row,
                start=start - window.start,
                length=end - start,
                colour=STATES.get(state, "ink"),
            )
            for row, state, start, end in spans
        ],
        bar_names=names,
        ends=[(step, at - window.start) for step, at in window.steps],
        x_range=(0.0, window.end - window.start),
        wide=True,
        overview=True,
    )


def merge_short(spans: Sequence[Span], shortest: float) -> Iterator[tuple[str, float, float]]:
    """(state, start, end): spans as they are, but a row of spans that are each shorter than
    `shortest` seconds as pieces of that length, in the state that took the most of each."""
    short: list[Span] = []
    for span in spans:
        ended = short and span.start - short[0].start >= shortest
        if short and (ended or span.seconds >= shortest):
            yield _merged(short)
            short = []
        if span.seconds >= shortest:
            yield span.state, span.start, span.end
        else:
            short.append(span)
    if short:
        yield _merged(short)


def _merged(spans: Sequence[Span]) -> tuple[str, float, float]:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.seconds
    return max(seconds, key=seconds.__getitem__), spans[0].start, spans[-1].end

"""The panels of a run's report, each described once; `charts.py` draws any of them, for the page
and for the sheet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_async_rl.report.panel import Bar, Curve, Level, Panel
from megatron_async_rl.report.run_data import RunData
from megatron_async_rl.report.series import (
    Floats,
    column,
    doubling_bins,
    histograms,
    numbers,
    per_engine,
    smooth,
    summed,
)
from megatron_async_rl.report.summary import IN_A_STEP, REGIMES

TRACKS_SHOWN = 12
ENGINES_SHOWN = 32

ENGINES = ("blue", "green", "amber", "purple", "red", "teal", "brown", "muted")
"""By the engine's number; they repeat."""
REGIME_COLOURS = ("green", "amber", "red")
"""By the code in `gac/regime`: kept, projected, skipped."""
TIMES = {"training": "blue", "publishing": "purple", "waiting": "amber", "other": "grey"}
STATES = {
    "training": "blue",
    "publishing": "purple",
    "evaluating": "teal",
    "checkpointing": "brown",
    "waiting": "sand",
    "busy": "green",
    "loading": "purple",
    "paused": "amber",
    "asleep": "grey",
    "idle": "pale",
}
"""State of a process's timeline -> colour. Another one is drawn in ink."""


def panels_of(run: RunData) -> list[Panel]:
    """The panels for which the run has data, in the order of the page. The first is the main
    one."""
    panels = [_loss(run)] if run.supervised else [_reward(run), _lag(run), _ess(run), _cosine(run)]
    if len(run.evaluations.pass_at):
        panels.append(_pass_at(run))
    panels.append(_time(run))
    if run.summary.busy_share is not None:
        panels += _engines(run)
    groups = SUPERVISED if run.supervised else SAMPLED
    panels += [panel for group in groups if (panel := _curves(run, group)) is not None]
    if run.window is not None:
        panels.append(_timeline(run))
    return panels


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A panel of curves, each a key of the metrics, its name and its colour."""

    title: str
    unit: str
    keys: Sequence[tuple[str, str, str]]
    low: float | None = None
    log: bool = False
    form: Literal["number", "share"] = "number"
    overview: bool = False


_GRADIENT_NORM = _Group(
    title="Gradient norm, before clipping",
    unit="L2 norm",
    keys=(("policy/grad_norm", "", "purple"),),
    log=True,
    overview=True,
)
_LEARNING_RATE = _Group(
    title="Learning rate", unit="per step", keys=(("policy/lr", "", "green"),), low=0
)
SUPERVISED: tuple[_Group, ...] = (_GRADIENT_NORM, _LEARNING_RATE)
SAMPLED: tuple[_Group, ...] = (
    _Group(
        title="Response length",
        unit="tokens",
        keys=(("response/length_mean", "mean", "green"), ("response/length_max", "max", "muted")),
        low=0,
        overview=True,
    ),
    _Group(
        title="Shares of the responses",
        unit="share",
        keys=(
            ("response/truncated", "truncated", "red"),
            ("response/mixed_versions", "of several versions", "purple"),
            ("reward/equal_groups", "groups of equal reward", "amber"),
        ),
        low=0,
        form="share",
    ),
    _GRADIENT_NORM,
    _Group(
        title="Entropy of the policy", unit="nats per token", keys=(("policy/entropy", "", "blue"),)
    ),
    _Group(
        title="Divergence from the behaviour policy",
        unit="nats per token",
        keys=(("ratio/kl_k1", "KL, k1", "blue"), ("ratio/kl_k3", "KL, k3", "purple")),
    ),
    _Group(
        title="Log-prob difference from behaviour",
        unit="nats",
        keys=(
            ("ratio/logp_diff_mean", "mean", "blue"),
            ("ratio/logp_diff_max", "max", "red"),
            ("ratio/logp_diff_lag0_max", "max at lag 0", "green"),
        ),
    ),
    _Group(
        title="Drift since the oldest sample",
        unit="L2 norm: lag × update",
        keys=(("staleness/drift", "", "red"),),
    ),
    _Group(
        title="Clipped tokens",
        unit="share",
        keys=(
            ("clip/positive", "positive advantage", "green"),
            ("clip/negative", "negative advantage", "red"),
        ),
        low=0,
        form="share",
    ),
    _Group(title="Loss", unit="loss", keys=(("policy/loss", "", "blue"),)),
    _LEARNING_RATE,
)


def _curve(run: RunData, key: str, name: str, colour: str, *, log: bool = False) -> Curve | None:
    """`log`: the trend is that of the logarithms."""
    steps, values = column(run.rows, key)
    if not len(steps):
        return None
    if not log:
        return Curve(name=name, colour=colour, x=steps, y=values, trend=smooth(values))
    trend = smooth(np.log(np.where(values > 0, values, np.nan)))
    trend = None if trend is None else np.exp(trend)
    return Curve(name=name, colour=colour, x=steps, y=values, trend=trend)


def _curves(run: RunData, group: _Group) -> Panel | None:
    curves = [
        curve for key in group.keys if (curve := _curve(run, *key, log=group.log)) is not None
    ]
    if not curves:
        return None
    return Panel(
        title=group.title,
        unit=group.unit,
        curves=curves,
        low=group.low,
        log=group.log and any(_spans_decades(curve.y) for curve in curves),
        form=group.form,
        marks=run.anomalies,
        overview=group.overview,
    )


def _spans_decades(values: Floats) -> bool:
    """True where a linear axis would hide the small values."""
    above = values[np.isfinite(values) & (values > 0)]
    return bool(len(above) and above.max() > 20 * above.min())


def _reward(run: RunData) -> Panel:
    curves = [
        curve
        for curve in (_curve(run, "reward/mean", "trained on", "blue"), _held_out(run))
        if curve is not None
    ]
    return Panel(
        title="Reward",
        unit="mean reward of a sample",
        curves=curves,
        marks=run.anomalies,
        wide=True,
        overview=True,
    )


def _held_out(run: RunData) -> Curve | None:
    evaluations = run.evaluations
    if not len(evaluations.versions):
        return None
    versions = evaluations.versions.astype(np.float64)
    return Curve(name="held out", colour="red", x=versions, y=evaluations.mean, style="diamonds")


def _pass_at(run: RunData) -> Panel:
    versions = run.evaluations.versions.astype(np.float64)
    colours = itertools.cycle(("blue", "green", "purple", "amber", "muted"))
    curves = [
        Curve(name=f"pass@{k}", colour=colour, x=versions, y=values, style="diamonds")
        for (k, values), colour in zip(run.evaluations.pass_at.items(), colours, strict=False)
    ]
    return Panel(
        title="Held-out prompts", unit="share of prompts passed", curves=curves, form="share"
    )


def _lag(run: RunData) -> Panel:
    steps, shares = histograms(run.rows, "lag/histogram")
    styles = (("lag/mean", "mean", "amber", "line"), ("lag/max", "max", "red", "dotted"))
    curves = []
    for key, name, colour, style in styles:
        x, y = column(run.rows, key)
        curves.append(
            Curve(
                name=name, colour=colour, x=x, y=y, style="dotted" if style == "dotted" else "line"
            )
        )
    bound = None if run.lag_bound is None else float(np.ceil(run.lag_bound))
    levels = [] if bound is None else [Level(name=f"bound {bound:g}", colour="ink", value=bound)]
    top = max(
        [
            float(len(shares) - 1),
            bound or 0.0,
            *(c.y[np.isfinite(c.y)].max(initial=0) for c in curves),
        ]
    )
    return Panel(
        title="Lag of the tokens trained on",
        unit="weight versions behind; darker: more tokens",
        kind="shades",
        curves=[curve for curve in curves if len(curve.x)],
        levels=levels,
        grid=(steps, shares) if shares.size else None,
        low=-0.6,
        high=top + 0.6,
        form="whole",
        overview=True,
    )


def _ess(run: RunData) -> Panel:
    curve = _curve(run, "ratio/ess_ratio", "", "purple")
    return Panel(
        title="Effective sample size",
        unit="share of the samples; 1 is on-policy",
        curves=[] if curve is None else [curve],
        low=0.0,
        high=1.04,
        marks=run.anomalies,
        overview=True,
    )


def _cosine(run: RunData) -> Panel:
    rows = [row for row in run.rows if "gac/cosine" in row]
    steps, cosines = column(rows, "gac/cosine")
    codes = numbers(rows, "gac/regime")
    curves = []
    if (trend := smooth(cosines)) is not None:
        curves.append(
            Curve(name="", colour="ink", x=steps, y=np.full(len(steps), np.nan), trend=trend)
        )
    for code, (name, colour) in enumerate(zip(REGIMES, REGIME_COLOURS, strict=True)):
        chosen = codes == code
        if chosen.any():
            label = f"{name} ({chosen.sum()})"
            x, y = steps[chosen], cosines[chosen]
            curves.append(Curve(name=label, colour=colour, x=x, y=y, style="points"))
    levels = [
        Level(name=f"{name} {threshold:g}", colour=colour, value=threshold)
        for name, colour in (("c_low", "amber"), ("c_high", "red"))
        if (threshold := (run.gac or {}).get(name)) is not None and len(steps)
    ]
    return Panel(
        title="Cosine of consecutive gradients",
        unit="cosine",
        curves=curves,
        levels=levels,
        empty="the first cosine comes with the second step"
        if run.gac
        else "no gradient alignment control in this run",
        overview=True,
    )


def _loss(run: RunData) -> Panel:
    curve = _curve(run, "policy/loss", "", "blue")
    return Panel(
        title="Loss",
        unit="nats per token",
        curves=[] if curve is None else [curve],
        marks=run.anomalies,
        wide=True,
        overview=True,
    )


def _time(run: RunData) -> Panel:
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


def _engines(run: RunData) -> list[Panel]:
    mean = f", mean {run.summary.busy_share:.0%}" if run.summary.busy_share is not None else ""
    lines: tuple[tuple[str, str, str, Literal["number", "share", "whole"]], ...] = (
        (f"Engines busy{mean}", "share of the time between steps", "engine/busy_shares", "share"),
        ("In flight per engine", "responses", "engine/in_flight", "number"),
        ("Weights of each engine", "versions behind the policy", "engine/versions", "whole"),
        ("Tokens finished per engine", "since the last step", "engine/tokens", "number"),
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
    counts = [summed(run.rows, f"{side}/length_histogram") for side in ("trained", "dropped")]
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


def _timeline(run: RunData) -> Panel:
    """One row of bars a process over the seconds of the last steps."""
    window = run.window
    assert window is not None
    tracks = list(window.tracks)[:TRACKS_SHOWN]
    spans = [(row, span) for row, track in enumerate(tracks) for span in window.tracks[track]]
    used = {span.state for _, span in spans}
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
                start=span.start - window.start,
                length=span.seconds,
                colour=STATES.get(span.state, "ink"),
            )
            for row, span in spans
        ],
        bar_names=names,
        ends=[(step, at - window.start) for step, at in window.steps],
        x_range=(0.0, window.end - window.start),
        wide=True,
        overview=True,
    )

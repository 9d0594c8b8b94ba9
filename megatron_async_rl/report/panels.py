"""Panels of a run: learning, lag, engines, time, and the predictions of `mar simulate`.

A panel that shows only curves of metrics is a `_PanelGroup`. Each other panel has its own function.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_async_rl.report.metric_rows import (
    Floats,
    column,
    doubling_bins,
    histograms,
    numbers,
    per_engine,
    smooth,
)
from megatron_async_rl.report.panel import (
    AxisForm,
    Curve,
    CurveStyle,
    Level,
    OffPolicyMark,
    Panel,
)
from megatron_async_rl.report.run_data import IN_A_STEP, REGIMES, RunData
from megatron_async_rl.report.timeline_panel import timeline_panel

PART = "reward/part/"
"""Prefix of the metrics of the reward's parts."""
PART_COLOURS = ("blue", "green", "amber", "purple", "teal", "red", "brown")
PASS_COLOURS = ("blue", "green", "purple", "amber", "muted")
REGIME_COLOURS = ("green", "amber", "red")
"""Colours of the regimes, indexed by the code in `gac/regime`."""
ENGINE_COLOURS = ("blue", "green", "amber", "purple", "red", "teal", "brown", "muted")
"""Colours of the engines in order; further engines repeat them."""
TIME_COLOURS = {"training": "blue", "publishing": "purple", "waiting": "amber", "other": "grey"}
ENGINES_SHOWN = 32

SIMULATION = "simulation.json"
"""File in the run directory: lists of equal length under `async_ratio` and each of PREDICTED."""
PREDICTED = ("tokens_per_s", "engine_busy", "trainer_busy", "lag_mean")


@dataclass(frozen=True)
class _PanelGroup:
    """Description of a panel with curves of metrics over the steps."""

    title: str
    unit: str
    keys: Sequence[tuple[str, str, str]]
    """(metric, name of its curve, colour) of each curve."""
    low: float | None = None
    high: float | None = None
    log: bool = False
    """Use a logarithmic axis if the values span more than a factor of 20."""
    form: AxisForm = "number"
    wide: bool = False
    overview: bool = False
    held_out: bool = False
    """Also draw the held-out evaluations."""
    compared: bool = False
    """Also draw the first metric of the run in `observe.beside`."""
    replayed: bool = True
    """Also draw the first metric of the run's replays. False for facts about the samples, which a
    replay does not change."""


_REWARD = _PanelGroup(
    "Reward",
    "mean reward of a sample",
    [("reward/mean", "trained on", "blue")],
    wide=True,
    overview=True,
    held_out=True,
    compared=True,
    replayed=False,
)
_LOSS = replace(
    _REWARD,
    title="Loss",
    unit="nats per token",
    keys=[("policy/loss", "trained on", "blue")],
    replayed=True,
)
_ESS = _PanelGroup(
    "Effective sample size",
    "share of the samples; 1 is on-policy",
    [("ratio/ess_ratio", "", "purple")],
    low=0.0,
    high=1.04,
    overview=True,
    compared=True,
)
_GRADIENT_NORM = _PanelGroup(
    "Gradient norm, before clipping",
    "L2 norm",
    [("policy/grad_norm", "", "purple")],
    log=True,
    overview=True,
)
_LEARNING_RATE = _PanelGroup("Learning rate", "per step", [("policy/lr", "", "green")], low=0)
_SAMPLED = (
    _PanelGroup(
        "Response length",
        "tokens",
        [("response/length_mean", "mean", "green"), ("response/length_max", "max", "muted")],
        low=0,
        overview=True,
        replayed=False,
    ),
    _PanelGroup(
        "Shares of the responses",
        "share",
        [
            ("response/truncated", "truncated", "red"),
            ("response/mixed_versions", "several weight versions", "purple"),
            ("reward/equal_groups", "groups of equal reward", "amber"),
        ],
        low=0,
        form="share",
        replayed=False,
    ),
    _GRADIENT_NORM,
    _PanelGroup("Entropy of the policy", "nats per token", [("policy/entropy", "", "blue")]),
    _PanelGroup(
        "Divergence from the behaviour policy",
        "nats per token",
        [("ratio/kl_k1", "KL, k1", "blue"), ("ratio/kl_k3", "KL, k3", "purple")],
    ),
    _PanelGroup(
        "Log-prob difference from behaviour",
        "nats",
        [
            ("ratio/logp_diff_mean", "mean", "blue"),
            ("ratio/logp_diff_max", "max", "red"),
            ("ratio/logp_diff_lag0_max", "max at lag 0", "green"),
        ],
    ),
    _PanelGroup(
        "Drift since the oldest sample",
        "L2 norm: lag × update",
        [("staleness/drift", "", "red")],
    ),
    _PanelGroup(
        "Clipped tokens",
        "share",
        [
            ("clip/positive", "positive advantage", "green"),
            ("clip/negative", "negative advantage", "red"),
        ],
        low=0,
        form="share",
    ),
    _PanelGroup("Loss", "loss", [("policy/loss", "", "blue")]),
    _LEARNING_RATE,
)
_ENGINES: tuple[tuple[str, str, str, AxisForm], ...] = (
    ("Engines busy", "share of the time between steps", "engine/busy_shares", "share"),
    ("In flight per engine", "responses", "engine/in_flight", "number"),
    ("Weights of each engine", "versions behind the policy", "engine/versions", "whole"),
    ("Tokens sampled per engine", "since the last step", "engine/tokens", "number"),
)
"""(title, unit, metric with a value per engine, form)."""


def panels_of(run: RunData) -> list[Panel]:
    """Return the panels of a run in the order of the page, the main panel first. Omits most panels
    for which the run has no data."""
    if run.supervised:
        panels = _curves(run, _LOSS)
    else:
        panels = [*_curves(run, _REWARD), _lag(run), *_curves(run, _ESS), _cosine(run)]
    if run.evaluations.pass_at:
        panels.append(_pass_at(run))
    panels.append(_step_time(run))
    if run.summary.busy_share is not None:
        panels += [*_engines(run), _lengths(run)]
    groups = (_GRADIENT_NORM, _LEARNING_RATE) if run.supervised else (_parts(run), *_SAMPLED)
    panels += [panel for group in groups for panel in _curves(run, group)]
    panels += simulation(run)
    return panels if run.window is None else [*panels, timeline_panel(run.window)]


def _curves(run: RunData, group: _PanelGroup) -> list[Panel]:
    """Return the panel of a group; empty if the run has no data for it."""
    drawn = [_curve(run, *key, log=group.log) for key in group.keys]
    if group.held_out:
        drawn.append(_held_out(run, "held out", "red"))
    if group.compared and (other := run.beside) is not None:
        drawn.append(_trend(other, group.keys[0][0]))
        if group.held_out:
            drawn.append(_held_out(other, f"{other.name}, held out", "brown"))
    own = [curve for curve in drawn if curve is not None]
    if not own:
        return []
    key, name, _ = group.keys[0]
    replays = replayed(run, key, name if len(group.keys) > 1 else "") if group.replayed else []
    if replays and not own[0].name:
        own[0] = replace(own[0], name="the run")
    curves = [*own, *(curve for curve, _ in replays)]
    return [
        Panel(
            title=group.title,
            unit=group.unit,
            curves=curves,
            off_policy=[mark for _, mark in replays if mark is not None],
            low=group.low,
            high=group.high,
            log=group.log and any(_spans_decades(curve.y) for curve in curves),
            form=group.form,
            marks=run.anomalies,
            wide=group.wide,
            overview=group.overview,
        )
    ]


def _spans_decades(values: Floats) -> bool:
    """Return True if a linear axis would hide the small values."""
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(len(positive) and positive.max() > 20 * positive.min())


def _curve(run: RunData, key: str, name: str, colour: str, *, log: bool = False) -> Curve | None:
    """Return the curve of a metric with its trend, which is a geometric mean with `log`; None if no
    row has the metric."""
    steps, values, trend = run.rows.curve(key, log=log)
    if not len(steps):
        return None
    return Curve(name=name, colour=colour, x=steps, y=values, trend=trend)


def _trend(run: RunData, key: str) -> Curve | None:
    """Return the moving average of a metric of another run, in grey; None if no row has it."""
    steps, values, trend = run.rows.curve(key)
    y = values if trend is None else trend
    return Curve(name=run.name, colour="grey", x=steps, y=y, style="dotted") if len(steps) else None


def replayed(run: RunData, key: str, name: str = "") -> list[tuple[Curve, OffPolicyMark | None]]:
    """Return the curve of a metric in each replay of the run that has it, and the mark from which
    the replay's samples are off-policy. name: of the metric, in a panel with several."""
    found = []
    for one in run.replays:
        steps, values, _ = one.rows.curve(key)
        if not len(steps):
            continue
        # Values, not their moving average, which would differ before the weights do.
        label = f"{one.label} ({name})" if name else one.label
        # A repetition covers the run's own curve, which stays visible between the dots.
        style: CurveStyle = "dotted" if one.record.first_different is None else "line"
        curve = Curve(name=label, colour=one.colour, x=steps, y=values, style=style)
        begin, mark = one.off_policy_from, None
        if begin is not None:
            mark = OffPolicyMark(step=begin, colour=one.colour, replay=one.name)
        found.append((curve, mark))
    return found


def _held_out(run: RunData, name: str, colour: str) -> Curve | None:
    """Return the curve of the held-out evaluations; None without any."""
    versions = run.evaluations.versions.astype(np.float64)
    if not len(versions):
        return None
    return Curve(name=name, colour=colour, x=versions, y=run.evaluations.mean, style="diamonds")


def _parts(run: RunData) -> _PanelGroup:
    keys = [key for key in run.rows.names() if key.startswith(PART)]
    colours = itertools.cycle(PART_COLOURS)
    curves = [(key, key.removeprefix(PART), next(colours)) for key in keys]
    return _PanelGroup("Parts of the reward", "means before weighting", curves, replayed=False)


def _pass_at(run: RunData) -> Panel:
    versions = run.evaluations.versions.astype(np.float64)
    curves = [
        Curve(name=f"pass@{k}", colour=colour, x=versions, y=values, style="diamonds")
        for (k, values), colour in zip(
            run.evaluations.pass_at.items(), itertools.cycle(PASS_COLOURS), strict=False
        )
    ]
    return Panel(
        title="Held-out prompts", unit="share of prompts passed", curves=curves, form="share"
    )


def _lag(run: RunData) -> Panel:
    steps, shares = histograms(run.rows, "lag/histogram")
    curves = []
    shown: tuple[tuple[str, str, CurveStyle], ...]
    shown = (("mean", "amber", "line"), ("max", "red", "dotted"))
    for key, colour, style in shown:
        x, y = run.rows.column(f"lag/{key}")
        if len(x):
            curves.append(Curve(name=key, colour=colour, x=x, y=y, style=style))
    # The scheduler admits groups up to the ratio rounded up, because a lag is an integer.
    bound = None if run.lag_bound is None else float(np.ceil(run.lag_bound))
    largest = [float(curve.y[np.isfinite(curve.y)].max(initial=0)) for curve in curves]
    return Panel(
        title="Lag of the tokens trained on",
        unit="weight versions behind; darker: more tokens",
        kind="shades",
        curves=curves,
        levels=[] if bound is None else [Level(name=f"bound {bound:g}", colour="ink", value=bound)],
        grid=(steps, shares) if shares.size else None,
        low=-0.6,
        high=max(float(len(shares) - 1), bound or 0.0, *largest) + 0.6,
        form="whole",
        overview=True,
    )


def _cosine(run: RunData) -> Panel:
    rows = [row for row in run.rows if "gac/cosine" in row]
    steps, cosines = column(rows, "gac/cosine")
    codes = numbers(rows, "gac/regime")
    curves = []
    if (trend := smooth(cosines)) is not None:
        # This curve has only a trend. The curves below have the points, coloured by regime.
        no_values = np.full(len(steps), np.nan)
        curves.append(Curve(name="", colour="ink", x=steps, y=no_values, trend=trend))
    for code, (name, colour) in enumerate(zip(REGIMES, REGIME_COLOURS, strict=True)):
        in_regime = codes == code
        if in_regime.any():
            # The rows of a long run are thinned, but its summary counts all of them.
            count = run.summary.regimes[name] if run.rows.thinned else in_regime.sum()
            x, y = steps[in_regime], cosines[in_regime]
            label = f"{name} ({count})"
            curves.append(Curve(name=label, colour=colour, x=x, y=y, style="points"))
    if run.beside is not None and (other := _trend(run.beside, "gac/cosine")) is not None:
        curves.append(other)
    replays = replayed(run, "gac/cosine")
    curves += [curve for curve, _ in replays]
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
        off_policy=[mark for _, mark in replays if mark is not None],
        empty="the second step logs the first cosine"
        if run.gac
        else "this run has no gradient alignment control",
        overview=True,
    )


def _step_time(run: RunData) -> Panel:
    rows = [row for row in run.rows if "time/step_s" in row]
    steps, whole = column(rows, "time/step_s")
    parts = {name: np.nan_to_num(numbers(rows, key)) for name, key in IN_A_STEP.items()}
    parts["other"] = np.maximum(0.0, whole - sum(parts.values()))
    curves = [
        Curve(
            name=f"{name} {run.summary.shares[name]:.0%}",
            colour=TIME_COLOURS[name],
            x=steps,
            y=values if (trend := smooth(values)) is None else trend,
        )
        for name, values in parts.items()
    ]
    return Panel(
        title="Time of a step by activity",
        unit="seconds per step",
        kind="stack",
        curves=curves,
        low=0,
        overview=True,
    )


def _engines(run: RunData) -> Iterator[Panel]:
    for title, unit, key, form in _ENGINES:
        steps, values = per_engine(run.rows, key)
        busy = key == "engine/busy_shares"
        yield Panel(
            title=f"{title}, mean {run.summary.busy_share:.0%}" if busy else title,
            unit=unit,
            curves=[
                Curve(name=f"engine {engine}", colour=colour, x=steps, y=y)
                for engine, (y, colour) in enumerate(
                    zip(values[:ENGINES_SHOWN], itertools.cycle(ENGINE_COLOURS), strict=False)
                )
            ],
            form=form,
            low=0,
            high=1.04 if form == "share" else None,
            marks=run.anomalies if busy else (),
            overview=key != "engine/tokens",
        )


def _lengths(run: RunData) -> Panel:
    counts = [run.rows.summed(f"{side}/length_histogram") for side in ("trained", "dropped")]
    names, shares = doubling_bins(counts)
    places = np.arange(len(names), dtype=np.float64)
    curves = [
        Curve(name=name, colour=colour, x=places, y=values)
        for values, (name, colour) in zip(
            shares, (("trained on", "blue"), ("dropped", "red")), strict=True
        )
        if values.any()
    ]
    return Panel(
        title="Lengths of the responses",
        unit="share of the responses",
        kind="columns",
        x_label="tokens" if run.dropped else "tokens; no responses were dropped",
        categories=names,
        curves=curves,
        low=0,
        form="share",
        empty="the run has logged no lengths",
        overview=True,
    )


def simulation(run: RunData) -> list[Panel]:
    """Return the panels of predicted speed-up, busy shares and lag over async_ratio, with a diamond
    for the measured value; empty without a readable prediction."""
    try:
        predictions = json.loads((run.run_dir / SIMULATION).read_text(encoding="utf-8"))
        ratios, *values = (
            np.array(predictions[key], dtype=np.float64) for key in ("async_ratio", *PREDICTED)
        )
        speed, engines, trainer, lags = (one[np.argsort(ratios)] for one in values)
        ratios, speed_up = np.sort(ratios), speed / speed[0]
    except (OSError, ValueError, TypeError, LookupError):
        return []
    summary, own_ratio = run.summary, np.array([run.lag_bound or 0.0])

    def curve(name: str, colour: str, y: Floats, measured: float | None = None) -> Iterator[Curve]:
        yield Curve(name=f"{name}, predicted", colour=colour, x=ratios, y=y)
        if measured is not None:
            y, name = np.array([measured]), f"{name}, this run"
            yield Curve(name=name, colour=colour, x=own_ratio, y=y, style="diamonds")

    busy = (
        *curve("engines", "green", engines, summary.busy_share),
        *curve("trainer", "blue", trainer),
    )
    faster = curve("tokens per second", "blue", speed_up, summary.tokens_per_s / speed[0])
    shown: tuple[tuple[str, str, AxisForm, Sequence[Curve]], ...] = (
        ("Speed-up", f"relative to async_ratio {ratios[0]:g}", "number", list(faster)),
        ("Busy", "share of the time", "share", list(busy)),
        ("Lag", "mean, versions", "number", list(curve("lag", "amber", lags, summary.lag_mean))),
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

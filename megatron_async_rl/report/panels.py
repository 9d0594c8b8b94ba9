"""The panels of a run, each described once; panel.py names the functions that draw them. Here those
of learning; those of time are in `time_panels.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_async_rl.report.metric_rows import Floats, column, histograms, numbers, smooth
from megatron_async_rl.report.panel import Curve, Level, Panel
from megatron_async_rl.report.run_data import REGIMES, RunData
from megatron_async_rl.report.time_panels import engine_panels, simulation, step_time, timeline

PART = "reward/part/"
REGIME_COLOURS = ("green", "amber", "red")
"""Colours by the code in `gac/regime`: kept, projected, skipped."""


def panels_of(run: RunData) -> list[Panel]:
    """The panels for which the run has data, in the order of the page. The first is the main
    one."""
    panels = [_loss(run)] if run.supervised else [_reward(run), _lag(run), _ess(run), _cosine(run)]
    if len(run.evaluations.pass_at):
        panels.append(_pass_at(run))
    panels.append(step_time(run))
    if run.summary.busy_share is not None:
        panels += engine_panels(run)
    groups = SUPERVISED if run.supervised else (_reward_parts(run), *SAMPLED)
    panels += [panel for group in groups if (panel := _curves(run, group)) is not None]
    panels += simulation(run)
    if run.window is not None:
        panels.append(timeline(run))
    return panels


@dataclass(frozen=True, kw_only=True)
class _PanelGroup:
    """A panel of curves, each a key of the metrics, its name and its colour."""

    title: str
    unit: str
    keys: Sequence[tuple[str, str, str]]
    low: float | None = None
    log: bool = False
    form: Literal["number", "share"] = "number"
    overview: bool = False


_GRADIENT_NORM = _PanelGroup(
    title="Gradient norm, before clipping",
    unit="L2 norm",
    keys=(("policy/grad_norm", "", "purple"),),
    log=True,
    overview=True,
)
_LEARNING_RATE = _PanelGroup(
    title="Learning rate", unit="per step", keys=(("policy/lr", "", "green"),), low=0
)
SUPERVISED: tuple[_PanelGroup, ...] = (_GRADIENT_NORM, _LEARNING_RATE)
SAMPLED: tuple[_PanelGroup, ...] = (
    _PanelGroup(
        title="Response length",
        unit="tokens",
        keys=(("response/length_mean", "mean", "green"), ("response/length_max", "max", "muted")),
        low=0,
        overview=True,
    ),
    _PanelGroup(
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
    _PanelGroup(
        title="Entropy of the policy", unit="nats per token", keys=(("policy/entropy", "", "blue"),)
    ),
    _PanelGroup(
        title="Divergence from the behaviour policy",
        unit="nats per token",
        keys=(("ratio/kl_k1", "KL, k1", "blue"), ("ratio/kl_k3", "KL, k3", "purple")),
    ),
    _PanelGroup(
        title="Log-prob difference from behaviour",
        unit="nats",
        keys=(
            ("ratio/logp_diff_mean", "mean", "blue"),
            ("ratio/logp_diff_max", "max", "red"),
            ("ratio/logp_diff_lag0_max", "max at lag 0", "green"),
        ),
    ),
    _PanelGroup(
        title="Drift since the oldest sample",
        unit="L2 norm: lag × update",
        keys=(("staleness/drift", "", "red"),),
    ),
    _PanelGroup(
        title="Clipped tokens",
        unit="share",
        keys=(
            ("clip/positive", "positive advantage", "green"),
            ("clip/negative", "negative advantage", "red"),
        ),
        low=0,
        form="share",
    ),
    _PanelGroup(title="Loss", unit="loss", keys=(("policy/loss", "", "blue"),)),
    _LEARNING_RATE,
)


def _curve(run: RunData, key: str, name: str, colour: str, *, log: bool = False) -> Curve | None:
    """`log`: the trend is that of the logarithms."""
    steps, values, trend = run.rows.curve(key, log=log)
    if not len(steps):
        return None
    return Curve(name=name, colour=colour, x=steps, y=values, trend=trend)


def _curves(run: RunData, group: _PanelGroup) -> Panel | None:
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


def _reward_parts(run: RunData) -> _PanelGroup:
    keys = [key for key in run.rows.names() if key.startswith(PART)]
    colours = itertools.cycle(("blue", "green", "amber", "purple", "teal", "red", "brown"))
    return _PanelGroup(
        title="Parts of the reward",
        unit="means, before they are weighted",
        keys=[(key, key.removeprefix(PART), next(colours)) for key in keys],
    )


def _reward(run: RunData) -> Panel:
    drawn = [_curve(run, "reward/mean", "trained on", "blue"), _held_out(run, "held out", "red")]
    if run.beside is not None:
        drawn += [
            _trend(run.beside, "reward/mean", run.beside.name),
            _held_out(run.beside, f"{run.beside.name}, held out", "brown"),
        ]
    curves = [curve for curve in drawn if curve is not None]
    return Panel(
        title="Reward",
        unit="mean reward of a sample",
        curves=curves,
        marks=run.anomalies,
        wide=True,
        overview=True,
    )


def _trend(run: RunData, key: str, name: str) -> Curve | None:
    """The moving average of another run, grey, for under the curves of this one."""
    steps, values, trend = run.rows.curve(key)
    y = values if trend is None else trend
    return Curve(name=name, colour="grey", x=steps, y=y, style="dotted") if len(steps) else None


def _held_out(run: RunData, name: str, colour: str) -> Curve | None:
    evaluations = run.evaluations
    if not len(evaluations.versions):
        return None
    versions = evaluations.versions.astype(np.float64)
    return Curve(name=name, colour=colour, x=versions, y=evaluations.mean, style="diamonds")


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
        x, y = run.rows.column(key)
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
    drawn = [_curve(run, "ratio/ess_ratio", "", "purple")]
    if run.beside is not None:
        drawn.append(_trend(run.beside, "ratio/ess_ratio", run.beside.name))
    return Panel(
        title="Effective sample size",
        unit="share of the samples; 1 is on-policy",
        curves=[curve for curve in drawn if curve is not None],
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
            count = run.summary.regimes[name] if run.rows.thinned else chosen.sum()
            label = f"{name} ({count})"
            x, y = steps[chosen], cosines[chosen]
            curves.append(Curve(name=label, colour=colour, x=x, y=y, style="points"))
    if run.beside is not None and (other := _trend(run.beside, "gac/cosine", run.beside.name)):
        curves.append(other)
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
    held_out = _held_out(run, "held out", "red")
    trained = _curve(run, "policy/loss", "" if held_out is None else "trained on", "blue")
    drawn = [trained, held_out]
    if run.beside is not None:
        drawn += [
            _trend(run.beside, "policy/loss", run.beside.name),
            _held_out(run.beside, f"{run.beside.name}, held out", "brown"),
        ]
    return Panel(
        title="Loss",
        unit="nats per token",
        curves=[curve for curve in drawn if curve is not None],
        marks=run.anomalies,
        wide=True,
        overview=True,
    )

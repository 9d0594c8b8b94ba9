"""The report's HTML: the same run to look into, with plotly inside the file, so it opens offline."""

from __future__ import annotations

import html
import itertools
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from megatron_async_rl.observe import colours
from megatron_async_rl.observe.colours import AMBER, BLUE, GREEN, INK, MUTED, PURPLE, RED
from megatron_async_rl.observe.page_fleet import activity_figure, fleet_figures
from megatron_async_rl.observe.page_frame import CONFIG, draw_curve, figure_of
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import Floats, column, histograms, numbers, smooth
from megatron_async_rl.observe.summary import IN_A_STEP, REGIMES

Curve = tuple[str, str, str]
"""(key, name, colour)."""

SAMPLED: tuple[tuple[str, str, tuple[Curve, ...]], ...] = (
    ("Response length", "tokens", (("response/length_mean", "mean", GREEN), ("response/length_max", "longest", MUTED))),
    (
        "Shares of the responses",
        "share",
        (
            ("response/truncated", "truncated", RED),
            ("response/mixed_versions", "sampled by several versions", PURPLE),
            ("reward/equal_groups", "in groups of equal reward (of groups)", AMBER),
        ),
    ),
    ("Entropy of the policy", "nats per token", (("policy/entropy", "entropy", BLUE),)),
    (
        "Divergence from the behaviour policy",
        "nats per token",
        (("ratio/kl_k1", "KL, k1", BLUE), ("ratio/kl_k3", "KL, k3", PURPLE)),
    ),
    (
        "Log-prob difference from the behaviour policy",
        "nats",
        (
            ("ratio/logp_diff_mean", "mean", BLUE),
            ("ratio/logp_diff_max", "largest", RED),
            ("ratio/logp_diff_lag0_max", "largest at lag 0", GREEN),
        ),
    ),
    ("Drift of the policy since the oldest sample", "L2 norm", (("staleness/drift", "lag × update", RED),)),
    ("Clipped tokens", "share", (("clip/positive", "positive advantage", GREEN), ("clip/negative", "negative advantage", RED))),
)
ALWAYS: tuple[tuple[str, str, tuple[Curve, ...]], ...] = (
    ("Loss", "loss", (("policy/loss", "loss", BLUE),)),
    ("Gradient norm, before clipping", "L2 norm", (("policy/grad_norm", "norm", PURPLE),)),
    ("Learning rate", "per step", (("policy/lr", "learning rate", GREEN),)),
)
PASS_COLOURS = (BLUE, GREEN, PURPLE, AMBER, MUTED)
FROM_ZERO = ("Response length", "Shares of the responses", "Learning rate")


def write(record: Record, path: Path) -> None:
    """Writes one HTML file that needs no other."""
    panels = [] if record.supervised else [_reward(record), _lag(record), _ess(record), _cosine(record)]
    groups = ALWAYS if record.supervised else SAMPLED + ALWAYS
    for title, unit, curves in groups:
        if any(len(column(record.rows, key)[0]) for key, _, _ in curves):
            figure = figure_of(record, title, unit, from_zero=title in FROM_ZERO)
            for key, name, colour in curves:
                draw_curve(figure, record, key, name, colour)
            panels.append(figure)
    time_at = len(panels) if record.supervised else 4
    evaluated = [_held_out(record)] if len(record.evaluations.versions) else []
    panels[time_at:time_at] = [_time(record), *fleet_figures(record), *evaluated]
    if record.activity is not None:
        wide = activity_figure(record, record.activity)
        timeline = f'<section class="panel wide">{wide.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)}</section>'
    else:
        timeline = ""
    drawn = timeline + "\n".join(
        f'<section class="panel">{figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)}</section>'
        for figure in panels
    )
    path.write_text(
        PAGE.replace("@TITLE@", html.escape(record.run_dir.name))
        .replace("@HEADLINE@", html.escape(record.headline))
        .replace("@DROPPED@", f'<p class="dropped">{html.escape(record.dropped.sentence)}.</p>' if record.dropped else "")
        .replace("@TABLES@", _tables(record))
        .replace("@PANELS@", drawn)
        .replace("@WHERE@", html.escape(str(record.run_dir)))
        .replace("@PLOTLY@", get_plotlyjs()),
        encoding="utf-8",
    )


def _reward(record: Record) -> go.Figure:
    figure = figure_of(record, "Reward", "mean reward of a sample")
    draw_curve(figure, record, "reward/mean", "trained on", BLUE)
    if len(record.evaluations.versions):
        _draw_evaluations(figure, record, record.evaluations.mean, "held out", RED)
    return figure


def _held_out(record: Record) -> go.Figure:
    figure = figure_of(record, "Held-out prompts", "mean reward; share of prompts passed")
    _draw_evaluations(figure, record, record.evaluations.mean, "mean reward", RED)
    for (k, values), colour in zip(record.evaluations.pass_at.items(), itertools.cycle(PASS_COLOURS), strict=False):
        _draw_evaluations(figure, record, values, f"pass@{k}", colour)
    return figure


def _draw_evaluations(figure: go.Figure, record: Record, values: Floats, name: str, colour: str) -> None:
    """`values` [versions evaluated]."""
    figure.add_scatter(
        x=record.evaluations.versions, y=values, mode="lines+markers", line={"color": colour, "width": 1.3},
        marker={"symbol": "diamond", "size": 8}, name=name, showlegend=True, cliponaxis=False,
    )  # fmt: skip


def _lag(record: Record) -> go.Figure:
    figure = figure_of(record, "Lag of the tokens trained on", "weight versions behind")
    steps, shares = histograms(record.rows, "lag/histogram")
    if shares.size:
        figure.add_heatmap(
            x=steps, y=np.arange(len(shares)), z=np.where(shares > 0, shares, np.nan), colorscale="Blues", zmin=0.0,
            zmax=float(np.quantile(shares.max(axis=0), 0.9)), hovertemplate="lag %{y}: %{z:.0%} of tokens<extra></extra>",
            colorbar={"title": {"text": "share of the<br>step's tokens"}, "tickformat": ".0%", "thickness": 12, "len": 0.9},
        )  # fmt: skip
    for key, name, colour, dash in (("lag/mean", "mean", AMBER, "solid"), ("lag/max", "largest", RED, "dot")):
        steps, values = column(record.rows, key)
        figure.add_scatter(
            x=steps,
            y=values,
            mode="lines+markers" if len(steps) < 30 else "lines",
            line={"color": colour, "dash": dash},
            name=name,
        )
    if record.lag_bound is not None:
        bound = float(np.ceil(record.lag_bound))
        x = figure.layout.xaxis.range
        figure.add_scatter(
            x=x, y=[bound, bound], mode="lines", line={"color": INK, "dash": "dash", "width": 1}, name=f"bound {bound:g}"
        )
    top = max(len(shares) - 1, np.ceil(record.lag_bound or 0))
    figure.update_yaxes(range=[-0.6, top + 0.6], tick0=0, dtick=max(1, round(top / 8)), showgrid=False)
    return figure


def _ess(record: Record) -> go.Figure:
    figure = figure_of(record, "Effective sample size", "share of the samples (1 = on-policy)")
    draw_curve(figure, record, "ratio/ess_ratio", "ESS", PURPLE)
    figure.update_yaxes(range=[0.0, 1.04])
    return figure


def _cosine(record: Record) -> go.Figure:
    figure = figure_of(record, "Cosine of consecutive gradients", "cosine")
    rows = [row for row in record.rows if "gac/cosine" in row]
    steps, cosines = column(rows, "gac/cosine")
    codes = numbers(rows, "gac/regime")
    trend = smooth(cosines)
    if trend is not None:
        figure.add_scatter(
            x=steps, y=trend, mode="lines", line={"color": INK, "width": 6}, opacity=0.25, showlegend=False, hoverinfo="skip"
        )  # fmt: skip
    for code, (name, colour) in enumerate(zip(REGIMES, colours.REGIMES, strict=True)):
        chosen = codes == code
        if chosen.any():
            figure.add_scatter(
                x=steps[chosen],
                y=cosines[chosen],
                mode="markers",
                marker={"color": colour, "size": 5},
                name=f"{name} ({chosen.sum()})",
            )
    for name, colour in (("c_low", AMBER), ("c_high", RED)):
        threshold = (record.gac or {}).get(name)
        if threshold is not None and len(steps):
            figure.add_scatter(
                x=figure.layout.xaxis.range, y=[threshold, threshold], mode="lines", hoverinfo="skip",
                line={"color": colour, "dash": "dash", "width": 1.3}, name=f"{name} {threshold:g}",
            )  # fmt: skip
    if not len(steps):
        reason = "the first cosine comes with the second step" if record.gac else "no gradient alignment control in this run"
        figure.add_annotation(text=reason, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
        figure.update_yaxes(range=[-1, 1])
    figure.update_layout(hovermode="closest")
    return figure


def _time(record: Record) -> go.Figure:
    figure = figure_of(record, "What a step's time goes into", "seconds per step")
    steps, whole = column(record.rows, "time/step_s")
    rows = [row for row in record.rows if "time/step_s" in row]
    parts = {name: np.nan_to_num(numbers(rows, key)) for name, key in IN_A_STEP.items()}
    parts["other"] = np.maximum(0.0, whole - sum(parts.values()))
    for name, values in parts.items():
        label = f"{name} {record.summary.shares[name]:.0%}"
        colour = colours.TIMES[name]
        if len(steps) < 12:
            figure.add_bar(x=steps, y=values, name=label, marker_color=colour)
        else:
            line = {"width": 0, "color": colour}
            figure.add_scatter(x=steps, y=values, mode="lines", stackgroup="time", line=line, fillcolor=colour, name=label)
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    return figure


def _tables(record: Record) -> str:
    tables = []
    for title, facts in record.facts():
        rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts)
        tables.append(
            f'<div class="slot"><section class="card"><h2>{html.escape(title)}</h2><table>{rows}</table></section></div>'
        )
    return "\n".join(tables)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
  body { margin: 0; background: #f3f5f7; color: #1f2933; font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
  main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 48px; }
  h1 { margin: 0; font-size: 26px; }
  .headline { margin: 4px 0 22px; color: #6b7785; font-size: 15px; }
  .dropped { margin: -12px 0 22px; color: #c8372d; }
  .wide { grid-column: 1 / -1; }
  .cards { columns: 3; column-gap: 16px; margin-bottom: 4px; }
  .slot { break-inside: avoid; padding-bottom: 14px; }
  .panels { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
  @media (max-width: 900px) { .cards { columns: 1; } .panels { grid-template-columns: minmax(0, 1fr); } }
  .card, .panel { background: white; border: 1px solid #e1e5ea; border-radius: 8px; padding: 14px 16px; }
  .card, .panel { min-width: 0; overflow: hidden; }
  .panel { padding: 10px 8px 4px; }
  h2 { margin: 0 0 8px; font-size: 15px; }
  table { border-collapse: collapse; width: 100%; font-size: 13px; }
  th { text-align: left; font-weight: normal; color: #6b7785; padding: 3px 12px 3px 0; vertical-align: top; white-space: nowrap; }
  td { padding: 3px 0; text-align: right; overflow-wrap: break-word; word-break: normal; font-variant-numeric: tabular-nums; }
  tr + tr { border-top: 1px solid #f0f2f4; }
  footer { margin-top: 20px; color: #6b7785; font-size: 12.5px; }
</style>
<script>@PLOTLY@</script>
</head>
<body>
<main>
<h1>@TITLE@</h1>
<p class="headline">@HEADLINE@</p>
@DROPPED@
<div class="cards">
@TABLES@
</div>
<div class="panels">
@PANELS@
</div>
<footer>Thin lines are the logged values, wide ones their moving average. Every value is in @WHERE@/metrics.jsonl, the whole
configuration in @WHERE@/config.yaml. Drag to zoom, double-click to reset.</footer>
</main>
</body>
</html>
"""

"""The report's PNG: a run on one sheet, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from megatron_async_rl.observe import colours, sheet_fleet
from megatron_async_rl.observe.colours import AMBER, AXIS, BLUE, GREEN, INK, MUTED, PURPLE, RED
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import column, histograms, numbers, smooth
from megatron_async_rl.observe.sheet_frame import draw_curve, frame, legend
from megatron_async_rl.observe.summary import IN_A_STEP, REGIMES

_SHORT = StrMethodFormatter("{x:g}")

Panel = Callable[[Axes, Record], None]


def draw(record: Record, path: Path) -> None:
    """Writes the PNG: four panels for a supervised run, six for one that samples, four more where engines were counted.

    Above them what each process did, where that was written, and a sentence on what was dropped.
    """
    panels = SUPERVISED if record.supervised else SAMPLED
    if record.summary.busy_share is not None:
        panels = (*panels, *FLEET)
    rows = (len(panels) + 1) // 2
    heights = [3.7] * rows
    if record.activity is not None:
        heights.insert(0, 1.6 + 0.3 * min(len(record.activity.tracks), sheet_fleet.TRACKS_SHOWN))
    figure = Figure(figsize=(13, 0.8 + sum(heights)), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.05)
    below = "\n\n" if record.dropped else "\n"
    figure.suptitle(f"{record.run_dir.name}{below}", x=0.015, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.55 / figure.get_figheight(), record.headline, ha="left", va="center", fontsize=10.5, color=MUTED)
    if record.dropped is not None:
        place = (0.015, 1 - 0.78 / figure.get_figheight())
        figure.text(*place, f"{record.dropped.sentence}.", ha="left", va="center", fontsize=10.5, color=RED)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if record.activity is not None:
        sheet_fleet.activity(figure.add_subplot(grid[0, :]), record, record.activity)
    places = [grid[row, side] for row in range(len(heights) - rows, len(heights)) for side in range(2)]
    for place, panel in zip(places, panels, strict=True):
        panel(figure.add_subplot(place), record)
    figure.savefig(path)


def _reward(axes: Axes, record: Record) -> None:
    frame(axes, record, "Reward", "mean reward of a sample")
    draw_curve(axes, record, "reward/mean", BLUE, "trained on")
    versions, means = record.evaluations.versions, record.evaluations.mean
    if len(versions):
        axes.set_xlim(left=min(axes.get_xlim()[0], versions[0] - 0.5))
        axes.plot(versions, means, color=RED, marker="D", markersize=5, linewidth=0.9, label=f"held out, last {means[-1]:.3f}")
    legend(axes)


def _lag(axes: Axes, record: Record) -> None:
    frame(axes, record, "Lag of the tokens trained on", "weight versions behind")
    steps, shares = histograms(record.rows, "lag/histogram")
    if shares.size:
        axes.grid(False)
        edges = np.append(steps - 0.5, steps[-1] + 0.5)
        lags = np.arange(shares.shape[0] + 1) - 0.5
        mesh = axes.pcolormesh(
            edges,
            lags,
            np.where(shares > 0.0, shares, np.nan),
            cmap="Blues",
            vmin=0.0,
            vmax=np.quantile(shares.max(axis=0), 0.9),
            rasterized=True,
        )
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=28, format=PercentFormatter(1.0, decimals=0))
        bar.set_label("share of the step's tokens", fontsize=8.5, color=MUTED)
        bar.ax.tick_params(labelsize=8, colors=MUTED, length=2)
        bar.outline.set_visible(False)
    for key, colour, style, label in (("lag/mean", AMBER, "-", "mean"), ("lag/max", RED, ":", "largest")):
        steps, values = column(record.rows, key)
        axes.plot(
            steps,
            values,
            color=colour,
            linestyle=style,
            linewidth=1.4,
            marker="o" if len(steps) < 30 else None,
            markersize=3,
            label=label,
        )
    if record.lag_bound is not None:
        axes.axhline(np.ceil(record.lag_bound), color=INK, linewidth=0.8, linestyle=(0, (6, 4)), label="bound")
        axes.set_ylim(-0.6, max(np.ceil(record.lag_bound), shares.shape[0] - 1) + 0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    legend(axes)


def _ess(axes: Axes, record: Record) -> None:
    frame(axes, record, "Effective sample size", "share of the samples (1 = on-policy)")
    draw_curve(axes, record, "ratio/ess_ratio", PURPLE)
    axes.set_ylim(0.0, 1.04)


def _cosine(axes: Axes, record: Record) -> None:
    frame(axes, record, "Cosine of consecutive gradients", "cosine")
    steps, cosines = column([row for row in record.rows if "gac/cosine" in row], "gac/cosine")
    codes = numbers([row for row in record.rows if "gac/cosine" in row], "gac/regime")
    if not len(steps):
        reason = "the first cosine comes with the second step" if record.gac else "no gradient alignment control in this run"
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)
        return
    trend = smooth(cosines)
    if trend is not None:
        axes.plot(steps, trend, color=INK, alpha=0.25, linewidth=5, solid_capstyle="round")
    size = 26 if len(steps) < 60 else 11
    for code, (name, colour) in enumerate(zip(REGIMES, colours.REGIMES, strict=True)):
        chosen = codes == code
        if chosen.any():
            axes.scatter(
                steps[chosen], cosines[chosen], s=size, color=colour, linewidths=0, label=f"{name} ({chosen.sum()})", zorder=3
            )
    axes.axhline(0.0, color=AXIS, linewidth=0.9)
    for name, colour in (("c_low", AMBER), ("c_high", RED)):
        threshold = (record.gac or {}).get(name)
        if threshold is not None:
            axes.axhline(threshold, color=colour, linewidth=1.1, linestyle=(0, (6, 4)), label=f"{name} {threshold:g}")
    legend(axes)


def _responses(axes: Axes, record: Record) -> None:
    frame(axes, record, "Responses", "mean length, tokens")
    draw_curve(axes, record, "response/length_mean", GREEN, "length")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    other = axes.twinx()
    steps, values = column(record.rows, "response/truncated")
    other.plot(steps, values, color=RED, linewidth=0.9, marker="o" if len(steps) < 30 else None, markersize=3)
    axes.plot([], [], color=RED, linewidth=0.9, label="truncated (right)")
    other.set_ylim(0.0, 1.0)
    other.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    other.set_ylabel("share truncated", fontsize=9, color=MUTED)
    other.tick_params(labelsize=8.5, colors=MUTED, length=3)
    for spine in other.spines.values():
        spine.set_visible(False)
    legend(axes)


def _time(axes: Axes, record: Record) -> None:
    frame(axes, record, "What a step's time goes into", "seconds per step")
    steps, whole = column(record.rows, "time/step_s")
    rows = [row for row in record.rows if "time/step_s" in row]
    parts = {name: np.nan_to_num(numbers(rows, key)) for name, key in IN_A_STEP.items()}
    parts["other"] = np.maximum(0.0, whole - sum(parts.values()))
    parts = {name: values if (trend := smooth(values)) is None else trend for name, values in parts.items()}
    labels = [f"{name} {record.summary.shares[name]:.0%}" for name in parts]
    fills = [colours.TIMES[name] for name in parts]
    if len(steps) < 12:
        base = np.zeros(len(steps))
        for (_, values), label, colour in zip(parts.items(), labels, fills, strict=True):
            axes.bar(steps, values, bottom=base, width=0.6, color=colour, label=label)
            base = base + values
    else:
        axes.stackplot(steps, *parts.values(), colors=fills, labels=labels, linewidth=0)
    axes.set_ylim(0, None)
    legend(axes)


def _loss(axes: Axes, record: Record) -> None:
    frame(axes, record, "Loss", "nats per token" if record.supervised else "loss")
    draw_curve(axes, record, "policy/loss", BLUE)


def _gradient_norm(axes: Axes, record: Record) -> None:
    frame(axes, record, "Gradient norm, before clipping", "L2 norm (log scale)")
    draw_curve(axes, record, "policy/grad_norm", PURPLE)
    if (column(record.rows, "policy/grad_norm")[1] > 0).any():
        axes.set_yscale("log")
        axes.tick_params(which="both", labelsize=8.5, colors=MUTED)
        axes.yaxis.set_major_formatter(_SHORT)
        axes.yaxis.set_minor_formatter(_SHORT)


def _learning_rate(axes: Axes, record: Record) -> None:
    frame(axes, record, "Learning rate", "per step")
    draw_curve(axes, record, "policy/lr", GREEN)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(_SHORT)


SAMPLED: tuple[Panel, ...] = (_reward, _lag, _ess, _cosine, _responses, _time)
FLEET: tuple[Panel, ...] = (sheet_fleet.busy, sheet_fleet.in_flight, sheet_fleet.behind, sheet_fleet.lengths)
SUPERVISED: tuple[Panel, ...] = (_loss, _gradient_norm, _learning_rate, _time)

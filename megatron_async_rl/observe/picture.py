"""The report's PNG: a run on one sheet, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from megatron_async_rl.observe import colours
from megatron_async_rl.observe.colours import AMBER, AXIS, BLUE, GREEN, GRID, INK, MUTED, PURPLE, RED
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import column, histograms, numbers, smooth
from megatron_async_rl.observe.summary import IN_A_STEP, REGIMES

_SHORT = StrMethodFormatter("{x:g}")

Panel = Callable[[Axes, Record], None]


def draw(record: Record, path: Path) -> None:
    """Writes the PNG: four panels for a supervised run, six for one that samples."""
    panels = SUPERVISED if record.supervised else SAMPLED
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(13, 0.8 + 3.7 * rows), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.05)
    figure.suptitle(f"{record.run_dir.name}\n", x=0.015, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.55 / figure.get_figheight(), record.headline, ha="left", va="center", fontsize=10.5, color=MUTED)
    for axes, panel in zip(figure.subplots(rows, 2).flat, panels, strict=True):
        panel(axes, record)
    figure.savefig(path)


def _frame(axes: Axes, record: Record, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=25)
    axes.set_xlabel("optimizer step", fontsize=9, color=MUTED)
    axes.set_ylabel(unit, fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8.5, colors=MUTED, length=3)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(AXIS)
    steps = numbers(record.rows, "step")
    margin = max(0.5, 0.015 * (steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def _legend(axes: Axes) -> None:
    """In one line between title and plot, where no curve can be."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=MUTED,
            handlelength=1.4,
            columnspacing=1.4,
            borderpad=0.0,
            borderaxespad=0.6,
        )


def _curve(axes: Axes, record: Record, key: str, colour: str, label: str | None = None) -> None:
    """Raw values as a thin line over their trend, a wide light one."""
    steps, values = column(record.rows, key)
    trend = smooth(values)
    if trend is not None:
        axes.plot(steps, trend, color=colour, alpha=0.3, linewidth=5, solid_capstyle="round")
    marker = "o" if len(values) < 30 else None
    axes.plot(steps, values, color=colour, linewidth=0.9, marker=marker, markersize=3.5, label=label)


def _reward(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Reward", "mean reward of a sample")
    _curve(axes, record, "reward/mean", BLUE, "trained on")
    low, high = axes.get_xlim()
    marks = ((record.summary.before, low, "held out, before", "D"), (record.summary.after, high, "held out, after", "D"))
    for accuracy, step, label, marker in marks:
        if accuracy is not None:
            face = "white" if step == low else RED
            axes.plot(
                step, accuracy, marker, color=RED, markerfacecolor=face, markersize=8, clip_on=False, zorder=5,
                linestyle="none", label=f"{label} {accuracy:.3f}",
            )  # fmt: skip
    _legend(axes)


def _lag(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Lag of the tokens trained on", "weight versions behind")
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
    _legend(axes)


def _ess(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Effective sample size", "share of the samples (1 = on-policy)")
    _curve(axes, record, "ratio/ess_ratio", PURPLE)
    axes.set_ylim(0.0, 1.04)


def _cosine(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Cosine of consecutive gradients", "cosine")
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
    _legend(axes)


def _responses(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Responses", "mean length, tokens")
    _curve(axes, record, "response/length_mean", GREEN, "length")
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
    _legend(axes)


def _time(axes: Axes, record: Record) -> None:
    _frame(axes, record, "What a step's time goes into", "seconds per step")
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
    _legend(axes)


def _loss(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Loss", "nats per token" if record.supervised else "loss")
    _curve(axes, record, "policy/loss", BLUE)


def _gradient_norm(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Gradient norm, before clipping", "L2 norm (log scale)")
    _curve(axes, record, "policy/grad_norm", PURPLE)
    if (column(record.rows, "policy/grad_norm")[1] > 0).any():
        axes.set_yscale("log")
        axes.tick_params(which="both", labelsize=8.5, colors=MUTED)
        axes.yaxis.set_major_formatter(_SHORT)
        axes.yaxis.set_minor_formatter(_SHORT)


def _learning_rate(axes: Axes, record: Record) -> None:
    _frame(axes, record, "Learning rate", "per step")
    _curve(axes, record, "policy/lr", GREEN)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(_SHORT)


SAMPLED: tuple[Panel, ...] = (_reward, _lag, _ess, _cosine, _responses, _time)
SUPERVISED: tuple[Panel, ...] = (_loss, _gradient_norm, _learning_rate, _time)

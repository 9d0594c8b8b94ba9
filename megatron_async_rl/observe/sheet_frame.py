"""What the panels of the report's sheet share: axes over the run's steps, curves over their trend, a legend above."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_async_rl.observe.colours import AXIS, GRID, INK, MUTED
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import column, numbers, smooth


def frame(axes: Axes, record: Record, title: str, unit: str) -> None:
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


def legend(axes: Axes) -> None:
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


def draw_curve(axes: Axes, record: Record, key: str, colour: str, label: str | None = None) -> None:
    """Raw values as a thin line over their trend, a wide light one."""
    steps, values = column(record.rows, key)
    trend = smooth(values)
    if trend is not None:
        axes.plot(steps, trend, color=colour, alpha=0.3, linewidth=5, solid_capstyle="round")
    marker = "o" if len(values) < 30 else None
    axes.plot(steps, values, color=colour, linewidth=0.9, marker=marker, markersize=3.5, label=label)

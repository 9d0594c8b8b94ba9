"""The sheet's panels about engines: who did what when, how busy each was, and what was dropped."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_async_rl.observe import colours
from megatron_async_rl.observe.activity import Activity
from megatron_async_rl.observe.colours import BLUE, INK, MUTED, RED
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import doubling_bins, per_engine, summed
from megatron_async_rl.observe.sheet_frame import frame, legend

TRACKS_SHOWN = 12


def activity(axes: Axes, record: Record, shown: Activity) -> None:
    """One bar a process over the seconds of the last steps; upright lines are the ends of steps."""
    frame(axes, record, f"What each process did, last {len(shown.steps)} steps", "")
    tracks = list(shown.tracks)[:TRACKS_SHOWN]
    states = [state for state in colours.STATES if any(span.state == state for track in tracks for span in shown.tracks[track])]
    for state in states:
        for row, track in enumerate(tracks):
            bars = [(span.start - shown.start, span.seconds) for span in shown.tracks[track] if span.state == state]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colours.STATES[state], linewidth=0)
        axes.broken_barh([], (0, 0), facecolors=colours.STATES[state], label=state)
    for step, at in shown.steps:
        axes.axvline(at - shown.start, color=INK, linewidth=0.8)
        axes.annotate(f"{step}", (at - shown.start, -0.5), xytext=(-3, 2), textcoords="offset points", ha="right",
                      va="bottom", fontsize=7.5, color=MUTED, annotation_clip=False)  # fmt: skip
    axes.set_xlim(0, shown.end - shown.start)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10))
    axes.set_ylim(len(tracks) - 0.5, -0.9)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_xlabel("seconds; upright lines: a step ends", fontsize=9, color=MUTED)
    axes.grid(False)
    legend(axes)


def busy(axes: Axes, record: Record) -> None:
    share = record.summary.busy_share
    mean = f", mean {share:.0%}" if share is not None else ""
    frame(axes, record, f"Engines busy{mean}", "share of the time between steps")
    _lines(axes, record, "engine/busy_shares")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def in_flight(axes: Axes, record: Record) -> None:
    frame(axes, record, "In flight per engine", "responses")
    _lines(axes, record, "engine/in_flight")
    axes.set_ylim(0, None)


def behind(axes: Axes, record: Record) -> None:
    frame(axes, record, "Weights of each engine, when a step ends", "versions behind the policy")
    _lines(axes, record, "engine/versions")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(-0.2, max(1.0, axes.get_ylim()[1]) + 0.2)


def lengths(axes: Axes, record: Record) -> None:
    frame(axes, record, "Lengths of the responses", "share of the responses")
    axes.set_xlabel("tokens", fontsize=9, color=MUTED)
    trained, dropped = summed(record.rows, "trained/length_histogram"), summed(record.rows, "dropped/length_histogram")
    names, shares = doubling_bins([trained, dropped])
    positions = np.arange(len(names))
    for offset, values, name, colour in ((-0.2, shares[0], "trained on", BLUE), (0.2, shares[1], "dropped", RED)):
        if values.any():
            axes.bar(positions + offset, values, width=0.38, color=colour, label=name)
    axes.set_xticks(positions, names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if record.dropped is None:
        axes.plot([], [], " ", label="nothing was dropped")
    legend(axes)


def _lines(axes: Axes, record: Record, key: str) -> None:
    steps, values = per_engine(record.rows, key)
    for engine, numbers in enumerate(values):
        colour = colours.ENGINES[engine % len(colours.ENGINES)]
        marker = "o" if len(steps) < 30 else None
        label = f"engine {engine}" if engine < len(colours.ENGINES) else None
        axes.plot(steps, numbers, color=colour, linewidth=1.0, marker=marker, markersize=3, label=label)
    legend(axes)

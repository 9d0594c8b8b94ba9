"""Page that compares several runs (`mar report A B C`, `mar dashboard A B C`). It shows each metric
of all runs in one panel, over steps, tokens and time, and tables of results and of settings that
differ.

Invariants:
- a run has the same colour and name everywhere on the page;
- curves of metrics that every step logs are moving averages, so that ten runs can be distinguished;
  held-out rewards are not smoothed;
- time is the time spent in steps, without starts, stops, evaluations and checkpoints.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import number
from megatron_async_rl.report.metric_rows import Floats
from megatron_async_rl.report.page import Page
from megatron_async_rl.report.panel import STEPS, Curve, Panel
from megatron_async_rl.report.run_data import RunData, span

COLOURS = ("blue", "red", "green", "amber", "purple", "teal", "brown", "ink", "grey", "sand")
"""Colours of the runs in order. Further runs repeat the colours with dotted lines."""
TILES = 8
"""Number of runs whose result is on the first screen."""
TRAINED_ON = (
    ("Reward trained on", "mean reward of a sample", False, "reward/mean"),
    ("Loss trained on", "nats per token", True, "policy/loss"),
)
"""(title, unit, True for supervised runs, key). A run has one of the two."""
LAST_SHARE = 0.1
"""Share of the steps whose mean is the last reward or loss."""
FOOTER = (
    "Curves of metrics that every step logs are moving averages; held-out rewards are not smoothed."
    " Each run's metrics.jsonl and eval.jsonl contain all values."
)
TOKENS = "response tokens trained on"
SECONDS = "seconds in steps"
KEYS = (
    ("Cosine of consecutive gradients", "cosine", "gac/cosine"),
    ("Effective sample size", "share of the samples", "ratio/ess_ratio"),
    ("Gradient norm, before clipping", "L2 norm", "policy/grad_norm"),
    ("Norm of the update", "L2 norm", "update/norm"),
    ("Entropy of the policy", "nats per token", "policy/entropy"),
    ("Divergence from the behaviour policy", "nats per token: KL, k1", "ratio/kl_k1"),
    ("Learning rate", "per step", "policy/lr"),
    ("Loss", "loss", "policy/loss"),
)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run of a comparison, with its name, its colour and its line style."""

    name: str
    colour: str
    dotted: bool
    run: RunData

    def positions(self, axis: str, steps: Floats) -> Floats:
        """Return the position on `axis` at which each of `steps` ended; the run starts at 0."""
        if axis == STEPS:
            return steps
        ended, sums = self.run.rows.cumulative(
            "tokens/trained" if axis == TOKENS else "time/step_s"
        )
        # Interpolate, because the sums of a long run are known only at the ends of buckets.
        return np.interp(steps, ended, sums)

    def logged(self, key: str, axis: str) -> Curve | None:
        """Return the moving average of `key` over `axis`, or its values in a short run; None if no
        row has it."""
        steps, values, trend = self.run.rows.curve(key)
        if not len(steps):
            return None
        return self._curve(self.positions(axis, steps), values if trend is None else trend)

    def held_out(self, axis: str) -> Curve | None:
        """Return the reward or loss of each evaluation, at the position of its version; None
        without evaluations."""
        versions = self.run.evaluations.versions
        # An evaluation may be logged before the step of its version; omit it until then, because
        # its position is unknown.
        known = versions <= (number(self.run.rows[-1], "step") or 0)
        if not known.any():
            return None
        positions = self.positions(axis, versions[known].astype(np.float64))
        return self._curve(positions, self.run.evaluations.mean[known])

    def _curve(self, x: Floats, y: Floats) -> Curve:
        return Curve(
            name=self.name, colour=self.colour, x=x, y=y, style="dotted" if self.dotted else "line"
        )


def page_of_runs(compared: Sequence[ComparedRun]) -> Page:
    """Return the page of several runs. Raises UserError if no run has a metric to draw."""
    paths = [one.run.run_dir for one in compared]
    parts = {
        "TITLE": f"{len(compared)} runs compared",
        "WHERE": html.escape(str(os.path.commonpath(paths))),
        "NUMBERS": _tiles(compared),
        "FOOTER": FOOTER,
        "SECTIONS": _table("Results", ends_of(compared), compared)
        + _table("Settings that differ", differing(compared), compared),
    }
    return Page(parts=parts, panels=panels_of(compared))


def name_runs(run_dirs: Sequence[Path], runs: Sequence[RunData | None]) -> list[ComparedRun]:
    """Return the runs with data, named and coloured by their directories. `runs` has None for a
    directory without data."""
    return [
        ComparedRun(name=name, colour=colour, dotted=index >= len(COLOURS), run=run)
        # Number the runs before filtering, so that a run that starts later changes no other colour.
        for index, (name, colour, run) in enumerate(
            zip(names_of(run_dirs), map(colour_of, range(len(runs))), runs, strict=True)
        )
        if run is not None
    ]


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Return the name of each directory or, if two names are equal, the path of each directory
    below their common folder."""
    names = [run_dir.name for run_dir in run_dirs]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath(run_dirs)
    return [str(run_dir.relative_to(shared)) for run_dir in run_dirs]


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def panels_of(compared: Sequence[ComparedRun]) -> list[Panel]:
    """Return the panels of reward or loss over steps, tokens and seconds, then those of the metrics
    of stability. The first panel is the main one. Raises UserError if there is no panel."""
    rewards: list[Panel] = []
    for measure, unit in (("reward", "mean reward of a sample"), ("loss", "nats per token")):
        # Rewards and losses have different units, so they need separate panels.
        measured = [one for one in compared if one.run.summary.measure == measure]
        for axis in (STEPS, TOKENS, SECONDS):
            curves = [one.held_out(axis) for one in measured]
            rewards += _panel(f"Held-out {measure}", unit, axis, curves)
    for title, unit, supervised, key in TRAINED_ON:
        chosen = [one for one in compared if one.run.supervised == supervised]
        for axis in (STEPS, TOKENS, SECONDS):
            rewards += _panel(title, unit, axis, [one.logged(key, axis) for one in chosen])
    others = [
        panel
        for title, unit, key in KEYS
        for panel in _panel(title, unit, STEPS, [one.logged(key, STEPS) for one in compared])
    ]
    # Held-out curves come first: they are what runs are compared by.
    panels = [*rewards, *others]
    if not panels:
        what = "the runs have logged none of the compared metrics"
        raise UserError.of("RUN", what, "see their metrics.jsonl")
    # The main panel is as wide as the page.
    first, *rest = panels
    return [replace(first, wide=True), *rest]


def _panel(title: str, unit: str, axis: str, curves: Sequence[Curve | None]) -> Iterator[Panel]:
    """Yield a panel of the curves that are not None; nothing if there are none."""
    drawn = [curve for curve in curves if curve is not None]
    if drawn:
        yield Panel(title=title, unit=unit, x_label=axis, curves=drawn, overview=True)


def differing(compared: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, value in each run) of every setting that differs between runs, except
    `run.dir`."""
    flat = [dict(_leaves(one.run.config)) for one in compared]
    # dict.fromkeys keeps the order of the config, which a set would lose.
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [(key, [settings.get(key, "–") for settings in flat]) for key in keys]
    # run.dir differs between any two runs.
    return [(key, row) for key, row in rows if key != "run.dir" and len(set(row)) > 1]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of nested settings. A list is one value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        yield key, ", ".join(_text(entry) for entry in value) or "none"
    else:
        yield key, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        name = value.get("name")
        rest = ", ".join(f"{key} {_text(one)}" for key, one in value.items() if key != "name")
        return f"{name} ({rest})" if name and rest else str(name or rest)
    return "none" if value is None else str(value)


def ends_of(compared: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (name, value in each run) of the facts that describe the results."""
    facts: tuple[tuple[str, Callable[[ComparedRun], str]], ...] = (
        ("phase", lambda one: one.run.status.phase if one.run.status else "–"),
        ("steps", lambda one: f"{one.run.summary.steps:,}"),
        *(
            (f"held-out {measure} {when}", partial(_held_out_end, measure=measure, when=when))
            for measure in ("reward", "loss")
            for when in ("before", "after")
        ),
        *(
            (f"{title.lower()}, last tenth", partial(_trained_end, key=key, supervised=supervised))
            for title, _, supervised, key in TRAINED_ON
        ),
        (
            "mean cosine of consecutive gradients",
            lambda one: _number(one.run.rows.mean("gac/cosine")),
        ),
        ("tokens trained on", lambda one: f"{one.run.summary.trained:,}"),
        ("time in steps", lambda one: span(one.run.summary.in_steps_s)),
        ("anomalies and notes", lambda one: f"{sum(one.run.anomaly_counts.values()):,}"),
    )
    rows = [(name, [value(one) for one in compared]) for name, value in facts]
    # Omit a fact that applies to no run, such as a held-out loss.
    return [(name, row) for name, row in rows if set(row) != {"–"}]


def _held_out_end(one: ComparedRun, *, measure: str, when: str) -> str:
    summary = one.run.summary
    return _number(getattr(summary, when)) if summary.measure == measure else "–"


def _trained_end(one: ComparedRun, *, key: str, supervised: bool) -> str:
    return _number(_last(one, key)) if one.run.supervised == supervised else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _last(one: ComparedRun, key: str) -> float | None:
    """Return the mean of `key` over the last LAST_SHARE of its values; None without values."""
    finite = one.run.rows.finite(key)
    if not len(finite):
        return None
    # Use at least one value, because LAST_SHARE of a short run may round to 0.
    return float(finite[-max(1, int(LAST_SHARE * len(finite))) :].mean())


def _tiles(compared: Sequence[ComparedRun]) -> str:
    """Return HTML with the held-out reward or loss of each run, else with its last value."""
    tiles = []
    for one in compared[:TILES]:
        after = one.run.summary.after
        key, measure = ("policy/loss", "loss") if one.run.supervised else ("reward/mean", "reward")
        value = after if after is not None else _last(one, key)
        label = (
            f"held-out {one.run.summary.measure}" if after is not None else f"{measure} at the end"
        )
        tiles.append(
            f'<div class="whole"><b style="color:var(--{one.colour})">{_number(value)}</b>'
            f"<small>{label}, {html.escape(one.name)}</small></div>"
        )
    return "".join(tiles)


def _table(
    title: str, rows: Sequence[tuple[str, Sequence[str]]], compared: Sequence[ComparedRun]
) -> str:
    """Return HTML of a table with a row for each fact and a column for each run; empty without
    rows."""
    if not rows:
        return ""
    head = "".join(
        f'<th style="color:var(--{one.colour})">{html.escape(one.name)}</th>' for one in compared
    )
    body = "".join(
        f"<tr><th>{html.escape(name).replace('.', '.<wbr>')}</th>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    return (
        f'<section class="card compared"><h2>{html.escape(title)}</h2>'
        f"<table><tr><th></th>{head}</tr>{body}</table></section>"
    )

"""Detection of anomalies in the metrics of a run. The report marks and lists them.

`RUN/anomalies.jsonl` has details of steps with a gradient far outside the run's history, and of
steps with values that are not finite. Each line is a JSON object with `step`, `norm`, `parameter`
and `samples` (with their `id`), and with `median` or `loss`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import reading
from megatron_async_rl.metrics.log import MetricRow, number

FILE = "anomalies.jsonl"
SAMPLES_SHOWN = 6
KEPT = 2000
"""Maximum number of anomalies of one kind that are kept."""
NEWEST_BYTES = 2**25
"""Number of bytes at the end of `RUN/anomalies.jsonl` that are read."""

KINDS: Mapping[str, tuple[str, str]] = {
    "gradient": ("Gradient far outside the run's history", "red"),
    "nonfinite": ("Loss, gradient or reward that is not finite", "red"),
    "engine": ("Engine lost or restarted", "purple"),
    "skipped": ("Step without an optimizer update", "amber"),
    "reward": ("Rewards that failed", "amber"),
    "dropped": ("Groups dropped", "muted"),
    "resumed": ("Run resumed from a checkpoint", "blue"),
}
"""Kind -> (title, colour), the gravest kind first."""
GRAVE = frozenset({"gradient", "nonfinite", "engine"})
"""Kinds that count as anomalies; the page calls the others notes."""

_SKIPPED_BY_GAC = 2
"""Code in `gac/regime` of a step that the control skipped deliberately."""


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """One anomaly of a run."""

    step: int
    kind: str
    """Key of KINDS."""
    detail: str

    @property
    def colour(self) -> str:
        return KINDS[self.kind][1]


class AnomalyList:
    """Anomalies in bounded memory: the first KEPT of each kind, and the number of all."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of all anomalies by kind."""
        self._kept: list[Anomaly] = []

    def add(self, anomalies: Sequence[Anomaly]) -> None:
        """Add anomalies of later steps."""
        for one in anomalies:
            self.counts[one.kind] += 1
            # Keep the first ones, because the cause of a failure is usually at its beginning.
            if self.counts[one.kind] <= KEPT:
                self._kept.append(one)

    def kept(self) -> list[Anomaly]:
        """Return the kept anomalies in the order in which they were added."""
        # Return a copy, because the list grows while the caller uses the result.
        return list(self._kept)


class AnomalyFinder:
    """Detector of anomalies in successive rows of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._before: MetricRow = {}
        """Newest value of every key."""

    def find(self, rows: Sequence[MetricRow]) -> list[Anomaly]:
        """Return the anomalies in `rows` in order of steps. `rows` must follow the rows of the last
        call."""
        anomalies: list[Anomaly] = []
        details: Mapping[int, Mapping[str, Any]] = {}
        # Read the file of details only if a row needs it, which is rare.
        if any(_has_details(row) for row in rows):
            details = read_details(self._run_dir)
        for row in rows:
            step = int(number(row, "step") or 0)
            for kind, detect in _DETECTORS.items():
                if (text := detect(self._before, row, details.get(step, {}))) is not None:
                    anomalies.append(Anomaly(step=step, kind=kind, detail=text))
            # Update after the checks, which compare a counter with its newest earlier value.
            self._before.update(row)
        return anomalies


def read_details(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return step -> JSON object of the lines in the last NEWEST_BYTES of `RUN/anomalies.jsonl`;
    empty without the file. Raises UserError for a file that cannot be read."""
    details: dict[int, dict[str, Any]] = {}
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            # Read only the end: without details of an old step, the metrics still describe it.
            file.seek(max(0, file.seek(0, os.SEEK_END) - NEWEST_BYTES))
            lines = file.read(NEWEST_BYTES).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return details
    for line in lines:
        try:
            entry = json.loads(line)
            details[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):
            # The seek may have truncated the first line, and a crash the last one.
            continue
    return details


def steps_text(steps: Sequence[int]) -> str:
    """Format ascending steps as ranges: `3, 7–9, 12`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in ranges)


def _has_details(row: MetricRow) -> bool:
    """Return True if the policy may have written details of the row's step."""
    return bool(number(row, "policy/grad_anomaly") or number(row, "policy/nonfinite"))


def _samples(detail: Mapping[str, Any]) -> str:
    """Return the end of a text that lists the samples in the details; empty without any."""
    ids = [str(sample["id"]) for sample in detail.get("samples") or ()]
    if not ids:
        return ""
    return f"; samples {', '.join(ids[:SAMPLES_SHOWN])}{', …' if len(ids) > SAMPLES_SHOWN else ''}"


def _gradient(_: MetricRow, row: MetricRow, detail: Mapping[str, Any]) -> str | None:
    factor = number(row, "policy/grad_anomaly")
    if not factor:
        return None
    norm, median = detail.get("norm"), detail.get("median")
    # If the details are missing, only the metric's factor is known.
    if not isinstance(norm, int | float) or not isinstance(median, int | float):
        return f"{factor:,.0f} times the median of the last steps"

    text = f"norm {norm:,.4g}, median {median:,.4g}"
    if detail.get("parameter"):
        text += f", mostly in {detail['parameter']}"
    return text + _samples(detail)


def _nonfinite(before: MetricRow, row: MetricRow, detail: Mapping[str, Any]) -> str | None:
    keys = ("policy/loss", "policy/grad_norm", "reward/mean")
    nonfinite = [
        key for key in keys if (value := number(row, key)) is not None and not math.isfinite(value)
    ]
    if nonfinite:
        return ", ".join(f"{key} is {number(row, key)}" for key in nonfinite) + _samples(detail)
    # The step may have been skipped although these means are finite; the policy counts such steps.
    if not _growth(before, row, "policy/nonfinite"):
        return None
    return "the step was not applied" + _samples(detail)


def _engine(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    text = []
    alive, earlier = number(row, "engine/alive"), number(before, "engine/alive")
    # Both checks are needed, because an engine may be lost and restarted within one step.
    if alive is not None and earlier is not None and alive < earlier:
        text.append(f"{alive:.0f} of {earlier:.0f} engines left")
    if restarts := _growth(before, row, "engine/restarts"):
        text.append(f"{restarts:.0f} {'restart' if restarts == 1 else 'restarts'}")
    return ", ".join(text) or None


def _skipped(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    skipped = number(row, "policy/skipped")
    # A deliberate skip is not an anomaly, and `_nonfinite` reports a step that is not finite.
    if not skipped or number(row, "gac/regime") == _SKIPPED_BY_GAC or _nonfinite(before, row, {}):
        return None
    return "no optimizer step" if skipped == 1 else f"{skipped:.0%} of the optimizer steps"


def _reward(_: MetricRow, row: MetricRow, __: Mapping[str, Any]) -> str | None:
    failed = number(row, "reward/errors")
    return f"{failed:.0f} {'sample' if failed == 1 else 'samples'}" if failed else None


def _dropped(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    # The counters cover the whole run; their growth belongs to this step.
    groups = sum(_growth(before, row, key) for key in ("flow/dropped_late", "flow/dropped_equal"))
    responses = number(row, "dropped/responses") or 0
    if not groups and not responses:
        return None
    return f"{groups:.0f} groups" if groups else f"{responses:.0f} responses"


def _resumed(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    now, earlier = number(row, "flow/admitted"), number(before, "flow/admitted")
    # The counters of the flow start at 0 in each process, so a smaller count shows a restart.
    decreased = now is not None and earlier is not None and now < earlier
    return "the counters restarted" if decreased else None


_DETECTORS: Mapping[str, Callable[[MetricRow, MetricRow, Mapping[str, Any]], str | None]] = {
    "gradient": _gradient,
    "nonfinite": _nonfinite,
    "engine": _engine,
    "skipped": _skipped,
    "reward": _reward,
    "dropped": _dropped,
    "resumed": _resumed,
}
"""Kind -> detector. A detector takes the newest values before the row, the row, and the details of
its step, and returns a description of the anomaly, or None if there is none."""


def _growth(before: MetricRow, row: MetricRow, key: str) -> float:
    """Return the growth of a counter since its newest earlier value; 0 if the row lacks it."""
    now, earlier = number(row, key), number(before, key) or 0.0
    if now is None:
        return 0.0
    # A resume restarts the counters at 0, so a smaller count is itself the growth.
    return now - earlier if now >= earlier else now

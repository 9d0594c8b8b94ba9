"""Anomalies that a run survived, found in its metrics. The report marks and lists them.

`RUN/anomalies.jsonl` has details on a gradient far outside the run's history and on a step that is
not finite. Each is one JSON object with `step`, `norm`, `parameter` and `samples` (with their
`id`), and with `median` or `loss`.
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
"""Number of bytes at the end of the details that are read: a long run has many."""

KINDS: Mapping[str, tuple[str, str]] = {
    "gradient": ("Gradient far outside the run's history", "red"),
    "nonfinite": ("Loss, gradient or reward that is not finite", "red"),
    "engine": ("Engine lost or restarted", "purple"),
    "skipped": ("Step without an optimizer update", "amber"),
    "reward": ("Rewards that failed", "amber"),
    "dropped": ("Groups dropped", "muted"),
    "resumed": ("Run resumed from a checkpoint", "blue"),
}
"""(title, colour) by kind, the gravest first."""
GRAVE = frozenset({"gradient", "nonfinite", "engine"})

_SKIPPED_BY_GAC = 2
"""Code in `gac/regime` of a step that the control skipped on purpose."""


@dataclass(frozen=True, kw_only=True)
class Anomaly:
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
        self._kept: list[Anomaly] = []

    def add(self, found: Sequence[Anomaly]) -> None:
        for one in found:
            self.counts[one.kind] += 1
            # The first ones, not the newest: the cause of a bad run is usually at its beginning.
            if self.counts[one.kind] <= KEPT:
                self._kept.append(one)

    def kept(self) -> list[Anomaly]:
        """Return the kept anomalies in the order in which they were found."""
        # A copy, because the caller keeps it while the list grows.
        return list(self._kept)


class AnomalyFinder:
    """Finder of anomalies in the rows of a run, block by block."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._before: MetricRow = {}
        """Newest value of every key."""

    def find(self, rows: Sequence[MetricRow]) -> list[Anomaly]:
        """Return the anomalies in `rows`, in order of steps. `rows` follow those of the last
        call."""
        found: list[Anomaly] = []
        details: Mapping[int, Mapping[str, Any]] = {}
        # The details are a second file, and most blocks of rows have nothing to look up in it.
        if any(_traced(row) for row in rows):
            details = read_details(self._run_dir)
        for row in rows:
            step = int(number(row, "step") or 0)
            for kind, look in _LOOKS.items():
                if (text := look(self._before, row, details.get(step, {}))) is not None:
                    found.append(Anomaly(step=step, kind=kind, detail=text))
            # After the checks: a counter is compared with the newest row that has it, not with this
            # one.
            self._before.update(row)
        return found


def read_details(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the object of each step in the last NEWEST_BYTES of `RUN/anomalies.jsonl`; empty
    without the file. Raises UserError for a file that cannot be read."""
    details: dict[int, dict[str, Any]] = {}
    path = run_dir / FILE
    try:
        with reading(path), open(path, "rb") as file:
            # Only the end: details of old steps are not described on the page.
            file.seek(max(0, file.seek(0, os.SEEK_END) - NEWEST_BYTES))
            lines = file.read(NEWEST_BYTES).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return details
    for line in lines:
        try:
            entry = json.loads(line)
            details[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):
            # The first line may be cut by the seek above, the last one by a crash.
            continue
    return details


def steps_text(steps: Sequence[int]) -> str:
    """Format ascending steps as ranges: `3, 7–9, 12`."""
    runs: list[list[int]] = []
    for step in steps:
        # The last range grows as long as the steps are consecutive.
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)


def _traced(row: MetricRow) -> bool:
    """Return whether the policy may have written details."""
    return bool(number(row, "policy/grad_anomaly") or number(row, "policy/nonfinite"))


def _samples(detail: Mapping[str, Any]) -> str:
    ids = [str(sample["id"]) for sample in detail.get("samples") or ()]
    if not ids:
        return ""
    return f"; samples {', '.join(ids[:SAMPLES_SHOWN])}{', …' if len(ids) > SAMPLES_SHOWN else ''}"


def _gradient(_: MetricRow, row: MetricRow, detail: Mapping[str, Any]) -> str | None:
    factor = number(row, "policy/grad_anomaly")
    if not factor:
        return None
    norm, usual = detail.get("norm"), detail.get("median")
    # The details may be cut off or missing; the metric alone has the factor.
    if not isinstance(norm, int | float) or not isinstance(usual, int | float):
        return f"{factor:,.0f} times the median of the last steps"

    text = f"norm {norm:,.4g} against a median of {usual:,.4g}"
    if detail.get("parameter"):
        text += f", most of it in {detail['parameter']}"
    return text + _samples(detail)


def _nonfinite(before: MetricRow, row: MetricRow, detail: Mapping[str, Any]) -> str | None:
    keys = ("policy/loss", "policy/grad_norm", "reward/mean")
    bad = [
        key for key in keys if (value := number(row, key)) is not None and not math.isfinite(value)
    ]
    # A value that is not finite is in the row itself; other causes are counted by the policy.
    if bad:
        return ", ".join(f"{key} is {number(row, key)}" for key in bad) + _samples(detail)
    if not _grew(before, row, "policy/nonfinite"):
        return None
    return "the step was not applied" + _samples(detail)


def _engine(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    text = []
    alive, were = number(row, "engine/alive"), number(before, "engine/alive")
    # Both checks are needed: an engine may be lost, restarted and counted within one step.
    if alive is not None and were is not None and alive < were:
        text.append(f"{alive:.0f} of {were:.0f} engines left")
    if restarts := _grew(before, row, "engine/restarts"):
        text.append(f"{restarts:.0f} {'restart' if restarts == 1 else 'restarts'}")
    return ", ".join(text) or None


def _skipped(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    skipped = number(row, "policy/skipped")
    # One event, one entry: skips on purpose are not anomalies, and _nonfinite reports its own.
    if not skipped or number(row, "gac/regime") == _SKIPPED_BY_GAC or _nonfinite(before, row, {}):
        return None
    return "no optimizer step" if skipped == 1 else f"{skipped:.0%} of the optimizer steps"


def _reward(_: MetricRow, row: MetricRow, __: Mapping[str, Any]) -> str | None:
    failed = number(row, "reward/errors")
    return f"{failed:.0f} {'sample' if failed == 1 else 'samples'}" if failed else None


def _dropped(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    # Counters cover the whole run, so only their growth belongs to this step.
    groups = sum(_grew(before, row, key) for key in ("flow/dropped_late", "flow/dropped_equal"))
    responses = number(row, "dropped/responses") or 0
    if not groups and not responses:
        return None
    return f"{groups:.0f} groups" if groups else f"{responses:.0f} responses"


def _resumed(before: MetricRow, row: MetricRow, _: Mapping[str, Any]) -> str | None:
    now, earlier = number(row, "flow/admitted"), number(before, "flow/admitted")
    # Counters of the flow start at 0 in each process, so a smaller count shows a new one.
    fell = now is not None and earlier is not None and now < earlier
    return "counts began again" if fell else None


_LOOKS: Mapping[str, Callable[[MetricRow, MetricRow, Mapping[str, Any]], str | None]] = {
    "gradient": _gradient,
    "nonfinite": _nonfinite,
    "engine": _engine,
    "skipped": _skipped,
    "reward": _reward,
    "dropped": _dropped,
    "resumed": _resumed,
}
"""Detector by kind. It takes the newest values before the row, the row, and the details of its
step, and returns a text or None."""


def _grew(before: MetricRow, row: MetricRow, key: str) -> float:
    """Growth of a counter since the newest row that has it. A resume restarts counters."""
    now, earlier = number(row, key), number(before, key) or 0.0
    if now is None:
        return 0.0
    # After a restart, the new count is all that is known about the step.
    return now - earlier if now >= earlier else now

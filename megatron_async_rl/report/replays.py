"""Replays of a run, for the curves that its report and its dashboard draw over the run's own.

Invariants:
- only replays in RUN/replays are found; an active replay is shown up to its newest step;
- a damaged replay is omitted: it is not part of the run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.metrics.json_lines import file_stamp
from megatron_async_rl.metrics.log import FILE as METRICS_FILE
from megatron_async_rl.metrics.log import MetricsReader
from megatron_async_rl.metrics.replay_record import FILE, FOLDER, ReplayedStep, ReplayRecord
from megatron_async_rl.report.metric_rows import MetricRows

SHOWN = 5
"""Largest number of replays, the newest ones; each has a colour of its own."""
COLOURS = ("teal", "brown", "amber", "sand", "muted")
SHORTENED = 70
"""Largest number of characters of changed settings in a legend."""


@dataclass(frozen=True, kw_only=True)
class ReplayData:
    """A replay: its record, its lines of metrics, and its colour."""

    number: str
    """Name of its directory."""
    colour: str
    record: ReplayRecord
    rows: MetricRows

    @property
    def name(self) -> str:
        return f"replay {self.number}"

    @property
    def label(self) -> str:
        """Name with the changed settings and the first step whose weights differ."""
        changes = ", ".join(map(_shortened, self.record.changes)) or "same settings"
        if len(changes) > SHORTENED:
            changes = f"{changes[: SHORTENED - 1]}…"
        return f"{self.name}: {changes}; {self.difference}"

    @property
    def changes(self) -> str:
        return ", ".join(self.record.changes) or "same settings"

    @property
    def difference(self) -> str:
        if self.record.first_different is not None:
            return f"weights differ from step {self.record.first_different}"
        steps, all_steps = self.record.steps, self.record.last - self.record.first + 1
        if not steps:
            return "ended without a step" if self.record.ended else "in progress"
        if not all(one.identical for one in steps):
            return "no difference found"
        # A part is compared at its end, and a replay may end early.
        share = "" if len(steps) == all_steps else f" in {len(steps)} of {all_steps} steps"
        return f"identical bits{share}"

    @property
    def off_policy_from(self) -> int | None:
        """First step whose samples come from another policy than the replayed one; None without
        such a step."""
        different = self.record.first_different
        # The step that produces the first different weights still begins with the run's.
        return None if different is None or different >= self.record.last else different + 1

    @property
    def summary(self) -> str:
        """Facts for a table."""
        steps = f"steps {self.record.first} to {self.record.last}"
        text = f"{self.changes}; {steps}; {self.difference}"
        begin = self.off_policy_from
        later = [one for one in self.record.steps if begin is not None and one.step >= begin]
        means = [
            f"{label} {here:.3g} (the run's {there:.3g})"
            for label, name in (("ESS", "ess"), ("KL", "kl"))
            if (here := _mean(later, name)) is not None
            and (there := _mean(later, f"run_{name}")) is not None
        ]
        if means:
            text += f"; samples off-policy from step {begin} on, means: {', '.join(means)}"
        return text


def _shortened(change: str) -> str:
    """Return an override with the names of methods instead of all their settings."""
    key, _, value = change.partition("=")
    try:
        tree, _ = read_tree(f"value: {value}\n")
    except YamlFault:
        return change
    given = tree["value"]
    if isinstance(given, list) and given:
        return f"{key}=[{', '.join(map(_name_of, given))}]"
    named = isinstance(given, Mapping) and "name" in given
    return f"{key}={_name_of(given)}" if named else change


def _name_of(value: Any) -> str:
    return str(value["name"] if isinstance(value, Mapping) and "name" in value else value)


def _mean(steps: Sequence[ReplayedStep], name: str) -> float | None:
    values = [value for one in steps if (value := getattr(one, name)) is not None]
    return sum(values) / len(values) if values else None


class ReplaysReader:
    """Reader of a run's replays, which may still be active. Reads each line of a growing file
    once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._rows: dict[tuple[Path, ...], _PartsReader] = {}
        """Readers by directories of parts: another replay may have taken the same directory."""

    def fingerprint(self) -> Hashable:
        """Return a value that changes with the files of a shown replay."""
        shown = self._newest()
        files = [path / FILE for path in shown]
        files += [part for path in shown for part in sorted(path.glob(f"**/{METRICS_FILE}"))]
        return tuple((str(file), file_stamp(file)) for file in files)

    def read(self) -> list[ReplayData]:
        """Return the newest replays, oldest first."""
        found = []
        for place, path in enumerate(self._newest()):
            # By number, so that a further replay changes no other's colour.
            at = int(path.name) - 1 if path.name.isdecimal() else place
            with suppress(UserError, OSError):
                record = ReplayRecord.read(path)
                parts = tuple(path / part for part in record.parts)
                reader = self._rows.setdefault(parts, _PartsReader(parts))
                found.append(
                    ReplayData(
                        number=path.name,
                        colour=COLOURS[at % len(COLOURS)],
                        record=record,
                        rows=reader.read(),
                    )
                )
        return found

    def _newest(self) -> list[Path]:
        made = [path for path in self._folder.glob("*") if (path / FILE).is_file()]

        def order(path: Path) -> tuple[bool, int, str]:
            return path.name.isdecimal(), int(path.name) if path.name.isdecimal() else 0, path.name

        return sorted(made, key=order)[-SHOWN:]


class _PartsReader:
    """Reader of the lines of a replay's parts, whose steps follow one another."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = parts
        self._begin()

    def _begin(self) -> None:
        self._readers = [MetricsReader(part) for part in self._parts]
        self._rows = MetricRows()

    def read(self) -> MetricRows:
        try:
            return self._read()
        except (UserError, OSError):
            # The readers have passed lines whose rows are lost. The next call reads all again.
            self._begin()
            raise

    def _read(self) -> MetricRows:
        new = [reader.new_rows() for reader in self._readers]
        if any(one.restarted for one in new):
            self._begin()
            new = [reader.new_rows() for reader in self._readers]
        for one in new:
            self._rows.add(one.rows)
        return self._rows

"""Base of the checks of a run, and the records that all of them may read.

    metrics.jsonl --measured--> check <--rows, ended-- sample log       check.result() --> rows

Invariant: a check keeps a bounded amount of memory: it accumulates, and stores the first places of
a fault only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.starts import Start
from megatron_async_rl.metrics.json_lines import file_stamp
from megatron_async_rl.metrics.lag0_log import FILE as LAG0
from megatron_async_rl.metrics.load_log import FILE as LOADS
from megatron_async_rl.metrics.log import MetricRow
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock
from megatron_async_rl.verify.scorecard import MAX_DETAILS, ScorecardRow
from megatron_async_rl.watchdog.events import Status


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Records of a run besides metrics and samples.

    configs: the settings of each start, with the first step that it made, oldest first. newest: the
    last line of metrics when the check began; later lines are not read. digests: of the weights
    after each step. running: a process uses the run directory. status: None if status.json is
    missing or cannot be read. notes: about records that cannot be read.
    """

    run_dir: Path
    config: Config
    configs: Sequence[tuple[int, Config]]
    starts: Sequence[Start]
    newest: MetricRow = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    running: bool = False
    status: Status | None = None
    notes: tuple[str, ...] = ()

    @property
    def records_engines(self) -> bool:
        """True if the run wrote loads.jsonl and lag0.jsonl: it has one of them, or its newest step
        has a metric of the versions that write both."""
        # Each start with engines creates lag0.jsonl, which is empty until a step had lag 0.
        files = (file_stamp(self.run_dir / name) for name in (LOADS, LAG0))
        written = any(stamp is not None and stamp[1] > 0 for stamp in files)
        return written or "response/without_logprob" in self.newest

    @property
    def any_replays(self) -> bool:
        """True if a start used a replay store, which trains on samples several times."""
        return any(_replays(one) for one in (self.config, *(one for _, one in self.configs)))

    def replays_at(self, step: int) -> bool:
        """Return True if a step drew its samples from a replay store."""
        return _replays(self.config_of(step))

    def config_of(self, step: int) -> Config:
        """Return the settings with which a step was made."""
        return next(
            (config for first, config in reversed(self.configs) if first <= step), self.config
        )


def _replays(config: Config) -> bool:
    return config.flow.selection.name == "replay"


class RunCheck:
    """One check. Every method may keep its default, except `result`."""

    def measured(self, row: MetricRow) -> None:
        """Accumulate one line of metrics, in order of steps."""

    def block(self, block: SampleBlock) -> None:
        """Accumulate finished training samples, in the order of the log."""

    def ended(self, end: EndedSample) -> None:
        """Accumulate an outcome of a sample."""

    def unread(self, outcome: Mapping[str, Any]) -> None:
        """Accumulate a row of outcomes whose sample was not read: its segment was deleted, or it
        has ended before."""

    def result(self) -> Iterable[ScorecardRow]:
        """Return the rows, after everything was read."""
        raise NotImplementedError


class Places:
    """First places of a fault, and the number of all."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.first) < MAX_DETAILS:
            self.first.append(text)

    def add_all(self, texts: Iterable[str], count: int) -> None:
        """Add `count` places, whose first texts are `texts`."""
        self.count += count
        self.first.extend(islice(texts, MAX_DETAILS - len(self.first)))

    def __bool__(self) -> bool:
        return self.count > 0

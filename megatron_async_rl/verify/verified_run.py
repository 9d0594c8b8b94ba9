"""`mar verify RUN`: one pass over the records of a run, and its scorecard.

    config, starts, loads, lag0, checkpoints --> checks
    metrics.jsonl --line by line--> checks <--batch by batch-- samples/*.segment

Invariants:
- nothing in the run directory changes, except `verify.json`;
- memory does not grow with the number of samples: only samples whose outcome was not read yet are
  kept, with `selection: replay` the newest KNOWN_SAMPLES, and a check keeps sums;
- damage of samples, checkpoints and records of one row fails that row, which names the file, and
  everything else is still checked. Every row needs config.yaml, metrics.jsonl and starts.jsonl, so
  damage of these ends the command with an error that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from megatron_async_rl.config.durable import reason, write_file
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.starts import config_of, read_starts
from megatron_async_rl.launch.run_lock import is_taken
from megatron_async_rl.metrics.log import (
    MetricRow,
    MetricsReader,
    digests_of_steps,
    number,
    read_newest,
)
from megatron_async_rl.samples.frames import FOLDER, file_of
from megatron_async_rl.samples.segments import read_batches
from megatron_async_rl.verify.arithmetic_checks import LearningRates, TokenCounts
from megatron_async_rl.verify.data_checks import DataUnchanged, EpochUse
from megatron_async_rl.verify.duplicate_responses import DuplicateResponses
from megatron_async_rl.verify.engine_loads import EngineLoads
from megatron_async_rl.verify.gradient_checks import FiniteSteps, MovedTensors
from megatron_async_rl.verify.group_checks import DroppedGroups, GroupSizes
from megatron_async_rl.verify.log_integrity import LogIntegrity
from megatron_async_rl.verify.logprob_differences import LogprobDifferences
from megatron_async_rl.verify.received_gradients import ReceivedGradients
from megatron_async_rl.verify.reward_hacks import RewardHacks, RewardJumps
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock, SampleFacts
from megatron_async_rl.verify.sampling_entropy import SamplingEntropy
from megatron_async_rl.verify.scorecard import Scorecard, one_line
from megatron_async_rl.verify.stored_weights import StoredWeights, WeightChain
from megatron_async_rl.verify.token_ages import TokenAges
from megatron_async_rl.verify.token_bookkeeping import Reencoding, TokenBookkeeping
from megatron_async_rl.watchdog.events import Status, read_status

FILE = "verify.json"
"""Scorecard in the run directory, which the report shows."""
KNOWN_SAMPLES = 1_000_000
"""Number of samples whose outcomes are awaited. The replay store may train a sample at any time; an
outcome of an older one counts as one whose sample was not read."""


def read_records(run_dir: Path) -> RunRecords:
    """Return the run's settings and records. Raises UserError for a directory that is not a run, or
    that has made no step."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        what = f"{run_dir} has no config.yaml: it is not a run"
        raise UserError.of("RUN", what, "name a run directory, the `run.dir` of its config")
    # First: a run that ends meanwhile has newer records than those read here.
    running = is_taken(run_dir)
    config = load(file)
    starts = read_starts(run_dir)
    # Before the digests, so that each line up to this one has its digest among them.
    newest = read_newest(run_dir, 1)
    if not newest:
        raise UserError.of("RUN", f"{run_dir} has made no step", "wait for its first step")
    status, notes = _status(run_dir)
    return RunRecords(
        run_dir=run_dir,
        config=config,
        configs=_configs(run_dir, config),
        starts=starts,
        newest=newest[0],
        digests=digests_of_steps(run_dir),
        running=running,
        status=status,
        notes=notes,
    )


def _status(run_dir: Path) -> tuple[Status | None, tuple[str, ...]]:
    """Return the run's status, and a note if it cannot be read."""
    try:
        return read_status(run_dir), ()
    except UserError as error:
        return None, (f"status.json is not compared: {one_line(error)}",)


def _configs(run_dir: Path, config: Config) -> list[tuple[int, Config]]:
    found: list[tuple[int, Config]] = []
    for start in read_starts(run_dir):
        # A program that runs the loop itself has no file.
        if not start.config:
            continue
        try:
            found.append((start.step + 1, load(config_of(run_dir, start))))
        except UserError:
            # Settings of a former start that is gone: the newest are the best known.
            found.append((start.step + 1, config))
    return found


def checks_of(records: RunRecords) -> list[RunCheck]:
    """Return all checks, in the order of the scorecard."""
    return [
        EngineLoads(records),
        StoredWeights(records),
        WeightChain(records),
        LogprobDifferences(records),
        SamplingEntropy(records),
        DuplicateResponses(records),
        TokenBookkeeping(records),
        Reencoding(records),
        TokenAges(records),
        RewardHacks(),
        RewardJumps(),
        GroupSizes(records),
        DroppedGroups(records),
        DataUnchanged(records),
        EpochUse(records),
        MovedTensors(records),
        ReceivedGradients(run_dir=records.run_dir),
        FiniteSteps(),
        TokenCounts(records),
        LearningRates(records),
    ]


def verify_run(run_dir: Path, console: Console) -> Scorecard:
    """Check a run, and write its scorecard to verify.json; a note reports if it cannot be written.
    Raises UserError for bad input."""
    records = read_records(run_dir)
    log = LogIntegrity(records)
    checks = checks_of(records)
    for row in _metric_rows(records):
        for check in checks:
            check.measured(row)
    _read_log(records, log, checks, console)
    every: list[RunCheck | LogIntegrity] = [log, *checks]
    with console.status("reading checkpoints and data"):
        rows = [row for check in every for row in check.result()]
    card = Scorecard(subject=str(run_dir), rows=tuple(rows), notes=tuple(_notes(records, log)))
    try:
        write_file(run_dir / FILE, card.text())
    except OSError as error:
        # The directory may belong to another user: the result is shown without the file.
        unwritten = f"{FILE} was not written: {reason(error)}"
        card = replace(card, notes=(*card.notes, unwritten))
    return card


def _notes(records: RunRecords, log: LogIntegrity) -> Iterator[str]:
    if records.running:
        yield "the run is running: its newest records may be incomplete"
    yield from records.notes
    if not records.starts and not records.digests:
        yield "the run has no starts.jsonl: an earlier version made it, with fewer records"
    yield from log.notes


def _metric_rows(records: RunRecords) -> Iterator[MetricRow]:
    """Yield the lines of metrics up to the newest one of the records."""
    last = number(records.newest, "step") or 0
    for block in MetricsReader(records.run_dir).blocks():
        yield from (row for row in block.rows if (number(row, "step") or 0) <= last)


def _read_log(
    records: RunRecords, log: LogIntegrity, checks: Sequence[RunCheck], console: Console
) -> None:
    """Pass every sample and outcome to the checks. Damage is recorded in `log`."""
    segments = log.segments
    folder = records.run_dir / FOLDER
    pending: dict[tuple[str, float], SampleFacts] = {}
    sizes = [_size(folder, segment) for segment in segments]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading samples", total=sum(sizes) or 1)
        for segment, size in zip(segments, sizes, strict=True):
            with log.damage():
                for _, batch in read_batches(folder, "samples", segment):
                    block = SampleBlock.of(batch)
                    log.samples += len(block)
                    wrong = block.unequal_lengths()
                    if wrong:
                        # The flat arrays would shift: the batch is unusable.
                        log.misaligned(block, wrong)
                        continue
                    for check in checks:
                        check.block(block)
                    pending |= {(one.id, one.finished_at): one for one in block.facts()}
                    while len(pending) > KNOWN_SAMPLES:
                        log.forgets = True
                        del pending[next(iter(pending))]
            with log.damage():
                for _, batch in read_batches(folder, "outcomes", segment):
                    log.outcomes(batch["seq"].to_numpy())
                    for row in batch.to_pylist():
                        if row["id"] is None or row["outcome"] == "repeated":
                            log.group(row)
                            continue
                        facts = pending.get((row["id"], row["finished_at"]))
                        if facts is None:
                            log.unread(row)
                            for check in checks:
                                check.unread(row)
                            continue
                        end = EndedSample(
                            facts, row["outcome"], row["step"], row["reason"], row["place"]
                        )
                        # With replay a sample trains several times, so its facts are kept.
                        if not log.replays:
                            del pending[row["id"], row["finished_at"]]
                        for check in checks:
                            check.ended(end)
            progress.advance(task, size)


def _size(folder: Path, segment: int) -> int:
    path = file_of(folder, "samples", segment)
    try:
        return 1 if path is None else path.stat().st_size
    except OSError:
        return 1

"""Weights on the disk, and the chain of digests that links every step to the next.

Blocks of a checkpoint are digested when they are written, so a check compares the bytes on the disk
with the bytes that the trainer had. The chain has one digest for each step in metrics.jsonl; a
start records the digest of the weights with which it began, and a checkpoint the digest of its line
of metrics. Both are equalities without tolerance. The chain begins with the first start, and ends
with the step of status.json. A run that does not finish may end between a step's status and its
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_async_rl.config.problem import UserError, number_of
from megatron_async_rl.flow.starts import start_of_step
from megatron_async_rl.metrics.log import MetricRow, digest_of_step
from megatron_async_rl.policy.checkpoint_folder import (
    RECORD_FILE,
    CheckpointBroken,
    about,
    named_latest,
    read_checked,
    require_whole,
    step_of,
    steps,
)
from megatron_async_rl.policy.digested_folder import DIGESTS, faults, files_of, read_description
from megatron_async_rl.verify.run_check import Places, RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

DISK, DISK_BOUND = "weights on disk", "every block of every kept checkpoint has its digest"
DISK_REMEDY = (
    "do not resume from or evaluate the named checkpoint; use another one, and check the disk"
)
CHAIN = "chain of weights"
CHAIN_BOUND = "a digest for each step; starts and checkpoints continue from the same bits"
CHAIN_REMEDY = (
    "find the first named step: weights changed outside of an optimizer step, or the run's files"
    " were edited; `mar replay RUN` shows the first step that cannot be repeated"
)


class StoredWeights(RunCheck):
    """Reads every kept checkpoint and the exported model."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    def result(self) -> Iterable[ScorecardRow]:
        folder = self._records.run_dir / "checkpoint"
        wrong = Places()
        kept = steps(folder) if folder.is_dir() else []
        for path in kept:
            try:
                require_whole(path, blocks=True)
            except CheckpointBroken as error:
                # A running run removes old checkpoints.
                if self._records.running and not path.exists():
                    continue
                wrong.add(f"{path.name}: {error.problems[0].what}")
        self._check_newest(wrong)
        exported = self._check_export(wrong)
        if not kept and not exported and not wrong:
            yield absent(DISK, "no checkpoint was kept", DISK_BOUND, DISK_REMEDY)
            return
        value = number_of("checkpoint", len(kept)) + exported
        if wrong:
            value = f"{number_of('damaged file', wrong.count)} in {value}"
        yield row(DISK, value, DISK_BOUND, not wrong, DISK_REMEDY, wrong.first)

    def _check_newest(self, wrong: Places) -> None:
        """Check that the newest checkpoint exists."""
        records = self._records
        # A running run may replace it while this reads.
        if records.running:
            return
        folder, status = records.run_dir / "checkpoint", records.status
        source, name = "checkpoint/latest", named_latest(folder)
        # `latest` is written first: a killed run may have removed the checkpoint of its status.
        if name is None and status is not None:
            source, name = "status.json", status.checkpoint
        if name and not (folder / name).is_dir():
            wrong.add(f"{source} names {name[:80]}, which is missing")

    def _check_export(self, wrong: Places) -> str:
        """Check the exported model. Return its part of the row's value, empty without a model."""
        records, export = self._records, self._records.run_dir / "hf"
        if not export.is_dir():
            return ""
        if not (export / DIGESTS).is_file():
            # Runs of earlier versions, whose metrics have no digests either, export without them.
            if records.digests and records.status and records.status.phase == "finished":
                wrong.add(f"hf: {DIGESTS} is missing")
            return ", exported model without digests (not checked)"
        content, fault = read_description(export / DIGESTS)
        found = [f"{DIGESTS}: {fault}"] if fault else []
        found += faults(export, files_of(content) or {}, blocks=True)
        wrong.add_all((f"hf: {one}" for one in found), len(found))
        return ", exported model"


class WeightChain(RunCheck):
    """Compares the digests from step to step, through starts and checkpoints."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._wrong = Places()
        self._steps = 0
        self._last: int | None = None
        self._first = 0
        self._trained = 0
        """Newest step with trained samples in the log."""

    def measured(self, row: MetricRow) -> None:
        step = int(row["step"])  # type: ignore[arg-type]
        self._steps += 1
        if self._last is None:
            self._first = step
        elif step != self._last + 1:
            self._wrong.add(f"metrics.jsonl has step {step} after step {self._last}")
        self._last = step
        digests = self._records.digests
        if not digests:
            return
        if step not in digests:
            self._wrong.add(f"step {step} has no digest of its weights")
            return
        # A skipped step changes nothing; any other digest means other weights.
        before = digests.get(step - 1)
        if row.get("policy/skipped") == 1 and before is not None and before != digests[step]:
            self._wrong.add(f"step {step} was skipped, but its weights changed")

    def ended(self, end: EndedSample) -> None:
        if end.outcome == "trained":
            self._trained = max(self._trained, end.step)

    def unread(self, outcome: Mapping[str, Any]) -> None:
        if outcome["outcome"] == "trained":
            self._trained = max(self._trained, outcome["step"])

    def result(self) -> Iterable[ScorecardRow]:
        records = self._records
        if not records.digests:
            why = "metrics.jsonl has no digests: an earlier version made the run"
            yield absent(CHAIN, why, CHAIN_BOUND, CHAIN_REMEDY)
            return
        self._check_ends()
        resumes = self._check_starts()
        saved = self._check_checkpoints()
        value = ", ".join(
            (
                number_of("step", self._steps),
                number_of("resume", resumes),
                number_of("checkpoint", saved),
            )
        )
        if self._wrong:
            value = f"{number_of('break', self._wrong.count)} in {value}"
        yield row(CHAIN, value, CHAIN_BOUND, not self._wrong, CHAIN_REMEDY, self._wrong.first)

    def _check_ends(self) -> None:
        """Check that no line is missing before the first or after the last one."""
        records, last = self._records, self._last or 0
        oldest = min(records.digests)
        if start_of_step([*records.starts], oldest) is None:
            self._wrong.add(f"starts.jsonl lacks the start that made step {oldest}")
        # A run may begin with the checkpoint of another one. An earlier version records no start.
        begin = records.starts[0].step + 1 if records.starts else 1
        if self._first > begin:
            self._wrong.add(
                f"metrics.jsonl begins with step {self._first}, and the run with {begin}"
            )
        if records.running:
            return
        status = records.status
        made = status.step if status is not None else 0
        # The status of an evaluation precedes the line of its step, and a killed run keeps it.
        finished = status is not None and status.phase == "finished"
        if made > last + (not finished):
            self._wrong.add(
                f"metrics.jsonl ends with step {last}, and status.json is of step {made}"
            )
        # If both files agree, a resume has cut the later steps, and the log not yet.
        elif made != last and self._trained > last + 1:
            self._wrong.add(
                f"metrics.jsonl ends with step {last}, and the sample log with step {self._trained}"
            )

    def _check_starts(self) -> int:
        """Compare each start with the step before it. Return the number of resumes."""
        starts, config = self._records.starts, self._records.config
        resumes = 0
        for place, start in enumerate(starts):
            resumes += place > 0
            # A later start at or before this step repeated the steps that this one saw.
            repeated = any(later.step < start.step for later in starts[place + 1 :])
            expected = self._records.digests.get(start.step)
            if repeated or expected is None:
                continue
            made_by = next((one for one in reversed(starts[:place]) if one.step < start.step), None)
            if (config.policy.lora or config.policy.fp8) and (
                made_by is None
                or (made_by.device, made_by.layout, made_by.software)
                != (start.device, start.layout, start.software)
            ):
                # Merged adapters and FP8 scales depend on kernels and cuts.
                continue
            if start.weights != expected:
                self._wrong.add(
                    f"the start at step {start.step} began with weights {start.weights}, and step"
                    f" {start.step} had produced {expected}"
                )
        return resumes

    def _check_checkpoints(self) -> int:
        """Compare the line of metrics that each checkpoint records. Return their number."""
        folder = self._records.run_dir / "checkpoint"
        count = 0
        for path in steps(folder) if folder.is_dir() else []:
            try:
                held = read_checked(path, RECORD_FILE, about(path))
                line = json.loads(held)["metrics"] if held is not None else None
                if line is None:
                    continue
                count += 1
                if digest_of_step(self._records.run_dir, step_of(path)) != line["digest"]:
                    self._wrong.add(f"{path.name} was saved with another line of metrics")
            except (CheckpointBroken, ValueError, KeyError, TypeError):
                # The row `weights on disk` names damaged files.
                continue
            except UserError as error:
                self._wrong.add(error.problems[0].what)
        return count

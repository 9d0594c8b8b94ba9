"""Comparison of a checkpoint with the other records of its run: is it the newest, and do the rows
that it counts still exist?

    status.json      names the newest checkpoint
    metrics.jsonl    contains the line of the checkpoint's step; the checkpoint has its digest
    samples/         extends at least to the mark that the checkpoint has

Invariants:
- a run whose records show a checkpoint never starts again at step 0 without the user's consent;
- a run that stopped before its first checkpoint starts again without a message;
- if `latest` names an older checkpoint, that is the user's choice: the run resumes from it with a
  note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import code_digests
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.metrics.log import FILE as METRICS_FILE
from megatron_async_rl.metrics.log import begins_after, digest_of_step, number, read_newest
from megatron_async_rl.policy.checkpoint_folder import (
    LATEST,
    RECORD_FILE,
    about,
    damaged,
    named_latest,
    read_checked,
    step_of,
    steps,
)
from megatron_async_rl.samples.frames import (
    FOLDER,
    MARK_FILE,
    LogMark,
    SegmentBroken,
    lost_end,
    numbers_in,
)
from megatron_async_rl.watchdog.events import read_status

_ANEW = "choose another run.dir, or remove {run_dir} to start over"


def lost_checkpoints(config: Config, path: Path | None) -> list[Problem]:
    """Return the problem of checkpoints that the run had and that are missing now, or none. `path`:
    the newest remaining checkpoint; null if there is none."""
    run_dir, folder = config.run.dir, config.run.dir / "checkpoint"
    status = read_status(run_dir)
    if status is not None and status.phase == "finished" and config.run.steps <= status.step:
        return []  # a finished run does not resume
    recorded = _recorded(run_dir)
    again = _ANEW.format(run_dir=run_dir)
    if path is None:
        if recorded is None:
            return []
        state = "is empty" if folder.is_dir() else "does not exist"
        what = f"{folder} {state}, and {recorded}: the run would start again at step 0"
        return [Problem(key=str(folder), what=what, fix=f"restore the folder, or {again}")]
    named = status.checkpoint if status is not None else None
    if (
        not named
        or named_latest(folder) is not None
        or named in {one.name for one in steps(folder)}
    ):
        return []
    # A save writes `latest` before the status names the checkpoint, so `latest` was deleted.
    what = (
        f"{folder} has no {LATEST} and no {named}, which {run_dir / 'status.json'} names as the"
        " newest checkpoint"
    )
    fix = (
        f"restore the folder; or write {path.name} into {folder / LATEST} to continue from that"
        " checkpoint"
    )
    return [Problem(key=str(folder), what=what, fix=f"{fix}; or {again}")]


def _recorded(run_dir: Path) -> str | None:
    """Return the evidence for a checkpoint in the run's records, as text; None if there is none."""
    status = read_status(run_dir)
    if status is not None and status.checkpoint:
        return f"{run_dir / 'status.json'} names {status.checkpoint} as its newest checkpoint"
    # Empty, not null: the run recorded that it had no checkpoint yet.
    if status is not None and status.checkpoint == "":
        return None
    if status is not None and status.phase == "finished" and status.step > 0:
        return f"{run_dir / 'status.json'} records a run that finished at step {status.step}"
    # Runs of earlier releases do not record checkpoints in their status.
    every, step = _every(run_dir), _steps_made(run_dir)
    if every and step >= every:
        return f"the run made {step} steps, with a checkpoint every {every} (checkpoint.every)"
    return None


def _every(run_dir: Path) -> int:
    """Return checkpoint.every of the run; 0 if it cannot be read."""
    try:
        tree = read_tree((run_dir / "config.yaml").read_text(encoding="utf-8"))[0]
        return int(tree["checkpoint"]["every"])
    except (OSError, ValueError, KeyError, TypeError, YamlFault):
        return 0


def _steps_made(run_dir: Path) -> int:
    """Return the largest step in the run's status and metrics."""
    status = read_status(run_dir)
    made = [status.step if status is not None else 0]
    with suppress(UserError):  # the run reports a damaged line when it cuts the file
        made += [int(number(row, "step") or 0) for row in read_newest(run_dir, 1)]
    return max(made)


def record_of(path: Path) -> dict[str, Any]:
    """Return the record of the checkpoint at `path`; empty if an earlier release saved it. Raises
    CheckpointBroken."""
    saved = read_checked(path, RECORD_FILE, about(path))
    if saved is None:
        return {}
    try:
        record = json.loads(saved)
    except ValueError as error:
        raise damaged(path, f"{RECORD_FILE} cannot be read ({error})") from error
    return record if isinstance(record, dict) else {}


def record_problems(config: Config, path: Path) -> list[Problem]:
    """Return problems of files that belong to another run than the checkpoint at `path`, or that
    lack rows which it counts. Raises CheckpointBroken, UserError."""
    record = record_of(path)
    return _metrics_problems(config, path, record) + _samples_problems(config, path, record)


def _metrics_problems(config: Config, path: Path, record: Mapping[str, Any]) -> list[Problem]:
    run_dir, line = config.run.dir, record.get("metrics")
    if line is None:
        return []
    if begins_after(run_dir, line["step"]):
        return []  # record_notes reports this: a checkpoint may be copied into a new folder
    found = digest_of_step(run_dir, line["step"])
    if found == line["digest"]:
        return []
    state = "no line" if found is None else "another line"
    what = f"has {state} of step {line['step']}, at which {path} was saved"
    fix = (
        "restore the checkpoint and the file of the same run; or choose another run.dir, and copy"
        " the checkpoint folder there to continue from it"
    )
    return [
        Problem(
            key=str(run_dir / METRICS_FILE),
            what=f"{what}: the checkpoint belongs to another run, or the file was changed",
            fix=fix,
        )
    ]


def _samples_problems(config: Config, path: Path, record: Mapping[str, Any]) -> list[Problem]:
    run_dir, mark = config.run.dir, record.get("samples")
    if mark is None or config.samples.keep_mib == 0:
        return []
    try:
        if not numbers_in(run_dir / FOLDER) and not (run_dir / MARK_FILE).exists():
            return []  # record_notes reports this: folder and mark were moved away
        lost = lost_end(run_dir, LogMark.of(mark))
    except SegmentBroken as error:
        if error.path.name in (MARK_FILE, FOLDER):
            return [Problem(key=str(error.path), what=error.what, fix=error.fix)]
        return []  # the run reports it, keeps the file as it is, and continues in a new one
    if lost is None:
        return []
    fix = (
        f"restore the files; or move {run_dir / FOLDER} and {run_dir / MARK_FILE} away to start a"
        " new log; or set samples.keep_mib: 0 to run without a log"
    )
    what = f"{lost}: rows that {path} counts are missing"
    return [Problem(key=str(run_dir / FOLDER), what=what, fix=fix)]


def record_notes(config: Config, path: Path) -> list[str]:
    """Return notes on permitted changes since the checkpoint at `path`. Raises
    CheckpointBroken."""
    run_dir, record = config.run.dir, record_of(path)
    notes = []
    line = record.get("metrics")
    if line is not None and begins_after(run_dir, line["step"]):
        notes.append(f"{run_dir} has no {METRICS_FILE} for the steps before {path.name}")
    logged = numbers_in(run_dir / FOLDER) or (run_dir / MARK_FILE).exists()
    if record.get("samples") is not None and config.samples.keep_mib and not logged:
        notes.append(
            f"{run_dir} has no sample log for the steps before {path.name}: it starts empty"
        )
    saved, now = record.get("code") or {}, code_digests(config.model_dump(mode="json"))
    notes += [
        f"{file} has changed since {path.name} was saved, and the run continues with the new code"
        for file, digest in now.items()
        if file in saved and saved[file] != digest
    ]
    status = read_status(run_dir)
    named = status.checkpoint if status is not None else None
    if named and named not in {one.name for one in steps(path.parent)}:
        notes.append(
            f"the run resumes from step {step_of(path)}: its newest checkpoint, {named}, does not"
            " exist"
        )
    return notes

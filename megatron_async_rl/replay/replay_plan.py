"""Plan of a replay: the steps to repeat, the checkpoint before them, and the settings of each.

Invariant: every step has the settings of the start that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyarrow import compute

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.starts import Start, config_of, read_starts, start_of_step
from megatron_async_rl.metrics.log import (
    number,
    read_newest,
)
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.policy.checkpoint_folder import step_of
from megatron_async_rl.policy.checkpoint_folder import steps as checkpoints
from megatron_async_rl.samples.frames import SegmentBroken
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches

LAYOUT = (
    "policy.parallel",
    "policy.device",
    "policy.sequence",
    "policy.prefix_sharing",
    "policy.tokens_per_micro_batch",
    "flow.stream",
)
"""Keys that change only the order of additions."""
NEUTRAL = ("watchdog",)
"""Keys that change no number."""
USED = (
    *("model", "policy", "objective", "controls", "flow.stream", "run.seed", "run.steps"),
    *NEUTRAL,
)
"""Keys that the trainer reads; the recorded samples replace the others."""
WITHOUT_ENGINES = (
    "checkpoint.every=0",
    "eval=null",
    "observe.tensorboard=false",
    "observe.trackers=[]",
    "observe.prometheus_port=null",
    "run.resume=auto",
    # The log already has the experts or not, whatever the replay's routing_replay is.
    "samples.experts=false",
)
"""Overrides that turn off the parts of a run that a replay does not need."""
TEMPERATURE = "rollout.sampling.temperature"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps with the same settings."""

    first: int
    last: int
    start: Start | None
    config_file: Path


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Steps that a replay repeats. checkpoint: folder with the weights of the step before the
    first; null for the model. requested: first step that the user requested; the steps before it
    lead to it."""

    run_dir: Path
    stretches: Sequence[Stretch]
    checkpoint: Path | None
    requested: int
    changes: Sequence[str] = ()
    """The user's overrides."""
    explained: int | None = None
    """Step whose gradient is explained, the last one; null for none."""
    save: bool = False
    """Write a checkpoint of the last step."""
    notes: Sequence[str] = ()
    """Facts that the user must know, such as steps that were lost."""

    @property
    def is_what_if(self) -> bool:
        """True if the user changes more than the layout."""
        return any(not _names(change, (*LAYOUT, *NEUTRAL)) for change in self.changes)

    @property
    def has_the_run_s_settings(self) -> bool:
        """True if the user changes nothing that a step's numbers depend on."""
        return all(_names(change, NEUTRAL) for change in self.changes)

    @property
    def first(self) -> int:
        return self.stretches[0].first

    @property
    def last(self) -> int:
        return self.stretches[-1].last


def plan_replay(
    run_dir: Path,
    first: int | None,
    count: int | None,
    changes: Sequence[str],
    explained: int | None = None,
    *,
    save: bool = False,
) -> ReplayPlan:
    """Return the steps to repeat. first: null for the oldest that can be repeated; count: null for
    all up to the last; explained: the step of --explain, instead of both. Raises
    UserError for a run that cannot be replayed from there, with what can be."""
    if explained is not None and (first is not None or count is not None):
        what = "repeats the steps up to its own from the nearest checkpoint"
        raise UserError.of("--explain", what, "leave out --from and --steps")
    if not (run_dir / "config.yaml").is_file():
        what = f"{run_dir} has no config.yaml: it is not a run"
        raise UserError.of("RUN", what, "name a run directory, the `run.dir` of its config")
    _require_effect(run_dir, changes)
    log = _recorded_steps(run_dir)
    saved = {step_of(path): path for path in checkpoints(run_dir / "checkpoint")}
    requested = first if explained is None else explained
    if requested is None:
        requested = _first_step(log, saved)
    if requested > log.last_step:
        what = f"the last recorded step is {log.last_step}"
        what += f"; {log.lost()}" * (log.last_step < log.made)
        option = "--from" if explained is None else "--explain"
        raise UserError.of(option, what, f"name a step up to {log.last_step}")
    # The newest checkpoint before the requested step needs the fewest steps in between.
    before = max((step for step in saved if step < requested), default=0)
    # Both ends: the log loses its oldest segments, and an explanation is useless without its step.
    for step in (before + 1, *(() if explained is None else (explained,))):
        if (missing := log.missing(step)) is not None:
            why, fix = missing
            raise UserError.of("RUN", why, _alternative(log, saved) or fix)
    last = log.last_step if count is None else min(requested + count - 1, log.last_step)
    if explained is not None:
        last = explained
    _require_past_weights(run_dir, changes, before, last, log, explained)
    return ReplayPlan(
        run_dir=run_dir,
        stretches=stretches(run_dir, read_starts(run_dir), before + 1, last),
        checkpoint=saved.get(before),
        requested=requested,
        changes=changes,
        explained=explained,
        save=save,
        notes=[log.lost()] if last == log.last_step < log.made else [],
    )


def _require_past_weights(
    run_dir: Path,
    changes: Sequence[str],
    before: int,
    last: int,
    log: _ReplayableSteps,
    explained: int | None,
) -> None:
    """Raise UserError for changes with which the steps up to `last` read weights of past versions
    that the checkpoint of step `before` lacks, because the run did not keep them."""
    # A replay from the model keeps them itself.
    if before == 0 or not changes:
        return
    starts = read_starts(run_dir)
    (saved,) = stretches(run_dir, starts, before, before)
    (after,) = stretches(run_dir, starts, before + 1, before + 1)
    config = load(after.config_file, [*WITHOUT_ENGINES, *changes])
    kept = _stores_of_past_weights(load(saved.config_file))
    for store, reader in _stores_of_past_weights(config).items():
        count = min(config.batch_versions, last - before)
        if store in kept or log.oldest_version(before + 1, count) >= before:
            continue
        what = (
            f"reads weights of versions before {before}, which the run did not keep in the"
            f" checkpoint of step {before}"
        )
        if log.missing(1) is not None:
            fix = "leave it out: a replay from the model keeps them, but the first steps are lost"
        elif explained is not None:
            fix = "replay from the model instead (--from 1), without --explain"
        else:
            fix = "replay from the model (--from 1)"
        raise UserError.of(reader, what, fix)


def _stores_of_past_weights(config: Config) -> dict[str, str]:
    """Return the stores of past weights that a trainer keeps -> a key that reads it."""
    stores = {}
    for control in config.controls:
        if control.needs_past_weights:
            stores["masters"] = f"controls: {control.name}"
    objective = config.objective
    if objective.proximal == "snapshot" and "logp_prox" in Objective(objective).needs:
        stores["snapshots"] = "objective.proximal: snapshot"
    return stores


def _require_effect(run_dir: Path, changes: Sequence[str]) -> None:
    """Raise UserError for a change of a key that the trainer does not read or that does not
    exist."""
    file = run_dir / "config.yaml"
    for change in changes:
        key, supervised = change.partition("=")[0].strip(), load(file).supervised
        if _names(change, USED) or (_names(change, (TEMPERATURE,)) and not supervised):
            continue
        if not supervised or not _names(change, ("rollout",)):
            # A name from another library has no effect anywhere: the error has the key's name here.
            load(file, [change])
        what = "has no effect on a replay, which trains on recorded samples without engines"
        if supervised:
            what = "cannot change in a replay, which trains on the run's own responses"
        raise UserError.of(key, what, f"change keys of {', '.join(USED)} or {TEMPERATURE}")


class _ReplayableSteps:
    """Steps whose batches are known. recorded: null for a supervised run, because data and seed
    determine its batches. last_step: newest step that was trained and logged. made: newest step
    with a line of metrics."""

    def __init__(self, recorded: RecordedBatches | None, last_step: int, made: int) -> None:
        self._recorded = recorded
        self.last_step = last_step
        self.made = made

    def lost(self) -> str:
        """Return why the steps between last_step and made cannot be replayed."""
        first = self.last_step + 1
        steps = f"steps {first} to {self.made}" if first < self.made else f"step {first}"
        why, _ = self.missing(first) or ("the log has no later batch", "")
        return f"{steps} cannot be replayed: {why}"

    def oldest_version(self, first: int, count: int) -> int:
        """Return the oldest version that sampled a token of these recorded steps; `first` if there
        is none."""
        oldest = first
        for step in range(first, min(first + count - 1, self.last_step) + 1):
            if self._recorded is not None and self.missing(step) is None:
                versions = self._recorded.batch(step).samples["versions"]
                least = compute.min(versions.flatten()).as_py()
                oldest = oldest if least is None else min(oldest, least)
        return oldest

    def missing(self, step: int) -> tuple[str, str] | None:
        """Return why the batch of a step cannot be read, and the fix if no other step can be
        replayed; null if it can be read."""
        try:
            if self._recorded is not None:
                self._recorded.batch(step)
        except NotRecorded as error:
            return str(error), (
                "no recorded step follows the model or a kept checkpoint: raise samples.keep_mib or"
                " checkpoint.keep in the next run"
            )
        except SegmentBroken as error:
            return str(error), error.fix
        return None


def _recorded_steps(run_dir: Path) -> _ReplayableSteps:
    """Return the steps that can be repeated. Raises UserError for a run without a log or without a
    step."""
    rows = read_newest(run_dir, 1)
    made, recorded = int(number(rows[-1], "step") or 0) if rows else 0, None
    last = made
    if not load(run_dir / "config.yaml").supervised:
        with reading_log():
            recorded = RecordedBatches(run_dir)
            # A crash in a step leaves its batch in the log without a line of metrics.
            last = min(made, recorded.last_step)
    if not made:
        raise UserError.of("RUN", f"{run_dir} has made no step", "wait for its first step")
    log = _ReplayableSteps(recorded, last, made)
    if not last:
        why, fix = log.missing(1) or (f"{run_dir} has trained no step", "wait for its first step")
        raise UserError.of("RUN", why, fix)
    return log


@contextmanager
def reading_log() -> Iterator[None]:
    """Turn errors of the sample log into a UserError."""
    try:
        yield
    except NotRecorded as error:
        fix = "name a run that was made with samples.keep_mib above 0"
        raise UserError.of("RUN", str(error), fix) from error
    except SegmentBroken as error:
        raise UserError.of("RUN", str(error), error.fix) from error


def _beginnings(log: _ReplayableSteps, saved: dict[int, Path]) -> Iterator[int]:
    """Yield the steps from which a replay can start: after the model or a checkpoint."""
    for step in (0, *sorted(saved)):
        if step < log.last_step and log.missing(step + 1) is None:
            yield step + 1


def _first_step(log: _ReplayableSteps, saved: dict[int, Path]) -> int:
    return next(_beginnings(log, saved), 1)


def _alternative(log: _ReplayableSteps, saved: dict[int, Path]) -> str:
    """Return which steps can be replayed; empty if none can."""
    first = next(_beginnings(log, saved), None)
    return "" if first is None else f"replay from step {first} on (--from {first})"


def stretches(run_dir: Path, starts: list[Start], first: int, last: int) -> list[Stretch]:
    """Divide the steps by the settings of the starts that made them."""
    found: list[Stretch] = []
    for step in range(first, last + 1):
        start = start_of_step(starts, step)
        if found and _alike(found[-1].start, start):
            found[-1] = replace(found[-1], last=step)
        else:
            file = run_dir / "config.yaml" if start is None else config_of(run_dir, start)
            found.append(Stretch(first=step, last=step, start=start, config_file=file))
    return found


def _alike(before: Start | None, start: Start | None) -> bool:
    """Return True if two starts make the same bits of the same batch."""
    if before is None or start is None:
        return before is start
    names = ("config", "device", "ranks", "layout", "threads", "software")
    return all(getattr(before, name) == getattr(start, name) for name in names)


def _names(change: str, keys: Sequence[str]) -> bool:
    """Return True if an override sets one of the keys or something in them."""
    key = change.partition("=")[0].strip()
    return any(key == one or key.startswith(f"{one}.") for one in keys)

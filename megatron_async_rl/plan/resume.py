"""Comparison of a config with what an earlier start left in its run directory.

Invariants:
- a directory that holds steps of a run takes no other run: what defines the run stays as it was,
  and a difference is refused, or printed where it is allowed;
- `ALLOWED` lists every key that a resumed run really obeys; any key added to the schema is refused
  until it is listed;
- a comparison that cannot be made is a problem, and never passes as one without differences;
- the prompts are those of the checkpoint by their digests, whatever their files are called.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_async_rl.config.keys import path_keys, pattern_of
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import YamlFault, read_tree
from megatron_async_rl.data import DataIdentity
from megatron_async_rl.flow.buffer import (
    BUFFER_FILE,
    EARLIER_BUFFER_FILE,
    BufferBroken,
    earlier_format,
    read_buffer,
)
from megatron_async_rl.plan.model_files import ModelShape, read_model
from megatron_async_rl.plan.run_record import lost_checkpoints, record_notes, record_problems
from megatron_async_rl.policy.checkpoint_folder import (
    CONFIG_FILE,
    DATA_FILE,
    CheckpointBroken,
    about,
    later,
    named_latest,
    newest,
    read_file,
    refuse_other_moments,
    require_readable,
    require_whole,
    steps,
)
from megatron_async_rl.policy.digested_folder import files_of
from megatron_async_rl.samples.frames import SegmentBroken
from megatron_async_rl.watchdog.events import read_status

# An allow list: a key that is added to the schema is refused until it was checked.
ALLOWED = (
    # How long the run is, and what is measured and kept.
    "run.steps",
    "run.resume",
    "data.eval",
    "eval",
    "checkpoint",
    "watchdog",
    "observe",
    "samples",
    "policy.optimizer.log_update_norm",
    # Computed again at each step. Betas, eps and weight decay are not: the checkpoint restores
    # them.
    "policy.optimizer.lr",
    "policy.optimizer.min_lr",
    "policy.optimizer.schedule",
    "policy.optimizer.warmup_steps",
    "policy.optimizer.clip_grad",
    # The same moments, elsewhere; steps differ by rounding from those of a fused Adam.
    "policy.optimizer.moment_offload",
    "policy.on_anomaly",
    "policy.max_nonfinite_steps",
    # Where and how fast it runs. A checkpoint loads on any parallel layout.
    "policy.parallel",
    "policy.device",
    "policy.layers",
    "policy.sequence",
    "policy.tokens_per_micro_batch",
    "policy.logprob_chunk_tokens",
    "policy.recompute",
    "rollout.placement",
    "rollout.engines",
    "rollout.tensor",
    "rollout.pipeline",
    "rollout.in_flight",
    "rollout.restarts_per_hour",
    "rollout.unresponsive_s",
    "rollout.max_concurrent",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.max_context",
    "rollout.start_timeout_s",
    "rollout.vllm",
    "rollout.reward.on_error",
    "rollout.reward.timeout_s",
    "rollout.reward.workers",
    "rollout.reward.concurrency",
    "rollout.reward.batch",
    "rollout.reward.memory_mib",
    "rollout.environment.timeout_s",
    "rollout.environment.processes",
    "rollout.environment.memory_mib",
    "weights",
    # Which samples train when: the scheduler keeps what of its buffer the new settings permit.
    "flow",
)


ADDRESS = re.compile(r"rollout\.(reward|environment)\.(parts\.[^.]+\.)?settings\.url")
"""Keys of servers, which may be on another machine or port after each start."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of weight files. Weights that a resume reads from a model have a digest in the
checkpoint."""
DATA_PATHS = ("data.train", "data.sources[].path")
"""The checkpoint has digests of these files' prompts, so their names may change."""


@dataclass(frozen=True)
class Difference:
    """One key whose value is not that of the run in the directory."""

    key: str
    before: Any
    now: Any

    @property
    def is_move(self) -> bool:
        """The file or folder was moved or copied, or has two names; its content is checked where it
        is read."""
        # Only paths can move; null means that the feature was off.
        if pattern_of(self.key) not in path_keys() or self.before is None or self.now is None:
            return False
        # Of another user or machine, `before` may be in a folder that cannot be entered.
        before, now = str(self.before), str(self.now)
        if not os.path.exists(before):
            return True
        return os.path.exists(now) and (
            os.path.samefile(before, now) or _is_copy(Path(before), Path(now))
        )

    @property
    def allowed(self) -> bool:
        return (
            self.is_move
            or ADDRESS.fullmatch(self.key) is not None
            or any(self.key == key or self.key.startswith(f"{key}.") for key in ALLOWED)
        )

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.now)}"


def _is_copy(before: Path, now: Path) -> bool:
    """Return whether two files, or two folders with files, have the same content; of weights, which
    are large, the same names and sizes."""
    try:
        if not before.is_dir():
            # shallow compares times and sizes, which a copy may share by chance.
            return filecmp.cmp(before, now, shallow=False)
        sizes = [
            {
                one.relative_to(folder): one.stat().st_size
                for one in folder.rglob("*")
                if one.is_file()
            }
            for folder in (before, now)
        ]
        return (
            bool(sizes[0])
            and sizes[0] == sizes[1]
            and all(
                name.suffix in WEIGHTS or filecmp.cmp(before / name, now / name, shallow=False)
                for name in sizes[0]
            )
        )
    except OSError:
        return False


def differences(config: Config) -> list[Difference]:
    """Keys of `config` that differ from the run in `run.dir`; none where no step was made there, or
    where `conflicts` reports that the earlier configuration cannot be read."""
    before, problems = _earlier(config)
    if problems:
        return []
    found = _compare(before, config.model_dump(mode="json"), "", config)
    return [difference for difference in found if difference.key != "run.dir"]


def _earlier(config: Config) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration of the run in `run.dir`, of its newest checkpoint if that has one; empty
    where no step was made there. Or the problem that keeps it from being read."""
    run_dir = config.run.dir
    if not run_dir.is_dir():
        return {}, []
    checkpoint = run_dir / "checkpoint"
    status = read_status(run_dir)
    # A start that made no step may be replaced by any other run.
    if not ((status is not None and status.step > 0) or _has_checkpoints(checkpoint)):
        return {}, []

    # The checkpoint's copy is preferred: config.yaml belongs to the last start, which may have been
    # refused.
    saved = _file_of_checkpoint(config, CONFIG_FILE)
    file = run_dir / "config.yaml"
    try:
        text: str | None = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = None
    except (OSError, UnicodeDecodeError) as error:
        return {}, [_unreadable(file, f"cannot be read ({error})")]
    if text is None and saved is None:
        return {}, [_unreadable(file, "is missing")]
    try:
        tree = read_tree(text)[0] if text is not None else {}
        whole = text is None or Config.model_fields.keys() <= tree.keys()
    except YamlFault as error:
        return {}, [_unreadable(file, error.what)]
    if not whole:
        lacking = ", ".join(name for name in Config.model_fields if name not in tree)
        return {}, [_unreadable(file, f"is incomplete: it has no {lacking}")]
    if saved is None:
        return tree, []
    try:
        return read_tree(saved.decode())[0], []
    except (UnicodeDecodeError, YamlFault) as error:  # of a checkpoint without digests
        return {}, [_unreadable(file, f"of the newest checkpoint cannot be read ({error})")]


def _has_checkpoints(checkpoint: Path) -> bool:
    """True also for an unreadable folder, which `checkpoint_problems` reports."""
    try:
        return require_readable(checkpoint) and (
            bool(steps(checkpoint)) or named_latest(checkpoint) is not None
        )
    except CheckpointBroken:
        return True


def _unreadable(file: Path, what: str) -> Problem:
    earlier = sorted(file.parent.glob("config.*.yaml"))
    held = f" (those of earlier starts: {', '.join(map(str, earlier))})" if earlier else ""
    # Its own key: the checkpoint may have a problem, too, and one key is printed once.
    return Problem(
        key=str(file),
        what=f"{what}; the settings of the run in this folder cannot be compared with these",
        fix=f"put the file back as the run wrote it{held}, or choose another run.dir",
    )


def _file_of_checkpoint(config: Config, name: str) -> bytes | None:
    """A file of the newest checkpoint; null where it has none, or is damaged, which
    `checkpoint_problems` reports."""
    try:
        return read_file(config.run.dir / "checkpoint", name)
    except CheckpointBroken:
        return None


def conflicts(config: Config) -> list[Problem]:
    """Differences that a resume cannot obey, and those that a finished run has no step left to
    obey."""
    if not config.run.dir.is_dir():
        return []
    _, unreadable = _earlier(config)
    if unreadable:
        return unreadable
    found = differences(config)
    status = read_status(config.run.dir)
    step = status.step if status is not None else 0
    if status is not None and status.phase == "finished" and config.run.steps <= step:
        fix = (
            "choose another run.dir for a new run; to train this one further, raise run.steps above"
            f" {step}"
        )
        what = f"{config.run.dir} holds a run that finished at step {step} with other settings"
        return [_problem(one, what, fix) for one in found if not one.is_move]

    what = f"{config.run.dir} holds a run with another value"
    checkpoint = config.run.dir / "checkpoint"
    fix = "set it back, or choose another run.dir"
    if named_latest(checkpoint) is not None:
        fix += f"; `mar convert {checkpoint} MODEL` gives its weights to a new run as model.path"
    # Digests of the prompts decide, so that data may move.
    by_digest = DATA_PATHS if _file_of_checkpoint(config, DATA_FILE) is not None else ()
    refused = [
        _problem(one, what, fix)
        for one in found
        if not one.allowed and pattern_of(one.key) not in by_digest
    ]
    if config.run.steps < step:
        shorter = Difference("run.steps", step, config.run.steps)
        what = f"{config.run.dir} holds a run that has made more steps"
        refused.append(_problem(shorter, what, f"set it to {step} or more"))
    return refused


def _problem(difference: Difference, what: str, fix: str) -> Problem:
    before, now = _show(difference.before), _show(difference.now)
    return Problem(key=difference.key, what=f"{what}: {before} there, {now} here", fix=fix)


def _compare(before: Any, now: Any, key: str, model: Any) -> Iterator[Difference]:
    """Keys that only one of the two has came or went with a release, and have nothing to compare
    with, but not in a mapping with keys of the user's own, such as `settings`. Of two methods only
    the names are compared. model: of the configuration, what is at `key`; null where that is
    unknown."""
    if isinstance(before, dict) and isinstance(now, dict):
        # Settings of two methods have nothing in common.
        if before.get("name") != now.get("name"):
            yield Difference(key, before.get("name"), now.get("name"))
            return
        users = isinstance(model, Mapping)
        names = {**now, **before} if users else [name for name in now if name in before]
        for name in names:
            inside = model.get(name) if users else getattr(model, name, None)
            place = f"{key}.{name}" if key else name
            yield from _compare(before.get(name), now.get(name), place, inside)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            known = isinstance(model, (list, tuple)) and index < len(model)
            yield from _compare(*pair, f"{key}.{index}", model[index] if known else None)
    elif before != now:
        yield Difference(key, before, now)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", "set"))
    if isinstance(value, list):
        return "[" + ", ".join(map(_show, value)) + "]"
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def checkpoint_problems(config: Config, shape: ModelShape | None) -> list[Problem]:
    """Faults of the newest checkpoint that a resume would find only once its ranks or engines have
    started."""
    try:
        path = newest(config.run.dir / "checkpoint")
        lost = lost_checkpoints(config, path)
        if path is None or lost:
            return lost
        require_whole(path)
        content = about(path)
        refuse_other_moments(path, content, config.policy.optimizer.moment_dtype)
        source = content.get("model_path")
        buffer = read_file(path.parent, BUFFER_FILE)
        if buffer is not None:
            read_buffer(buffer)
        elif read_file(path.parent, EARLIER_BUFFER_FILE) is not None:
            raise earlier_format()
    except CheckpointBroken as error:
        return list(error.problems)
    except BufferBroken as error:
        return [replace(one, what=f"{path}: {one.what}") for one in error.problems]
    held = read_model(Path(source))[0] if source is not None else None
    # Only after the checkpoint was found whole: its record is part of it.
    found = record_problems(config, path) + _other_adapters(path, content.get("lora"), config)
    if held is not None and shape is not None:
        found += _another_model(path, held, shape)
    return found


def checkpoint_notes(config: Config) -> list[str]:
    """Notes on the newest checkpoint, from which a resume continues."""
    try:
        path = newest(config.run.dir / "checkpoint")
        if path is None:
            return []
        notes = []
        if files_of(about(path)) is None:
            notes.append(
                f"{path} is of a release without digests: damage to its files and changes of the"
                " data may go unnoticed; the next checkpoint has digests"
            )
        newer = later(path)
        if newer is not None:
            notes.append(
                f"the run resumes from {path}, and {newer} is newer: latest names the older"
            )
        notes += _edited(config) + record_notes(config, path)
    except (CheckpointBroken, SegmentBroken):
        return []
    return notes


def _edited(config: Config) -> list[str]:
    """Notes on values of RUN/config.yaml that are neither those of the newest checkpoint nor those
    of `config`: a change by hand that this start does not take. Raises CheckpointBroken."""
    file = config.run.dir / "config.yaml"
    saved = read_file(config.run.dir / "checkpoint", CONFIG_FILE)
    if saved is None:
        return []
    try:
        held = read_tree(file.read_text(encoding="utf-8"))[0]
        before = read_tree(saved.decode())[0]
    except (OSError, UnicodeDecodeError, YamlFault):
        return []  # `conflicts` reports it
    own = config.model_dump(mode="json")
    changed = {one.key: one for one in _compare(held, own, "", config)}
    changed.pop("run.dir", None)
    since = {one.key for one in _compare(held, before, "", config)}
    return [
        f"{file} has {one}: the file was changed after {CONFIG_FILE} of the checkpoint, and this"
        " start replaces it"
        for key, one in changed.items()
        if key in since and not one.is_move
    ]


def data_problems(config: Config, read: Mapping[str, DataIdentity]) -> list[Problem]:
    """Prompts that are not those of the checkpoint. read: by key, the files that were read whole.

    A held-out set counts if it is the same by its name and path: another path is a change that the
    user made, and is printed as one."""
    saved = _file_of_checkpoint(config, DATA_FILE)
    if saved is None:
        return []
    try:
        data = json.loads(saved)
        trained, held_out = data["training"], data["held_out"]
    except (ValueError, KeyError, TypeError) as error:  # of a checkpoint without digests
        what = f"{DATA_FILE} of the checkpoint cannot be read ({type(error).__name__}: {error})"
        return [Problem(key="run.dir", what=what, fix="restore the checkpoint from a copy")]
    keys = (
        ["data.train"]
        if config.data.train is not None
        else [f"data.sources.{index}.path" for index in range(len(config.data.sources))]
    )
    pairs = list(zip(keys, trained, strict=False))
    pairs += [
        (one.path_key, held_out[one.name])
        for one in config.held_out_files
        if held_out.get(one.name, {}).get("path") == str(one.file.path)
    ]
    problems = []
    for key, entry in pairs:
        before, now = DataIdentity.read(entry), read.get(key)
        if before is None or now is None or (difference := before.difference(now)) is None:
            continue
        fix = "put the data back as it was, or choose another run.dir"
        if not key.startswith("data.") or key == "data.eval":
            fix = "put the data back as it was, or give the new set another file name"
        what = f"the checkpoint in {config.run.dir} was made with other prompts: {difference}"
        problems.append(Problem(key=key, what=what, fix=fix))
    return problems


def _other_adapters(checkpoint: Path, held: Any, config: Config) -> list[Problem]:
    """Problem of adapters that differ, even if the run has no older copy of its config."""
    lora = config.policy.lora
    own = lora.model_dump(mode="json") if lora is not None else None
    if held == own:
        return []
    there = "adapters" if held is not None else "whole weights"
    what = (
        f"{checkpoint} holds {there} (lora: {json.dumps(held)}), and here it is {json.dumps(own)}"
    )
    fix = "set it back, or choose another run.dir"
    return [Problem(key="policy.lora", what=what, fix=fix)]


def _another_model(checkpoint: Path, held: ModelShape, shape: ModelShape) -> list[Problem]:
    names = (field.name for field in fields(ModelShape) if field.name != "context")
    pairs = [
        f"{name} {there} there, {here} here"
        for name in names
        if (there := getattr(held, name)) != (here := getattr(shape, name))
    ]
    what = f"{checkpoint} is of another model: {'; '.join(pairs)}"
    fix = "continue with the model that the run began with, or choose another run.dir"
    return [Problem(key="model.path", what=what, fix=fix)] if pairs else []

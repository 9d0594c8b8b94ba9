"""Comparison of a config with the run that its run directory already contains.

Invariants:
- a run is never continued with settings that would make it another run. A difference is refused,
  or, if `ALLOWED` contains its key, printed;
- a resumed run obeys every key in `ALLOWED`. A new key of the schema is refused until it is added
  there;
- a comparison that fails is a problem; it never counts as a comparison without differences;
- digests decide whether prompts are those of the checkpoint; names of files do not matter.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
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

# An allow list, so that a new key of the schema is refused until a resume was checked with it.
ALLOWED = (
    # The length of the run, and what it measures and stores.
    "run.steps",
    "run.resume",
    "data.eval",
    "eval",
    "checkpoint",
    "watchdog",
    "observe",
    "samples",
    "policy.optimizer.log_update_norm",
    # Computed at each step. Betas, eps and weight decay are not listed: the checkpoint restores
    # them.
    "policy.optimizer.lr",
    "policy.optimizer.min_lr",
    "policy.optimizer.schedule",
    "policy.optimizer.warmup_steps",
    "policy.optimizer.clip_grad",
    # The same moments in another memory; steps differ from a fused Adam's by rounding.
    "policy.optimizer.moment_offload",
    "policy.on_anomaly",
    "policy.max_nonfinite_steps",
    # Placement and speed. A checkpoint can be loaded into any parallel layout.
    "policy.parallel",
    "policy.device",
    "policy.layers",
    "policy.sequence",
    "policy.prefix_sharing",
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
    # The order of samples: the scheduler keeps the part of its buffer that the new settings permit.
    "flow",
    # At least the staleness bound + 1, so a batch never needs a version that is not kept.
    "objective.snapshots",
)


ADDRESS = re.compile(r"rollout\.(reward|environment)\.(parts\.[^.]+\.)?settings\.url")
"""Matches keys of servers' addresses, which may differ in each start."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Suffixes of weight files, which are compared by size: the checkpoint has a digest of the weights
that a resume reads from a model."""
BY_DIGEST = ("data.train", "data.generate", "data.sources[].path", "data.sources[].generate")
"""Keys of files, and of the settings that they were generated with. Their prompts have digests in
the checkpoint, so the keys may change."""


@dataclass(frozen=True)
class Difference:
    """A key whose value differs from that of the run in the directory."""

    key: str
    before: Any
    now: Any

    @property
    def is_move(self) -> bool:
        """True for another path of the same file or folder: it was moved or copied, or it has two
        names. The content of a moved file is checked where it is read."""
        # A path that was or becomes null switches a feature on or off.
        if pattern_of(self.key) not in path_keys() or self.before is None or self.now is None:
            return False
        # os.path.exists, because `before` may be in a folder that this user cannot enter.
        before, now = str(self.before), str(self.now)
        if not os.path.exists(before):
            return True
        return os.path.exists(now) and (
            os.path.samefile(before, now) or _is_copy(Path(before), Path(now))
        )

    @property
    def allowed(self) -> bool:
        return (
            self.is_move or ADDRESS.fullmatch(self.key) is not None or _is_one_of(self.key, ALLOWED)
        )

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.now)}"


def _is_one_of(key: str, keys: Iterable[str]) -> bool:
    """Return True if `key` is one of `keys` or inside one of them."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def _is_copy(before: Path, now: Path) -> bool:
    """Return True if two files, or two folders with files, have the same content. Weight files are
    large, so only their names and sizes are compared."""
    try:
        if not before.is_dir():
            # A shallow comparison of times and sizes may miss a difference.
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
    """Return the keys of `config` that differ from the run in `run.dir`; empty if no step was made
    there, or if the earlier config cannot be read, which `conflicts` reports."""
    before, problems = _earlier(config)
    if problems:
        return []
    found = _compare(before, config.model_dump(mode="json"), "", config)
    return [difference for difference in found if difference.key != "run.dir"]


def _earlier(config: Config) -> tuple[dict[str, Any], list[Problem]]:
    """Return the config of the run in `run.dir`, or the problem that prevents reading it. The
    config is that of the newest checkpoint if it has one; empty if no step was made there."""
    run_dir = config.run.dir
    if not run_dir.is_dir():
        return {}, []
    checkpoint = run_dir / "checkpoint"
    status = read_status(run_dir)
    # Any run may replace a start that made no step.
    if not ((status is not None and status.step > 0) or _has_checkpoints(checkpoint)):
        return {}, []

    # The checkpoint's copy is preferred: a later start, which was refused, may have written
    # config.yaml.
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
    except (UnicodeDecodeError, YamlFault) as error:  # in a checkpoint without digests
        return {}, [_unreadable(file, f"of the newest checkpoint cannot be read ({error})")]


def _has_checkpoints(checkpoint: Path) -> bool:
    """Return True if there is a checkpoint, and for an unreadable folder, which
    `checkpoint_problems` reports."""
    try:
        return require_readable(checkpoint) and (
            bool(steps(checkpoint)) or named_latest(checkpoint) is not None
        )
    except CheckpointBroken:
        return True


def _unreadable(file: Path, what: str) -> Problem:
    earlier = sorted(file.parent.glob("config.*.yaml"))
    copies = f" (files of earlier starts: {', '.join(map(str, earlier))})" if earlier else ""
    # The key is the file, because only one problem of each key is printed.
    return Problem(
        key=str(file),
        what=f"{what}, so this config cannot be compared with the run's",
        fix=f"restore the file as the run wrote it{copies}, or choose another run.dir",
    )


def _file_of_checkpoint(config: Config, name: str) -> bytes | None:
    """Return a file of the newest checkpoint; None if it has no such file, or is damaged, which
    `checkpoint_problems` reports."""
    try:
        return read_file(config.run.dir / "checkpoint", name)
    except CheckpointBroken:
        return None


def conflicts(config: Config) -> list[Problem]:
    """Return problems of differences that a resume cannot obey. A finished run has no steps left,
    so it cannot obey any."""
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
        what = f"{config.run.dir} contains a run that finished at step {step} with other settings"
        return [_problem(one, what, fix) for one in found if not one.is_move]

    what = f"{config.run.dir} contains a run with another value"
    checkpoint = config.run.dir / "checkpoint"
    fix = "set it back, or choose another run.dir"
    if named_latest(checkpoint) is not None:
        fix += f"; `mar convert {checkpoint} MODEL` exports its weights as a new run's model.path"
    # data_problems compares the digests of these files, so their paths may differ.
    by_digest = BY_DIGEST if _file_of_checkpoint(config, DATA_FILE) is not None else ()
    refused = [
        _problem(one, what, fix)
        for one in found
        if not one.allowed and not _is_one_of(pattern_of(one.key), by_digest)
    ]
    if config.run.steps < step:
        shorter = Difference("run.steps", step, config.run.steps)
        what = f"{config.run.dir} contains a run that has made more steps"
        refused.append(_problem(shorter, what, f"set it to {step} or more"))
    return refused


def _problem(difference: Difference, what: str, fix: str) -> Problem:
    before, now = _show(difference.before), _show(difference.now)
    return Problem(key=difference.key, what=f"{what}: {before} there, {now} here", fix=fix)


def _compare(before: Any, now: Any, key: str, model: Any) -> Iterator[Difference]:
    """Yield the differences between two values of `key`. `model`: the object in the config at
    `key`; null if unknown."""
    if isinstance(before, dict) and isinstance(now, dict):
        # Of two different methods only the names are compared: their settings are unrelated.
        if before.get("name") != now.get("name"):
            yield Difference(key, before.get("name"), now.get("name"))
            return
        own_keys = isinstance(model, Mapping)
        # A key of the schema that only one config has belongs to another release. In a mapping with
        # the user's own keys, such as `settings`, a missing key is a difference.
        names = {**now, **before} if own_keys else [name for name in now if name in before]
        for name in names:
            inside = model.get(name) if own_keys else getattr(model, name, None)
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
    """Return problems of the newest checkpoint that a resume would otherwise find only after ranks
    and engines have started."""
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
    saved_shape = read_model(Path(source))[0] if source is not None else None
    # After require_whole, because the record is a file of the checkpoint.
    found = record_problems(config, path) + _other_adapters(path, content.get("lora"), config)
    if saved_shape is not None and shape is not None:
        found += _another_model(path, saved_shape, shape)
    return found


def checkpoint_notes(config: Config) -> list[str]:
    """Return notes on the newest checkpoint, from which a resume continues."""
    try:
        path = newest(config.run.dir / "checkpoint")
        if path is None:
            return []
        notes = []
        if files_of(about(path)) is None:
            notes.append(
                f"{path} was saved by a release without digests: damage to its files and changes of"
                " the data may go unnoticed; the next checkpoint has digests"
            )
        newer = later(path)
        if newer is not None:
            notes.append(
                f"the run resumes from {path}, which latest names, although {newer} is newer"
            )
        notes += _edited(config) + record_notes(config, path)
    except (CheckpointBroken, SegmentBroken):
        return []
    return notes


def _edited(config: Config) -> list[str]:
    """Return notes on values of RUN/config.yaml that are neither the newest checkpoint's nor
    `config`'s: the user edited them, and this start replaces them. Raises CheckpointBroken."""
    file = config.run.dir / "config.yaml"
    saved = read_file(config.run.dir / "checkpoint", CONFIG_FILE)
    if saved is None:
        return []
    try:
        on_disk = read_tree(file.read_text(encoding="utf-8"))[0]
        before = read_tree(saved.decode())[0]
    except (OSError, UnicodeDecodeError, YamlFault):
        return []  # `conflicts` reports it
    own = config.model_dump(mode="json")
    changed = {one.key: one for one in _compare(on_disk, own, "", config)}
    changed.pop("run.dir", None)
    since = {one.key for one in _compare(on_disk, before, "", config)}
    return [
        f"{file} has {one}: the file was edited after the checkpoint was saved, and this start"
        " replaces it"
        for key, one in changed.items()
        if key in since and not one.is_move
    ]


def data_problems(config: Config, read: Mapping[str, DataIdentity]) -> list[Problem]:
    """Return problems of files whose prompts differ from the checkpoint's. `read`: identities of
    the files that were read completely, by key.

    A held-out set is compared only if its name and path are the same: another path is the user's
    choice, and is printed as a difference."""
    saved = _file_of_checkpoint(config, DATA_FILE)
    if saved is None:
        return []
    try:
        data = json.loads(saved)
        trained, held_out = data["training"], data["held_out"]
    except (ValueError, KeyError, TypeError) as error:  # in a checkpoint without digests
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
        fix = "restore the data, or choose another run.dir"
        if not key.startswith("data.") or key == "data.eval":
            fix = "restore the data, or rename the file of the new set"
        what = f"the checkpoint in {config.run.dir} was made with other prompts: {difference}"
        problems.append(Problem(key=key, what=what, fix=fix))
    return problems


def _other_adapters(checkpoint: Path, saved: Any, config: Config) -> list[Problem]:
    """Return the problem of adapters that differ from the checkpoint's, or none."""
    # Compared with the checkpoint itself, because the run's config.yaml may be missing.
    lora = config.policy.lora
    own = lora.model_dump(mode="json") if lora is not None else None
    if saved == own:
        return []
    there = "adapters" if saved is not None else "whole weights"
    what = (
        f"{checkpoint} contains {there} (lora: {json.dumps(saved)}), and here it is"
        f" {json.dumps(own)}"
    )
    fix = "set it back, or choose another run.dir"
    return [Problem(key="policy.lora", what=what, fix=fix)]


def _another_model(checkpoint: Path, saved: ModelShape, shape: ModelShape) -> list[Problem]:
    """Return the problem of sizes that differ from those of the checkpoint's model, or none."""
    # Not `context`: a larger context of the same weights is another setting, not another model.
    names = (field.name for field in fields(ModelShape) if field.name != "context")
    pairs = [
        f"{name} {there} there, {here} here"
        for name in names
        if (there := getattr(saved, name)) != (here := getattr(shape, name))
    ]
    what = f"{checkpoint} is of another model: {'; '.join(pairs)}"
    fix = "continue with the model that the run started with, or choose another run.dir"
    return [Problem(key="model.path", what=what, fix=fix)] if pairs else []

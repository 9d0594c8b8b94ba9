"""A run's checkpoint folder as read by other code: its checkpoints, and whether their files are
whole. Loads no torch.

`policy/checkpoint.py` describes the folder's content, and writes it. `about.json` of a checkpoint
lists every other file of it with its digests (digested_folder.py).

Invariants:
- the digest of a file is checked when it is read, so a changed file is reported as damaged, with
  the older checkpoint to use, and never used;
- a folder contains the checkpoint of the step in its name: a renamed folder, or one with the
  description of another, is reported as damaged;
- a checkpoint folder that cannot be read is an error, and does not count as a run without
  checkpoints;
- a checkpoint of a release without digests is read after a warning.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import reason, require_folder
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.digested_folder import (
    faults,
    files_of,
    read_description,
)

LATEST = "latest"
ABOUT = "about.json"
SHARDED = "sharded"
CONFIG_FILE = "config.yaml"
"""The run's configuration at this step, which a resume compares with its own."""
DATA_FILE = "prompts.json"
"""Digests of the prompts, for which a resume checks its data."""
_NAME = re.compile(r"step_\d+")
RECORD_FILE = "record.json"
"""Content of the run's own files at this step: the line of metrics, the end of the sample log, and
the code that the configuration names."""


class CheckpointBroken(UserError):
    """A checkpoint directory does not contain what its names promise."""


def steps(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, the oldest first. A folder with another name, such as
    a copy `step_00000100.bak`, does not count."""
    found = (path for path in directory.glob("step_*") if _NAME.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.partition("_")[2])


def is_step(path: Path) -> bool:
    """Return True for the folder of one checkpoint, even if it has lost its description."""
    with _readable(path):
        if (path / ABOUT).is_file():
            return True
        # Models of other trainers have such names, too.
        is_model = (path / "config.json").is_file()
        return path.name.startswith("step_") and path.is_dir() and not is_model


def newest(directory: Path) -> Path | None:
    """Return the checkpoint that `latest` names; None if none was ever saved. Raises
    CheckpointBroken.

    Without `latest` it is the last checkpoint: a save was killed before it could name its first
    one, or the file was deleted. A damaged checkpoint is never skipped.
    """
    require_readable(directory)
    pointer = directory / LATEST
    if not pointer.exists() and not pointer.is_symlink():
        # Only whole folders have this name (`publish` renames), so the last one is safe to use.
        found = steps(directory)
        if found and not looks_whole(found[-1]):
            fault = f"{LATEST} is not there, and files of the last checkpoint are missing or cut"
            raise damaged(found[-1], fault)
        return found[-1] if found else None
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"{pointer} cannot be read: {reason(error)}"
        fix = _use_other(_newest_intact(steps(directory)), directory)
        raise CheckpointBroken.of("run.dir", what, fix) from error
    if name not in {path.name for path in steps(directory)}:
        raise CheckpointBroken.of(
            "run.dir",
            f"{pointer} names {name[:80]!r}, which is not a checkpoint",
            _use_other(_newest_intact(steps(directory)), directory),
        )
    path = directory / name
    with _readable(path):
        # `latest` is written last, so a folder without a description was damaged later.
        missing = not (path / ABOUT).exists()
    if missing:
        raise damaged(path, f"{ABOUT} is not there")
    return path


def require_readable(directory: Path) -> bool:
    """Return True if the checkpoint folder exists. Raises CheckpointBroken if something else is at
    its path, and for a folder that may not be read."""
    try:
        return require_folder(directory, "restore it from a copy, or choose another run.dir")
    except UserError as error:
        raise CheckpointBroken("", error.problems) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert an OSError about the checkpoint at `path` to CheckpointBroken."""
    try:
        yield
    except OSError as error:
        raise damaged(path, f"it cannot be read ({reason(error)})") from error


def named_latest(directory: Path) -> str | None:
    """Return the text of `latest`, even if the checkpoint that it names is gone; null:
    unreadable."""
    try:
        return (directory / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def later(path: Path) -> Path | None:
    """Return a whole checkpoint of the same folder with more steps than the one at `path`, which
    `latest` names; null: there is none."""
    return _newest_whole([one for one in steps(path.parent) if step_of(one) > step_of(path)])


def outdated(
    current: Path, keep: int | None, checked: set[Path], proven: str | None = None
) -> list[Path]:
    """Return the checkpoints to remove now that `current` is saved: all that are older than the
    newest `keep` whole ones (null: none), except the one named `proven`. A damaged checkpoint does
    not count, so that it does not displace an intact one; a checkpoint that this process neither
    wrote nor loaded is read to check it.

    checked: the checkpoints that this process wrote or loaded; those found whole are added."""
    checked.add(current)
    # Newer ones stay: a resume from an older checkpoint must not delete those that came after it.
    older = [path for path in reversed(steps(current.parent)) if step_of(path) < step_of(current)]
    whole = 1
    for index, path in enumerate(older):
        if keep is None:
            break
        if whole >= keep:
            return [old for old in older[index:] if old.name != proven]
        # Read once per process, because a checkpoint has many GiB.
        if path not in checked and _is_intact(path):
            checked.add(path)
        # Sizes are checked again, because files may be removed during a run.
        whole += path in checked and looks_whole(path)
    return []


def _is_intact(path: Path) -> bool:
    """Return True if every file, and every block of tensors, has its digest. Reads all of it."""
    content, fault = _description(path)
    files = files_of(content)
    if fault is not None or files is None:
        return fault is None and looks_whole(path)
    return next(iter(faults(path, files, blocks=True)), None) is None


def about(path: Path) -> dict[str, Any]:
    """Return about.json of one checkpoint. Raises CheckpointBroken."""
    content, fault = _description(path)
    if fault is not None:
        raise damaged(path, fault)
    return content


def _description(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return about.json of the checkpoint at `path`, and its fault; null: none."""
    content, fault = read_description(path / ABOUT)
    if fault is not None:
        return {}, f"{ABOUT} cannot be read: {fault}"
    # A copied description has a valid digest, but another step.
    step = content.get("step")
    if _NAME.fullmatch(path.name) and step is not None and step != step_of(path):
        return (
            {},
            f"{ABOUT} is of step {step}: the file is another one's, or the folder was renamed",
        )
    return content, None


def read_file(directory: Path, name: str) -> bytes | None:
    """Return the content of `files[name]` in the newest checkpoint; None if it has no such file.
    Raises CheckpointBroken for a damaged file."""
    path = newest(directory)
    return None if path is None else read_checked(path, name, about(path))


def read_checked(path: Path, name: str, content: Mapping[str, Any]) -> bytes | None:
    """Return the file `name` of the checkpoint at `path`; None if it has none. content: its
    about.json. Raises CheckpointBroken for a damaged file."""
    files = files_of(content)
    if files is None:
        with _readable(path):
            return (path / name).read_bytes() if (path / name).exists() else None
    # A file that the description does not list was not written by this save.
    if name not in files:
        return None
    try:
        held = (path / name).read_bytes()
    except OSError as error:
        raise damaged(path, f"{name} cannot be read ({error.strerror})") from error
    if (fault := files[name].fault(held)) is not None:
        raise damaged(path, f"{name}: {fault}")
    return held


def looks_whole(path: Path) -> bool:
    """Return True if the checkpoint's description is intact and each file exists with its size."""
    content, fault = _description(path)
    files = files_of(content)
    if fault is not None:
        return False
    try:
        if files is None:
            return all((path / name).is_file() for name in ("state.pt", f"{SHARDED}/.metadata"))
        return all(
            (path / name).is_file() and (path / name).stat().st_size == file.size
            for name, file in files.items()
        )
    except OSError:
        return False


def require_whole(path: Path, *, blocks: bool = False) -> None:
    """Check each file of a checkpoint against its digest. blocks: also check the tensors' blocks,
    which reads all of it. Raises CheckpointBroken for the first missing or damaged file."""
    content = about(path)
    files = files_of(content)
    if files is None:
        _require_whole_without_digests(path)
        return
    for fault in faults(path, files, blocks=blocks):
        raise damaged(path, fault)


def _require_whole_without_digests(path: Path) -> None:
    try:
        # Zip files have checksums of their own; releases without digests wrote no others.
        with zipfile.ZipFile(path / "state.pt") as file:
            if (torn := file.testzip()) is not None:
                raise zipfile.BadZipFile(f"{torn} is damaged")
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        fault = f"state.pt cannot be read ({type(error).__name__}: {error})"
        raise damaged(path, fault) from error
    with _readable(path):
        indexed = (path / SHARDED / ".metadata").is_file()
    if not indexed:
        raise damaged(path, f"{SHARDED}/.metadata is not there")


def damaged(path: Path, what: str) -> CheckpointBroken:
    """Return the error for the damaged checkpoint at `path`. It names an intact one to use: an
    older one, or else a newer one."""
    others = [one for one in steps(path.parent) if one != path]
    # The folder of a step that was named on the command line may have any name.
    before = step_of(path) if _NAME.fullmatch(path.name) else -1
    other = _newest_intact([one for one in others if step_of(one) < before])
    # An older one first: steps after the damaged one belong to a run that continued from it.
    other = other or _newest_intact(others)
    return CheckpointBroken.of(
        "run.dir", f"{path} is damaged: {what}", _use_other(other, path.parent)
    )


def _newest_whole(found: Sequence[Path]) -> Path | None:
    return next((path for path in reversed(found) if looks_whole(path)), None)


def _newest_intact(found: Sequence[Path]) -> Path | None:
    return next((path for path in reversed(found) if _is_intact(path)), None)


def _use_other(other: Path | None, directory: Path) -> str:
    if other is None:
        none = f"no other checkpoint of {directory} is whole"
        # Other folders may hold more than checkpoints.
        if directory.name == "checkpoint" and (directory.parent / "config.yaml").is_file():
            return f"{none}; remove that folder to begin again"
        return f"{none}; restore one from a copy"
    return (
        f"use {other}, the newest other checkpoint that is whole: to resume from it, write"
        f" {other.name} into {directory / LATEST}"
    )


def refuse_other_moments(path: Path, content: Mapping[str, Any], wanted: str) -> None:
    """Raise CheckpointBroken if Adam's moments have another dtype in the checkpoint at `path` than
    `wanted`. content: its about.json."""
    if "adam.exp_avg" not in content.get("parameter_state", ()):
        return
    # Absent in checkpoints of earlier versions.
    held = content.get("moments", "float32")
    if held != wanted:
        raise CheckpointBroken.of(
            "policy.optimizer.moment_dtype",
            f"{path} holds Adam's moments in {held}, and here they are {wanted}",
            "set it back, or choose another run.dir",
        )

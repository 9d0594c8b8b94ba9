"""A run's checkpoint folder from outside: which checkpoint is the newest, and whether its files are
whole. Loads no torch.

`policy/checkpoint.py` has what the folder holds, and writes it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import UserError

LATEST = "latest"


class CheckpointBroken(UserError):
    """A checkpoint directory does not hold what its names promise."""


def newest(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; None where nothing was ever saved. Raises
    CheckpointBroken."""
    pointer = directory / LATEST
    if not pointer.exists():
        return None
    path = directory / pointer.read_text(encoding="utf-8").strip()
    if not (path / "about.json").exists():
        raise CheckpointBroken.of(
            "run.dir",
            f"{pointer} names {path.name}, which is not a checkpoint",
            f"name another step_* of {directory} in it",
        )
    return path


def read_file(directory: Path, name: str) -> bytes | None:
    """The content of `files[name]` in the newest checkpoint; None where it has no such file."""
    path = newest(directory)
    return (path / name).read_bytes() if path is not None and (path / name).exists() else None


def about(path: Path) -> dict[str, Any]:
    """about.json of one checkpoint. Raises CheckpointBroken."""
    try:
        content: dict[str, Any] = json.loads((path / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(path, "about.json", error) from error
    return content


def require_whole(path: Path) -> None:
    """Raises CheckpointBroken for a missing or damaged file of the checkpoint, as far as it shows
    without loading the model."""
    about(path)
    try:
        with zipfile.ZipFile(path / "state.pt") as file:
            if (torn := file.testzip()) is not None:
                raise zipfile.BadZipFile(f"{torn} is damaged")
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise _broken(path, "state.pt", error) from error
    if not (path / "sharded" / ".metadata").is_file():
        raise _broken(path, "sharded/.metadata", FileNotFoundError("it is not there"))


def refuse_other_moments(path: Path, content: Mapping[str, Any], wanted: str) -> None:
    """content: about.json of the checkpoint at `path`. wanted: dtype of the moments that Adam keeps
    here. Raises CheckpointBroken."""
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


def _broken(path: Path, name: str, error: Exception) -> CheckpointBroken:
    return CheckpointBroken.of(
        "run.dir",
        f"{path / name} cannot be read ({type(error).__name__}: {error})",
        f"name an older step_* in {path.parent / LATEST}, or remove {path.parent} to begin anew",
    )

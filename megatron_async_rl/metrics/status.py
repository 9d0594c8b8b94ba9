"""`RUN/status.json`: the current phase of the run, in one small file that rank 0 replaces whole.
The launcher writes the last status if rank 0 died before it could.

Invariant: a reader sees the previous status or the next one, never a half of either.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatron_async_rl.config.durable import unreadable, write_file
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.watchdog.progress_monitor import write_whole

FILE = "status.json"
FINAL = ("stopped", "finished", "failed")
"""Final phases of a run."""


@dataclass(frozen=True, kw_only=True)
class Status:
    phase: str
    """`starting`, `evaluating`, `training`, `checkpointing`, `exporting`, `stopping`, `stopped`,
    `finished` or `failed`."""
    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps in the whole run."""
    time: float
    """Unix seconds of the moment it was written."""
    detail: str = ""
    before: float | None = None
    """Held-out mean reward, or loss, before the first step; None while not measured."""
    after: float | None = None
    """Held-out mean reward, or loss, after the last step; None while not measured."""
    measure: Literal["reward", "loss"] = "reward"
    """Quantity of `before` and `after`."""
    error: str | None = None
    log: str | None = None
    """The file that has the rest of `error`."""
    checkpoint: str | None = None
    """The checkpoint that `checkpoint/latest` named, empty before the first: a resume without the
    folder can distinguish a lost one from none. None in a file of an earlier version."""


_STATUS = TypeAdapter(Status)
_ENDED = ("stopped", "finished", "failed")
_FIX = "delete it, or choose another run.dir"


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the status of the run in `run_dir` (made if missing)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # A sync may wait for a checkpoint that is being written, and a step must not. A later start
    # depends only on how the run ended.
    write = write_file if status.phase in _ENDED else write_whole
    write(run_dir / FILE, json.dumps(asdict(status)) + "\n")


def read_status(run_dir: Path) -> Status | None:
    """Return the last status written; None before the first.

    Raises UserError when the file cannot be read or is not a status (another program's, or another
    version's).
    """
    path = run_dir / FILE
    try:
        # Another version's status is refused by name instead of read in part.
        return _STATUS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error, _FIX) from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError.of(
            "run.dir",
            f"{path} is not a run's status ({f'{where}: ' if where else ''}{fault['msg']})",
            _FIX,
        ) from error

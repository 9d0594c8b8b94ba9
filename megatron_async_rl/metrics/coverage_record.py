"""`RUN/without_gradient.json`: the trainable parameters without a gradient, as rank 0 records them
once (policy/gradient_coverage.py). `mar verify` reads it.

    {"step": 5, "trainable": 311, "parameters": []}
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from megatron_async_rl.config.durable import reading, write_file
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.settings_model import Strict

FILE = "without_gradient.json"


class CoverageRecord(Strict):
    """step: after which the file was written. trainable: number of trainable parameters of the
    model. parameters: names of those without a gradient until then."""

    step: int
    trainable: int
    parameters: tuple[str, ...]


def write_coverage(run_dir: Path, record: CoverageRecord) -> None:
    write_file(run_dir / FILE, record.model_dump_json(indent=1) + "\n")


def read_coverage(run_dir: Path) -> CoverageRecord | None:
    """Return the record; None without the file. Raises UserError for another content."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        with reading(path):
            return CoverageRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        what = f"is not a record of gradients: {error.errors()[0]['msg']}"
        raise UserError.of(str(path), what, "remove it; the next start writes it again") from error

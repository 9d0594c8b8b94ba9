"""`REPLAY/replay.json`: what a replay repeats, with which changed settings, and how it compares
with its run, step by step. `mar replay` writes it at its beginning and after each part; the report
and the dashboard of the run read it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_async_rl.config.durable import reading, write_file
from megatron_async_rl.config.problem import UserError

FOLDER = "replays"
"""Directory of the replays in a run directory; each has a directory of its own."""
FILE = "replay.json"
EXPLANATION_FILE = "explanation.json"
"""File of a replay that explains the gradient of its last step."""


class ReplayedStep(BaseModel):
    """A repeated step against the run's. identical: null if the run has no digest of its weights.
    ess, ess_share, kl: effective sample size, its share of the samples, and KL divergence (k2, nats
    per token) of the recorded samples under the weights before the step; run_...: the run's."""

    model_config = ConfigDict(extra="ignore")

    step: int
    identical: bool | None
    ess: float | None = None
    ess_share: float | None = None
    kl: float | None = None
    run_ess: float | None = None
    run_ess_share: float | None = None
    run_kl: float | None = None


class ReplayRecord(BaseModel):
    """A replay of the run in `run`. changes: settings that the user changed. first, last: steps to
    repeat. parts: directories with metrics, relative to the replay's, in order. first_different:
    the step after which weights first differ; the samples of later steps come from another policy.
    ended: `mar replay` has ended, maybe before its last step."""

    model_config = ConfigDict(extra="ignore")

    run: Path
    changes: list[str]
    first: int
    last: int
    parts: list[str]
    first_different: int | None = None
    ended: bool = False
    steps: list[ReplayedStep] = []

    def write(self, replay_dir: Path) -> None:
        replay_dir.mkdir(parents=True, exist_ok=True)
        write_file(replay_dir / FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, replay_dir: Path) -> ReplayRecord:
        """Raises FileNotFoundError, and UserError for a file that is not a record."""
        path = replay_dir / FILE
        with reading(path):
            text = path.read_text(encoding="utf-8")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            what = f"is not a record of a replay: {error.errors()[0]['msg']}"
            raise UserError.of(str(path), what, "delete it, and replay again") from error

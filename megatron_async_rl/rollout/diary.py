"""An engine's track in the run's timeline, from what its phase and its responses say.

Invariant: from the first bucket of new weights to the moment it samples again an engine is `loading`, whatever arrives meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.observe.timeline import Timeline
from megatron_async_rl.rollout.phase import Phase


class Diary:
    """`run_dir`: of the run whose timeline is written; null writes none."""

    def __init__(self, run_dir: Path | None, track: str, phase: Phase) -> None:
        self._timeline = Timeline(run_dir, track) if run_dir is not None else None
        self._phase = phase
        self._loading = False

    def turned(self, responses: int) -> None:
        """The phase changed, or how many responses are in vLLM: `responses` now."""
        if self._phase.runs:
            self._loading = False
            self._enter(*(("busy", "") if responses else ("idle", "prompts")))
        elif not self._loading:
            self._enter(*(("asleep", "the policy") if self._phase.state == "asleep" else ("paused", "weights")))

    def load(self) -> None:
        """A part of new weights is there to be loaded."""
        self._loading = True
        self._enter("loading")

    def close(self) -> None:
        if self._timeline is not None:
            self._timeline.close()

    def _enter(self, state: str, waiting_for: str = "") -> None:
        if self._timeline is not None:
            self._timeline.enter(state, waiting_for)

"""What goes between the controller and an engine: requests in, reports out.

Invariants, checked on construction:
- every token of a prefix has exactly one log-prob and one weight version;
- a request is one response; its id, `<group>-<k>`, is the id of the sample that answers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.samples.types import Prompt, Sample

EngineState = Literal["running", "paused", "asleep"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """The tokens of a response that was cut: response_ids int32, behavior_logprobs float32 (nats, as sampled), versions int32."""

    response_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.behavior_logprobs), len(self.versions)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"a prefix has at least one token, each with a log-prob and a version; got lengths {sorted(lengths)}"
            )

    @property
    def start_version(self) -> int:
        return int(self.versions[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One response to be sampled: member `k` of group `group` (negative for held-out evaluation)."""

    group: int
    k: int
    prompt: Prompt
    prefix: Prefix | None = None
    """The response continues after these tokens, which keep their log-probs and versions."""
    id: str = field(init=False)
    """Made once: whoever keeps account of the request holds the same string."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.group}-{self.k}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """The answer to a cut: what had been sampled of the request by then; null when there was no token yet."""

    id: str
    prefix: Prefix | None


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReport:
    """What happened on an engine since the last report. Counts are since the engine started."""

    finished: tuple[Sample, ...]
    cut: tuple[Cut, ...]
    state: EngineState
    version: int
    """Of the weights that sample the next token."""
    running: int
    """Requests given to the engine and not yet finished or cut."""
    tokens: int
    """Response tokens of finished samples, prefixes included."""
    busy_s: float
    """Seconds in which at least one request was running and sampling was not paused."""
    silent_s: float
    """Seconds since vLLM's own process last answered."""
    sampling: bool = False
    """Whether a response has grown since the last report; looked at where nothing finished and nothing was cut."""

"""Prompt -> Sample -> Group -> TrainBatch.

Invariants, checked on construction:
- every response token has exactly one behaviour log-prob, one weight version and one mask value;
- step rewards, where there are any, are one per response token and sum to the reward;
- weight versions never decrease along a response (engines only move forward);
- the samples of a group answer the group's prompt;
- no token of a train batch was sampled by weights newer than the batch's own version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "given"]
"""`stop`: an end-of-sequence or stop condition; `length`: cut at the token limit (truncated); `given`: data, not sampled."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. `fields` holds every other key of its JSONL line (`answer`, `numbers`, ...), for the reward."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.id!r} has no tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response to one prompt.

    Arrays have one entry per response token (length T):
    response_ids int32, behavior_logprobs float32 (nats, after temperature, as the engine sampled them),
    versions int32 (weight version that sampled the token), loss_mask uint8 (1 = trained on; 0 = environment token).
    """

    id: str
    prompt: Prompt
    response_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    text: str
    finish_reason: FinishReason
    reward: float
    reward_error: str | None = None
    weight: float = 1.0
    """Per-sample weight of the `sft` loss; 1 for sampled responses."""
    step_rewards: NDArray[np.float32] | None = None
    """Where the task rewards steps: the reward that came with each response token, [T]; sums to `reward`."""
    engine: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        if length == 0:
            raise ValueError(f"sample {self.id!r} has an empty response")
        for name in ("behavior_logprobs", "versions", "loss_mask"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"sample {self.id!r}: {name} has {len(getattr(self, name))} entries for {length} response tokens"
                )
        if np.any(np.diff(self.versions) < 0):
            raise ValueError(f"sample {self.id!r}: weight versions decrease along the response: {self.versions.tolist()}")
        if self.step_rewards is not None:
            if len(self.step_rewards) != length:
                raise ValueError(
                    f"sample {self.id!r}: step_rewards has {len(self.step_rewards)} entries for {length} response tokens"
                )
            total = float(np.sum(self.step_rewards, dtype=np.float64))
            if self.reward_error is None and not np.isclose(total, self.reward, rtol=1e-5, atol=1e-5):
                raise ValueError(f"sample {self.id!r}: step rewards sum to {total}, and its reward is {self.reward}")

    @property
    def valid(self) -> bool:
        """False when the reward failed: such a sample is logged and counted but takes no part in training."""
        return self.reward_error is None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def start_version(self) -> int:
        return int(self.versions[0])

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.response_ids)

    @property
    def total_length(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt.token_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The n responses to one prompt. `index` is the order of admission, from 0 over the whole run."""

    index: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    admitted_version: int = 0

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group {self.index} has no samples")
        for sample in self.samples:
            if sample.prompt.id != self.prompt.id:
                raise ValueError(
                    f"group {self.index}: sample {sample.id!r} answers prompt {sample.prompt.id!r}, not {self.prompt.id!r}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """The groups one optimizer step consumes, in admission order. `version`: the weights that will be trained."""

    version: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        for sample in self.samples():
            newest = int(sample.versions[-1])
            if newest > self.version:
                raise ValueError(f"sample {sample.id!r} was sampled by version {newest}, newer than the batch's {self.version}")

    def samples(self) -> Iterator[Sample]:
        for group in self.groups:
            yield from group.samples

    def lags(self) -> NDArray[np.int32]:
        """Per response token, over the whole batch: `version` minus the version that sampled it."""
        return np.concatenate([self.version - sample.versions for sample in self.samples()]).astype(np.int32)

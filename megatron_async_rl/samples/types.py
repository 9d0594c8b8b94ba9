"""Types of the data that flows: prompts become requests, requests become samples.

Invariants, checked on construction:
- every response token has exactly one behaviour log-prob, one weight version and one mask value,
  and so has every token of a partial response;
- step rewards, if there are any, are one per response token and sum to the reward;
- a response has one or several segments: each further one begins with a context of its own, which
  is not trained on, and does not attend to the tokens before it;
- weight versions never decrease along a segment (engines only move forward);
- a request is one response; its id, `<group>-<k>`, is the id of the sample that answers it.

Routed experts, if an engine records them, are the experts that it chose for every token of prompt
and response, without the last token of each segment, which no layer reads. One row for each token,
as bytes: [layers, experts per token] numbers of experts, uint8, or uint16 in a model of more than
256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "given"]
"""`stop`: an end-of-sequence or stop condition; `length`: cut at the token limit (truncated);
`given`: data, not sampled."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. `fields` holds every other key of its JSONL line (`answer`, `numbers`, ...),
    for the reward."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An engine cannot begin without a token.
        if not self.token_ids:
            raise ValueError(f"prompt {self.id!r} has no tokens")


def check_response(
    name: str,
    response_ids: NDArray[np.int32],
    per_token: Mapping[str, NDArray[Any]],
    reward: float,
    reward_error: str | None,
    step_rewards: NDArray[np.float32] | None,
    *,
    prompt_length: int,
    routed_experts: bytes | None,
    segment_starts: NDArray[np.int32] | None = None,
) -> None:
    """Raise ValueError for a response that breaks an invariant. `per_token`: `versions` and the
    other arrays with one entry per response token."""
    length = len(response_ids)
    if length == 0:
        raise ValueError(f"sample {name!r} has an empty response")
    for key, values in per_token.items():
        if len(values) != length:
            raise ValueError(
                f"sample {name!r}: {key} has {len(values)} entries for {length} response tokens"
            )
    # No starts mean one segment.
    starts = np.zeros(0, dtype=np.int32) if segment_starts is None else segment_starts
    if segment_starts is not None and (
        not len(starts)
        or (np.diff(starts, prepend=0) < 1).any()
        # A segment needs a context token and at least one other.
        or (np.diff(starts, append=length) < 2).any()
        or per_token["loss_mask"][starts].any()
    ):
        raise ValueError(
            f"sample {name!r}: segments begin at {starts.tolist()} of {length} response tokens;"
            " they must rise, lie within them and have a token that is not trained on before others"
        )
    versions = per_token["versions"]
    falls = np.flatnonzero(versions[1:] < versions[:-1]) + 1
    # Versions may fall only where another segment begins.
    if len(falls) and not np.isin(falls, starts).all():
        raise ValueError(
            f"sample {name!r}: weight versions decrease along the response: {versions.tolist()}"
        )
    rows = prompt_length + length - 1 - len(starts)
    # No layer reads the last token of a segment.
    if routed_experts is not None and (not routed_experts or len(routed_experts) % rows):
        raise ValueError(
            f"sample {name!r}: {len(routed_experts)} bytes of routed experts are not one row for"
            f" each of its {rows} tokens but the last"
        )
    if step_rewards is None:
        return
    if len(step_rewards) != length:
        raise ValueError(
            f"sample {name!r}: step_rewards has {len(step_rewards)} entries for {length} response"
            " tokens"
        )
    # float64: the sum of many float32 rewards would exceed the tolerance.
    total = float(np.sum(step_rewards, dtype=np.float64))
    if reward_error is None and not np.isclose(total, reward, rtol=1e-5, atol=1e-5):
        raise ValueError(
            f"sample {name!r}: step rewards sum to {total}, and its reward is {reward}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response to one prompt.

    Arrays have one entry per response token (length T): response_ids int32, behavior_logprobs
    float32 (nats, after temperature, as the engine sampled them), versions int32 (weight version
    that sampled the token), loss_mask uint8 (1 = trained on; 0 = environment token).
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
    reward_parts: Mapping[str, float] | None = None
    """Parts of the reward by name, before weighting; null for a reward without parts."""
    weight: float = 1.0
    """Per-sample weight of the `sft` loss; 1 for sampled responses."""
    step_rewards: NDArray[np.float32] | None = None
    """Reward of each response token, [T], which sums to `reward`; null unless the task rewards
    steps."""
    segment_starts: NDArray[np.int32] | None = None
    """Response tokens at which the second and every further segment begins, rising; null for one
    segment."""
    routed_experts: bytes | None = None
    engine: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        per_token: dict[str, NDArray[Any]] = {
            "behavior_logprobs": self.behavior_logprobs,
            "versions": self.versions,
            "loss_mask": self.loss_mask,
        }
        check_response(
            self.id,
            self.response_ids,
            per_token,
            self.reward,
            self.reward_error,
            self.step_rewards,
            prompt_length=len(self.prompt.token_ids),
            routed_experts=self.routed_experts,
            segment_starts=self.segment_starts,
        )

    @property
    def valid(self) -> bool:
        """False if the reward failed: such a sample is logged and counted but does not train."""
        # Derived from the error, so that the two never contradict each other.
        return self.reward_error is None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def start_version(self) -> int:
        return int(self.versions.min())

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.response_ids)

    @property
    def total_length(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt.token_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResponse:
    """The tokens of an aborted response: response_ids int32, behavior_logprobs float32 (nats, as
    sampled), versions int32. routed_experts: of prompt and response, as in a sample."""

    response_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routed_experts: bytes | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.behavior_logprobs), len(self.versions)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                "a partial response has at least one token, each with a log-prob and a version; got"
                f" lengths {sorted(lengths)}"
            )

    @property
    def start_version(self) -> int:
        return int(self.versions[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One response to be sampled: member `k` of group `group` (negative for held-out
    evaluation)."""

    group: int
    k: int
    prompt: Prompt
    prefix: PartialResponse | None = None
    """The response continues after these tokens, which keep their log-probs and versions."""
    sampling: str | None = None
    """Name of the held-out set that defines the sampling; null: training's."""
    id: str = field(init=False)
    """Made once, because the request's owner uses the same string."""

    def __post_init__(self) -> None:
        # object.__setattr__ works on a frozen dataclass.
        object.__setattr__(self, "id", f"{self.group}-{self.k}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Aborted:
    """Answer to an abort: the tokens sampled for the request so far, including its prefix; null
    before the first token."""

    id: str
    partial: PartialResponse | None

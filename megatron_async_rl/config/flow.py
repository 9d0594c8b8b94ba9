"""Settings of the flow of samples: batch sizes, the staleness bound and the selection rule.

Each selection rule has one model, which the configuration selects by its `name`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_async_rl.config.settings_model import Strict, bare_name

# This file has only the settings; flow/scheduler.py applies the rules.
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]


class OldestFirst(Strict):
    """Train groups in the order of their admission."""

    name: Literal["oldest_first"] = "oldest_first"


class Windowed(Strict):
    """Train groups in the order in which they finish, within a window of the oldest untrained
    groups, as far as the staleness law permits."""

    name: Literal["windowed"] = "windowed"
    window: NonNegativeFloat = 1.0
    """Size f of the window: a group may train early while fewer than (1 + f) x prompts_per_step
    older groups are untrained."""


class ExactLag(Strict):
    """Train every sample, which a single weight version sampled, exactly `lag` updates later: the
    controlled experiment of M2PO and GAC. Samples from before the first update wait up to `lag`
    steps. Needs the same number as flow.async_ratio."""

    name: Literal["exact_lag"] = "exact_lag"
    lag: NonNegativeInt
    """Lag s, in updates; lag x prompts_per_step groups wait in host memory."""


class Replay(Strict):
    """Replay buffer of TBA (arXiv 2503.18929): finished groups enter a store, and a step trains on
    the newest groups or on stored ones.

    A stored response may train many times, at any lag: the staleness bound applies only to groups
    that enter the store.
    """

    name: Literal["replay"] = "replay"
    recent: UnitInterval = 0.5
    """Probability m that a step trains on the groups that finished since the previous step, instead
    of stored ones."""
    inverse_temperature: NonNegativeFloat = 1.0
    """Inverse temperature of the draw: the probability of a stored response is proportional to
    exp(inverse_temperature x reward)."""
    per_prompt: PositiveInt = 100
    """Number of newest distinct responses that the store keeps of each prompt."""


Selection = Annotated[
    Union[OldestFirst, Windowed, ExactLag, Replay],
    Field(discriminator="name"),
    # Before the discriminator, which needs a mapping with `name`.
    BeforeValidator(bare_name),
]


class FlowConfig(Strict):
    """Flow of samples from the engines to training."""

    prompts_per_step: PositiveInt
    """Number of prompts per batch. One batch is trained between two versions of the weights."""
    group_size: PositiveInt
    """Number of responses per prompt."""
    async_ratio: NonNegativeFloat = 1.0
    """Asynchronous ratio alpha of ROLL Flash (arXiv 2510.11345): no sample starts more than
    ceil(alpha) versions before it is trained on; 0 is synchronous."""
    selection: Selection = OldestFirst()
    """Rule that selects the finished groups of a step: a name, or a mapping with `name` and its
    settings."""
    late: Literal["wait", "drop"] = "wait"
    """Treatment of a group that must train now by the staleness law and is still running. `wait`
    waits for it; `drop` drops it if enough others have finished. Dropping favours short responses,
    so the report compares dropped with trained responses. To have a length and a reward, dropped
    responses run to their end: `drop` saves waiting time, not engine time."""
    oversample: NonNegativeFloat = 0.0
    """Groups in flight in addition to those of async_ratio, as a share of prompts_per_step. With
    `selection: windowed` the groups that finish first train, and unfinished groups continue. The
    staleness bound stays ceil(async_ratio), so async_ratio must be a fraction, such as 0.5."""
    stream: Literal["none", "groups"] = "none"
    """Streamed groups of a synchronous run (arXiv 2610.05935). `groups`: the policy computes the
    gradient of finished groups while the engines sample the other groups of the batch under the
    same weights, and makes the optimizer step when the batch is complete. The gradient is that of
    `none` up to rounding, and the lag is 0. Needs async_ratio: 0, and methods that compare the
    responses of one group at most."""
    dynamic_sampling: bool = False
    """Dynamic sampling of DAPO (arXiv 2503.14476): drop each group whose rewards are all equal, and
    sample another prompt instead. Once ten times the groups of a batch were dropped for one batch,
    such groups are trained on."""

"""The flow of samples: batch sizes, staleness bound and the rule that selects a batch.

Each selection rule is one model, chosen by its `name`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_async_rl.config.settings_model import Strict, bare_name

# Settings only: flow/scheduler.py has the rules.
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class OldestFirst(Strict):
    """Train groups in the order of their admission."""

    name: Literal["oldest_first"] = "oldest_first"


class Windowed(Strict):
    """Train groups in the order in which they finish, as far as the staleness law permits, from
    among the oldest untrained ones."""

    name: Literal["windowed"] = "windowed"
    window: NonNegativeFloat = 1.0
    """f: a group may overtake as long as fewer than (1 + f) prompts_per_step older ones are not
    trained yet."""


class ExactLag(Strict):
    """Train every sample exactly `lag` updates after it was sampled, by a single weight version:
    the controlled experiment of M2PO and GAC. Samples from before the first update wait up to
    `lag` steps. Needs flow.async_ratio to be the same number."""

    name: Literal["exact_lag"] = "exact_lag"
    lag: NonNegativeInt
    """s, in updates; lag x prompts_per_step groups wait in host memory."""


class Replay(Strict):
    """TBA's buffer (arXiv 2503.18929): finished groups go into a store, and a step trains on the
    newest batch or on stored ones.

    A stored response may train many times, at any lag: the bound holds for what enters the store.
    """

    name: Literal["replay"] = "replay"
    recent: Share = 0.5
    """m: probability that a step takes the groups that finished since the last one, instead of
    stored ones."""
    inverse_temperature: NonNegativeFloat = 1.0
    """Stored responses are drawn with probability proportional to exp(inverse_temperature x
    reward)."""
    per_prompt: PositiveInt = 100
    """Newest distinct responses kept of each prompt."""


Selection = Annotated[
    Union[OldestFirst, Windowed, ExactLag, Replay],
    Field(discriminator="name"),
    # Before the discriminator, which needs a mapping with `name`.
    BeforeValidator(bare_name),
]


class FlowConfig(Strict):
    """Flow of samples from the engines to training."""

    prompts_per_step: PositiveInt
    """Number of prompts per batch, which is trained between two versions of the weights."""
    group_size: PositiveInt
    """Responses per prompt."""
    async_ratio: NonNegativeFloat = 1.0
    """alpha of ROLL Flash (arXiv 2510.11345): no sample starts more than ceil(alpha) versions
    before it is trained on; 0 is synchronous."""
    selection: Selection = OldestFirst()
    """Choice of the finished groups that a step trains on: a name, or a mapping with `name` and its
    settings."""
    late: Literal["wait", "drop"] = "wait"
    """Treatment of a group that must train now by the staleness law and is still running: `wait`
    for it, or `drop` it if enough others have finished. Dropping favours short responses. The
    report compares dropped with trained responses; dropped ones therefore run to their end,
    because cut ones have neither length nor reward. So `drop` saves waiting, not engine time."""
    oversample: NonNegativeFloat = 0.0
    """Groups in flight in addition to async_ratio's, as a share of prompts_per_step: with
    `selection: windowed` those that finish first train, and unfinished ones continue. The bound
    stays ceil(async_ratio), so it needs a fraction there, such as 0.5."""
    dynamic_sampling: bool = False
    """DAPO's dynamic sampling (arXiv 2503.14476): drop each group whose rewards are all equal,
    and sample one more prompt for it. After ten batches' worth of drops for one batch, such
    groups are used."""

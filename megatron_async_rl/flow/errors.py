"""Why a run's flow of samples stopped. Plain-message exceptions, so that they survive the trip between processes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async_rl.samples.types import Sample


class FlowError(RuntimeError):
    """Samples cannot keep flowing; the message says who, where and why."""


class BatchTimeout(FlowError):
    """The groups of the next batch did not finish in time."""


class EngineFailed(FlowError):
    """No engine is left that could be asked."""


class RewardFailed(FlowError):
    """A reward raised or was not finite, and the configuration says to stop."""


def reward_failed(samples: Sequence[Sample]) -> RewardFailed:
    first = samples[0]
    more = f" (and {len(samples) - 1} more of its group)" if len(samples) > 1 else ""
    return RewardFailed(
        f"the reward failed on sample {first.id}{more}: {first.reward_error}\n"
        f"  prompt {first.prompt.id}: {first.prompt.text[:200]!r}\n  response: {first.text[:200]!r}\n"
        "  fix: correct the reward, or set rollout.reward.on_error=drop to leave such samples out"
    )

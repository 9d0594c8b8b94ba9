"""Why a run's flow of samples stopped. Plain-message exceptions, so that they survive the trip
between processes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Sample


class FlowError(RuntimeError):
    """Samples cannot keep flowing; the message says who, where and why."""


class BatchTimeout(FlowError):
    """The groups of the next batch did not finish in time."""

    timed_out = True


class EngineFailed(FlowError):
    """No engine is left that could be asked."""

    timed_out = True
    """Engines are given up when they do not answer; who waits for what says why."""


class RequestGivenUp(FlowError):
    """Two engines were lost while they had the request."""


class RewardFailed(FlowError):
    """A reward failed and the configuration says to stop, or every reward of a batch failed."""


def reward_failed(samples: Sequence[SampleRow]) -> RewardFailed:
    first = samples[0].sample()
    more = f" (and {len(samples) - 1} more of its group)" if len(samples) > 1 else ""
    return RewardFailed(
        f"the reward failed on sample {first.id}{more}: {first.reward_error}\n  prompt"
        f" {first.prompt.id}: {first.prompt.text[:200]!r}\n  response: {first.text[:200]!r}\n  fix:"
        " correct the reward, or set rollout.reward.on_error=drop to leave such samples out"
    )


SHOWN = 3


def require_a_reward(samples: Sequence[SampleRow], step: int) -> None:
    """Raises RewardFailed, with the first failures, where every reward of the batch for `step`
    failed: no step can be made of it, and the next batch would most likely be the same."""
    if any(sample.valid for sample in samples):
        return

    errors: dict[str | None, Sample] = {}
    for sample in (row.sample() for row in samples):
        errors.setdefault(sample.reward_error, sample)
    shown = [
        f"  {error}\n    prompt {sample.prompt.id}: {sample.prompt.text[:200]!r}\n"
        f"    response: {sample.text[:200]!r}\n"
        for error, sample in list(errors.items())[:SHOWN]
    ]
    raise RewardFailed(
        f"the reward failed on all {len(samples)} responses of the batch for step"
        f" {step}:\n{''.join(shown)}"
        "  fix: correct the reward, or the data it reads; every failure is in"
        " RUN/logs/engine-*.reward_errors.jsonl"
    )

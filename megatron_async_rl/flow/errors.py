"""Why a run's flow of samples stopped. Plain-message exceptions, so that they survive the trip
between processes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async_rl.samples.types import Sample, TrainBatch


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


def reward_failed(samples: Sequence[Sample]) -> RewardFailed:
    first = samples[0]
    more = f" (and {len(samples) - 1} more of its group)" if len(samples) > 1 else ""
    return RewardFailed(
        f"the reward failed on sample {first.id}{more}: {first.reward_error}\n  prompt"
        f" {first.prompt.id}: {first.prompt.text[:200]!r}\n  response: {first.text[:200]!r}\n  fix:"
        " correct the reward, or set rollout.reward.on_error=drop to leave such samples out"
    )


SHOWN = 3


def require_a_reward(batch: TrainBatch) -> None:
    """Raises RewardFailed, with the first failures, for a batch in which every reward failed: no
    step can be made of it, and the next batch would most likely be the same."""
    samples = list(batch.samples())
    if any(sample.valid for sample in samples):
        return

    errors: dict[str | None, Sample] = {}
    for sample in samples:
        errors.setdefault(sample.reward_error, sample)
    shown = [
        f"  {error}\n    prompt {sample.prompt.id}: {sample.prompt.text[:200]!r}\n"
        f"    response: {sample.text[:200]!r}\n"
        for error, sample in list(errors.items())[:SHOWN]
    ]
    raise RewardFailed(
        f"the reward failed on all {len(samples)} responses of the batch for step"
        f" {batch.version + 1}:\n{''.join(shown)}"
        "  fix: correct the reward, or the data it reads; every failure is in"
        " RUN/logs/engine-*.reward_errors.jsonl"
    )

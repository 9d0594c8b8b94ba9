"""Reasons why a run's flow of samples stopped. Exceptions carry plain messages, so that they can be
pickled and sent between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.device_phases import Phase
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.watchdog.host_memory import MemoryKind

LATE_SHOWN = 8
"""Largest number of groups that a message names."""
ERRORS_SHOWN = 3


class FlowError(RuntimeError):
    """Samples cannot keep flowing. The message names the place and the reason."""


class BatchTimeout(FlowError):
    """The groups of the next batch did not finish in time."""

    timed_out = True


class EngineFailed(FlowError):
    """No engine is left."""

    timed_out = True
    """Engines are given up if they do not answer; the processes' waits explain the reason."""


class EngineMemoryOut(EngineFailed):
    """No engine is left, because memory of a device or a host ran out. `phase`: the device phase in
    which it ran out (device_phases.py)."""

    # Memory is the cause itself; the waits of other processes explain nothing.
    timed_out = False

    def __init__(self, message: str, phase: Phase, memory: MemoryKind = "device") -> None:
        # Pass all arguments: unpickling in another process calls the class with them.
        super().__init__(message, phase, memory)
        self.message = message
        self.phase = phase
        self.out_of_memory = memory

    def __str__(self) -> str:
        return self.message


class RequestGivenUp(FlowError):
    """Engines were lost while they had the request, the last one while it had nothing else."""


@dataclass(frozen=True, kw_only=True)
class LateGroup:
    """A group for which a batch waits. `engines`: engines that hold requests of it. `unscored`: the
    group has all its responses, and waits for its reward."""

    index: int
    prompt: str
    seconds: float
    engines: Sequence[int]
    unscored: bool = False

    def __str__(self) -> str:
        where = ", ".join(f"engine {one}" for one in self.engines) or "no engine yet"
        where = "waits for its reward (per: group)" if self.unscored else f"on {where}"
        return f"group {self.index} (prompt {self.prompt}): {self.seconds:.1f} s, {where}"


def batch_timeout(
    version: int, timeout_s: float, late: Sequence[LateGroup], held: Sequence[int]
) -> BatchTimeout:
    """Return the error for a batch that is late. `late`: longest first. `held`: version that each
    engine holds."""
    shown = [str(group) for group in late[:LATE_SHOWN]]
    more = [f"and {len(late) - LATE_SHOWN} more"] if len(late) > LATE_SHOWN else []
    return BatchTimeout(
        f"no response grew for the batch of version {version} in {timeout_s:g} s;"
        f" {len(late)} groups are running, the engines hold version"
        f" {', '.join(map(str, held))}\n  " + "\n  ".join(shown + more)
    )


class RewardFailed(FlowError):
    """A reward failed and the configuration requests to stop, or every reward of a batch failed."""


def reward_failed(samples: Sequence[SampleRow]) -> RewardFailed:
    first = samples[0].sample()
    more = f" (and {len(samples) - 1} more of its group)" if len(samples) > 1 else ""
    return RewardFailed(
        f"the reward failed on sample {first.id}{more}: {first.reward_error}\n  prompt"
        f" {first.prompt.id}: {first.prompt.text[:200]!r}\n  response: {first.text[:200]!r}\n  fix:"
        " correct the reward, or set rollout.reward.on_error=drop to leave such samples out"
    )


def require_a_reward(samples: Sequence[SampleRow], step: int) -> None:
    """Raise RewardFailed, with the first failures, if every reward of the batch for `step` failed:
    such a batch makes no step, and the next one would most likely fail as well."""
    if any(sample.valid for sample in samples):
        return

    errors: dict[str | None, Sample] = {}
    for sample in (row.sample() for row in samples):
        # One sample per message: a broken reward fails in the same way on all samples.
        errors.setdefault(sample.reward_error, sample)
    shown = [
        f"  {error}\n    prompt {sample.prompt.id}: {sample.prompt.text[:200]!r}\n"
        f"    response: {sample.text[:200]!r}\n"
        for error, sample in list(errors.items())[:ERRORS_SHOWN]
    ]
    raise RewardFailed(
        f"the reward failed on all {len(samples)} responses of the batch for step"
        f" {step}:\n{''.join(shown)}"
        "  fix: correct the reward, or the data it reads; every failure is in"
        " RUN/logs/*.reward_errors.jsonl"
    )


class WeightsChanged(UserError):
    """A resume loaded other weights than its checkpoint's step produced."""

    @classmethod
    def at(cls, step: int, saved: str, loaded: str) -> Self:
        return cls.of(
            "checkpoint",
            f"the weights of step {step} had the digest {saved} when they were saved, and have"
            f" {loaded} after they were loaded",
            "remove this checkpoint, so that the run resumes from an older one, and check memory"
            " and disks of these machines",
        )

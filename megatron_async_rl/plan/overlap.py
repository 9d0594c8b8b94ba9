"""Worth of sampling and training at the same time: the seconds of a step, from the seconds of
its parts.

    T_engines = T_gen + pause          all engines sample one batch; each stops once for weights
    T_trainer = T_train + publish      the optimizer step, and handing its weights over
    turn by turn                       T_gen + T_train + publish
    at the same time, at best          max(T_engines, T_trainer)

In between lies a run-ahead r below 1: while the policy trains, the engines may sample only that
share of the next batch, so the trainer waits for the rest: max(T_engines, T_trainer + (1 - r)
T_gen). Pure arithmetic; seconds everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_async_rl.config.flow import ExactLag
from megatron_async_rl.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Overlap:
    generate_s: float
    """T_gen with `engines` engines."""
    train_s: float
    publish_s: float
    pause_s: float
    engines: int
    run_ahead: float
    """r, 0 to 1."""

    @property
    def engines_s(self) -> float:
        return self.generate_s + self.pause_s

    @property
    def trainer_s(self) -> float:
        return self.train_s + self.publish_s

    @property
    def synchronous_s(self) -> float:
        return self.generate_s + self.train_s + self.publish_s

    @property
    def bound_s(self) -> float:
        """No placement and no async_ratio make a step shorter than this."""
        return max(self.engines_s, self.trainer_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step at this run-ahead."""
        return max(self.engines_s, self.trainer_s + (1.0 - self.run_ahead) * self.generate_s)

    @property
    def balanced_engines(self) -> int | None:
        """Fewest engines that sample a batch while the trainer makes a step; null when their pause
        alone takes as long."""
        free = self.trainer_s - self.pause_s
        return (
            max(1, math.ceil(round(self.generate_s * self.engines / free, 6))) if free > 0 else None
        )

    def in_words(self) -> str:
        speed_up = self.synchronous_s / self.bound_s
        lines = [
            (
                f"parts          generate {_s(self.generate_s)}, train {_s(self.train_s)}, publish"
                f" {_s(self.publish_s)}, pause of an engine {_s(self.pause_s)}"
            ),
            f"synchronous    {_s(self.synchronous_s)} a step: generate, train, publish",
            (
                f"disaggregated  {_s(self.bound_s)} a step at best, {speed_up:.2f} times as fast:"
                f" the longer of engines {_s(self.engines_s)} and trainer {_s(self.trainer_s)}"
            ),
            (
                f"colocated      {_s(self.synchronous_s)} a step: engines and policy take turns on"
                " the same devices"
            ),
            (
                f"this config    {_s(self.step_s)} a step, {self.synchronous_s / self.step_s:.2f}"
                f" times as fast as synchronous: while the policy trains, {self.run_ahead:.0%} of"
                " the next batch may be sampled"
            ),
        ]
        balanced = self.balanced_engines
        if balanced is not None:
            have = "as here" if balanced == self.engines else f"instead of {self.engines}"
            engines = "1 engine" if balanced == 1 else f"{balanced} engines"
            lines.append(
                f"balance        {engines}, {have}, sample a batch while the policy trains on one"
            )
        return "\n".join(lines)


def run_ahead(config: Config) -> float:
    """Share of the next batch that the engines may sample while the policy trains on one."""
    colocated = config.rollout is not None and config.rollout.placement == "colocated"
    # With exact_lag every response is made by one version, so nothing runs while the weights
    # change.
    stands_still = colocated or isinstance(config.flow.selection, ExactLag)
    return 0.0 if stands_still else min(1.0, config.flow.async_ratio)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"

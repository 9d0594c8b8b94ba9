"""Plans without a trial of the reward, which starts a process for each plan, for tests of other
parts of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def untried_rewards() -> Iterator[None]:
    """Leave the trial of the reward out of plans."""
    with mock.patch("megatron_async_rl.plan.preflight.try_reward", return_value=([], [])):
        yield

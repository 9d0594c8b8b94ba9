"""The layout of one rank, for tests that build a policy in their own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megatron_async_rl.config.policy import ParallelConfig

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Layout


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    # Imported here, because it imports Megatron, which collection does without.
    from megatron_async_rl.policy import device
    from megatron_async_rl.policy.parallel import initialise

    device.install("cpu")
    made = initialise(ParallelConfig(), "cpu", timeout_s=600)
    yield made
    made.shutdown()

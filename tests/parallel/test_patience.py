"""Ranks wait for what rank 0 waits for, however long that takes."""

import pytest

from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.parallel


def test_a_batch_that_takes_longer_than_a_collective_may_is_waited_for() -> None:
    output = run_ranks(2, "tests.parallel.patience_program", timeout=120)
    assert "rank 0 has it" in output
    assert "rank 1 has it" in output

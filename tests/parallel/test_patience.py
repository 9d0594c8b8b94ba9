"""Ranks wait for what rank 0 waits for, however long that takes."""

from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks
from tests.thorough import thorough

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("how", ["", pytest.param("wait", marks=thorough)])
def test_batches_and_evaluations_that_take_longer_than_a_collective_may_are_waited_for(
    how: str, tmp_path: Path
) -> None:
    """The gate checks the timeouts of the groups in which ranks wait; `make test-all` waits longer
    than the others' timeout."""
    output = run_ranks(2, "tests.parallel.patience_program", [tmp_path, *how.split()])
    for rank in range(2):
        assert f"rank {rank} has it" in output
        assert f"rank {rank} saves version 1" in output, (
            "with an evaluation of an older one under way"
        )
        assert f"rank {rank} saves version 4" in output, "after the evaluation of the last version"

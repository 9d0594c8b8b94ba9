"""Log-probs, entropy and their gradients do not depend on how the vocabulary is cut over ranks."""

import pytest

from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.parallel


def test_log_probs_and_gradients_are_float64s_for_every_cut_of_the_vocabulary() -> None:
    output = run_ranks(4, "tests.parallel.logprob_program")
    for rank in range(4):
        assert f"rank {rank}: all agree" in output

"""Attention over rows that two ranks share equals attention over the whole rows: this package's on
any device, and Transformer Engine's on two GPUs."""

import pytest

from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE, run_program
from tests.parallel.ranks import run_ranks

PROGRAM = "tests.gpu.context_program"


@pytest.mark.parallel
def test_outputs_and_gradients_are_those_of_whole_rows():
    run_ranks(2, PROGRAM, ["cpu"])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=ON_DEVICE_WITH_TE)])
def test_transformer_engines_outputs_and_gradients_are_those_of_whole_rows(ranks):
    run_program(PROGRAM, [DEVICE], ranks)

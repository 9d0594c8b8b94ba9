"""Batches that arrive in parts train as whole batches, on parallel layouts."""

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.streamed_program import OBJECTIVES
from tests.parallel.test_layout_invariance import compare_steps

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["streamed_program"]
TOLERANCE = 1e-6


def results(layout):
    return layouts.results(layout, "streamed_program")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_to_the_gradient_of_the_batch(layout, objective):
    found = results(layout)[objective]
    for square, difference in zip(found["squares"], found["differences"], strict=True):
        assert square > 0
        assert difference**0.5 < TOLERANCE * square**0.5
    divided = ("policy/micro_batches", "policy/computed_tokens", "policy/padding_share")
    steps, whole = (
        [{k: v for k, v in step.items() if k not in divided} for step in found[name]]
        for name in ("steps", "whole")
    )
    compare_steps(steps, whole, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_complete_batch_with_its_parts_makes_the_same_bits(layout):
    for found in results(layout).values():
        if isinstance(found, dict):
            streamed, repeated = found["weights"]
            assert streamed.keys() == repeated.keys()
            assert all(torch.equal(tensor, repeated[name]) for name, tensor in streamed.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_layout_receive_the_same_numbers(layout):
    assert results(layout)["ranks_agree"]

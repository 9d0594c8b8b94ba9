"""Gradients that are reduced beside the backward pass are those that are reduced after it."""

from __future__ import annotations

import functools

import pytest

from tests.parallel import layouts
from tests.parallel.test_layout_invariance import compare_steps, compare_weights

pytestmark = pytest.mark.parallel

LAYOUTS = {
    "data_distributed": {"ranks": 2},
    "data_replicated": {"ranks": 2, "distributed_optimizer": False},
    "data_pipeline": {"ranks": 4, "pipeline": 2},
    "data_virtual_pipeline": {"ranks": 4, "pipeline": 2, "virtual_pipeline": 2},
    "expert_replicas": {"ranks": 4, "expert": 2},
}


@functools.cache
def results_of_all(ranks):
    return layouts.run_program("overlap_program", layouts.material(), LAYOUTS, ranks)


def results(layout):
    found = results_of_all(LAYOUTS[layout]["ranks"])
    if isinstance(found, AssertionError):
        raise found
    return found[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_and_weights_are_those_of_gradients_reduced_at_the_end(layout):
    at_the_end, beside = (results(layout)[overlap] for overlap in (False, True))
    compare_steps(beside["steps"], at_the_end["steps"])
    compare_weights(beside["weights"], at_the_end["weights"])
    assert results(layout)["ranks_agree"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_the_second_step_on_every_rank_reduces_buckets_early(layout):
    """In the first step Megatron learns in which order gradients come. It makes one bucket of every
    pipeline stage but the first."""
    whole = "pipeline" in LAYOUTS[layout]
    for rank, early in enumerate(results(layout)[True]["early"]):
        assert early[0] == 0
        assert early[1] >= (1 if whole and rank > 0 else 3)
    assert {count for early in results(layout)[False]["early"] for count in early} == {0}

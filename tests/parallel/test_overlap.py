"""Gradients reduced during the backward pass equal those reduced after it, and weights gathered
during the forward pass equal those gathered after a step."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.test_export import assert_same
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import chosen

pytestmark = pytest.mark.parallel

LAYOUTS = chosen(
    {
        "data_distributed": {"ranks": 2},
        "data_replicated": {"ranks": 2, "distributed_optimizer": False},
        "data_pipeline": {"ranks": 4, "pipeline": 2},
        "data_virtual_pipeline": {"ranks": 4, "pipeline": 2, "virtual_pipeline": 2},
        "expert_replicas": {"ranks": 4, "expert": 2},
    },
    "data_distributed",
    "data_replicated",
)
"""The gate leaves out pairs of dimensions, which take four ranks."""


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
    """Megatron learns the order of the gradients in the first step. It makes one bucket of every
    pipeline stage but the first."""
    whole = "pipeline" in LAYOUTS[layout]
    for rank, early in enumerate(results(layout)[True]["early"]):
        assert early[0] == 0
        assert early[1] >= (1 if whole and rank > 0 else 3)
    assert {count for early in results(layout)[False]["early"] for count in early} == {0}


DIVIDED = [
    name for name, settings in LAYOUTS.items() if settings.get("distributed_optimizer", True)
]


def without_times(steps):
    return [{k: v for k, v in step.items() if not k.startswith("time/")} for step in steps]


@pytest.mark.parametrize("objective", ["plain", "followed"])
@pytest.mark.parametrize("layout", DIVIDED)
def test_weights_gathered_beside_the_forward_pass_change_no_bit(layout, objective):
    found = results(layout)["gathered"]
    at_once, beside = (found[objective, how] for how in ("at_once", "beside"))
    assert without_times(beside["steps"]) == without_times(at_once["steps"])
    assert_same(beside["weights"], at_once["weights"])


@pytest.mark.parametrize("layout", DIVIDED)
def test_a_batchs_first_step_is_gathered_beside_the_second_and_its_last_at_once(layout):
    found = results(layout)["gathered"]
    assert all(beside == 0 < waits for beside, waits, _ in found["plain", "at_once"]["gathers"])
    for beside, waits, left in found["plain", "beside"]["gathers"]:
        assert beside == waits > 0
        assert left == 0, "a bucket of weights was read that nobody had waited for"
    # What follows the weights reads them after every step.
    assert all(beside == 0 < waits for beside, waits, _ in found["followed", "beside"]["gathers"])


@pytest.mark.parametrize("layout", DIVIDED)
def test_a_missing_wait_would_show_in_what_is_exported(layout):
    found = results(layout)["gathered"]
    right, stale = (found["plain", how]["weights"] for how in ("at_once", "unawaited"))
    assert not all(torch.equal(stale[name], right[name]) for name in right)

"""Every combination of methods that the configuration lets go together trains a real policy."""

from __future__ import annotations

import json
import math

import pytest

from tests.combinations import label, pairwise
from tests.parallel.composition_program import VOCABULARY
from tests.parallel.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composition")
    model = save_tiny_model(
        folder / "model", vocab_size=VOCABULARY, hidden_size=16, layers=1, intermediate_size=16
    )
    run_ranks(1, "tests.parallel.composition_program", [model, folder / "steps.json"])
    return json.loads((folder / "steps.json").read_text())


@pytest.mark.parametrize(
    "number", range(len(pairwise())), ids=[label(config) for config in pairwise()]
)
def test_a_combination_trains_two_steps_without_a_number_that_is_not_one(trained, number):
    steps = trained[number]
    assert isinstance(steps, list), steps
    for metrics in steps:
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert metrics["policy/nonfinite"] == 0.0
    assert steps[0]["policy/grad_norm"] > 0.0 or steps[1]["policy/grad_norm"] > 0.0

"""Methods that the configuration lets go together train a real policy: every method in the gate,
every two in `make test-all`."""

from __future__ import annotations

import json
import math

import pytest

from tests.cases import case
from tests.combinations import label, trained
from tests.parallel.composition_program import VOCABULARY
from tests.parallel.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composition")
    model = save_tiny_model(
        folder / "model", vocab_size=VOCABULARY, hidden_size=16, layers=1, intermediate_size=16
    )
    run_ranks(1, "tests.parallel.composition_program", [model, folder / "steps.json"])
    return json.loads((folder / "steps.json").read_text())


def test_a_combination_trains_two_steps_without_a_number_that_is_not_one(found):
    for config, steps in zip(trained(), found, strict=True):
        with case(label(config)):
            assert isinstance(steps, list), steps
            for metrics in steps:
                assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
                assert metrics["policy/nonfinite"] == 0.0
            assert steps[0]["policy/grad_norm"] > 0.0 or steps[1]["policy/grad_norm"] > 0.0

"""Layouts with three and four shards of each kind take the step of one rank.

A sum of two shards does not depend on their order, and two pipeline stages are the first and the
last: only wider layouts have an order of reduction and a stage in the middle.
"""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.layouts import run_program, temporary, with_behavior
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import chosen
from tests.tiny_models import save_tiny_model
from tests.train_batches import ragged_batch

pytestmark = pytest.mark.parallel

VOCABULARY = 97
"""Neither three nor four divide it, so that the last tensor-parallel rank has padding rows."""


def layouts_of(width: int) -> dict[str, dict[str, Any]]:
    """Each kind of parallelism at this width.

    Three shards already have an order of reduction and a stage in the middle, so the gate tries
    the model's matrices, its layers and the samples with three: `sequence` cuts what `tensor` cuts,
    and more. With four it tries the kind whose shards need not end where parameters do, and four
    stages on two ranks.
    """
    layouts = {
        "sequence": {"ranks": width, "tensor": width, "sequence": True},
        "tensor": {"ranks": width, "tensor": width},
        "pipeline": {"ranks": width, "pipeline": width},
        "context": {"ranks": width, "context": width},
        "data": {"ranks": width},
        "data_replicated": {"ranks": width, "distributed_optimizer": False},
        "expert": {"ranks": width, "expert": width},
        "expert_replicated": {"ranks": width, "expert": width, "distributed_optimizer": False},
    }
    if width == 4:
        layouts["virtual_pipeline"] = {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2}
    in_gate = {3: ("sequence", "pipeline", "data"), 4: ("data", "virtual_pipeline")}
    return chosen(layouts, *in_gate[width])


ALONE = {"single": {"ranks": 1}, "mixture": {"ranks": 1}}
WIDTHS = (3, 4)
CASES = [(width, layout) for width in WIDTHS for layout in layouts_of(width)]


@functools.cache
def material(width: int) -> Path:
    """Models whose heads, layers and experts this width divides, and batches for them."""
    directory = temporary()
    shape: dict[str, Any] = {
        "tied": True,
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * width,
        "heads": 2 * width,
        "kv_heads": width,
        "layers": width,
        "intermediate_size": 16 * width,
        "scale": 2.0,
    }
    save_tiny_model(directory / "tied", seed=width, **shape)
    save_tiny_model(
        directory / "mixture",
        "qwen3_moe",
        seed=width + 10,
        num_experts=2 * width,
        moe_intermediate_size=8 * width,
        **shape,
    )
    batches = {
        name: with_behavior(
            directory / "tied", ragged_batch(groups=6, vocabulary=VOCABULARY, seed=seed)
        )
        for name, seed in (("a", 0), ("b", 1))
    }
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    return directory


def alone_of(layout: str) -> str:
    return "mixture" if layout.startswith("expert") else "single"


@functools.cache
def results(width: int, ranks: int) -> dict[str, dict[str, Any]]:
    layouts = layouts_of(width)
    if ranks == 1:
        needed = {alone_of(layout) for layout in layouts}
        layouts = {name: ALONE[name] for name in ALONE if name in needed}
    outcome = run_program("wide_program", material(width), layouts, ranks)
    if isinstance(outcome, AssertionError):
        raise outcome
    return outcome


@pytest.mark.parametrize(("width", "layout"), CASES)
def test_a_layout_with_three_or_four_shards_takes_the_step_of_one_rank(
    width: int, layout: str
) -> None:
    found = results(width, layouts_of(width)[layout]["ranks"])[layout]
    expected = results(width, 1)[alone_of(layout)]
    assert found["ranks_agree"]
    runs = found.keys() - {"ranks_agree"}
    assert {"controlled", "minibatches"} <= runs
    for run in runs:
        compare_steps(found[run]["steps"], expected[run]["steps"])
        compare_weights(found[run]["weights"], expected[run]["weights"])
    norms = found["controlled"]["norms"]
    assert norms["ours"] == pytest.approx(norms["megatron"], rel=1e-6)

"""GAC's gradient, a moving reference and an average of the weights go with the run to any other
parallel layout."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.model_program import BLOCK
from tests.parallel.parameter_state_program import LEAN_LAYOUTS, MODELS, TRAINED, WHOLE
from tests.parallel.ranks import run_ranks
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.ports import rank_stores
from tests.thorough import chosen
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.parallel

DENSE = layouts.LAYOUTS | layouts.CONTEXT_LAYOUTS
PAIRS = list(
    chosen(
        {name: settings for name, settings in DENSE.items() if settings["ranks"] == 2},
        "tensor",
        "pipeline",
        "data_distributed_optimizer",
    )
)
"""Two-rank layouts. The gate has one for each way to cut what is saved: `tensor` cuts matrices,
`pipeline` cuts the layers, and `data_distributed_optimizer` cuts the optimizer's slices."""
CHECKPOINTED = [
    name
    for name in ("tensor", "context", "data_distributed_optimizer", "pipeline", "virtual_pipeline")
    if name in PAIRS
]
"""Two-rank layouts whose checkpoints one rank continues from."""
LEAN = [name for name in LEAN_LAYOUTS if name in ("single", *PAIRS)]
WHOLE_HERE = [name for name in WHOLE if name in ("single", *PAIRS)]


FOREIGN = chosen(
    {
        "single": ["uneven"],
        "data_distributed_optimizer": ["uneven"],
        "tensor": ["untied"],
    },
    "single",
    "tensor",
)
"""Checkpoints that every two-rank layout continues from, and the model of each. That a checkpoint
of any layout holds the same is what one rank shows, with both models."""


def run(names, checkpoints, *, save=(), load=None):
    output = layouts.temporary()
    stores = rank_stores(len(names))
    arguments = {name: (store.port, DENSE[name]) for name, store in zip(names, stores, strict=True)}
    todo = json.dumps({"save": list(save), "load": load or {}})
    run_ranks(
        DENSE[names[0]]["ranks"],
        "tests.parallel.parameter_state_program",
        [layouts.material(), json.dumps(arguments), checkpoints, output, todo],
    )
    return {name: torch.load(output / f"{name}.pt", weights_only=False) for name in names}


@functools.cache
def results():
    """(what one rank did, what each two-rank layout did): two ranks save, one rank loads those and
    saves, two ranks load that."""
    checkpoints = layouts.temporary()
    sizes = {"vocab_size": layouts.VOCABULARY, "layers": layouts.LAYERS, "intermediate_size": 44}
    save_tiny_model(checkpoints / "uneven", tied=True, seed=2, scale=2.0, **sizes)
    pairs = run(PAIRS, checkpoints, save=CHECKPOINTED)
    everything = {origin: list(MODELS) for origin in ("single", *CHECKPOINTED)}
    single = run(["single"], checkpoints, save=["single"], load=everything)["single"]
    again = run(PAIRS, checkpoints, load=FOREIGN)
    return single, {name: {**pairs[name], "resumed": again[name]["resumed"]} for name in PAIRS}


def test_the_steps_compared_used_all_that_was_saved():
    single, _ = results()
    for model in MODELS:
        first = single["uninterrupted"][model]["steps"][0]
        assert first["gac/regime"] == 1
        assert first["ratio/kl_reference"] > 1e-4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("origin", ["single", *CHECKPOINTED])
def test_one_rank_continues_from_a_checkpoint_of_any_layout(origin, model):
    single, _ = results()
    found, expected = single["resumed"][origin][model], single["uninterrupted"][model]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])
    assert found["steps"][0]["gac/cosine"] == pytest.approx(
        expected["steps"][0]["gac/cosine"], abs=1e-6
    )


@pytest.mark.parametrize(
    ("origin", "model"), [(origin, model) for origin in FOREIGN for model in FOREIGN[origin]]
)
@pytest.mark.parametrize("layout", PAIRS)
def test_two_ranks_continue_from_a_checkpoint_of_any_layout(layout, origin, model):
    single, pairs = results()
    found, expected = pairs[layout]["resumed"][origin][model], single["uninterrupted"][model]
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["weights"], expected["weights"])
    assert found["steps"][0]["gac/cosine"] == pytest.approx(
        expected["steps"][0]["gac/cosine"], abs=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["single", *PAIRS])
def test_shards_make_up_the_models_parameters_and_are_cut_from_them_again_bit_for_bit(
    layout, dtype
):
    single, pairs = results()
    found = (single if layout == "single" else pairs[layout])["there_and_back"][dtype]
    assert found == {"same": True, "parts": layout in ("data_distributed_optimizer", "context")}


def test_a_control_that_had_no_gradient_yet_resumes_without_one():
    uninterrupted, resumed = results()[0]["absences"]["early"]
    assert "gac/cosine" not in resumed[0]
    compare_steps(resumed, uninterrupted)
    assert results()[0]["absences"]["said_early"] == []


def test_a_control_or_average_missing_from_the_checkpoint_restarts_with_a_warning():
    absences = results()[0]["absences"]
    assert "gac/cosine" not in absences["added"][0]
    assert "gac/cosine" in absences["added"][1]
    said = "\n".join(absences["said"])
    assert "no state of control gac: it starts afresh" in said
    assert "no reference: it starts from the weights it was configured with" in said
    assert "no proximal average: it starts from the weights of the checkpoint" in said


def test_state_of_a_control_that_is_no_longer_configured_is_passed_over():
    assert "gac/regime" not in results()[0]["absences"]["removed"][0]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", LEAN)
def test_with_gradients_and_moments_in_bfloat16_a_resumed_run_continues_bit_for_bit(
    layout, trained
):
    found = of(layout)["lean"][trained]
    assert found["moments"] == found["buffers"] == {torch.bfloat16}
    assert found["masters"] == {torch.float32}
    assert found["resumed"]


@pytest.mark.parametrize("layout", LEAN)
def test_state_in_fewer_bits_is_saved_and_loaded_in_blocks_and_shards_alone(layout):
    """GAC's gradient and a moving reference included. Loading takes only the memory of this
    rank's own shard."""
    found = of(layout)["lean_memory"]
    assert max(found["whole"]) > 1.5 * BLOCK
    assert max(found["saving"]) <= BLOCK
    for made, own in zip(found["loading"], found["own"], strict=True):
        assert made <= max(BLOCK, own)


@pytest.mark.parametrize("layout", LEAN)
def test_one_float32_gradient_of_the_output_layer_serves_all_micro_batches_of_a_step(layout):
    found = of(layout)["lean"]
    for micro_batches, places in found["weights"]["head"]:
        assert micro_batches > 1
        assert [dtype for _, dtype in places] == ["torch.float32"]


READ = ("policy/grad_norm", "gac/cosine", "momentum/cosine", "displacement/cosine")
"""Readings by controls and clipping of gradients, moments and the update to come."""


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", [name for name in LEAN if name != "single"])
def test_controls_read_the_same_of_gradients_and_moments_in_bfloat16_on_any_layout(layout, trained):
    """Within what products of a model in bfloat16 move them, which layouts round differently."""
    found, expected = (of(each)["lean"][trained]["steps"] for each in (layout, "single"))
    assert_read_alike(found, expected)
    assert set(READ) <= set(found[-1])


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", [name for name in LEAN if name in WHOLE])
def test_a_cosine_with_moments_in_bfloat16_is_that_of_the_same_shards_in_float64(layout, trained):
    found, exact = of(layout)["lean"][trained]["cosines"]
    assert 0.01 < abs(exact) < 0.99
    assert found == pytest.approx(exact, abs=1e-6)


def test_one_rank_continues_with_the_bfloat16_moments_of_any_layout():
    single = of("single")
    assert set(single["lean_from"]) == {*CHECKPOINTED, "single"} & set(LEAN)
    for origin, steps in single["lean_from"].items():
        assert_read_alike(steps, of(origin)["lean"]["weights"]["steps"][2:])


def test_moments_in_bfloat16_are_not_taken_for_those_in_float32():
    said = of("single")["refused_moments"]
    assert "moments in bfloat16, and here they are float32" in said


def assert_read_alike(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        read = [key for key in READ if key in theirs]
        assert read == [key for key in READ if key in mine]
        for key in read:
            assert mine[key] == pytest.approx(theirs[key], rel=0.02, abs=0.01), key


def of(layout):
    single, pairs = results()
    return single if layout == "single" else pairs[layout]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", WHOLE_HERE)
def test_a_policy_that_makes_room_after_each_step_takes_the_same_steps_bit_for_bit(layout, dtype):
    """Its checkpoint is written meanwhile, and a step is refused."""
    found = of(layout)["room"][dtype]
    assert found["same"]
    assert found["saved"]
    assert "call `restore` before a training step" in found["refused"]
    kept = {name for name, count in found["released"].items() if count}
    assert kept == {"parameters"}
    assert found["released"]["parameters"] == found["before"]["parameters"]
    assert all(found["before"].values())


def test_memory_that_runs_out_is_reported_with_phase_holders_and_keys():
    told, fix = results()[0]["out_of_memory"]
    assert "memory ran out in phase train; this rank's holds optimizer state" in told
    for holder in ("optimizer state", "gradients", "parameters", "references of gradient controls"):
        assert re.search(rf"{holder} \d\.\d MiB", told)
    assert "OutOfMemoryError: Tried to allocate 3.00 GiB" in told
    for key in ("policy.recompute: full", "policy.tokens_per_micro_batch: 48", "moment_offload"):
        assert key in fix

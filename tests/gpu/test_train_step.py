"""Whole training steps on one CUDA device (loss, backward, GAC, clipping, Adam), compared with the
CPU's in float32. Statements that the CPU alone can prove with the same program run everywhere;
those about bfloat16 on a CPU run in `make test-all`."""

from __future__ import annotations

import functools
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.hardware import DEVICE, ON_DEVICE, run_on_cpu, run_program
from tests.gradients import cosine
from tests.method_settings import CONTROLS
from tests.parallel import layouts
from tests.parallel.models import tensors_of
from tests.parallel.test_export import assert_same
from tests.thorough import thorough

RUNS = [
    pytest.param("cpu", "bfloat16", marks=thorough),
    pytest.param(DEVICE, "float32", marks=ON_DEVICE),
    pytest.param(DEVICE, "bfloat16", marks=ON_DEVICE),
]
RECOMPUTED = ("selective", "full")
ON_THE_CPU = "float32 on the CPU"
MODELS = ["tied", "packed", "mixture"]
"""`packed` is the tied model on packed rows: with Transformer Engine's kernel if it is available
and the models are BF16."""
FILES = {"packed": "tied"}
DECIDED = (
    "gac/",
    "matched_norm/",
    "matched_lr/",
    "momentum/",
    "displacement/",
    "policy/lr_scale",
    "policy/beta1",
)
MEGATRONS = "lift_fresh megatron/core/pipeline_parallel/schedules.py"
"""The token count of Megatron's schedule, which begins with a 0 on the host."""
# Tolerances: relative for losses and norms, absolute for cosines and log-probs.
TOLERANCES = {
    "float32": {
        "loss": 1e-5,
        "norm": 1e-4,
        "cosine": 1e-5,
        "logprob": 1e-5,
        "gradient": 1e-8,
        "decision": 1e-3,
    },
    "bfloat16": {
        "loss": 0.2,
        "norm": 0.2,
        "cosine": 0.1,
        "logprob": 0.25,
        "gradient": 0.02,
        "decision": 0.2,
    },
}


def trained(device: str, dtype: str) -> dict:
    if (device, dtype) != ("cpu", "float32"):
        trained("cpu", "float32")  # the others continue from its checkpoint
    found = _trained(device, dtype)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _trained(device: str, dtype: str) -> dict | Exception:
    """Return the results or the failure, so that a failure is awaited once and not by every
    test."""
    output = layouts.temporary() / "results.pt"
    arguments = [device, dtype, layouts.material(layouts.MAX_LAYERS), output, checkpoint()]
    try:
        if device == "cpu":
            run_on_cpu("tests.gpu.train_program", arguments)
        else:
            run_program("tests.gpu.train_program", arguments)
    except (AssertionError, subprocess.SubprocessError) as failure:
        return failure
    return torch.load(output, weights_only=False, map_location="cpu")


@functools.cache
def checkpoint() -> Path:
    return layouts.temporary() / "checkpoint"


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


@pytest.mark.parametrize("model", MODELS)
def test_the_steps_compared_project_clip_and_move_every_tensor(model):
    found = trained("cpu", "float32")[model]
    assert [step["policy/skipped"] for step in found["steps"]] == [0.0, 0.0, 0.0]
    assert found["steps"][1]["gac/regime"] == 1
    assert found["steps"][0]["policy/grad_norm"] > 0.5
    start = tensors_of(layouts.material(layouts.MAX_LAYERS) / FILES.get(model, model))
    for name, tensor in found["weights"].items():
        assert not torch.equal(tensor, start[name]), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_the_model_lies_on_its_device_in_its_dtype(device, dtype, model):
    found = trained(device, dtype)[model]
    assert found["devices"] == {device}
    # The router's GEMM, not its weight, is float32.
    assert found["dtypes"] == {f"torch.{dtype}"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_adam_is_the_installed_fused_kernel(device, dtype, model):
    fused = (name for name in ("transformer_engine", "apex") if find_spec(name) is not None)
    expected = next(fused, "torch") if device == "cuda" else "torch"
    assert trained(device, dtype)[model]["adam"] == {expected}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_loss_and_gradient_norm_of_the_first_step_are_those_of_float32_on_the_cpu(
    device, dtype, model, figure
):
    found = trained(device, dtype)[model]["steps"][0]
    expected = trained("cpu", "float32")[model]["steps"][0]
    allowed = TOLERANCES[dtype]
    # A loss near 0 is a sum of terms that cancel.
    whole = abs(expected["policy/loss"]) + 0.1
    for name, key, unit in (
        ("loss", "policy/loss", whole),
        ("norm", "policy/grad_norm", expected["policy/grad_norm"]),
    ):
        figure(
            f"{name} of the first step, {model}, {dtype}, relative error",
            abs(found[key] - expected[key]) / unit,
            at_most=allowed[name],
            against=ON_THE_CPU,
        )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_the_backward_pass_points_where_float32s_on_the_cpu_does(device, dtype, model, figure):
    found, expected = (
        flat(each[model]["gradient"])
        for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    figure(
        f"cosine of the gradient, {model}, {dtype}",
        cosine(found, expected),
        at_least=1.0 - TOLERANCES[dtype]["gradient"],
        against=ON_THE_CPU,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_gacs_cosine_and_regime_are_those_of_float32_on_the_cpu(device, dtype, model, figure):
    found = trained(device, dtype)[model]["steps"]
    expected = trained("cpu", "float32")[model]["steps"]
    assert "gac/cosine" not in found[0]
    assert found[1]["gac/regime"] == expected[1]["gac/regime"] == 1
    figure(
        f"GAC's cosine, {model}, {dtype}, error",
        abs(found[1]["gac/cosine"] - expected[1]["gac/cosine"]),
        at_most=TOLERANCES[dtype]["cosine"],
        against=ON_THE_CPU,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_scores_are_float32_log_probs_near_those_of_the_cpu(device, dtype, model, figure):
    found, expected = (
        each[model]["scores"] for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    assert {mine.dtype for mine in found} == {np.dtype("float32")}
    figure(
        f"scores, {model}, {dtype}, largest mean error of a response",
        np.max([abs(m - e).mean() for m, e in zip(found, expected, strict=True)]),
        at_most=TOLERANCES[dtype]["logprob"],
        unit="nats",
        against=ON_THE_CPU,
    )


def assert_moved_alike(found: torch.Tensor, expected: torch.Tensor, dtype: str, lr: float) -> None:
    """Compare after three steps of at most `lr` each; bfloat16 adds the rounding of the weights."""
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0.0)
    else:
        rounding = expected.abs() / 256
        assert bool(((found - expected).abs() <= rounding + 2 * 3 * lr).all())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_three_steps_move_the_weights_as_float32_on_the_cpu_does(device, dtype, model):
    found, expected = (
        flat(each[model]["weights"]) for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    assert_moved_alike(found, expected, dtype, 1e-3)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_steps_under_every_control_are_those_of_float32_on_the_cpu(device, dtype, control, figure):
    found, expected = (
        each["controls"][control] for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    lr = 1e-3 * max(step["policy/lr_scale"] for step in expected["steps"])
    assert_moved_alike(flat(found["weights"]), flat(expected["weights"]), dtype, lr)
    errors = []
    for mine, theirs in zip(found["steps"], expected["steps"], strict=True):
        decided = [key for key in theirs if key.startswith(DECIDED)]
        assert decided == [key for key in mine if key.startswith(DECIDED)]
        errors += [abs(mine[key] - theirs[key]) / max(1.0, abs(theirs[key])) for key in decided]
    figure(
        f"decisions of {control}, {dtype}, largest error",
        np.max(errors),
        at_most=TOLERANCES[dtype]["decision"],
        against=ON_THE_CPU,
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_gacs_cosine_is_that_of_the_same_shards_in_float64(device, dtype, figure):
    hold_gacs_cosine(figure, dtype, *trained(device, dtype)["cosines"], least=0.01)


def hold_gacs_cosine(figure, what: str, found: float, exact: float, *, least: float) -> None:
    """Compare GAC's cosine. least: size of the exact cosine below which an error is meaningless."""
    assert least < abs(exact) < 0.99
    figure(
        f"GAC's cosine over the model, {what}, error",
        abs(found - exact),
        at_most=1e-6,
        against="the same shards, put together in float64",
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_a_missing_gradient_moment_or_master_is_refused(device, dtype):
    refused = trained(device, dtype)["refusals"]
    replicated = "FP32Optimizer" if dtype == "float32" else "Float16OptimizerWithFloat16Params"
    assert refused.keys() == {
        f"{kind} over {adam}"
        for kind in ("DistributedOptimizer", replicated)
        for adam in ("Adam", "BlockAdam")
    }
    for said in map(dict, refused.values()):
        there = {name: said.pop(f"{name} there") for name in list(said) if "there" not in name}
        assert set(there.values()) == {"fine"}
        assert "decoupled_grad" in said["gradient"]
        assert "decoupled_grad" in said["update"]
        assert "holds it as torch.float16" in said["moment"]
        assert "exp_avg_sq in float32 or bfloat16 is needed" in said["saved"]
        assert "no float32 master" in said["master"]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_gradients_and_moments_in_bfloat16_move_the_weights_as_those_in_float32(
    device, dtype, figure
):
    """Compares the cosine of the movement, which bfloat16 weights round, and gradient norms."""
    found, expected = trained(device, dtype)["lean"]["cpu"], trained(device, dtype)["tied"]
    assert found["buffers"] == {f"torch.{dtype}"}
    start = flat(
        {n: t.float() for n, t in tensors_of(layouts.material(layouts.MAX_LAYERS) / "tied").items()}
    )
    figure(
        f"cosine of three steps with gradients and moments in bfloat16, {dtype}",
        cosine(flat(found["weights"]) - start, flat(expected["weights"]) - start),
        at_least=0.999 if dtype == "float32" else 0.98,
        against="those in float32",
    )
    figure(
        f"norms of gradients with gradients and moments in bfloat16, {dtype}, relative error",
        max(
            abs(mine["policy/grad_norm"] / theirs["policy/grad_norm"] - 1.0)
            for mine, theirs in zip(found["steps"], expected["steps"], strict=True)
        ),
        at_most=0.03,
        against="those in float32",
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_offloaded_moments_lie_in_page_locked_host_memory_and_change_no_bit(device, dtype):
    found = trained(device, dtype)["lean"]
    on_cuda = device == "cuda"
    assert found["cpu"]["moments"] == {("cpu", "torch.bfloat16", on_cuda)}
    assert found["none"]["moments"] == {(device, "torch.bfloat16", False)}
    assert_same(found["cpu"]["weights"], found["none"]["weights"])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_a_policy_that_makes_room_after_each_step_takes_the_same_steps_bit_for_bit(device, dtype):
    found = trained(device, dtype)["room"]
    assert found["same"]
    assert found["saved"]
    given_up = ("gradients", "optimizer state", "references of gradient controls")
    assert all(found["before"][each] > 0 == found["released"][each] for each in given_up)


@pytest.mark.parametrize("sequence", ["padded", "packed"])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_no_micro_batch_waits_for_the_device_or_uploads_by_itself(device, dtype, sequence):
    found = trained(device, dtype)["host_syncs"][sequence]
    assert found["micro_batches"] > 2
    assert [each for each in found["seen"] if not each.startswith(MEGATRONS)] == []
    assert found["uploads"] == 1


@pytest.mark.parametrize("kind", RECOMPUTED)
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_recomputation_changes_no_bit_and_keeps_less(device, dtype, kind, figure):
    found, plain = (trained(device, dtype)["recompute"][each] for each in (kind, "none"))
    if (device, dtype, kind) == ("cpu", "bfloat16", "selective"):
        # On a CPU, attention of short bfloat16 rows keeps only its inputs in any case.
        assert found["peak"] == pytest.approx(plain["peak"], rel=1e-3)
    else:
        assert found["peak"] < plain["peak"]
    figure(
        f"{kind} recomputation, {dtype}, largest difference of gradients and weights",
        found["furthest"],
        at_most=0.0,
        against="the same steps without it",
    )
    assert found["same"]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), *RUNS])
def test_a_resumed_run_continues_bit_for_bit(device, dtype):
    found = trained(device, dtype)["resumed"]
    assert_same(found["loaded"], found["saved"])
    through, resumed = found["runs"]
    assert_same(resumed["weights"], through["weights"])
    for mine, theirs in zip(resumed["steps"], through["steps"], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("time/")} == {
            k: v for k, v in theirs.items() if not k.startswith("time/")
        }


@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_a_checkpoint_of_the_cpu_continues_where_it_ended(device, dtype, figure):
    found, expected = (
        each["carried"] for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    assert found["state"] == expected["state"] == {"version": 2}
    kind = getattr(torch, dtype)
    assert torch.equal(flat(found["begun"]), flat(expected["begun"]).to(kind).double())
    assert_moved_alike(flat(found["weights"]), flat(expected["weights"]), dtype, 1e-3)
    (mine,), (theirs,) = found["steps"], expected["steps"]
    figure(
        f"gradient's norm after a checkpoint of the CPU, {dtype}, relative error",
        abs(mine["policy/grad_norm"] / theirs["policy/grad_norm"] - 1.0),
        at_most=TOLERANCES[dtype]["norm"],
        against=ON_THE_CPU,
    )


@thorough
def test_the_program_that_compares_families_of_layers_runs_on_a_cpu():
    output = layouts.temporary() / "layers.pt"
    arguments = ["cpu", layouts.material(layouts.MAX_LAYERS), output, "local", "local"]
    run_on_cpu("tests.gpu.layers_program", arguments)
    for one, other in torch.load(output, weights_only=False).values():
        assert one["layers"] == other["layers"] == "local"
        for kind, tensors in other["saved"].items():
            assert_same(one["from_other"][kind], tensors)

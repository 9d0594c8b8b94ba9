"""Whole training steps on one CUDA device (loss, backward, GAC, clipping, Adam) against the CPU's in
float32; what the CPU alone can show of the same program runs everywhere."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import pytest
import torch

from megatron_async_rl.gradients import CUDA_BLOCK, Gradients, GradientShard, products_of
from megatron_async_rl.policy.logprobs import vocab_parallel_logprobs
from tests.parallel import layouts
from tests.parallel.models import tensors_of
from tests.parallel.ranks import run_alone

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=f"needs a CUDA device; torch {torch.__version__} sees none",
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
RUNS = [
    ("cpu", "bfloat16"),
    pytest.param("cuda", "float32", marks=ON_CUDA),
    pytest.param("cuda", "bfloat16", marks=ON_CUDA),
]
MODELS = ["tied", "packed", "mixture"]
"""`packed` is the tied one on packed rows: by Transformer Engine's kernel where there is one and the
models are BF16."""
FILES = {"packed": "tied"}
# Of losses and norms relatively, of cosines and log-probs absolutely.
TOLERANCES = {
    "float32": {"loss": 1e-5, "norm": 1e-4, "cosine": 1e-5, "logprob": 1e-5, "gradient": 1e-8},
    "bfloat16": {"loss": 0.2, "norm": 0.2, "cosine": 0.1, "logprob": 0.25, "gradient": 0.02},
}


@functools.cache
def trained(device: str, dtype: str) -> dict:
    output = layouts.temporary() / "results.pt"
    if device == "cpu":
        run_alone("tests.gpu.train_program", [device, dtype, layouts.material(), output])
        return torch.load(output, weights_only=False)
    # A process of its own, which has touched no CUDA before; without torchrun's variables, a world
    # of one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    program = [sys.executable, "-m", "tests.gpu.train_program"]
    subprocess.run(
        [*program, device, dtype, layouts.material(), output],
        check=True,
        timeout=300,
        env=environment,
    )
    return torch.load(output, weights_only=False, map_location="cpu")


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(left @ right / (left.norm() * right.norm()))


@pytest.mark.parametrize("model", MODELS)
def test_the_steps_compared_project_clip_and_move_every_tensor(model):
    found = trained("cpu", "float32")[model]
    assert [step["policy/skipped"] for step in found["steps"]] == [0.0, 0.0, 0.0]
    assert found["steps"][1]["gac/regime"] == 1
    assert found["steps"][0]["policy/grad_norm"] > 0.5
    start = tensors_of(layouts.material() / FILES.get(model, model))
    for name, tensor in found["weights"].items():
        assert not torch.equal(tensor, start[name]), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_the_model_lies_on_its_device_in_its_dtype(device, dtype, model):
    found = trained(device, dtype)[model]
    assert found["devices"] == {device}
    # The router's product, not its weight, is float32.
    assert found["dtypes"] == {f"torch.{dtype}"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_loss_and_gradient_norm_of_the_first_step_are_those_of_float32_on_the_cpu(
    device, dtype, model
):
    found = trained(device, dtype)[model]["steps"][0]
    expected = trained("cpu", "float32")[model]["steps"][0]
    allowed = TOLERANCES[dtype]
    assert found["policy/loss"] == pytest.approx(
        expected["policy/loss"], rel=allowed["loss"], abs=0.1 * allowed["loss"]
    )
    assert found["policy/grad_norm"] == pytest.approx(
        expected["policy/grad_norm"], rel=allowed["norm"]
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_the_backward_pass_points_where_float32s_on_the_cpu_does(device, dtype, model):
    found, expected = (
        flat(each[model]["gradient"])
        for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    assert cosine(found, expected) > 1.0 - TOLERANCES[dtype]["gradient"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_gacs_cosine_and_regime_are_those_of_float32_on_the_cpu(device, dtype, model):
    found = trained(device, dtype)[model]["steps"]
    expected = trained("cpu", "float32")[model]["steps"]
    assert "gac/cosine" not in found[0]
    assert found[1]["gac/regime"] == expected[1]["gac/regime"] == 1
    assert found[1]["gac/cosine"] == pytest.approx(
        expected[1]["gac/cosine"], abs=TOLERANCES[dtype]["cosine"]
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_scores_are_float32_log_probs_near_those_of_the_cpu(device, dtype, model):
    found, expected = (
        each[model]["scores"] for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == "float32"
        assert abs(mine - theirs).mean() < TOLERANCES[dtype]["logprob"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_three_steps_move_the_weights_as_float32_on_the_cpu_does(device, dtype, model):
    found, expected = (
        flat(each[model]["weights"]) for each in (trained(device, dtype), trained("cpu", "float32"))
    )
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0.0)
    else:
        # Adam's step is at most the learning rate; beyond that is the rounding of the weights.
        rounding = expected.abs() / 256
        assert bool(((found - expected).abs() <= rounding + 2 * 3 * 1e-3).all())


@pytest.mark.parametrize("device", DEVICES)
def test_the_cosine_of_long_shards_is_exact_to_a_millionth(device):
    """Longer than one block on CUDA, so that blocks are added up, too."""
    draw = torch.Generator().manual_seed(0)
    sizes = (CUDA_BLOCK + 12_345 if device == "cuda" else 300_001, 4097, 7)
    left = [torch.randn(size, generator=draw) for size in sizes]
    right = [0.3 * one + torch.randn(one.shape, generator=draw) for one in left]
    exact = cosine(torch.cat(left).double(), torch.cat(right).double())
    shards = tuple(GradientShard(one.to(device), True) for one in left)

    class Alone(Gradients):
        def all_reduce_sum(self, values):
            return values

    product, norm, other = products_of(
        Alone(shards, None, torch.device(device)),
        (shard.grad for shard in shards),
        (one.to(device) for one in right),
    )
    assert product / math.sqrt(norm * other) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_of_bfloat16_hidden_states_and_their_gradient_are_float32s(device):
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, 64, generator=draw).bfloat16()
    weight = torch.randn(1000, 64, generator=draw).bfloat16()
    targets = torch.randint(0, 1000, (96,), generator=draw)
    exact_hidden = hidden.double().requires_grad_()
    exact = torch.log_softmax(exact_hidden @ weight.double().t(), -1)
    exact = exact.gather(1, targets[:, None])[:, 0]
    exact.sum().backward()

    held = hidden.to(device).requires_grad_()
    logp, _, _ = vocab_parallel_logprobs(
        held, weight.to(device), targets.to(device), 1.0, 40, vocab_size=1000
    )
    logp.sum().backward()
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double().cpu(), exact, atol=1e-4, rtol=0.0)
    assert cosine(held.grad.double().cpu().flatten(), exact_hidden.grad.flatten()) > 0.9999

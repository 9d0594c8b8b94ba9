"""The reference of FP8 has the errors that its numbers have, and is the step controls' own where
both have blocks of 128 in a row; docs/models.md states its effect on a model."""

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from megatron_async_rl.config.policy import RECIPES
from megatron_async_rl.controls.quantize import dequantize
from tests.cases import looped
from tests.float8 import blockwise, restored, tensorwise
from tests.gpu import test_fp8
from tests.gpu.fp8_emulation import ROUNDINGS
from tests.quantized import quantize
from tests.tiny_models import save_tiny_model

DOCS = Path(__file__).parents[2] / "docs"

SHAPE = (256, 384)
STEP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Half of the distance of neighbours, over the lower one."""


def values(seed=0):
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(SHAPE, generator=draw)
    found[:128, :128] *= 1e4
    found[0, 200] = 30.0
    # The largest number of either type times a power of two, which a block's scale is then exactly.
    found[5, 3] = 448.0 * 2**10
    return found


WAYS = {
    "tensor": tensorwise,
    "rows": lambda matrix, dtype: blockwise(matrix, (1, 128), dtype),
    "squares": lambda matrix, dtype: blockwise(matrix, (128, 128), dtype),
}


@looped("dtype", STEP)
@looped("way", WAYS)
def test_what_is_restored_is_within_half_a_step_of_each_value(way, dtype):
    matrix = values()
    numbers, scales = WAYS[way](matrix, dtype)
    assert numbers.dtype == dtype
    smallest = torch.finfo(dtype).smallest_normal * scales
    within = torch.maximum(matrix.abs(), smallest) * STEP[dtype] * (1 + 1e-6)
    assert bool(((restored(numbers, scales) - matrix).abs() <= within).all())


@pytest.mark.parametrize("dtype", STEP)
def test_the_largest_value_of_a_tensor_becomes_the_largest_number(dtype):
    matrix = values()
    numbers, scale = tensorwise(matrix, dtype)
    assert numbers.float().abs().max() == torch.finfo(dtype).max
    assert scale.shape == ()
    assert float(scale) == pytest.approx(float(matrix.abs().max()) / torch.finfo(dtype).max)


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_a_block_has_the_smallest_power_of_two_that_fits(block, dtype):
    matrix = values()
    numbers, scales = blockwise(matrix, block, dtype)
    assert bool((torch.frexp(scales).mantissa == 0.5).all())
    for row in range(0, SHAPE[0], block[0]):
        for column in range(0, SHAPE[1], 128):
            place = slice(row, row + block[0]), slice(column, column + 128)
            assert len(scales[place].unique()) == 1
            largest = matrix[place].abs().max() / scales[place][0, 0]
            assert torch.finfo(dtype).max / 2 < largest <= torch.finfo(dtype).max
    assert bool(torch.isfinite(restored(numbers, scales)).all())


def test_rows_of_128_are_what_a_gradient_reference_keeps_bit_for_bit():
    matrix = values(1)
    numbers, scales = blockwise(matrix, (1, 128))
    kept, kept_scales = quantize(matrix, "fp8")
    assert torch.equal(numbers.view(torch.uint8).flatten(), kept.view(torch.uint8).flatten())
    assert torch.equal(scales.view(-1, 128)[:, :1], kept_scales)
    assert torch.equal(restored(numbers, scales), dequantize((kept, kept_scales), matrix.shape))


@pytest.mark.parametrize("way", WAYS)
def test_zeros_and_cut_blocks_stay_what_they_are(way):
    zeros = torch.zeros(130, 130)
    assert torch.equal(restored(*WAYS[way](zeros, torch.float8_e4m3fn)), zeros)
    ones = torch.ones(3, 130)
    torch.testing.assert_close(
        restored(*WAYS[way](ones, torch.float8_e4m3fn)), ones, rtol=1e-6, atol=0
    )


@functools.cache
def sampled(directory: Path):
    """A random model as test_fp8.py has it, in bfloat16 as engines do, and 16 responses of 64
    tokens that it sampled after prompts of 8."""
    import transformers

    sizes = {**test_fp8.SIZES, "tied": True, "vocab_size": 97, "scale": 2.0}
    path = save_tiny_model(directory / "model", seed=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = torch.randint(1, 97, (16, 8))
        length = {"min_new_tokens": 64, "max_new_tokens": 64, "pad_token_id": 0}
        mask = torch.ones_like(tokens)
        tokens = model.generate(tokens, attention_mask=mask, do_sample=True, top_k=0, **length)
    return model, tokens


@torch.no_grad()
def log_probs(model, tokens):
    """Log-probs of the responses."""
    logits = model(tokens).logits[:, 7:-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 8:, None])[..., 0]


def rounded(recipe, head):
    """A product of a layer as a policy with this recipe makes it; that of the output layer is not
    rounded."""
    inputs, weights, _ = ROUNDINGS[recipe]

    def forward(layer, values):
        if layer is head:
            return F.linear(values, layer.weight)
        flat = inputs(values.flatten(0, -2))
        return F.linear(flat, weights(layer.weight)).view(*values.shape[:-1], -1)

    return mock.patch.object(torch.nn.Linear, "forward", forward)


def told(recipe):
    """The recipe's numbers in docs/models.md."""
    (row,) = re.findall(
        rf"^\| `{recipe}` \| ([\d. |]+) \|$", (DOCS / "models.md").read_text(), re.M
    )
    return [float(cell) for cell in row.split("|")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_engines_differ_from_an_fp8_policy_as_documented(recipe, tmp_path_factory):
    model, tokens = sampled(tmp_path_factory.getbasetemp())
    engine = log_probs(model, tokens)
    with rounded(recipe, model.lm_head):
        apart = log_probs(model, tokens) - engine
    mean, largest, response = told(recipe)[:3]
    assert float(apart.abs().mean()) == pytest.approx(mean, rel=0.1)
    assert float(apart.abs().max()) == pytest.approx(largest, rel=0.25)
    assert float(apart.sum(1).std()) == pytest.approx(response, rel=0.25)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_pages_tolerances_are_those_that_a_gpu_is_held_to(recipe):
    rounded = test_fp8.ROUNDED[recipe]
    assert told(recipe)[3:] == [
        *(rounded[what] for what in ("logprob", "gradient", "norm")),
        test_fp8.BETWEEN_LAYOUTS[recipe],
    ]

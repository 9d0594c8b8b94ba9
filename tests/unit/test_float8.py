"""The reference of 8-bit floats has the errors that its numbers have, and is the step controls' own
where both have blocks of 128 in a row."""

import pytest
import torch

from megatron_async_rl.controls.quantize import dequantize, quantize
from tests.float8 import blockwise, restored, tensorwise

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


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("way", WAYS)
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

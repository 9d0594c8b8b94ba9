import pytest
import torch

from megatron_async_rl.weights.transport import tensor_digest

BASE = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def test_equal_tensors_have_equal_digests_whatever_their_strides():
    assert tensor_digest(BASE.t().contiguous().t()) == tensor_digest(BASE.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_one_changed_bit_changes_the_digest(dtype):
    tensor = BASE.to(dtype)
    other = tensor.clone()
    other.view(torch.uint8).view(-1)[5] ^= 1
    assert tensor_digest(tensor) != tensor_digest(other)


def test_shape_and_dtype_are_part_of_the_digest():
    assert (
        len(
            {
                tensor_digest(t)
                for t in (BASE, BASE.reshape(4, 3), BASE.view(torch.int32), BASE.double())
            }
        )
        == 4
    )


def test_empty_and_scalar_tensors_have_digests():
    assert (
        len({tensor_digest(t) for t in (torch.empty(0), torch.empty(0, 2), torch.tensor(1.0))}) == 3
    )

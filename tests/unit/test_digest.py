"""A digest is of a tensor's bytes at their places: the same however it is cut, another with any
change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_async_rl.weights import digest
from megatron_async_rl.weights.digest import (
    digest_text,
    partial_digest,
    partial_digests,
    tensor_digest,
)
from tests.thorough import examples

BASE = torch.arange(12, dtype=torch.float32).reshape(3, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Random bytes as a matrix, some of them with gaps between the rows."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns, gap = (draw(st.integers(*span)) for span in ((1, 9), (1, 40), (0, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = (rows, (columns + gap) * dtype.itemsize)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return raw.view(dtype)[:, :columns]


@given(matrices(), st.data())
@settings(max_examples=examples(60, 20), deadline=None)
def test_digests_of_parts_add_up_to_the_tensors_however_it_is_cut(
    matrix: Tensor, data: st.DataObject
) -> None:
    """Cut by rows, each of the two parts by columns somewhere else, and read in pieces of any
    size."""
    rows, columns = matrix.shape
    row, left, right = (data.draw(st.integers(0, n)) for n in (rows, columns, columns))
    total = torch.zeros(3, dtype=torch.int64)
    with mock.patch.object(digest, "PIECE_BYTES", data.draw(st.sampled_from([8, 64, 2**18]))):
        for first, block, cut in ((0, matrix[:row], left), (row, matrix[row:], right)):
            total += partial_digest(block[:, :cut], first)
            total += partial_digest(block[:, cut:], first, cut)
    assert digest_text(matrix.dtype, matrix.shape, total.tolist()) == tensor_digest(matrix)


@given(matrices(), st.data())
@settings(max_examples=examples(40, 20), deadline=None)
def test_swapped_rows_and_one_changed_bit_change_the_digest(
    matrix: Tensor, data: st.DataObject
) -> None:
    matrix = matrix.contiguous()
    raw = matrix.view(torch.uint8).clone()
    first, second = (data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
    swapped = raw.clone()
    swapped[[first, second]] = raw[[second, first]]
    same = torch.equal(swapped, raw)
    assert (tensor_digest(swapped.view(matrix.dtype)) == tensor_digest(matrix)) == same
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw.view(-1)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(raw.view(matrix.dtype)) != tensor_digest(matrix)


def test_values_of_a_known_tensor_stay_what_they_are() -> None:
    """Computed by hand in Python's integers, word by word."""
    mask = 2**64 - 1

    def key(seed: int, place: int) -> int:
        x = ((place + 1) * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return (x ^ x >> 31) | 1

    def by_hand(tensor: Tensor, zeros: int, rows: int, columns: int) -> int:
        total = 0
        for row, values in enumerate(tensor.view(torch.uint8).tolist()):
            line = bytes(zeros) + bytes(values)
            for at in range(0, len(line), 8):
                word = int.from_bytes(line[at : at + 8], "little")
                total += key(rows, row) * key(columns, at // 8) * word
        return total

    for tensor in (
        torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -0.25]]),
        torch.tensor([[1.0, -2.0, 3.0, 5.0], [0.5, 0.0, -0.25, -1.0]]),
    ):
        d1, d2 = by_hand(tensor, 0, 1, 3) % 2**64, by_hand(tensor, 4, 2, 4) % 2**64
        shape = f"2,{tensor.shape[1]}"
        for piece in (8, 2**18):  # where it lies, and copied
            with mock.patch.object(digest, "PIECE_BYTES", piece):
                assert tensor_digest(tensor) == f"float32[{shape}]:{d1:016x}{d2:016x}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_changed_bits_change_the_digest_wherever_they_are(dtype: torch.dtype) -> None:
    """Two highest bits of words have the same weight in a sum of odd multiples of words: they are
    elsewhere in the other sum's."""
    raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    digests = {tensor_digest(raw.view(dtype))}
    highest = [(row, byte) for row in range(4) for byte in range(3, 16, 4)]
    for one in highest:
        for other in highest[: highest.index(one)]:
            changed = raw.clone()
            changed[one] ^= 128
            changed[other] ^= 128
            digests.add(tensor_digest(changed.view(dtype)))
    assert len(digests) == 1 + 16 * 15 // 2


def test_rows_that_differ_in_signs_alone_are_not_swapped_unseen() -> None:
    rows = torch.tensor([[1.0, 2.0], [1.0, -2.0]])
    assert tensor_digest(rows) != tensor_digest(rows.flip(0))


def test_equal_tensors_have_equal_digests_whatever_their_strides() -> None:
    assert tensor_digest(BASE.t().contiguous().t()) == tensor_digest(BASE.clone())


def test_shape_and_dtype_are_part_of_the_digest() -> None:
    views = (BASE, BASE.reshape(4, 3), BASE.view(torch.int32), BASE.double(), torch.zeros(0, 2))
    assert len({tensor_digest(tensor) for tensor in (*views, torch.zeros(2, 0), BASE[0, 1])}) == 7


def test_a_tensor_of_more_dimensions_is_cut_by_its_first() -> None:
    cube = torch.randn(4, 3, 5)
    parts = partial_digest(cube[:3]) + partial_digest(cube[3:], row=9)
    assert digest_text(cube.dtype, cube.shape, parts.tolist()) == tensor_digest(cube)


@pytest.mark.parametrize(("first", "elements"), [(slice(0, 2), 8), (slice(0, 3), 16)])
def test_a_part_that_is_missing_or_there_twice_is_named(first: slice, elements: int) -> None:
    """Also where it holds zeros alone."""
    zeros = torch.zeros(3, 4)
    sums = partial_digest(zeros[first])
    if elements > 12:
        sums += partial_digest(zeros[:1])
    text = digest_text(zeros.dtype, zeros.shape, sums.tolist())
    assert text.endswith(f", of {elements} of 12 elements")


def test_parts_of_a_version_have_the_digests_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts in memory that later parts reuse, large ones where they lie, and narrow ones."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 256)
    parts = [
        (torch.randn(*shape), row, column)
        for shape in ((4, 6), (16, 8), (63, 1), (4, 6))
        for row, column in ((0, 0), (2, 3))
    ]
    found = partial_digests(iter(parts))
    monkeypatch.setattr(digest, "PIECE_BYTES", 0)
    assert torch.equal(found, torch.stack([partial_digest(*part) for part in parts]))
    assert partial_digests(iter(())).shape == (0, 3)


def test_threads_do_not_write_to_the_same_memory() -> None:
    def slot() -> object:
        return digest._slot_for(BASE, 0, 0)

    with ThreadPoolExecutor(1) as other:
        assert slot() is slot() is not other.submit(slot).result()


def test_inference_mode_and_default_device_do_not_matter() -> None:
    part = torch.randn(3, 7)
    with torch.inference_mode():
        first = tensor_digest(part)
    with torch.device("meta"):
        other = tensor_digest(part[:, :5])
    assert tensor_digest(part) == first
    assert tensor_digest(part[:, :5]) == other

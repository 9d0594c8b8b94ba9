"""Digests of tensors that add up from those of their parts, wherever the parts lie.

A tensor is a matrix, its last dimension across (one row, for a vector); a row is words of 8 bytes,
filled up with zeros, and twice as many of 4:

    d1 = sum of R1(row) W1(column) word     over all words of 8 bytes, modulo 2^64
    d2 = sum of R2(row) W2(column) word     over all words of 4 bytes, modulo 2^32

R and W are odd numbers that a place decides, from a seed for each. Both sums are linear in the bytes,
so a part adds up with the others by its place alone, at whatever byte it was cut.

Invariants:
- of one tensor every way to cut it gives the same digest, on every device;
- one changed element always changes it. Two tensors that differ in more agree with a probability of
  2^-64, but where they differ only in the last bytes of words, which reach no more than the highest
  bits of a sum: every fourth number of 16 bits, 2^-30; every eighth of 8 bits, 2^-14. It guards
  against wrong, missing, stale, swapped and damaged bytes, and is no signature against somebody who
  makes bytes to fit;
- beside the parts, memory holds the keys of their rows and columns; where a part is cut within a
  word or lies on CUDA, also one piece of PIECE_BYTES, or a row that is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

WORD = 8
"""Bytes."""
PIECE_BYTES = 2**18
CUDA_BYTES = 2**26
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS = (1, 2), (3, 4)
"""Seeds of d1 and d2."""
_known: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of that shape."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def partial_digest(part: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """[d1, d2, elements] of a part whose first element is at (`row`, `column`) of its tensor; int64
    on the part's device. Those of parts that do not overlap add up to that of the tensor.

    part: a matrix, or of any shape where it has whole rows of a tensor of more dimensions.
    """
    rows, columns = matrix_shape(part.shape)
    size = part.element_size()
    sums = torch.zeros(3, dtype=torch.int64, device=part.device)
    sums[2] = rows * columns
    if not rows * columns:
        return sums
    bits = part.detach().reshape(rows, columns).view(_BITS[size])
    first, lead = divmod(column, WORD // size)
    words = -(-(lead + columns) * size // WORD)

    whole = _lies_in_words(bits, lead)
    on_host = part.device.type == "cpu"
    tall = max(1, (PIECE_BYTES if on_host else CUDA_BYTES) // (words * WORD))
    for start in range(0, rows, rows if whole and on_host else tall):
        block = bits if whole and on_host else bits[start : start + tall]
        piece = block.view(torch.int64) if whole else _words(block, lead, words)
        for which, read in enumerate((piece, piece.view(torch.int32))):
            of_words = _over_rows(read, _keys(_ROWS[which], row + start, len(read), read))
            per_word = read.shape[1] // words
            across = _keys(_COLUMNS[which], first * per_word, words * per_word, read)
            sums[which] += (of_words * across).sum(dtype=torch.int64)
    sums[1] &= 2**32 - 1
    return sums


def digest_text(dtype: torch.dtype, shape: Sequence[int], sums: Sequence[int]) -> str:
    """A tensor's digest in words, from what `partial_digest` gave of its parts, added up."""
    d1, d2, elements = sums
    kind = f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace(" ", "")
    some = "" if elements == prod(shape) else f", of {elements} of {prod(shape)} elements"
    return f"{kind}:{d1 % 2**64:016x}{d2 % 2**32:08x}{some}"


def tensor_digest(tensor: Tensor) -> str:
    """A whole tensor's digest; strides and device do not matter."""
    return digest_text(tensor.dtype, tensor.shape, partial_digest(tensor).tolist())


def _lies_in_words(bits: Tensor, lead: int) -> bool:
    """True where its memory can be read as words of its tensor's rows."""
    placed = (bits.storage_offset(), bits.stride(0), bits.shape[1], lead)
    return bits.stride(1) == 1 and not any(n * bits.element_size() % WORD for n in placed)


def _over_rows(words: Tensor, keys: Tensor) -> Tensor:
    """[words]: sums over the rows, modulo 2^64 or 2^32."""
    if words.device.type == "cpu":
        return torch.mv(words.t(), keys)
    # CUDA has no products of integer matrices.
    return (words * keys[:, None]).sum(0, dtype=words.dtype)


def _words(block: Tensor, lead: int, words: int) -> Tensor:
    """The block as words, [rows, words] int64; the first has `lead` elements before the block's."""
    filled = block.new_zeros(block.shape[0], words * WORD // block.element_size())
    filled[:, lead : lead + block.shape[1]] = block
    return filled.view(torch.int64)


def _keys(seed: int, start: int, count: int, like: Tensor) -> Tensor:
    """[count]: the odd numbers of these places, int64 or their last 32 bits."""
    known = _known.get((seed, like.dtype, like.device))
    if known is None or len(known) < start + count:
        numbers = _odd(seed, max(4096, 2 * (start + count)))
        if like.dtype == torch.int32:
            numbers = numbers.view(torch.int32)[::2]  # little-endian
        known = _known[seed, like.dtype, like.device] = numbers.contiguous().to(like.device)
    return known[start : start + count]


def _odd(seed: int, count: int) -> Tensor:
    """The first numbers of splitmix64, made odd; [count] int64."""
    x = torch.arange(1, count + 1) * _signed(0x9E3779B97F4A7C15) + _signed(
        seed * 0xD1B54A32D192ED03
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number

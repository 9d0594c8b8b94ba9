"""Digests of tensors. The digests of a tensor's parts add up to its digest, wherever it is cut.

A tensor is treated as a matrix with its last dimension as columns (a vector is one row). A row is
read as words of 8 bytes, padded with zeros; for the second sum, 4 bytes of zeros come first:

    d1 = sum of R1(row) W1(column) word     over all words, modulo 2^64
    d2 = sum of R2(row) W2(column) word     over all words half a word later, modulo 2^64

R and W are odd numbers that depend on the position, with a different seed for each sum. Both sums
are linear in the bytes, so the position of a part is enough to add it, at whatever byte it was cut.

Invariants:
- the digest of a tensor does not depend on how it is cut, nor on the device;
- one changed element always changes the digest. Two tensors that differ in more elements have equal
  digests with a probability of at most 2^-32, and 2^-120 if they differ in whole words. The highest
  bit of a word contributes only a parity to a sum, as all keys are odd, but it is in the middle of
  a word of the other sum. A digest protects against wrong, missing, stale, swapped and damaged
  bytes; it is not a signature against forged bytes;
- besides the parts, memory holds the keys of their rows and columns, a slot of at most PIECE_BYTES
  for each of the last SLOTS kinds of small parts, and, for a part that is cut within a word or on
  CUDA, one piece of PIECE_BYTES, or one row if that is larger.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

WORD, HALF = 8, 4
"""Size of a piece in bytes."""
PIECE_BYTES = 2**18
CUDA_BYTES = 2**26
SLOTS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS = (1, 2), (3, 4)
"""Seeds of d1 and d2."""
_known: dict[tuple[int, torch.device], Tensor] = {}
_own = threading.local()
"""Slots of a thread: two threads must not write to one slot."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor of that shape."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def partial_digest(part: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """Return [d1, d2, elements] of a part whose first element is at (`row`, `column`) of its
    tensor; int64 on the part's device. The results of parts that do not overlap add up to the
    tensor's.

    part: a matrix, or whole rows of a tensor of more dimensions, in any shape.
    """
    slot = _slot_for(part, row, column)
    return _large(part, row, column) if slot is None else torch.stack(slot.sums(part.detach()))


def partial_digests(parts: Iterable[tuple[Tensor, int, int]]) -> Tensor:
    """Return the results of `partial_digest` for parts and their places, [parts, 3] on the CPU.
    Each part is read before the next is requested."""
    found: list[Tensor] = []
    for part, row, column in parts:
        slot = _slot_for(part, row, column)
        found += _large(part, row, column).unbind() if slot is None else slot.sums(part.detach())
    # Stacked once: a call for each small part would take as long as its digest.
    return torch.stack(found).view(-1, 3).cpu() if found else torch.zeros(0, 3, dtype=torch.int64)


def _large(part: Tensor, row: int, column: int) -> Tensor:
    rows, columns = matrix_shape(part.shape)
    size = part.element_size()
    on_host = part.device.type == "cpu"
    sums = torch.zeros(3, dtype=torch.int64, device=part.device)
    sums[2] = rows * columns
    if not rows * columns:
        return sums
    # As integers: equal digests mean equal bits, NaN and -0.0 included.
    bits = part.detach().reshape(rows, columns).view(_BITS[size])
    if size > HALF:
        bits, size, column = bits.contiguous().view(_BITS[HALF]), HALF, size // HALF * column
    # Words start at the tensor's first column, wherever the part was cut.
    first, lead = divmod(column, WORD // size)

    row_bytes = bits.shape[1] * size
    in_place = on_host and rows * row_bytes > PIECE_BYTES and _lies_in_words(bits, lead)
    tall = max(1, (PIECE_BYTES if on_host else CUDA_BYTES) // (row_bytes + WORD))
    for start in range(0, rows, rows if in_place else tall):
        block = bits if in_place else bits[start : start + tall]
        for which, later in enumerate((0, HALF)):
            read = _words_in_place if in_place else _words
            for at, words in read(block, lead * size + later):
                keys = _keys(_ROWS[which], row + start, len(words), words.device)
                across = _keys(_COLUMNS[which], first + at, words.shape[1], words.device)
                sums[which] += (_over_rows(words, keys) * across).sum()
    return sums


def digest_text(dtype: torch.dtype, shape: Sequence[int], sums: Sequence[int]) -> str:
    """Return a tensor's digest as text, from the sums of `partial_digest` over its parts."""
    d1, d2, elements = sums
    some = "" if elements == prod(shape) else f", of {elements} of {prod(shape)} elements"
    return f"{_kind(dtype, tuple(shape))}:{d1 % 2**64:016x}{d2 % 2**64:016x}{some}"


@functools.cache
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace(" ", "")


def tensor_digest(tensor: Tensor) -> str:
    """Return a whole tensor's digest; strides and device do not matter."""
    return digest_text(tensor.dtype, tensor.shape, partial_digest(tensor).tolist())


class _Slot:
    """Memory and keys for small parts with the same shape at the same place. Everything that does
    not depend on their bytes is computed once: it would take longer than the sums."""

    # A tensor made in inference mode cannot be written outside of it.
    @torch.inference_mode(False)
    def __init__(self, dtype: torch.dtype, rows: int, columns: int, row: int, column: int) -> None:
        first, lead = divmod(column * dtype.itemsize, WORD)
        # A word of zeros follows each row, and one comes before the first: a word that begins half
        # a word earlier then has no byte of another row.
        width = -(-(lead + columns * dtype.itemsize) // WORD) + 1
        memory = torch.zeros(1 + rows * width, dtype=torch.int64, device="cpu")
        start = lead // dtype.itemsize
        # A copy within a dtype keeps all bits.
        self._place = memory[1:].view(rows, width).view(dtype)[:, start : start + columns]
        self._shape = self._place.shape
        self._elements = torch.tensor(rows * columns, device="cpu")
        self._read = []
        for which, earlier in enumerate((0, HALF)):
            place = memory.untyped_storage()[WORD - earlier : WORD * len(memory) - earlier]
            empty = torch.empty(0, dtype=torch.int64, device="cpu")
            words = empty.set_(place, 0, (rows * width,))
            keys = _keys(_ROWS[which], row, rows, memory.device)
            across = _keys(_COLUMNS[which], first, width, memory.device)
            self._read.append((words, (keys[:, None] * across).flatten()))

    def sums(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the elements of the result of `partial_digest`."""
        self._place.copy_(part if part.shape == self._shape else part.reshape(self._shape))
        (words, keys), (later, later_keys) = self._read
        return words.dot(keys), later.dot(later_keys), self._elements


def _slot_for(part: Tensor, row: int, column: int) -> _Slot | None:
    """Return the slot for a small part on the CPU; null for other parts."""
    if not part.is_cpu or part.nbytes > PIECE_BYTES or part.dim() == 0:
        return None
    rows, columns = part.shape if part.dim() == 2 else matrix_shape(part.shape)
    # Narrow rows would fill it with zeros between them.
    if not 0 < rows * (columns * part.itemsize + WORD) <= 2 * PIECE_BYTES:
        return None
    return _slot(part.dtype, rows, columns, row, column)


def _slot(*place: Any) -> _Slot:
    if not hasattr(_own, "slots"):
        _own.slots = functools.lru_cache(SLOTS)(_Slot)
    slot: _Slot = _own.slots(*place)
    return slot


def _lies_in_words(bits: Tensor, lead: int) -> bool:
    """Return True if the memory can be read as words of the tensor's rows."""
    placed = (bits.storage_offset(), bits.stride(0), bits.shape[1], lead)
    return bits.stride(1) == 1 and not any(n * bits.element_size() % WORD for n in placed)


def _over_rows(words: Tensor, keys: Tensor) -> Tensor:
    """Return the sums over the rows, modulo 2^64; [words]."""
    if words.device.type == "cpu":
        return torch.mv(words.t(), keys)
    # CUDA has no matrix product of integers.
    return (words * keys[:, None]).sum(0)


def _words(block: Tensor, lead: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the block as words, [rows, words] int64, behind `lead` bytes of zeros, and the first
    word's number."""
    size = block.element_size()
    end = lead // size + block.shape[1]
    filled = block.new_zeros(len(block), -(-end * size // WORD) * WORD // size)
    # Zeros around the part do not change a sum.
    filled[:, lead // size : end] = block
    yield 0, filled.view(torch.int64)


def _words_in_place(bits: Tensor, lead: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the same as `_words` without a copy, for memory aligned to words. lead: 0 or half a
    word."""
    if not lead:
        yield 0, bits.view(torch.int64)
        return
    halves = bits.view(torch.int32)
    rows, count = halves.shape
    yield 0, halves[:, :1].long() << 32
    yield count // 2, halves[:, -1:].long() & 2**32 - 1
    if count > 2:
        start = halves.storage_offset() * HALF + HALF
        memory = bits.untyped_storage()[
            start : start + (rows - 1) * halves.stride(0) * HALF + (count - 2) * HALF
        ]
        words = torch.empty(0, dtype=torch.int64, device="cpu")
        yield 1, words.set_(memory, 0, (rows, count // 2 - 1), (halves.stride(0) // 2, 1))


def _keys(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the odd numbers of these positions; [count] int64."""
    known = _known.get((seed, device))
    if known is None or len(known) < start + count:
        # Twice as many as needed, so that growing parts rarely compute new ones.
        known = _known[seed, device] = _odd(seed, max(4096, 2 * (start + count))).to(device)
    return known[start : start + count]


def _odd(seed: int, count: int) -> Tensor:
    """Return the first numbers of splitmix64, made odd; [count] int64."""
    x = torch.arange(1, count + 1, device="cpu")
    x = x * _signed(0x9E3779B97F4A7C15) + _signed(seed * 0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number

"""Digests of the weights that an engine's workers loaded, for all ways in which loaders split and
fuse tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_async_rl.rollout.vllm.loaded import Loaded, LoadWatch, digests_of
from megatron_async_rl.weights.digest import tensor_digest

Offer = Callable[[str], Tensor]


@pytest.fixture
def sent() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 8), "bias": (8,), "one": (1,)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


@contextmanager
def watched(sent: dict[str, Tensor], *lasting: Tensor) -> Iterator[tuple[LoadWatch, Offer]]:
    watch = LoadWatch()
    watch.begin(lasting)

    def offer(name: str) -> Tensor:
        watch.offer(name, sent[name])
        return sent[name]

    with watch:
        yield watch, offer


def expected(sent: dict[str, Tensor], *names: str) -> dict[str, str]:
    return {name: tensor_digest(sent[name]) for name in names}


def fused(sent: dict[str, Tensor], rank: int, workers: int) -> dict[str, Loaded]:
    """Load a worker's part of queries, keys and values into one parameter, and its columns of o.
    Keys and values have two heads of 2 rows, so with four workers, two workers hold each head."""
    heads = min(workers, 2)
    own = 8 // workers + 2 * (4 // heads)
    qkv, o = (
        torch.empty(own, 6).to(torch.bfloat16),
        torch.empty(6, 8 // workers, dtype=torch.bfloat16),
    )
    with watched(sent, qkv) as (watch, offer):
        start = 0
        for name in ("q", "k", "v"):
            parts = workers if name == "q" else heads
            size = len(sent[name]) // parts
            part = offer(name).narrow(0, rank * parts // workers * size, size)
            qkv.narrow(0, start, size).copy_(part)
            start += size
        o.copy_(offer("o").narrow(1, rank * o.shape[1], o.shape[1]))
        o.zero_()  # temporary memory, which is reused after packing
    return watch.loaded()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_digests_are_the_trainers_over_any_number_of_workers(
    sent: dict[str, Tensor], workers: int
) -> None:
    loaded = [fused(sent, rank, workers) for rank in range(workers)]
    assert digests_of(loaded) == expected(sent, "q", "k", "v", "o")
    if workers > 1:
        assert digests_of(loaded[1:])["q"].endswith("elements")


def test_a_lasting_parameter_is_read_back_when_the_update_ends(sent: dict[str, Tensor]) -> None:
    parameter = torch.zeros_like(sent["q"])
    with watched(sent, parameter) as (watch, offer):
        parameter.copy_(offer("q"))
    parameter.view(torch.int16)[3, 2] ^= 1
    assert digests_of([watch.loaded()]) == expected({"q": parameter}, "q")


def test_temporary_memory_is_read_back_at_once(sent: dict[str, Tensor]) -> None:
    scratch = torch.empty_like(sent["q"])
    with watched(sent) as (watch, offer):
        scratch.copy_(offer("q"))
        scratch[:4].copy_(offer("k"))
        watch.take(offer("v")[1:])
    found = digests_of([watch.loaded()])
    assert {name: found[name] for name in ("q", "k")} == expected(sent, "q", "k")
    assert found["v"].endswith("of 18 of 24 elements")


def test_memory_of_a_narrower_dtype_has_another_digest(
    sent: dict[str, Tensor],
) -> None:
    with watched(sent) as (watch, offer):
        torch.empty(8, 6, dtype=torch.float8_e4m3fn).copy_(offer("q"))
    assert digests_of([watch.loaded()])["q"] != tensor_digest(sent["q"])


def test_a_temporary_copy_of_a_part_keeps_its_position(sent: dict[str, Tensor]) -> None:
    """vLLM copies the columns of an expert to temporary memory, and that into the parameter by
    rows."""
    memory = torch.empty(6, 8)
    with watched(sent) as (watch, offer):
        whole = offer("o")
        for half in (slice(0, 4), slice(4, 8)):
            part = whole[:, half].contiguous()
            for rows in (slice(0, 2), slice(2, 6)):
                memory[rows, half].copy_(part[rows])
    assert digests_of([watch.loaded()]) == expected(sent, "o")


def test_vectors_scalars_and_wider_parameters_are_read_back(
    sent: dict[str, Tensor],
) -> None:
    bias, one = torch.empty(8, dtype=torch.float64), torch.empty(())
    with watched(sent, bias) as (watch, offer):
        whole = offer("bias")
        for half in (slice(0, 4), slice(4, 8)):
            bias[half].copy_(whole[half])
        one.copy_(offer("one").reshape(()))
    assert digests_of([watch.loaded()]) == expected(sent, "bias", "one")


def test_a_tensor_that_no_worker_took_has_no_digest(sent: dict[str, Tensor]) -> None:
    meta = torch.empty(8, 6, device="meta")
    with watched(sent) as (watch, offer):
        meta.copy_(offer("q"))  # vLLM counts elements by such copies
        torch.empty(4, 6).copy_(torch.ones(4, 6))
    assert watch.names == {"q"}
    assert digests_of([watch.loaded()]) == {}


def test_a_part_that_is_not_a_range_of_rows_and_columns_is_refused(
    sent: dict[str, Tensor],
) -> None:
    with (
        watched(sent) as (_, offer),
        pytest.raises(RuntimeError, match="a part of tensor q that is not a range of its rows"),
    ):
        torch.empty(6, 8).copy_(offer("q").t())


def test_memory_that_is_offered_again_belongs_to_the_last_tensor(
    sent: dict[str, Tensor],
) -> None:
    """The next bucket uses the same memory at other offsets: queries and keys, then o."""
    bucket, o = torch.empty(96, dtype=torch.bfloat16), torch.empty(6, 8, dtype=torch.bfloat16)
    q, k = torch.empty(8, 6, dtype=torch.bfloat16), torch.empty(4, 6, dtype=torch.bfloat16)
    watch = LoadWatch()
    watch.begin([q, k, o])
    with watch:
        for name, parameter, start in (("q", q, 0), ("k", k, 48), ("o", o, 8)):
            offered = bucket[start : start + parameter.numel()].view(parameter.shape)
            offered.copy_(sent[name])
            watch.offer(name, offered)
            parameter[:2].copy_(offered[:2])
            parameter[2:].copy_(offered[2:])
    assert digests_of([watch.loaded()]) == expected(sent, "q", "k", "o")


def test_the_memory_of_a_freed_tensor_identifies_no_tensor(sent: dict[str, Tensor]) -> None:
    """Other data in this memory does not count as a part of the freed tensor."""
    parameter = torch.empty(8, 6, dtype=torch.bfloat16)
    watch = LoadWatch()
    watch.begin([parameter])
    memory = torch.empty(96, dtype=torch.uint8)
    with watch:
        offered = torch.frombuffer(memory.numpy(), dtype=torch.bfloat16).view(8, 6)
        watch.offer("q", offered)
        del offered
        own = torch.frombuffer(memory.numpy(), dtype=torch.bfloat16).view(8, 6)
        parameter.copy_(own)
    assert digests_of([watch.loaded()]) == {}

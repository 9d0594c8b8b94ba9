"""Reports of an engine's workers on the weights that they loaded, in whatever way loaders cut and
fuse them."""

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
    """A worker's share of queries, keys and values in one parameter, and of the columns of o. Keys
    and values have two heads of 2 rows: of four workers two hold the same."""
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
        o.zero_()  # what it was packed from is used again
    return watch.loaded()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_digests_are_the_trainers_over_any_number_of_workers(
    sent: dict[str, Tensor], workers: int
) -> None:
    loaded = [fused(sent, rank, workers) for rank in range(workers)]
    assert digests_of(loaded) == expected(sent, "q", "k", "v", "o")
    if workers > 1:
        assert digests_of(loaded[1:])["q"].endswith("elements")


def test_a_parameter_that_stays_is_read_back_when_the_update_ends(sent: dict[str, Tensor]) -> None:
    parameter = torch.zeros_like(sent["q"])
    with watched(sent, parameter) as (watch, offer):
        parameter.copy_(offer("q"))
    parameter.view(torch.int16)[3, 2] ^= 1
    assert digests_of([watch.loaded()]) == expected({"q": parameter}, "q")


def test_memory_that_is_used_again_is_read_back_at_once(sent: dict[str, Tensor]) -> None:
    scratch = torch.empty_like(sent["q"])
    with watched(sent) as (watch, offer):
        scratch.copy_(offer("q"))
        scratch[:4].copy_(offer("k"))
        watch.take(offer("v")[1:])
    found = digests_of([watch.loaded()])
    assert {name: found[name] for name in ("q", "k")} == expected(sent, "q", "k")
    assert found["v"].endswith("of 18 of 24 elements")


def test_memory_that_could_not_take_the_numbers_has_another_digest(
    sent: dict[str, Tensor],
) -> None:
    with watched(sent) as (watch, offer):
        torch.empty(8, 6, dtype=torch.float8_e4m3fn).copy_(offer("q"))
    assert digests_of([watch.loaded()])["q"] != tensor_digest(sent["q"])


def test_a_loaders_own_copy_of_a_part_keeps_its_place(sent: dict[str, Tensor]) -> None:
    """vLLM copies the columns of an expert into its memory by rows."""
    memory = torch.empty(6, 8)
    with watched(sent) as (watch, offer):
        whole = offer("o")
        for half in (slice(0, 4), slice(4, 8)):
            part = whole[:, half].contiguous()
            for rows in (slice(0, 2), slice(2, 6)):
                memory[rows, half].copy_(part[rows])
    assert digests_of([watch.loaded()]) == expected(sent, "o")


def test_vectors_single_numbers_and_wider_parameters_are_read_back(
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
        meta.copy_(offer("q"))  # vLLM counts elements like this
        torch.empty(4, 6).copy_(torch.ones(4, 6))
    assert watch.names == {"q"}
    assert digests_of([watch.loaded()]) == {}


def test_an_order_of_the_engines_own_is_refused(sent: dict[str, Tensor]) -> None:
    with (
        watched(sent) as (_, offer),
        pytest.raises(RuntimeError, match="a part of tensor q that is not a range of its rows"),
    ):
        torch.empty(6, 8).copy_(offer("q").t())


def test_memory_that_is_offered_again_is_of_the_tensor_offered_last(
    sent: dict[str, Tensor],
) -> None:
    """Memory for buckets is offered again at other offsets: queries and keys, then the columns
    of o."""
    place, o = torch.empty(96, dtype=torch.bfloat16), torch.empty(6, 8, dtype=torch.bfloat16)
    q, k = torch.empty(8, 6, dtype=torch.bfloat16), torch.empty(4, 6, dtype=torch.bfloat16)
    watch = LoadWatch()
    watch.begin([q, k, o])
    with watch:
        for name, parameter, start in (("q", q, 0), ("k", k, 48), ("o", o, 8)):
            lent = place[start : start + parameter.numel()].view(parameter.shape)
            lent.copy_(sent[name])
            watch.offer(name, lent)
            parameter[:2].copy_(lent[:2])
            parameter[2:].copy_(lent[2:])
    assert digests_of([watch.loaded()]) == expected(sent, "q", "k", "o")


def test_the_memory_of_a_deleted_tensor_has_no_owner(sent: dict[str, Tensor]) -> None:
    """Data that a loader creates there is not counted as a part of that tensor."""
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

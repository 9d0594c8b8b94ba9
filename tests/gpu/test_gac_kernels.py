"""GAC's kernels on one CUDA device: their results equal the CPU's, and their time is close to that
of moving their bytes.

The floor is the bytes that must be moved (gac_kernels.py) at the rate of a copy measured in the
same test.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from megatron_async_rl.controls.reference import GradientReference, kernels_for
from tests.gpu.hardware import DEVICE, ON_CUDA, ON_DEVICE
from tests.quantized import quantize

FORMATS = ("fp32", "bf16", "fp8")
REFERENCE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4.0 / 128}
GOAL = 1.25
TURNS = 11


def supported(number_format: str) -> None:
    if number_format == "fp8" and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")


def seconds(run: Callable[[], object]) -> float:
    """Return the median of TURNS runs on the device, after two warm-up runs."""
    times = []
    for turn in range(TURNS + 2):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        if turn >= 2:
            times.append(begun.elapsed_time(ended) / 1e3)
    return statistics.median(times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number_format", [pytest.param(f, marks=ON_DEVICE) for f in FORMATS])
@pytest.mark.parametrize("raw", [True, False])
def test_kernels_give_the_cpus_numbers(number_format, dtype, raw):
    supported(number_format)
    draw = torch.Generator().manual_seed(0)
    for size in (3_000_001, 16_384, 7):
        g = torch.randn(size, generator=draw).to(dtype)
        base = torch.randn(size, generator=draw)
        found = []
        for device in ("cpu", DEVICE):
            held = GradientReference(number_format, torch.device(device), None, [base.shape])
            # The CPU compresses here; writing the read numbers again gives the same bits.
            held.put([base.to(device)])
            gradient = g.to(device, copy=True)
            (written,) = held.written()
            products = held.products([(gradient, written)], False, gradient.device).cpu()
            held.project([gradient], -0.37, raw=raw)
            (kept,) = held.written()
            found.append((products, gradient.cpu(), [part.cpu() for part in kept]))
        cpu, cuda = found
        unit = torch.stack([(cpu[0][1] * cpu[0][2]).sqrt(), cpu[0][1], cpu[0][2]])
        assert ((cuda[0] - cpu[0]).abs() <= 1e-6 * unit).all()
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        apart = (cuda[1].view(kind).int() - cpu[1].view(kind).int()).abs()
        assert apart.max() <= 1
        wanted = quantize(g if raw else cuda[1], number_format)
        for one, other in zip(cuda[2], wanted, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("elements", [pytest.param(50_000_003, marks=ON_CUDA)])
def test_sums_repeat_in_every_bit(elements):
    g, r = (torch.randn(elements, device="cuda") for _ in range(2))
    held = GradientReference("fp32", g.device, None, [r.shape])
    held.put([r])
    (written,) = held.written()
    first = held.products([(g, written)], False, g.device)
    for _ in range(5):
        assert torch.equal(held.products([(g, written)], False, g.device), first)


@pytest.mark.slow
@pytest.mark.parametrize("billions", [1, 4, 8])
@pytest.mark.parametrize("number_format", [pytest.param(f, marks=ON_CUDA) for f in FORMATS])
def test_sweeps_take_the_time_of_their_bytes(number_format, billions, figure):
    supported(number_format)
    elements = billions << 30
    needed = elements * (4 + REFERENCE_BYTES[number_format]) + (1 << 30)
    torch.cuda.empty_cache()  # memory that earlier sizes left in the allocator
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")
    g = torch.empty(elements, device="cuda").normal_()
    held = GradientReference(number_format, g.device, None, [g.shape])
    held.put([g])
    (written,) = held.written()
    kernels = kernels_for(g.device, number_format)
    assert kernels is not None, "Triton is not here: the torch path would be timed"

    # Copy one half of the gradient to the other: as many bytes are read as written.
    half = elements // 2
    rate = 4 * elements / seconds(lambda: g[:half].copy_(g[half:]))
    reference_bytes = REFERENCE_BYTES[number_format]
    sweeps = {
        "products": (4 + reference_bytes, lambda: kernels.three_products(g, written, True)),
        "project": (
            2 * (4 + reference_bytes),
            lambda: kernels.project(g, written, -1e-3, raw=True),
        ),
        "keep": (4 + reference_bytes, lambda: kernels.keep(g, written)),
    }
    over_floor = {
        name: seconds(run) / (elements * each / rate) for name, (each, run) in sweeps.items()
    }
    for name, found in over_floor.items():
        figure(
            f"GAC's {name}, {number_format} reference, {billions} x 2^30 elements",
            found,
            at_most=GOAL,
            against=f"the time of its bytes at a copy's {rate / 1e9:.0f} GB/s",
        )

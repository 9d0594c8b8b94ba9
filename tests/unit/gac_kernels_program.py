"""GAC's kernels in Triton's interpreter (TRITON_INTERPRET=1, read when Triton is imported) compared
with the torch path; prints what differs, as JSON.

The interpreter's own conversions are not the hardware's: to bfloat16 it truncates, and to FP8 a
carry out of the fraction is lost (Triton 3.9). Here torch converts in their place, to the nearest
and of two the even one, as the instructions do that the compiled kernels hold (test_gac_kernels.py
looks for them).
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.controls import gac_kernels, reference
from megatron_async_rl.controls.gac import Gac
from megatron_async_rl.controls.quantize import BLOCK, dequantize
from tests.gradients import OneRank, Shard, step
from tests.quantized import quantize

FORMATS = ("fp32", "bf16", "fp8")
SIZES = (gac_kernels.SPAN + 3 * 1024 + 5, gac_kernels.SPAN, 128, 7)
REFERENCE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4.0 / 128}


def wild(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers over eight orders of magnitude, and a block of zeros."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=draw)
    values *= 10.0 ** torch.randint(-6, 3, (size,), generator=draw)
    values[128:256] = 0.0
    return values.to(dtype)


def bits(tensors: Any) -> list[bytes]:
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in tensors]


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.itemsize}").copy())
    converted = bits.view(TYPES[str(source)]).to(TYPES[str(target)])
    words = converted.view(WORDS[converted.itemsize]).numpy()
    return words.view(f"u{words.itemsize}")


interpreter._convert_float = convert


def call_from_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The interpreter's, which adapts the language at each call again: most of its time. A kernel's
    start has adapted it for the functions next to the kernel."""
    module = function.fn.__module__
    if module != gac_kernels.__name__ and module not in adapted:
        interpreter._patch_lang(function.fn)
        adapted.add(module)
    return function.rewrite()(*args, **kwargs)


adapted: set[str] = set()
interpreter.InterpretedFunction.__call__ = call_from_kernel


class Traffic:
    """Bytes that kernels load and store, where their masks let them."""

    def __init__(self) -> None:
        self.bytes = 0
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(
            this: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **more: Any
        ) -> Any:
            loaded = load(this, pointers, mask, other, *rest, **more)
            self.bytes += int(np.sum(mask.data)) * loaded.data.itemsize
            return loaded

        def counted_store(
            this: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any
        ) -> Any:
            self.bytes += int(np.sum(mask.data)) * value.data.itemsize
            return store(this, pointers, value, mask, *rest, **more)

        builder.create_masked_load = counted_load
        builder.create_masked_store = counted_store

    def of(self, run: Any) -> int:
        before = self.bytes
        run()
        return self.bytes - before


def held_by_torch(number_format: Any, values: torch.Tensor) -> reference.GradientReference:
    held = reference.GradientReference(number_format, values.device, None, [values.shape])
    held.put([values])
    return held


def products(traffic: Traffic) -> dict[str, Any]:
    worst, moved, same, spread = 0.0, 0.0, True, 0.0
    for number_format in FORMATS:
        for dtype in (torch.float32, torch.bfloat16):
            for size in SIZES:
                g, written = wild(size, 1, dtype), quantize(wild(size, 2), number_format)
                r = dequantize(written, torch.Size([size])).double()
                exact = [float(g.double() @ r), float(g.double().square().sum()), float(r @ r)]
                found = gac_kernels.three_products(g, written, False)
                scale = [math.sqrt(exact[1] * exact[2]), exact[1], exact[2]]
                for one, other, unit in zip(found.tolist(), exact, scale, strict=True):
                    worst = max(worst, abs(one - other) / unit)
                known = gac_kernels.three_products(g, written, True)
                same &= torch.equal(known[:2], found[:2]) and float(known[2]) == 0.0
                size_in_bytes = size * (g.itemsize + REFERENCE_BYTES[number_format])
                used = traffic.of(lambda g=g, w=written: gac_kernels.three_products(g, w, False))
                if size > 1000:
                    moved = max(moved, used / size_in_bytes)
                by_torch = held_by_torch(number_format, g).products([(g, written)], False, g.device)
                for one, other, unit in zip(by_torch.tolist(), found.tolist(), scale, strict=True):
                    spread = max(spread, abs(one - other) / unit)
    return {"error": worst, "moved": moved, "known_is_same": same, "from_torch": spread}


def spans() -> dict[str, Any]:
    """How far the sums move with the number of programs, and whether they repeat in every bit."""
    g, written, spread = wild(5 * 16384 + 77, 4), quantize(wild(5 * 16384 + 77, 5), "fp32"), 0.0
    first = gac_kernels.three_products(g, written, False)
    again = gac_kernels.three_products(g, written, False)
    for steps in (1, 4, 64):
        set_steps(steps)
        other = gac_kernels.three_products(g, written, False)
        unit = torch.stack([(first[1] * first[2]).sqrt(), first[1], first[2]])
        spread = max(spread, float(((other - first).abs() / unit).max()))
    return {"spans": spread, "repeated": torch.equal(first, again)}


def projection(traffic: Traffic) -> dict[str, Any]:
    gradients_ulps, elsewhere, references, moved = 0, 0.0, 0, 0.0
    for number_format in FORMATS:
        for dtype in (torch.float32, torch.bfloat16):
            for raw in (True, False):
                for size in SIZES:
                    g = wild(size, 1, dtype)
                    mine = tuple(part.clone() for part in quantize(wild(size, 2), number_format))
                    held = held_by_torch(number_format, dequantize(mine, g.shape))
                    ours, theirs = g.clone(), g.clone()
                    used = traffic.of(
                        lambda o=ours, m=mine, r=raw: gac_kernels.project(o, m, -0.37, raw=r)
                    )
                    held.project([theirs], -0.37, raw=raw)
                    kind = torch.int32 if dtype == torch.float32 else torch.int16
                    apart = (ours.view(kind).int() - theirs.view(kind).int()).abs()
                    gradients_ulps = max(gradients_ulps, int(apart.max()))
                    elsewhere = max(elsewhere, float((apart > 0).float().mean()))
                    kept = quantize(g if raw else ours, number_format)
                    references += bits(mine) != bits(kept)
                    if size > 1000:
                        floor = 2 * size * (g.itemsize + REFERENCE_BYTES[number_format])
                        moved = max(moved, used / floor)
    return {
        "ulps": gradients_ulps,
        "share_apart": elsewhere,
        "references_apart": references,
        "moved": moved,
    }


def keeping() -> int:
    """References that differ from the torch path's in any bit."""
    apart = 0
    values = [wild(size, 3) for size in SIZES]
    values += [torch.full((130,), extreme) for extreme in (1e-42, 1e-30, 448.0, 449.0, 1.75, 3e38)]
    values.append(torch.nextafter(torch.full((128,), 1.75), torch.tensor(2.0)))
    for g in values:
        for number_format in FORMATS:
            wanted = quantize(g, number_format)
            mine = tuple(torch.full_like(part, 3.0) for part in wanted)
            gac_kernels.keep(g, mine)
            apart += bits(mine) != bits(wanted)
    return apart


def set_steps(steps: int) -> None:
    """Set the steps of a kernel's loop; one program covers as many rows of blocks."""
    gac_kernels.STEPS = steps
    gac_kernels.SPAN = gac_kernels.ROWS * steps * BLOCK


def steps() -> dict[str, float]:
    """Gac itself, in all regimes, with the kernels in the torch path's place: how far metrics and
    gradients come apart."""
    set_steps(2)
    worst = {"metrics": 0.0, "gradients": 0.0, "projected": 0.0}
    for number_format in FORMATS:
        for kept in ("raw", "applied"):
            for offload in ("none", "cpu"):
                settings = GacControl(
                    c_low=0.15,
                    c_high=0.9,
                    reference_dtype=number_format,
                    reference=kept,
                    reference_offload=offload,
                )
                runs = []
                for kernels in (None, gac_kernels):
                    reference.kernels_for = lambda device, dtype, kernels=kernels: kernels
                    runs.append(run(settings))
                for ours, theirs in zip(*runs, strict=True):
                    worst["projected"] += ours[0]["gac/regime"] == 1
                    for name, value in ours[0].items():
                        worst["metrics"] = max(worst["metrics"], abs(value - theirs[0][name]))
                    error = (ours[1] - theirs[1]).norm() / ours[1].norm()
                    worst["gradients"] = max(worst["gradients"], float(error))
    return worst


def run(settings: GacControl) -> list[tuple[dict[str, float], torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    sizes = (gac_kernels.SPAN + 200, 300)
    common = [torch.randn(size, generator=draw) for size in sizes]
    control, seen = Gac(settings), []
    for share in (0.0, 1.0, 0.5, 0.1, 9.0, 9.0, 1.0):
        shards = [Shard(share * one + torch.randn(one.shape, generator=draw)) for one in common]
        metrics = control.apply(step(OneRank(shards))).metrics
        seen.append((dict(metrics), torch.cat([shard.grad for shard in shards]).double()))
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    counter = Traffic()
    result = {
        "products": products(counter),
        "projection": projection(counter),
        "references_apart": keeping(),
        **spans(),
        "steps": steps(),
    }
    print(json.dumps(result))

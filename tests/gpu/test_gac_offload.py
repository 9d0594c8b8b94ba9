"""GAC's reference in page-locked host memory has the same bits as on the GPU, although a separate
stream copies it."""

import pytest
import torch

from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.controls.gac import Gac
from tests.gpu.hardware import DEVICE, ON_CUDA, ON_DEVICE
from tests.gradients import OneRank, Shard, step

SIZES = (50_000_000, 3_000, 20_000_001) if DEVICE == "cuda" else (5_000, 3_000, 20_001)


def run(settings: GacControl) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Run with large shards, so that copies are still in progress when the gradient is overwritten
    and the next step begins."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    common = [torch.randn(size, device=DEVICE, generator=draw) for size in SIZES]
    control, metrics, sums = Gac(settings), [], []
    for share in (0.0, 1.0, 0.5, 0.1, 2.0, 1.0):
        shards = [
            Shard(share * base + torch.randn(base.shape, device=DEVICE, generator=draw))
            for base in common
        ]
        gradients = OneRank(shards, device=torch.device(DEVICE))
        metrics.append(dict(control.apply(step(gradients)).metrics))
        sums.append(torch.stack([shard.grad.double().sum() for shard in shards]))
        for shard in shards:
            shard.grad.fill_(float("nan"))
    kept = control.shard_state()["reference"]
    on_device = DEVICE == "cuda" and settings.reference_offload == "none"
    assert all(shard.is_cuda == on_device for shard in kept)
    sums.append(torch.stack([shard.double().sum() for shard in kept]))
    return metrics, sums


@pytest.mark.parametrize("reference", ["raw", "applied"])
@pytest.mark.parametrize(
    "number_format", [pytest.param(each, marks=ON_DEVICE) for each in ("fp32", "bf16", "fp8")]
)
def test_an_offloaded_reference_gives_the_same_bits(number_format, reference):
    settings = GacControl(c_low=0.15, reference_dtype=number_format, reference=reference)
    metrics, sums = run(settings)
    offloaded, offloaded_sums = run(settings.model_copy(update={"reference_offload": "cpu"}))
    assert any(row["gac/regime"] == 1 for row in metrics)
    assert metrics == offloaded
    for one, other in zip(sums[:-1], offloaded_sums[:-1], strict=True):
        assert torch.equal(one, other)
    # The host adds in another order than the GPU.
    torch.testing.assert_close(sums[-1].cpu(), offloaded_sums[-1].cpu(), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("elements", [pytest.param(10_000_000, marks=ON_CUDA)])
def test_an_offloaded_reference_takes_no_memory_of_the_gpu_between_steps(elements, figure):
    held = {}
    for offload in ("none", "cpu"):
        control = Gac(GacControl(reference_offload=offload))
        before = torch.cuda.memory_allocated()
        gradients = OneRank(
            [Shard(torch.randn(elements, device="cuda"))], device=torch.device("cuda")
        )
        control.apply(step(gradients))
        del gradients
        torch.cuda.synchronize()
        # The allocator reclaims memory that another stream has used only at its next allocation.
        torch.empty(1, device="cuda")
        held[offload] = torch.cuda.memory_allocated() - before
    assert held["none"] >= 4 * elements
    figure(
        "GPU memory of an offloaded reference, per parameter",
        held["cpu"] / elements,
        unit="B",
        at_most=0.1,
        against="4 B without offloading",
    )

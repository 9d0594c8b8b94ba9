"""A version staged by all ranks, as an engine of rank 0's machine would read it; and ways in which
it may be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.weights import export
from megatron_async_rl.weights.cuda_ipc import CudaIpc, IpcBuckets
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.export import WeightExporter, WeightShards
from megatron_async_rl.weights.manifest import IN_FLIGHT, Manifest, WeightMismatch, require_equal
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import Staging
from megatron_async_rl.weights.transport import view_of

COLLECTIVES = (
    "gather",
    "send",
    "recv",
    "all_gather",
    "broadcast",
    "all_gather_object",
    "all_reduce",
)


class Staged:
    """Stages the weights that `exporter` exports. `written`: bytes of this rank's parts, and their
    number."""

    def __init__(
        self,
        exporter: WeightExporter,
        layout: Layout,
        *,
        max_bytes: int = 5000,
        small: int = export.SMALL_BYTES,
        reached: list[bool] | None = None,
    ) -> None:
        self.layout = layout
        self.staging = Staging(SharedMemory(), layout)
        with mock.patch.object(export, "SMALL_BYTES", small):
            self.shards = WeightShards(exporter, reached or self.staging.reached, max_bytes)
        self.version = 0

    def stage(self) -> Manifest:
        self.version += 1
        return self.staging.stage(self.version, self.shards.buckets, self.shards.parts())

    def tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        """Copies of what is staged; on rank 0, once all others are there."""
        reader = SharedMemory().reader()
        read = [pair for ref in manifest.buckets for pair in reader.read(ref)]
        found = {name: tensor.clone() for name, tensor in read}
        self.layout.barrier()
        return found

    @property
    def written(self) -> tuple[int, int]:
        sizes = [part.tensor.nbytes for part in self.shards.parts()]
        return sum(sizes), len(sizes)

    def close(self) -> None:
        self.staging.close()


def staged_as_exported(
    exporter: WeightExporter, layout: Layout, exported: dict[str, Tensor]
) -> None:
    """Raises AssertionError where rank 0, which has the exported tensors, reads others."""
    staged = Staged(exporter, layout, small=0)
    manifest = staged.stage()
    found = staged.tensors(manifest)
    for name, tensor in exported.items():
        assert torch.equal(found[name], tensor), name
        assert manifest.digests[name] == tensor_digest(tensor), name
    assert not exported or found.keys() == exported.keys()
    staged.close()


@contextmanager
def counted(calls: dict[str, int]) -> Iterator[None]:
    """Counts torch's collectives by name."""

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(
        dist, **{name: counting(name, getattr(dist, name)) for name in COLLECTIVES}
    ):
        yield


def staging_of(exporter: WeightExporter, layout: Layout) -> dict[str, Any]:
    """tensors, digests: of two ways to divide the work, and gathered through rank 0; the last two
    from every rank. bytes: that each rank wrote. collectives: of one staging, by name."""
    found: dict[str, Any] = {"collectives": {}}
    for way, settings in {
        "by tensors": {"max_bytes": 1 << 30},
        "by rows": {"small": 0},
        "gathered": {"reached": [True, *[False] * (layout.world_size - 1)]},
    }.items():
        staged = Staged(exporter, layout, **settings)
        with counted(calls := {}):
            manifest = staged.stage()
        found[way] = {"tensors": staged.tensors(manifest), "digests": dict(manifest.digests)}
        if way == "by rows":
            found["collectives"] = calls
            found["bytes"] = layout.gathered(staged.written[0])
        staged.close()
    return found | {"on demand": on_demand(exporter, layout)}


def on_demand(exporter: WeightExporter, layout: Layout) -> dict[str, Any]:
    """tensors, digests: of a version that is shared in small buckets, each as it is in this rank's
    own memory."""
    staging = IpcBuckets(CudaIpc(layout.device), layout)
    shards = WeightShards(exporter, staging.reached, 5000)
    manifest, tensors = staging.stage(1, shards.buckets, shards.parts()), {}
    for number in range(len(shards.buckets)):
        place = number % IN_FLIGHT
        ref = staging.fill(number, place, shards.parts(number))
        _, memory, _ = staging._memory[place]
        tensors |= {entry.name: view_of(memory, entry).clone() for entry in ref.entries}
    staging.close()
    return {"tensors": tensors, "digests": dict(manifest.digests)}


def faults(exporter: WeightExporter, layout: Layout, parameters: list[Tensor]) -> dict[str, str]:
    """The tensor that a comparison of digests names, by what is wrong with the staged memory; after
    a version in which nothing is."""
    staged = Staged(exporter, layout)

    def named(change: Callable[[Manifest], None] = lambda manifest: None) -> str:
        manifest = staged.stage()
        if layout.rank == 0:
            change(manifest)
        layout.barrier()
        loaded = {name: tensor_digest(t) for name, t in staged.tensors(manifest).items()}
        try:
            require_equal("engine", manifest.digests, loaded)
        except WeightMismatch as error:
            return error.name
        return ""

    def of(manifest: Manifest, name: str) -> Tensor:
        views = ((r, e) for r in manifest.buckets for e in r.entries if e.name == name)
        return SharedMemory().writer().view(*next(views))

    name = "model.layers.1.self_attn.q_proj.weight"

    def flip(manifest: Manifest) -> None:
        of(manifest, name).view(torch.uint8)[5, 7] ^= 16

    def swap(manifest: Manifest) -> None:
        tensor = of(manifest, name)
        tensor[[3, 8]] = tensor[[8, 3]]

    def elsewhere(ref: Any, entry: Any) -> Tensor:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))

    found = {"nothing": named(), "flipped bit": named(flip), "swapped rows": named(swap)}
    # The slot holds version 2; the last rank's parts of it stay there.
    for parameter in parameters:
        parameter.data.mul_(1.5)
    if layout.rank == layout.world_size - 1:
        staged.staging._writer.view = elsewhere  # type: ignore[method-assign]
    found["stale shard"] = named()
    staged.close()
    return found

"""A model of each family of layers with the same weights, on one rank of a layout, where there is
Transformer Engine and no GPU: what the layers are made of, without their kernels.

Arguments: a directory of models, the rank, a JSON of ParallelConfig, and the directory for what is
written. Prints a line of JSON. The other ranks of the layout are not there: no message of loading
or saving goes beyond a pipeline stage.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401 - while torch still sees no GPU
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async_rl.policy import device

# isort: split
from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
from megatron_async_rl.config.schema import ModelConfig
from megatron_async_rl.policy import block_files, checkpoint
from megatron_async_rl.policy.blocks import ModelBlocks
from megatron_async_rl.policy.model import PolicyModel, build_model
from megatron_async_rl.policy.parallel import Layout, initialise
from megatron_async_rl.policy.parameters import local_entries, whole_model_names
from megatron_async_rl.weights.export import WeightExporter

FAMILIES = ("local", "transformer_engine")
SETTINGS = (
    "bias_activation_fusion",
    "apply_rope_fusion",
    "disable_parameter_transpose_cache",
    "moe_permute_fusion",
)
MARKS = {"allreduce": True, "sequence_parallel": False, "tensor_model_parallel": False}
"""Attributes that Megatron reads from a parameter -> the value of a missing attribute."""


def layout_of(parallel: ParallelConfig, rank: int) -> Layout:
    """One rank's place in a world whose messages go nowhere."""
    join, group = dist.init_process_group, dist.new_group
    os.environ |= {"WORLD_SIZE": str(parallel.ranks), "RANK": str(rank)}
    if parallel.ranks > 1:
        dist.init_process_group = lambda *_, **__: join(
            "fake", rank=rank, world_size=parallel.ranks, store=FakeStore()
        )
        dist.all_gather_object = lambda found, mine, group=None: found.__setitem__(
            slice(None), [mine] * len(found)
        )
        dist.new_group = lambda ranks=None, *_, **__: group(ranks, backend="fake")
    else:
        del os.environ["RANK"]
    # The built model needs CUDA's layers, and its tensors lie in host memory.
    return replace(initialise(parallel, device.install("cpu"), timeout_s=600), device_type="cuda")


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def parameters(model: PolicyModel) -> dict[str, Any]:
    """Canonical name -> the elements, how they are cut, and what Megatron reads of them."""
    (chunk,) = model.chunks
    cuts = {entry.local_name: entry.partition_dim for entry in local_entries(model.bridge, [chunk])}
    own = {id(parameter): name for name, parameter in chunk.named_parameters()}
    return {
        name: [
            digest(parameter),
            cuts[own[id(parameter)]],
            {key: bool(getattr(parameter, key, value)) for key, value in MARKS.items()},
        ]
        for parameter, name in whole_model_names(model.bridge, chunk)
    }


def blocks(model: PolicyModel) -> dict[str, list[Any]]:
    """Key in a checkpoint -> place and elements of each block that this rank reads, and of those
    that it writes."""
    return {
        f"{'written' if writes else 'read'} {key}": sorted(
            [*map(list, (block.offsets, block.shape)), digest(block.tensor)] for block in held
        )
        for writes in (False, True)
        for key, held in ModelBlocks(model).model(writes=writes).items()
    }


def exported(model: PolicyModel) -> dict[str, str]:
    found = {}
    for bucket in WeightExporter(model.bridge, model.chunks).buckets(1 << 30):
        found |= dict(zip(bucket.names, map(digest, bucket.tensors), strict=True))
    return found


def loaded(into: PolicyModel, saved: PolicyModel, folder: Path) -> dict[str, Any]:
    """Parameters of a model that read the other one's checkpoint."""
    content = ModelBlocks(saved).model(writes=True)
    block_files.write(folder / "sharded", content, saved.bridge.layout.cpu_group)
    with torch.no_grad():
        for parameter in into.chunks[0].parameters():
            parameter.fill_(torch.nan)
    checkpoint.load_model(folder, into, {})
    return parameters(into)


def main() -> None:
    material, rank, settings, output = sys.argv[1:]
    parallel = ParallelConfig(**json.loads(settings))
    layout = layout_of(parallel, int(rank))
    torch.cuda.is_available = lambda: True
    found = {}
    for path in sorted(Path(material).iterdir()):
        models = {
            layers: build_model(
                ModelConfig(path=path, dtype="bfloat16"),
                PolicyConfig(parallel=parallel, layers=layers),
                layout,
            )
            for layers in FAMILIES
        }
        found[path.name] = {
            layers: {
                "own": [name for name, _ in model.chunks[0].named_parameters()],
                "parameters": parameters(model),
                "blocks": blocks(model),
                "settings": {name: getattr(model.config, name) for name in SETTINGS},
                "into_gradients": [
                    name
                    for name, module in model.chunks[0].named_modules()
                    if getattr(module, "fuse_wgrad_accumulation", False)
                ],
            }
            for layers, model in models.items()
        }
        if parallel.ranks > 1:
            continue
        for layers, other in (FAMILIES, FAMILIES[::-1]):
            found[path.name][layers] |= {
                "exported": exported(models[layers]),
                "from_other": loaded(
                    models[layers], models[other], Path(output) / f"{path.name}-{layers}"
                ),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The parameters of every rank of a layout of a published model, built on the meta device one rank
after another: their names in Hugging Face's files, and the boxes of the model's tensors that a
checkpoint has of each.

Arguments: a JSON of [a configuration's file, its overrides] for each model, one of [file,
overrides] of whose ranks the optimizer's parts are wanted; the file to write.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.policy import device
from megatron_async_rl.policy.adam_view import optimizer_slices
from megatron_async_rl.policy.blocks import ModelBlocks
from megatron_async_rl.policy.model import assemble_model
from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients
from megatron_async_rl.policy.parameters import Cuts, local_entries
from tests.parallel.plan_program import META, build_on_meta, layout_of, leave


def mapped(config: Config) -> dict[str, Any]:
    """`entries`: of each rank [name, Hugging Face's names and shapes, shape here, cut dimension,
    [name, offsets, shape] of what it reads of files]; `stages`: of each rank; `boxes`: by key [the
    whole tensor's shape, [offsets, shape] of what the ranks write of it]."""
    parallel = config.policy.parallel
    entries, stages, boxes, wholes = [], [], defaultdict(list), {}
    for rank in range(parallel.ranks):
        model = assemble_model(config.model, config.policy, layout_of(config, rank, META))
        cuts, own = Cuts(model.bridge), []
        for entry in local_entries(model.bridge, model.chunks):
            read = []
            width = prod(entry.shard_shape[1:])
            for cut in cuts.of(entry):
                place = [[cut.first, cut.column], [len(cut.source), width]]
                read.append([entry.hf_names[cut.tensor], *place])
            rows = torch.cat([cut.source for cut in cuts.of(entry)]).sort().values
            assert torch.equal(rows, torch.arange(entry.shard_shape[0])), entry
            own.append(
                [
                    entry.name,
                    dict(zip(entry.hf_names, entry.hf_shapes, strict=True)),
                    entry.shard_shape,
                    entry.partition_dim,
                    read,
                ]
            )
        entries.append(own)
        stages.append(model.bridge.mpu.pp_rank)
        for key, blocks in ModelBlocks(model).model(writes=True).items():
            for block in blocks:
                assert wholes.setdefault(key, block.shape) == block.shape
                boxes[key].append([block.offsets, list(block.tensor.shape)])
        leave()
    held = {key: [wholes[key], boxes[key]] for key in wholes}
    return {"entries": entries, "stages": stages, "boxes": held}


def replica_slices(config: Config) -> list[list[list[Any]]]:
    """Slices that Adam updates on each data-parallel rank of the first model-parallel rank:
    [name, elements, start, end]."""
    found, parallel = [], config.policy.parallel
    for replica in range(parallel.data):
        layout = layout_of(config, replica * parallel.tensor, META)
        assert (layout.dp_rank, layout.tp_rank, layout.pp_rank) == (replica, 0, 0)
        model = assemble_model(config.model, config.policy, layout)
        wrapped = wrap_for_gradients(model.chunks, config.policy)
        optimizer = build_optimizer(wrapped, config.policy, model.config.params_dtype)
        names = {id(p): name for name, p in model.chunks[0].named_parameters()}
        found.append(
            [
                [names[id(one.parameter)], one.parameter.numel(), one.start, one.end]
                for one in optimizer_slices(optimizer)
            ]
        )
        leave()
    return found


def main() -> None:
    models, replicated, output = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    device.install("cpu")
    build_on_meta()
    found = {
        "mapped": [mapped(load(Path(file), overrides)) for file, overrides in models],
        "adam": replica_slices(load(Path(replicated[0]), replicated[1])),
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Shards of the optimizer's parameters put together to the model's, which no code of the package
does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_async_rl.policy.adam_view import optimizer_state


def assembled(shards, model, optimizer) -> list[dict[str, torch.Tensor]]:
    """Per chunk: the parameter's name -> a float32 tensor of its shape, the same on every
    replica."""
    layout = model.bridge.layout
    held: dict[int, list] = {}
    for place, shard in optimizer_state(optimizer, shards):
        held.setdefault(id(place.parameter), []).append((place, shard))
    chunks = []
    for chunk in model.chunks:
        tensors = {}
        for name, parameter in chunk.named_parameters():
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            mine = held.get(id(parameter), [])
            for place, shard in mine:
                whole[place.start : place.end] = shard.detach().reshape(-1)
            if optimizer.config.use_distributed_optimizer:
                dist.all_reduce(whole, group=layout.replicas_of(parameter))
            tensors[name] = whole.view(parameter.shape)
        chunks.append(tensors)
    return chunks


def cut(tensors, optimizer, model) -> list[torch.Tensor]:
    """This rank's shards of model tensors."""
    by_parameter = {
        id(parameter): own[name]
        for chunk, own in zip(model.chunks, tensors, strict=True)
        for name, parameter in chunk.named_parameters()
    }
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        by_parameter[id(place.parameter)].reshape(-1)[place.start : place.end].view(shard.shape)
        for place, shard in optimizer_state(optimizer, held)
    ]

"""Any run of a shard's elements, read from files in blocks, is that of the shard."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_async_rl.policy import parameters
from megatron_async_rl.policy.cuts import Cut
from megatron_async_rl.policy.parameters import HuggingFaceTensors, ParameterEntry

Q, K = torch.arange(24.0).reshape(4, 6), 100 + torch.arange(12.0).reshape(2, 6)
SHARDS = {
    # Groups of two rows of queries and one of keys, and a row of padding.
    "rows": (
        {"q": Q, "k": K},
        [Cut(0, 0, 0, torch.tensor([0, 1, 3, 4])), Cut(1, 0, 0, torch.tensor([2, 5]))],
        torch.cat((Q[:2], K[:1], Q[2:], K[1:], torch.zeros(1, 6))),
    ),
    "columns": ({"q": Q}, [Cut(0, 0, 3, torch.arange(4))], Q[:, 3:]),
    "vector": ({"q": Q.flatten()}, [Cut(0, 8, 0, torch.arange(8))], Q.flatten()[8:16]),
}


@pytest.mark.parametrize("block", [1, 12, 1000])
@pytest.mark.parametrize("kind", SHARDS)
def test_every_run_of_elements_is_read_as_it_lies_in_the_shard(
    kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, cuts, shard = SHARDS[kind]
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", block)
    save_file(tensors, tmp_path / "model.safetensors")
    entry = ParameterEntry(
        stage=0,
        owner=None,
        chunk=0,
        local_name=kind,
        name=kind,
        dtype=torch.float32,
        shard_shape=tuple(shard.shape),
        partition_dim=None,
        hf_names=tuple(tensors),
        hf_shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )
    flat = shard.flatten()
    with ExitStack() as stack:
        files = HuggingFaceTensors(tmp_path, stack)
        for start in range(len(flat)):
            for end in range(start, len(flat) + 1):
                target = torch.full((end - start,), -1.0)
                files.fill(target, entry, cuts, start)
                assert torch.equal(target, flat[start:end])

"""Any run of a shard's elements, read from files in blocks, is that of the shard; and what would be
read in part is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_async_rl.policy import parameters
from megatron_async_rl.policy.parameters import Cut, Cuts, HuggingFaceTensors, ParameterEntry
from tests.cases import looped

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


def entry_of(name: str, shard: Tensor, tensors: Mapping[str, Tensor]) -> ParameterEntry:
    return ParameterEntry(
        stage=0,
        owner=None,
        chunk=0,
        local_name=name,
        name=name,
        dtype=torch.float32,
        shard_shape=tuple(shard.shape),
        partition_dim=None,
        hf_names=tuple(tensors),
        hf_shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


@looped("block", [1, 12, 1000])
@looped("kind", SHARDS)
def test_every_run_of_elements_is_read_as_it_lies_in_the_shard(
    kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, cuts, shard = SHARDS[kind]
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", block)
    save_file(tensors, tmp_path / "model.safetensors")
    entry = entry_of(kind, shard, tensors)
    flat = shard.flatten()
    with ExitStack() as stack:
        files = HuggingFaceTensors(tmp_path, stack)
        for start in range(len(flat)):
            for end in range(start, len(flat) + 1):
                target = torch.full((end - start,), -1.0)
                files.fill(target, entry, cuts, start)
                assert torch.equal(target, flat[start:end])


@pytest.mark.parametrize(
    ("rows", "covers"),
    [([0, 1, 2, 3], True), ([3, 2, 1, 0], True), ([0, 1, 2], False), ([0, 1, 0, 1], False)],
)
def test_a_parameter_that_a_bridge_exports_in_part_is_refused(
    rows: list[int], covers: bool
) -> None:
    """Only rows of vocabulary padding are in no file."""

    def of(vocabulary: int) -> list[Cut]:
        bridge = SimpleNamespace(
            mpu=SimpleNamespace(tp_size=1, tp_rank=0),
            vocab_size=vocabulary,
            to_hugging_face=lambda name, whole: (["w"], [whole[rows]]),
        )
        return Cuts(bridge).of(entry_of("fc2", Q, {"w": Q[rows]}))

    if covers:
        assert [row for cut in of(97) for row in cut.source.tolist()] == rows
    else:
        with pytest.raises(ValueError, match="fc2 is not made of whole rows and columns of w"):
            of(97)
    assert rows != [0, 1, 2] or len(of(3)) == 1

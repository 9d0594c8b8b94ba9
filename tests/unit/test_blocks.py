"""Slices of parameters as boxes of tensors, and an index that runs no code."""

import io
import pickle
from itertools import combinations_with_replacement, pairwise, product
from math import prod
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_async_rl.policy import block_files, blocks
from megatron_async_rl.policy.adam_view import ALIGNED, replica_part
from megatron_async_rl.policy.blocks import Block, Blocks, boxes
from tests.cases import looped


@looped("shape", [(), (7,), (5, 3), (1, 4), (3, 2, 2), (2, 1, 3, 2)])
def test_any_run_of_elements_is_boxes_in_their_order(shape):
    numbers = torch.arange(prod(shape)).view(shape)
    for start, end in combinations_with_replacement(range(prod(shape) + 1), 2):
        found = list(boxes(shape, start, end))
        flat = [
            numbers[tuple(slice(a, a + n) for a, n in zip(place, size, strict=True))].flatten()
            for place, size in found
        ]
        whole = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.long)
        assert whole.tolist() == list(range(start, end)), (shape, start, end, found)
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_no_box_is_larger_than_a_block_unless_a_row_is(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    found = list(boxes((10, 4), 2, 39, itemsize=4))
    assert [size for _, size in found] == [(1, 2), (4, 4), (4, 4), (1, 3)]
    assert [size for _, size in boxes((2, 100), 0, 200, itemsize=4)] == [(1, 100)] * 2


@looped(("elements", "replicas"), product((1, 63, 64, 65, 1000, 4096, 100_003), (1, 2, 3, 8)))
def test_replicas_divide_a_parameter_without_gap_or_overlap(elements, replicas):
    parts = [replica_part(elements, replica, replicas) for replica in range(replicas)]
    assert parts[0][0] == 0
    assert parts[-1][1] == elements
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(start % ALIGNED == 0 or start == elements for start, _ in parts)


def reading(saved, chunks, blocks):
    planner = block_files._LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    properties = torch.distributed.checkpoint.metadata.TensorProperties(torch.float32)
    entry = TensorStorageMetadata(properties, torch.Size(saved), [each.chunk for each in chunks])
    planner.set_up_planner({"w": Blocks(blocks)}, SimpleNamespace(state_dict_metadata={"w": entry}))
    return planner.create_local_plan()


def block(rows, first=0, whole=4, padded=False):
    return Block(torch.zeros(rows, 2), (first, 0), (whole, 2), padded)


def test_what_the_files_hold_only_a_part_of_is_refused():
    assert len(reading((4, 2), [block(2), block(2, 2)], [block(3, 1)]).items) == 2
    with pytest.raises(ValueError, match="it holds 4 of 6 elements"):
        reading((4, 2), [block(2), block(1, 3)], [block(3, 1)])
    with pytest.raises(ValueError, match=r"shape \[5, 2\] there and \[4, 2\] here"):
        reading((5, 2), [block(5, whole=5)], [block(4)])


def test_padding_may_be_more_or_less_than_the_files_have():
    more = [block(3, whole=6, padded=True), block(3, 3, whole=6, padded=True)]
    assert (
        sum(prod(item.lengths) for item in reading((5, 2), [block(5, whole=5)], more).items) == 10
    )
    less = [block(4, whole=4, padded=True)]
    assert sum(prod(item.lengths) for item in reading((5, 2), [block(5, whole=5)], less).items) == 8


def test_a_part_that_is_no_run_of_its_parameter_is_refused():
    weight = torch.arange(12.0).view(4, 3)

    def refusal(cut):
        def build(key, data, *_):
            return [ShardedTensor.from_rank_offsets(f"{key}.part", cut(data))]

        with pytest.raises(ValueError, match=r"^w\.part is not a run of the elements of its param"):
            blocks._parts_of(ShardedTensorFactory("w", weight, build, lambda found: found))

    refusal(lambda data: data.t())
    refusal(lambda data: data[1:3].clone())


def test_a_block_is_found_by_its_place():
    one, other = block(2), block(2, 2)
    assert Blocks([one, other]).at(MetadataIndex("w", (2, 0), index=7)) is other.tensor


class Command:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("value", [Command(), torch.nn.Linear, getattr])
def test_an_index_that_would_run_code_is_refused(value):
    with pytest.raises(pickle.UnpicklingError, match="an index of blocks has no"):
        block_files._Index(io.BytesIO(pickle.dumps(value))).load()
    assert block_files._Index(io.BytesIO(pickle.dumps(torch.bfloat16))).load() == torch.bfloat16

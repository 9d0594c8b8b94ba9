"""Copies of the weights: their memory, and too few snapshots for the staleness."""

from functools import partial

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.plan.layer_memory import context_masks
from megatron_async_rl.plan.machine import GIB, Gpu, Machine
from megatron_async_rl.plan.memory import rank_memory
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.policy.attention import _mask_of_last
from tests.written_run import write_run

NOTHING_LEFT = Machine(
    cores=64, memory=1024, shared_memory=64 * GIB, gpus=(Gpu("A", 80 * GIB),) * 8
)


def held(file, *overrides):
    config = load(file, overrides)
    shape, _ = read_model(config.model.path)
    memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16)
    without = rank_memory(
        load(file, [f"model.dtype={config.model.dtype}"]),
        shape,
        stage=0,
        data_parallel=1,
        longest=16,
    )
    assert memory.total == without.total
    return memory.held / shape.parameters


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        ([], 0),
        (["objective.proximal=recompute"], 0),
        (["objective.kl.coef=0.1"], 2 + 2),
        (["objective.kl.coef=0.1", "objective.reference.ema=0.9"], 4 + 2),
        (["objective.proximal=ewma"], 4 + 2),
        (["objective.proximal=snapshot", "objective.snapshots=5"], 5 * 2 + 2),
        (["objective.proximal=snapshot", "flow.async_ratio=1.5"], 3 * 2 + 2),
        (
            ["objective.proximal=snapshot", "objective.snapshots=5", "objective.kl.coef=0.1"],
            5 * 2 + 2 + 2,
        ),
        (["objective.proximal=snapshot", "objective.loss=reinforce"], 0),
    ],
)
def test_each_copy_of_the_weights_needs_host_memory(file, overrides, bytes_per_parameter):
    assert held(file, "model.dtype=bfloat16", *overrides) == bytes_per_parameter


def of_ranks(file, data_parallel, *overrides):
    config = load(file, ["model.dtype=bfloat16", *overrides])
    shape, _ = read_model(config.model.path)
    memory = rank_memory(config, shape, stage=0, data_parallel=data_parallel, longest=16)
    return memory.held / shape.parameters, memory.staged / shape.parameters


def test_data_parallel_ranks_divide_copies_and_checkpoints(file):
    snapshots = ("objective.proximal=snapshot", "objective.snapshots=5")
    assert of_ranks(file, 1, *snapshots) == (5 * 2 + 2, 14 + 4 * 2)
    assert of_ranks(file, 2, *snapshots) == pytest.approx((6, 11), rel=1e-3)
    assert of_ranks(file, 1) == (0, 14)
    assert of_ranks(file, 1, "checkpoint.asynchronous=false") == (0, 0)


def test_copies_that_exceed_host_memory_are_named_in_the_plan(file):
    plan = preflight(
        load(file, ["policy.device=cuda", "objective.proximal=ewma"]),
        all_data=True,
        machine=NOTHING_LEFT,
    )
    (problem,) = plan.problems
    assert problem.key == "host memory"
    assert "reference, proximal and past weights" in problem.what


@pytest.mark.parametrize(
    ("async_ratio", "snapshots", "needed"), [(1, 1, 2), (1.5, 2, 3), (4, 4, 5)]
)
def test_snapshots_must_include_the_version_of_the_oldest_token(
    file, async_ratio, snapshots, needed
):
    keys = ["objective.proximal=snapshot", f"flow.async_ratio={async_ratio}"]
    with pytest.raises(
        ConfigError, match=rf"objective\.snapshots: {snapshots} .*set it to at least {needed}"
    ):
        load(file, [*keys, f"objective.snapshots={snapshots}"])
    assert load(file, [*keys, f"objective.snapshots={needed}"]).objective.snapshots == needed


@pytest.mark.parametrize(("async_ratio", "kept"), [(0, 1), (1, 2), (1.5, 3), (4, 5)])
def test_without_a_number_a_run_keeps_the_versions_that_a_batch_may_contain(
    file, async_ratio, kept
):
    keys = ["objective.proximal=snapshot", f"flow.async_ratio={async_ratio}"]
    assert load(file, keys).resolved_objective.past_versions == kept
    assert load(file, [*keys, "objective.snapshots=7"]).resolved_objective.past_versions == 7


def test_an_objective_without_its_run_does_not_know_how_many_versions_to_keep():
    with pytest.raises(ValueError, match=r"objective\.snapshots is null"):
        _ = ObjectiveConfig(proximal="snapshot").past_versions


@pytest.fixture
def file(tmp_path):
    return write_run(tmp_path)


@pytest.mark.parametrize("context", [2, 4])
def test_attention_of_torch_on_a_gpu_keeps_masks_of_both_parts_of_a_row(tmp_path, context):
    length = 64
    keys = [f"policy.parallel.context={context}", f"policy.parallel.ranks={context}"]
    config = load(write_run(tmp_path), ["model.dtype=float32", *keys])
    expected = [
        _mask_of_last(length // (2 * context), end, torch.float32, torch.device("meta")).nbytes
        for end in (length // (2 * context), length)
    ]
    masks = partial(context_masks, tokens=length // context, longest=length, count=3)
    assert masks(config, on_gpu=True, layers="local") == sum(expected)
    assert masks(config, on_gpu=False, layers="local") == 0
    assert masks(config, on_gpu=True, layers="transformer_engine") == 0
    packed = load(write_run(tmp_path), ["model.dtype=float32", *keys, "policy.sequence=packed"])
    two = partial(masks, tokens=2 * length // context)
    assert two(packed, on_gpu=True, layers="local") == 2 * 3 * sum(expected)


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [("float32", 4), ("bfloat16", 6)])
def test_overlapped_reduction_needs_a_gradient_of_the_output_layer(
    tmp_path, dtype, bytes_per_element
):
    def total(*overrides, stage):
        config = load(
            write_run(tmp_path),
            [f"model.dtype={dtype}", "policy.parallel.ranks=2", *overrides],
        )
        shape, _ = read_model(config.model.path)
        memory = rank_memory(config, shape, stage=stage, data_parallel=1, longest=16)
        return memory.total, shape.vocabulary * shape.hidden

    two = "policy.parallel.pipeline=2"
    for stage, share in ((0, 0), (1, 1)):
        before, elements = total(two, stage=stage)
        overlapped, _ = total(two, "policy.parallel.overlap_grad_reduce=true", stage=stage)
        assert overlapped - before == share * bytes_per_element * elements
        adapted = [two, "policy.lora={rank: 2}"]
        before, _ = total(*adapted, stage=stage)
        overlapped, _ = total(*adapted, "policy.parallel.overlap_grad_reduce=true", stage=stage)
        assert overlapped == before

"""FP8 GEMMs, the part that is decided without a GPU: what is refused and why, the rows that
products get, what a plan counts, and what is read of Transformer Engine's objects."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async_rl.config.load import load
from megatron_async_rl.config.policy import (
    RECIPES,
    Fp8Config,
    ParallelConfig,
    PolicyConfig,
    lacking,
    version_of,
)
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.plan import doctor, machine
from megatron_async_rl.plan.machine import GIB, MIB, Gpu, Machine, described_machine
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.screen import resolved
from megatron_async_rl.policy import blocks, fp8
from megatron_async_rl.policy.attention import ContextParallelSlice
from megatron_async_rl.policy.families import PINNED, choose_layers
from megatron_async_rl.policy.packing import LAYOUTS, Segments, sequence_layout
from tests.cases import looped
from tests.written_run import write_model, write_run

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
}
"""Multiples of 128 on two tensor-parallel ranks."""
EXPERTS = SIZES | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
BASE = ("model.dtype=bfloat16", "policy.device=cuda")
HOPPER, ADA, AMPERE, BLACKWELL, LATER = (9, 0), (8, 9), (8, 0), (10, 0), (12, 0)


def node(capability: tuple[int, int] | None) -> Machine:
    return Machine(
        cores=64,
        memory=512 * GIB,
        shared_memory=64 * GIB,
        gpus=(Gpu("A", 80 * GIB, capability),) * 8,
        transformer_engine=PINNED,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    run = write_run(tmp_path)
    write_model(tmp_path / "model", **SIZES)
    return run


def plan(file: Path, *overrides: str, on: Machine | None = None) -> RunPlan:
    config = load(file, (*BASE, *overrides))
    return preflight(config, all_data=False, machine=on or node(HOPPER))


def problems(file: Path, *overrides: str, on: Machine | None = None) -> dict[str, str]:
    return {p.key: f"{p.what} | {p.fix}" for p in plan(file, *overrides, on=on).problems}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy.fp8={recipe: tensorwise}", "policy.device=cpu"), "set policy.device: cuda"),
        (("policy.fp8={recipe: tensorwise}", "policy.layers=local"), "layers: transformer_engine"),
        (("policy.fp8={recipe: tensorwise}", "model.dtype=float32"), "model.dtype: bfloat16"),
        (("policy.fp8={recipe: tensorwise}", "policy.lora={rank: 2}"), "one of the two to null"),
        (
            ("policy.fp8={recipe: delayed, first_last_layers_bf16: 1}",),
            "set it to 0, or recipe: tensorwise",
        ),
        (
            ("policy.fp8={recipe: delayed, primary_weights: true}",),
            "recipe: tensorwise or blockwise",
        ),
        (("policy.fp8={recipe: mxfp8, primary_weights: true}",), "through the gradient buffers"),
        (
            (
                "policy.fp8={recipe: blockwise, primary_weights: true}",
                "policy.parallel.distributed_optimizer=false",
            ),
            "distributed_optimizer: true",
        ),
        (("policy.fp8={recipe: e4m3}",), "recipe"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_with_what_would_be_right(file, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load(file, (*BASE, *overrides))


@looped(
    ("recipe", "capability", "cuda", "why"),
    [
        ("tensorwise", ADA, (12, 1), ""),
        ("tensorwise", AMPERE, (13, 0), "compute capability 8.9"),
        ("delayed", AMPERE, None, "compute capability 8.9"),
        ("blockwise", ADA, (13, 0), "compute capability 9.0"),
        ("blockwise", HOPPER, (12, 8), "needs CUDA 12.9"),
        ("blockwise", HOPPER, (12, 9), ""),
        ("blockwise", None, None, ""),
        ("mxfp8", HOPPER, (13, 0), "compute capability 10.0"),
        ("mxfp8", BLACKWELL, (13, 0), ""),
        ("mxfp8", LATER, (13, 0), "no mxfp8"),
    ],
)
def test_a_device_has_a_recipe_from_its_capability_and_cuda_on(recipe, capability, cuda, why):
    found = lacking(recipe, capability, cuda)
    assert why in found
    assert bool(found) == bool(why)


def test_a_rank_refuses_a_recipe_that_its_gpu_or_cuda_lacks(monkeypatch):
    layout = SimpleNamespace(device_type="cuda", device=torch.device("cuda", 0), rank=3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    fp8.refuse_device(None, layout)
    fp8.refuse_device(Fp8Config(recipe="tensorwise"), layout)
    with pytest.raises(UserError, match=r"rank 3: blockwise needs CUDA 12\.9"):
        fp8.refuse_device(Fp8Config(recipe="blockwise"), layout)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    with pytest.raises(UserError, match=r"rank 3: delayed needs compute capability 8\.9"):
        fp8.refuse_device(Fp8Config(recipe="delayed"), layout)


def test_a_version_of_cuda_is_compared_as_numbers():
    assert version_of("12.10.1") == (12, 10) > (12, 9)
    assert version_of("9.0") == (9, 0)
    assert version_of(None) is version_of("[N/A]") is version_of("13") is None


def test_a_plan_refuses_a_recipe_that_its_gpus_lack_and_names_those_they_have(file):
    found = problems(file, "policy.fp8={recipe: mxfp8}")
    assert "compute capability 10.0" in found["policy.fp8.recipe"]
    assert "set it to tensorwise or blockwise" in found["policy.fp8.recipe"]
    found = problems(file, "policy.fp8={recipe: tensorwise}", on=node(AMPERE))
    assert "set policy.fp8: null" in found["policy.fp8.recipe"]
    assert problems(file, "policy.fp8={recipe: blockwise}") == {}


def test_a_plan_for_other_machines_states_their_requirements(file):
    elsewhere = described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    found = plan(file, "policy.fp8={recipe: blockwise}", on=elsewhere)
    assert found.problems == ()
    assert any("capability 9.0 or higher, and CUDA 12.9" in said for said in found.warnings)
    here = plan(file, "policy.fp8={recipe: blockwise}")
    assert not any("capability" in said for said in here.warnings)


def test_layers_that_are_not_transformer_engines_refuse_8_bit_products(file):
    without = Machine(**{**vars(node(HOPPER)), "transformer_engine": None})
    found = problems(file, "policy.fp8={recipe: tensorwise}", on=without)
    assert "it is not installed" in found["policy.fp8"]
    fitting = {"model_type": "qwen3", "dtype": "bfloat16", "lora": False, "engine": PINNED}
    for asked, device in (("local", "cuda"), ("auto", "cpu")):
        with pytest.raises(UserError) as refused:
            choose_layers(asked, device=device, fp8=True, **fitting)
        assert refused.value.problems[0].key == "policy.fp8"
    assert choose_layers("auto", device="cuda", fp8=True, **fitting).family == "transformer_engine"


@pytest.mark.parametrize(
    ("recipe", "changes", "tensor", "named"),
    [
        ("tensorwise", {}, 2, None),
        ("blockwise", {}, 2, None),
        ("blockwise", {}, 4, "192 (queries, keys and values of a rank), 64 (attention outputs"),
        ("tensorwise", {"hidden_size": 264}, 1, "264 (hidden size)"),
        ("tensorwise", {"intermediate_size": 528}, 4, "132 (MLP columns of a rank)"),
        ("mxfp8", {"intermediate_size": 528}, 1, "528 (MLP columns of a rank)"),
    ],
)
def test_sizes_that_a_recipe_does_not_divide_are_refused_by_name(
    file, recipe, changes, tensor, named
):
    write_model(file.parent / "model", **SIZES | changes)
    layout = (f"policy.parallel.tensor={tensor}", f"policy.parallel.ranks={tensor}")
    on = node(BLACKWELL)
    found = problems(file, f"policy.fp8={{recipe: {recipe}}}", *layout, on=on)
    assert (named is None) == (found == {})
    if named is not None:
        assert named in found["policy.fp8.recipe"]
        assert ("lower policy.parallel.tensor" in found["policy.fp8.recipe"]) == (tensor > 1)


def test_layers_kept_in_bfloat16_leave_some_in_8_bits_and_lie_in_one_stage(file):
    asked = "policy.fp8={recipe: blockwise, first_last_layers_bf16: %d}"
    assert problems(file, asked % 1) == {}
    assert "at most 1" in problems(file, asked % 2)["policy.fp8.first_last_layers_bf16"]
    write_model(file.parent / "model", **SIZES | {"num_hidden_layers": 8})
    assert problems(file, asked % 3) == {}
    cut = ("policy.parallel.pipeline=4", "policy.parallel.ranks=4")
    assert "at most 2" in problems(file, asked % 3, *cut)["policy.fp8.first_last_layers_bf16"]


PARALLEL = {
    "alone": {},
    "tensor": {"ranks": 2, "tensor": 2},
    "sequence": {"ranks": 2, "tensor": 2, "sequence": True},
    "context": {"ranks": 2, "context": 2},
    "both": {"ranks": 12, "context": 2, "tensor": 6, "sequence": True},
}
ROWS = {"tensorwise": (16, 16), "delayed": (16, 16), "blockwise": (16, 128), "mxfp8": (32, 32)}
"""Recipe -> multiple of a rank's rows, without sequence parallelism and with it."""


@looped("name", LAYOUTS)
@looped("layout", PARALLEL)
@looped("recipe", RECIPES)
def test_a_ranks_rows_are_a_multiple_of_the_recipes_on_every_layout(recipe, layout, name):
    parallel = ParallelConfig(**PARALLEL[layout])
    policy = PolicyConfig(parallel=parallel, fp8=Fp8Config(recipe=recipe))
    rows = sequence_layout(name, policy.row_multiple, ContextParallelSlice(0, parallel.context))
    wanted = ROWS[recipe][parallel.sequence]
    shared = parallel.tensor if parallel.sequence else 1
    for fed in ([], [1], [7, 33, 200], [129, 5]):
        lengths = np.array(fed, dtype=np.int64)
        segments = Segments.apart(lengths)
        whole, filled = math.prod(rows.shape(segments)), rows.arrange(segments).lengths
        assert len(rows.own(filled)) * parallel.context == whole
        assert whole % (parallel.context * shared) == 0
        assert whole // (parallel.context * shared) % wanted == 0
        # What fills up comes behind what is fed.
        assert int(filled.sum()) == whole >= lengths.sum()


@pytest.mark.parametrize("layout", PARALLEL)
def test_without_8_bit_products_rows_are_what_the_layout_divides(layout):
    expected = {"alone": 1, "tensor": 1, "sequence": 2, "context": 4, "both": 12}
    assert (
        PolicyConfig(parallel=ParallelConfig(**PARALLEL[layout])).row_multiple == expected[layout]
    )


@looped("primary", [False, True])
@looped("recipe", RECIPES)
def test_megatron_takes_the_settings_of_every_recipe(recipe, primary):
    kept = 0 if recipe == "delayed" else 1
    asked = Fp8Config(recipe=recipe, primary_weights=primary, first_last_layers_bf16=kept)
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, **fp8.megatron_settings(asked)
    )
    assert (config.fp8_recipe, config.fp8_param) == (recipe, primary)
    assert config.num_layers_at_start_in_bf16 == config.num_layers_at_end_in_bf16 == kept
    assert config.first_last_layers_bf16 == bool(kept)
    assert config.tp_only_amax_red
    assert fp8.megatron_settings(None) == {}


def memory(file: Path, *overrides: str) -> Any:
    return plan(file, *overrides).ranks[0]


LAYER = 256 * (3 * 256 + 256 + 3 * 512)
"""Weights of a layer's products."""


def test_a_plan_counts_weights_in_8_bits_in_both_orientations_with_their_scales(file):
    plain = memory(file)
    assert plain.fp8 == 0
    for recipe, scale in (("tensorwise", 0.0), ("blockwise", 4 / 128**2)):
        rounded = memory(file, f"policy.fp8={{recipe: {recipe}}}")
        assert rounded.fp8 == int(4 * LAYER * 2 * (1 + scale))
        assert rounded.total - rounded.activations == (
            plain.total - plain.activations + rounded.fp8
        )
        kept = memory(file, f"policy.fp8={{recipe: {recipe}, primary_weights: true}}")
        assert kept.fp8 == int(4 * LAYER * (2 * (1 + scale) - 2))
        ends = f"policy.fp8={{recipe: {recipe}, first_last_layers_bf16: 1}}"
        assert memory(file, ends).fp8 == int(2 * LAYER * 2 * (1 + scale))


FULL = "policy.recompute=full"
SEQUENCE = ("policy.parallel={ranks: 2, tensor: 2, sequence: true}",)


@pytest.mark.parametrize(
    ("recipe", "more", "fewer"),
    [
        # Queries, keys and values take 256 numbers of a token, the MLP's two products 256 and 512.
        ("tensorwise", (), 4 * 1024),
        ("blockwise", (), 4 * 1024 * (1 - 4 / 128)),
        ("mxfp8", (), 4 * 1024 * (1 - 1 / 32)),
        # Attention's 256 outputs are kept in 8 bits in addition to bfloat16.
        ("delayed", (), 4 * (1024 - 256)),
        ("tensorwise", ("policy.fp8.first_last_layers_bf16=1",), 2 * 1024),
        ("tensorwise", ("policy.recompute=selective",), 4 * 1024),
        ("tensorwise", (FULL,), 1024),
        ("tensorwise", (FULL, "policy.fp8.first_last_layers_bf16=1"), 0),
        ("tensorwise", ("policy.parallel={ranks: 2, tensor: 2}",), 4 * (512 + 512 // 2)),
        ("tensorwise", SEQUENCE, 4 * 1024 // 2),
        # The first of two stages has two micro-batches in flight, of two layers each.
        ("tensorwise", ("policy.parallel={ranks: 2, pipeline: 2}",), 2 * 2 * 1024),
    ],
)
def test_inputs_of_products_are_counted_in_8_bits(file, recipe, more, fewer):
    asked, tokens = f"policy.fp8={{recipe: {recipe}}}", "policy.tokens_per_micro_batch=16"
    plain = [each for each in more if not each.startswith("policy.fp8")]
    on = node(BLACKWELL)
    usual, rounded = (
        plan(file, *given, tokens, on=on).ranks[0].activations for given in (plain, (asked, *more))
    )
    assert usual - rounded == 16 * fewer


def test_experts_keep_the_copies_of_their_tokens_in_8_bits(file):
    write_model(file.parent / "model", **EXPERTS)
    tokens = "policy.tokens_per_micro_batch=16"
    usual, rounded = memory(file, tokens), memory(file, tokens, "policy.fp8={recipe: tensorwise}")
    assert usual.activations - rounded.activations == 4 * 16 * (256 + 2 * (256 + 128))


def test_a_rank_rounds_the_weights_of_its_own_experts_which_tensor_parallelism_does_not_cut(file):
    write_model(file.parent / "model", **EXPERTS)
    layout = "policy.parallel={ranks: 4, tensor: 2, expert: 2, sequence: true}"
    for recipe, scale in (("tensorwise", 0.0), ("blockwise", 4 / 128**2)):
        found = plan(file, f"policy.fp8={{recipe: {recipe}}}", layout)
        assert found.problems == ()
        weights = 256 * (128 + 2 * 64 + 128) + 2 * 256 * 3 * 128
        assert found.ranks[0].fp8 == int(4 * weights * 2 * (1 + scale))


def test_rounded_weights_are_counted_for_each_micro_batch_in_flight(file):
    asked = "policy.fp8={recipe: tensorwise}"
    cut = ("policy.parallel.pipeline=2", "policy.parallel.ranks=2")
    whole = plan(file, asked, *cut).ranks
    assert [stage.fp8 for stage in whole] == [2 * LAYER * 2] * 2, "one micro-batch"
    # Several micro-batches from here on.
    small = "policy.tokens_per_micro_batch=16"
    stages = plan(file, asked, small, *cut).ranks
    # The first of two stages runs a second micro-batch before the first one's backward pass.
    assert [stage.fp8 for stage in stages] == [2 * 2 * LAYER * 2, 2 * LAYER * 2]
    assert memory(file, asked, "policy.recompute=full").fp8 == LAYER * 2
    ends, four = "policy.fp8.first_last_layers_bf16=1", "policy.parallel={ranks: 4, pipeline: 4}"
    in_flight = [0, 3, 2, 0]
    stages = plan(file, asked, small, ends, four).ranks
    assert [stage.fp8 for stage in stages] == [count * LAYER * 2 for count in in_flight]


def test_copies_of_weights_kept_in_8_bits_are_float32_and_the_model_is_not_staged(file):
    reference = ("objective.kl={coef: 0.1}", "objective.reference={}")
    asked = "policy.fp8={recipe: blockwise, primary_weights: true}"
    plain, kept = memory(file, *reference), memory(file, asked, *reference)
    assert kept.held == 2 * plain.held
    parameters = plain.parameters // 2
    assert plain.staged - kept.staged == 2 * parameters


def test_mar_doctor_lists_the_recipes_that_every_gpu_has(monkeypatch):
    monkeypatch.setattr(doctor, "_torch", lambda path: ([], "12.8"))

    def listed(*capabilities: tuple[int, int] | None) -> str | None:
        gpus = tuple(Gpu("A", 80 * GIB, each) for each in capabilities)
        on = Machine(cores=64, memory=512 * GIB, shared_memory=64 * GIB, gpus=gpus)
        found = [one for one in doctor.examine(on) if one.part == "FP8 recipes"]
        return found[0].found if found else None

    assert listed(HOPPER) == "tensorwise, delayed"
    assert listed(BLACKWELL, HOPPER) == "tensorwise, delayed"
    assert listed(BLACKWELL) == "tensorwise, delayed, mxfp8"
    assert listed(AMPERE) == "none"
    assert listed() is listed(None) is None
    monkeypatch.setattr(doctor, "_torch", lambda path: ([], "13.0"))
    assert listed(HOPPER) == "tensorwise, blockwise, delayed"


def test_a_gpus_capability_is_read_with_its_memory(monkeypatch):
    said = "0, GPU-a, NVIDIA H200, 143771, 9.0, 0\n1, GPU-b, Old, 1024, [N/A], [N/A]\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    asked = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=said)

    monkeypatch.setattr(machine.subprocess, "run", run)
    gpus = machine.this_machine().gpus
    hopper = Gpu("NVIDIA H200", 143771 * MIB, HOPPER, index="0")
    assert gpus == (hopper, Gpu("Old", 1024 * MIB, None, index="1"))
    assert "compute_cap" in asked[0][1]


def test_the_plan_names_what_is_rounded_and_prints_the_setting(file):
    config = load(file, (*BASE, "policy.fp8={recipe: blockwise}"))
    assert "fp8: {recipe: blockwise" in resolved(config)


class Scaled(torch.nn.Module):
    """Stand-in for a Transformer Engine module under delayed scaling, whose state is created in
    its first pass."""

    def __init__(self, scales: int | None) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        if scales is not None:
            self.init_fp8_meta_tensors(None, scales)

    def init_fp8_meta_tensors(self, recipe: Any, scales: int = 3) -> None:
        for direction, count in (("scaling_fwd", scales), ("scaling_bwd", 2)):
            self.fp8_meta.setdefault(
                direction,
                SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(4, count)),
            )


def scaling_chunk(scales: int | None) -> torch.nn.Module:
    return torch.nn.ModuleDict({"a": Scaled(scales), "attention": Scaled(None)})


def test_the_state_of_delayed_scaling_continues_in_a_new_model():
    learnt = scaling_chunk(3)
    for number, direction in enumerate(("scaling_fwd", "scaling_bwd")):
        learnt["a"].fp8_meta[direction].scale.fill_(2.0 + number)
        learnt["a"].fp8_meta[direction].amax_history[1].fill_(5.0 + number)
    state = fp8.delayed_state([learnt])
    assert set(state) == {
        f"0.a.{direction}.{part}"
        for direction in ("scaling_fwd", "scaling_bwd")
        for part in ("scale", "amax_history")
    }
    learnt["a"].fp8_meta["scaling_fwd"].scale.zero_()
    assert state["0.a.scaling_fwd.scale"].tolist() == [2.0] * 3, "the state is no copy"

    fresh = scaling_chunk(None)
    fp8.restore_delayed_state([fresh], state, SimpleNamespace(fp8=None))
    again = fp8.delayed_state([fresh])
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], kept) for name, kept in state.items())
    assert "scaling_fwd" not in fresh["attention"].fp8_meta
    assert fp8.delayed_state([torch.nn.Linear(2, 2), scaling_chunk(None)]) == {}
    with pytest.raises(KeyError):
        fp8.restore_delayed_state([torch.nn.Linear(2, 2)], state, SimpleNamespace(fp8=None))


class In8Bits(torch.Tensor):
    """Stand-in for Transformer Engine's FP8 tensor: it reports bfloat16 and must be dequantized."""

    def dequantize(self) -> torch.Tensor:
        return torch.full(self.shape, 3.0, dtype=self.dtype)

    def chunk(self, parts: int) -> list[torch.Tensor]:
        return [part.clone() for part in self.as_subclass(torch.Tensor).chunk(parts)]


def test_values_of_a_weight_kept_in_8_bits_are_made_when_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(fp8, "is_float8tensor", lambda tensor: isinstance(tensor, In8Bits))
    held = torch.zeros(2, 3, dtype=torch.bfloat16).as_subclass(In8Bits)
    assert torch.equal(fp8.plain(held), torch.full((2, 3), 3.0, dtype=torch.bfloat16))
    usual = torch.nn.Parameter(torch.ones(2))
    found = fp8.plain(usual)
    assert found.data_ptr() == usual.data_ptr()
    assert not found.requires_grad


def test_a_fused_weight_kept_in_8_bits_has_the_places_of_one_that_is_not(monkeypatch):
    """Cutting such a weight makes new tensors, which say nothing of where they lay."""
    monkeypatch.setattr(blocks, "is_quantised", lambda tensor: isinstance(tensor, In8Bits))
    weight = torch.arange(24.0, dtype=torch.bfloat16).view(6, 4)

    def build(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", part)
            for name, part in zip(("gate", "up"), data.chunk(2), strict=True)
        ]

    usual, kept = (
        [
            (first, part.key, part.local_shape, part.global_offset)
            for first, part in blocks._parts_of(
                ShardedTensorFactory("w", held, build, lambda found: found)
            )
        ]
        for held in (weight, weight.as_subclass(In8Bits))
    )
    assert kept == usual
    assert [first for first, *_ in usual] == [0, 12]


def test_weights_that_a_module_keeps_in_8_bits_between_micro_batches_can_be_given_up():
    """The attribute's name is that of Transformer Engine 2.11."""
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    chunk[1]._fp8_workspaces = {"weight": torch.ones(2, 2)}
    fp8.drop_workspaces([chunk])
    assert chunk[1]._fp8_workspaces == {}

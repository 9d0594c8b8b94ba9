"""The two families of layers: which is taken, and that their parameters, exports and checkpoints
are one another's."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.plan.machine import GIB, Gpu, Machine, described_machine, this_machine
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.policy.families import FAMILIES, PINNED, ChosenLayers, choose_layers
from megatron_async_rl.policy.layers import CHECKPOINT_KEYS, LAYERS
from megatron_async_rl.policy.model import refuse_mixed
from megatron_async_rl.policy.parameters import whole_model_names
from tests.cases import looped
from tests.tiny_models import save_tiny_model
from tests.written_run import write_run

NODE = Machine(
    cores=64,
    memory=512 * GIB,
    shared_memory=64 * GIB,
    gpus=(Gpu("A", 80 * GIB),) * 8,
    transformer_engine=PINNED,
)
FITTING = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "device": "cuda",
    "lora": False,
    "engine": PINNED,
}
OBSTACLES = [
    ({"device": "cpu"}, "on the CPU"),
    ({"engine": None}, "not installed"),
    ({"engine": "2.10.0"}, "version is 2.10.0, and 2.11 and 2.12 are"),
    ({"engine": "2.13.0+cu13"}, "install transformer-engine==2.12.0"),
    ({"engine": "3.11"}, "version is 3.11"),
    ({"engine": "not known"}, "version is not known"),
    ({"dtype": "float32"}, "TF32"),
    ({"lora": True}, "policy.lora"),
    ({"model_type": "gemma3_text"}, "norms after attention"),
]
MODELS = {
    "llama": {"attention_bias": True},
    "qwen2": {"tied": True},
    "qwen3": {},
    "qwen3_moe": {},
}
SHARED = {"ranks": 2, "tensor": 2, "sequence": True}


@looped(
    ("own", "canonical"),
    [
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.1.input_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.0.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc2.weight17",
            "decoder.layers.3.mlp.experts.local_experts.17.linear_fc2.weight",
        ),
        *(
            (name, name)
            for name in (
                "decoder.layers.0.pre_mlp_layernorm.weight",
                "decoder.layers.0.self_attention.linear_qkv.weight",
                "decoder.layers.0.self_attention.q_layernorm.weight",
                "decoder.layers.0.mlp.linear_fc1.weight",
                "decoder.layers.0.mlp.router.weight",
                "decoder.final_layernorm.weight",
                "output_layer.weight",
                "value_head.bias",
            )
        ),
    ],
)
def test_a_parameter_of_transformer_engine_has_the_local_ones_name(own, canonical):
    assert LAYERS["transformer_engine"].canonical(own) == canonical
    assert LAYERS["local"].canonical(canonical) == canonical


@pytest.mark.parametrize("expert", ["linear_fc1.weight1", "local_experts.1.linear_fc1.weight"])
def test_a_ranks_experts_are_numbered_over_the_whole_model_in_either_family(expert):
    chunk = torch.nn.Module()
    *path, last = f"decoder.layers.0.mlp.experts.{expert}".split(".")
    owner = chunk
    for name in path:
        owner.add_module(name, torch.nn.Module())
        owner = owner.get_submodule(name)
    owner.register_parameter(last, torch.nn.Parameter(torch.zeros(2)))
    fused = LAYERS["transformer_engine"]
    bridge = SimpleNamespace(
        global_names=lambda held: {
            name: fused.canonical(name.replace("layers.0", "layers.5"))
            for name, _ in held.named_parameters()
        },
        mpu=SimpleNamespace(ep_size=2, ep_rank=1),
        config=SimpleNamespace(num_moe_experts=8),
    )
    ((parameter, name),) = whole_model_names(bridge, chunk)
    assert parameter is owner.get_parameter(last)
    assert name == "decoder.layers.5.mlp.experts.local_experts.5.linear_fc1.weight"


def test_keys_in_checkpoints_are_those_of_checkpoints_written_before():
    assert CHECKPOINT_KEYS == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


@looped("family", FAMILIES)
def test_auto_takes_transformer_engine_where_it_computes_the_model(family):
    found = choose_layers("auto", **FITTING | {"model_type": family}).family
    assert found == ("local" if family == "gemma3_text" else "transformer_engine")


@looped(("changes", "why"), OBSTACLES)
def test_transformer_engine_is_refused_by_name_and_never_stood_in_for(changes, why):
    with pytest.raises(UserError) as refused:
        choose_layers("transformer_engine", **FITTING | changes)
    (problem,) = refused.value.problems
    assert problem.key == "policy.layers"
    assert why in problem.what
    automatic = choose_layers("auto", **FITTING | changes)
    assert automatic.family == "local"
    assert why in automatic.why
    assert choose_layers("local", **FITTING | changes) == ChosenLayers("local")


@pytest.mark.parametrize("place", [".", "transformer_engine", "transformer_engine/wheel_lib"])
def test_transformer_engine_is_found_wherever_its_build_put_it(tmp_path, monkeypatch, place):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    about = tmp_path / "transformer_engine-2.11.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: transformer-engine\nVersion: 2.11.0\n")
    assert this_machine().transformer_engine is None
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert this_machine().transformer_engine == "2.11.0"
    (about / "METADATA").unlink()
    about.rmdir()
    assert this_machine().transformer_engine == "not known"


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0", "2.12.0.post1+cu13"])
def test_a_version_of_transformer_engine_that_was_checked_is_taken(version):
    assert choose_layers("auto", **FITTING | {"engine": version}).family == "transformer_engine"


def test_the_image_installs_the_version_of_transformer_engine_that_is_asked_for():
    root = Path(__file__).resolve().parents[2]
    locked = (root / "requirements" / "gpu.txt").read_text().splitlines()
    # Its parts do not import without the first.
    assert {f"transformer-engine=={PINNED}", f"transformer-engine-cu13=={PINNED}"} <= {*locked}
    assert f" transformer-engine-torch=={PINNED} " in (root / "Dockerfile").read_text()
    # It is installed without what it requires.
    assert {"onnx", "onnxscript", "nvdlfw-inspect"} <= {line.partition("==")[0] for line in locked}


def test_ranks_with_different_layers_are_refused_by_number():
    refuse_mixed(["local", "local"])
    refuse_mixed(["transformer_engine"] * 2)
    with pytest.raises(UserError, match="ranks 1, 3 cannot use"):
        refuse_mixed(["transformer_engine", "local"] * 2)


def plan(file: Path, *overrides: str, machine: Machine = NODE) -> RunPlan:
    config = load(file, ("policy.device=auto", *overrides))
    return preflight(config, all_data=False, machine=machine)


def test_a_plan_refuses_layers_that_cannot_be_had_and_names_those_it_takes(tmp_path):
    file, bf16 = write_run(tmp_path), "model.dtype=bfloat16"
    asked = plan(file, bf16, "policy.layers=transformer_engine", "policy.device=cpu")
    assert [problem.key for problem in asked.problems] == ["policy.layers"]
    assert plan(file, bf16).layers == ChosenLayers("transformer_engine")
    assert "TF32" in plan(file, "model.dtype=float32").layers.why
    machine = described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    assert plan(file, bf16, machine=machine).layers == ChosenLayers("transformer_engine")


def test_a_plan_takes_local_layers_beside_a_transformer_engine_that_was_not_checked(tmp_path):
    file, bf16 = write_run(tmp_path), "model.dtype=bfloat16"
    newer = dataclasses.replace(NODE, transformer_engine="2.14.1")
    assert "2.14.1" in plan(file, bf16, machine=newer).layers.why
    (asked,) = plan(file, bf16, "policy.layers=transformer_engine", machine=newer).problems
    assert (asked.key, "install transformer-engine==2.12.0" in asked.what) == (
        "policy.layers",
        True,
    )
    (rounded,) = plan(file, bf16, "policy.fp8={recipe: tensorwise}", machine=newer).problems
    assert rounded.key == "policy.fp8"
    assert "install transformer-engine==2.12.0" in rounded.what


def test_a_plan_counts_a_fused_gate_and_rotation_without_what_they_do_not_keep(tmp_path):
    file, bf16 = write_run(tmp_path), "model.dtype=bfloat16"
    fused, local = (
        plan(file, bf16, "policy.tokens_per_micro_batch=16", f"policy.layers={layers}")
        .ranks[0]
        .activations
        for layers in ("transformer_engine", "local")
    )
    sizes = json.loads((load(file, ()).model.path / "config.json").read_text())
    longest = plan(file, bf16).batch.longest
    gate, rotation = 2 * sizes["intermediate_size"], 4 * sizes["head_dim"]
    assert local - fused == 2 * sizes["num_hidden_layers"] * (16 * gate + longest * rotation)


def test_a_plan_counts_no_copies_of_packed_rows_where_transformer_engine_takes_them(tmp_path):
    given = ("model.dtype=bfloat16", "policy.tokens_per_micro_batch=24")
    given += ("policy.prefix_sharing=never",)
    file = write_run(tmp_path)
    kept = {
        (layers, sequence): plan(
            file, *given, f"policy.layers={layers}", f"policy.sequence={sequence}"
        )
        .ranks[0]
        .activations
        for layers in ("transformer_engine", "local")
        for sequence in ("packed", "padded")
    }
    assert kept["transformer_engine", "packed"] == kept["transformer_engine", "padded"]
    assert kept["local", "packed"] > kept["local", "padded"]


needs_transformer_engine = pytest.mark.skipif(
    not HAVE_TE, reason="needs Transformer Engine, which does not import (no GPU is needed)"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Model and layout -> both families' sides, from tests/unit/layers_program.py."""
    folder = tmp_path_factory.mktemp("layers")
    for name, settings in MODELS.items():
        for part in ("all", "mixtures" if FAMILIES[name].mixture else "dense"):
            save_tiny_model(folder / part / name, name, dtype="bfloat16", **settings)
    found = {}
    for layout, models, rank, parallel in (
        ("alone", "all", 0, {}),
        ("shared", "dense", 1, SHARED),
        ("shared", "mixtures", 1, SHARED | {"expert": 2}),
    ):
        arguments = [folder / models, str(rank), json.dumps(parallel), folder]
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.layers_program", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "NVTE_FRAMEWORK": "pytorch"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for name, sides in json.loads(done.stdout.splitlines()[-1]).items():
            found[name, layout] = sides
    return found


@needs_transformer_engine
@looped("layout", ["alone", "shared"])
@looped("model", MODELS)
def test_both_families_have_the_same_parameters_and_write_the_same_blocks(built, model, layout):
    local, fused = (built[model, layout][layers] for layers in LAYERS)
    assert fused["parameters"] == local["parameters"]
    assert fused["blocks"] == local["blocks"]
    norms = {name for name in fused["own"] if "layer_norm_weight" in name}
    mixture = FAMILIES[model].mixture
    # Experts get their inputs through the router, so that norm stands alone.
    assert len(norms) == (2 if mixture else 4)
    grouped = [name for name in fused["own"] if ".mlp.experts.linear_fc" in name]
    assert len(grouped) == (2 * 2 * (4 if layout == "alone" else 2) if mixture else 0)
    assert not norms & set(local["own"])


@needs_transformer_engine
@pytest.mark.parametrize("model", MODELS)
def test_each_family_loads_the_others_checkpoint_and_exports_the_same_files(built, model):
    local, fused = (built[model, "alone"][layers] for layers in LAYERS)
    assert fused["exported"] == local["exported"]
    assert fused["from_other"] == local["from_other"] == local["parameters"]


@needs_transformer_engine
@pytest.mark.parametrize("model", MODELS)
def test_every_product_of_a_layer_adds_its_gradient_to_megatrons_buffers(built, model):
    local, fused = (built[model, "alone"][layers] for layers in LAYERS)
    assert len(fused["into_gradients"]) == 2 * 4
    assert not any("output_layer" in name for name in fused["into_gradients"])
    assert local["into_gradients"] == []
    assert set(fused["settings"].values()) == {True}
    assert set(local["settings"].values()) == {False}


def test_layers_of_transformer_engine_add_gradients_to_megatrons_buffers() -> None:
    """Only modules that have the setting: the others' attributes are their own."""
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    chunk[0].fuse_wgrad_accumulation = False
    LAYERS["transformer_engine"].finish(chunk)
    assert chunk[0].fuse_wgrad_accumulation is True
    assert not hasattr(chunk[1], "fuse_wgrad_accumulation")

"""policy.lora: what is refused before anything starts, what the plan counts, and the pieces of a
fused matrix."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.plan.layer_memory import sides, stage_adapters
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.memory import engine_memory, rank_memory
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.resume import checkpoint_problems, conflicts
from megatron_async_rl.policy.lora import FusedRows
from tests.tiny_models import save_tiny_model
from tests.written_run import write_run

MACHINE = Machine(cores=64, memory=64 * GIB, shared_memory=64 * GIB, gpus=())


@pytest.fixture
def file(tmp_path):
    return write_run(tmp_path)


def refused(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return " ".join(str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("{rank: 0}", "policy.lora.rank"),
        ("{alpha: 0}", "policy.lora.alpha"),
        ("{dropout: 1.0}", "policy.lora.dropout"),
        ("{dropout: -0.1}", "policy.lora.dropout"),
        ("{targets: [q_prj]}", "did you mean `q_proj`?"),
        ("{targets: [lm_head]}", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("{targets: []}", "name at least one"),
        ("{targets: [q_proj, k_proj, q_proj]}", "names q_proj twice"),
    ],
)
def test_settings_out_of_range_are_refused_with_key_and_fix(file, setting, says):
    assert says in refused(file, f"policy.lora={setting}")


def test_a_reference_from_another_directory_is_refused(file):
    keys = ["policy.lora={}", "objective.kl.coef=0.1", f"objective.reference.path={file.parent}"]
    assert "a rank holds whole weights of the base model only" in refused(file, *keys)
    assert load(file, keys[:2]).policy.lora.rank == 16


def problems(file, model, setting):
    keys = [f"model.path={model}", f"policy.lora={setting}"]
    return {one.key: one for one in preflight(load(file, keys), all_data=False).problems}


def test_a_rank_above_the_smallest_side_is_refused_with_the_largest_that_fits(file, tmp_path):
    model = save_tiny_model(tmp_path / "tiny")
    found = problems(file, model, "{rank: 17}")["policy.lora.rank"]
    assert found.what == "17 is more than 16, the smaller side of k_proj"
    assert "at most 16" in found.fix
    assert "policy.lora.rank" not in problems(file, model, "{rank: 16}")
    assert "policy.lora.rank" not in problems(file, model, "{rank: 17, targets: [q_proj]}")


def test_experts_as_targets_are_refused_by_name(file, tmp_path):
    model = save_tiny_model(tmp_path / "mixture", "qwen3_moe")
    found = problems(file, model, "{rank: 2}")["policy.lora.targets"]
    assert found.what.startswith("gate_proj, up_proj, down_proj are experts")
    assert found.fix == "set it to [q_proj, k_proj, v_proj, o_proj]"
    attention = "{rank: 2, targets: [q_proj, k_proj, v_proj, o_proj]}"
    assert "policy.lora.targets" not in problems(file, model, attention)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {"head_dim": 12}), ("qwen3", {}), ("gemma3_text", {})],
)
def test_sides_are_those_of_the_files_matrices(tmp_path, family, settings):
    from safetensors import safe_open

    folder = save_tiny_model(tmp_path / family, family, **settings)
    shape, _ = read_model(folder)
    with safe_open(str(folder / "model.safetensors"), "pt") as held:
        found = {}
        for name in held.keys():  # noqa: SIM118 - a safetensors handle, not a dict
            if name.startswith("model.layers.1.") and name.endswith("_proj.weight"):
                outputs, inputs = held.get_slice(name).get_shape()
                found[name.split(".")[-2]] = (inputs, outputs)
    assert len(found) == 7
    assert {target: sides(shape, target) for target in found} == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_and_state_are_planned_for_adapters_alone(file, dtype):
    keys = [f"model.dtype={dtype}", "policy.lora={rank: 4}", "objective.kl.coef=0.1"]
    config = load(file, keys)
    shape, _ = read_model(config.model.path)
    adapters = stage_adapters(config.policy.lora, shape, pipeline=1, tensor=1)
    memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16)
    size, state = {"float32": (4, 8), "bfloat16": (2, 12)}[dtype]
    assert memory.parameters == (shape.parameters + adapters) * size
    assert memory.gradients == 4 * adapters
    assert memory.optimizer == state * adapters
    assert memory.held == 2 * size * adapters
    assert adapters == sum(
        shape.layers * 4 * sum(sides(shape, target)) for target in config.policy.lora.targets
    )


def test_a_run_with_other_adapters_is_not_gone_on_with(file):
    config = load(file, ["policy.lora={rank: 4}"])
    folder = config.run.dir / "checkpoint" / "step_00000002"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    (config.run.dir / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert conflicts(config) == []
    for setting in ("{rank: 8}", "null"):
        changed = load(file, [f"policy.lora={setting}"])
        assert any(one.key.startswith("policy.lora") for one in conflicts(changed))


def test_a_checkpoint_of_whole_weights_is_refused_without_an_older_config(file):
    config = load(file, ["policy.lora={rank: 4}"])
    folder = config.run.dir / "checkpoint" / "step_00000002"
    (folder / "sharded").mkdir(parents=True)
    (folder / "sharded" / ".metadata").touch()
    torch.save({}, folder / "state.pt")
    (folder.parent / "latest").write_text(folder.name)
    for held, refused in (
        (None, True),
        (config.policy.lora.model_dump(mode="json"), False),
        ({**config.policy.lora.model_dump(mode="json"), "alpha": 1.0}, True),
    ):
        about = {"step": 2} | ({"lora": held} if held else {})
        (folder / "about.json").write_text(json.dumps(about))
        assert ("policy.lora" in {one.key for one in checkpoint_problems(config, None)}) == refused


def test_parts_of_a_fused_matrix_lie_group_by_group_and_missing_ones_are_zero():
    rows = FusedRows({"q": 2, "k": 1, "v": 1}, groups=2)
    q, v = torch.arange(1.0, 5.0), torch.tensor([7.0, 8.0])
    assert rows.fused({"q": q, "v": v}).tolist() == [1, 2, 0, 7, 3, 4, 0, 8]
    assert rows.fused({"v": v[None]}).shape == (1, 8)


NARROW = ("model.dtype=bfloat16", "policy.lora={merge: float32}")


def test_engines_of_a_merge_in_float32_compute_in_it_and_are_planned_so(file):
    whole, exact = load(file, [NARROW[0], "policy.lora={}"]), load(file, NARROW)
    assert (whole.engine_dtype, exact.engine_dtype) == ("bfloat16", "float32")
    assert exact.model.dtype == "bfloat16"
    shape, _ = read_model(exact.model.path)
    half, full = (engine_memory(each, shape, on_gpu=True) for each in (whole, exact))
    assert (full.weights, full.bytes_per_token) == (2 * half.weights, 2 * half.bytes_per_token)
    ranks = [
        rank_memory(each, shape, stage=0, data_parallel=1, longest=16) for each in (whole, exact)
    ]
    assert ranks[0] == ranks[1]


def test_a_merge_in_float32_is_refused_where_it_changes_nothing_or_is_undone(file):
    assert "model.dtype is float32 already" in refused(file, "policy.lora={merge: float32}")
    eight = "rollout.vllm={quantization: fp8_per_channel}"
    assert "quantises their weights from bfloat16" in refused(file, *NARROW, eight)

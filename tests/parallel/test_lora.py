"""Low-rank adapters learn the same on every layout, as plain autograd would have them, and
alone."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.policy import ATTENTION
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.plan.memory import rank_memory
from megatron_async_rl.plan.model_files import read_model
from tests.parallel import layouts
from tests.parallel.lora_program import DROPS, LORA
from tests.parallel.ranks import run_alone
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import thorough
from tests.token_batches import decided
from tests.train_batches import columns, samples_in

pytestmark = pytest.mark.parallel

EVERY = layouts.OFFERED["lora_program"]


def results(layout):
    # One rank saves the checkpoint that the others continue from.
    single = layouts.results("single", "lora_program")
    return single if layout == "single" else layouts.results(layout, "lora_program")


@pytest.mark.parametrize("layout", [name for name in EVERY if "single" not in name])
def test_steps_adapters_and_merged_weights_are_those_of_one_rank(layout):
    """Dense layouts continue from one rank's checkpoint, as it does itself."""
    found = results(layout)
    alone = results("mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single")
    expected = alone if layout in layouts.MIXTURE_LAYOUTS else alone["resumed"]["next"]
    compare_weights(found["before"], alone["before"], atol=0.0)
    compare_steps(found["steps"], expected["steps"])
    compare_weights(found["adapters"], expected["adapters"])
    compare_weights(found["weights"], expected["weights"])


def test_the_steps_compared_moved_both_matrices_and_used_reference_and_control():
    single = results("single")
    for name, tensor in single["adapters"].items():
        assert not torch.equal(tensor, single["before"][name]), name
    assert single["steps"][0]["ratio/kl_reference"] == 0.0
    assert single["steps"][1]["ratio/kl_reference"] > 1e-3
    assert "gac/cosine" in single["steps"][1]


@pytest.mark.parametrize("layout", EVERY)
def test_a_merge_in_float32_gives_engines_all_of_the_product(layout):
    """A merge in bfloat16 loses changes below half a step of W's grid."""
    found = results(layout)["merged"]
    adapted = 0
    for name, exact in found["exact"].items():
        base, rounded = found["base"][name].float(), found["rounded"][name].float()
        assert exact.dtype == torch.float32
        a, b = (
            found["adapters"].get(
                f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight"
            )
            for letter in "AB"
        )
        if a is None:
            assert torch.equal(exact, base), name
            continue
        adapted += 1
        product = LORA.alpha / LORA.rank * b.float() @ a.float()
        torch.testing.assert_close(exact - base, product, rtol=0.0, atol=1e-6)
        assert torch.equal(rounded, exact.bfloat16().float())
        assert not torch.equal(rounded, exact)
    assert adapted > 4


@pytest.mark.parametrize("layout", EVERY)
def test_adapters_alone_are_trained_and_their_copies_agree(layout):
    found = results(layout)
    assert found["frozen_kept"]
    assert found["replicas_agree"]
    assert found["ranks_agree"]


def test_recomputed_layers_give_their_adapters_the_same_gradient():
    """The bfloat16 case uses dropout, whose masks are drawn again."""
    assert results("single")["recomputed"] == {"float32": True, "bfloat16": True}


@pytest.mark.parametrize("layout", EVERY)
def test_gradients_and_optimizer_state_are_of_the_adapters_as_planned(layout, tmp_path):
    mixture = layout in layouts.MIXTURE_LAYOUTS
    settings = {"rank": LORA.rank, "targets": list(ATTENTION if mixture else LORA.targets)}
    model = layouts.material() / ("mixture" if mixture else "untied")
    config = planned(tmp_path, model, settings, EVERY[layout])
    shape, _ = read_model(model)
    parallel = config.policy.parallel
    held = results(layout)["held"]
    for stage in range(parallel.pipeline):
        memory = rank_memory(config, shape, stage=stage, data_parallel=parallel.data, longest=26)
        ranks = [counts for number, counts in held if number == stage]
        for counts in ranks:
            # Padding: of a vocabulary, and of the gradient buffer's shards.
            assert 4 * counts["parameters"] == pytest.approx(memory.parameters, rel=0.02)
            assert 4 * counts["gradients"] == memory.gradients
        # Replicas share copies out, of a small parameter not evenly.
        copies = sum(counts["copies"] for counts in ranks) / len(ranks)
        assert 4 * 2 * copies == memory.held
        optimizer = sum(8 * counts["moments"] for counts in ranks) / len(ranks)
        assert optimizer == pytest.approx(memory.optimizer, rel=0.02)


def planned(folder, model, lora, parallel):
    from megatron_async_rl.config.load import load
    from tests.written_run import write_run

    settings = [f"model.path={model}", "model.dtype=float32", f"policy.lora={json.dumps(lora)}"]
    settings += ["objective.kl.coef=0.1"]
    settings += [f"policy.parallel.{key}={size}" for key, size in parallel.items()]
    return load(write_run(folder), settings)


@pytest.mark.parametrize("layout", ["single", "data_distributed_optimizer"])
def test_a_resumed_run_continues_bit_for_bit_from_adapters_alone(layout):
    resumed = {k: v for k, v in results(layout)["resumed"].items() if k != "next"}
    assert set(resumed.values()) == {True}, resumed


def test_a_checkpoint_over_another_base_model_or_for_whole_weights_is_refused():
    refusals = results("single")["refusals"]
    for change in ("one_number", "two_numbers", "matrices"):
        assert refusals[change].key == "model.path"
        assert "trained over other weights" in refusals[change].what
    assert refusals["whole"].key == "policy.lora"


def test_a_checkpoint_holds_no_weight_of_the_base_model():
    results("single")
    (folder,) = (layouts.material() / "lora_checkpoint").glob("step_*")
    about = json.loads((folder / "about.json").read_text())
    assert about["lora"]["rank"] == LORA.rank
    keys = torch.distributed.checkpoint.FileSystemReader(folder / "sharded").read_metadata()
    tensors = {
        name
        for name, entry in keys.state_dict_metadata.items()
        if "_extra_state" not in name and hasattr(entry, "size")
    }
    assert tensors
    assert [name for name in tensors if ".adapters." not in name] == []


def test_dropout_acts_in_training_alone_repeats_and_is_resumed():
    dropout = results("single")["dropout"]
    assert dropout["repeated"]
    assert dropout["resumed"]
    assert dropout["scores_repeated"]
    first, plain = dropout["steps"], dropout["plain"]
    # B is zero at first: masks change its gradient, and nothing else yet.
    assert first[0]["policy/loss"] == pytest.approx(plain[0]["policy/loss"], abs=1e-6)
    assert first[0]["policy/grad_norm"] != pytest.approx(plain[0]["policy/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("layout", [name for name in DROPS if name in EVERY])
def test_copies_of_an_adapter_stay_the_same_under_dropout(layout):
    assert results(layout)["replicas_agree_after_dropout"]


@pytest.mark.parametrize("part", ["opob", "value", "displacement", "snapshot"])
def test_what_looks_at_parameters_itself_sees_the_trained_ones(part):
    found = results("single")["parts"][part]
    assert found["frozen_kept"]
    assert found["head_moved"] == (part == "value")
    assert all(step["policy/grad_norm"] > 0.0 for step in found["steps"])
    if part == "displacement":
        assert found["steps"][1]["displacement/cosine"] != 0.0


def test_convert_writes_merged_weights_and_the_adapter_beside_them(tmp_path):
    expected = results("single")["reference"]
    checkpoint = layouts.material() / "lora_checkpoint"
    run_alone("tests.parallel.convert_program", [checkpoint, tmp_path / "hf"])
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    compare_weights(merged, expected["merged"], atol=0.0)
    adapter = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    compare_weights(adapter, expected["adapters"], atol=0.0)


@thorough
def test_convert_rounds_merged_weights_once_to_a_requested_precision(tmp_path):
    expected = results("single")["reference"]["merged"]
    for dtype in ("bfloat16", "float32"):
        arguments = [layouts.material() / "lora_checkpoint", tmp_path / dtype, dtype]
        run_alone("tests.parallel.convert_program", arguments)
        found = load_file(tmp_path / dtype / "model.safetensors")
        kind = getattr(torch, dtype)
        rounded = {name: tensor.to(kind) for name, tensor in expected.items()}
        compare_weights(found, rounded, atol=0.0)
        assert {one.dtype for one in found.values()} == {kind}
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == dtype


class PeftLinear(torch.nn.Module):
    """PEFT's layer: base(x) + alpha / rank B A x."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def adapted_reference(adapters):
    """The base model under transformers with these adapters, in float64, and the leaves."""
    model = layouts.reference_model("untied").requires_grad_(False)
    leaves = {name: t.double().requires_grad_() for name, t in adapters.items()}
    for name in {name.rpartition(".lora_")[0] for name in leaves}:
        path = name.removeprefix("base_model.model.")
        parent, _, child = path.rpartition(".")
        parts = [leaves[f"{name}.lora_{part}.weight"] for part in "AB"]
        layer = PeftLinear(model.get_submodule(path), *parts, LORA.alpha / LORA.rank)
        setattr(model.get_submodule(parent), child, layer)
    return model, leaves


def test_log_probs_and_gradients_are_those_of_plain_lora_layers_under_transformers():
    found = results("single")["reference"]
    model, leaves = adapted_reference(found["adapters"])
    assert len(leaves) == 2 * layouts.LAYERS * len(LORA.targets)
    targets = decided(Objective(ObjectiveConfig()), columns(layouts.batch("a")), {})
    samples = list(samples_in(layouts.batch("a")))
    valid = [sample for sample in samples if sample.valid]
    advantages = torch.split(targets.whole.advantages, targets.samples.lengths.tolist())
    total = torch.zeros((), dtype=torch.float64)
    for sample, score in zip(samples, found["scores"], strict=True):
        logp, _ = layouts.reference_logprobs(model, sample)
        torch.testing.assert_close(
            torch.from_numpy(score).double(), logp.detach(), atol=1e-5, rtol=0.0
        )
    for sample, per_token in zip(valid, advantages, strict=True):
        kept = torch.tensor(sample.loss_mask, dtype=torch.bool)
        logp, _ = layouts.reference_logprobs(model, sample)
        ratio = (logp - torch.tensor(sample.behavior_logprobs).double())[kept].exp()
        advantage = per_token[kept]
        total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
    (total / sum(int(sample.loss_mask.sum()) for sample in valid)).backward()
    assert found["gradients"].keys() == leaves.keys()
    largest = max(float(leaf.grad.abs().max()) for leaf in leaves.values())
    for name, leaf in leaves.items():
        torch.testing.assert_close(
            found["gradients"][name].double(), leaf.grad, atol=1e-5 * largest, rtol=1e-4, msg=name
        )


def test_the_engines_get_the_base_weights_plus_the_adapters_product():
    found = results("single")["reference"]
    base = load_file(layouts.material() / "untied" / "model.safetensors")
    assert found["merged"].keys() == base.keys()
    adapters, changed = found["adapters"], 0
    for name, weight in base.items():
        pair = [f"base_model.model.{name.removesuffix('weight')}lora_{p}.weight" for p in "AB"]
        if pair[0] in adapters:
            a, b = (adapters[key].double() for key in pair)
            weight = weight.double() + LORA.alpha / LORA.rank * (b @ a)
            changed += not torch.equal(weight.float(), base[name])
        torch.testing.assert_close(
            found["merged"][name].double(), weight.double(), atol=1e-6, rtol=0.0
        )
    assert changed == layouts.LAYERS * len(LORA.targets)


def test_the_adapter_is_written_as_peft_reads_it():
    single = results("single")
    folder = single["folder"]
    tensors = load_file(folder / "adapter_model.safetensors")
    compare_weights(tensors, single["reference"]["adapters"], atol=0.0)
    assert tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"].shape == (
        3,
        32,
    )
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 3)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 4.5)
    assert settings["target_modules"] == list(LORA.targets)


def test_vllms_own_loader_takes_the_written_adapter_and_scales_it_as_the_policy_does():
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    folder = results("single")["folder"]
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=256)
    assert (helper.r, helper.vllm_lora_scaling_factor) == (LORA.rank, LORA.alpha / LORA.rank)
    found = LoRAModel.from_local_checkpoint(
        str(folder), set(LORA.targets), helper, device="cpu", dtype=torch.float32
    )
    written = load_file(folder / "adapter_model.safetensors")
    assert len(found.loras) == layouts.LAYERS * len(LORA.targets)
    for module, pair in found.loras.items():
        a, b = (written[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
        assert torch.equal(pair.lora_a, a)
        # It multiplies by the scale once, here.
        torch.testing.assert_close(pair.lora_b * pair.scaling, b * LORA.alpha / LORA.rank)

"""Memory as `mar plan` counts it against Megatron's own: its buffers and its optimizer, built on the meta
device for models and layouts that no machine here could hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.memory import RankMemory, rank_memory
from megatron_async_rl.plan.model_files import read_model
from tests.parallel.ranks import run_alone

pytestmark = pytest.mark.parallel

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
    "qwen2.5-7b-tied": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def layout(**sizes: Any) -> list[str]:
    return [f"policy.parallel.{name}={json.dumps(value)}" for name, value in sizes.items()]


SMALL: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 384,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
}
SMALL_COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 1000,
}
BFLOAT16 = "model.dtype=bfloat16"
TOKENS = 512
KEPT: dict[str, tuple[str, list[str]]] = {
    **{f"{name}, float32": (name, []) for name in SMALL},
    **{f"{name}, bfloat16": (name, [BFLOAT16]) for name in SMALL},
    "tensor": ("qwen3", [BFLOAT16, *layout(ranks=2, tensor=2)]),
    "sequence": ("qwen3", [BFLOAT16, *layout(ranks=2, tensor=2, sequence=True)]),
    "context parallel": ("llama", layout(ranks=2, context=2)),
    "selective": ("qwen3", [BFLOAT16, "policy.recompute=selective"]),
    "full": ("qwen3", [BFLOAT16, "policy.recompute=full"]),
}
"""Small model and overrides, for what its layers keep of one sequence of TOKENS."""
CASES: dict[str, tuple[str, list[str], list[int]]] = {
    "tensor, pipeline, data": (
        "qwen3-32b",
        [BFLOAT16, *layout(ranks=64, tensor=8, pipeline=4, sequence=True)],
        [0, 16, 63],
    ),
    "interleaved stages, replicated optimizer, float32": (
        "qwen3-32b",
        layout(ranks=64, tensor=8, pipeline=4, virtual_pipeline=2, distributed_optimizer=False),
        [0, 63],
    ),
    "context": (
        "qwen3-32b",
        [BFLOAT16, *layout(ranks=64, tensor=8, pipeline=2, context=2)],
        [0],
    ),
    "adapters": (
        "qwen3-32b",
        [BFLOAT16, *layout(ranks=16, tensor=8), "policy.lora={rank: 32, alpha: 64}"],
        [0],
    ),
    "experts": (
        "qwen3-30b-a3b",
        [BFLOAT16, *layout(ranks=32, pipeline=2, expert=8)],
        [0, 31],
    ),
    "gradients and moments in bfloat16": (
        "qwen2.5-7b-tied",
        [
            BFLOAT16,
            *layout(ranks=8, tensor=4),
            "policy.optimizer.gradient_dtype=bfloat16",
            "policy.optimizer.moment_dtype=bfloat16",
        ],
        [0],
    ),
    "tied embeddings on two stages": (
        "qwen2.5-7b-tied",
        [BFLOAT16, *layout(ranks=8, tensor=4, pipeline=2)],
        [0, 7],
    ),
}
"""Model, overrides of a configuration, and ranks to look at."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan_memory")
    for name, settings in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(COMMON | settings))
    for name, settings in SMALL.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(COMMON | SMALL_COMMON | settings))
    (folder / "run.yaml").write_text(
        json.dumps(
            {
                "run": {"dir": "runs/x", "steps": 1},
                "model": {"path": "nowhere"},
                "data": {"train": "train.jsonl"},
                "flow": {"prompts_per_step": 64, "group_size": 8, "async_ratio": 1},
                "policy": {"tokens_per_micro_batch": 512},
                "rollout": {"sampling": {"max_tokens": 1024}, "reward": {"name": "arithmetic"}},
            }
        )
    )
    return folder


@pytest.fixture(scope="module")
def megatrons(folder: Path) -> dict[str, Any]:
    large = [[str(folder / model), *rest] for model, *rest in CASES.values()]
    small = [[str(folder / model), overrides, TOKENS] for model, overrides in KEPT.values()]
    output = folder / "accounted.json"
    arguments = [json.dumps([large, small]), folder / "run.yaml", output]
    run_alone("tests.parallel.plan_program", arguments)
    found = json.loads(output.read_text())
    return dict(zip((*CASES, *KEPT), (*found["held"], *found["kept"]), strict=True))


def planned(folder: Path, model: str, overrides: list[str], rank: int = 0) -> RankMemory:
    config = load(folder / "run.yaml", [f"model.path={folder / model}", *overrides])
    parallel, (shape, _) = config.policy.parallel, read_model(config.model.path)
    assert shape is not None
    stage = rank * parallel.pipeline // parallel.ranks
    return rank_memory(config, shape, stage=stage, data_parallel=parallel.data, longest=TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_are_within_5_percent_of_megatrons(
    folder: Path, megatrons: dict[str, Any], case: str
) -> None:
    model, overrides, ranks = CASES[case]
    for rank, found in zip(ranks, megatrons[case], strict=True):
        plan = planned(folder, model, overrides, rank)
        for name, nbytes in found.items():
            assert getattr(plan, name) == pytest.approx(nbytes, rel=0.05), (rank, name)


@pytest.mark.parametrize("case", KEPT)
def test_activations_are_within_5_percent_of_what_autograd_keeps(
    folder: Path, megatrons: dict[str, Any], case: str
) -> None:
    model, overrides = KEPT[case]
    kept = megatrons[case]
    if case == "full":
        # One layer at a time is computed again.
        kept += megatrons["qwen3, bfloat16"] / SMALL_COMMON["num_hidden_layers"]
    assert planned(folder, model, overrides).activations == pytest.approx(kept, rel=0.05)

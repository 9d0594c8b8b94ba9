"""Memory as `mar plan` counts it against Megatron's own: its buffers and its optimizer, built on the meta
device for models and layouts that no machine here could hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.memory import RankMemory, rank_memory
from megatron_async_rl.plan.model_files import read_model
from tests.parallel.ranks import run_alone
from tests.published_models import COMMON, PUBLISHED, QWEN2, write_config

pytestmark = pytest.mark.parallel

TIED = "qwen2.5-7b-tied"
TIED_SIZES = QWEN2 | {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": True,
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
        "Qwen3-32B",
        [BFLOAT16, *layout(ranks=64, tensor=8, pipeline=4, sequence=True)],
        [0, 16, 63],
    ),
    "interleaved stages, replicated optimizer, float32": (
        "Qwen3-32B",
        layout(ranks=64, tensor=8, pipeline=4, virtual_pipeline=2, distributed_optimizer=False),
        [0, 63],
    ),
    "context": (
        "Qwen3-32B",
        [BFLOAT16, *layout(ranks=64, tensor=8, pipeline=2, context=2)],
        [0],
    ),
    "adapters": (
        "Qwen3-32B",
        [BFLOAT16, *layout(ranks=16, tensor=8), "policy.lora={rank: 32, alpha: 64}"],
        [0],
    ),
    "experts": (
        "Qwen3-30B-A3B",
        [BFLOAT16, *layout(ranks=32, pipeline=2, expert=8)],
        [0, 31],
    ),
    "gradients and moments in bfloat16": (
        TIED,
        [
            BFLOAT16,
            *layout(ranks=8, tensor=4),
            "policy.optimizer.gradient_dtype=bfloat16",
            "policy.optimizer.moment_dtype=bfloat16",
        ],
        [0],
    ),
    "tied embeddings on two stages": (
        TIED,
        [BFLOAT16, *layout(ranks=8, tensor=4, pipeline=2)],
        [0, 7],
    ),
}
"""Model, overrides of a configuration, and ranks to look at."""
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
BUILT = ("qwen3_0.6b", "qwen3_8b_colocated", "qwen2.5_32b", "qwen3_30b_a3b")
"""Recipes whose layout is one that no case above has, and whose layers a CPU has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan_memory")
    for name in PUBLISHED:
        write_config(folder / name, name)
    (folder / TIED).mkdir()
    (folder / TIED / "config.json").write_text(json.dumps(COMMON | TIED_SIZES))
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
    def of(model: str, overrides: list[str]) -> tuple[str, list[str]]:
        return str(folder / "run.yaml"), [f"model.path={folder / model}", *overrides]

    large = [(*of(model, overrides), ranks) for model, overrides, ranks in CASES.values()]
    large += [(str(RECIPES / f"{name}.yaml"), recipe(folder, name), [0]) for name in BUILT]
    small = [(*of(model, overrides), TOKENS) for model, overrides in KEPT.values()]
    output = folder / "accounted.json"
    run_alone("tests.parallel.plan_program", [json.dumps([large, small]), output])
    found = json.loads(output.read_text())
    return dict(zip((*CASES, *BUILT, *KEPT), (*found["held"], *found["kept"]), strict=True))


def recipe(folder: Path, name: str) -> list[str]:
    """Its model's sizes; the host is this one."""
    model = Path(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["model"]["path"]).name
    return [f"model.path={folder / model}", "policy.device=cpu"]


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


@pytest.mark.parametrize("name", BUILT)
def test_the_plan_of_a_recipe_is_within_5_percent_of_megatrons(
    folder: Path, megatrons: dict[str, Any], name: str
) -> None:
    config = load(RECIPES / f"{name}.yaml", recipe(folder, name))
    shape, _ = read_model(config.model.path)
    assert shape is not None
    plan = rank_memory(
        config, shape, stage=0, data_parallel=config.policy.parallel.data, longest=TOKENS
    )
    [found] = megatrons[name]
    for part, nbytes in found.items():
        assert getattr(plan, part) == pytest.approx(nbytes, rel=0.05), part


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

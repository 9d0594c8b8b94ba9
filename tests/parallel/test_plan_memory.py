"""Memory as `mar plan` counts it against Megatron's own: its buffers and its optimizer, with the
policy's further state, built on the meta device for models and layouts that no machine here could
hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.memory import RankMemory, rank_memory
from megatron_async_rl.plan.model_files import read_model
from tests.parallel.ranks import run_alone
from tests.published_models import COMMON, PUBLISHED, QWEN2, write_config
from tests.thorough import THOROUGH, chosen

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
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
SMALL_COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 1000,
}
BFLOAT16, FLOAT32 = "model.dtype=bfloat16", "model.dtype=float32"
PACKED = "policy.sequence=packed"
VALUE = ["objective.advantage=gae", "objective.value={coef: 0.5}"]
TOKENS = 256
TWO_ROWS = "two rows"
SHARED, REST, PREFIX = "packed, a shared prefix", 24, TOKENS - 8 * 24
"""Case of one group of 8, and its tokens."""


def lora(**settings: Any) -> str:
    return f"policy.lora={json.dumps({'rank': 32, 'alpha': 64, **settings})}"


def gac(**settings: Any) -> str:
    return f"controls={json.dumps([{'name': 'gac', **settings}])}"


KEPT: dict[str, tuple[str, list[str]]] = {
    **{f"{name}, float32": (name, [FLOAT32]) for name in SMALL},
    **{f"{name}, bfloat16": (name, [BFLOAT16]) for name in SMALL},
    "tensor": ("qwen3", [BFLOAT16, *layout(ranks=2, tensor=2)]),
    "sequence": ("qwen3", [BFLOAT16, *layout(ranks=2, tensor=2, sequence=True)]),
    "context parallel": ("llama", [FLOAT32, *layout(ranks=2, context=2)]),
    "selective": ("qwen3", [BFLOAT16, "policy.recompute=selective"]),
    "full": ("qwen3", [BFLOAT16, "policy.recompute=full"]),
    "packed": ("qwen3", [BFLOAT16, PACKED]),
    "packed, float32": ("llama", [FLOAT32, PACKED]),
    SHARED: ("qwen3", [BFLOAT16, PACKED, f"rollout.sampling.max_tokens={REST}"]),
    f"{SHARED}, float32": ("llama", [FLOAT32, PACKED, f"rollout.sampling.max_tokens={REST}"]),
    TWO_ROWS: ("qwen3", [BFLOAT16]),
    "packed experts": ("qwen3_moe", [BFLOAT16, PACKED]),
    "value head": ("llama", [BFLOAT16, *VALUE]),
    "adapters": ("qwen3", [BFLOAT16, lora()]),
    "adapters, float32": ("qwen3", [FLOAT32, lora()]),
    "adapters of some": ("llama", [BFLOAT16, lora(targets=["q_proj", "up_proj"])]),
    "adapters of the rest": ("qwen3", [BFLOAT16, lora(targets=["o_proj", "down_proj"])]),
    "adapters of experts' attention": (
        "qwen3_moe",
        [BFLOAT16, lora(targets=["k_proj", "o_proj"])],
    ),
    "adapters of gemma": ("gemma3", [BFLOAT16, lora()]),
    "adapters, dropout": ("qwen3", [BFLOAT16, lora(dropout=0.1)]),
    "adapters, dropout, tensor": (
        "llama",
        [FLOAT32, lora(dropout=0.1), *layout(ranks=2, tensor=2)],
    ),
    "adapters, sequence, packed": (
        "qwen3",
        [BFLOAT16, PACKED, lora(), *layout(ranks=2, tensor=2, sequence=True)],
    ),
    "adapters, selective": ("qwen3", [BFLOAT16, lora(), "policy.recompute=selective"]),
}
"""Small model and overrides, for what the model keeps of one micro-batch of TOKENS, a single sample
or as named."""
EVERY_CASE: dict[str, tuple[str, list[str], list[int]]] = {
    "tensor, pipeline, data; snapshots": (
        "Qwen3-32B",
        [
            BFLOAT16,
            *layout(ranks=64, tensor=8, pipeline=4, sequence=True),
            gac(reference_dtype="fp8"),
            "objective.proximal=snapshot",
            "objective.snapshots=3",
        ],
        [0, 16, 63],
    ),
    "interleaved stages, replicated optimizer, float32": (
        "Qwen3-32B",
        [
            FLOAT32,
            *layout(
                ranks=64, tensor=8, pipeline=4, virtual_pipeline=2, distributed_optimizer=False
            ),
            gac(),
        ],
        [0, 63],
    ),
    "context; reference that is an average": (
        "Qwen3-32B",
        [
            BFLOAT16,
            *layout(ranks=64, tensor=8, pipeline=2, context=2),
            "objective.kl.coef=0.1",
            "objective.reference.ema=0.9",
        ],
        [0],
    ),
    "adapters; value head, reference": (
        "Qwen3-32B",
        [
            BFLOAT16,
            *layout(ranks=16, tensor=8),
            lora(),
            *VALUE,
            gac(reference_dtype="bf16"),
            "objective.kl.coef=0.1",
        ],
        [0],
    ),
    "experts; proximal average": (
        "Qwen3-30B-A3B",
        [
            BFLOAT16,
            *layout(ranks=32, pipeline=2, expert=8),
            gac(reference_dtype="bf16"),
            "objective.proximal=ewma",
        ],
        [0, 31],
    ),
    "gradients and moments in bfloat16; measured baseline": (
        TIED,
        [
            BFLOAT16,
            *layout(ranks=8, tensor=4),
            "policy.optimizer.gradient_dtype=bfloat16",
            "policy.optimizer.moment_dtype=bfloat16",
            "objective.loss=reinforce",
            "objective.aggregation=seq-mean-token-mean",
            "objective.advantage={name: opob, mode: exact}",
        ],
        [0],
    ),
    "tied embeddings on two stages; past versions": (
        TIED,
        [
            BFLOAT16,
            *layout(ranks=8, tensor=4, pipeline=2),
            "controls=[{name: displacement, tolerated_kl: 0.02}]",
            "objective.snapshots=3",
        ],
        [0, 7],
    ),
}
"""Model, overrides of a configuration, and ranks to look at."""
CASES = chosen(
    EVERY_CASE,
    "tensor, pipeline, data; snapshots",
    "adapters; value head, reference",
    "experts; proximal average",
    "gradients and moments in bfloat16; measured baseline",
)
"""The gate leaves out interleaved stages, context parallelism and tied embeddings on two stages."""
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
BUILT = (
    "qwen3_8b_colocated",
    *(("qwen3_0.6b", "qwen2.5_32b", "qwen3_30b_a3b") if THOROUGH else ()),
)
"""Recipes with layouts that no case above has, and with layers that a CPU has."""


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
                "policy": {"tokens_per_micro_batch": TOKENS},
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
    small = [
        (*of(model, overrides), [2, TOKENS // 2] if case == TWO_ROWS else [1, TOKENS])
        for case, (model, overrides) in KEPT.items()
    ]
    output = folder / "accounted.json"
    run_alone("tests.parallel.plan_program", [json.dumps([large, small]), output])
    found = json.loads(output.read_text())
    return dict(zip((*CASES, *BUILT, *KEPT), (*found["held"], *found["kept"]), strict=True))


def recipe(folder: Path, name: str) -> list[str]:
    """Its model's sizes; the host is this one."""
    model = Path(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["model"]["path"]).name
    return [f"model.path={folder / model}", "policy.device=cpu"]


def planned(
    folder: Path, model: str, overrides: list[str], rank: int = 0, **settings: Any
) -> RankMemory:
    config = load(folder / "run.yaml", [f"model.path={folder / model}", *overrides])
    return memory_of(config, rank, **settings)


def memory_of(
    config: Config, rank: int = 0, *, longest: int = TOKENS, on_gpu: bool = False
) -> RankMemory:
    parallel, (shape, _) = config.policy.parallel, read_model(config.model.path)
    assert shape is not None
    stage = rank * parallel.pipeline // parallel.ranks
    return rank_memory(
        config, shape, stage=stage, data_parallel=parallel.data, longest=longest, on_gpu=on_gpu
    )


def agree(plan: RankMemory, found: dict[str, int]) -> None:
    names = ("parameters", "gradients", "optimizer", "held")
    counted, expected = {n: getattr(plan, n) for n in names}, {n: found[n] for n in names}
    assert counted == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_holds_between_steps_is_within_5_percent_of_megatrons(
    folder: Path, megatrons: dict[str, Any], case: str
) -> None:
    model, overrides, ranks = CASES[case]
    for rank, found in zip(ranks, megatrons[case], strict=True):
        agree(planned(folder, model, overrides, rank), found)


@pytest.mark.parametrize("case", CASES)
def test_moments_and_the_previous_gradient_are_as_large_on_a_gpu_as_offloaded(
    folder: Path, megatrons: dict[str, Any], case: str
) -> None:
    model, overrides, ranks = CASES[case]
    away = {
        "moments": [*overrides, "policy.optimizer.moment_offload=cpu"],
        "references": [o.replace('"gac"', '"gac", "reference_offload": "cpu"') for o in overrides],
    }
    for rank, found in zip(ranks, megatrons[case], strict=True):
        here = planned(folder, model, overrides, rank, on_gpu=True)
        assert here.offloaded == 0
        for part, changed in away.items():
            there = planned(folder, model, changed, rank, on_gpu=True)
            assert there.offloaded == here.total - there.total
            assert there.offloaded == pytest.approx(found[part], rel=0.05), part


@pytest.mark.parametrize("name", BUILT)
def test_the_plan_of_a_recipe_is_within_5_percent_of_megatrons(
    folder: Path, megatrons: dict[str, Any], name: str
) -> None:
    config = load(RECIPES / f"{name}.yaml", recipe(folder, name))
    [found] = megatrons[name]
    agree(memory_of(config), found)


@pytest.mark.parametrize("case", KEPT)
def test_activations_are_within_5_percent_of_what_autograd_keeps(
    folder: Path, megatrons: dict[str, Any], case: str
) -> None:
    model, overrides = KEPT[case]
    kept = megatrons[case]
    if case == "full":
        # One layer at a time is computed again.
        kept += megatrons["qwen3, bfloat16"] / SMALL_COMMON["num_hidden_layers"]
    longest = TOKENS // 2 if case == TWO_ROWS else TOKENS
    if case.startswith(SHARED):
        longest = PREFIX + REST
    plan = planned(folder, model, overrides, longest=longest)
    assert plan.activations == pytest.approx(kept, rel=0.05)

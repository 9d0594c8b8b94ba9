"""Whole plans, as `mar plan` prints them, and the exact bytes and seconds behind the numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.plan.machine import CHIPS, GIB, MIB, Gpu, Machine, described_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.plan import make_plan
from megatron_async_rl.plan.screen import show_plan
from megatron_async_rl.plan.totals import PromptLengths, TrainingSource
from tests.published_models import PUBLISHED, write_config
from tests.stored_pages import RecordedConsole, listed, require_page
from tests.written_run import config_tree, write_model

LAPTOP = Machine(
    cores=2, memory=16 * GIB, free_memory=9 * GIB, shared_memory=2 * GIB, gpus=(), nodes=1
)
SERVER = Machine(
    cores=64,
    memory=512 * GIB,
    shared_memory=64 * GIB,
    gpus=(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), used=300 * MIB, index="0"),) * 8,
    transformer_engine="2.12.0",
)


def h200s(nodes: int, engine_nodes: int = 0, memory: int = 0) -> Machine:
    machine = described_machine(
        gpus=8, gpu_memory_gib=141, nodes=nodes, engine_nodes=engine_nodes, chip=CHIPS["h200"]
    )
    return replace(machine, memory=memory)


MIXTURE, DENSE = "Qwen3-30B-A3B", "Qwen3-8B"
LENGTHS = PromptLengths(longest=400, mean=150.5, prompts=1000)
SOURCES = (
    TrainingSource(label="words.jsonl", rows=700, weight=3.0),
    TrainingSource(label="sums.jsonl", rows=300),
)
GPU = ("policy.device=cuda", "model.dtype=bfloat16", "rollout.sampling.max_tokens=1024")
RECOMPUTED = "objective={loss: decoupled_ppo, proximal: recompute, minibatches: 3, epochs: 2}"
CASES: dict[str, tuple[str, Machine, tuple[str, ...]]] = {
    "laptop": ("tiny", LAPTOP, ()),
    "laptop_value": (
        "tiny",
        LAPTOP,
        (
            "policy.parallel={ranks: 2, tensor: 2, sequence: true}",
            "objective={loss: ppo_clip, advantage: gae, value: {}, minibatches: 3, epochs: 2}",
            "policy.sequence=packed",
            "policy.recompute=selective",
            "eval={every: 2, samples_per_prompt: 3}",
            "data.eval=held.jsonl",
        ),
    ),
    "laptop_adapters": (
        "tiny",
        LAPTOP,
        (
            "policy.lora={rank: 3, dropout: 0.1, targets: [q_proj, o_proj, up_proj]}",
            "policy.optimizer.log_update_norm=true",
            "checkpoint.asynchronous=false",
            "rollout.engines=3",
            "rollout.kv_cache_gib=0.001",
        ),
    ),
    "laptop_supervised": (
        "tiny",
        LAPTOP,
        (
            "objective={loss: sft, advantage: none}",
            "flow.prompts_per_step=5",
            "flow.group_size=1",
            "flow.async_ratio=0",
            "rollout=null",
        ),
    ),
    "laptop_gemma": (
        "gemma",
        LAPTOP,
        ("policy.recompute=full", "objective={loss: reinforce, kl: {coef: 0.1}, reference: {}}"),
    ),
    "server": (
        DENSE,
        SERVER,
        (
            *GPU,
            "policy.tokens_per_micro_batch=4096",
            "policy.parallel={ranks: 4, tensor: 2}",
            "rollout.engines=4",
        ),
    ),
    "server_float32": (
        DENSE,
        SERVER,
        (
            *GPU,
            "model.dtype=float32",
            "policy.parallel={ranks: 4, tensor: 4, sequence: true}",
            "rollout.engines=2",
            "rollout.tensor=2",
            "policy.layers=local",
            "policy.sequence=packed",
            "controls=[displacement]",
            "objective.snapshots=8",
        ),
    ),
    "server_colocated": (
        DENSE,
        SERVER,
        (
            *GPU,
            "rollout.placement=colocated",
            "rollout.engines=8",
            "rollout.gpu_memory_utilization=0.5",
            "policy.parallel={ranks: 8, tensor: 2}",
            "weights.transport=cuda_ipc",
            "flow.prompts_per_step=8",
            "flow.async_ratio=0",
            "policy.recompute=full",
            "policy.optimizer.moment_offload=cpu",
            "checkpoint.asynchronous=false",
            "rollout.vllm={enforce_eager: true}",
        ),
    ),
    "server_fp8": (
        DENSE,
        SERVER,
        (
            *GPU,
            "policy.fp8={recipe: blockwise, primary_weights: true, first_last_layers_bf16: 2}",
            "policy.parallel={ranks: 4, pipeline: 2}",
            "rollout.engines=2",
            "rollout.tensor=2",
            "rollout.pipeline=1",
            "objective={loss: reinforce, proximal: snapshot, snapshots: 8, corrections: [tis]}",
            "controls=[{name: gac, reference_dtype: bf16, reference_offload: cpu}]",
        ),
    ),
    "cluster_fp8_cast": (
        DENSE,
        h200s(2, memory=200 * GIB),
        (
            *GPU,
            "policy.fp8={recipe: delayed}",
            "policy.recompute=selective",
            "policy.parallel={ranks: 8, pipeline: 2, virtual_pipeline: 3, context: 2}",
            "flow.prompts_per_step=7",
            RECOMPUTED,
            "rollout.engines=4",
            "rollout.pipeline=2",
            "weights.transport=relay",
        ),
    ),
    "cluster_context": (
        DENSE,
        h200s(2),
        (
            *GPU,
            "policy.parallel={ranks: 8, context: 2, tensor: 2}",
            "policy.layers=local",
            "policy.sequence=packed",
            "policy.optimizer={gradient_dtype: bfloat16, moment_dtype: bfloat16}",
            "objective={loss: reinforce, advantage: {name: opob, mode: exact}}",
            "rollout.engines=8",
            "weights.transport=collective",
        ),
    ),
    "cluster_mixture": (
        MIXTURE,
        h200s(1, 1),
        (
            *GPU,
            "policy.parallel={ranks: 8, expert: 8}",
            "rollout.engines=4",
            "rollout.tensor=2",
            "policy.routing_replay=rollout",
            "policy.recompute=full",
            "policy.optimizer.moment_offload=cpu",
            "weights.transport=relay",
            "objective={loss: reinforce, proximal: recompute}",
            "flow.async_ratio=0.5",
        ),
    ),
    "cluster_many": (
        DENSE,
        h200s(12, 6),
        (
            *GPU,
            "policy.parallel={ranks: 72, pipeline: 6, tensor: 4, overlap_grad_reduce: true}",
            "flow.prompts_per_step=100",
            "flow.group_size=3",
            "rollout.engines=24",
            "weights.transport=relay",
            "objective={loss: reinforce, proximal: ewma, reference: {ema: 0.9}, kl: {coef: 0.1}}",
            "policy.optimizer.moment_offload=cpu",
        ),
    ),
    "cluster_adapters": (
        DENSE,
        h200s(1),
        (
            *GPU,
            "policy.lora={rank: 16, dropout: 0.1}",
            "policy.parallel={ranks: 4, tensor: 2, sequence: true}",
            "rollout.engines=4",
            "objective={loss: ppo_clip, kl: {coef: 0.1, where: reward}, reference: {}}",
        ),
    ),
    "too_small": (
        DENSE,
        h200s(1, memory=40 * GIB),
        (
            *GPU,
            "policy.parallel={ranks: 1}",
            "policy.tokens_per_micro_batch=262144",
            "rollout.engines=9",
            "rollout.sampling.max_tokens=30000",
        ),
    ),
}


def tree_of(folder: Path) -> Path:
    """Write a config file, next to a directory for each model."""
    file = folder / "config.yaml"
    tree = config_tree()
    del tree["policy"], tree["flow"]
    tree["flow"] = {"prompts_per_step": 8, "group_size": 4}
    file.write_text(yaml.safe_dump(tree))
    for name in (DENSE, MIXTURE):
        assert name in PUBLISHED
        write_config(folder / name, name)
    write_model(folder / "tiny")
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    activation = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8}
    write_model(folder / "gemma", **gemma, **activation, tie_word_embeddings=True)
    return file


def page(file: Path, name: str) -> str:
    model, machine, overrides = CASES[name]
    config = load(file, [f"model.path={file.parent / model}", *overrides])
    shape, _ = read_model(config.model.path)
    assert shape is not None
    plan = make_plan(config, machine, shape, lengths=LENGTHS, sources=SOURCES)
    console = RecordedConsole()
    show_plan(plan, config, machine, console, notes=("a note",))
    exact: dict[str, Any] = {
        **{f"rank {rank.stage}": rank for rank in plan.ranks},
        "estimate": plan.estimate,
        "batch": plan.batch,
        "totals": plan.totals,
        "engine": plan.engine,
        **{f"host {host.first}": host.parts for host in plan.hosts},
        "peaks": plan.peaks,
        "routed bytes": plan.routed_bytes,
    }
    return (console.text + listed(exact)).replace(str(file.parent), "FOLDER")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("name", CASES)
def test_a_whole_plan_is_the_one_on_its_page(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    require_page(f"plans/{name}", page(file, name))


VARIANTS: dict[str, tuple[str, Machine, tuple[str, ...]]] = {
    "tiny": (
        "tiny",
        LAPTOP,
        (
            "policy.parallel={ranks: 2, tensor: 2}; policy.parallel={ranks: 3, tensor: 2}",
            "policy.parallel={ranks: 4, tensor: 2, context: 2}",
            "policy.parallel={ranks: 6, tensor: 2, context: 2}",
            "policy.parallel={ranks: 4, tensor: 4}; policy.parallel={ranks: 3, pipeline: 3}",
            "policy.parallel.sequence=true; policy.parallel.virtual_pipeline=2",
            "policy.parallel={ranks: 2, pipeline: 2, virtual_pipeline: 2}",
            "policy.parallel={ranks: 2, pipeline: 2, virtual_pipeline: 1}",
            "policy.parallel.expert=2; policy.routing_replay=rollout",
            "policy.parallel={ranks: 3}; policy.parallel={ranks: 32}; policy.parallel={ranks: 33}",
            "objective.minibatches=8; objective.minibatches=8 policy.parallel.ranks=8",
            "objective.minibatches=8 policy.parallel.ranks=4",
            "objective.minibatches=3 policy.parallel.ranks=16 flow.group_size=2",
            "policy.tokens_per_micro_batch=408; policy.tokens_per_micro_batch=407",
            "rollout.max_context=64; rollout.max_context=65; rollout.max_context=8",
            "rollout.max_context=9; rollout.sampling.max_tokens=63; rollout.sampling.max_tokens=64",
            "policy.device=cuda; rollout.engines=2; rollout.engines=1 eval={} data.eval=x.jsonl",
            "rollout.tensor=2; rollout.tensor=4; rollout.pipeline=2; rollout.pipeline=3",
            "rollout.vllm={enable_expert_parallel: true} rollout.tensor=2",
            "rollout.vllm={kv_cache_dtype: fp8}; rollout.vllm={quantization: fp8_per_channel}",
            "policy.lora={rank: 16}; policy.lora={rank: 17}; policy.lora={rank: 4}",
            "policy.optimizer={warmup_steps: 3}; policy.optimizer={warmup_steps: 4}",
            "policy.optimizer={warmup_steps: 24} objective.minibatches=2 objective.epochs=3",
            "policy.optimizer={min_lr: 1e-6, schedule: linear}",
            "policy.optimizer={min_lr: 2e-6, schedule: cosine}",
            "rollout.kv_cache_gib=0.0001; rollout.kv_cache_gib=0.0002; rollout.kv_cache_gib=0.004",
            "weights.transport=relay; weights.transport=collective; weights.transport=cuda_ipc",
            "rollout.placement=colocated weights.transport=cuda_ipc flow.async_ratio=0",
            "rollout.placement=colocated flow.async_ratio=0",
            "checkpoint.every=0; checkpoint.every=2",
            "policy.fp8={recipe: tensorwise}; policy.layers=transformer_engine",
        ),
    ),
    "dense": (
        DENSE,
        SERVER,
        (
            "policy.parallel={ranks: 8}; policy.parallel={ranks: 7}; policy.parallel={ranks: 9}",
            "policy.parallel={ranks: 4} rollout.engines=4 rollout.tensor=2",
            "policy.parallel={ranks: 4} rollout.engines=5 rollout.pipeline=2",
            "policy.parallel={ranks: 4} rollout.engines=4; policy.parallel.sequence=true",
            "policy.parallel={ranks: 4} rollout.engines=3 rollout.tensor=2 rollout.pipeline=2",
            "policy.fp8={recipe: mxfp8}; policy.fp8={recipe: blockwise} policy.layers=local",
            "policy.fp8={recipe: blockwise, first_last_layers_bf16: 17}",
            "policy.fp8={recipe: blockwise, first_last_layers_bf16: 18}",
            "policy.fp8={recipe: tensorwise} policy.parallel={ranks: 8, tensor: 8}",
            "policy.lora={rank: 1024}; policy.lora={rank: 1025}",
            "rollout.gpu_memory_utilization=0.1; rollout.gpu_memory_utilization=0.123456",
            "rollout.gpu_memory_utilization=0.2",
            "rollout.gpu_memory_utilization=1.0; rollout.gpu_memory_utilization=0.98",
            "policy.parallel={ranks: 8, tensor: 4, pipeline: 2} rollout.engines=4",
            "policy.recompute=full policy.parallel={ranks: 4, pipeline: 4, virtual_pipeline: 9}",
            "policy.parallel={ranks: 4, pipeline: 4, virtual_pipeline: 2}",
            "rollout.placement=colocated weights.transport=cuda_ipc flow.async_ratio=0",
            "rollout.placement=colocated weights.transport=cuda_ipc flow.async_ratio=0"
            " rollout.engines=2 rollout.tensor=2 policy.parallel.ranks=3",
            "rollout.placement=colocated flow.async_ratio=0 rollout.engines=9",
            "rollout.placement=colocated flow.async_ratio=0 policy.parallel.ranks=8",
            "rollout.placement=colocated flow.async_ratio=0 policy.parallel={ranks: 8, tensor: 4}"
            " rollout.gpu_memory_utilization=0.3 policy.recompute=full",
            "weights.bucket_mib=1024 weights.transport=collective",
            "rollout.sampling.max_tokens=40960; rollout.max_context=40961",
            "rollout.vllm={quantization: fp8_per_channel}",
            "rollout.vllm={quantization: fp8_per_channel} objective.corrections=[{name: tis}]",
        ),
    ),
    "mixture": (
        MIXTURE,
        h200s(2),
        (
            "policy.parallel={ranks: 16, expert: 8}; policy.parallel={ranks: 16, expert: 3}",
            "policy.parallel={ranks: 16, expert: 16}; policy.parallel={ranks: 8, expert: 16}",
            "policy.parallel={ranks: 16, tensor: 16}; policy.parallel={ranks: 16, tensor: 4}",
            "policy.parallel={ranks: 15}; policy.parallel={ranks: 16, pipeline: 5}",
            "policy.parallel={ranks: 16, expert: 8, tensor: 2}; policy.routing_replay=rollout",
            "policy.parallel={ranks: 16, expert: 8, tensor: 2, sequence: true}",
            "policy.routing_replay=proximal; policy.lora={rank: 4}; weights.transport=cuda_ipc",
            "policy.lora={rank: 4, targets: [gate_proj, q_proj]}; policy.lora.targets=[q_proj]",
            "policy.parallel={ranks: 16, expert: 8} weights.transport=relay rollout.engines=1",
            "policy.parallel={ranks: 8, expert: 8} weights.transport=relay rollout.engines=8",
            "policy.parallel={ranks: 8, expert: 8} weights.transport=relay rollout.engines=9",
            "policy.parallel={ranks: 8, expert: 8} weights.transport=collective rollout.engines=3"
            " rollout.tensor=4",
            "policy.parallel={ranks: 8, expert: 8} weights.transport=collective rollout.engines=2"
            " rollout.tensor=4",
            "policy.fp8={recipe: blockwise}; policy.fp8={recipe: mxfp8}",
            "rollout.vllm={enable_expert_parallel: true} rollout.tensor=4",
        ),
    ),
    "engine_nodes": (
        DENSE,
        h200s(1, 1),
        (
            "weights.transport=shared_memory; weights.transport=relay rollout.engines=16",
            "weights.transport=relay rollout.engines=15; weights.transport=cuda_ipc",
            "weights.transport=relay rollout.engines=8 rollout.tensor=2",
            "weights.transport=relay rollout.engines=7 rollout.tensor=2",
            "weights.transport=collective rollout.tensor=8 policy.parallel.ranks=8",
            "rollout=null objective={loss: sft, advantage: none} flow.group_size=1"
            " flow.async_ratio=0 weights.transport=shared_memory",
        ),
    ),
}


def problems_of(file: Path, model: str, machine: Machine, overrides: list[str]) -> str:
    """Return the problems and notes of a plan, or those of the config."""
    device = ("policy.device=cuda", "model.dtype=bfloat16") if machine.gpus else ()
    try:
        config = load(file, [f"model.path={file.parent / model}", *device, *overrides])
    except ConfigError as error:
        return f"{error}\n"
    shape, _ = read_model(config.model.path)
    plan = make_plan(config, machine, shape, lengths=LENGTHS)
    console = RecordedConsole()
    for part in (*plan.problems, *(f"note: {one}" for one in plan.warnings)):
        console.print(str(part), markup=False, highlight=False, soft_wrap=True)
    unfit = [plan.problems.index(one) for one in plan.unfit]
    shown = [one.device for one in plan.processes if one.name.startswith("engine")]
    return f"{console.text}{plan.nodes} {plan.batch} {unfit} {', '.join(shown[:2])}\n"


@pytest.mark.parametrize("name", VARIANTS)
def test_all_problems_of_plans_are_those_on_their_page(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model, machine, lines = VARIANTS[name]
    text = ""
    for given in "; ".join(lines).split("; "):
        overrides = re.split(r" (?=[a-z_]+[.=])", given)
        text += f"\n$ {given}\n{problems_of(file, model, machine, overrides)}"
    require_page(f"plans/problems_of_{name}", text.replace(str(file.parent), "FOLDER"))

"""An engine's cache must hold one sequence of the context limit, because vLLM requires it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.fit import host_fix
from megatron_async_rl.plan.machine import GIB, Machine, described_machine
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.preflight import preflight
from tests.published_models import write_config
from tests.written_run import write_model, write_run

LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
TOKEN = 2 * 2 * 2 * 32 * 4
"""Bytes of a token in the cache of the model of `write_run`."""
CACHE, CONTEXT = "rollout.kv_cache_gib", "rollout.max_context"


def plan(file: Path, *overrides: str, machine: Machine = LAPTOP) -> RunPlan:
    return preflight(load(file, overrides), all_data=True, machine=machine)


def proposals(planned: RunPlan, key: str) -> list[str]:
    return re.findall(rf"{key}: ([0-9.]+)", planned.problems[0].fix)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cache_below_one_sequence_of_the_context_is_refused(tmp_path, workers):
    file = write_run(tmp_path, max_position_embeddings=4000)
    # 4000 tokens need 125 blocks of 32 tokens.
    enough = 4000 * TOKEN / GIB
    tensor = f"rollout.tensor={workers}"
    assert plan(file, tensor, f"{CACHE}={enough}").problems == ()
    small = plan(file, tensor, f"{CACHE}={enough - 1 / GIB}")
    assert [one.key for one in small.problems] == [CACHE]
    assert "hold 3968 tokens" in small.problems[0].what
    assert "context limit, 4000 tokens" in small.problems[0].what
    assert not [one for one in small.warnings if "kv_cache_gib" in one]
    for key in (CONTEXT, CACHE):
        (value,) = proposals(small, key)
        changed = plan(file, tensor, f"{CACHE}={enough - 1 / GIB}", f"{key}={value}")
        assert changed.problems == (), key


def test_a_cache_below_the_longest_sample_has_to_grow(tmp_path):
    file = write_run(tmp_path, max_position_embeddings=4000)
    small = plan(file, f"{CACHE}=0.000001")
    ((context,), (cache,)) = (proposals(small, key) for key in (CONTEXT, CACHE))
    assert context == "256"
    assert plan(file, f"{CACHE}={cache}", f"{CONTEXT}={context}").problems == ()
    short = plan(file, f"{CACHE}=0.000001", f"{CONTEXT}=40")
    assert short.problems[0].fix == f"set {CACHE}: 0.01"


def test_no_cache_is_refused_whose_need_is_unknown(tmp_path):
    """A sliding window, or a smaller dtype of the cache."""
    file = write_run(tmp_path, max_position_embeddings=4000)
    small = (f"{CACHE}=0.001", "rollout.vllm.kv_cache_dtype=auto")
    assert [one.key for one in plan(file, *small).problems] == [CACHE]
    other = plan(file, f"{CACHE}=0.001", "rollout.vllm.kv_cache_dtype=fp8")
    assert CACHE not in [one.key for one in other.problems]
    write_model(
        tmp_path / "model",
        max_position_embeddings=4000,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2,
    )
    windowed = plan(file, *small)
    assert CACHE not in [one.key for one in windowed.problems]


def test_the_longest_held_out_sample_counts_for_the_cache(tmp_path):
    file = write_run(tmp_path, max_position_embeddings=4000)
    held_out = [f"data.eval={tmp_path}/held_out.jsonl", "eval={samples_per_prompt: 1}"]
    row = {"prompt": "1+" * 500 + "1=", "answer": "501"}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    # The prompt has 1002 tokens and the response up to 8.
    small = plan(file, *held_out, f"{CACHE}=0.00097")
    assert "the longest sample has 1010 tokens" not in small.problems[0].fix, "992 fit"
    assert proposals(small, CONTEXT) == ["1024"]
    small = plan(file, *held_out, f"{CACHE}=0.002")
    assert "(the longest sample has 1010 tokens)" in small.problems[0].fix


EIGHT = (
    *("model.dtype=bfloat16", "policy.device=cuda"),
    *("policy.parallel.ranks=4", "policy.parallel.tensor=4", "policy.parallel.sequence=true"),
)


def large_run(tmp_path: Path) -> Path:
    file = write_run(tmp_path)
    write_config(tmp_path / "Qwen3-8B", "Qwen3-8B")
    file.write_text(file.read_text().replace("path: model", "path: Qwen3-8B"))
    return file


def test_a_share_without_room_for_one_sequence_is_refused(tmp_path):
    """Weights of 15.3 GiB and 40,960 tokens of 144 KiB."""
    file, machine = large_run(tmp_path), described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    share = "rollout.gpu_memory_utilization"
    small = plan(file, *EIGHT, f"{share}=0.25", machine=machine)
    assert [one.key for one in small.problems] == [share]
    assert "cache of one sequence of the context limit 5.6 GiB" in small.problems[0].what
    fix = small.problems[0].fix
    assert fix.startswith(f"set one or several of {CONTEXT}: 16384 (then")
    for key, value in re.findall(r"([a-z_.]+): ([0-9.]+) \(then", fix):
        changed = plan(file, *EIGHT, f"{share}=0.25", f"{key}={value}", machine=machine)
        assert changed.problems == (), key
    assert plan(file, *EIGHT, f"{share}=0.27", machine=machine).problems == ()


def test_no_proposal_lowers_the_cache_below_one_sequence(tmp_path):
    file = write_run(tmp_path, max_position_embeddings=1 << 16)
    config = load(file, ["rollout.kv_cache_gib=0.15"])
    assert "rollout.kv_cache_gib: 0.075" in host_fix(config, "cpu")
    large = load(file, ["rollout.kv_cache_gib=0.1"])
    assert "kv_cache_gib" not in host_fix(large, "cpu")

    # A plan for a machine with too little memory proposes a cache of 0.5 GiB.
    tiny = replace(LAPTOP, memory=64 * 1024)
    (problem,) = plan(file, "rollout.kv_cache_gib=0.6", machine=tiny).problems
    assert "rollout.kv_cache_gib: 0.5" in problem.fix
    write_model(tmp_path / "model", max_position_embeddings=1 << 20)
    (problem,) = plan(file, "rollout.kv_cache_gib=1.0", machine=tiny).problems
    assert "kv_cache_gib" not in problem.fix

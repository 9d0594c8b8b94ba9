"""`mar init` writes sizes with which `mar train` starts: context, cache and micro-batches."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan import new_config
from megatron_async_rl.plan.host import free_memory_problems
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.preflight import preflight
from tests.written_run import write_model, write_prompts

IDLE = Machine(
    cores=2, memory=64 * GIB, shared_memory=8 * GIB, gpus=(), free_memory=60 * GIB, nodes=1
)
LAYERS = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
"""Sizes near those of SmolLM2-135M."""


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_config, "this_machine", lambda: IDLE)


def init(folder: Path, out: Path, *options: str) -> tuple[int, str]:
    given = ["--model", str(folder / "model"), "--data", str(folder / "train.jsonl")]
    given += ["--reward", "arithmetic", "--eval", "none", "--gpus", "0", *options]
    done = CliRunner().invoke(app, ["init", str(out), *given])
    return done.exit_code, done.output


def written(folder: Path, *options: str) -> Config:
    code, output = init(folder, folder / "run.yaml", *options)
    assert code == 0, output
    return load(folder / "run.yaml")


def test_the_context_of_a_cpu_config_fits_its_cache(tmp_path):
    write_model(tmp_path / "model", max_position_embeddings=40960, num_hidden_layers=200)
    write_prompts(tmp_path / "train.jsonl")
    config = written(tmp_path)
    # 102,400 bytes per token.
    assert config.rollout.max_context == GIB // 102_400 // 128 * 128
    assert preflight(config, all_data=True, machine=IDLE).problems == ()


@pytest.mark.parametrize(
    ("memory_gib", "tokens", "recompute"),
    [(60, 16384, "none"), (23, 8192, "none"), (16.5, 4096, "none"), (9.5, 2048, "full")],
)
def test_micro_batches_on_a_cpu_fit_the_memory(
    tmp_path, monkeypatch, memory_gib, tokens, recompute
):
    write_model(tmp_path / "model", max_position_embeddings=8192, **LAYERS)
    write_prompts(tmp_path / "train.jsonl")
    # Other programs use most of the memory now.
    machine = replace(IDLE, memory=int(memory_gib * GIB), free_memory=GIB)
    monkeypatch.setattr(new_config, "this_machine", lambda: machine)
    config = written(tmp_path)
    assert (config.policy.tokens_per_micro_batch, config.policy.recompute) == (tokens, recompute)
    plan = preflight(config, all_data=True, machine=machine)
    assert plan.problems == ()
    assert free_memory_problems(config, machine, plan.device, plan.hosts, idle=True) == []


def test_a_config_that_the_memory_cannot_hold_is_not_written(tmp_path, monkeypatch):
    write_model(tmp_path / "model", max_position_embeddings=8192, **LAYERS)
    write_prompts(tmp_path / "train.jsonl")
    monkeypatch.setattr(new_config, "this_machine", lambda: replace(IDLE, memory=6 * GIB))
    code, output = init(tmp_path, tmp_path / "run.yaml")
    assert (code, "no layout fits" in output) == (2, True)
    assert "of host memory are needed, but the machine has 6.0 GiB" in output
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize("held_out", [False, True])
def test_long_prompts_get_micro_batches_and_a_context(tmp_path, held_out):
    write_model(tmp_path / "model", max_position_embeddings=40960)
    write_prompts(tmp_path / "train.jsonl")
    long = {"prompt": "1+" * 8999 + "1=", "answer": "9000"}
    name = "held_out.jsonl" if held_out else "train.jsonl"
    (tmp_path / name).write_text(json.dumps(long) + "\n")
    config = written(tmp_path, *(["--eval", str(tmp_path / name)] if held_out else []))
    # 18,000 tokens and a response of 256.
    assert config.policy.tokens_per_micro_batch == (16384 if held_out else 18432)
    assert config.rollout.max_context == (18256 if held_out else 18432)
    assert preflight(config, all_data=True, machine=IDLE).problems == ()


@pytest.mark.parametrize("name", ["lr 1e-4, long.yaml", "a #1.yaml", "x: {y}.yaml"])
def test_the_file_may_have_a_name_that_yaml_quotes(tmp_path, name):
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "train.jsonl")
    code, output = init(tmp_path, tmp_path / name)
    assert code == 0, output
    assert f"mar train {shlex.quote(str(tmp_path / name))}" in output
    assert load(tmp_path / name).run.dir == tmp_path / "runs" / name.removesuffix(".yaml")

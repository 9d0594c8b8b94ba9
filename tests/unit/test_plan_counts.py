"""A plan counts the micro-batches, sequences and parts of a GPU that exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.host import KERNEL_BYTES, RANK_BYTES
from megatron_async_rl.plan.machine import CHIPS, GIB, Machine, described_machine
from megatron_async_rl.plan.memory import engine_overhead, rank_memory
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.plan import RunPlan, make_plan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.totals import PromptLengths, batch_of
from tests.published_models import write_config
from tests.written_run import write_model, write_run

LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
SHARE = "rollout.gpu_memory_utilization"


def plan(file: Path, *overrides: str, machine: Machine = LAPTOP) -> RunPlan:
    return preflight(load(file, overrides), all_data=True, machine=machine)


@pytest.mark.parametrize("virtual", [1, 2])
def test_no_more_micro_batches_are_in_flight_than_a_step_has(tmp_path, virtual):
    file = write_run(tmp_path, num_hidden_layers=8)
    shape, _ = read_model(tmp_path / "model")
    layout = [f"policy.parallel={{ranks: 4, pipeline: 4, virtual_pipeline: {virtual}}}"]
    # Rows whose bytes are proportional to their tokens.
    layout += ["policy.sequence=packed", "policy.prefix_sharing=never"]

    def first_stage(budget: int) -> int:
        config = load(file, [*layout, f"policy.tokens_per_micro_batch={budget}"])
        memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16)
        # A step has 8 samples of 16 tokens.
        return memory.activations // min(budget, 128)

    one, two, eight = first_stage(128), first_stage(64), first_stage(16)
    if virtual == 1:
        assert (two, eight) == (2 * one, 4 * one)
    else:
        # Micro-batches come in groups of 4, each with both chunks; the schedule holds 11 chunks.
        assert one == two
        assert 8 * eight == 11 * one


AGENT = "rollout.environment={name: agent, settings: {function: 'a:b'}, max_segments: 3}"


@pytest.mark.parametrize("sequence", ["padded", "packed"])
def test_micro_batches_and_times_count_every_segment(tmp_path, sequence):
    file = write_run(tmp_path)
    lengths = PromptLengths(longest=4, mean=4.0, prompts=8)
    keys = [f"policy.sequence={sequence}", "policy.prefix_sharing=never"]
    keys += ["policy.tokens_per_micro_batch=36", "rollout.sampling.max_tokens=8"]
    one = batch_of(load(file, keys), 1, 12, lengths)
    three = batch_of(load(file, [*keys, AGENT]), 1, 12, lengths)
    assert (one.sequences, three.sequences) == (8, 24)
    # 3 rows of 12 tokens fit a micro-batch, and 4 of 8.
    assert (one.micro_batches_full, three.micro_batches_full) == (3, 8)
    halves = {"padded": (2, 8), "packed": (2, 6)}[sequence]
    assert (one.micro_batches_half, three.micro_batches_half) == halves


def test_the_estimate_counts_every_segment(tmp_path):
    file = write_run(tmp_path)
    write_config(tmp_path / "Qwen3-8B", "Qwen3-8B")
    shape, _ = read_model(tmp_path / "Qwen3-8B", weights=False, tokenizer=False)
    machine = described_machine(gpus=8, gpu_memory_gib=141, nodes=1, chip=CHIPS["h200"])
    keys = ["model.dtype=bfloat16", "policy.device=cuda", "rollout.max_concurrent=1"]
    keys += ["policy.parallel={ranks: 4, tensor: 4, sequence: true}"]

    def estimated(*more: str):
        config = load(file, [*keys, *more])
        return make_plan(
            config, machine, shape, lengths=PromptLengths(longest=4, mean=4.0, prompts=8)
        ).estimate

    one, three = estimated(), estimated(AGENT)
    assert three.generate_s == pytest.approx(3 * one.generate_s)
    assert three.train_s == pytest.approx(3 * one.train_s)


def test_an_engine_and_its_context_must_fit_its_gpu(tmp_path):
    file = write_run(tmp_path)
    machine = described_machine(gpus=2, gpu_memory_gib=80, nodes=1)
    keys = ("model.dtype=bfloat16", "policy.device=cuda")
    (problem,) = plan(file, *keys, f"{SHARE}=1.0", machine=machine).problems
    assert problem.key == SHARE
    assert "the GPU of an engine: about 80.5 GiB are needed of the 80.0 GiB" in problem.what
    assert "the engine's CUDA context 0.5 GiB" in problem.what
    (value,) = re.findall(rf"{SHARE}: ([0-9.]+)", problem.fix)
    assert plan(file, *keys, f"{SHARE}={value}", machine=machine).problems == ()
    outside = sum(count for _, count in engine_overhead(load(file).rollout))
    limit = 1.0 - outside / (80 * GIB)
    assert plan(file, *keys, f"{SHARE}={limit}", machine=machine).problems == ()


KL = ("objective.kl={coef: 0.1}",)


def test_the_reference_model_is_checked_before_the_start(tmp_path):
    file = write_run(tmp_path)
    key = "objective.reference.path"

    def found(folder: str, machine: Machine = LAPTOP) -> RunPlan:
        reference = f"objective.reference={{path: {tmp_path / folder}}}"
        return plan(file, *KL, reference, machine=machine)

    (missing,) = found("nowhere").problems
    assert (missing.key, "is not a directory" in missing.what) == (key, True)
    assert "model.path" not in missing.fix
    elsewhere = found("nowhere", described_machine(gpus=2, gpu_memory_gib=80, nodes=1))
    assert key not in [one.key for one in elsewhere.problems]
    assert key in elsewhere.absent

    write_model(tmp_path / "other", intermediate_size=64, num_hidden_layers=4)
    (other,) = found("other").problems
    assert other.key == key
    assert "layers 4 instead of 2, intermediate 64 instead of 32" in other.what
    write_model(tmp_path / "same", max_position_embeddings=128)
    (tmp_path / "same" / "tokenizer.json").unlink()
    assert found("same").problems == ()
    (tmp_path / "same" / "model.safetensors").unlink()
    (weights,) = found("same").problems
    assert (weights.key, "no *.safetensors" in weights.what) == (key, True)


def test_a_rank_in_bfloat16_on_a_cpu_has_room_for_compiled_kernels(tmp_path):
    file = write_run(tmp_path)
    machine = replace(LAPTOP, cpu_flags=frozenset({"amx_bf16"}))

    def processes(*overrides: str) -> int:
        (host,) = plan(file, *overrides, machine=machine).hosts
        return next(part.size for part in host.parts if part.name == "processes of ranks")

    assert processes("model.dtype=float32") == RANK_BYTES
    assert processes("model.dtype=bfloat16") == RANK_BYTES + KERNEL_BYTES

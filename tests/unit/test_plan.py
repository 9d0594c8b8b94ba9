"""The plan's arithmetic agrees with the model's own sizes, and an impossible layout is a problem,
not an exception."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.engine_options import cpu_head_sizes
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import ConfigError, Problem, number_of
from megatron_async_rl.flow.device_phases import PHASES
from megatron_async_rl.plan import fit, totals
from megatron_async_rl.plan.fit import ipc_bucket_bytes, twin_bytes
from megatron_async_rl.plan.host import engines_on
from megatron_async_rl.plan.layer_memory import layer_activations, stores_scores
from megatron_async_rl.plan.layout import rank_coordinates, rank_environment
from megatron_async_rl.plan.machine import CHIPS, GIB, MIB, Gpu, Machine, described_machine, size
from megatron_async_rl.plan.memory import (
    TARGET_BYTES,
    OverheadParts,
    engine_overhead,
    rank_memory,
    rank_overhead,
    sleeping_overhead,
    stage_parameters,
)
from megatron_async_rl.plan.model_files import ModelShape, read_model
from megatron_async_rl.plan.pace import staleness_law
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.screen import show_plan
from megatron_async_rl.policy.digested_folder import DIGESTS, StoredFile, described
from megatron_async_rl.policy.families import FAMILIES
from megatron_async_rl.rollout.cluster import object_store_bytes
from megatron_async_rl.watchdog.events import Status, write_status
from tests.cases import looped
from tests.characters import save_characters
from tests.forked import python
from tests.tiny_models import save_tiny_model
from tests.unit.test_import_rules import HEAVY
from tests.written_run import write_model, write_run

LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
NODE = Machine(cores=64, memory=512 * GIB, shared_memory=64 * GIB, gpus=(Gpu("A", 80 * GIB),) * 8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def plan(file: Path, *overrides: str, machine: Machine = LAPTOP) -> RunPlan:
    return preflight(load(file, overrides), all_data=True, machine=machine)


def keys(planned: RunPlan) -> list[str]:
    return [problem.key for problem in planned.problems]


def shape_of(tmp_path: Path, **changes: Any) -> ModelShape:
    shape, problems = read_model(write_model(tmp_path / "shape", **changes))
    assert shape is not None
    assert problems == []
    return shape


@looped("tied", [False, True], ids=["untied", "tied"])
@looped(
    ("family", "settings"),
    [*((family, {}) for family in FAMILIES), ("llama", {"attention_bias": True})],
)
def test_the_parameter_count_is_that_of_the_checkpoint(tmp_path, family, settings, tied):
    folder = save_tiny_model(tmp_path / family, family, tied=tied, **settings)
    shape, _ = read_model(folder)
    counted = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        counted += sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    assert shape is not None
    assert shape.parameters == counted


def test_stages_and_tensor_shards_add_up_to_the_model(tmp_path):
    shape = shape_of(tmp_path)
    one = stage_parameters(shape, stage=0, pipeline=1, tensor=1)
    assert one == shape.parameters
    assert (
        sum(stage_parameters(shape, stage=stage, pipeline=2, tensor=1) for stage in range(2)) == one
    )
    replicated = shape.layers * shape.layer_replicated + shape.hidden
    assert 2 * stage_parameters(shape, stage=0, pipeline=1, tensor=2) == one + replicated


def test_a_tied_embedding_counts_on_the_first_and_the_last_stage(tmp_path):
    shape = shape_of(tmp_path, tie_word_embeddings=True)
    stages = [stage_parameters(shape, stage=stage, pipeline=2, tensor=1) for stage in range(2)]
    assert sum(stages) == shape.parameters + shape.vocabulary * shape.hidden
    assert stage_parameters(shape, stage=0, pipeline=1, tensor=1) == shape.parameters


@pytest.mark.parametrize(("family", "tied"), [("gemma", True), ("qwen3", False)])
def test_embeddings_are_tied_by_the_familys_default(tmp_path, family, tied):
    folder = write_model(tmp_path / "model", **(GEMMA if family == "gemma" else {}))
    content = json.loads((folder / "config.json").read_text())
    del content["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(content))
    shape, _ = read_model(folder)
    assert shape is not None
    assert shape.tied == tied


@pytest.mark.parametrize(
    ("dtype", "sharded", "bytes_per_parameter"),
    [
        ("float32", "false", 4 + 4 + 8),
        ("float32", "true", 4 + 4 + 4),
        ("bfloat16", "false", 2 + 4 + 12),
        ("bfloat16", "true", 2 + 4 + 6),
    ],
)
def test_state_per_parameter_follows_dtype_and_sharding(file, dtype, sharded, bytes_per_parameter):
    config = load(
        file,
        [
            f"model.dtype={dtype}",
            "policy.parallel.ranks=2",
            f"policy.parallel.distributed_optimizer={sharded}",
        ],
    )
    shape, _ = read_model(config.model.path)
    memory = rank_memory(config, shape, stage=0, data_parallel=2, longest=16)
    assert (
        memory.parameters + memory.gradients + memory.optimizer
        == shape.parameters * bytes_per_parameter
    )


@pytest.mark.parametrize(("gradient_dtype", "buffers"), [("float32", 4), ("bfloat16", 2 + 4)])
@pytest.mark.parametrize(("mode", "accumulators"), [("exact", 2 * 4), ("cheap", 0)])
def test_the_exact_baseline_needs_two_more_float32_gradients(
    file, mode, accumulators, gradient_dtype, buffers
):
    config = load(
        file,
        [
            "model.dtype=bfloat16",
            f"policy.optimizer.gradient_dtype={gradient_dtype}",
            "objective.loss=reinforce",
            "objective.aggregation=seq-mean-token-mean",
            f"objective.advantage={{name: opob, mode: {mode}}}",
        ],
    )
    shape, _ = read_model(config.model.path)
    memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16)
    assert memory.gradients == shape.parameters * (buffers + accumulators)


@pytest.mark.parametrize("budget", [16, 64])
def test_with_the_exact_baseline_activations_of_one_sequence_count(file, budget):
    def memory(mode, tokens):
        settings = [
            "objective.loss=reinforce",
            "objective.aggregation=seq-mean-token-mean",
            f"objective.advantage={{name: opob, mode: {mode}}}",
            f"policy.tokens_per_micro_batch={tokens}",
        ]
        config = load(file, settings)
        shape, _ = read_model(config.model.path)
        return rank_memory(config, shape, stage=0, data_parallel=1, longest=16)

    cheap, exact = memory("cheap", budget), memory("exact", budget)
    accumulators = exact.gradients - cheap.gradients
    alone = memory("cheap", 16).activations
    more = max(0, accumulators + alone - cheap.activations)
    assert exact.total - cheap.total == more
    assert (more > 0) == (budget == 16)


@pytest.mark.parametrize(
    ("control", "on_gpu", "kept"),
    [
        ("{name: gac}", True, 4.0),
        ("{name: matched_norm}", True, 4.0),
        ("{name: gac, reference_dtype: bf16}", True, 2.0),
        ("{name: gac, reference_dtype: fp8}", True, 1.0 + 4 / 128),
        ("{name: gac, reference_offload: cpu}", True, 0.0),
        ("{name: gac, reference_offload: cpu}", False, 4.0),
        ("{name: ess_lr}", True, 0.0),
    ],
)
def test_controls_need_their_gradient_and_one_parameters_update(file, control, on_gpu, kept):
    shape, _ = read_model(file.parent / "model")
    config = load(file, [f"controls=[{control}]"])
    without = rank_memory(load(file), shape, stage=0, data_parallel=1, longest=16, on_gpu=on_gpu)
    memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16, on_gpu=on_gpu)
    largest = max(14, 2 * 32) * 16
    assert without.controls == 0
    assert memory.total - without.total == int(kept * shape.parameters) + 2 * 4 * largest


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (["virtual_pipeline=2"], "pipeline is 1"),
        (
            ["ranks=2", "pipeline=2", "virtual_pipeline=3"],
            "3 chunks do not divide the 2 layers of a pipeline rank",
        ),
    ],
)
def test_virtual_stages_must_divide_the_layers_of_a_pipeline_rank(tmp_path, layout, named):
    file = write_run(tmp_path, num_hidden_layers=4)
    planned = plan(file, *(f"policy.parallel.{setting}" for setting in layout))
    assert keys(planned) == ["policy.parallel.virtual_pipeline"]
    assert named in planned.problems[0].what


def test_virtual_stages_keep_more_layers_in_flight(tmp_path):
    file = write_run(tmp_path, num_hidden_layers=4)
    shape, _ = read_model(file.parent / "model")
    layout = ["policy.parallel.ranks=2", "policy.parallel.pipeline=2"]
    # Rows whose bytes are proportional to their tokens, and 4 micro-batches of 2 samples.
    layout += ["policy.sequence=packed", "policy.prefix_sharing=never"]
    layout += ["policy.tokens_per_micro_batch=32"]

    def activations(*more: str) -> list[int]:
        config = load(file, [*layout, *more])
        return [
            rank_memory(config, shape, stage=stage, data_parallel=1, longest=16).activations
            for stage in (0, 1)
        ]

    plain, interleaved = activations(), activations("policy.parallel.virtual_pipeline=2")
    # The last stage's norm keeps its float32 input and its normalised input, and log-probs keep
    # their hidden states.
    last_norm = 2 * 16 * shape.hidden * (8 + 4)
    assert plain[0] == 2 * (plain[1] - last_norm)
    interleaved[1] -= last_norm
    assert [4 * found // plain[0] for found in interleaved] == [5, 3]


def test_packed_rows_keep_rotations_per_token_and_attention_twice(tmp_path):
    file = write_run(tmp_path)
    shape, _ = read_model(file.parent / "model")
    padded, packed = (
        rank_memory(
            load(
                file,
                [
                    f"policy.sequence={name}",
                    "policy.tokens_per_micro_batch=64",
                    "policy.prefix_sharing=never",
                ],
            ),
            shape,
            stage=0,
            data_parallel=1,
            longest=16,
        )
        for name in ("padded", "packed")
    )
    # Padded rows, of 16 tokens, share their rotations.
    rotations, attention = 4 * shape.head_dim * (64 - 16), 64 * shape.heads * shape.head_dim
    more = shape.layers * (rotations + attention) * 4
    assert packed.activations - padded.activations == more
    assert packed.total - padded.total == more


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_context_rank_keeps_the_keys_and_values_of_all_ranks(tmp_path, on_gpu):
    file = write_run(tmp_path)
    shape, _ = read_model(file.parent / "model")
    tokens = 64

    def kept(context: int) -> int:
        # Packed rows have the same number of rotations on any number of ranks.
        keys = ["policy.sequence=packed", "policy.prefix_sharing=never"]
        config = load(file, [f"policy.parallel.context={context}", *keys])
        return layer_activations(config, shape, tokens, 16, on_gpu=on_gpu, layers="local")

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gathered = 2 * (queries if on_gpu else keys)
    assert kept(4) - kept(2) == 2 * gathered * tokens * 4
    # A rank without others reverses no queries, and has three tensors of the size of the keys.
    more = queries // 2 - 3 * keys + 2 * gathered
    assert kept(2) - kept(1) == more * tokens * 4


def test_packed_micro_batches_are_counted_by_tokens(file):
    """A micro-batch with a single padded row wastes the rest of its budget."""
    found = []
    for name in ("padded", "packed"):
        keys = [f"policy.sequence={name}", "policy.prefix_sharing=never"]
        planned = plan(file, *keys, "policy.tokens_per_micro_batch=100000")
        longest = planned.batch.longest
        budget = longest + longest // 2
        settings = f"policy.tokens_per_micro_batch={budget}"
        found.append(plan(file, *keys, settings).batch.micro_batches_full)
        samples = planned.batch.samples
    assert found == [samples, math.ceil(samples * longest / budget)]


def test_an_unknown_sequence_layout_is_refused_with_the_valid_ones(file):
    with pytest.raises(ConfigError, match=r"policy\.sequence.*(?s:.)*padded.*packed"):
        load(file, ["policy.sequence=pcked"])


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@looped(
    ("layout", "wrong", "named"),
    [
        (["ranks=2", "expert=2"], [], ""),
        (["ranks=4", "tensor=2", "sequence=true", "expert=4"], [], ""),
        (
            ["ranks=3", "expert=3"],
            ["expert"],
            "does not divide both the 4 experts of a layer and the 3 ranks",
        ),
        (["ranks=4", "pipeline=2", "expert=4"], ["expert"], "and the 2 ranks of a pipeline stage"),
        (["ranks=2", "tensor=2", "sequence=true"], ["expert"], "requires a value above 1"),
        (["ranks=2", "tensor=2", "expert=2"], ["sequence"], "with tensor parallelism requires it"),
    ],
)
def test_experts_are_divided_over_the_ranks_of_a_stage(tmp_path, layout, wrong, named):
    file = write_run(tmp_path, **MIXTURE)
    planned = plan(
        file, "flow.prompts_per_step=6", *(f"policy.parallel.{setting}" for setting in layout)
    )
    assert keys(planned) == [f"policy.parallel.{key}" for key in wrong]
    assert named in "".join(problem.what for problem in planned.problems)


@pytest.mark.parametrize(("count", "more"), [(6, 0), (7, 1)])
def test_a_plan_shows_the_first_problems_and_the_number_of_the_others(file, count, more):
    planned = plan(file)
    problems = [Problem(key=f"key_{n}", what="is wrong", fix="change it") for n in range(count)]
    console = Console(file=StringIO(), width=200)
    show_plan(replace(planned, problems=tuple(problems)), load(file), LAPTOP, console)
    printed = console.file.getvalue()
    assert all((f"key_{n}" in printed) == (n < 6) for n in range(count))
    assert ("more\n" in printed) == bool(more)
    assert not more or f"... and {more} more\n" in printed


@pytest.mark.parametrize(("count", "more"), [(16, 0), (17, 1), (40, 24)])
def test_a_plan_shows_the_first_machines_and_the_last(file, count, more):
    planned = replace(plan(file), nodes=tuple((f"node_{n:02}", f"rank {n}") for n in range(count)))
    console = Console(file=StringIO(), width=200)
    show_plan(planned, load(file), LAPTOP, console)
    printed = console.file.getvalue()
    shown = re.findall(r"node_\d\d|and \d+ more +as many ranks each", printed)
    if not more:
        assert shown == [f"node_{n:02}" for n in range(count)]
    else:
        assert shown[:15] == [f"node_{n:02}" for n in range(15)]
        assert re.sub(" +", " ", shown[15]) == f"and {count - 16} more as many ranks each"
        assert shown[16:] == [f"node_{count - 1:02}"]


def test_engines_are_counted_on_the_machines_that_may_have_them(file):
    config = load(file, ["rollout.engines=5", "weights.transport=relay"])

    def counts(**machines: int) -> list[int]:
        machine = replace(LAPTOP, described=True, **machines)
        total = machine.nodes + machine.engine_nodes
        return [engines_on(config, machine, "cpu", node) for node in range(total)]

    assert counts(nodes=2) == [3, 3]
    assert counts(nodes=1, engine_nodes=2) == [0, 3, 3]
    config = load(file, ["rollout.engines=5"])
    assert counts(nodes=2) == [5, 0]


def test_a_damaged_export_of_this_package_is_refused(file):
    model = load(file).model.path
    (model / DIGESTS).write_text(described({}, {"config.json": StoredFile.of(b"{}")}))
    (problem,) = plan(file).problems
    assert problem.key == "model.path"
    assert f"{model} is damaged: config.json: " in problem.what


def test_a_dense_model_has_no_experts_to_divide(file):
    assert keys(plan(file, "policy.parallel.ranks=2", "policy.parallel.expert=2")) == [
        "policy.parallel.expert"
    ]


def test_routing_replay_requires_experts_and_reports_its_bytes(file, tmp_path):
    assert keys(plan(file, "policy.routing_replay=rollout")) == ["policy.routing_replay"]
    mixture = write_run(tmp_path / "mixture", **MIXTURE)
    asked = ["flow.prompts_per_step=6", "policy.routing_replay=rollout"]
    planned = plan(mixture, *asked)
    assert keys(planned) == []
    # Two layers, two experts each.
    assert planned.routed_bytes == 4
    console = Console(file=StringIO(), width=200)
    show_plan(planned, load(mixture, asked), LAPTOP, console)
    assert "chosen by engines: 4 bytes per token, up to " in console.file.getvalue()
    assert plan(mixture, asked[0]).routed_bytes == 0


def test_expert_parallelism_divides_experts_and_their_optimizer_state(
    tmp_path,
):
    file = write_run(tmp_path, **MIXTURE)
    shape, _ = read_model(file.parent / "model")
    experts = shape.layers * shape.layer_experts
    assert experts == 2 * 4 * 3 * 16 * 24
    config = load(file, ["policy.parallel.ranks=4", "policy.parallel.expert=2"])
    memory = rank_memory(config, shape, stage=0, data_parallel=4, longest=16)
    rest = shape.parameters - experts
    assert memory.parameters == 4 * (rest + experts // 2)
    assert memory.optimizer == 8 * (-(-rest // 4) + experts // 4)


def test_tensor_varies_fastest_and_pipeline_slowest_over_ranks(file):
    sizes = ["ranks=24", "tensor=2", "context=3", "pipeline=2"]
    config = load(file, [f"policy.parallel.{size}" for size in sizes])
    assert [rank_coordinates(config, rank) for rank in range(24)] == [
        (tensor, context, data, pipeline)
        for pipeline in range(2)
        for data in range(2)
        for context in range(3)
        for tensor in range(2)
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy.parallel.ranks=3", "policy.parallel.tensor=2"], "policy.parallel.ranks"),
        (["policy.parallel.ranks=4", "policy.parallel.tensor=4"], "policy.parallel.tensor"),
        (["policy.parallel.ranks=3", "policy.parallel.context=2"], "policy.parallel.ranks"),
        (["policy.parallel.ranks=4", "policy.parallel.pipeline=4"], "policy.parallel.pipeline"),
        (["policy.parallel.sequence=true"], "policy.parallel.sequence"),
        (["policy.parallel.ranks=5"], "flow.prompts_per_step"),
        (["policy.device=cuda"], "policy.device"),
        (["rollout.max_context=65"], "rollout.max_context"),
        (["rollout.max_context=8"], "rollout.sampling.max_tokens"),
        (["policy.tokens_per_micro_batch=11"], "policy.tokens_per_micro_batch"),
        (
            ["policy.optimizer={lr: 1e-5, min_lr: 1e-4, schedule: linear}"],
            "policy.optimizer.min_lr",
        ),
        (["rollout.reward.name=nothing"], "rollout.reward.name"),
        (["rollout.vllm.blok_size=32"], "rollout.vllm.blok_size"),
        (["rollout.vllm.block_size=many"], "rollout.vllm.block_size"),
        (["rollout.vllm.block_size=16"], "rollout.vllm.block_size"),
        (["rollout.vllm.async_scheduling=3"], "rollout.vllm.async_scheduling"),
        (["rollout.vllm.enable_chunked_prefill=true"], "rollout.vllm.enable_chunked_prefill"),
        (["data.train=nowhere"], "data.train"),
        (["model.path=nowhere"], "model.path"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_config_names_its_key(file, overrides, key):
    planned = plan(file, *overrides)
    assert keys(planned) == [key]


def test_an_unknown_option_of_vllm_is_answered_with_one_that_may_be_set(file):
    for name, fix in (
        ("blok_size", "did you mean block_size?"),
        ("zzzqq", "remove it, or find the right name in vLLM's `AsyncEngineArgs`"),
        ("dtyp", "remove it; dtype may not be set here either: another key sets it: model.dtype"),
    ):
        (problem,) = plan(file, f"rollout.vllm.{name}=1").problems
        assert (problem.key, problem.fix) == (f"rollout.vllm.{name}", fix)
        assert problem.what == "is not an argument of the installed vLLM's engine"
    for value in ("null", "64", "'64'"):
        assert plan(file, f"rollout.vllm.block_size={value}").problems == ()
    for value in ("0", "'16'", "48.0"):
        (problem,) = plan(file, f"rollout.vllm.block_size={value}").problems
        assert "vLLM reads blocks of a multiple of 32 tokens" in str(problem)


def test_head_sizes_without_a_cpu_kernel_of_vllm_are_refused(tmp_path):
    """The sizes come from the installed vLLM, which checks them at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(cpu_head_sizes()) == CPUAttentionBackend.get_supported_head_sizes()
    for head in (8, 16, 48, 72, 120, 576):
        file = write_run(tmp_path / str(head), head_dim=head)
        (problem,) = plan(file).problems
        assert (problem.key, f"{head} elements" in problem.what) == ("model.path", True)
        assert "32, 64, 80" in problem.what
        assert plan(file, "policy.device=cuda", machine=NODE).problems == ()
        supervised = "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}"
        sft = ("rollout=null", "objective={loss: sft, advantage: none}", supervised)
        assert plan(file, *sft).problems == (), "no engine, no kernel"
    implied = {"head_dim": None, "hidden_size": 64, "num_attention_heads": 4}
    assert keys(plan(write_run(tmp_path / "implied", **MISTRAL | implied))) == ["model.path"]
    for head in cpu_head_sizes():
        assert plan(write_run(tmp_path / f"fine{head}", head_dim=head)).problems == ()


def test_an_fp8_cache_on_a_cpu_requires_head_sizes_of_a_multiple_of_32(tmp_path):
    fp8 = "rollout.vllm.kv_cache_dtype=fp8"
    assert plan(write_run(tmp_path / "fine", head_dim=96), fp8).problems == ()
    odd = write_run(tmp_path / "odd", head_dim=80)
    assert keys(plan(odd, fp8)) == ["rollout.vllm.kv_cache_dtype"]
    assert plan(odd, fp8, "policy.device=cuda", machine=NODE).problems == ()


def test_vllm_options_are_accepted_and_cpu_rules_do_not_apply_to_gpus(file):
    options = "rollout.vllm={block_size: 16, enable_chunked_prefill: true}"
    assert keys(plan(file, options, "policy.device=cuda", machine=NODE)) == []


def test_a_valid_layout_has_no_problems(file):
    planned = plan(
        file,
        "policy.parallel.ranks=8",
        "policy.parallel.tensor=2",
        "policy.parallel.pipeline=2",
        "policy.parallel.sequence=true",
    )
    assert planned.problems == ()
    assert len([process for process in planned.processes if process.name.startswith("rank")]) == 8
    assert len(planned.ranks) == 2


def test_a_micro_batch_must_have_room_for_the_longest_sample(file):
    longest_prompt = 4
    fits = f"policy.tokens_per_micro_batch={longest_prompt + 8}"
    assert plan(file, fits).problems == ()


def test_invalid_agents_and_tools_are_problems_of_the_plan(file):
    """Too few tokens for all segments of a sample are a problem, too."""
    agent = {"name": "agent", "settings": {"function": "tests.unit.agents:run"}, "max_segments": 3}
    tools = {"name": "tools", "settings": {"functions": "tests.unit.agents:times"}}
    needed = 3 * (4 + 8)

    def planned(environment, *more):
        return plan(file, f"rollout.environment={json.dumps(environment)}", *more).problems

    template = (
        "{% if tools %}{% endif %}{% for m in messages %}{{ '+' if m.role == 'assistant' else '' }}"
        "{{ m.content }}={% endfor %}{% if add_generation_prompt %}+{% endif %}"
    )
    (file.parent / "model" / "chat_template.jinja").write_text(template)

    assert planned(agent, f"policy.tokens_per_micro_batch={needed}") == ()
    (few,) = planned(agent, f"policy.tokens_per_micro_batch={needed - 1}")
    assert few.key == "policy.tokens_per_micro_batch"
    assert "in 3 rollout.environment.max_segments" in few.what
    for environment in (agent, tools):
        (other,) = planned(environment | {"tool_parser": "qwen3_jsn"})
        assert other.key == "rollout.environment.tool_parser"
        assert "did you mean 'qwen3_json'" in other.fix
    (plain,) = planned(tools)  # prompts are text, which names no tools
    assert plain.key == "rollout.environment.format"
    assert "set data.as_chat: true" in plain.fix


def test_context_parallel_ranks_divide_a_samples_memory(file):
    sizes = ["ranks=4", "tensor=2", "context=2"]
    planned = plan(file, *(f"policy.parallel.{size}" for size in sizes))
    ranks = [process.kind for process in planned.processes if process.name.startswith("rank")]
    assert ranks[1:3] == [
        "torchrun: tensor 1, context 0, pipeline 0, data 0",
        "torchrun: tensor 0, context 1, pipeline 0, data 0",
    ]
    assert planned.batch.data_parallel == 1
    alone = plan(file, "policy.parallel.ranks=2", "policy.parallel.tensor=2").ranks[0]
    assert planned.ranks[0].optimizer == alone.optimizer // 2
    assert planned.ranks[0].parameters == alone.parameters
    assert 0.4 * alone.activations < planned.ranks[0].activations < 0.8 * alone.activations


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_a_size_that_context_parallelism_does_not_divide_is_named_with_its_fix(file, name):
    settings = [f"policy.sequence={name}", "policy.parallel.context=2"]
    (problem,) = plan(file, *settings, "policy.parallel.ranks=3").problems
    assert problem.what == "3 ranks do not divide into tensor 1 x context 2 x pipeline 1 = 2"
    assert problem.fix == "set ranks to a multiple of 2, or lower tensor, context or pipeline"
    (problem,) = plan(
        file,
        *settings,
        "policy.parallel.ranks=4",
        "policy.parallel.tensor=2",
        "policy.parallel.sequence=true",
        "policy.parallel.context=2",
        "rollout.sampling.max_tokens=6",
        "policy.tokens_per_micro_batch=11",
    ).problems
    assert problem.key == "policy.tokens_per_micro_batch"
    assert problem.fix == "set it to at least 12"


def test_data_without_a_field_that_the_reward_reads_is_a_problem(file):
    data = file.parent / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n')
    (problem,) = plan(file).problems
    assert problem.key == "data.train"
    assert "train.jsonl:2" in problem.what
    assert "answer" in problem.what


def test_a_supervised_run_needs_responses_that_fit(file):
    supervised = (
        "rollout=null",
        "objective={loss: sft, advantage: none}",
        "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
    )
    assert plan(file, *supervised).problems == ()
    (problem,) = plan(file, *supervised, "policy.tokens_per_micro_batch=5").problems
    assert problem.key == "data.train"
    assert problem.fix.startswith("leave such rows out (data.max_tokens=5)")
    (file.parent / "train.jsonl").write_text(
        '{"prompt": "1+1=", "response": "2"}\n{"prompt": "2+2=", "response": "22222"}\n'
    )
    left_out = plan(file, *supervised, "data.max_tokens=6")
    assert left_out.problems == ()
    note = "1 of the first 2 rows of data.train exceed data.max_tokens: 6 and are left out"
    assert note in left_out.warnings
    (file.parent / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (problem,) = plan(file, *supervised).problems
    assert "response" in problem.what


def test_held_out_data_of_a_supervised_run_must_have_responses(file):
    held_out = file.parent / "held_out.jsonl"
    supervised = (
        "rollout=null",
        "objective={loss: sft, advantage: none}",
        "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
        f"data.eval={held_out}",
        "eval.every=2",
    )
    held_out.write_text('{"prompt": "7+1=", "response": "8"}\n')
    assert plan(file, *supervised).problems == ()
    held_out.write_text('{"prompt": "7+1=", "answer": "8"}\n')
    (problem,) = plan(file, *supervised).problems
    assert (problem.key, "no `response`" in problem.what) == ("data.eval", True)
    held_out.write_text('{"prompt": "7+1=", "response": "88888"}\n')
    (problem,) = plan(file, *supervised, "policy.tokens_per_micro_batch=8").problems
    assert (problem.key, "10 tokens together" in problem.what) == ("data.eval", True)


def test_tokens_without_an_embedding_are_a_problem_if_the_data_uses_them(tmp_path):
    file = write_run(tmp_path, vocab_size=13)  # the last of 14 is "="
    planned = plan(file)
    assert keys(planned) == ["data.train"]
    assert "train.jsonl:1: cannot be tokenized: " in planned.problems[0].what
    assert "no row for token 13 ('=')" in planned.problems[0].what
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2", "response": "2="}\n')
    planned = plan(file)
    assert planned.problems == ()
    assert [one for one in planned.warnings if "14 entries and the model 13 rows" in one]
    supervised = (
        "rollout=null",
        "objective={loss: sft, advantage: none}",
        "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
    )
    (problem,) = plan(file, *supervised).problems
    assert (problem.key, "no row for token 13" in problem.what) == ("data.train", True)
    (problem,) = plan(write_run(tmp_path, vocab_size=14, eos_token_id=14)).problems
    assert (problem.key, "ends sequences with token 14" in problem.what) == ("model.path", True)


def test_a_missing_shard_of_the_weights_is_a_problem(file):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (file.parent / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = plan(file).problems
    assert "model-00001-of-00002.safetensors" in problem.what


def test_weights_in_another_format_are_a_problem(file):
    (file.parent / "model" / "model.safetensors").rename(file.parent / "model" / "weights.bin")
    (problem,) = plan(file).problems
    assert "contains no *.safetensors weights" in problem.what


def test_each_rank_and_each_engine_has_a_gpu(file):
    overrides = (
        "policy.device=auto",
        "policy.parallel.ranks=4",
        "policy.parallel.tensor=2",
        "rollout.engines=4",
    )
    planned = plan(file, *overrides, machine=NODE)
    assert planned.device == "cuda"
    assert planned.problems == ()
    assert sorted(process.device for process in planned.processes if "GPU" in process.device) == [
        f"GPU {i}" for i in range(8)
    ]
    assert keys(plan(file, *overrides, "rollout.engines=5", machine=NODE)) == [
        "policy.parallel.ranks"
    ]
    shared = plan(
        file, *overrides, "rollout.engines=8", "rollout.placement=colocated", machine=NODE
    )
    assert shared.problems == ()


def test_ranks_divide_over_nodes_and_engines_are_on_the_first(file):
    overrides = (
        "policy.device=auto",
        "policy.parallel.ranks=8",
        "policy.parallel.tensor=2",
        "rollout.engines=4",
    )
    assert keys(plan(file, *overrides, machine=NODE)) == ["policy.parallel.ranks"]
    two = replace(NODE, nodes=2)
    planned = plan(file, *overrides, machine=two)
    assert planned.problems == ()
    places = [process.device for process in planned.processes if "GPU" in process.device]
    assert places == [f"GPU {i} of node {node}" for node in (0, 1) for i in range(4)] + [
        f"GPU {i}" for i in range(4, 8)
    ]
    (problem,) = plan(file, *overrides, "rollout.engines=5", machine=two).problems
    assert problem.what == "4 ranks a node and 5 engines need 9 GPUs, and a node has 8"
    assert "set weights.transport to relay" in problem.fix
    (problem,) = plan(file, "policy.parallel.ranks=1", machine=replace(LAPTOP, nodes=2)).problems
    assert problem.what == "1 rank does not divide over 2 nodes (--nnodes)"
    assert problem.fix == "set ranks to a multiple of 2, or change --nnodes"
    shared = ("policy.device=auto", "policy.parallel.ranks=1", "rollout.placement=colocated")
    assert keys(plan(file, *shared, "flow.async_ratio=0", machine=two)) == ["policy.parallel.ranks"]


def test_each_worker_of_an_engine_has_a_gpu_and_a_part_of_the_model(file):
    overrides = (
        "policy.device=auto",
        "policy.parallel.ranks=4",
        "rollout.tensor=2",
        "rollout.engines=2",
    )
    planned = plan(file, *overrides, machine=NODE)
    assert planned.problems == ()
    assert [process.device for process in planned.processes if "engine" in process.name] == [
        "GPU 4-5",
        "GPU 6-7",
    ]
    (problem,) = plan(file, *overrides[:3], "rollout.engines=3", machine=NODE).problems
    assert problem.what == "4 ranks and 3 engines of 2 GPUs need 10 GPUs, and this machine has 8"
    (problem,) = plan(file, "rollout.tensor=3").problems
    assert problem.key == "rollout.tensor"
    assert "3 does not divide the model's 4 attention heads and 2 key-value heads" in problem.what
    assert problem.fix == "set it to one of: 1, 2"


def test_too_many_ranks_for_one_machine_may_be_on_several(file):
    named = described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    on = ("policy.device=auto", "policy.parallel.ranks=16", "flow.prompts_per_step=16")
    [problem] = plan(file, *on, machine=named).problems
    assert problem.what == "16 ranks and 1 engine need 17 GPUs, and a node has 8"
    assert "divide the ranks over more machines (--nodes; NNODES of the launcher)" in problem.fix


def test_pipeline_stages_of_an_engine_multiply_its_gpus(file):
    overrides = (
        "policy.device=auto",
        "policy.parallel.ranks=4",
        "rollout.tensor=2",
        "rollout.pipeline=2",
    )
    planned = plan(file, *overrides, machine=NODE)
    assert planned.problems == ()
    (engine,) = [process for process in planned.processes if "engine" in process.name]
    assert engine.device == "GPU 4-7"
    assert "4 workers" in engine.kind
    (problem,) = plan(file, *overrides, "rollout.engines=2", machine=NODE).problems
    assert problem.what == "4 ranks and 2 engines of 4 GPUs need 12 GPUs, and this machine has 8"
    assert "rollout.engines, rollout.tensor or rollout.pipeline;" in problem.fix
    shape, _ = read_model(load(file).model.path)
    left_out = shape.layer_sharded + shape.layer_replicated  # a layer, and one of the two tables
    left_out += 0 if shape.tied else shape.vocabulary * shape.hidden
    rollout, memory = load(file).rollout, planned.engine
    whole = memory.of_worker(rollout)
    assert whole == memory.weights
    stages = memory.of_worker(rollout.model_copy(update={"pipeline": 2}))
    assert whole - stages == 4 * left_out
    assert memory.of_worker(rollout.model_copy(update={"tensor": 2})) == whole // 2
    (problem,) = plan(file, "rollout.pipeline=9").problems
    assert (problem.key, problem.fix) == ("rollout.pipeline", "set it to at most 2")


def test_expert_parallel_engines_need_experts_and_cpus_do_not_quantise_them(file, tmp_path):
    divided = ("rollout.tensor=2", "rollout.vllm.enable_expert_parallel=true")
    (problem,) = plan(file, *divided).problems
    assert problem.what == "2 workers cannot divide the model's 0 experts"
    quantised = ("model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_channel")
    full, eight_bit = plan(file, quantised[0]), plan(file, *quantised)
    assert eight_bit.problems == ()
    assert eight_bit.engine.layer < 0.6 * full.engine.layer
    (warning,) = set(eight_bit.warnings) - set(full.warnings)
    assert "samples have log-probs of quantised weights" in warning
    mixture = write_run(tmp_path / "mixture", **MIXTURE)
    assert keys(plan(mixture, *quantised)) == ["rollout.vllm.quantization"]


def test_gpus_quantise_routers_of_whole_blocks_only(tmp_path):
    few, many = (
        write_run(tmp_path / str(experts), **MIXTURE | {"num_experts": experts})
        for experts in (4, 32)
    )
    for method, refused in (("channel", True), ("tensor", False), ("block", True)):
        settings = [f"rollout.vllm.quantization=fp8_per_{method}", "model.dtype=bfloat16"]
        settings.append("policy.device=cuda")
        assert "rollout.vllm.quantization" not in keys(plan(many, *settings, machine=NODE))
        found = plan(few, *settings, machine=NODE).problems
        named = [one.what for one in found if one.key == "rollout.vllm.quantization"]
        text = f"fp8_per_{method} requires a multiple of 16 experts, and a layer of the model has 4"
        assert named == ([text] if refused else [])


def test_a_stop_token_that_the_model_does_not_have_is_refused(file):
    held_out = f"eval.sets=[{{name: a, path: {file}, sampling: {{stop_token_ids: [14]}}}}]"
    problems = plan(file, "rollout.sampling.stop_token_ids=[13, 99]", held_out).problems
    found = {one.key: one.what for one in problems if "stop_token" in one.key}
    assert found == {
        "rollout.sampling.stop_token_ids": "99 is not a token of the model, which has 14",
        "eval.sets.0.sampling.stop_token_ids": "14 is not a token of the model, which has 14",
    }


def test_a_stop_string_that_no_text_contains_is_refused(tmp_path):
    file = write_run(tmp_path, vocab_size=128, eos_token_id=1)
    kept = (tmp_path / "model" / "config.json").read_text()
    save_characters(tmp_path / "model", ("<turn>",))
    (tmp_path / "model" / "config.json").write_text(kept)
    sets = f"eval.sets=[{{name: a, path: {file}}}, {{name: b, path: {file}, sampling: STOP}}]"
    sets = sets.replace("STOP", "{stop: ['.<turn>']}")
    stop = r"rollout.sampling.stop=['x', '<end>', '<turn>', ' ', '\n', 'ä']"
    found = {one.key: (one.what, one.fix) for one in plan(file, stop, sets).problems}
    what = "contains the special token 2, which decoded text omits"
    assert {key: value for key, value in found.items() if "stop" in key} == {
        "rollout.sampling.stop": (
            f"'<turn>' {what}",
            "set rollout.sampling.stop_token_ids: [2]",
        ),
        "eval.sets.1.sampling.stop": (
            f"'.<turn>' {what}",
            "set eval.sets.1.sampling.stop_token_ids: [2]",
        ),
    }


def test_an_absent_reward_server_is_reported_without_waiting(file, monkeypatch):
    def notes(port, timeout_s):
        settings = f"{{url: 'http://127.0.0.1:{port}/x'}}"
        reward = f"{{name: http, timeout_s: {timeout_s}, settings: {settings}}}"
        planned = plan(file, f"rollout.reward={reward}")
        assert planned.problems == ()
        return [one for one in planned.warnings if "no server" in one]

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        # A trial of the reward would time out, which is a problem.
        (note,) = notes(port, timeout_s=0.1)
        assert note.startswith(
            f"rollout.reward: no server accepts connections at 127.0.0.1:{port} (Connection re"
        )
        server.listen()  # and never answers
        monkeypatch.setattr("megatron_async_rl.plan.trials.REWARD_TRIAL_TIMEOUT_S", 0.1)
        assert notes(port, timeout_s=30) == []


def test_the_whole_model_must_fit_into_shared_memory(file):
    small = Machine(cores=2, memory=16 * GIB, shared_memory=1024, gpus=())
    assert keys(plan(file, machine=small)) == ["weights.transport"]


def relayed_plan(file: Path, machine: Machine = LAPTOP) -> tuple[RunPlan, str]:
    """Return the plan of a run with relay, and its output."""
    planned = plan(file, "weights.transport=relay", machine=machine)
    console = Console(record=True, width=200, file=StringIO())
    show_plan(planned, load(file, ["weights.transport=relay"]), machine, console)
    return planned, console.export_text()


def test_with_relay_the_plan_has_agents_and_memory_on_other_machines(file, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    planned, shown = relayed_plan(file)
    assert planned.problems == ()
    relays, engine = (
        next(one for one in planned.processes if one.name == name)
        for name in ("relays", "engine 0")
    )
    assert relays.device == "each other machine with engines"
    assert engine.device == "1 thread of any machine"
    two = 2 * planned.engine.weights
    assert f"each other machine with engines: {size(two)} in /dev/shm (two versions)" in shown
    assert "relays" not in [one.name for one in plan(file).processes]


def test_relay_without_a_cluster_is_noted(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    planned, _ = relayed_plan(file)
    (note,) = (one for one in planned.warnings if "RAY_ADDRESS" in one)
    assert "all engines run here" in note


def test_with_relay_engines_may_use_gpus_of_other_machines(file, monkeypatch):
    eight, relay = ["policy.parallel.ranks=8", "policy.device=cuda"], "weights.transport=relay"
    too_few = ["policy.parallel.ranks"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert keys(plan(file, *eight, machine=NODE)) == too_few
    assert keys(plan(file, *eight, relay, machine=NODE)) == too_few
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert plan(file, *eight, relay, machine=NODE).problems == ()
    assert too_few[0] in keys(plan(file, *eight, relay, "policy.parallel.ranks=16", machine=NODE))


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        ("relay", "sends weights to engines on other machines"),
        (
            "collective",
            "sends weights between devices over NCCL, which accepts each device only once",
        ),
    ],
)
def test_colocated_engines_require_shared_memory_or_ipc(file, transport, why):
    refused = rf"weights.transport: {transport} {why}.*set weights.transport: shared_memory"
    with pytest.raises(ConfigError, match=refused):
        load(file, [f"weights.transport={transport}", "rollout.placement=colocated"])


def test_ipc_requires_colocated_engines(file):
    with pytest.raises(ConfigError, match=r"cuda_ipc passes .* same devices, and .*disaggregated"):
        load(file, ["weights.transport=cuda_ipc"])


IPC = ("weights={transport: cuda_ipc, bucket_mib: 1}", "rollout.placement=colocated")


@pytest.mark.parametrize(
    ("settings", "nodes", "what", "fix"),
    [
        (("policy.device=cuda",), 2, "the ranks are on 2 nodes", "set it to shared_memory"),
        ((), 2, "the ranks are on 2 nodes", "set it to shared_memory"),
        (
            ("policy.device=cuda", "rollout.engines=4"),
            1,
            "4 engines use 4 GPUs, but only 2 have a rank",
            "set rollout.engines to at most 2, policy.parallel.ranks to 4, or weights.transport to"
            " shared_memory",
        ),
        (
            ("policy.device=cuda", "policy.parallel.ranks=1", "rollout.tensor=2"),
            1,
            "1 engine of 2 GPUs uses 2 GPUs, but only 1 has a rank",
            "set policy.parallel.ranks to 2, or weights.transport to shared_memory",
        ),
    ],
)
def test_engines_that_could_not_map_a_ranks_memory_are_refused(file, settings, nodes, what, fix):
    two = ("policy.parallel.ranks=2", *IPC, *settings)
    machine = NODE if "policy.device=cuda" in settings else LAPTOP
    problems = plan(file, *two, machine=replace(machine, nodes=nodes)).problems
    (problem,) = (one for one in problems if one.key == "weights.transport")
    assert what in problem.what
    assert problem.fix == fix
    fitting = ("rollout.engines=2", "rollout.tensor=1", "policy.parallel.ranks=2")
    assert plan(file, *two, *fitting, machine=machine).problems == ()


def test_with_ipc_on_a_cpu_dev_shm_contains_two_buckets_per_rank(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    planned = plan(file, "policy.parallel.ranks=2", *IPC)
    buckets = ipc_bucket_bytes(load(file, IPC), planned.engine)
    assert 0 < buckets <= 2 * planned.engine.weights
    room = replace(LAPTOP, shared_memory=2 * buckets)
    assert plan(file, "policy.parallel.ranks=2", *IPC, machine=room).problems == ()
    room = replace(room, shared_memory=2 * buckets - 1)
    (problem,) = plan(file, "policy.parallel.ranks=2", *IPC, machine=room).problems
    assert problem.what.startswith("two buckets of each of 2 ranks (")
    on_gpus = plan(file, "policy.device=cuda", *IPC, machine=replace(NODE, shared_memory=0))
    assert on_gpus.problems == ()
    assert not any("RAY_ADDRESS" in note for note in planned.warnings)


def test_with_collective_each_engine_has_its_own_versions(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    weights = plan(file).engine.weights
    room = replace(LAPTOP, shared_memory=5 * weights)
    settings = ["weights.transport=collective", "rollout.engines=2"]
    (problem,) = plan(file, *settings, machine=room).problems
    assert "two versions of the model, and two for each of 2 engines (" in problem.what
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    planned = plan(file, *settings, machine=room)
    assert planned.problems == ()
    (sender,) = (one for one in planned.processes if one.name == "sender")
    assert sender.device == "rank 0's machine"


def test_collective_on_one_machine_is_noted(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    noted = plan(file, "weights.transport=collective").warnings
    assert any("all engines run here, where shared_memory copies nothing" in one for one in noted)


def test_shared_memory_too_small_for_the_samples_of_a_step_is_noted(file, monkeypatch):
    assert object_store_bytes(8, 10**6) == 4 * 8 * (17 * 10**6 + 512)
    machine = Machine(cores=2, memory=16 * GIB, shared_memory=512 * 2**20, gpus=())
    assert not [one for one in plan(file, machine=machine).warnings if "object store" in one]
    many = plan(file, "flow.prompts_per_step=120000", machine=machine)
    assert many.problems == ()
    (said,) = (one for one in many.warnings if "object store" in one)
    assert "docker run --shm-size=" in said
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    many = plan(file, "flow.prompts_per_step=120000", machine=machine)
    assert not [one for one in many.warnings if "object store" in one]


def test_bfloat16_on_a_cpu_without_instructions_for_it_is_noted(file):
    def notes(dtype: str, *flags: str) -> list[str]:
        machine = replace(LAPTOP, cpu_flags=frozenset(flags))
        planned = plan(file, f"model.dtype={dtype}", machine=machine)
        assert planned.problems == ()
        return [one for one in planned.warnings if "float32" in one]

    (note,) = notes("bfloat16", "fpu", "avx2", "avx512f")
    assert note.startswith("model.dtype: bfloat16, but this CPU has no instructions for it")
    assert not notes("float32", "avx2")
    on_gpus = replace(NODE, cpu_flags=frozenset({"avx2"}))
    planned = plan(file, "model.dtype=bfloat16", "policy.device=cuda", machine=on_gpus)
    assert not [one for one in planned.warnings if "float32" in one]
    for known in ((), ("avx2", "avx512_bf16"), ("avx2", "amx_bf16")):
        assert not notes("bfloat16", *known), "unknown, or it has them"


def test_more_processes_than_cores_and_a_small_cache_are_only_notes(file):
    # 64 KiB: the model's context of 64 tokens.
    planned = plan(file, "policy.parallel.ranks=2", "rollout.kv_cache_gib=0.000062")
    assert planned.problems == ()
    assert len(planned.warnings) == 2


def test_the_printed_staleness_bound_is_that_of_the_flow(file):
    assert "lag 0" in staleness_law(load(file, ["flow.async_ratio=0"]))
    law = staleness_law(load(file, ["flow.async_ratio=1.5"]))
    assert "= 2" in law
    assert "(t + 1) x 4 + 6 prompts" in law
    assert "at most 10 prompts (20 responses)" in law


def test_the_engine_cache_is_counted_in_tokens_of_the_models_dtype(file):
    engine = plan(file, "rollout.kv_cache_gib=0.0009765625").engine
    assert engine is not None
    assert engine.bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert engine.cache_tokens == MIB // engine.bytes_per_token


def test_the_plan_command_loads_few_modules(file):
    """Imports take most of the command's time. Their number, unlike seconds, is the same on every
    machine: 878 when this limit was set."""
    command = ["-X", "importtime", "-m", "megatron_async_rl", "plan", str(file), "--resolved"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert 100 < len(loaded) < 950
    assert not {name.partition(".")[0] for name in loaded} & {*HEAVY}
    for words in (
        "rank 0",
        "engine 0",
        "8 samples",
        "start_version",
        "parameters",
        "async_ratio: 1",
    ):
        assert words in done.stdout


def one_line(text: str) -> str:
    """Return the output without its line breaks."""
    return re.sub(r"\s+", " ", text)


def test_the_verdict_is_the_last_line_and_the_config_is_shown_on_request(file):
    code, output = planned_on_a_laptop(file)
    assert code == 0, output
    assert output.splitlines()[-1] == "verdict: can run here"
    assert "async_ratio:" not in output
    code, output = planned_on_a_laptop(file, "--resolved")
    assert "async_ratio: 1" in output
    (file.parent / "train.jsonl").unlink()
    code, output = planned_on_a_laptop(file, "--gpus", "8", "policy.device=cuda")
    assert code == 0, output
    (verdict,) = re.findall(r"verdict: .*", one_line(output))
    assert "not checked, because the files are not here: data.train; host memory not" in verdict


def test_the_verdict_names_a_refused_run_directory(file):
    (file.parent / "out").mkdir()
    (file.parent / "out" / "config.yaml").write_text(dump(load(file)))
    write_status(file.parent / "out", Status(phase="training", step=2, steps=4, time=0.0))
    code, output = planned_on_a_laptop(file, "model.dtype=bfloat16")
    assert code == 0, output
    (verdict,) = re.findall(r"verdict: .*", one_line(output))
    assert "`mar train` would refuse this run.dir: model.dtype: " in verdict


def test_no_line_of_a_plan_is_wider_than_100_columns(tmp_path):
    """The plan has many ranks, stages and machines."""
    file = write_run(tmp_path, num_hidden_layers=8)
    many = [
        "policy.parallel={ranks: 64, pipeline: 8}",
        "flow.prompts_per_step=64",
        "policy.device=cuda",
        "model.dtype=bfloat16",
        "weights.transport=relay",
        "objective={loss: reinforce, proximal: ewma, reference: {ema: 0.9}, kl: {coef: 0.1}}",
        "policy.optimizer={moment_offload: cpu}",
        "controls=[gac]",
        "rollout.engines=16",
    ]
    code, output = planned_on_a_laptop(
        file, *many, "--gpus", "8", "--nodes", "16", "--trainer-nodes", "8", "--resolved"
    )
    assert code == 0, output
    # Long words, such as paths, are not broken.
    assert [one for one in output.splitlines() if len(one) > 100 and " " in one.strip()] == []
    assert "(3 stages before the last are not shown)" in output
    assert "stage 7" in output


def test_host_memory_is_summed_over_the_ranks_and_engines_of_each_machine(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    overrides = (
        "policy.device=cuda",
        "policy.parallel.ranks=8",
        "flow.prompts_per_step=8",
        "policy.optimizer.moment_offload=cpu",
        "weights.transport=relay",
        "rollout.engines=12",
    )
    cluster = described_machine(gpus=8, gpu_memory_gib=80, nodes=2, engine_nodes=2)
    planned = plan(file, *overrides, machine=cluster)
    assert planned.problems == ()
    (rank,) = planned.ranks
    head, other, alone = planned.hosts
    assert [one.machines for one in planned.hosts] == ["node 0", "node 1", "nodes 2-3"]

    def parts(host):
        return {part.name: part.size for part in host.parts}

    for host in (head, other):
        assert parts(host)["offloaded moments and gradients"] == 4 * rank.offloaded > 0
        assert parts(host)["copies for asynchronous checkpoints"] == 4 * rank.staged > 0
    staged = 2 * planned.engine.weights
    assert [parts(one).get("staged weights in /dev/shm") for one in planned.hosts] == [staged] * 3
    assert "copies for asynchronous checkpoints" not in parts(alone)
    assert head.shared_memory == staged + object_store_bytes(16, planned.batch.longest)
    assert (other.shared_memory, alone.shared_memory) == (staged, staged)
    assert all(host.total == sum(parts(host).values()) for host in planned.hosts)

    by_collective = plan(file, *overrides, "weights.transport=collective", machine=cluster)
    # Four engines fit next to the ranks of a machine, eight on a machine with engines only.
    copies = [host.shared_memory // planned.engine.weights for host in by_collective.hosts[1:]]
    assert copies == [2 * 4, 2 * 8]

    here = plan(file, "policy.parallel.ranks=2", "rollout.engines=2")
    (host,) = here.hosts
    exact = sum(rank.total - rank.activations - rank.logprobs + rank.host for rank in here.ranks)
    assert host.certain == 2 * exact + 4 * here.engine.weights
    assert host.total > host.certain + 2 * here.engine.cache


def test_engines_on_a_cpu_need_memory_for_the_logits_of_the_responses_that_run(file):
    def logits(*overrides: str) -> float:
        """Return the number of responses whose logits are counted."""
        (host,) = plan(file, "flow.async_ratio=1", *overrides).hosts
        (size,) = [part.size for part in host.parts if part.name == "logits in engines"]
        return size / (20 * 14 * 4)  # a float32 for each of 14 tokens

    # The file has 4 groups of 2 responses; those of the next step run ahead.
    assert logits() == logits("rollout.engines=2") == 2 * 4 * 2
    assert logits("rollout.max_concurrent=5") == 5
    assert logits("rollout.max_concurrent=5", "rollout.engines=2") == 10
    assert logits("rollout.max_concurrent=5", "rollout.tensor=2") == 10
    assert logits("rollout.max_concurrent=5", "rollout.pipeline=2") == 5
    # A cache of 3 blocks, with 1024 bytes per token.
    assert logits(f"rollout.kv_cache_gib={3.5 * 32 * 1024 / GIB}") == 3
    larger = "rollout.vllm.block_size=64"
    assert logits(f"rollout.kv_cache_gib={3.5 * 64 * 1024 / GIB}", larger) == 3


def test_too_little_host_memory_is_refused_with_a_fix(tmp_path):
    """The sum over a machine's ranks counts: one rank would fit."""
    file = large_model(tmp_path)
    small = (*EIGHT_RANKS, *EIGHT_GPUS, "80", "--host-memory")
    code, output = planned_on_a_laptop(file, *small, "100")
    assert code == 2
    assert "host memory" in output
    assert "of host memory are needed, more than the available 100.0 GiB" in output
    assert "copies for asynchronous checkpoints" in output
    assert "set checkpoint.asynchronous: false (then " in output
    code, output = planned_on_a_laptop(file, *small, "2000")
    assert code == 0, output
    assert "8 x GPU of 80 GiB, 2000.0 GiB host memory" in output
    assert "the machine has" in output
    planned = plan(
        file, *EIGHT_RANKS, machine=described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    )
    (host,) = planned.hosts
    assert planned.problems == (), "nothing is known of its host memory"
    assert host.certain > 8 * max(rank.host for rank in planned.ranks) > 100 * GIB

    code, output = planned_on_a_laptop(file, *small, f"{host.certain / GIB + 0.1}")
    assert code == 0, "processes are an estimate"
    assert "note: about" in output


def test_too_little_host_memory_for_a_supervised_run_is_refused_with_a_fix(file):
    supervised = (
        *("rollout=null", "objective={loss: sft, advantage: none}", "flow.group_size=1"),
        *("flow.async_ratio=0", "checkpoint.asynchronous=true"),
    )
    tiny = Machine(cores=2, memory=1000, shared_memory=GIB, gpus=())
    (refused,) = [
        one for one in plan(file, *supervised, machine=tiny).problems if one.key == "host memory"
    ]
    assert "checkpoint.asynchronous: false (then " in refused.fix
    assert "rollout" not in refused.fix


def test_totals_are_sums_over_all_steps(file):
    (file.parent / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(10, 30))
    )
    planned = plan(file, "run.steps=50", "checkpoint={every: 10, keep: 2}", "objective.epochs=2")
    sums, batch = planned.totals, planned.batch
    assert (sums.prompts, sums.gpus) == (50 * 4, 0)
    assert sums.sampled == 50 * 8 * batch.response == 50 * 8 * 4
    assert sums.trained == 2 * 50 * 8 * (batch.prompt + batch.response)
    (source,) = sums.sources
    assert (source.rows, sums.epochs(source)) == (20, 10.0)
    assert sums.checkpoints == 3
    shape, _ = read_model(file.parent / "model")
    assert sums.checkpoint == shape.parameters * (4 + 8), "float32 weights and two moments"
    assert sums.hours(36.0) == 0.5
    words = one_line(sums.as_text(72.0))
    assert "1 h for 50 steps, without" in words
    assert "10 of train (20 rows)" in words
    assert "up to 3 at a time, including the one being written" in words
    gpus = replace(sums, gpus=8)
    assert "8 GPU-hours on 8 GPUs" in gpus.as_text(72.0)

    assert plan(file, "checkpoint.every=0").totals.checkpoints == 1
    assert plan(file, "run.steps=50", "checkpoint.every=30").totals.checkpoints == 2


def test_epochs_of_a_mixture_follow_its_weights_and_count_all_rows(file, monkeypatch):
    monkeypatch.setattr("megatron_async_rl.plan.preflight.PROMPTS_IN_A_PLAN", 4)
    row = '{"prompt": "1+1=", "answer": "2"}\n'
    for name, rows in (("a", 30), ("b", 5)):
        (file.parent / f"{name}.jsonl").write_text(row * rows + "\n\n")
    a, b = (file.parent / f"{name}.jsonl" for name in "ab")
    sources = f"data={{sources: [{{path: {a}, weight: 3.0}}, {{path: {b}}}]}}"
    planned = preflight(load(file, [sources, "run.steps=10"]), all_data=False, machine=LAPTOP)
    assert planned.problems == ()
    assert [(one.label, one.rows) for one in planned.totals.sources] == [("a", 30), ("b", 5)]
    epochs = [planned.totals.epochs(one) for one in planned.totals.sources]
    assert epochs == [40 * 0.75 / 30, 40 * 0.25 / 5]


def test_held_out_prompts_in_the_training_data_are_reported(file: Path) -> None:
    held_out = file.parent / "held_out.jsonl"
    evaluated = (f"data.eval={held_out}", "eval={}")
    held_out.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    assert not any("data.eval" in warning for warning in plan(file, *evaluated).warnings)
    held_out.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "2+2=", "answer": "4"}\n')
    told = [warning for warning in plan(file, *evaluated).warnings if "data.eval" in warning]
    assert told == ["1 of 2 prompts of data.eval are also in data.train, such as '2+2='"]


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def activations_of_8b(tmp_path: Path, *overrides: str, on_gpu: bool = True) -> int:
    """Bytes on one of eight tensor-parallel ranks, for one sequence of 16k tokens."""
    layout = ["policy.parallel.ranks=8", "policy.parallel.tensor=8"]
    config = load(write_run(tmp_path), [*layout, *overrides])
    shape = shape_of(tmp_path, **LLAMA_8B)
    memory = rank_memory(config, shape, stage=0, data_parallel=1, longest=16384, on_gpu=on_gpu)
    return memory.activations


def test_attention_scores_count_only_if_torch_keeps_them(tmp_path: Path) -> None:
    bfloat16 = "model.dtype=bfloat16"
    assert activations_of_8b(tmp_path, bfloat16) < 40 * GIB
    assert activations_of_8b(tmp_path, on_gpu=False) < 100 * GIB
    assert activations_of_8b(tmp_path) > 200 * GIB, "float32, grouped queries, GPU: no fused kernel"


def test_norms_after_attention_and_mlp_keep_their_inputs(tmp_path: Path) -> None:
    """Two more of them in each of 32 layers of 16k tokens, bfloat16, on every rank: input and
    normed one in float32; and Gemma's norms of heads."""
    shapes = (shape_of(tmp_path, **LLAMA_8B | also) for also in ({}, GEMMA))
    plain, gemma = (
        rank_memory(
            load(write_run(tmp_path), ["model.dtype=bfloat16"]),
            shape,
            stage=0,
            data_parallel=1,
            longest=16384,
        ).activations
        for shape in shapes
    )
    heads = (32 + 8) * 128
    assert gemma - plain == 32 * 16384 * (2 * 4096 + heads) * 8


def test_recomputation_keeps_layer_inputs_or_leaves_out_scores(tmp_path: Path) -> None:
    """32 layers of 16k tokens over eight ranks; one layer at a time is whole; the last norm's
    input; and hidden states for log-probs, whole on each rank."""
    sequence, hidden = "policy.parallel.sequence=true", 16384 * 4096 * 4
    for more, numbers in (([], hidden), ([sequence], hidden // 8)):
        layer = (activations_of_8b(tmp_path, *more) - numbers - hidden) // 32
        full = activations_of_8b(tmp_path, "policy.recompute=full", *more)
        assert full == 32 * numbers + layer + numbers + hidden
    layer = (activations_of_8b(tmp_path) - 2 * hidden) // 32
    scores = 2 * 32 // 8 * 16384 * 16384 * 4
    selective = activations_of_8b(tmp_path, "policy.recompute=selective")
    assert selective == 32 * (layer - scores) + scores + 2 * hidden


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_the_cpu_does_not_keep_scores(tmp_path, dtype, kv_heads):
    from types import SimpleNamespace

    from megatron_async_rl.policy.attention import CoreAttention

    length, heads = 256, 4
    query = torch.randn(length, 1, heads, 8, dtype=dtype, requires_grad=True)
    key = torch.randn(length, 1, kv_heads, 8, dtype=dtype, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    ):
        layer = SimpleNamespace(softmax_scale=None, window=None, context_group=None)
        CoreAttention.forward(layer, query, key, key, None)
    assert max(kept) < length * length
    shape = shape_of(tmp_path, num_key_value_heads=kv_heads)
    config = load(write_run(tmp_path))
    assert not stores_scores(config, shape, on_gpu=False)


WINDOWED = {"use_sliding_window": True, "sliding_window": 8}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@looped(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.original_max_position_embeddings is None",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type is 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rope_scaling.high_freq_factor is None",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor is '2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (WINDOWED, "max_window_layers is 28"),
        (WINDOWED | {"max_window_layers": 1}, "max_window_layers is 1"),
        (
            WINDOWED | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention']",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types is ['sliding_attention']"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window is 0"),
        ({"attention_bias": True}, "attention_bias is True"),
        (MISTRAL | {"attention_bias": True}, "attention_bias is True"),
        (MISTRAL | {"sliding_window": "8"}, "sliding_window is '8'"),
        (MISTRAL | {"model_type": "qwen3"}, "architectures is ['MistralForCausalLM']"),
        (LLAMA_8B | {"sliding_window": 8}, "sliding_window is 8"),
        (LLAMA_8B | {"mlp_bias": True}, "mlp_bias is True"),
        (GEMMA | {"sliding_window": None}, "sliding_window is None"),
        (
            GEMMA | {"layer_types": ["chunked_attention"] * 2},
            "layer_types is ['chunked_attention']",
        ),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM'"),
        ({"architectures": None}, "architectures is None"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA | {"rope_scaling": YARN}, "rope_scaling.rope_type is 'yarn'"),
        (
            GEMMA | {"rope_parameters": {"full_attention": {}, "sliding_attention": YARN}},
            "rope_parameters.sliding_attention.rope_type is 'yarn'",
        ),
        ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["qwen3"]}, "model_type is ['qwen3']"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is "),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is "),
        ({"rope_scaling": ["linear", 2.0]}, "rope_scaling is ['linear', 2.0]"),
        (
            GEMMA | {"rope_parameters": {"full_attention": {}, "sliding_attention": 1e4}},
            "rope_parameters is {'full_attention': {}, 'sliding_attention': 10000.0}",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_a_model_that_the_ranks_would_refuse_is_refused_by_the_plan(tmp_path, changes, words):
    (problem,) = plan(write_run(tmp_path, **changes)).problems
    assert problem.key == "model.path"
    assert words in problem.what


@looped(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "mlp_bias": None},
        {"rope_scaling": None, "partial_rotary_factor": None},
        {"rope_scaling": YARN},
        {"sliding_window": 8, "max_window_layers": 28},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        WINDOWED | {"max_window_layers": 0},
        WINDOWED | {"max_window_layers": 28, "layer_types": ["sliding_attention"] * 2},
        MISTRAL,
        GEMMA,
        GEMMA | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 8, "head_dim": None, "hidden_size": 128},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    ],
)
def test_a_model_that_the_ranks_accept_is_planned(tmp_path, changes):
    assert plan(write_run(tmp_path, **changes)).problems == ()


CLUSTER = ("--gpus", "8", "--gpu-memory", "80", "--nodes", "4")
ON_CLUSTER = (
    "policy.device=cuda",
    "policy.parallel.ranks=16",
    "rollout.engines=4",
    "flow.prompts_per_step=16",
)


def planned_on_a_laptop(file: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["plan", str(file), *arguments])
    return done.exit_code, done.output


def test_a_cluster_is_planned_from_a_laptop_without_its_data_or_weights(file):
    (file.parent / "model" / "model.safetensors").unlink()
    (file.parent / "train.jsonl").unlink()
    code, output = planned_on_a_laptop(file, *ON_CLUSTER, *CLUSTER)
    assert code == 0, output
    assert "as described: 4 nodes, each with 8 x GPU of 80 GiB" in output
    assert "GPU 3 of node 3" in output
    assert "not checked, because it is not here" in output
    assert "train.jsonl" in output


def test_a_run_must_fit_a_described_cluster(file):
    code, output = planned_on_a_laptop(
        file, *ON_CLUSTER, "policy.parallel.ranks=24", "flow.prompts_per_step=24", *CLUSTER
    )
    assert code == 2
    assert "6 ranks a node and 4 engines need 10 GPUs, and a node has 8" in output
    assert planned_on_a_laptop(file, "--gpu-memory", "80")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        ((*ON_CLUSTER, "policy.parallel.ranks=24", "flow.prompts_per_step=24", *CLUSTER), "fit"),
        ((*ON_CLUSTER, *CLUSTER, "--host-memory", "1", "policy.parallel.ranks=64"), "fit"),
        (("policy.parallel.tensor=3",), "cannot run here: policy.parallel.ranks: 1 rank does not"),
        (("policy.parallel.ranks=3", "policy.parallel.pipeline=3"), "cannot run here"),
        (("--nodes", "2"), "cannot run here: policy.parallel.ranks: 1 rank does not divide over 2"),
        (("model.path=nowhere",), "cannot run here: model.path: "),
        (("data.train=nowhere.jsonl",), "cannot run here: data.train: "),
        (("data.prompt_key=asked", "data.train=nowhere.jsonl"), "cannot run here: data.train: "),
        (("policy.device=cuda",), "cannot run here: policy.device: cuda, but no GPU was found"),
        (("rollout.sampling.max_tokens=100000",), "cannot run here: "),
    ],
)
def test_a_refused_plan_ends_with_its_problems_and_the_verdict(file, arguments, verdict):
    code, output = planned_on_a_laptop(file, *arguments)
    assert code == 2, output
    headings = [line for line in output.splitlines() if line in ("processes", "totals", "problems")]
    assert headings[0] == "processes"
    assert headings[-1] == "problems"
    assert "lag        " in output
    assert "unknown; " not in output.partition("totals")[0]
    last = " ".join(output.rpartition("\nverdict: ")[2].split())
    assert last.startswith("does not fit " if verdict == "fit" else verdict)
    problems = output.rpartition("\nproblems\n")[2]
    assert "  fix: " in problems
    assert [one for one in output.splitlines() if len(one) > 100 and " " in one.strip()] == []


def test_unread_data_never_refuses_a_plan_for_memory(file):
    """Prompts of unknown length might have 16,384 tokens, whose activations would not fit."""
    (file.parent / "model" / "chat_template.jinja").unlink(missing_ok=True)
    planned = plan(file, "data.as_chat=true")
    assert keys(planned) == ["data.train"]
    assert planned.batch.longest == 1 + load(file).rollout.sampling.max_tokens
    assert any("the data was not read" in one for one in planned.warnings)


def test_idle_gpus_are_reported_in_the_totals(file):
    code, output = planned_on_a_laptop(file, *ON_CLUSTER, *CLUSTER)
    assert code == 0, output
    idle = "idle 12 GPUs of 32: ranks and engines use 20 (policy.parallel.ranks, rollout.engines)"
    assert idle in " ".join(output.split())
    whole = (*ON_CLUSTER, "policy.parallel.ranks=28", "flow.prompts_per_step=28", *CLUSTER)
    assert "\nidle " not in planned_on_a_laptop(file, *whole)[1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_plan_uses_the_singular_for_one(file, count):
    many = (f"policy.parallel.ranks={count}", f"rollout.engines={count}")
    _, output = planned_on_a_laptop(file, *many, f"flow.prompts_per_step={4 * count}")
    wrong = re.findall(r"(?<![\d.,-])1 (?:[a-z-]+ )?(?:ranks|engines|GPUs|samples|steps)\b", output)
    assert wrong == []
    assert f"; {number_of('data-parallel rank', count)}, " in one_line(output)


RELAYED = (*ON_CLUSTER, "weights.transport=relay")


def test_machines_with_engines_only_are_planned(file):
    divided = (*RELAYED, "rollout.tensor=2", *CLUSTER, "--trainer-nodes", "2")
    code, output = planned_on_a_laptop(file, *divided)
    assert code == 0, output
    assert "as described: 4 nodes, each with 8 x GPU of 80 GiB" in output
    assert dict(re.findall(r"^(nodes? [-\d]+) +(.*\S)", output, re.M)) == {
        "node 0": "ranks 0-7 on GPU 0-7; the controller",
        "node 1": "ranks 8-15 on GPU 0-7",
        "nodes 2-3": "engines only, 4 at most on each",
    }


def test_more_engines_than_the_machines_have_gpus_for_are_refused(file):
    def ranks(count: int) -> tuple[str, ...]:
        return (*RELAYED, f"policy.parallel.ranks={count}", f"flow.prompts_per_step={count}")

    beside = ("--gpus", "8", "--nodes", "3", "--trainer-nodes", "2")
    # Two GPUs are free on each machine with ranks, and eight on the other.
    code, output = planned_on_a_laptop(file, *ranks(12), "rollout.engines=12", *beside)
    assert code == 0, output
    assert "ranks 6-11 on GPU 0-5; GPU 6-7 for engines, 2 at most" in output
    assert "1 GPU of any machine with as many free" in output
    code, output = planned_on_a_laptop(file, *ranks(12), "rollout.engines=13", *beside)
    assert code == 2
    room = "there is room for 12: 2 on a node with ranks, 8 on each of 1 without"
    assert f"13 engines, and {room}" in output
    more = "plan for 4 machines, 2 of them with ranks (--nodes 4 --trainer-nodes 2)"
    assert f"set it to at most 12, or {more}" in " ".join(output.split())
    # An engine's two workers are on one machine.
    two = ("rollout.tensor=2", "rollout.engines=5", *beside)
    code, output = planned_on_a_laptop(file, *ranks(14), *two)
    assert code == 2
    assert "5 engines of 2 GPUs, and there is room for 4: 0 on a node with ranks, 4 on" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "2", "--trainer-nodes", "3"), "3 of 2 machines"),
        (
            ("--nodes", "4", "--trainer-nodes", "2"),
            "2 machines are for engines only, and all engines run on rank 0's",
        ),
    ],
)
def test_machines_without_ranks_and_engines_are_refused(file, arguments, said):
    code, output = planned_on_a_laptop(file, *ON_CLUSTER, "--gpus", "8", *arguments)
    assert code == 2
    assert "--trainer-nodes" in output
    assert said in output


def test_ranks_that_exchange_activations_between_machines_are_reported(file):
    note = "a node has 3 ranks, so activations pass over the network between machines"
    six = ("policy.device=cuda", "policy.parallel.ranks=6", "policy.parallel.tensor=2")
    planned = plan(file, *six, "flow.prompts_per_step=6", machine=replace(NODE, nodes=2))
    assert [note in one for one in planned.warnings].count(True) == 1
    alone = plan(file, *six, "flow.prompts_per_step=6", machine=replace(NODE, nodes=3))
    assert alone.problems == ()
    assert not [one for one in alone.warnings if "over the network" in one]


def test_rollout_nodes_count_as_a_cluster_before_ray_starts(file, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    eight = ("policy.parallel.ranks=8", "policy.device=cuda", "weights.transport=relay")
    beside = replace(NODE, engine_nodes=1)
    assert plan(file, *eight, "rollout.engines=8", machine=beside).problems == ()
    assert keys(plan(file, *eight, "rollout.engines=9", machine=beside)) == ["rollout.engines"]


EIGHT_GPUS = ("--gpus", "8", "--gpu-memory")
EIGHT_RANKS = (
    "policy.device=cuda",
    "model.dtype=bfloat16",
    "policy.parallel.ranks=8",
    "rollout.placement=colocated",
    "rollout.gpu_memory_utilization=0.3",
    "rollout.max_context=64",
    "flow.prompts_per_step=8",
    "flow.async_ratio=0",
)


def added_up(parts: OverheadParts) -> int:
    return sum(count for _, count in parts)


def large_model(tmp_path: Path) -> Path:
    """Write a run of an 8B model without its weights."""
    file = write_run(tmp_path, **LLAMA_8B)
    (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)
    return file


def test_a_rank_too_large_for_its_gpu_is_refused_with_a_fix(tmp_path):
    code, output = planned_on_a_laptop(large_model(tmp_path), *EIGHT_RANKS, *EIGHT_GPUS, "40")
    assert code == 2, output
    assert "policy.parallel\n  each rank, training: about 5" in output
    assert "needed of the 40.0 GiB that a GPU has (gradients 29.9 GiB, parameters 15.0" in output
    assert "policy.parallel.tensor: 2 (then" in output
    assert "distributed_optimizer" not in output, "it is on"


def test_a_change_that_the_rules_refuse_hides_no_other(tmp_path, monkeypatch):
    file, machine = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=40, nodes=1)
    helpful = "policy.parallel.distributed_optimizer"
    changes = [("flow.group_size", 0), (helpful, True)]
    monkeypatch.setattr(fit, "_changes", lambda *_: iter(changes))
    problems = plan(file, *EIGHT_RANKS, f"{helpful}=false", machine=machine).problems
    assert any(f"set {helpful}: true (then" in problem.fix for problem in problems)


def test_every_key_in_a_fix_lowers_the_memory(tmp_path):
    file, machine = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=40, nodes=1)
    whole = (*EIGHT_RANKS, "policy.parallel.distributed_optimizer=false")
    refused = plan(file, *whole, machine=machine)
    (problem,) = (one for one in refused.problems if one.key == "policy.parallel")
    named = re.findall(r"(policy\.[a-z_.]+): (\S+) \(then ([0-9.]+) GiB", problem.fix)
    assert {"policy.parallel.distributed_optimizer", "policy.optimizer.moment_dtype"} <= {
        key for key, _, _ in named
    }
    for key, value, left in named:
        then = plan(file, *whole, f"{key}={value}", machine=machine)
        assert then.ranks[0].total < refused.ranks[0].total
        changed = load(file, [*whole, f"{key}={value}"])
        beside = rank_overhead(changed) + sleeping_overhead(changed.rollout)
        needed = max(rank.total for rank in then.ranks) + added_up(beside)
        assert math.ceil(10 * needed / GIB) == round(10 * float(left))


@pytest.mark.parametrize(
    ("chip", "layout", "wanted"),
    [
        ("h100", ["tensor=2"], "1"),
        ("h100", ["context=2"], "1"),
        (None, ["tensor=2"], "1"),
        ("h100", ["pipeline=2"], None),
        ("b200", ["tensor=2"], None),
    ],
)
def test_ranks_have_one_hardware_queue_if_communication_must_come_first(
    file: Path, chip: str | None, layout: list[str], wanted: str | None
) -> None:
    """Up to Hopper, Megatron-Core's training requires it with tensor or context parallelism."""
    gpus = described_machine(
        gpus=8, gpu_memory_gib=80, nodes=1, chip=CHIPS[chip] if chip is not None else None
    )
    ranks = ["policy.device=auto", "policy.parallel.ranks=2"]
    config = load(file, [*ranks, *(f"policy.parallel.{one}" for one in layout)])
    assert rank_environment(config, gpus).get("CUDA_DEVICE_MAX_CONNECTIONS") == wanted
    assert rank_environment(config, LAPTOP) == {}


RANK = "import runpy; runpy.run_module('megatron_async_rl.train', run_name='__main__')"


def test_ranks_planned_for_a_gpu_that_torch_cannot_use_do_not_run_on_the_cpu(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = rank_environment(load(file, ["policy.device=auto"]), NODE)
    environment = os.environ | planned | {"CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    done = python(RANK, file, environment=environment)
    assert done.returncode == 1
    (log,) = file.parent.rglob("rank_0.log")
    assert "the policy should run on CUDA, and torch sees no CUDA device" in log.read_text()


def test_a_rank_is_refused_above_the_gpus_memory_and_noted_just_below(tmp_path):
    file = large_model(tmp_path)
    described = described_machine(gpus=8, gpu_memory_gib=800, nodes=1)
    on = ("policy.device=cuda", "model.dtype=bfloat16")
    total = plan(file, *on, machine=described).ranks[0].total + added_up(
        rank_overhead(load(file, on))
    )

    def on_gpus_of(memory: int) -> RunPlan:
        return plan(file, *on, machine=replace(described, gpus=(Gpu("A", memory),) * 8))

    assert keys(on_gpus_of(total - 1)) == ["policy.parallel"]
    just, roomy = on_gpus_of(total), on_gpus_of(int(total / 0.95) + 1)
    assert keys(just) == keys(roomy) == []
    assert any("the error of the estimate may be 5%" in note for note in just.warnings)
    assert not any("the estimate" in note for note in roomy.warnings)


def test_the_sender_of_weights_counts_on_the_gpus_of_the_first_stage(tmp_path):
    file, many = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=800, nodes=4)
    by_collective = (
        "policy.device=cuda",
        "model.dtype=bfloat16",
        "policy.parallel.ranks=8",
        "flow.prompts_per_step=8",
        "weights={transport: collective, bucket_mib: 4096}",
        "rollout.engines=3",
    )
    beside = added_up(rank_overhead(load(file, by_collective)))
    total = plan(file, *by_collective, machine=many).ranks[0].total + beside

    def on_gpus_of(memory: int) -> RunPlan:
        return plan(file, *by_collective, machine=replace(many, gpus=(Gpu("A", memory),) * 8))

    sender = GIB // 2 + 3 * 2 * 4 * GIB
    (refused,) = on_gpus_of(total + sender - 1).problems
    assert "the sender of weights 24.5 GiB" in refused.what
    assert "weights.bucket_mib: 2048 (then" in refused.fix
    assert on_gpus_of(total + sender).problems == ()


def test_without_data_samples_are_at_most_as_long_as_a_micro_batch(tmp_path):
    file, machine = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    (tmp_path / "train.jsonl").unlink()
    planned = plan(file, "policy.tokens_per_micro_batch=512", machine=machine)
    assert planned.batch.longest == 512


def test_the_memory_of_this_machines_gpus_is_checked(tmp_path):
    here = replace(NODE, gpus=(Gpu("A", 24 * GIB),) * 8)
    assert "policy.parallel" in keys(plan(large_model(tmp_path), *EIGHT_RANKS, machine=here))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.15, "each GPU of an engine: about 15.0 GiB are needed of the 12.0 GiB that 0.15"),
        (0.9, "an engine, generating next to a rank: about 89"),
    ],
)
def test_a_gpu_share_too_small_or_too_large_for_an_engine_is_refused(tmp_path, share, words):
    file, machine = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    key = "rollout.gpu_memory_utilization"
    (problem,) = plan(file, *EIGHT_RANKS, f"{key}={share}", machine=machine).problems
    assert problem.key == key
    assert words in problem.what
    (other,) = re.findall(rf"{key}: ([0-9.]+)", problem.fix)
    assert plan(file, *EIGHT_RANKS, f"{key}={other}", machine=machine).problems == ()


def test_a_colocated_plan_shows_the_peak_of_each_phase(tmp_path):
    file, machine = large_model(tmp_path), described_machine(gpus=8, gpu_memory_gib=80, nodes=1)
    planned = plan(file, *EIGHT_RANKS, machine=machine)
    (rank,), share = planned.ranks, int(0.3 * 80 * GIB)
    assert set(planned.peaks) == set(PHASES)
    config = load(file, EIGHT_RANKS)
    awake = added_up(rank_overhead(config) + engine_overhead(config.rollout))
    asleep = added_up(rank_overhead(config) + sleeping_overhead(config.rollout))
    assert {phase: need.total for phase, need in planned.peaks.items()} == {
        "generate": share + rank.parameters + awake,
        "train": rank.total + asleep,
        "publish": planned.engine.weights + rank.parameters + asleep,
    }
    code, output = planned_on_a_laptop(file, *EIGHT_RANKS, *EIGHT_GPUS, "80")
    assert code == 0, output
    (at,) = (i for i, line in enumerate(output.splitlines()) if "GPU in phase" in line)
    # Long text wraps to the next line.
    shown = [line.split() for line in output.splitlines()[at + 1 :]]
    assert [words[:2] for words in shown if words and words[0] in PHASES] == [
        [phase, f"{need.total / GIB:.1f}"] for phase, need in planned.peaks.items()
    ]
    assert twin_bytes(load(file, EIGHT_RANKS), rank) == rank.optimizer
    by_ipc = plan(
        file, *EIGHT_RANKS, "weights={transport: cuda_ipc, bucket_mib: 3072}", machine=machine
    )
    assert {
        phase: by_ipc.peaks[phase].total - need.total for phase, need in planned.peaks.items()
    } == {
        "generate": 2 * 3 * GIB,
        "train": 0,
        "publish": 2 * 3 * GIB,
    }
    small = plan(
        file, *EIGHT_RANKS, "weights={transport: cuda_ipc, bucket_mib: 1}", machine=machine
    )
    embedding = 128256 * 4096 * 2
    assert small.peaks["publish"].total - planned.peaks["publish"].total == 2 * embedding
    apart = plan(file, *EIGHT_RANKS, "rollout.placement=disaggregated", machine=machine)
    assert apart.peaks == {}


def test_gpu_memory_besides_tensors_is_itemised(tmp_path):
    """About 4 GiB, by estimates, if an engine with several workers sleeps next to a rank."""
    file = large_model(tmp_path)
    config = load(file, [*EIGHT_RANKS, "rollout.tensor=2"])
    parts = dict(rank_overhead(config) + sleeping_overhead(config.rollout))
    assert sum(parts.values()) == 4 * GIB
    assert all(parts.values())
    assert dict(engine_overhead(config.rollout)).items() < parts.items()
    alone = load(file, ["policy.parallel.ranks=1", "rollout.vllm.enforce_eager=true"])
    assert {name: count for name, count in rank_overhead(alone) if not count} == {
        "the rank's NCCL channels": 0
    }
    assert dict(sleeping_overhead(alone.rollout))["the engine's CUDA graphs"] == 0
    _, output = planned_on_a_laptop(file, *EIGHT_RANKS, *EIGHT_GPUS, "80")
    output = " ".join(output.split())
    assert (
        "in addition, on each rank's GPU ~: 1.8 GiB (CUDA context 512.0 MiB, NCCL channels 1.0 GiB,"
        " workspaces 256.0 MiB)" in output
    )
    assert (
        "and of a sleeping engine there ~: 1.8 GiB (CUDA context 512.0 MiB, CUDA graphs 1.2"
        " GiB)" in output
    )
    apart = (
        "rollout.placement=disaggregated",
        "policy.parallel.ranks=4",
        "policy.parallel.tensor=4",
    )
    _, output = planned_on_a_laptop(file, *EIGHT_RANKS, *apart, *EIGHT_GPUS, "80")
    assert "on each engine's GPU, outside rollout.gpu_memory_utilization ~: 512.0 MiB" in output


REWARDS = """
import os, time
def reads_a_field(prompt, response): return float(prompt.fields["solution"] == response)
def ends_its_process(prompt, response): os._exit(3)
def never_answers(prompt, response):
    while True: time.sleep(1)
def fails_on_the_first(prompt, response): return 1 / int(prompt.fields["answer"])
def fine(prompt, response): return len(response)
def contains_the_value(prompt, response):
    return float("1+1" in response or prompt.fields["answer"] in response)
def of_groups(prompt, responses):
    return [len(one) / len(prompt.fields["wanted"]) for one in responses]
"""


@pytest.mark.parametrize(
    ("name", "timeout_s", "words"),
    [
        ("reads_a_field", 300, "KeyError: 'solution'"),
        ("ends_its_process", 300, "ended with code 3"),
        ("never_answers", 0.5, "no reward within rollout.reward.timeout_s: 0.5"),
    ],
)
def test_a_reward_that_fails_on_a_made_up_response_is_a_problem(
    file, monkeypatch, name, timeout_s, words
):
    monkeypatch.setattr("megatron_async_rl.plan.trials.REWARD_TRIAL_TIMEOUT_S", 600.0)
    (file.parent / "probed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(file.parent)
    settings = f"{{name: 'probed_rewards:{name}', timeout_s: {timeout_s}}}"
    (problem,) = plan(file, f"rollout.reward={settings}").problems
    assert problem.key == "rollout.reward.name"
    assert words in problem.what
    assert "of data.train" in problem.what


def test_each_part_of_the_reward_is_tried_on_prompts_that_use_it(file, monkeypatch):
    """The rows of the second kind come after the first few rows."""
    (file.parent / "probed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setattr("megatron_async_rl.plan.trials.REWARD_TRIAL_TIMEOUT_S", 600.0)
    rows = [{"prompt": "1+1=", "answer": "2", "kind": "sum"}] * 5
    rows += [{"prompt": "2+2=", "kind": "word", "wanted": "x"}] * 2
    data = file.parent / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = (
        "sums: {name: arithmetic, where: {kind: sum}},"
        " unlike: {name: 'probed_rewards:of_groups', per: group, where: {kind: word}}"
    )
    reward = f"rollout.reward={{parts: {{{parts}}}}}"
    assert plan(file, reward).problems == ()

    data.write_text(data.read_text().replace("wanted", "given"))
    (problem,) = plan(file, reward).problems
    assert problem.key == "rollout.reward.parts"
    assert "to the first prompts of data.train: unlike: KeyError: 'wanted'" in problem.what

    data.write_text(data.read_text() + '{"prompt": "3+3="}\n')
    (problem,) = plan(file, reward).problems
    assert "train.jsonl:8: matches the `where` of no part of the reward" in problem.what
    assert "rollout.reward.parts.unlike.per" in keys(plan(file, reward.replace("per: group, ", "")))


def test_a_plan_does_not_wait_for_a_slow_reward(file, monkeypatch):
    (file.parent / "probed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setattr("megatron_async_rl.plan.trials.REWARD_TRIAL_TIMEOUT_S", 0.2)
    slow = "rollout.reward={name: 'probed_rewards:never_answers', timeout_s: 3000}"
    assert plan(file, slow, "watchdog.timeout_s=3001").problems == ()


def test_a_reward_that_accepts_a_copy_of_the_question_is_noted(file, monkeypatch):
    (file.parent / "probed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(file.parent)
    rows = [{"prompt": f"1+1+{n}=", "answer": f"{n + 2}"} for n in range(3)]
    data = file.parent / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def notes(name: str) -> list[str]:
        planned = plan(file, f"rollout.reward.name={name}")
        assert planned.problems == ()
        return [one for one in planned.warnings if "copy" in one]

    expected = (
        "the reward gives a copy of the question ('1+1+2=') as much as the answer ('4'), for the"
        " first prompts of data.train: a policy can learn to copy"
    )
    assert notes("probed_rewards:contains_the_value") == [expected]
    assert notes("arithmetic") == []
    # A prompt whose copy earns less is sufficient: the others may contain their answers.
    data.write_text(data.read_text().replace("1+1+2", "2+2+0"))
    assert notes("probed_rewards:contains_the_value") == []


@pytest.mark.parametrize("name", ["fine", "fails_on_the_first"])
def test_a_reward_that_scores_one_of_the_prompts_is_accepted(file, monkeypatch, name):
    (file.parent / "probed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(file.parent)
    assert plan(file, f"rollout.reward.name=probed_rewards:{name}").problems == ()


def test_a_rank_that_computes_losses_stores_targets_for_a_step(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    shape, _ = read_model(load(file).model.path)

    def last(*overrides: str) -> int:
        step = ("flow.prompts_per_step=8", "flow.group_size=4", "policy.tokens_per_micro_batch=16")
        config = load(file, (*step, *overrides))
        return rank_memory(config, shape, stage=0, data_parallel=2, longest=16).logprobs

    more = last("flow.prompts_per_step=16") - last()
    assert more == TARGET_BYTES * 8 * 4 // 2 * load(file).rollout.sampling.max_tokens
    assert last("objective.minibatches=2") + more // 2 == last()


def test_numbers_are_shown_in_the_largest_unit_that_they_reach():
    assert [totals._count(tokens) for tokens in (999, 1000, 10**6 - 1000, 10**6, 10**9)] == [
        "999",
        "1 thousand",
        "999 thousand",
        "1 million",
        "1 billion",
    ]
    assert [totals._bytes(size * 2**20) for size in (1023, 1024, 2**20 - 1, 2**20)] == [
        "1023.0 MiB",
        "1.0 GiB",
        "1024.0 GiB",
        "1.00 TiB",
    ]
    assert [totals._number(value) for value in (0.12345, 99.94, 100, 12345.6)] == [
        "0.123",
        "99.9",
        "100",
        "12,346",
    ]


def test_processes_that_tried_the_reward_end_with_the_plan(file: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert not plan(file, "rollout.reward={name: math}").problems
    assert set(psutil.Process().children(recursive=True)) <= before

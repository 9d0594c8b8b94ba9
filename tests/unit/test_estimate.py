"""Step times of a plan: from the measured rates of a run, and from data sheets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.load import load
from megatron_async_rl.metrics.log import MetricRow
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.plan.estimate import (
    IPC_RATE,
    READ_SHARE,
    Estimate,
    Overlap,
    measure,
    run_ahead,
    update_per_lr,
)
from megatron_async_rl.plan.machine import CHIPS, Gpu, Machine, chip_of, described_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.operations import forward_passes
from megatron_async_rl.plan.pace import expected_overlap, planning_rule, staleness_law
from megatron_async_rl.plan.plan import make_plan
from tests.cases import looped
from tests.combinations import label, pairwise
from tests.forked import Done
from tests.mar_command import mar
from tests.published_models import write_config
from tests.written_run import config_tree, write_run

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def overlap(
    generate: float,
    train: float,
    ahead: float,
    *,
    publish: float = 0.0,
    pause: float = 0.0,
    engines: int = 1,
) -> Overlap:
    parts = {"generate_s": generate, "train_s": train, "publish_s": publish, "pause_s": pause}
    return Overlap(**parts, engines=engines, run_ahead=ahead)


def simulated_step_s(generate: float, train: float, async_ratio: float) -> float:
    """Simulate engines that sample at a constant rate up to the staleness bound, and a trainer that
    waits for whole batches. Return the seconds of a step."""
    now = made = 0.0
    marks = []
    for version in range(60):
        limit = version + 1 + async_ratio
        waits = max(0.0, (version + 1 - made) * generate)
        made = min(limit, made + (waits + train) / generate)
        now += waits + train
        marks.append(now)
    return (marks[-1] - marks[30]) / 29


@looped("async_ratio", [0.0, 0.25, 0.5, 1.0, 2.5])
@looped(("generate", "train"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_the_expected_step_is_that_of_a_simulated_loop(
    generate: float, train: float, async_ratio: float
) -> None:
    expected = overlap(generate, train, min(1.0, async_ratio)).step_s
    assert expected == pytest.approx(simulated_step_s(generate, train, async_ratio), rel=1e-6)


def test_alternation_takes_the_sum_of_the_parts_and_overlap_the_longer_side() -> None:
    alternating = overlap(3.0, 1.0, 0.0, publish=0.5, pause=0.25)
    assert alternating.step_s == alternating.synchronous_s == 4.5
    assert overlap(3.0, 1.0, 1.0, publish=0.5, pause=0.25).step_s == alternating.bound_s == 3.25
    assert overlap(1.0, 3.0, 1.0, publish=0.5, pause=0.25).step_s == 3.5


def test_the_text_shows_how_much_faster_the_run_may_be_and_is() -> None:
    text = overlap(3.0, 1.0, 0.5, publish=0.5, pause=0.25).as_text()
    assert "disaggregated  3.25 s a step at best, 1.38 times as fast" in text
    assert "this config    3.25 s a step, 1.38 times as fast as synchronous" in text
    text = overlap(3.0, 1.0, 0.0, publish=0.5, pause=0.25).as_text()
    assert "this config    4.5 s a step, 1.00 times as fast as synchronous" in text


@pytest.mark.parametrize(("generate", "engines"), [(9.0, 2), (4.0, 1), (0.1, 4)])
def test_the_balance_is_the_smallest_number_of_engines_that_keep_up(
    generate: float, engines: int
) -> None:
    now = overlap(generate, 2.0, 1.0, publish=0.2, pause=0.2, engines=engines)
    fewest = now.balanced_engines
    assert fewest is not None
    assert generate * engines / fewest + 0.2 <= now.trainer_s + 1e-9
    assert fewest == 1 or generate * engines / (fewest - 1) + 0.2 > now.trainer_s
    assert overlap(1.0, 0.1, 1.0, pause=0.5).balanced_engines is None


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        (("flow.async_ratio=0",), 0.0),
        (("flow.async_ratio=0.5",), 0.5),
        (("flow.async_ratio=3",), 1.0),
        (("flow.async_ratio=3", "rollout.placement=colocated"), 0.0),
        (("flow.async_ratio=3", "flow.selection={name: exact_lag, lag: 3}"), 0.0),
    ],
)
def test_engines_run_ahead_by_async_ratio_unless_they_must_pause(
    tmp_path: Path, changes: tuple[str, ...], ahead: float
) -> None:
    assert run_ahead(load(write_run(tmp_path), changes)) == ahead


def measured_rows(*, stopped_s: float = 0.0) -> list[MetricRow]:
    """Return rows of steps of 10 s, in which two engines are busy for 5 and 10 seconds and finish
    1500 tokens. The first row includes the start."""
    rows: list[MetricRow] = []
    for step in range(1, 8):
        rows.append(
            {
                "step": step,
                "time": 1000.0 + 10.0 * step + (stopped_s if step > 4 else 0.0),
                "engine/busy_shares": [0.5, 1.0],
                "engine/tokens": [500, 1000] if step > 1 else [9000, 9000],
                "time/step_s": 10.0,
                "time/train_s": 4.0 if step > 1 else 40.0,
                "time/publish_s": 0.5,
                "weights/pause_s": 0.25,
                "update/norm": 0.02,
                "policy/lr": 1e-3,
                "policy/lr_scale": 0.5,
            }
        )
    return rows


def test_rates_are_per_busy_second_without_the_start_and_stops() -> None:
    for rows in (measured_rows(), measured_rows(stopped_s=5000.0)):
        rates = measure(rows)
        assert rates is not None
        assert (rates.tokens_per_step, rates.tokens_per_busy_s) == (1500.0, 100.0)
        assert (rates.train_s, rates.publish_s, rates.pause_s) == (4.0, 0.5, 0.25)
        assert (rates.generate_s(2), rates.generate_s(3)) == (7.5, 5.0)
    assert measure(measured_rows()[:1]) is None
    assert (
        measure(
            [
                {key: value for key, value in row.items() if not key.startswith("engine/")}
                for row in measured_rows()
            ]
        )
        is None
    )


def test_the_update_per_learning_rate_excludes_steps_without_an_update() -> None:
    assert update_per_lr(measured_rows()) == pytest.approx(40.0)
    assert (
        update_per_lr(
            [{"step": 1, "policy/lr": 1e-3}, {"step": 2, "policy/lr": 1e-3, "update/norm": 0.0}]
        )
        is None
    )


def test_the_update_per_learning_rate_excludes_skipped_optimizer_steps() -> None:
    row = {"step": 1, "policy/lr": 1e-3, "policy/skipped": 0.75, "update/norm": 0.02 / 4}
    assert update_per_lr([row]) == pytest.approx(20.0)


def test_rates_are_scaled_to_the_batch_of_the_config(tmp_path: Path) -> None:
    run = tmp_path / "measured"
    run.mkdir()
    rates = measure(measured_rows())
    assert rates is not None
    config = load(write_run(tmp_path), ["rollout.engines=3"])
    text = expected_overlap(config, rates, run)
    assert "generate 5 s, train 4 s, publish 0.5 s" in text
    assert "scaled by" not in text
    tree = config_tree()
    tree["flow"]["group_size"] = 1
    tree["policy"]["parallel"]["ranks"] = 4
    (run / "config.yaml").write_text(json.dumps(tree))
    text = expected_overlap(config, rates, run)
    assert (
        "scaled by 2 in samples per step; T_train was measured with 4 ranks, and this plan has 1"
        in text
    )
    assert "generate 10 s, train 8 s, publish 0.5 s" in text
    assert "balance        4 engines, instead of 3" in text


def test_the_planning_rule_names_its_quantities_and_their_product(tmp_path: Path) -> None:
    config = load(
        write_run(tmp_path), ["flow.async_ratio=1.5", "policy.optimizer.lr=1e-3", "run.steps=100"]
    )
    assert (
        "S = 2, learning rate η = 0.001, update per learning rate G = 40: 0.08 from"
        in planning_rule(config, 40.0)
    )
    assert "T·η·G = 4 in all 100 steps" in planning_rule(config, 40.0)
    assert "not measured" in planning_rule(config, None)
    assert "no bound" in planning_rule(load(write_run(tmp_path), ["flow.selection=replay"]), 40.0)


@looped(
    ("changes", "words"),
    [
        (("flow.selection=replay",), "lag        no bound: stored responses train at any age"),
        (
            ("flow.async_ratio=4", "flow.selection={name: exact_lag, lag: 4}"),
            "lag        exactly 4: every sample trains 4 updates",
        ),
        (("flow.selection={name: windowed, window: 0.5}",), "while fewer than 6 older groups wait"),
        (
            ("flow.late=drop",),
            "late       drop: when a group that has to train now is still running, it is dropped",
        ),
        (
            ("flow.oversample=0.5", "flow.selection=windowed", "flow.async_ratio=1.5"),
            "oversample 0.5 x 4 of those prompts exceed what async_ratio requests",
        ),
        (
            ("rollout.in_flight=recompute",),
            "in flight  recompute: running responses continue under new weights, which recompute",
        ),
        (("rollout.placement=colocated",), "placement  colocated: engines and policy alternate"),
    ],
)
def test_the_plan_describes_every_setting_of_the_flow(
    tmp_path: Path, changes: tuple[str, ...], words: str
) -> None:
    assert words in staleness_law(load(write_run(tmp_path), changes))


def test_no_response_is_in_flight_in_a_synchronous_run(tmp_path: Path) -> None:
    assert "in flight" not in staleness_law(load(write_run(tmp_path), ["flow.async_ratio=0"]))


def test_mar_plan_uses_the_rates_of_a_named_run_or_of_its_own(
    tmp_path: Path,
) -> None:
    def plan(*arguments: str) -> Done:
        return mar("plan", config, *arguments, folder=tmp_path)

    config = write_run(tmp_path)
    refused = plan("--from", str(tmp_path / "nothing"))
    assert (refused.returncode, "holds no metrics.jsonl" in refused.stderr) == (2, True)
    own = load(config).run.dir
    own.mkdir()
    (own / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured_rows()))
    done = plan()
    assert done.returncode == 0, done.stderr
    # A long path wraps to a second line.
    assert "".join(f"measured in {own}, 7 steps".split()) in "".join(done.stdout.split())
    assert "G = 40:" in done.stdout


def recipe(folder: Path, name: str, model: str) -> tuple[str, ...]:
    """Return the file and an override for its model in `folder`."""
    if not (folder / model).exists():
        write_config(folder / model, model)
    return str(RECIPES / f"{name}.yaml"), f"model.path={folder / model}"


def estimated(
    arguments: tuple[str, ...], *overrides: str, gpus: int = 8, engine_nodes: int = 0
) -> Estimate:
    file, *given = arguments
    config = load(Path(file), [*given, *overrides])
    shape, _ = read_model(config.model.path)
    machine = described_machine(gpus=gpus, gpu_memory_gib=141, nodes=1, engine_nodes=engine_nodes)
    plan = make_plan(config, machine, shape)
    assert plan.problems == ()
    assert isinstance(plan.estimate, Estimate)
    return plan.estimate


def test_the_estimate_of_a_dense_model_equals_a_calculation_by_hand(tmp_path: Path) -> None:
    """Qwen3-8B: 1024 samples of 256 + 2048 tokens, trained by 4 H200 and sampled by 4."""
    never = "policy.prefix_sharing=never"
    found = estimated(recipe(tmp_path, "qwen3_8b", "Qwen3-8B"), never)
    # 36 layers of 192,946,432 weights; attention with 36 x 4096 elements to half of 2304 tokens;
    # logits with 151,936 x 4096 weights at 2048 tokens.
    layers, attention = 2 * 2304 * 36 * 192_946_432, 2 * 2304 * 36 * 4096 * 2304
    head = 2 * 2048 * 151_936 * 4096
    # One forward pass, two for backward, one again (recompute: full). With one step per batch,
    # `proximal: recompute` and `tis` use the log-probs of the training pass.
    operations = 1024 * (4 * (layers + attention) + 3 * head)
    assert found.train_s == pytest.approx(operations / (4 * 0.4 * 989e12))
    assert found.train_s == pytest.approx(91.85, abs=0.01)
    # 8 responses share their prompt: each computes 1/8 of it, and attends to all of it.
    shared = estimated(recipe(tmp_path, "qwen3_8b", "Qwen3-8B"))
    layers = 2 * (2048 + 256 // 8) * 36 * 192_946_432
    attention = 2 * 36 * 4096 * (256 * 256 / 8 + 2048 * (2 * 256 + 2048))
    operations = 1024 * (4 * (layers + attention) + 3 * head)
    assert shared.train_s == pytest.approx(operations / (4 * 0.4 * 989e12))
    # Each of 256 concurrent responses has (256 + 1024) x 147,456 bytes of keys and values. Weights
    # without the embedding have 15.137 GB.
    pace = (15.137e9 + 256 * 1280 * 147_456) / (0.6 * 4.8e12)
    assert found.tokens_per_s == pytest.approx(256 / pace, rel=1e-4)
    assert found.decoding == 256
    in_fp8 = estimated(
        recipe(tmp_path, "qwen3_8b", "Qwen3-8B"),
        "rollout.vllm.quantization=fp8_per_channel",
        never,
    )
    # FP8 halves all weights of a layer except its norms (8,448 weights).
    halved = pace - 36 * (192_946_432 - 8_448) / (0.6 * 4.8e12)
    assert in_fp8.tokens_per_s == pytest.approx(256 / halved, rel=1e-4)
    assert in_fp8.loaded_s == found.loaded_s
    # An engine reads the prompt of each group of 8 once.
    prompts_s = 256 / 8 * 2 * 256 * 36 * (192_946_432 + 4096 * 256) / (0.4 * 989e12)
    assert found.generate_s == pytest.approx(2048 * pace + prompts_s, rel=1e-4)
    # 8,190,735,360 weights of 2 bytes: written by four ranks, read by each engine.
    assert (found.staged_s, found.loaded_s) == pytest.approx((0.4095, 1.638), rel=1e-3)
    assert found.relayed_s is None
    assert found.synchronous_s == pytest.approx(45.41 + 91.85 + 0.41 + 1.64, abs=0.02)
    assert found.step_s == found.overlapped_s == found.train_s + found.staged_s


def test_pipeline_stages_of_an_engine_read_weights_for_each_batch_in_flight(
    tmp_path: Path,
) -> None:
    arguments = recipe(tmp_path, "qwen3_8b", "Qwen3-8B")
    one, divided, stages = (
        estimated(arguments, "rollout.engines=2", "rollout.max_concurrent=256", *more)
        for more in ((), ("rollout.tensor=2",), ("rollout.pipeline=2",))
    )
    pace = (15.137e9 + 256 * 1280 * 147_456 / 2) / (0.6 * 4.8e12)
    assert stages.tokens_per_s == pytest.approx(256 / pace, rel=1e-4)
    assert one.tokens_per_s < stages.tokens_per_s < divided.tokens_per_s
    assert stages.loaded_s == divided.loaded_s == one.loaded_s / 2


def test_the_estimate_of_a_mixture_counts_active_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts, so 3.0 G of 30.2 G weights in its layers are active."""
    found = estimated(
        recipe(tmp_path, "qwen3_30b_a3b", "Qwen3-30B-A3B"),
        "policy.prefix_sharing=never",
        engine_nodes=1,
    )
    # Each of 48 layers has 19,140,864 weights of attention, norms and router, and 8 active experts
    # of 4,718,592.
    active = 48 * (18_874_368 + 4_352 + 262_144 + 8 * 4_718_592)
    layers, attention = 2 * 2304 * active, 2 * 2304 * 48 * 4096 * 2304
    head = 2 * 2048 * 151_936 * 2048
    operations = 1024 * (4 * (layers + attention) + 3 * head)
    assert found.train_s == pytest.approx(operations / (8 * 0.4 * 989e12))
    assert found.train_s == pytest.approx(20.22, abs=0.01)
    # 256 tokens visit all but (15/16)^256 of the experts: an engine of two GPUs reads them all.
    pace = (60.442e9 + 256 * 1280 * 98_304) / (0.6 * 4.8e12)
    assert found.tokens_per_s == pytest.approx(2 * 256 / pace, rel=1e-4)
    # 61.06 GB: staged by eight ranks, sent over TCP, loaded by two workers.
    published = (found.staged_s, found.relayed_s, found.loaded_s)
    assert published == pytest.approx((0.763, 24.43, 3.053), rel=1e-3)
    assert found.step_s == found.generate_s + found.loaded_s
    alone = estimated(
        recipe(tmp_path, "qwen3_30b_a3b", "Qwen3-30B-A3B"),
        "rollout.max_concurrent=1",
        engine_nodes=1,
    )
    active += 151_936 * 2048
    one_token_s = (2 * active + 1280 * 98_304) / (2 * 0.6 * 4.8e12)
    assert alone.tokens_per_s == pytest.approx(1 / one_token_s, rel=1e-6)


def test_the_forward_passes_are_those_that_the_objective_requests() -> None:
    for config in pairwise():
        needs = Objective(config.objective).needs
        asked = len(needs & {"logp_ref", "logp_prox"}) + bool(needs - {"logp_ref", "logp_prox"})
        objective = config.objective
        if Objective(objective).needs_again:
            asked += (objective.steps_per_batch - 1) / objective.minibatches
        assert forward_passes(config) == asked, label(config)


@looped("key", ["policy.parallel.ranks", "rollout.engines"])
@looped(
    "changes",
    [
        (),
        ("flow.async_ratio=0",),
        ("policy.parallel={ranks: 4, pipeline: 4}", "policy.sequence=padded"),
        ("weights.transport=relay", "rollout.max_concurrent=16"),
    ],
)
def test_more_gpus_never_make_a_step_longer(
    tmp_path: Path, key: str, changes: tuple[str, ...]
) -> None:
    changed = ("flow.prompts_per_step=96", *changes)
    of_gpus = [
        estimated(recipe(tmp_path, "qwen3_8b", "Qwen3-8B"), *changed, f"{key}={count}", gpus=64)
        for count in (4, 8, 16, 32)
    ]
    for seconds in ([each.step_s for each in of_gpus], [each.synchronous_s for each in of_gpus]):
        assert seconds == sorted(seconds, reverse=True)
    assert of_gpus[-1].synchronous_s < of_gpus[0].synchronous_s
    assert all(each.step_s <= each.synchronous_s for each in of_gpus)


def test_fp8_recomputation_and_adapters_change_the_training_time(
    tmp_path: Path,
) -> None:
    arguments = recipe(tmp_path, "qwen3_8b", "Qwen3-8B")
    full, none, fp8, adapters = (
        estimated(arguments, *more).train_s
        for more in (
            (),
            ("policy.recompute=none",),
            ("policy.fp8={recipe: tensorwise}",),
            ("policy.lora={rank: 16}",),
        )
    )
    assert none < full
    assert full / 2 < fp8 < full
    assert adapters < full


def planned(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["plan", *arguments])
    return done.exit_code, done.output


def test_the_plan_shows_step_and_publish_time_with_its_assumptions(tmp_path: Path) -> None:
    arguments = recipe(tmp_path, "qwen3_30b_a3b", "Qwen3-30B-A3B")
    arguments += ("--nodes", "2", "--trainer-nodes", "1")
    code, output = planned(*arguments, "--gpus", "8", "--gpu-memory", "141")
    assert code == 0, output
    for words in (
        "generate 33 s, train 18.6 s; publish 28.2 s (stage 0.763 s, send 24.4 s, load 3.05 s)",
        "this config 36.1 s a step; synchronous 79.9 s, overlapped at best 36.1 s",
        "H200 by its data sheet: 40% of 989 TFLOP/s in bfloat16, 60% of 4.8 TB/s",
        "2.5 GB/s to each other machine; prompts of 256 and responses of 2048 tokens",
    ):
        assert words in re.sub(r"\s+", " ", output)
    code, output = planned(*arguments, "--gpus", "8", "--gpu", "b200")
    assert (code, "8 x B200 of 180 GiB" in output, "B200 by its data sheet" in output) == (
        0,
        True,
        True,
    )


def test_no_time_is_estimated_for_unknown_hardware(tmp_path: Path) -> None:
    code, output = planned(str(write_run(tmp_path)))
    assert code == 0, output
    shown = output.partition("step time\n")[2].splitlines()
    assert shown[0].startswith("unknown: CPUs have no data sheet rates")
    assert "assumed" not in "".join(shown[1:])
    code, output = planned(
        *recipe(tmp_path, "qwen3_8b", "Qwen3-8B"), "--gpus", "8", "--gpu-memory", "96"
    )
    assert "unknown: GPU of 96 GiB is not one of h100, h200, b200, a100 (--gpus" in output
    code, output = planned(
        *recipe(tmp_path, "qwen3_8b", "Qwen3-8B"), "--gpus", "8", "model.dtype=float32"
    )
    assert "unknown: no rate is assumed for float32 GEMMs" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h100"), "--gpu needs the number of GPUs"),
        (("--gpus", "8", "--gpu", "h20"), "h20 is not known"),
        (("--gpus", "8", "--gpu", "a100", "policy.fp8={recipe: tensorwise}"), "policy.fp8.recipe"),
    ],
)
def test_an_unknown_gpu_on_the_command_line_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, output = planned(*recipe(tmp_path, "qwen3_8b", "Qwen3-8B"), *arguments)
    assert code == 2
    assert words in " ".join(output.split())


@looped(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_gpu_is_recognised_by_name_unless_it_is_a_slower_variant(
    name: str, chip: str | None
) -> None:
    machine = Machine(cores=8, memory=0, shared_memory=0, gpus=(Gpu(name, 80 * 2**30),))
    assert chip_of(machine) == (CHIPS[chip] if chip is not None else None)


def test_with_ipc_weights_do_not_pass_through_shared_memory(tmp_path: Path) -> None:
    """Eight ranks read 16.4 GB for digests, then share them with all engines concurrently."""
    arguments = recipe(tmp_path, "qwen3_8b_colocated", "Qwen3-8B")
    staged, by_ipc = (
        estimated(arguments, f"weights.transport={transport}")
        for transport in ("shared_memory", "cuda_ipc")
    )
    assert by_ipc.staged_s == pytest.approx(
        by_ipc.version / (8 * READ_SHARE * by_ipc.chip.memory_rate)
    )
    assert by_ipc.loaded_s == pytest.approx(by_ipc.version / IPC_RATE)
    assert by_ipc.publish_s < staged.publish_s / 3
    assert "60 GB/s of buckets from the ranks to engines on their GPUs" in by_ipc.as_text()
    assert "between a GPU and shared memory" not in by_ipc.as_text()

"""Predictions of `mar simulate` follow from the given rates and match the real runs that it was
tested on."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.metrics.timeline import FOLDER as TIMELINE
from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.plan.operations import token_operations
from megatron_async_rl.report.panels import simulation
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.samples import frames, segments
from megatron_async_rl.samples.columns import LOGGED, batch_of
from megatron_async_rl.samples.frames import OPEN, FrameWriter
from megatron_async_rl.samples.types import Prompt, Sample
from megatron_async_rl.simulate import choose
from megatron_async_rl.simulate.calibrate import _pieces, calibrate
from megatron_async_rl.simulate.choose import part_of
from megatron_async_rl.simulate.rates import (
    Hardware,
    ResponseLengths,
    SimulationRates,
    assumed,
    best_bucket,
    lengths_of,
    rates_of,
)
from megatron_async_rl.simulate.simulation import SimulationResult, simulate
from tests.cases import looped
from tests.published_models import write_config
from tests.stored_pages import listed, require_page
from tests.tiny_models import save_tiny_model
from tests.written_run import write_run

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "simulate"

PROMPTS, SIZE, LENGTH = 4, 2, 10
LENGTHS = ResponseLengths(groups=((LENGTH,) * SIZE,), prompts=(5,))
RATES = SimulationRates(
    decode=((0.1, 0.0),), places=8, train_token_s=0.01, publish_s=0.2, load_s=0.3
)
TRAINS = 0.01 * PROMPTS * SIZE * (LENGTH + 5)


def run(
    rates: SimulationRates = RATES,
    lengths: ResponseLengths = LENGTHS,
    engines: int = 1,
    **flow: Any,
) -> SimulationResult:
    settings = {"prompts_per_step": PROMPTS, "group_size": SIZE, **flow}
    rollout = RolloutConfig(
        engines=engines, sampling=SamplingConfig(max_tokens=64), reward=RewardConfig(name="math")
    )
    return simulate(FlowConfig(**settings), rollout, rates, lengths, steps=10)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    found = run(async_ratio=0.0)
    assert found.step_s == pytest.approx(LENGTH * 0.1 + TRAINS + 0.2 + 0.3)
    assert found.trainer_busy == pytest.approx((TRAINS + 0.2) / found.step_s)
    assert found.engine_busy == pytest.approx(1.0 / found.step_s)
    assert found.lags == (1.0,)
    assert found.tokens_per_s == pytest.approx(PROMPTS * SIZE * LENGTH / found.step_s)


def test_far_enough_ahead_a_step_takes_what_the_slower_side_does() -> None:
    trainer = run(async_ratio=2.0)
    assert trainer.step_s == pytest.approx(TRAINS + 0.2)
    slow = replace(RATES, decode=((0.4, 0.0),))
    engines = run(slow, async_ratio=2.0)
    assert engines.step_s == pytest.approx(LENGTH * 0.4 + 0.3, rel=0.02)
    assert engines.lag_mean < trainer.lag_mean == 2.0


def test_engines_and_trainer_slow_each_other_where_they_share_cores() -> None:
    shared = replace(RATES, trainer_beside=0.5, engine_beside=0.5)
    assert run(shared, async_ratio=0.0).step_s == pytest.approx(run(async_ratio=0.0).step_s)
    # Overlapped work takes twice as long.
    assert 1.2 < run(shared, async_ratio=2.0).step_s / run(async_ratio=2.0).step_s < 2.0


def test_a_batch_that_is_there_is_taken_on_the_cores_that_an_engine_uses() -> None:
    shared = replace(RATES, take_s=0.2, trainer_beside=0.5)
    # The trainer's own work, and half of the engine's overlapped work.
    takes = TRAINS + 0.2 + 0.2 + 0.5 * (LENGTH * 0.1 + 0.3)
    assert run(shared, async_ratio=2.0).step_s == pytest.approx(takes)


def test_a_slow_carrier_ages_samples_and_holds_up_no_trainer_that_is_far_enough_ahead() -> None:
    slow = replace(RATES, send_s=2.5)
    assert run(slow, async_ratio=0.0).step_s == pytest.approx(run(async_ratio=0.0).step_s + 2.5)
    assert run(slow, async_ratio=4.0).step_s == pytest.approx(TRAINS + 0.2, rel=0.9)
    assert run(slow, async_ratio=4.0).step_s < run(slow, async_ratio=1.0).step_s


@pytest.mark.parametrize(
    ("flow", "bound"),
    [
        ({"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5}, 1),
        ({"async_ratio": 2.0, "selection": "windowed", "late": "drop"}, 2),
        ({"async_ratio": 2.0, "selection": {"name": "exact_lag", "lag": 2}}, 2),
        ({"async_ratio": 1.0, "dynamic_sampling": True}, 1),
        ({"async_ratio": 1.0, "selection": "replay"}, 1),
    ],
)
def test_the_law_that_decides_is_the_runs_own(flow: dict[str, Any], bound: int) -> None:
    lengths = ResponseLengths(groups=((1, 9), (30, 2), (4, 4)), prompts=(3, 3, 3), equal=0.25)
    found = run(lengths=lengths, engines=2, **flow)
    assert len(found.lags) <= bound + 1
    if "exact_lag" in str(flow):
        assert found.lags == (0.0, 0.0, 1.0)
    assert (found.counts["dropped_equal"] > 0) == flow.get("dynamic_sampling", False)


FIXED_S, EACH_S, PROMPT_S, TOKEN_S = 0.02, 0.004, 0.003, 0.01
TAKE_S, STAGE_S, BEGIN_S, LOAD_S, ASK_S = 0.12, 0.05, 0.01, 0.08, 0.015
STEPS = 24


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logs_of_a_run(tmp_path_factory.mktemp("measured"))


def logs_of_a_run(
    folder: Path, longest: int = 40, handed_s: float = 0.0, *, uneven: bool = False
) -> Path:
    """The logs of a run of those rates. Every other step it samples the next batch while it trains,
    which takes both sides twice as long. Responses have 4 tokens or more, below `longest`; each
    that ends waits `handed_s` for those before it. `uneven`: no step overlaps, and steps differ in
    the time of a token."""
    write_run(folder)
    out, chance, now = folder / "run", np.random.default_rng(0), 1e9
    (out / TIMELINE).mkdir(parents=True)
    (out / frames.FOLDER).mkdir()
    settings = {"flow": {"async_ratio": 1.0}, "rollout": {"max_concurrent": 256, "engines": 1}}
    settings["policy"] = {"parallel": {"ranks": 1}}
    (out / "config.yaml").write_text(yaml.safe_dump(settings))
    tracks: dict[str, list[dict[str, Any]]] = {"rank 0": [], "engine-0": []}
    samples: list[Sample] = []

    def span(track: str, state: str, start: float, end: float, reason: str = "") -> None:
        line = {"track": track, "state": state, "for": reason, "start": start, "end": end}
        tracks[track].append(line)

    def burst(start: float, slower: float) -> tuple[float, int]:
        """Sample 24 responses; returns the end of the last one, and their tokens."""
        at, grown, tokens = start + slower * PROMPT_S * 24, 0, 0
        lengths = sorted(chance.integers(4, longest, size=24).tolist())
        for place, length in enumerate(lengths):
            at += slower * ((length - grown) * (FIXED_S + EACH_S * (24 - place)) + handed_s)
            grown, tokens = length, tokens + length + 3
            zeros = np.zeros(length, dtype=np.int32)
            samples.append(
                Sample(
                    id=f"{len(samples)}-0",
                    prompt=Prompt(id="p", text="", token_ids=(1, 2, 3)),
                    response_ids=zeros,
                    behavior_logprobs=zeros.astype(np.float32),
                    versions=zeros,
                    loss_mask=np.ones(length, dtype=np.uint8),
                    text="",
                    finish_reason="stop",
                    reward=1.0,
                    started_at=start,
                    finished_at=at,
                )
            )
        span("engine-0", "busy", start, at)
        return at, tokens

    rows = []
    ready, tokens = burst(now, 1.0)
    for step in range(1, STEPS + 1):
        starts, batch = max(now, ready) + TAKE_S, tokens
        if step > 1 and ready < now:  # the engine loads meanwhile
            starts += LOAD_S / 2
        # Every third step as earlier versions wrote it, whose wait contains the distribution.
        sends = starts if step % 3 == 0 else starts - 0.25 * TAKE_S
        span("rank 0", "waiting", now, sends, "batch")
        if sends < starts:
            span("rank 0", "distributing", sends, starts)
        ends = starts + TOKEN_S * batch * (1 + uneven * step % 5 / 10)
        if step % 2 and not uneven:
            ready, tokens = burst(starts, 2.0)
            ends += (ready - starts) / 2
            assert ends > ready
        span("rank 0", "training", starts, ends)
        now = ends + STAGE_S
        span("rank 0", "publishing", ends, now)
        loads = now + BEGIN_S
        span("engine-0", "idle", ready, loads, "prompts")
        span("engine-0", "loading", loads, loads + LOAD_S)
        if step % 2 == 0 or uneven:
            span("engine-0", "idle", loads + LOAD_S, loads + LOAD_S + ASK_S, "prompts")
            ready, tokens = burst(loads + LOAD_S + ASK_S, 1.0)
        length = batch - 3 * 24
        rows.append({"step": step, "version": step, "time": now, "tokens/trained": length})
        rows[-1] |= {"tokens/prompt": 3 * 24, "flow/consumed": 24 * step}
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for track, lines in tracks.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / TIMELINE / f"{track}.jsonl").write_text(text)
    content = batch_of(samples, [index // 2 for index in range(len(samples))], LOGGED)
    file = FrameWriter(frames.path_of(out / frames.FOLDER, "samples", 0, OPEN))
    file.write(segments.payload_of(content))
    file.close()
    FrameWriter(frames.path_of(out / frames.FOLDER, "outcomes", 0, OPEN)).close()
    return out


def test_a_token_costs_two_operations_for_each_weight_of_its_experts(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "m", "qwen3_moe", num_experts=8, moe_intermediate_size=24)
    shape, _ = read_model(path)
    assert shape is not None
    costs = [token_operations(replace(shape, experts_per_token=count), 100) for count in (0, 1, 2)]
    one_expert = 2 * shape.layers * 3 * shape.hidden * 24
    assert [costs[1] - costs[0], costs[2] - costs[1]] == [one_expert, one_expert]


def test_a_run_shows_its_rates(measured: Path) -> None:
    found = calibrate([measured], cores=2)
    rates = found.rates
    for running in (6, 20):
        assert rates.token_s(running) == pytest.approx(FIXED_S + EACH_S * running, rel=0.02)
    assert rates.prompt_s == pytest.approx(PROMPT_S, rel=0.02)
    assert rates.train_token_s == pytest.approx(TOKEN_S, rel=0.02)
    assert rates.trainer_beside == pytest.approx(0.5, abs=0.03)
    assert rates.engine_beside == pytest.approx(0.5, abs=0.03)
    assert found.assumed == ()
    parts = (rates.take_s, rates.publish_s, rates.load_s, rates.ask_s)
    assert parts == pytest.approx((TAKE_S, STAGE_S, LOAD_S, ASK_S), abs=1e-4)
    assert all(len(group) == 2 for group in found.lengths.groups)


def test_an_engine_takes_as_long_as_it_was_busy_where_responses_are_alike(tmp_path: Path) -> None:
    """Then nothing distinguishes a token's time from a response's, and lives are shorter than what
    the engine does for all: those that end first wait for nothing."""
    rates = calibrate([logs_of_a_run(tmp_path, longest=5, handed_s=0.01)], cores=2).rates
    assert min(rates.decode[0]) >= 0
    took = 24 * rates.prompt_s + 4 * rates.token_s(24)
    assert took == pytest.approx(24 * (PROMPT_S + 0.01) + 4 * (FIXED_S + 24 * EACH_S), rel=0.02)
    assert rates.engine_beside == pytest.approx(0.5, abs=0.03)


def test_a_piece_of_an_engines_time_starts_where_responses_begin_together() -> None:
    """The first responses begin a piece too, without new weights before them."""
    begun, ended = np.array([1.0, 1.01, 5.0]), np.array([4.0, 9.0, 9.0])
    log: Any = SimpleNamespace(
        samples={
            "begun": begun,
            "ended": ended,
            "length": np.array([30.0, 80.0, 40.0]),
            "engine": np.zeros(3),
        },
        training=[Span(track="rank 0", state="busy", start=2.0, end=3.0)],
        places=8,
    )
    busy = Span(track="engine-0", state="busy", start=0.0, end=10.0)
    seconds, beside, _, tokens, begin = _pieces(log, 0, [busy])
    assert seconds == pytest.approx([4.0, 4.0])
    assert beside == pytest.approx([1.0, 0.0])
    assert tokens.sum() == pytest.approx(150.0)
    assert begin.tolist() == [2.0, 1.0]


HARDWARE = Hardware(tflops=1000, memory_gib=80, memory_tb_s=4, read_share=0.5, prefill_share=0.5)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of 32B, and the sizes of its model."""
    folder = tmp_path_factory.mktemp("recipe")
    write_config(folder / "models" / "Qwen2.5-32B", "Qwen2.5-32B")
    place = folder / "examples" / "recipes" / "qwen2.5_32b.yaml"
    place.parent.mkdir(parents=True)
    place.write_text((ROOT / "examples" / "recipes" / place.name).read_text())
    return place


def test_stated_hardware_gives_the_rates_that_its_sizes_do(recipe: Path) -> None:
    config = load(recipe, ["policy.prefix_sharing=never"])
    shape, _ = read_model(config.model.path)
    assert shape is not None
    lengths = lengths_of(config, HARDWARE)
    assert lengths.mean == pytest.approx(0.3 * 4096, rel=0.1)
    rates = rates_of(config, shape, HARDWARE, lengths)
    nbytes = 2 * shape.parameters
    assert rates.decode[0][0] == pytest.approx(0.003 + nbytes / 4e12)  # two GPUs, half of 4 TB/s
    in_8_bits = load(recipe, ["rollout.vllm.quantization=fp8_per_channel"])
    table = 152064 * 5120
    kept = shape.parameters + 2 * table + shape.layers * shape.layer_replicated + 5120
    read_s = rates_of(in_8_bits, shape, HARDWARE, lengths).decode[0][0]
    assert read_s == pytest.approx(0.003 + kept / 4e12, rel=1e-6)
    tokens = 200 + lengths.mean
    attends = 4 * 64 * 5120 * tokens / 2
    layers = 2 * (shape.parameters - 2 * table)
    # Only responses have logits. A layer is computed five times (M2PO looks at the batch before,
    # and a layer is recomputed), the output layer four times; 16 ranks at 40 %.
    head = 2 * table * lengths.mean / tokens
    speed = 16 * 1e15 * 0.4
    operations = 5 * (layers + attends) + 4 * head
    assert rates.train_token_s == pytest.approx(operations / speed, rel=1e-3)
    in_fp8 = load(recipe, ["policy.prefix_sharing=never", "policy.fp8={recipe: tensorwise}"])
    twice = replace(HARDWARE, fp8_speed=2.0)
    operations -= 5 * layers / 2
    assert rates_of(in_fp8, shape, twice, lengths).train_token_s == pytest.approx(
        operations / speed, rel=1e-3
    )
    # A prompt has no logits in an engine, either, and a group shares it; two GPUs at half speed.
    reading = 200 * (layers + 4 * 64 * 5120 * 100) / config.flow.group_size
    assert rates.prompt_s == pytest.approx(reading / (2 * 1e15 * 0.5), rel=1e-3)
    shared = rates_of(load(recipe, []), shape, HARDWARE, lengths)
    computed = 200 / config.flow.group_size + lengths.mean
    prompt_alone = 200**2 / 2 * (1 - 1 / config.flow.group_size)
    attends -= 4 * 64 * 5120 * prompt_alone / tokens
    operations = 5 * (layers * computed / tokens + attends) + 4 * head
    assert shared.train_token_s == pytest.approx(operations / speed, rel=1e-3)
    assert rates.publish_s == pytest.approx(nbytes / 8 / 10e9)
    # Two machines at the speed of one stream each; from nine on they share the first one's network.
    assert rates.send_s == pytest.approx(nbytes / 2.5e9, rel=0.05)
    many = load(recipe, ["rollout.engines=64"])
    assert rates_of(many, shape, HARDWARE, lengths).send_s == pytest.approx(
        nbytes * 16 / 17.5e9, rel=0.05
    )
    in_turn = rates_of(many, shape, replace(HARDWARE, carrier="collective"), lengths)
    bucket = many.weights.bucket_mib * 2**20
    each = (nbytes + bucket) / 35e9 + math.ceil(nbytes / bucket) * 5e-3 / 2
    assert in_turn.send_s == pytest.approx(64 * each)
    tree = rates_of(many, shape, replace(HARDWARE, carrier="tree"), lengths)
    assert tree.send_s < 3
    # Large buckets cost the wait for the first, small ones a round trip each.
    assert 16 < best_bucket(config, shape, HARDWARE) < 4096


def test_only_adapters_have_gradients_and_moments_that_take_time(recipe: Path) -> None:
    lora = "policy.lora={rank: 16, targets: [down_proj]}"
    frozen = load(recipe, [lora])
    shape, _ = read_model(frozen.model.path)
    assert shape is not None
    rates = rates_of(frozen, shape, HARDWARE, lengths_of(frozen, HARDWARE))
    parallel = frozen.policy.parallel
    own = 16 * (27648 // parallel.tensor + 5120) * 64 / parallel.pipeline
    copies = parallel.data * parallel.context
    reduce_s = own * (4 + 2) * (copies - 1) / copies / (HARDWARE.gpu_network_gb_s * 1e9)
    state_s = own * 20 / copies / (4e12 * 0.5)
    assert rates.train_s == pytest.approx(reduce_s + state_s)


def test_a_part_of_a_fleet_stands_for_the_whole() -> None:
    assert part_of(16, 8, 2) == (2, 16)
    engines, prompts = part_of(4096, 8, 1000)
    assert engines <= 8
    assert prompts / engines == pytest.approx(4.096, rel=0.03)


def mar(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["simulate", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(("engines", "machines"), [(4, 0), (5, 1), (12, 1), (13, 2)])
def test_engines_beyond_the_machines_of_the_ranks_have_machines_of_their_own(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, engines: int, machines: int
) -> None:
    planned: list[Machine] = []
    monkeypatch.setattr(
        choose,
        "make_plan",
        lambda config, machine, shape: planned.append(machine) or SimpleNamespace(problems=[]),
    )
    engine = [f"rollout.engines={engines}", "rollout.tensor=1"]
    config = load(recipe, ["policy.parallel={ranks: 4}", *engine])
    shape, _ = read_model(config.model.path)
    assert shape is not None
    choose.require_plan(config, shape, replace(HARDWARE, gpus_per_machine=8))
    assert [(one.nodes, one.engine_nodes) for one in planned] == [(1, machines)]


def test_the_command_divides_gpus_and_draws_what_it_tried(recipe: Path, tmp_path: Path) -> None:
    ways = ["--gpus", "64", "--async-ratio", "1", "--steps", "4", "--grow"]
    code, said = mar(str(recipe), *ways, "--out", str(tmp_path))
    assert code == 0, said
    assert "assumed, not measured: tflops 989" in said
    tree = json.loads((tmp_path / "scaling.json").read_text())
    (best,) = tree["best"]
    assert tree["columns"][:3] == ["GPUs", "prompts", "async ratio"]
    assert best[:3] == ["64", "256", "1"]
    assert "publishing" in best[-1]
    assert "64 GPUs" in (tmp_path / "scaling.svg").read_text()


def test_the_command_takes_the_rates_of_a_run(measured: Path) -> None:
    code, said = mar(
        str(measured.parent / "config.yaml"),
        "--from",
        str(measured),
        "--async-ratio",
        "0,2",
        "--steps",
        "6",
    )
    assert code == 0, said
    assert "the trainer runs at 50% while an engine works (measured)" in said

    drawn = {panel.title: panel.curves for panel in simulation(read_run(measured, alone=False))}
    assert list(drawn) == [f"{what} over async_ratio" for what in ("Speed-up", "Busy", "Lag")]
    (speed_up, _), (busy, *_) = drawn["Speed-up over async_ratio"], drawn["Busy over async_ratio"]
    assert (speed_up.x.tolist(), speed_up.y[0]) == ([0, 2], 1)
    assert busy.y[0] < busy.y[1]
    assert drawn["Lag over async_ratio"][0].y.tolist() == [0, 2]
    (measured / "simulation.json").write_text("{")
    assert simulation(read_run(measured, alone=False)) == []


@looped(
    ("arguments", "words"),
    [
        (["--async-ratio", "0,x"], "--async-ratio\n  '0,x' is not a list of numbers from 0 on"),
        (["--gpus", "1"], "'1' is not a list of whole numbers from 2 on"),
        (["--hardware", "tpu"], "'tpu' is not known\n  fix: one of h100, h200"),
        (["--assume", "tflop=1"], "did you mean tflops?"),
        (["--assume", "carrier=ship"], "one of shared_memory, relay, collective, tree"),
        (["--assume", "take_s=-1"], "'-1' does not fit take_s\n  fix: a number, 0 or more"),
        (["--assume", "tflops=0"], "'0' does not fit tflops\n  fix: a number above 0"),
        (["--assume", "fp8_speed=inf"], "'inf' does not fit fp8_speed\n  fix: a number above 0"),
        (["--assume", "tflops=fast"], "'fast' does not fit tflops\n  fix: a number above 0"),
        (
            ["--assume", "alike=1.5"],
            "'1.5' does not fit alike\n  fix: a number, 0 or more, at most 1",
        ),
        (["--assume", "read_share=2"], "fix: a number above 0, at most 1"),
        (["--assume", "response_sigma=40"], "fix: a number, 0 or more, at most 5"),
        (["--gpus", "64", "--assume", "memory_gib=9"], "the 7.6 GiB that 0.85 of a GPU gives"),
        (
            ["--assume", "prompt_tokens=100000000"],
            "rollout.tensor\n  the weights leave no room for a response on 2 GPUs",
        ),
        (["model.path=nowhere"], "nowhere is not a directory"),
        (
            [
                *("flow.async_ratio=0.5", "flow.oversample=0.5", "flow.selection=windowed"),
                *("--async-ratio", "1"),
            ],
            "--async-ratio\n  flow.oversample: 0.5 fits only below the next whole number",
        ),
        (["--from", "nowhere"], "nowhere holds no metrics.jsonl"),
        (["--from", "nowhere", "--gpus", "64"], "leave one of the two out"),
        (["policy.device=cpu"], "no speed is assumed for a CPU"),
        (["--gpus", "2"], "2 are too few for 8 ranks and an engine"),
        (["policy.parallel.ranks=12"], "12 ranks do not divide into tensor 8"),
        (
            ["rollout.placement=colocated", "weights.transport=shared_memory"],
            "engines and policy take turns",
        ),
        (["flow.selection={name: exact_lag, lag: 2}", "--async-ratio", "1"], "exact_lag has"),
        (
            [
                *("objective={loss: sft, advantage: none}", "rollout=null", "eval=null"),
                *("flow={prompts_per_step: 8, group_size: 1, async_ratio: 0}", "controls=[]"),
                "weights.transport=shared_memory",
            ],
            "a supervised run has no engines",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_reason(
    recipe: Path, arguments: list[str], words: str
) -> None:
    code, said = mar(str(recipe), *arguments)
    assert (code, words in said) == (2, True), said


@pytest.mark.parametrize("missing", ["samples", "timeline", "config.yaml", "steps"])
def test_a_run_that_shows_too_little_is_refused(
    measured: Path, tmp_path: Path, missing: str
) -> None:
    for part in ("config.yaml", "metrics.jsonl", "samples", "timeline"):
        if part != missing:
            (tmp_path / part).symlink_to(measured / part)
    if missing == "steps":
        (tmp_path / "metrics.jsonl").unlink()
        lines = (measured / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(UserError, match=r"--from") as refused:
        calibrate([tmp_path], cores=None)
    assert "too little to derive rates" in str(refused.value)


def test_runs_that_cannot_be_averaged_or_predicted_are_refused(
    measured: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(measured, other)
    settings = yaml.safe_load((other / "config.yaml").read_text())
    settings["policy"]["parallel"]["ranks"] = 2
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"runs have different policy\.parallel\.ranks") as refused:
        calibrate([measured, other], cores=None)
    assert (refused.value.problems[0].key, refused.value.problems[0].fix) == ("--from", "name one")
    file = str(measured.parent / "config.yaml")
    code, said = mar(file, "rollout.max_context=8", "--from", str(measured))
    assert code == 2
    assert said.startswith("cannot run: 1 problem\nrollout.sampling.max_tokens\n")


def test_an_engine_without_a_counted_response_shows_no_rates(
    measured: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured, run)
    text = (run / TIMELINE / "engine-0.jsonl").read_text()
    (run / TIMELINE / "engine-1.jsonl").write_text(text.replace("engine-0", "engine-1"))
    two, one = calibrate([run], cores=None), calibrate([measured], cores=None)
    assert two.rates.decode == one.rates.decode
    (run / TIMELINE / "engine-0.jsonl").unlink()
    with pytest.raises(UserError, match="no response of a step that counts") as refused:
        calibrate([run], cores=None)
    assert refused.value.problems[0].fix == "name a longer run"


def test_the_demo_is_predicted_within_a_tenth_of_what_its_runs_measured() -> None:
    """Rates from runs at 0 and 1; the runs at 2 are none of those. Written by
    benchmarks/simulation_vs_runs.py, whose seeds and steps these are."""
    stored = json.loads((ROOT / "tests" / "data" / "simulate" / "arithmetic_cpu.json").read_text())
    for key in ("decode", "train_spread"):
        stored["rates"][key] = tuple(stored["rates"][key])
    lengths = ResponseLengths(groups=tuple(stored["groups"]), prompts=tuple(stored["prompts"]))
    config, rates = (
        load(ROOT / "examples" / "arithmetic_cpu.yaml"),
        SimulationRates(**stored["rates"]),
    )
    assert config.rollout is not None
    first: dict[str, float] = {}
    for ratio, measured in stored["measured"].items():
        flow = config.flow.model_copy(update={"async_ratio": float(ratio)})
        found = [
            simulate(flow, config.rollout, rates, lengths, steps=40, seed=seed) for seed in range(3)
        ]
        step_s = float(np.mean([one.step_s for one in found]))
        speed_up = first.setdefault("found", step_s) / step_s
        measured_speed_up = first.setdefault("measured", measured["step_s"]) / measured["step_s"]
        assert step_s == pytest.approx(measured["step_s"], rel=0.1)
        assert speed_up == pytest.approx(measured_speed_up, rel=0.1)
        busy = float(np.mean([one.engine_busy for one in found]))
        assert busy == pytest.approx(measured["engine_busy"], rel=0.1)
        for one in found:
            shares = [*one.lags, *[0.0] * (len(measured["lags"]) - len(one.lags))]
            assert shares == pytest.approx(measured["lags"], abs=0.1)


def test_whole_simulations_are_those_on_their_page() -> None:
    """Every rate at once, over every order of the flow; more engines than may pause at a time."""
    groups = ((1, 9), (30, 2), (4, 4), (17, 23))
    lengths = ResponseLengths(groups=groups, prompts=(3, 5, 4, 9), equal=0.25)
    every = replace(
        RATES,
        decode=((0.1, 0.001), (0.05, 0.02)),
        places=3,
        prompt_s=0.01,
        ask_s=0.015,
        take_s=0.07,
        train_s=0.11,
        train_spread=(0.8, 1.0, 1.4),
        trainer_beside=0.7,
        engine_beside=0.6,
    )
    sent = replace(every, send_s=1.3)
    cases: dict[str, SimulationResult] = {}
    for name, rates in (("staged", every), ("sent", sent)):
        for flow in (
            {"async_ratio": 0.0},
            {"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5},
            {"async_ratio": 2.0, "late": "drop", "dynamic_sampling": True},
            {"async_ratio": 3.0, "group_size": 3},
        ):
            cases[f"{name}, {flow}"] = run(rates, lengths, engines=3, **flow)
    settings = {"prompts_per_step": PROMPTS, "group_size": SIZE, "async_ratio": 2.0}
    rollout = RolloutConfig(
        engines=4, sampling=SamplingConfig(max_tokens=64), reward=RewardConfig(name="math")
    )
    for paused in (0.0, 0.5, 1.0):
        cases[f"{paused} of the engines may pause"] = simulate(
            FlowConfig(**settings), rollout, sent, lengths, steps=7, seed=3, max_paused=paused
        )
    require_page("simulate/results", listed(cases))


def test_whole_calibrations_are_those_on_their_page(measured: Path, tmp_path: Path) -> None:
    uneven = logs_of_a_run(tmp_path / "uneven", uneven=True)
    alike = logs_of_a_run(tmp_path / "alike", longest=5, handed_s=0.01)
    runs = {"a run": ([measured], 2), "alike": ([alike], 2), "two": ([measured, uneven], 3)}
    for cores in (None, 1, 2, 3):
        runs[f"uneven, {cores} cores"] = ([uneven], cores)
    text = ""
    for name, (logs, cores) in runs.items():
        found = calibrate(logs, cores=cores)
        shown = vars(found) | {"lengths": None, "residual": round(found.residual, 4)}
        text += f"{name}\n{found.as_text()}\n" + listed(shown)
    config = load(measured.parent / "config.yaml", ["policy.parallel.ranks=2"])
    scaled = {"for 2 ranks": found.rates_of(config), "lengths": found.lengths}
    require_page("simulate/calibrations", text + listed(scaled))


def test_whole_rates_of_hardware_are_those_on_their_page(recipe: Path) -> None:
    shown: dict[str, Any] = {}
    for overrides in (
        [],
        ["rollout.engines=64", "rollout.pipeline=2", "rollout.max_concurrent=16"],
        ["policy.parallel={ranks: 32, tensor: 4, pipeline: 2, virtual_pipeline: 2, context: 2}"],
        ["policy.recompute=selective", "objective.minibatches=4", "objective.epochs=2"],
        ["policy.recompute=none", "weights.bucket_mib=16", "model.dtype=float32"],
    ):
        config = load(recipe, overrides)
        shape, _ = read_model(config.model.path)
        assert shape is not None
        for carrier in ("", "shared_memory", "collective", "tree"):
            hardware = replace(HARDWARE, carrier=carrier, gpus_per_machine=4, alike=0.7)
            lengths = lengths_of(config, hardware, seed=1)
            name = f"{overrides} {carrier}"
            shown[name] = rates_of(config, shape, hardware, lengths)
            shown[f"{name}, bucket"] = best_bucket(config, shape, hardware)
        shown[f"{overrides}, lengths"] = (lengths.groups[:9], lengths.prompts[:2], lengths.mean)
    for name in ("h100", "b200"):
        shown[name] = assumed(name, ["bucket_ms=2.5", "carrier=tree", "gpus_per_machine=4"])
        shown[f"{name} as text"] = str(shown[name])
    fleets = ((1, 1, 1), (16, 8, 8), (16, 8, 9), (128, 8, 8), (129, 8, 8), (4096, 8, 1000))
    shown["parts"] = {str(fleet): part_of(*fleet) for fleet in (*fleets, (100, 4, 23), (7, 900, 5))}
    require_page("simulate/rates", listed(shown))


def test_a_whole_search_is_the_one_on_its_page(recipe: Path, tmp_path: Path) -> None:
    small = ["flow.prompts_per_step=16", "flow.group_size=2", "rollout.sampling.max_tokens=48"]
    ways = [*small, "--steps", "4", "--assume", "bucket_ms=2", "--async-ratio", "0,1", "--gpus"]
    code, output = mar(str(recipe), *ways, "32,48", "--grow", "--out", str(tmp_path))
    assert code == 0, output
    fixed = mar(str(recipe), *ways, "48")
    single = mar(str(recipe), *ways[:-1])
    text = "\n".join([output, fixed[1], single[1], (tmp_path / "scaling.json").read_text()])
    require_page("simulate/search", text.replace(str(tmp_path), "FOLDER"))


def test_the_page_shows_what_the_simulation_chose() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    tree = json.loads((ROOT / "docs" / "scaling.json").read_text())
    for one in tree["best"]:
        shown = [one[place] for place in (0, 1, 3, 4, 2, *range(5, 11))]
        assert f"| {' | '.join(shown)} |" in page

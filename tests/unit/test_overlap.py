"""What a plan expects of sampling while training, from what a run measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.metrics.log import Row
from megatron_async_rl.plan.overlap import Overlap, run_ahead
from megatron_async_rl.plan.screen import expected_overlap, planning_rule, staleness_law
from megatron_async_rl.report.summary import measure, update_per_lr
from tests.written_run import config_tree, write_run


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
    """Engines that sample a batch's shares evenly, as far as the law admits them, and a trainer
    that waits for whole batches."""
    now = made = 0.0
    marks = []
    for version in range(60):
        limit = version + 1 + async_ratio
        waits = max(0.0, (version + 1 - made) * generate)
        made = min(limit, made + (waits + train) / generate)
        now += waits + train
        marks.append(now)
    return (marks[-1] - marks[30]) / 29


@pytest.mark.parametrize("async_ratio", [0.0, 0.25, 0.5, 1.0, 2.5])
@pytest.mark.parametrize(("generate", "train"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_the_expected_step_is_that_of_a_simulated_loop(
    generate: float, train: float, async_ratio: float
) -> None:
    expected = overlap(generate, train, min(1.0, async_ratio)).step_s
    assert expected == pytest.approx(simulated_step_s(generate, train, async_ratio), rel=1e-6)


def test_turns_take_the_sum_of_the_parts_and_overlap_the_longer_side() -> None:
    turns = overlap(3.0, 1.0, 0.0, publish=0.5, pause=0.25)
    assert turns.step_s == turns.synchronous_s == 4.5
    assert overlap(3.0, 1.0, 1.0, publish=0.5, pause=0.25).step_s == turns.bound_s == 3.25
    assert overlap(1.0, 3.0, 1.0, publish=0.5, pause=0.25).step_s == 3.5


@pytest.mark.parametrize(("generate", "engines"), [(9.0, 2), (4.0, 1), (0.1, 4)])
def test_a_balance_has_the_fewest_engines_that_keep_up_with_the_trainer(
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
def test_engines_run_ahead_by_async_ratio_unless_something_makes_them_stand_still(
    tmp_path: Path, changes: tuple[str, ...], ahead: float
) -> None:
    assert run_ahead(load(write_run(tmp_path), changes)) == ahead


def measured_rows(*, stopped_s: float = 0.0) -> list[Row]:
    """Steps of 10 s in which two engines, busy for 5 and 10 seconds, finish 1500 tokens; the first
    line is of the start."""
    rows: list[Row] = []
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


def test_rates_are_of_busy_seconds_and_leave_out_the_start_and_a_stop() -> None:
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


def test_the_update_per_learning_rate_is_that_of_the_steps_made() -> None:
    assert update_per_lr(measured_rows()) == pytest.approx(40.0)
    assert (
        update_per_lr(
            [{"step": 1, "policy/lr": 1e-3}, {"step": 2, "policy/lr": 1e-3, "update/norm": 0.0}]
        )
        is None
    )


def test_the_update_per_learning_rate_leaves_out_the_steps_of_a_batch_that_were_not_made() -> None:
    row = {"step": 1, "policy/lr": 1e-3, "policy/skipped": 0.75, "update/norm": 0.02 / 4}
    assert update_per_lr([row]) == pytest.approx(20.0)


def test_rates_of_a_smaller_batch_are_scaled_to_this_one(tmp_path: Path) -> None:
    run = tmp_path / "measured"
    run.mkdir()
    rates = measure(measured_rows())
    assert rates is not None
    config = load(write_run(tmp_path), ["rollout.engines=3"])
    text = expected_overlap(config, rates, run)
    assert "generate 5 s, train 4 s, publish 0.5 s" in text
    assert "scaled" not in text
    tree = config_tree()
    tree["flow"]["group_size"] = 1
    tree["policy"]["parallel"]["ranks"] = 4
    (run / "config.yaml").write_text(json.dumps(tree))
    text = expected_overlap(config, rates, run)
    assert "scaled by 2 in samples per step; T_train is of 4 ranks, and there are 1 here" in text
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("flow.selection=replay",), "lag        no bound: stored responses train at any age"),
        (
            ("flow.async_ratio=4", "flow.selection={name: exact_lag, lag: 4}"),
            "lag        exactly 4: every sample trains 4 updates",
        ),
        (("flow.selection={name: windowed, window: 0.5}",), "while fewer than 6 older ones wait"),
        (
            ("flow.late=drop",),
            "late       drop: when a group that has to train now is still running, it is dropped",
        ),
        (
            ("flow.oversample=0.5", "flow.selection=windowed", "flow.async_ratio=1.5"),
            "oversample 0.5 x 4 of those prompts are beyond what async_ratio asks for",
        ),
        (
            ("rollout.in_flight=recompute",),
            "in flight  recompute: running responses go on under new weights, which read",
        ),
        (("rollout.placement=colocated",), "placement  colocated: engines and policy take turns"),
    ],
)
def test_every_setting_of_the_flow_is_on_the_screen_in_words(
    tmp_path: Path, changes: tuple[str, ...], words: str
) -> None:
    assert words in staleness_law(load(write_run(tmp_path), changes))


def test_nothing_is_in_flight_where_engines_stand_still(tmp_path: Path) -> None:
    assert "in flight" not in staleness_law(load(write_run(tmp_path), ["flow.async_ratio=0"]))


def test_the_plan_command_takes_rates_from_a_run_named_or_its_own_and_refuses_what_is_none(
    tmp_path: Path,
) -> None:
    def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron_async_rl", "plan", str(config), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    config = write_run(tmp_path)
    refused = plan("--from", str(tmp_path / "nothing"))
    assert (refused.returncode, "holds no metrics.jsonl" in refused.stderr) == (2, True)
    own = load(config).run.dir
    own.mkdir()
    (own / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured_rows()))
    done = plan()
    assert done.returncode == 0, done.stderr
    assert f"measured       in {own}, 7 steps" in done.stdout
    assert "G = 40:" in done.stdout

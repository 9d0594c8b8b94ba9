"""Replays of a run in its report and on its dashboard."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.metrics.replay_record import ReplayedStep, ReplayRecord
from megatron_async_rl.report import replays
from megatron_async_rl.report.page import page_of
from megatron_async_rl.report.panels import panels_of
from megatron_async_rl.report.report import write_report
from megatron_async_rl.report.run_data import RunReader, read_run
from tests.json_lines import read_objects, write_lines
from tests.unit.test_report import sampled_run

LR = "policy.optimizer.lr=0.003"
CONTROLS = "controls=[gac, {name: displacement, tolerated_kl: 0.02}]"


def write_steps(folder: Path, steps: range) -> None:
    log = MetricsLog(folder, tensorboard=False, first_step=steps[0])
    for step in steps:
        log.log(step, {"ratio/ess_ratio": 0.5, "reward/mean": 0.3, "gac/cosine": 0.4})
    log.close()


def replayed(run_dir: Path, name: str, *changes: str, different: int | None = None) -> Path:
    """Write a replay of steps 3 to 6 in two parts."""
    folder = run_dir / "replays" / name
    write_steps(folder / "part_1", range(3, 5))
    write_steps(folder / "part_2", range(5, 7))
    steps = [
        ReplayedStep(
            step=step,
            identical=different is None or step < different,
            ess=step,
            run_ess=10 * step,
            kl=0.5,
            run_kl=0.25,
        )
        for step in range(3, 7)
    ]
    ReplayRecord(
        run=run_dir,
        changes=list(changes),
        first=3,
        last=6,
        parts=["part_1", "part_2"],
        first_different=different,
        steps=steps,
    ).write(folder)
    return folder


def test_replays_are_drawn_over_the_run_with_a_mark_from_which_they_are_off_policy(
    tmp_path: Path,
) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    replayed(run_dir, "1")
    replayed(run_dir, "2", LR, CONTROLS, different=4)
    # Not a replay, or damaged.
    (run_dir / "replays" / "3").mkdir()
    replayed(run_dir, "4")
    (run_dir / "replays" / "4" / "replay.json").write_text("{")
    data = read_run(run_dir, alone=False)
    panels = {panel.title: panel for panel in panels_of(data)}
    same = "replay 1: same settings; identical bits"
    other = f"replay 2: {LR}, controls=[gac, displacement]; weights differ from step 4"
    for title in ("Effective sample size", "Cosine of consecutive gradients"):
        panel = panels[title]
        curves = {curve.name: curve for curve in panel.curves}
        for label, colour, style in ((same, "teal", "dotted"), (other, "brown", "line")):
            assert curves[label].x.tolist() == [3, 4, 5, 6]
            assert (label, colour, style) in panel.legend
        assert [(one.step, one.colour, one.replay) for one in panel.off_policy] == [
            (5, "brown", "replay 2")
        ]
        assert panel.as_json()["offPolicy"] == [[5, "brown", "replay 2"]]
    assert panels["Effective sample size"].curves[0].name == "the run"
    # A replay trains on the run's samples, so its rewards are the run's.
    assert not any("replay" in curve.name for curve in panels["Reward"].curves)
    html = page_of(data).as_html()
    assert "<h2>Replays</h2>" in html
    summary = (
        f"{LR}, {CONTROLS}; steps 3 to 6; weights differ from step 4; samples off-policy from"
        " step 5 on, means: ESS 5.5 (the run&#x27;s 55), KL 0.5 (the run&#x27;s 0.25)"
    )
    assert f"<tr><th>replay 2</th><td>{summary}</td></tr>" in html
    assert all(path.exists() for path in write_report(run_dir))
    assert not read_run(run_dir).replays, "a run that another is compared with"


def test_a_panel_of_several_metrics_names_that_of_the_replay(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    metrics = {"policy/loss": 2.0, "policy/lr": 1e-3, "clip/positive": 0.1, "clip/negative": 0.2}
    for folder in (run_dir, run_dir / "replays" / "1"):
        log = MetricsLog(folder, tensorboard=False, first_step=1)
        log.log(1, metrics | {"ratio/ess_ratio": 1.0})
        log.close()
    ReplayRecord(run=run_dir, changes=[LR], first=1, last=1, parts=["."]).write(
        run_dir / "replays" / "1"
    )
    label = f"replay 1: {LR}; in progress"
    data = read_run(run_dir, alone=False)
    names = {panel.title: [curve.name for curve in panel.curves] for panel in panels_of(data)}
    assert names["Loss"] == ["the run", label]
    assert names["Clipped tokens"] == [
        "positive advantage",
        "negative advantage",
        f"{label} (positive advantage)",
    ]
    # A supervised run, whose main panel is its loss.
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "version": 1, "policy/loss": 2.0}\n')
    data = read_run(run_dir, alone=False)
    assert [curve.name for curve in panels_of(data)[0].curves] == ["trained on", label]


def test_the_newest_replays_are_drawn_each_with_a_colour_of_its_own(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    for number in range(1, 13):
        replayed(run_dir, str(number))
    shown = read_run(run_dir, alone=False).replays
    assert [one.number for one in shown] == ["8", "9", "10", "11", "12"]
    assert len({one.colour for one in shown}) == replays.SHOWN


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        (("controls=[]",), "controls=[]"),
        (("objective.loss={name: cispo, cap: 3}",), "objective.loss=cispo"),
        (("objective.loss={cap: [",), "objective.loss={cap: ["),
        (("policy.optimizer={lr: 1}",), "policy.optimizer={lr: 1}"),
        (tuple(f"policy.optimizer.lr={n}" for n in range(9)), None),
    ],
)
def test_a_legend_has_the_names_of_methods_and_is_short(
    tmp_path: Path, changes: tuple[str, ...], label: str | None
) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    replayed(run_dir, "1", *changes)
    (one,) = read_run(run_dir, alone=False).replays
    assert one.changes == ", ".join(changes)
    if label is None:
        assert one.label.endswith("…; identical bits")
        assert len(one.label) < 100
    else:
        assert one.label == f"replay 1: {label}; identical bits"


@pytest.mark.parametrize(
    ("different", "steps", "begin", "text"),
    [
        (6, 4, None, "weights differ from step 6"),
        (None, 0, None, "in progress"),
        (None, 2, None, "identical bits in 2 of 4 steps"),
        (None, 4, None, "identical bits"),
    ],
)
def test_a_replay_that_differs_only_in_its_last_step_has_no_off_policy_samples(
    tmp_path: Path, different: int | None, steps: int, begin: int | None, text: str
) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    folder = replayed(run_dir, "1", different=different)
    record = ReplayRecord.read(folder)
    record.model_copy(update={"steps": record.steps[:steps]}).write(folder)
    (one,) = read_run(run_dir, alone=False).replays
    assert (one.off_policy_from, one.difference) == (begin, text)


def test_a_replay_that_ended_without_a_step_is_not_in_progress(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    folder = replayed(run_dir, "1")
    record = ReplayRecord.read(folder)
    record.model_copy(update={"steps": [], "ended": True}).write(folder)
    (one,) = read_run(run_dir, alone=False).replays
    assert one.difference == "ended without a step"


def test_a_replay_of_a_run_without_digests_claims_no_identical_bits(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    folder = replayed(run_dir, "1")
    record = ReplayRecord.read(folder)
    unknown = [*record.steps[:3], record.steps[3].model_copy(update={"identical": None})]
    record.model_copy(update={"steps": unknown}).write(folder)
    (one,) = read_run(run_dir, alone=False).replays
    assert one.difference == "no difference found"


def test_a_growing_replay_changes_the_state_of_the_run(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    reader = RunReader(run_dir, alone=False)
    seen = {reader.fingerprint()}
    folder = replayed(run_dir, "1")
    assert len(reader.read().replays[0].rows) == 4
    seen.add(reader.fingerprint())
    file = folder / "part_2" / "metrics.jsonl"
    rows = read_objects(file)
    write_lines(file, [*rows, rows[-1] | {"step": 7}])
    seen.add(reader.fingerprint())
    assert len(reader.read().replays[0].rows) == 5
    # A replay that was started again.
    write_lines(file, rows[:1])
    assert len(reader.read().replays[0].rows) == 3
    seen.add(reader.fingerprint())
    assert len(seen) == 4


def test_a_damaged_replay_is_omitted_until_it_is_whole(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    folder = replayed(run_dir, "1")
    reader = RunReader(run_dir, alone=False)
    file = folder / "part_2" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b"0.5", b"0.6"))
    for _ in range(3):
        assert not reader.read().replays
    file.write_bytes(b"".join(lines))
    assert len(reader.read().replays[0].rows) == 4


def test_a_directory_that_another_replay_takes_has_the_curves_of_that_replay(
    tmp_path: Path,
) -> None:
    run_dir = sampled_run(tmp_path / "demo", 8)
    folder = replayed(run_dir, "1")
    reader = RunReader(run_dir, alone=False)
    assert len(reader.read().replays[0].rows) == 4
    shutil.rmtree(folder)
    write_steps(folder, range(3, 6))
    ReplayRecord(run=run_dir, changes=[], first=3, last=5, parts=["."]).write(folder)
    assert len(reader.read().replays[0].rows) == 3

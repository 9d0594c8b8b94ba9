"""Tests of grids and studies, with a stand-in for `mar train` that writes the files of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from megatron_async_rl import study as study_module
from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.yaml_tree import parse_value
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.study import study
from megatron_async_rl.watchdog.events import read_status
from tests.thorough import thorough
from tests.written_run import write_run

STAND_IN = """
import os, shutil, signal, sys, time
from pathlib import Path
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.watchdog.events import Status, write_status

config = load(Path(sys.argv[1]), sys.argv[2:])
run_dir, seed = config.run.dir, config.run.seed
with open(run_dir.parent / "order", "a") as order:
    order.write(run_dir.name + "\\n")
if seed == 8:
    print("no engine fits here")
    sys.exit(1)
if seed == 6:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    (run_dir / "metrics.jsonl").write_text("no row\\n")
    write_status(run_dir, Status(phase="finished", step=4, steps=4, time=0.0))
    sys.exit(0)
if seed == 5:
    write_status(run_dir, Status(phase="failed", step=0, steps=4, time=0.0, error="no memory"))
    sys.exit(1)
if seed == 4:
    write_status(run_dir, Status(phase="finished", step=4, steps=4, time=0.0))
    sys.exit(3)
if seed == 3:
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append((run_dir / "interrupted").touch()))
    (run_dir.parent / "waits").touch()
    signal.alarm(600)
    while len(received) < 2:
        time.sleep(0.01)
    (run_dir / "interrupted_twice").touch()
    sys.exit(130)
if seed == 10:
    (run_dir.parent / "imports").touch()
    time.sleep(600)
(run_dir / "config.yaml").write_text(dump(config))
log = MetricsLog(run_dir, tensorboard=False, first_step=1)
if seed == 11:
    log.log(1, {"policy/loss": 0.75})
    write_status(run_dir, Status(phase="finished", step=4, steps=4, time=0.0, measure="loss",
        before=2.5, after=0.25))
    sys.exit(0)
log.log(1, {"reward/mean": 0.5})
if seed == 9 and not (run_dir / "stopped_before").exists():
    (run_dir / "stopped_before").touch()
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    (run_dir.parent / "waits").touch()
    while not received:
        time.sleep(0.01)
    write_status(run_dir, Status(phase="stopped", step=1, steps=config.run.steps, time=0.0))
    sys.exit(130)
if seed == 12:
    write_status(run_dir, Status(phase="stopped", step=1, steps=config.run.steps, time=0.0))
    sys.exit(130)
if seed == 13:
    shutil.rmtree(run_dir)
    sys.exit(1)
failed = seed == 7
phase = "failed" if failed else "finished"
write_status(run_dir, Status(phase=phase, step=1 if failed else config.run.steps,
    steps=config.run.steps, time=0.0, error="ValueError: [it] broke" if failed else None))
sys.exit(1 if failed else 0)
"""


def write_grid(folder: Path, seeds: tuple[int, ...] = (1, 2), **changes: object) -> Path:
    write_run(folder)
    tree = {
        "base": "config.yaml",
        "runs": "study",
        "axes": {
            "lag": {
                "s0": {},
                "s4": {"flow.async_ratio": 4, "flow.selection": {"name": "exact_lag", "lag": 4}},
            },
            "seed": {f"seed{seed}": {"run.seed": seed} for seed in seeds},
        },
        "sweeps": {"fresh": {"lag": ["s0"]}, "all": {}},
    }
    grid = folder / "grid.yaml"
    grid.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return grid


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(study_module, "TRAIN", (sys.executable, str(script)))
    monkeypatch.setattr(study_module, "POLL_S", 0.02)
    return script


def run_study(grid: Path, *only: str, retry: bool = False, jobs: int = 2) -> tuple[int, str]:
    with open(grid.parent / "screen", "w+") as screen:
        code = study(grid, only, Console(file=screen, width=200), jobs=jobs, retry=retry)
        screen.seek(0)
        return code, screen.read()


def started(grid: Path) -> list[str]:
    """Return the names of the runs started since the last call, in order."""
    order = grid.parent / "study" / "order"
    names = order.read_text().split() if order.exists() else []
    order.unlink(missing_ok=True)
    return names


@thorough
@pytest.mark.usefixtures("stand_in")
def test_a_supervised_run_is_shown_with_its_losses(tmp_path: Path) -> None:
    code, screen = run_study(write_grid(tmp_path, (1, 11)), "s0-*")
    assert code == 0
    lines = {line.split()[0]: line for line in screen.splitlines() if " s0-" in line}
    assert "s0-seed11: finished at step 4 in" in screen
    assert "loss 0.750" in screen
    assert "loss 2.500 → 0.250" in lines["s0-seed11"]
    assert "?" not in lines["s0-seed1"], "a run without held-out prompts shows no result"


def test_a_sweep_is_the_product_of_its_axes_without_repeated_runs(tmp_path: Path) -> None:
    runs = runs_of(read_grid(write_grid(tmp_path)))
    assert [run.name for run in runs] == ["s0-seed1", "s0-seed2", "s4-seed1", "s4-seed2"]
    assert [run.sweeps for run in runs] == [("fresh", "all")] * 2 + [("all",)] * 2
    assert runs[2].settings == {"lag": "s4", "seed": "seed1"}
    assert runs[2].directory == tmp_path / "study" / "s4-seed1"


def test_only_selects_sweeps_and_runs_by_name(tmp_path: Path) -> None:
    grid = read_grid(write_grid(tmp_path))

    def names(*only: str) -> list[str]:
        return [run.name for run in runs_of(grid, only)]

    assert names("fresh") == ["s0-seed1", "s0-seed2"]
    assert names("*-seed2") == ["s0-seed2", "s4-seed2"]
    assert names("fresh", "s4-seed1") == ["s0-seed1", "s0-seed2", "s4-seed1"]
    with pytest.raises(UserError, match="fresh"):
        names("frehs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": {}}, "did you mean `sweeps`"),
        ({"sweeps": {"all": {"lga": ["s0"]}}}, "did you mean 'lag'"),
        ({"sweeps": {"all": {"lag": ["s5"]}}}, "there is no value 's5'"),
        ({"axes": {"lag": {"s 0": {}}}}, "axes.lag.s 0"),
        ({"base": None}, "base"),
    ],
)
def test_a_mistake_in_a_grid_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        read_grid(write_grid(tmp_path, **changes))
    assert message in str(refused.value)


def test_two_runs_with_the_same_name_are_refused(tmp_path: Path) -> None:
    axes = {"first": {"a": {}, "a-b": {}}, "second": {"b-c": {}, "c": {}}}
    grid = read_grid(write_grid(tmp_path, axes=axes, sweeps={"all": {}}))
    with pytest.raises(UserError, match="a-b-c"):
        runs_of(grid)


def test_a_mistake_in_an_override_is_refused_before_any_run_starts(
    tmp_path: Path, stand_in: Path
) -> None:
    axes = {"lr": {"low": {"policy.optimizer.lr": 1e-4}, "high": {"policy.optimzer.lr": 1.0}}}
    grid = write_grid(tmp_path, axes=axes, sweeps={"all": {}})
    with pytest.raises(UserError, match=r"policy\.optimizer"):
        run_study(grid)
    assert started(grid) == []


def test_paths_in_a_grid_are_relative_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = {"task": {"other": {"data.train": "sub/train.jsonl", "data": {"eval": "e.jsonl"}}}}
    grid = write_grid(tmp_path, axes=axes, sweeps={"all": {}})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    [run] = runs_of(read_grid(Path("..") / grid.name))
    assert f"data.train={json.dumps(str(tmp_path / 'sub' / 'train.jsonl'))}" in run.overrides
    assert f'data={{"eval": {json.dumps(str(tmp_path / "e.jsonl"))}}}' in run.overrides


@thorough
def test_finished_runs_are_skipped_and_new_runs_start(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path)
    assert run_study(grid, "fresh", jobs=1)[0] == 0
    assert started(grid) == ["s0-seed1", "s0-seed2"]
    code, screen = run_study(grid)
    assert code == 0
    assert sorted(started(grid)) == ["s4-seed1", "s4-seed2"]
    assert "4 finished" in screen
    about = json.loads((tmp_path / "study" / "s4-seed1" / "study.json").read_text())
    assert about["settings"] == {"lag": "s4", "seed": "seed1"}
    assert (about["exit_code"], about["jobs"]) == (0, 2)


@thorough
def test_a_failure_is_counted_and_kept_and_stops_no_other_run(
    tmp_path: Path, stand_in: Path
) -> None:
    grid = write_grid(tmp_path, seeds=(7, 8, 1))
    code, screen = run_study(grid, "fresh", jobs=1)
    assert code == 1
    assert started(grid) == ["s0-seed7", "s0-seed8", "s0-seed1"]
    assert "1 finished" in screen
    assert "2 failed" in screen
    assert "ValueError: [it] broke" in screen.split("why", 1)[1]
    assert "no engine fits here" in screen
    # A run that failed while training is a result; a run without a step starts again.
    assert run_study(grid, "fresh")[0] == 1
    assert started(grid) == ["s0-seed8"]
    assert run_study(grid, "fresh", retry=True)[0] == 1
    assert sorted(started(grid)) == ["s0-seed7", "s0-seed8"]


def test_a_run_that_was_stopped_by_itself_leaves_the_study_unfinished(
    tmp_path: Path, stand_in: Path
) -> None:
    code, screen = run_study(write_grid(tmp_path, seeds=(12, 1)), "fresh", jobs=1)
    assert code == 1
    assert "1 stopped, 1 finished" in screen


def test_a_run_whose_directory_cannot_be_used_fails_alone(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path, seeds=(13, 14, 1))
    (tmp_path / "study" / "s0-seed14" / "study.log").mkdir(parents=True)
    code, screen = run_study(grid, "fresh", jobs=1)
    assert code == 1
    assert "s0-seed14: failed, the run was not started" in screen
    assert "2 failed, 1 finished" in screen
    assert started(grid) == ["s0-seed13", "s0-seed1"]


@thorough
def test_a_directory_with_other_settings_is_refused_by_name(tmp_path: Path, stand_in: Path) -> None:
    assert run_study(write_grid(tmp_path), "fresh")[0] == 0
    changed = yaml.safe_load((tmp_path / "config.yaml").read_text())
    changed["policy"]["optimizer"] = {"lr": 0.5}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "study" / "order").unlink()
    with pytest.raises(UserError) as refused:
        run_study(tmp_path / "grid.yaml", "fresh")
    assert "s0-seed1" in str(refused.value)
    assert "policy.optimizer.lr" in str(refused.value)
    assert started(tmp_path / "grid.yaml") == []


def test_ctrl_c_stops_each_run_after_its_step_and_the_same_command_continues(
    tmp_path: Path, stand_in: Path
) -> None:
    grid = write_grid(tmp_path, seeds=(9, 10, 1))
    program = (
        "import sys; from pathlib import Path; from rich.console import Console;"
        f" import megatron_async_rl.study as s; s.TRAIN = (sys.executable, {str(stand_in)!r});"
        f" sys.exit(s.study(Path({str(grid)!r}), ['fresh'], Console(), jobs=2))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for sign in ("waits", "imports"):  # one run trains, the other one is still importing
        while not (tmp_path / "study" / sign).exists():
            assert process.poll() is None
            time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    screen, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "2 stopped, 1 waiting" in screen
    status = read_status(tmp_path / "study" / "s0-seed9")
    assert status is not None
    assert status.phase == "stopped"
    assert sorted(started(grid)) == ["s0-seed10", "s0-seed9"]
    assert run_study(grid, "s0-seed9", "s0-seed1", jobs=1)[0] == 0
    assert started(grid) == ["s0-seed9", "s0-seed1"]


def test_a_study_that_fails_ends_its_runs(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = write_grid(tmp_path, seeds=(9,))
    started_runs = []

    def poll(one: study_module._StartedRun) -> None:
        if (tmp_path / "study" / "waits").exists():
            started_runs.append(one.process)
            raise BrokenPipeError

    monkeypatch.setattr(study_module._StartedRun, "poll", poll)
    with pytest.raises(BrokenPipeError):
        run_study(grid, "fresh")
    [process] = started_runs
    try:
        assert process.poll() == 130, "the run was killed instead of stopped after its step"
    finally:
        process.kill()


@thorough
def test_an_unreadable_line_does_not_end_a_study(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path, seeds=(6, 1))
    code, screen = run_study(grid, "fresh")
    assert sorted(started(grid)) == ["s0-seed1", "s0-seed6"]
    assert (code, "2 finished" in screen) == (0, True)


@thorough
def test_a_run_with_an_unreadable_status_has_failed(tmp_path: Path, stand_in: Path) -> None:
    program = 'import sys\nfrom pathlib import Path\nstatus = Path("{}")\nstatus.write_text("{{")\n'
    stand_in.write_text(program.format(tmp_path / "study" / "s0-seed1" / "status.json"))
    code, screen = run_study(write_grid(tmp_path, seeds=(1,)), "fresh")
    assert (code, "1 failed" in screen) == (1, True)
    assert "is not a run's status" in screen


@thorough
def test_only_one_study_at_a_time_uses_a_runs_folder(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path)
    with (
        lock_run_dir(tmp_path / "study", command="mar study", key="runs"),
        pytest.raises(UserError, match=r"runs\n.* is in use: `mar study` .*pid \d+"),
    ):
        run_study(grid)
    assert started(grid) == []
    assert run_study(grid)[0] == 0


@thorough
def test_runs_of_a_killed_study_keep_its_folder_locked(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path, seeds=(9,))
    run = runs_of(read_grid(grid), ["fresh"])[0]
    with lock_run_dir(tmp_path / "study") as lock:
        one = study_module._StartedRun(run, read_grid(grid).base, 4, jobs=1, lock=lock)
    try:
        while not (tmp_path / "study" / "waits").exists():
            assert one.process.poll() is None
            time.sleep(0.02)
        with pytest.raises(UserError, match="is in use"):
            run_study(grid)
    finally:
        one.process.kill()
        one.process.wait()


@thorough
def test_a_finished_run_is_finished_with_any_exit_code(tmp_path: Path, stand_in: Path) -> None:
    code, screen = run_study(write_grid(tmp_path, seeds=(4,)), "fresh")
    assert (code, "1 finished" in screen) == (0, True)
    assert "ended with code 3" in screen


@thorough
def test_a_run_that_failed_before_its_first_step_starts_again(
    tmp_path: Path, stand_in: Path
) -> None:
    grid = write_grid(tmp_path, seeds=(5,))
    for _ in range(2):
        code, screen = run_study(grid, "fresh")
        assert (code, "1 failed" in screen, "no memory" in screen) == (1, True, True)
        assert started(grid) == ["s0-seed5"]


def test_two_signals_at_once_are_forwarded_as_two(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two polls, the test waits until the run has received the previous signal."""
    interrupts: list[int] = []
    monkeypatch.setattr(study_module, "deferred_signals", lambda: nullcontext(interrupts))
    run_dir, send, sent = tmp_path / "study" / "s0-seed3", subprocess.Popen.send_signal, []

    def noted(process: subprocess.Popen[bytes], number: int) -> None:
        send(process, number)
        sent.append(number)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        while sent and not (run_dir / "interrupted").exists():
            time.sleep(0.02)

    monkeypatch.setattr(subprocess.Popen, "send_signal", noted)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(study_module, "time", clock)

    def twice() -> None:
        while not (tmp_path / "study" / "waits").exists():
            time.sleep(0.02)
        interrupts.extend([signal.SIGINT] * 2)

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    assert run_study(write_grid(tmp_path, seeds=(3,)), "fresh")[0] == 130
    thread.join()
    assert (run_dir / "interrupted_twice").exists()


def test_parallel_runs_on_the_same_gpus_are_refused(tmp_path: Path, stand_in: Path) -> None:
    axes = {"device": {"gpu": {"policy.device": "cuda"}}}
    grid = write_grid(tmp_path, axes=axes, sweeps={"all": {}})
    with pytest.raises(UserError) as refused:
        run_study(grid)
    assert "--jobs 2 would give the same GPUs" in str(refused.value)
    with pytest.raises(UserError) as refused:
        run_study(grid, jobs=1)
    assert "--jobs" not in str(refused.value)


def test_a_study_needs_disk_space_for_all_runs_that_will_start(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = write_grid(tmp_path, seeds=(1, 7))
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {
        "run": {"dir": "out", "steps": 12},
        "checkpoint": {"every": 3},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    # Plans of all four runs are equal: the settings differ in seed and lag.
    config = load(tmp_path / "config.yaml", ["run.dir=study/other"])
    sums = preflight(config, all_data=False, machine=this_machine()).totals
    assert sums is not None
    # Each run keeps two checkpoints, and each of two jobs writes a third one at a time.
    assert sums.checkpoints == 3
    needed = 4 * (2 * sums.checkpoint + sums.export) + 2 * sums.checkpoint
    usage = namedtuple("usage", "total used free")
    free = [needed - 1]

    def disk_usage(path: Path) -> object:
        return usage(2**40, 0, 2**40 if str(path).startswith("/dev/shm") else free[0])

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(UserError) as refused:
        run_study(grid)
    (problem,) = refused.value.problems
    assert problem.key == "runs"
    assert "are needed for checkpoints and exported models of 4 runs, and the disk" in problem.what
    assert not started(grid)
    free[0] += 1
    assert run_study(grid)[0] == 1
    assert len(started(grid)) == 4
    # Finished runs need no more space. A failed run needs it only if it starts again.
    free[0] = 0
    assert run_study(grid)[0] == 1
    with pytest.raises(UserError, match="of 2 runs"):
        run_study(grid, retry=True)


def test_values_of_a_grid_reach_the_run_unchanged(tmp_path: Path) -> None:
    value = {"a": [float("inf"), -float("inf")], "ü": "𝛼 \U0001f600", "tiny": 1e-7}
    axes = {"x": {"y": {"rollout.reward.options": value}}, "s": {"z": {"run.steps": float("nan")}}}
    [run] = runs_of(read_grid(write_grid(tmp_path, axes=axes, sweeps={"all": {}})))
    options, steps, _ = (text.partition("=")[2] for text in run.overrides)
    assert parse_value(options) == value
    assert parse_value(steps) != parse_value(steps)


def test_text_of_a_grid_reaches_the_run_as_written(tmp_path: Path) -> None:
    grid = write_grid(tmp_path)
    grid.write_text(
        f"base: {grid.parent}/base.yaml\nruns: 2024-01-01\naxes:\n"
        "  on: {010: {data.system_prompt: 1e3}, 2: {data: {system_prompt: off}}}\n"
        "sweeps: {all: {on: [010, 2]}}\n"
    )
    runs = runs_of(read_grid(grid))
    assert [run.name for run in runs] == ["010", "2"]
    assert runs[0].directory == grid.parent / "2024-01-01" / "010"
    assert runs[0].overrides[0] == 'data.system_prompt="1e3"'
    assert runs[1].overrides[0] == 'data={"system_prompt": "off"}'
    grid.write_text(grid.read_text().replace("data.system_prompt: 1e3", "run.seed: 010"))
    with pytest.raises(UserError, match="different numbers") as refused:
        read_grid(grid)
    assert refused.value.problems[0].where == f"{grid}:4"


@thorough
def test_a_terminal_shows_a_table_of_the_active_runs(tmp_path: Path, stand_in: Path) -> None:
    grid = write_grid(tmp_path)
    with open(tmp_path / "screen", "w+") as screen:
        console = Console(file=screen, width=120, force_terminal=True)
        assert study(grid, ["fresh"], console, jobs=2) == 0
        screen.seek(0)
        text = screen.read()
    assert "cosine" in text
    assert "2 running" in text

"""Tests of every command with damaged runs. If a file of a run is missing, damaged, unreadable or
of another kind, a command names the file in its error, or continues without it; it never ends with
a traceback.

The gate tests every second pair of command and file, with one kind of damage, which varies between
pairs. MAR_TESTS=all (`make test-all`) tests every pair with every kind.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_async_rl import cli, evaluate
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.launch import launcher
from megatron_async_rl.policy import parallel
from megatron_async_rl.report import dashboard
from megatron_async_rl.report.dashboard import Dashboard
from tests.damaged_run import DAMAGES, damageable_run, name_of, permissions_count, remove
from tests.thorough import THOROUGH

Arguments = Callable[[Path, Path], list[str]]

STEP = f"checkpoint/{name_of(5)}"
FILES = (
    "status.json",
    "metrics.jsonl",
    "eval.jsonl",
    "config.yaml",
    "events.jsonl",
    "anomalies.jsonl",
    "logmark.json",
    "samples",
    "samples/samples-000000.segment",
    "samples/outcomes-000000.segment",
    "timeline",
    "timeline/rank 0.jsonl",
    "logs",
    "watch",
    "lock",
    "stop",
    "engines",
    "simulation.json",
    "report.html",
    "trackers.json",
    "checkpoint",
    "checkpoint/latest",
    STEP,
    f"{STEP}/about.json",
    f"{STEP}/record.json",
    f"{STEP}/config.yaml",
    f"{STEP}/sharded",
    f"{STEP}/sharded/.metadata",
    "hf",
    "hf/config.json",
    "hf/digests.json",
    "hf/tokenizer.json",
    "hf/model.safetensors",
)
COMMANDS: dict[str, Arguments] = {
    "train": lambda config, run: ["train", str(config)],
    "plan": lambda config, run: ["plan", str(config)],
    "simulate": lambda config, run: ["simulate", str(config), "--from", str(run)],
    "report": lambda config, run: ["report", str(run)],
    "samples": lambda config, run: ["samples", str(run), "--step", "3"],
    "engines": lambda config, run: ["engines", str(run), "2"],
    "dashboard": lambda config, run: ["dashboard", str(run), "--port", "0"],
    "convert": lambda config, run: ["convert", f"{run}/checkpoint", f"{run.parent}/converted"],
    "eval": lambda config, run: ["eval", f"{run}/checkpoint", "data.eval=train.jsonl"],
    "eval of hf": lambda config, run: ["eval", f"{run}/hf", "data.eval=train.jsonl"],
}
READS = {
    "convert": ("checkpoint",),
    "eval": ("checkpoint", "config.yaml", "metrics.jsonl", "status.json"),
    "eval of hf": ("hf", "config.yaml", "metrics.jsonl", "status.json"),
    "engines": ("config.yaml", "lock", "status.json", "engines", "samples"),
}
"""Command -> beginnings of the paths that it may read. Other commands may read all files."""
INTACT = {"simulate": 2, "engines": 2, "train": 130, "convert": 2}
"""Command -> exit code for an intact run, if it is not 0. The run has too few steps to derive
rates, is not active, is stopped before its ranks take a step, and has no weights to convert."""
REACHED = "reached the model"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an intact run. The folder `original` next to it is a copy."""
    folder = tmp_path_factory.mktemp("runs") / "intact"
    folder.mkdir()
    damageable_run(folder)
    shutil.copytree(folder, folder.with_name("original"))
    return folder


@pytest.fixture
def run(
    intact: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str, str], Result]]:
    """Yield a function `run(command, file, damage)` that damages `file` of the run and returns the
    result of the command."""
    monkeypatch.chdir(intact)
    monkeypatch.setattr(launcher, "POLL_S", 0.01)
    monkeypatch.setattr(launcher, "_start_ranks", lambda *_: subprocess.Popen(["true"]))
    monkeypatch.setattr(launcher, "_kill_leftovers", lambda *_: None)
    monkeypatch.setattr(evaluate, "run", lambda *_: None)
    monkeypatch.setattr(parallel, "initialise", _reached)
    monkeypatch.setattr(dashboard._DashboardServer, "serve_forever", lambda self: None)

    def of(command: str, file: str, damage: str) -> Result:
        restore()
        config, run_dir = intact / "config.yaml", intact / "out"
        if damage:
            DAMAGES[damage](run_dir / file)
        with permissions_count():
            result = CliRunner().invoke(cli.app, COMMANDS[command](config, run_dir))
            if command == "dashboard" and result.exit_code == 0:
                _browse(run_dir)
        return result

    def restore() -> None:
        for path in intact.iterdir():
            _unlock(path)
            remove(path)
        shutil.copytree(intact.with_name("original"), intact, dirs_exist_ok=True)

    yield of
    restore()  # so that pytest can remove the folder


def _reached(*_: Any, **__: Any) -> None:
    raise UserError.of("model", REACHED, "")


def _browse(run_dir: Path) -> None:
    """Call the dashboard as a browser's requests do. The page would show a UserError."""
    served = Dashboard([run_dir])
    served.state("0", "")
    try:
        served.samples("0", {})
    except UserError:
        return


def _unlock(path: Path) -> None:
    if not path.is_symlink():
        path.chmod(0o755 if path.is_dir() else 0o644)
        for one in path.iterdir() if path.is_dir() else ():
            _unlock(one)


def test_every_command_accepts_an_intact_run(run: Callable[[str, str, str], Result]) -> None:
    for command in COMMANDS:
        result = run(command, "", "")
        assert result.exit_code == INTACT.get(command, 0), (command, result.output)
        assert (REACHED in result.output) == (command == "convert")


@pytest.mark.parametrize("place", range(len(FILES)), ids=FILES)
def test_no_command_ends_with_a_traceback(
    run: Callable[[str, str, str], Result], intact: Path, place: int
) -> None:
    file, failures = FILES[place], []
    for number, command in enumerate(COMMANDS):
        read = READS.get(command, ("",))
        if not file.startswith(read) or (not THOROUGH and (place // 2 + number) % 2):
            continue
        for damage in _damages(intact.with_name("original") / "out" / file, place + number):
            try:
                result = run(command, file, damage)
            except Exception as error:  # noqa: BLE001 - from `_browse`
                failures.append((command, damage, "".join(traceback.format_exception(error)[-3:])))
                continue
            if not isinstance(result.exception, SystemExit | None):
                trace = traceback.format_exception(*(result.exc_info or sys.exc_info()))
                failures.append((command, damage, "".join(trace[-3:])))
            elif result.exit_code not in (0, 130):
                assert "fix: " in result.output, (command, damage, result.output)
    assert not failures, "\n".join(map(str, failures))


def _damages(path: Path, turn: int) -> list[str]:
    """Return the kinds of damage to test: one of the possible ones, by `turn`, or all of them."""
    present = {"removed", "torn", "locked"}
    possible = [one for one in DAMAGES if path.exists() or one not in present]
    if THOROUGH:
        return possible
    return [possible[(3 * turn) % len(possible)]]

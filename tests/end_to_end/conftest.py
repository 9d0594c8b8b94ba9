"""The arithmetic example, written afresh, and the runs that several files look at. All files share
one folder, so names of runs are given once."""

from __future__ import annotations

import json
import runpy
import secrets
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end import fleet, ways
from tests.end_to_end.workspace import (
    ROOT,
    Workspace,
    alive,
    listening,
    started_by,
    wait_until,
)
from tests.network.machines import (
    listeners_of,
    obstacle,
    ports_of_machine,
    torchrun_of_machine,
)
from tests.network.runs import run_config

RELAY = "relay-0"
PROCESSES = (
    *("rank 0", "rank 1", "controller", "engine-0", "engine-0 EngineCore", "engine-1"),
    RELAY,
)
"""Overrides of the run over several machines."""
AT_A_TIME = 3
"""Runs of test_ways_to_run.py; most of their time is imports and waiting."""
RESULT_S = 1500
LOOP_STEPS = 16
SYNCHRONOUS_STEPS = 5
HELD_OUT = 12
"""Held-out prompts."""
PER_PROMPT = 3
"""Samples of each of them in an evaluation."""
EVERY = 4
"""Steps between evaluations of the run that is interrupted."""
PASS_REWARD = 0.5

REWARD = '''
import time
import zlib
from pathlib import Path

HERE = Path(__file__).parent


def varied(prompt, response):
    """Another number for every other response, never 0: always a gradient, nothing to learn."""
    return 0.5 + zlib.crc32(response.encode()) / 2**32


def held(prompt, response):
    """After the first step of the run that is to be disturbed, until the test has disturbed it."""
    steps = HERE / "runs" / "synchronous" / "metrics.jsonl"
    while (HERE / "hold").exists() and steps.exists() and steps.stat().st_size:
        time.sleep(0.05)
    return varied(prompt, response)


def flaky(prompt, response):
    """Exact match, except that it raises on some answers and is not a number on others."""
    last = prompt.fields["answer"][-1]
    if last == "3":
        raise ValueError("three is not supported")
    if last == "7":
        return float("nan")
    return float(response.strip() == prompt.fields["answer"]) + 0.1 * len(response)


def unlike(prompt, responses):
    """The share of a group's responses that are not like this one."""
    return [1 - responses.count(one) / len(responses) for one in responses]


def until_stuck(prompt, response):
    while (HERE / "stuck").exists():
        time.sleep(3600)
    return varied(prompt, response)
'''


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    runpy.run_path(str(ROOT / "examples" / "arithmetic" / "prepare.py"))["write"](folder, seed=0)
    (folder / "flaky_reward.py").write_text(REWARD)
    return Workspace(folder)


def held_out(workspace: Workspace) -> Path:
    """File of the HELD_OUT prompts, whose answers `flaky` accepts."""
    lines = (workspace.folder / "eval.jsonl").read_text().splitlines(keepends=True)
    chosen = [line for line in lines if json.loads(line)["answer"][-1] not in "37"]
    path = workspace.folder / "held_out.jsonl"
    path.write_text("".join(chosen[:HELD_OUT]))
    return path


@pytest.fixture(scope="session")
def interrupted(
    workspace: Workspace,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, object]:
    """A run at async_ratio 2 with a reward that fails now and then and one of whole groups, stopped
    by Ctrl-C on the way and started again with an engine that only evaluates, where that can be on
    a machine whose name nothing knows, and with a TMPDIR longer than the path of a socket may be.
    """
    if "test_fleet" in {item.path.stem for item in request.session.items}:
        request.getfixturevalue("fleet_run")  # begins
    config = workspace.config(
        "loop",
        run={"dir": "runs/loop", "steps": LOOP_STEPS},
        flow={"async_ratio": 2},
        rollout={
            "reward": {
                "parts": {
                    "right": {"name": "flaky_reward:flaky"},
                    "unlike": {"name": "flaky_reward:unlike", "per": "group", "weight": 0.1},
                },
                "on_error": "drop",
            }
        },
        data={"eval": held_out(workspace).name},
        eval={
            "every": EVERY,
            "samples_per_prompt": PER_PROMPT,
            "pass_at": [1, 2],
            "pass_reward": PASS_REWARD,
        },
        weights={"transport": "relay"},
        observe={"prometheus_port": 0},
    )
    run = workspace.folder / "runs" / "loop"
    for _ in range(5):
        process = workspace.start("train", str(config))
        # It starts while the ranks do: the steps take seconds.
        wait_until((run / "status.json").exists, process)
        dashboard = workspace.start("dashboard", str(run), "--port", "0")
        assert dashboard.stdout is not None
        page = dashboard.stdout.readline()
        wait_until(lambda: len(workspace.metrics("loop")) >= 1, process)
        prometheus = (run / "prometheus.txt").read_text()
        temporary = psutil.Process(process.pid).children()[0].environ().get("TMPDIR", "")
        processes = started_by(process)
        sockets = listening([*processes, *map(psutil.Process, (process.pid, dashboard.pid))])
        wait_until(lambda: len(workspace.metrics("loop")) >= 4, process)
        process.send_signal(signal.SIGINT)
        stopped, _ = process.communicate(timeout=400)
        dashboard.kill()
        dashboard.communicate()
        left = alive(processes)
        at_stop = len(workspace.metrics("loop"))
        if at_stop < LOOP_STEPS:
            break
        # It was through before the signal came.
        shutil.rmtree(run)
    long = tmp_path_factory.mktemp("as_slurm_makes_one_for_each_job_" + "0123456789" * 8)
    code, finished = replace(workspace, environment={"TMPDIR": str(long)}).mar(
        "train", str(config), "eval.engines=1", named="" if obstacle() else "unheard-of"
    )
    return {
        "stop_code": process.returncode,
        "stop_output": stopped,
        "processes": len(processes),
        "left": left,
        "at_stop": at_stop,
        "code": code,
        "output": finished,
        "rows": workspace.metrics("loop"),
        "run": run,
        "files": {one.name for one in run.iterdir()},
        "sockets": sockets,
        "page": page,
        "prometheus": prometheus,
        "temporary": temporary,
        "long": long,
    }


@pytest.fixture(scope="session")
def converted(workspace: Workspace, interrupted: dict[str, object]) -> Path:
    """The checkpoint of that run as `mar convert` writes it."""
    out = workspace.folder / "converted"
    code, output = workspace.mar("convert", f"{interrupted['run']}/checkpoint", str(out))
    assert code == 0, output
    assert "UserWarning" not in output, "libraries do not speak on the user's screen"
    return out


@pytest.fixture(scope="session")
def fleet_run(workspace: Workspace) -> Future[dict[str, object]]:
    """Run of test_fleet.py. It mostly waits for engines that do not answer, so `interrupted` runs
    next to it."""
    return ThreadPoolExecutor(1).submit(fleet.trouble, workspace)


@pytest.fixture(scope="session")
def runs(workspace: Workspace, converted: Path) -> dict[str, Future[ways.Ended]]:
    """Runs of test_ways_to_run.py."""
    pool, begun = ThreadPoolExecutor(AT_A_TIME), {}
    for name in ways.WAYS:
        begun[name] = pool.submit(ways.run, workspace, name)
        # Not all import at once.
        time.sleep(2.0)
    return begun


@dataclass
class Ended:
    """A run over machines. `states`: of its processes while it ran; `left`: names of those that
    still live; `ports`: TCP ports that are open on the first machine."""

    codes: list[int]
    said: str
    states: dict[str, dict[str, Any]]
    left: list[str]
    directory: Path
    listeners: list[set[str]]
    ports: set[int]


@pytest.fixture(scope="session")
def synchronous_config(workspace: Workspace, converted: Path) -> Path:
    """Config of a synchronous run from the converted model, with a separate evaluation engine."""
    return workspace.config(
        "synchronous",
        run={"dir": "runs/synchronous", "steps": SYNCHRONOUS_STEPS},
        flow={"async_ratio": 0},
        model={"path": converted.name},
        # Every step must move the weights, also when the model has come to give a prompt one answer
        # only: no baseline.
        rollout={"reward": {"name": "flaky_reward:held", "timeout_s": 110}},
        objective={"advantage": "none"},
        weights={"transport": "relay"},
        data={"eval": held_out(workspace).name},
        eval={
            "every": 2,
            "engines": 1,
            "samples_per_prompt": PER_PROMPT,
            "pass_at": [1, 2],
            "pass_reward": 1.0,
        },
    )


@pytest.fixture(scope="session")
def over_machines(workspace: Workspace, synchronous_config: Path) -> Ended:
    """That run over three machines: a rank on each of two, an engine on the third, and the
    evaluation engine on the first. The agent that brings the third its weights is killed on the
    way."""
    directory = workspace.folder / "runs" / "synchronous"
    hold = workspace.folder / "hold"
    hold.touch()
    with run_config(
        synchronous_config,
        directory,
        3,
        trainers=2,
        settings={"RESTARTS": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
    ) as run:
        states = run.states_of(*PROCESSES)
        run.wait_for_steps(1)
        torchruns = [torchrun_of_machine(states[f"rank {rank}"]["pid"]) for rank in (0, 1)]
        listeners = {pid: listeners_of(pid) for pid in (*torchruns, states["rank 1"]["pid"])}
        ports = ports_of_machine(states["rank 0"]["pid"])
        psutil.Process(states[RELAY]["pid"]).kill()
        hold.unlink()
        codes, left = run.end()
        return Ended(codes, run.said(), states, left, directory, list(listeners.values()), ports)

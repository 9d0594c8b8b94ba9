"""Launchers over several machines, with stand-ins for `mar` and `ray` that write down what they
were asked. The real ones run in tests/end_to_end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from kubernetes_validate import validate

from tests.ports import free_ports
from tests.thorough import thorough

LAUNCHERS = Path(__file__).parents[2] / "launchers"
MAR = """#!/bin/bash
echo "mar $* RAY_ADDRESS=${RAY_ADDRESS:-}" >> "$ASKED"
trap 'echo "mar TERM" >> "$ASKED"; exit 130' TERM
trap 'echo "mar HUP" >> "$ASKED"; exit 130' HUP
IFS= read -r code < "$CODES"
sed -i 1d "$CODES"
[[ "$code" != fails* ]] || trap 'exit 1' TERM
[[ "$code" == waits || "$code" == fails* ]] || exit "$code"
echo "mar waits" >> "$ASKED"
while :; do sleep 0.05; done
"""
"""Ends with the next line of $CODES; `waits`: with a signal; `fails when told`: badly."""
RAY = """#!/bin/bash
echo "ray $*" >> "$ASKED"
trap 'echo "ray TERM" >> "$ASKED"; exit 0' TERM
if [[ "$2" == --head ]]; then
  port="${3#--port=}"
  exec python3 -c "
import signal, socket
from pathlib import Path
asked = Path('$ASKED')
def end(*_):
    asked.open('a').write('ray TERM\\n')
    raise SystemExit
signal.signal(signal.SIGTERM, signal.SIG_IGN if '$RAY_DEAF' else end)
listener = socket.create_server(('', $port))
while True:
    listener.accept()[0].close()
"
fi
[[ -z "${RAY_FAILS:-}" ]] || exit 1
if [[ -e "$LOSES" ]]; then rm "$LOSES"; exit 1; fi
while :; do sleep 0.05; done
"""
"""The head listens on its port; another one looks for its head when that has ended, as Ray does for
a while, or ends once, at once, where there is a file $LOSES."""
PYTHON = """#!/bin/bash
echo "python $*" >> "$ASKED"
"""

SLEEP = """#!/bin/bash
exec /bin/sleep 0.02
"""
"""The launcher's seconds between two looks, shortened."""


class Machine:
    """Environment of one machine of a run."""

    def __init__(self, folder: Path) -> None:
        self.asked, self.codes = folder / "asked", folder / "codes"
        self.loses = folder / "loses"
        self.port, self.ray_port = free_ports(2)
        commands = folder / "venv" / "bin"
        commands.mkdir(parents=True)
        stand_ins = {"mar": MAR, "ray": RAY, "python": PYTHON, "sleep": SLEEP}
        for name, text in stand_ins.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.asked.touch()
        self.environment = {
            "PATH": os.environ["PATH"],
            "VENV": str(folder / "venv"),
            "ASKED": str(self.asked),
            "CODES": str(self.codes),
            "LOSES": str(self.loses),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RAY_PORT": str(self.ray_port),
        }

    def start(
        self, *codes: int | str, arguments: Sequence[str] = ("run.yaml", "run.steps=2"), **more: str
    ) -> subprocess.Popen[str]:
        self.codes.write_text("".join(f"{code}\n" for code in codes))
        # What starts the tests in the background has them ignore Ctrl-C, which a shell would
        # inherit.
        hears = ["env", "--default-signal=INT,HUP"]
        return subprocess.Popen(
            [*hears, LAUNCHERS / "torchrun_multinode.sh", *arguments],
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def run(
        self, *codes: int | str, arguments: Sequence[str] = ("run.yaml", "run.steps=2"), **more: str
    ) -> tuple[int, str]:
        process = self.start(*codes, arguments=arguments, **more)
        said, _ = process.communicate(timeout=600)
        return process.returncode, said

    def lines(self) -> list[str]:
        return self.asked.read_text().splitlines()

    def wait_for(self, line: str) -> None:
        self.wait_until(lambda lines: line in lines)

    def wait_until(self, condition: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + 600
        while not condition(self.lines()):
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def head(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """The Ray of machine 0."""
    command = ["ray", "start", "--head", f"--port={machine.ray_port}"]
    path = f"{machine.environment['VENV']}/bin:{os.environ['PATH']}"
    process = subprocess.Popen(command, env=machine.environment | {"PATH": path}, text=True)
    yield process
    process.kill()
    process.wait()


def test_each_machine_passes_its_number_and_the_heads_address_to_the_trainer(
    machine: Machine,
) -> None:
    assert machine.run(0, NNODES="3", NODE_RANK="1")[0] == 0
    ends = f"--nnodes 3 --node-rank 1 --rdzv-endpoint 127.0.0.1:{machine.port} RAY_ADDRESS="
    assert machine.lines() == [f"mar train run.yaml run.steps=2 {ends}"]


def test_numbers_may_begin_with_zeros(machine: Machine) -> None:
    assert machine.run(0, NNODES="012", NODE_RANK="08")[0] == 0
    assert "--nnodes 12 --node-rank 8 " in machine.lines()[0]


def test_one_machine_needs_no_rendezvous(machine: Machine) -> None:
    assert machine.run(0, NNODES="1", NODE_RANK="0")[0] == 0
    assert machine.lines() == ["mar train run.yaml run.steps=2 RAY_ADDRESS="]


def test_machine_0_has_the_ray_that_machines_of_engines_join_and_ends_it(machine: Machine) -> None:
    code, _ = machine.run(0, NNODES="2", NODE_RANK="0", TRAINER_NODES="1")
    assert code == 0
    ray, mar, ended = machine.lines()
    assert ray.startswith(f"ray start --head --port={machine.ray_port} ")
    for closed in ("--no-monitor", "--include-dashboard=false"):
        assert closed in ray.split()
    waits = f"--engine-nodes 1 RAY_ADDRESS=127.0.0.1:{machine.ray_port}"
    assert mar == f"mar train run.yaml run.steps=2 {waits}"
    assert ended == "ray TERM"


def test_machines_of_engines_are_waited_for_at_the_first_start_alone(machine: Machine) -> None:
    """A machine that is lost later costs its engines, and not the start after."""
    assert machine.run(1, 0, NNODES="3", NODE_RANK="0", TRAINER_NODES="1")[0] == 0
    first, second = (line for line in machine.lines() if line.startswith("mar train"))
    assert "--engine-nodes 2 " in first
    assert "--engine-nodes" not in second


def test_a_run_that_fails_is_started_again_and_not_for_ever(machine: Machine) -> None:
    assert machine.run(1, 1, 0, NNODES="1", NODE_RANK="0")[0] == 0
    assert len(machine.lines()) == 3
    machine.asked.write_text("")
    code, said = machine.run(1, 1, 1, 0, NNODES="1", NODE_RANK="0", RESTARTS="2")
    assert code == 1
    assert "failed 3 times; RESTARTS=2" in said
    assert len(machine.lines()) == 3


@pytest.mark.parametrize("code", [2, 130], ids=["refused", "stopped"])
def test_a_run_that_was_refused_or_stopped_is_not(machine: Machine, code: int) -> None:
    assert machine.run(code, NNODES="1", NODE_RANK="0")[0] == code
    assert len(machine.lines()) == 1


@pytest.mark.parametrize(
    ("number", "told", "to_all"),
    [
        (signal.SIGTERM, "TERM", False),
        (signal.SIGINT, "TERM", True),
        (signal.SIGHUP, "HUP", True),
        pytest.param(signal.SIGTERM, "TERM", True, marks=thorough),
        pytest.param(signal.SIGINT, "TERM", False, marks=thorough),
        pytest.param(signal.SIGHUP, "HUP", False, marks=thorough),
    ],
)
def test_a_signal_stops_the_run_and_then_ray(
    machine: Machine, number: signal.Signals, told: str, to_all: bool
) -> None:
    """A terminal that is closed sends it to all processes: notified twice, the run would be killed,
    and without Ray it could not end its step."""
    process = machine.start("waits", NNODES="2", NODE_RANK="0", TRAINER_NODES="1")
    machine.wait_for("mar waits")
    (os.killpg if to_all else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert machine.lines()[-2:] == [f"mar {told}", "ray TERM"]
    assert not [line for line in machine.lines()[:-2] if line.endswith(("TERM", "HUP"))]


def test_a_ray_that_has_died_is_started_again_before_the_run(machine: Machine) -> None:
    process = machine.start("fails when told", 0, NNODES="2", NODE_RANK="0", TRAINER_NODES="1")
    machine.wait_for("mar waits")
    [mar] = (one for one in psutil.Process(process.pid).children() if "mar" in one.cmdline()[1])
    [ray] = (one for one in psutil.Process(process.pid).children() if one != mar)
    ray.kill()
    ray.wait(timeout=600)  # until the launcher has collected it, it counts as running
    mar.terminate()
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    begun = [line.split()[0] for line in machine.lines() if " start" in line or " train" in line]
    assert begun == ["ray", "mar", "ray", "mar"]
    # The rollout nodes have to find the new one.
    assert sum("--engine-nodes 1" in line for line in machine.lines()) == 2


def test_a_ray_that_does_not_hear_is_killed_in_the_end(machine: Machine) -> None:
    """While it starts Ray may lose a signal; the passing time does not matter here."""
    hasty = Path(machine.environment["VENV"]) / "bin" / "sleep"
    hasty.unlink()
    hasty.symlink_to("/bin/true")
    settings = {"NNODES": "2", "NODE_RANK": "0", "TRAINER_NODES": "1", "RAY_DEAF": "1"}
    assert machine.run(0, **settings)[0] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", machine.ray_port))


def test_a_port_that_another_has_is_no_ray_of_ours(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", machine.ray_port)):
        code, said = machine.run(0, NNODES="2", NODE_RANK="0", TRAINER_NODES="1")
    assert (code, machine.lines()) == (2, [])
    assert f"RAY_PORT={machine.ray_port} is already in use on this machine" in said


def test_a_run_that_fails_while_it_is_stopped_is_not_started_again(machine: Machine) -> None:
    process = machine.start("fails when told", 0, NNODES="1", NODE_RANK="0")
    machine.wait_for("mar waits")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 1, said
    assert sum(line.startswith("mar train") for line in machine.lines()) == 1


def leads_a_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def test_a_machine_of_engines_joins_machine_0_and_ends_with_it(
    machine: Machine, head: subprocess.Popen[str]
) -> None:
    process = machine.start(NNODES="2", NODE_RANK="1", TRAINER_NODES="1", REJOIN_S="0")
    joined = f"ray start --address=127.0.0.1:{machine.ray_port} --temp-dir="
    machine.wait_until(lambda lines: any(line.startswith(joined) for line in lines))
    (folder,) = (line.partition("dir=")[2].split()[0] for line in machine.lines() if "dir=" in line)
    assert Path(folder).parent.is_dir()
    (ray,) = filter(leads_a_session, psutil.Process(process.pid).children())
    head.kill()
    head.wait()
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert not ray.is_running()
    assert "Killed" not in said
    assert "machine 0's Ray has ended, and with it the work of machine 1" in said
    assert not [line for line in machine.lines() if line.startswith("mar")]
    assert not Path(folder).parent.exists(), "Ray's session went with it"
    # What engines that were killed left in its shared memory goes last.
    assert machine.lines()[-1] == "python -m megatron_async_rl.watchdog.run_folder"


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "disabled"),
        ({"RAY_AUTH_TOKEN_PATH": "/token"}, "token"),
        pytest.param({"RAY_AUTH_TOKEN": "a" * 64}, "token", marks=thorough),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "a" * 64}, "disabled"),
    ],
)
def test_a_ray_of_several_machines_asks_for_the_token_that_they_share(
    machine: Machine, given: dict[str, str], mode: str
) -> None:
    """Ray cannot be bound to one address, so a machine without a token reports the consequence."""
    ray = Path(machine.environment["VENV"]) / "bin" / "ray"
    ray.write_text(ray.read_text().replace("#!/bin/bash", RAY_MODE, 1))
    code, said = machine.run(0, NNODES="2", NODE_RANK="0", TRAINER_NODES="1", **given)
    assert code == 0
    assert f"mode {mode}" in machine.lines()
    warned = "without RAY_AUTH_TOKEN anyone who reaches Ray's ports on this machine can run code as"
    assert (warned in said) == (not given)


RAY_MODE = """#!/bin/bash
echo "mode $RAY_AUTH_MODE" >> "$ASKED"
"""
ENGINES = {"NNODES": "2", "NODE_RANK": "1", "TRAINER_NODES": "1"}


def test_a_machine_of_engines_fails_where_ray_does_not_join(
    machine: Machine, head: subprocess.Popen[str]
) -> None:
    machine.wait_for(f"ray start --head --port={machine.ray_port}")
    code, said = machine.run(**ENGINES, RAY_FAILS="1", RESTARTS="1")
    assert code == 1
    assert "Ray has ended 2 times on machine 1, and not on machine 0" in said
    assert sum(line.startswith("ray start --address") for line in machine.lines()) == 2


def test_a_machine_of_engines_that_machine_0_has_lost_joins_again(
    machine: Machine, head: subprocess.Popen[str]
) -> None:
    """A link that is down for a while: Ray takes the machine for dead, and ends there."""
    machine.loses.touch()
    process = machine.start(**ENGINES)
    machine.wait_until(lambda lines: sum("ray start --address" in line for line in lines) == 2)
    process.terminate()
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "machine 1 joins machine 0's Ray again (1 of RESTARTS=3)" in said


def test_a_rollout_node_reports_that_machine_0_is_missing(machine: Machine) -> None:
    code, said = machine.run(NNODES="2", NODE_RANK="1", TRAINER_NODES="1", START_S="0")
    assert code == 2
    assert f"no Ray at MASTER_ADDR:RAY_PORT=127.0.0.1:{machine.ray_port}" in said


def test_a_machine_of_engines_gives_ray_numbers_for_a_name(
    machine: Machine, head: subprocess.Popen[str]
) -> None:
    settings = {"NNODES": "2", "NODE_RANK": "1", "TRAINER_NODES": "1", "RAY_FAILS": "1"}
    settings |= {"RESTARTS": "0"}
    machine.wait_for(f"ray start --head --port={machine.ray_port}")
    assert machine.run(MASTER_ADDR="localhost", **settings)[0] == 1
    assert machine.lines()[-2].startswith(f"ray start --address=127.0.0.1:{machine.ray_port} ")
    code, said = machine.run(MASTER_ADDR="no-such-machine.invalid", START_S="0", **settings)
    assert code == 2
    assert "MASTER_ADDR=no-such-machine.invalid is not a known host name on machine 1" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NODE_RANK": "0"}, "NNODES is not set: the number of machines"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "two", "NODE_RANK": "0"}, "NNODES=two is not a whole number"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "the last of 2 machines is number 1"),
        ({"NNODES": "2", "NODE_RANK": "0", "TRAINER_NODES": "3"}, "not between 1 and NNODES=2"),
        ({"NNODES": "2", "NODE_RANK": "0", "RESTARTS": "-1"}, "RESTARTS=-1 is not a whole"),
        ({"NNODES": "0", "NODE_RANK": "0"}, "NNODES=0 is not between 1 and"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "0"}, "MASTER_PORT=0 is not between 1"),
        (
            {
                "NNODES": "2",
                "NODE_RANK": "0",
                "TRAINER_NODES": "1",
                "MASTER_PORT": "7",
                "RAY_PORT": "07",
            },
            "MASTER_PORT and RAY_PORT are both 7",
        ),
        (
            {"NNODES": "1", "NODE_RANK": "0", "VENV": "/nowhere", "PATH": "/usr/bin:/bin"},
            "there is no command mar in /nowhere",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(
    machine: Machine, settings: dict[str, str], said: str
) -> None:
    code, words = machine.run(0, **settings)
    assert (code, machine.lines()) == (2, [])
    assert said in words


def test_a_launcher_without_a_config_is_refused(machine: Machine) -> None:
    code, said = machine.run(0, arguments=(), NNODES="1", NODE_RANK="0")
    assert (code, said) == (2, "torchrun_multinode.sh: no CONFIG given\n")


def test_slurm_binds_no_task_to_a_core() -> None:
    """One task is all ranks and engines of a machine, and their threads."""
    files = [
        file
        for folder in ("launchers", "docs", "examples")
        for file in (LAUNCHERS.parent / folder).rglob("*")
    ]
    commands = [
        line
        for file in files
        if file.suffix in (".sh", ".sbatch", ".md")
        for line in file.read_text().splitlines()
        if re.match(r"(?:[$`]\s*)?srun ", line.strip())
    ]
    assert commands
    assert all(" --cpu-bind=none " in command for command in commands), commands


def test_the_manifest_is_what_kubernetes_takes() -> None:
    manifest = (LAUNCHERS / "kubernetes" / "train.yaml").read_text()
    parts = [*yaml.safe_load_all(manifest)]
    for part in parts:
        validate(part, "1.33", strict=True)
    service, _, job = parts
    spec = job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["NNODES"] == str(spec["completions"]) == str(spec["parallelism"])
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]


def test_skypilots_task_passes_the_machines_number_to_the_launcher(machine: Machine) -> None:
    task = yaml.safe_load((LAUNCHERS / "skypilot" / "train.yaml").read_text())
    script = task["run"].replace("/opt/megatron-async-rl", str(LAUNCHERS.parent))
    machine.codes.write_text("0\n")
    given = {"NUM_NODES": "2", "NODE_RANK": "1", "NODE_IPS": "127.0.0.1\n127.0.0.2"}
    settings = {f"SKYPILOT_{name}": value for name, value in given.items()}
    settings |= {name: str(value) for name, value in task["envs"].items()}
    environment = machine.environment | settings
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=600)
    node = f"--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:{machine.port}"
    assert machine.lines() == [f"mar train /shared/config.yaml {node} RAY_ADDRESS="]
    assert task["num_nodes"] == task["envs"]["TRAINER_NODES"]

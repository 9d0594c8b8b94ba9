"""A real Slurm with two nodes on this machine runs launchers/slurm/train.sbatch; `mar` and `ray`
are stand-ins that write down what they were asked."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.thorough import thorough
from tests.unit.test_launchers import PYTHON, RAY

pytestmark = [
    thorough,
    pytest.mark.faults,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))),
        reason="needs root and Slurm (Debian: slurmctld, slurmd, slurm-client, munge)",
    ),
]
SCRIPT = Path(__file__).parents[2] / "launchers" / "slurm" / "train.sbatch"
MAR = """#!/bin/bash
echo "start $*" >> "$ASKED"
stop() {
  sleep 0.2
  echo "stopped $*" >> "$ASKED"
  exit 130
}
trap 'stop "$@"' TERM
(
  trap 'echo "a rank is killed" >> "$ASKED"' TERM
  while :; do sleep 0.05; done
) &
trap "kill -KILL $!" EXIT
until [[ -e "$GO_ON" ]]; do
  ! grep -q ^stopped "$ASKED" || stop "$@"
  sleep 0.05
done
"""
"""Ends well once the file $GO_ON is there, and before only when it is asked to stop, or another of
the run has been."""
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
SchedulerParameters=requeue_delay=1
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked, self.go_on = folder / "asked", folder / "go_on"
        self.asked.touch()
        commands = folder / "venv" / "bin"
        commands.mkdir(parents=True)
        for name, text in (("mar", MAR), ("ray", RAY), ("python", PYTHON)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "VENV": str(folder / "venv"),
            "ASKED": str(self.asked),
            "GO_ON": str(self.go_on),
            "MASTER_ADDR": "127.0.0.1",
        }

    def daemons(self) -> list[list[str]]:
        port, first, second = free_ports(3)
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname(),
                folder=self.folder,
                port=port,
                first=first,
                second=second,
            )
        )
        (self.folder / "state").mkdir()
        key = self.folder / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        places = [f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "seed", "log")]
        munged = ["munged", "--force", "--foreground", f"--socket={self.folder}/munge.socket"]
        slurmds = [["slurmd", "-D", "-N", node] for node in ("node0", "node1")]
        return [[*munged, f"--key-file={key}", *places], ["slurmctld", "-D"], *slurmds]

    def call(self, *command: str, cwd: Path = SCRIPT.parents[2], **more: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment | more,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, *options: str, **more: str) -> str:
        """Its number."""
        self.asked.write_text("")
        log = f"--output={self.folder}/%A_%a.log"
        return self.call(
            *("sbatch", "--parsable", log, *options, str(SCRIPT), "run.yaml"), **more
        ).split(";")[0]

    def run(self, *options: str, **more: str) -> str:
        """Its number, once it has ended well."""
        job = self.submit(*options, **more)
        self.wait_for_its_end(job)
        return job

    def wait_for_its_end(self, job: str) -> None:
        """And that it has ended well."""
        self.wait_until_over(job)
        states = self.call("scontrol", "--oneliner", "show", "job", job)
        assert set(re.findall(r"\bJobState=(\S+)", states)) == {"COMPLETED"}, states

    def wait_until_over(self, job: str) -> None:
        """`sbatch --wait` would look every ten seconds."""
        self.wait_until(lambda: not self.call("squeue", "--noheader", "--jobs", job))

    def end_jobs(self) -> None:
        self.call("scancel", "--user=root")
        self.wait_until(lambda: not self.call("squeue", "--noheader"))

    def lines(self) -> list[str]:
        return sorted(self.asked.read_text().splitlines())

    def state(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            logs = [path.read_text() for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, (self.lines(), logs)
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    with ExitStack() as stack:
        for command in cluster.daemons():
            output = stack.enter_context(open(cluster.folder / f"{command[0]}.out", "a"))
            daemon = subprocess.Popen(
                command, env=cluster.environment, stdout=output, stderr=output
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            if command[0] == "munged":
                cluster.wait_until((cluster.folder / "munge.socket").exists)
        cluster.wait_until(lambda: cluster.call("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")
        stack.callback(cluster.end_jobs)  # of tests that failed
        yield cluster


@pytest.fixture
def going_on(cluster: Cluster) -> Iterator[None]:
    cluster.go_on.touch()
    yield
    cluster.go_on.unlink()


def test_each_machine_of_a_job_has_its_number_and_the_first_one_s_address(
    cluster: Cluster, going_on: None
) -> None:
    job = cluster.run("--nodes=2")
    port = 20000 + int(job) % 5000
    assert cluster.lines() == [
        f"start train run.yaml --nnodes 2 --node-rank {rank} --rdzv-endpoint 127.0.0.1:{port}"
        for rank in (0, 1)
    ]


def test_scancel_ends_the_run_on_every_machine(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2")
    cluster.wait_until(lambda: len(cluster.lines()) == 2)
    cluster.call("scancel", job)
    cluster.wait_until(lambda: cluster.state(job)["JobState"] == "CANCELLED")
    cluster.wait_until(lambda: sum(line.startswith("stopped") for line in cluster.lines()) == 2)


def test_a_job_is_stopped_for_good_after_its_step(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2")
    cluster.wait_until(lambda: len(cluster.lines()) == 2)
    cluster.call("scancel", "--batch", "--signal", "TERM", job)
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader", "--jobs", job))
    assert [line.partition(" ")[0] for line in cluster.lines()] == [
        *["start"] * 2,
        *["stopped"] * 2,
    ]
    assert cluster.state(job)["Restarts"] == "0"


def test_a_job_whose_time_is_nearly_over_stops_and_continues_when_requeued(
    cluster: Cluster,
) -> None:
    job = cluster.submit("--nodes=2")
    cluster.wait_until(lambda: len(cluster.lines()) == 2)
    # As Slurm does for the script's --signal.
    cluster.call("scancel", "--batch", "--signal", "USR1", job)
    cluster.wait_until(lambda: sum(line.startswith("stopped") for line in cluster.lines()) == 2)
    assert "a rank is killed" not in cluster.lines()
    cluster.go_on.touch()
    try:
        cluster.wait_until(lambda: cluster.state(job)["JobState"] == "PENDING")
        # Slurm has it wait two minutes.
        cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        cluster.wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED")
    finally:
        cluster.go_on.unlink()
    assert cluster.state(job)["Restarts"] == "1"
    assert sum(line.startswith("start") for line in cluster.lines()) == 4


def test_a_job_has_machines_that_train_and_machines_of_engines(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", TRAINER_NODES="1", REJOIN_S="0")
    port = 25000 + int(job) % 5000
    begun = (
        "start train run.yaml --engine-nodes 1",
        f"ray start --address=127.0.0.1:{port} --temp-dir=",
    )
    cluster.wait_until(
        lambda: all(any(line.startswith(one) for line in cluster.lines()) for one in begun)
    )
    cluster.go_on.touch()
    try:
        cluster.wait_until(lambda: "ray TERM" in cluster.lines())
        cluster.wait_for_its_end(job)
    finally:
        cluster.go_on.unlink()


def test_an_array_is_a_run_for_each_seed(cluster: Cluster, going_on: None) -> None:
    cluster.run("--array=3-4", "--nodes=1", RUNS="/runs/math")
    assert cluster.lines() == [
        f"start train run.yaml run.seed={seed} run.dir=/runs/math/seed{seed}" for seed in (3, 4)
    ]


def test_an_array_without_a_folder_for_its_runs_is_refused(cluster: Cluster) -> None:
    job = cluster.submit("--array=3", "--nodes=1")
    cluster.wait_until_over(job)
    assert (cluster.state(job)["ExitCode"], cluster.lines()) == ("2:0", [])
    said = (cluster.folder / f"{job}_3.log").read_text()
    assert said.startswith("train.sbatch: an array needs RUNS, the folder for a run of each seed")


def test_a_job_submitted_from_elsewhere_is_refused_with_the_right_folder(cluster: Cluster) -> None:
    job = cluster.call("sbatch", "--parsable", str(SCRIPT), "run.yaml", cwd=cluster.folder)
    cluster.wait_until_over(job)
    said = (cluster.folder / f"mar-{job}.log").read_text()
    assert f"no launchers/torchrun_multinode.sh in {cluster.folder}: submit it from" in said


def test_a_jobs_log_has_its_number_and_names_the_machine_of_each_line(cluster: Cluster) -> None:
    given = ("--nodes=2", f"--chdir={cluster.folder}", str(SCRIPT), "run.yaml")
    job = cluster.call("sbatch", "--parsable", *given, RAY_PORT="0")
    cluster.wait_until_over(job)
    said = sorted((cluster.folder / f"mar-{job}.log").read_text().splitlines())
    words = "torchrun_multinode.sh: RAY_PORT=0 is not between 1 and 65535"
    assert [line for line in said if words in line] == [f"0: {words}", f"1: {words}"]

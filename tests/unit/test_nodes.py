"""Launchers of several machines meet in the run's directory before anything starts, or say what
does not fit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_async_rl.launch.launcher import environment_of_ranks
from megatron_async_rl.launch.peers import Nodes, NodesError, rank_address
from megatron_async_rl.rollout.cluster import software
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from tests.ports import free_ports

ENDPOINT = "node0:29500"
CONFIG = """
run: {dir: run, steps: 5}
model: {path: model}
data: {train: train.jsonl}
objective: {loss: sft, advantage: none}
flow: {prompts_per_step: 4, group_size: 1, async_ratio: 0}
policy: {parallel: {ranks: 2, tensor: 2}}
"""
LAUNCHER = """
import sys
from pathlib import Path
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.launch.peers import Nodes, NodesError, PeerNodes
from megatron_async_rl.launch.rendezvous import rendezvous
from megatron_async_rl.watchdog import watch
watch.BEAT_S = 0.1
config = load(Path(sys.argv[1]), sys.argv[7:])
nodes = Nodes(int(sys.argv[2]), int(sys.argv[3]), sys.argv[6])
peers = PeerNodes(nodes)
if nodes.rank == 0:
    config.run.dir.mkdir(exist_ok=True)
    (config.run.dir / "config.yaml").write_text(dump(config))
try:
    print(rendezvous(nodes, config, float(sys.argv[4]), peers), flush=True)
except NodesError as error:
    peers.refuse(str(error), within_s=float(sys.argv[5]))
    sys.exit(str(error))
sys.stdin.read()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(count, rank, timeout_s, *overrides)`: a launcher that meets the others, prints the id
    of the start and stays. One that fails tells the others for up to `tell_s` seconds. `before`:
    code that it runs first; `node_0`: where it looks for node 0, if not where that is."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    started: list[subprocess.Popen[str]] = []
    endpoint = f"localhost:{free_ports(1)[0]}"

    def begin(
        count: int,
        rank: int,
        timeout_s: float,
        *overrides: str,
        tell_s: float = 10.0,
        before: str = "",
        node_0: str = endpoint,
    ) -> subprocess.Popen[str]:
        numbers = map(str, (count, rank, timeout_s, tell_s))
        command = [
            sys.executable,
            "-c",
            before + LAUNCHER,
            str(tmp_path / "config.yaml"),
            *numbers,
            node_0,
            *overrides,
        ]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """Last line of the output, once the process has ended."""
    _, error = process.communicate(timeout=600)
    assert process.returncode == 1
    return error


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_meet_whoever_comes_first_and_agree_on_the_start(start: Start, first: int) -> None:
    nodes = {first: start(2, first, 600)}
    nodes[1 - first] = start(2, 1 - first, 600)
    assert len(agreed := line(nodes[0])) > 32
    assert line(nodes[1]) == agreed


def test_node_0_names_the_nodes_that_did_not_come(start: Start, tmp_path: Path) -> None:
    error = said(start(3, 0, 0.5, tell_s=0.1))
    assert "nodes 1, 2 of 3\n  timed out after 0.5 s" in error
    assert str(tmp_path / "run") in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_is_not_deceived_by_what_a_killed_launcher_left(
    start: Start, tmp_path: Path, rank: int
) -> None:
    watch, other = tmp_path / "run" / "watch", 1 - rank
    watch.mkdir(parents=True)
    left = {
        "name": f"launcher {other}",
        "pid": 1,
        "host": "h",
        "time": time.time(),
        "facts": {"start": "old", "nodes": 2},
    }
    (watch / f"launcher {other}.json").write_text(json.dumps(left))
    error = said(start(2, rank, 1, tell_s=0.1))
    assert f"node {other}" in error
    assert "timed out after 1 s" in error


OLDER = """
from megatron_async_rl.launch import rendezvous
here = rendezvous.software()
rendezvous.software = lambda: here | {"torch": "2.12.0"}
"""


@pytest.mark.parametrize(
    ("count", "overrides", "before", "words"),
    [
        (3, [], "", "3 here, 2 on node 0 ("),
        (2, ["run.steps=6"], "", "`steps: 6` here, `steps: 5` there"),
        (2, [], OLDER, f"): torch 2.12.0 here and {software()['torch']} there"),
    ],
    ids=["nnodes", "config", "versions"],
)
def test_a_node_that_was_started_otherwise_says_how_and_node_0_hears_it(
    start: Start, count: int, overrides: list[str], before: str, words: str
) -> None:
    zero = start(2, 0, 600)
    assert words in said(start(count, 1, 600, *overrides, tell_s=600, before=before))
    heard = said(zero)
    assert heard.startswith(f"node 1 ({socket.gethostname()})\n  does not start")
    assert words in heard


def test_a_node_that_does_not_reach_the_endpoint_says_so_and_node_0_reads_it(start: Start) -> None:
    zero = start(2, 0, 600, tell_s=0.1)
    nobody = f"localhost:{free_ports(1)[0]}"
    soon = "from megatron_async_rl.launch import peers\npeers.REACH_S = 0.5\n"
    one = start(2, 1, 600, tell_s=600, before=soon, node_0=nobody)
    heard = said(zero)
    assert heard.startswith(f"node 1 ({socket.gethostname()})\n  does not start:\n")
    assert f"does not reach node 0 at {nobody}: [Errno 111]" in heard
    assert "MASTER_ADDR" in heard
    one.kill()


DEAF = """
import socket
deaf = socket.socket()
deaf.bind(("127.0.0.1", 0))
socket.create_server = lambda *_, **__: deaf
"""


def test_a_node_whose_ranks_would_not_be_reached_is_refused_by_node_0(start: Start) -> None:
    zero = start(2, 0, 600, tell_s=600)
    heard = said(start(2, 1, 600, tell_s=0, before=DEAF))
    for words in (said(zero), heard):
        assert "its ranks will listen at 127.0.0.1, which is every machine's own address" in words
        assert f"and node 0 ({socket.gethostname()}) does not reach that: [Errno 111]" in words
        assert "set GLOO_SOCKET_IFNAME there" in words


def test_ranks_listen_where_gloo_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert rank_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(NodesError, match=r"ib7 is not an interface of .*\n  fix: set it .*: .*lo"):
        rank_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-machine.invalid")
    assert rank_address() == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.7")
    assert rank_address() == "127.0.0.7"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2, ENDPOINT), "the last of 2 nodes.*is number 1"),
        ((2, 1), "--rdzv-endpoint\n  is missing"),
        ((2, 1, "node0"), "HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, int, str], words: str) -> None:
    with pytest.raises(NodesError, match=words):
        Nodes(*arguments)


def test_each_node_starts_its_share_of_the_ranks() -> None:
    second = Nodes(2, 1, "[fd00::1]:29500").torchrun(8, "abc", "fd00::1")
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-id=abc", "--rdzv-conf=rank=1"} < set(second)
    assert "--rdzv-endpoint=[fd00::1]:29500" in second
    alone = Nodes().torchrun(8, "abc")
    assert {"--nnodes=1", "--nproc-per-node=8", "--rdzv-endpoint=127.0.0.1:0"} < set(alone)


def test_what_ranks_want_in_their_environment_is_theirs_unless_somebody_has_set_it() -> None:
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for given, then in (({}, "1"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8")):
        ranks = environment_of_ranks(given, "id", wanted)
        assert (ranks["CUDA_DEVICE_MAX_CONNECTIONS"], ranks[RUN_ID_VARIABLE]) == (then, "id")

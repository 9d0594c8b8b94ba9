"""Launchers of several machines meet before anything starts, or report what does not fit."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_async_rl.config.load import load
from megatron_async_rl.launch import rendezvous
from megatron_async_rl.launch.addresses import Nodes, NodesError
from megatron_async_rl.launch.rendezvous import PeerNodes, RankStore
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.progress_monitor import write_whole
from tests.ports import free_ports

CONFIG = """
run: {dir: run, steps: 5}
model: {path: model}
data: {train: train.jsonl}
objective: {loss: sft, advantage: none}
flow: {prompts_per_step: 4, group_size: 1, async_ratio: 0}
policy: {parallel: {ranks: 2, tensor: 2}}
"""
WHY = "config.yaml: 1 problem\nrun.steeps: unknown key"
PATIENT_S = 600.0
VERSIONS = {"torch": "2.13.0"}


def in_a_thread(act: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


class Launchers:
    """Launchers of one run, each in a thread. All have the directory and the state file of the
    first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self.made: list[PeerNodes] = []

    def peers(self, rank: int, count: int = 2, port: int | None = None) -> PeerNodes:
        peers = PeerNodes(Nodes(count, rank, f"localhost:{port or self.port}"))
        self.made.append(peers)
        return peers

    def start(
        self, rank: int, *overrides: str, count: int = 2, timeout_s: float = PATIENT_S
    ) -> Future[RankStore]:
        """Begin a launcher as `mar train` does: a failure is reported to the others."""
        peers = self.peers(rank, count)
        config = load(self.folder / "config.yaml", overrides)

        def launch() -> RankStore:
            try:
                return peers.meet(config, timeout_s)
            except NodesError as error:
                peers.refuse(str(error), within_s=PATIENT_S if timeout_s == PATIENT_S else 0.1)
                raise

        return in_a_thread(launch)

    def client(self) -> TCPStore:
        return TCPStore("localhost", self.port, is_master=False, wait_for_workers=False)


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    monkeypatch.setattr(rendezvous, "POLL_S", 0.01)
    monkeypatch.setattr(rendezvous, "software", lambda: VERSIONS)
    monkeypatch.setattr(watch._process, "facts", {})
    monkeypatch.delenv(watch.INHERITED, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "config.yaml").write_text(CONFIG)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = Launchers(tmp_path)
    yield made
    for peers in made.made:
        peers.close()
    watch.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def error_of(launcher: Future[Any]) -> str:
    with pytest.raises(NodesError) as raised:
        launcher.result(PATIENT_S)
    return str(raised.value)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write_state(folder: Path, name: str, **facts: object) -> None:
    (folder / "run" / "watch").mkdir(parents=True, exist_ok=True)
    state = {"name": name, "pid": 1, "host": "h", "time": time.time(), "facts": facts}
    # Whole: the launchers read the file while it is written again.
    write_whole(folder / "run" / "watch" / f"{name}.json", json.dumps(state))


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_meet_in_any_order_of_arrival(launchers: Launchers, first: int) -> None:
    nodes = {first: launchers.start(first)}
    nodes[1 - first] = launchers.start(1 - first)
    zero, one = (nodes[rank].result(PATIENT_S) for rank in (0, 1))
    assert (zero.start, zero.address, zero.port) == (one.start, one.address, one.port)
    assert len(zero.start) == 32
    assert one.listener is None
    with zero.listener as listener:
        assert listener.getsockname()[:2] == (zero.address, zero.port)
        socket.create_connection((one.address, one.port), PATIENT_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", launchers.port), PATIENT_S)


def test_a_node_waits_for_the_last_one_and_shows_why_that_does_not_start(
    launchers: Launchers,
) -> None:
    zero, one = (launchers.start(rank, count=3) for rank in (0, 1))
    until(lambda: launchers.client().check(["node 1"]))
    assert not one.done()
    two = in_a_thread(lambda: launchers.peers(2, 3).refuse(WHY, within_s=PATIENT_S))
    for launcher in (zero, one):
        shown = error_of(launcher)
        assert shown.startswith(f"node 2 ({socket.gethostname()})\n  does not start:\n")
        assert "\n    config.yaml: 1 problem\n    run.steeps: unknown key\n  fix: correct" in shown
    two.result(PATIENT_S)


def test_a_refusal_before_node_0_listens_is_heard_by_all(launchers: Launchers) -> None:
    first = in_a_thread(lambda: launchers.peers(1, 3).refuse(WHY, within_s=PATIENT_S))
    two = launchers.start(2, count=3)
    time.sleep(0.05)
    for launcher in (launchers.start(0, count=3), two):
        assert error_of(launcher).startswith(f"node 1 ({socket.gethostname()})\n  does not start")
    first.result(PATIENT_S)


def test_a_node_that_no_other_waits_for_ends(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses a clock that only its own waits move."""
    waits = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(rendezvous, "time", clock)
    for rank in (1, 0):
        before = sum(waits)
        launchers.peers(rank).refuse(WHY, within_s=5)
        assert 5 <= sum(waits) - before < 6
    before = sum(waits)
    PeerNodes(Nodes()).refuse(WHY)
    assert sum(waits) == before


def test_node_0_names_the_nodes_that_did_not_come(launchers: Launchers) -> None:
    error = error_of(launchers.start(0, count=3, timeout_s=0.1))
    assert "nodes 1, 2 of 3\n  timed out after 0.1 s" in error
    assert f"all nodes must see {launchers.folder / 'run'}" in error


@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_a_killed_launcher_misleads_no_other(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(rendezvous, "REACH_S", 0.05)
    write_state(launchers.folder, f"launcher {1 - rank}", start="old", unreached="it does not")
    error = error_of(launchers.start(rank, timeout_s=0.3))
    assert f"node {1 - rank}" in error
    assert "timed out after 0.3 s" in error


def test_a_node_that_was_started_otherwise_is_refused_and_node_0_shows_why(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [VERSIONS, VERSIONS | {"torch": "2.12.0"}]
    for count, override, newer, words in (
        (3, (), 0, "3 here, 2 on node 0 ("),
        (2, ("run.steps=6",), 0, "`steps: 6` here, `steps: 5` there"),
        (2, (), 1, "): torch 2.12.0 here and 2.13.0 there"),
    ):
        zero = launchers.start(0)
        until(lambda: launchers.client().check(["node 0"]))
        monkeypatch.setattr(rendezvous, "software", lambda newer=newer: versions[newer])
        assert words in error_of(launchers.start(1, *override, count=count)), words
        monkeypatch.setattr(rendezvous, "software", lambda: VERSIONS)
        shown = error_of(zero)
        assert shown.startswith(f"node 1 ({socket.gethostname()})\n  does not start")
        assert words in shown


def test_a_node_with_another_directory_is_refused(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_launcher", lambda *_: None)
    monkeypatch.setattr(rendezvous, "SHARED_S", 0.05)
    zero, one = launchers.start(0), launchers.start(1)
    for launcher in (one, zero):
        words = f"run on node 1 ({socket.gethostname()}) is not the directory of node 0"
        assert words in error_of(launcher)


def test_a_node_that_does_not_reach_the_endpoint_reports_it_in_the_directory(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of node 0 refuses connections, or accepts them and stays silent."""
    # Long enough for a beat on a busy machine.
    monkeypatch.setattr(rendezvous, "REACH_S", 1.5)
    monkeypatch.setattr(rendezvous, "CALL_S", 0.2)
    monkeypatch.setattr(watch, "start", lambda *_: None)
    beating = threading.Event()
    config = load(launchers.folder / "config.yaml", ())

    def beat() -> None:
        while not beating.wait(0.02):
            write_state(launchers.folder, "launcher 0", start="this")

    beats = in_a_thread(beat)
    with socket.create_server(("localhost", 0)) as silent:
        for port, reason in (
            (launchers.port, "[Errno 111] Connection refused"),
            (silent.getsockname()[1], "no answer within 0.2 s"),
        ):
            peers = launchers.peers(1, port=port)
            shown = error_of(in_a_thread(lambda peers=peers: peers.meet(config, PATIENT_S)))
            assert f"does not reach node 0 at localhost:{port}: {reason}" in shown
            assert "MASTER_ADDR" in shown
            facts = watch.state()["facts"]
            assert facts == {"start": "this", "unreached": shown}
        monkeypatch.setattr(rendezvous, "CALL_S", PATIENT_S)
        began = time.monotonic()
        launchers.peers(1, port=port).refuse(WHY, within_s=0.1)
        assert time.monotonic() - began < PATIENT_S / 2, "a silent server holds no node"
    beating.set()
    beats.result(PATIENT_S)


def test_node_0_reads_in_the_directory_that_a_node_does_not_reach_it(launchers: Launchers) -> None:
    zero = launchers.start(0, timeout_s=PATIENT_S - 1)
    client = launchers.client()
    until(lambda: client.check(["node 0"]))
    start = json.loads(client.get("node 0"))["start"]
    write_state(launchers.folder, "launcher 1", start=start, unreached="cannot reach it")
    assert error_of(zero).startswith("node 1 (h)\n  does not start:\n    cannot reach it")


def test_a_node_whose_ranks_would_not_be_reached_is_refused(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = launchers.start(0)
    until(lambda: launchers.client().check(["node 0"]))
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    monkeypatch.setattr(rendezvous, "listen", lambda _: deaf)
    for launcher in (zero, launchers.start(1)):
        shown = error_of(launcher)
        assert "its ranks will listen at 127.0.0.1, which is every machine's own" in shown
        assert f"and node 0 ({socket.gethostname()}) does not reach that: [Errno 111]" in shown
        assert "set GLOO_SOCKET_IFNAME there to the network that all nodes have (such as lo)" in (
            shown
        )


GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01" + bytes(200),
    b"\xff\n",
    b"\0\xce\xf7",  # half of what torch's clients begin with
    b"\0\xce\xf7\x85\x3c\x01" + b"\xff" * 8,  # and a key of 2^64 bytes after the whole of it
    b"",
)


def test_strangers_disturb_no_node(launchers: Launchers) -> None:
    zero = launchers.start(0)
    with contextlib.ExitStack() as open_ones:
        for content in GARBAGE:
            stranger = socket.create_connection(("localhost", launchers.port), PATIENT_S)
            open_ones.enter_context(stranger).sendall(content)
        client = launchers.client()
        for key, value in (("node 1", "{"), ("node 1", '{"node": 1}'), ("refusal", "[]")):
            client.set(key, value)
        client.delete_key("refusal")
        one = launchers.start(1)
        assert zero.result(PATIENT_S).start == one.result(PATIENT_S).start


def test_idle_connections_do_not_take_the_files_of_node_0(launchers: Launchers) -> None:
    limit = psutil.Process().num_fds() + 60
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    zero = launchers.start(0)
    with contextlib.ExitStack() as strangers:
        for _ in range(limit):  # both ends of each are open in this process
            stranger = socket.create_connection(("localhost", launchers.port), PATIENT_S)
            strangers.enter_context(stranger)
        one = launchers.start(1)
        assert zero.result(PATIENT_S).start == one.result(PATIENT_S).start


def test_a_taken_port_is_reported_and_a_released_one_is_free(launchers: Launchers) -> None:
    zero = launchers.peers(0)
    with pytest.raises(
        NodesError, match=r"port \d+ is already in use on this machine\n  fix: name a free port"
    ):
        launchers.peers(0)
    one = launchers.start(1)
    zero.close()
    later = launchers.peers(0)
    later.refuse(WHY, within_s=PATIENT_S)
    assert error_of(one).startswith("node 0 (")


def test_one_machine_meets_no_other_and_needs_no_torch(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_load_torch", "serve_store", "software"):
        monkeypatch.delattr(rendezvous, name)
    alone = PeerNodes(Nodes()).meet(load(launchers.folder / "config.yaml", ()), PATIENT_S)
    with alone.listener as listener:
        assert listener.getsockname() == ("127.0.0.1", alone.port)
    assert (launchers.folder / "run/watch/launcher 0.json").exists()


def test_each_node_starts_its_share_of_the_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        zero = RankStore("abc", "127.0.0.1", 29500, listener).torchrun(Nodes(), 8)
        assert f"--rdzv-conf=rank=0,descriptor={listener.fileno()}" in zero
    assert {"--nnodes=1", "--nproc-per-node=8", "--rdzv-endpoint=127.0.0.1:29500"} < set(zero)
    nodes = Nodes(2, 1, "node0:29500")
    second = RankStore("abc", "fd00::1", 4711, None).torchrun(nodes, 8)
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-id=abc", "--rdzv-conf=rank=1"} < set(second)
    assert "--rdzv-endpoint=[fd00::1]:4711" in second

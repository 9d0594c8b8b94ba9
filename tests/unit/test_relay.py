"""Weights over real TCP connections: whole, resumed, asked for again, refused."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from megatron_async_rl.watchdog.run_folder import WEIGHTS_PREFIX
from megatron_async_rl.weights import relay, relay_server
from megatron_async_rl.weights.manifest import BucketRef, Manifest, StagedCopy
from megatron_async_rl.weights.relay import WeightAgent
from megatron_async_rl.weights.relay_server import Address, RelayFailed, RelayServer, requested
from megatron_async_rl.weights.shared_memory import BucketFile, BucketReader, SharedMemory
from megatron_async_rl.weights.staging import Staging
from tests.staged import stage

PATIENT_S = 600.0
SIZE = 300_000
"""Elements of the large tensor: 1.2 MB, more than the kernel keeps for a connection."""


@dataclass
class Machines:
    """Rank 0's, which stages and serves, and another one with an agent."""

    staging: Staging
    server: RelayServer
    here: Path
    there: Path
    agents: list[WeightAgent] = field(default_factory=list)

    def agent(self, address: Address | None = None, silence_s: float = PATIENT_S) -> WeightAgent:
        address = address or self.server.address
        self.agents.append(WeightAgent(address, SharedMemory(self.there), silence_s=silence_s))
        return self.agents[-1]

    def stage(self, version: int, buckets: int = 2) -> Manifest:
        manifest = stage(self.staging, version, weights(version, buckets))
        self.server.stage(version, manifest)
        return manifest

    def files(self) -> set[str]:
        return {str(path) for path in self.there.glob(f"{WEIGHTS_PREFIX}*")}


def weights(version: int, buckets: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [
        {
            f"odd{number}": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
            f"large{number}": torch.randn(SIZE, generator=generator),
            f"empty{number}": torch.empty(0, 4),
        }
        for number in range(buckets)
    ]


def read(copy: StagedCopy) -> dict[str, torch.Tensor]:
    reader = BucketReader()
    return {n: t.clone() for ref in copy.manifest.buckets for n, t in reader.read(ref)}


def require_version(copy: StagedCopy, version: int, buckets: int = 2) -> None:
    sent = {name: tensor for bucket in weights(version, buckets) for name, tensor in bucket.items()}
    found = read(copy)
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    server = RelayServer("127.0.0.1", silence_s=PATIENT_S)
    both = Machines(Staging(SharedMemory(here)), server, here, there)
    try:
        yield both
    finally:
        server.close()
        both.staging.close()
        for agent in both.agents:
            agent.close()


@dataclass
class Line:
    """A line between agent and server that a test can cut, damage and hold up.

    forward: (number of the connection, bytes that the agent got on it so far, the server's next
    ones) -> what the agent gets of these; None cuts the connection. sent: bytes that the agent got
    on each. released: set at the end, for a `forward` that holds a connection up.
    """

    server: Address
    forward: Callable[[int, int, bytes], bytes | None]
    sent: list[int] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> Address:
        return replace(self.server, port=self._listener.getsockname()[1])

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                agent, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.sent.append(0)
            number = len(self.sent) - 1
            threading.Thread(target=self._carry, args=(number, agent), daemon=True).start()

    def _carry(self, number: int, agent: socket.socket) -> None:
        server = socket.create_connection((self.server.host, self.server.port))
        threading.Thread(target=self._back, args=(agent, server), daemon=True).start()
        with agent, server:
            while piece := server.recv(65536):
                passed = self.forward(number, self.sent[number], piece)
                if passed is None:
                    agent.shutdown(socket.SHUT_RDWR)
                    return
                try:
                    agent.sendall(passed)
                except OSError:  # the agent has gone
                    return
                self.sent[number] += len(passed)

    @staticmethod
    def _back(agent: socket.socket, server: socket.socket) -> None:
        try:
            while piece := agent.recv(65536):
                server.sendall(piece)
        except OSError:  # one of them has gone
            return


@contextmanager
def line(machines: Machines, forward: Callable[[int, int, bytes], bytes | None]) -> Iterator[Line]:
    between = Line(machines.server.address, forward)
    between.open()
    try:
        yield between
    finally:
        between.close()


PREAMBLE = 32 + 12
"""Bytes that the server sends before those of the bucket: its nonce and its answer."""


def test_a_version_arrives_whole_in_the_other_machines_memory(machines: Machines) -> None:
    manifest = machines.stage(1, buckets=6)
    copy = machines.agent().fetch(1, manifest)
    require_version(copy, 1, buckets=6)
    assert copy.manifest.digests == manifest.digests
    assert copy.nbytes == sum(ref.size for ref in manifest.buckets)
    assert {ref.path for ref in copy.manifest.buckets} == machines.files()


def test_a_broken_transfer_continues_at_the_byte_where_it_stopped(machines: Machines) -> None:
    def cut_twice(number: int, sent: int, piece: bytes) -> bytes | None:
        stop = PREAMBLE + (400_000, 150_000)[number] if number < 2 else None
        if stop is not None and sent >= stop:
            return None
        return piece if stop is None else piece[: stop - sent]

    manifest = machines.stage(1, buckets=1)
    with line(machines, cut_twice) as between:
        copy = machines.agent(between.address).fetch(1, manifest)
    require_version(copy, 1, buckets=1)
    rest = copy.nbytes - 550_000
    assert between.sent == [PREAMBLE + 400_000, PREAMBLE + 150_000, PREAMBLE + rest]


def test_a_bucket_that_arrives_damaged_is_asked_for_once_more(machines: Machines) -> None:
    def damage_the_first(number: int, sent: int, piece: bytes) -> bytes:
        return flipped(sent, piece) if number == 0 else piece

    manifest = machines.stage(1, buckets=1)
    with line(machines, damage_the_first) as between:
        copy = machines.agent(between.address).fetch(1, manifest)
    require_version(copy, 1, buckets=1)
    assert copy.nbytes == 2 * manifest.buckets[0].size
    assert len(between.sent) == 2


def test_a_bucket_that_arrives_damaged_twice_is_no_copy(machines: Machines) -> None:
    manifest = machines.stage(1, buckets=1)
    with line(machines, lambda number, sent, piece: flipped(sent, piece)) as between:
        with pytest.raises(RelayFailed, match="arrived damaged twice: tensor large0 is not"):
            machines.agent(between.address).fetch(1, manifest)
        assert len(between.sent) == 2


def flipped(sent: int, piece: bytes) -> bytes:
    """Byte 500,000 of what the server sends comes with another lowest bit."""
    at = 500_000 - sent
    if not 0 <= at < len(piece):
        return piece
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


def test_another_key_opens_nothing(machines: Machines) -> None:
    manifest = machines.stage(1)
    other = replace(machines.server.address, key=bytes(32))
    with pytest.raises(RelayFailed, match="refused: the key is not this run's"):
        machines.agent(other).fetch(1, manifest)


def test_the_key_is_in_no_message_and_on_no_line(machines: Machines) -> None:
    manifest, said = machines.stage(1, buckets=1), b""

    def listen(number: int, sent: int, piece: bytes) -> bytes:
        nonlocal said
        said += piece
        return piece

    with line(machines, listen) as between:
        machines.agent(between.address).fetch(1, manifest)
    key = machines.server.address.key
    assert key not in said
    assert repr(key) not in repr(machines.server.address)


def test_a_recorded_request_opens_nothing(machines: Machines) -> None:
    """Its nonce was another connection's."""
    machines.stage(1)
    address, recorded = machines.server.address, bytearray()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        eavesdropper = replace(address, port=listener.getsockname()[1])
        asking = threading.Thread(target=ask_in_vain, args=(eavesdropper,))
        asking.start()
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(32))
            while len(recorded) < 32 + 24:
                recorded += connection.recv(56)
        asking.join(PATIENT_S)

    with socket.create_connection((address.host, address.port)) as again:
        again.settimeout(PATIENT_S)
        again.recv(32, socket.MSG_WAITALL)
        again.sendall(recorded)
        assert b"the key is not this run's" in again.recv(1000)


def ask_in_vain(address: Address) -> None:
    with pytest.raises(ConnectionError):
        requested(address, 1, 0, 0, silence_s=PATIENT_S)


@pytest.mark.parametrize(
    ("version", "bucket", "first", "reason"),
    [
        (7, 0, 0, "version 7 is not staged; staged: 1"),
        (1, 2, 0, "version 1 has 2 buckets, no 2"),
        (1, 0, 10**9, "bytes, no byte 1000000000"),
    ],
)
def test_what_is_not_staged_is_refused_with_the_reason(
    machines: Machines, version: int, bucket: int, first: int, reason: str
) -> None:
    machines.stage(1)
    with pytest.raises(RelayFailed, match=reason):
        requested(machines.server.address, version, bucket, first, silence_s=PATIENT_S)


def test_a_version_whose_place_may_be_written_is_served_no_more(machines: Machines) -> None:
    old = machines.stage(1)
    machines.stage(2)
    agent = machines.agent()
    require_version(agent.fetch(1, old), 1)
    machines.server.release(2)
    with pytest.raises(RelayFailed, match="version 1 is not staged; staged: 2"):
        agent.fetch(1, old)


def test_a_server_that_stands_still_is_given_up(machines: Machines) -> None:
    def stand_still(number: int, sent: int, piece: bytes) -> bytes:
        if sent >= PREAMBLE + 100_000 or number > 0:
            between.released.wait()
        return piece

    manifest = machines.stage(1, buckets=1)
    with line(machines, stand_still) as between:
        agent = machines.agent(between.address, silence_s=0.4)
        stands = r"stopped at byte \d+ of \d+: 3 connections .* received nothing"
        with pytest.raises(RelayFailed, match=stands):
            agent.fetch(1, manifest)


def test_a_server_that_is_gone_is_given_up(machines: Machines) -> None:
    manifest = machines.stage(1, buckets=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = replace(machines.server.address, port=listener.getsockname()[1])
    with pytest.raises(RelayFailed, match=r"stopped at byte 0 of .*[Rr]efused"):
        machines.agent(nobody).fetch(1, manifest)


def test_a_closed_server_refuses_connections(machines: Machines) -> None:
    address = machines.server.address
    machines.server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


def test_a_silent_peer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the limit on each wait ends the connection, not the one on the proof of the key.
    monkeypatch.setattr(relay_server._RelayTcpServer, "admission_s", math.inf)
    server = RelayServer("127.0.0.1", silence_s=0.1)
    try:
        with socket.create_connection((server.address.host, server.address.port)) as peer:
            peer.settimeout(PATIENT_S)
            said = b""
            while piece := peer.recv(100):
                said += piece
            assert len(said) == 32, "its nonce, and then the end"
    finally:
        server.close()


def test_an_error_of_the_server_itself_is_in_its_log(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("odd")

    server = machines.server
    connection = ("192.0.2.7", 4711)
    try:
        broken()
    except ZeroDivisionError:
        server._server.handle_error(None, connection)
    (record,) = [one for one in caplog.records if one.exc_info is not None]
    assert record.getMessage() == f"the relay's connection to {connection} failed"
    assert record.exc_info[0] is ZeroDivisionError


def test_a_transfer_continues_while_a_newer_version_is_staged(machines: Machines) -> None:
    newer: list[Manifest] = []

    def stage_meanwhile(number: int, sent: int, piece: bytes) -> bytes:
        if not newer and sent > PREAMBLE + 500_000:
            newer.append(machines.stage(2, buckets=1))
        return piece

    manifest = machines.stage(1, buckets=1)
    with line(machines, stage_meanwhile) as between:
        agent = machines.agent(between.address)
        require_version(agent.fetch(1, manifest), 1, buckets=1)
        require_version(agent.fetch(2, newer[0]), 2, buckets=1)


def test_two_versions_are_there_and_a_third_takes_the_olders_place(machines: Machines) -> None:
    agent = machines.agent()
    copies = [agent.fetch(version, machines.stage(version)) for version in (1, 2)]
    for version, copy in zip((1, 2), copies, strict=True):
        require_version(copy, version)
    places = [[ref.path for ref in copy.manifest.buckets] for copy in copies]
    assert machines.files() == {*places[0], *places[1]}
    third = agent.fetch(3, machines.stage(3))
    assert [ref.path for ref in third.manifest.buckets] == places[0]
    require_version(third, 3)
    require_version(copies[1], 2)


def test_a_fetch_that_failed_leaves_the_version_before_and_can_be_made_again(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = machines.agent()
    first = agent.fetch(1, machines.stage(1))
    second = machines.stage(2)
    wrong = replace(second, digests={**second.digests, "odd1": "another"})
    with pytest.raises(RelayFailed, match="tensor odd1"):
        agent.fetch(2, wrong)
    require_version(first, 1)
    require_version(agent.fetch(2, second), 2)
    require_version(first, 1)


def test_more_buckets_than_go_at_a_time_all_arrive(machines: Machines) -> None:
    count = 3 * relay.AT_ONCE
    require_version(machines.agent().fetch(1, machines.stage(1, count)), 1, count)


def test_closed_agents_leave_no_file(machines: Machines) -> None:
    agent = machines.agent()
    agent.fetch(1, machines.stage(1))
    assert machines.files()
    agent.close()
    assert machines.files() == set()


def test_a_bucket_of_another_size_is_refused_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bucket"
    path.write_bytes(bytes(10))
    server = RelayServer("127.0.0.1", PATIENT_S)
    try:
        ref = BucketRef(path=str(path), size=12, nbytes=12, entries=())
        server.stage(3, Manifest(buckets=(ref,), digests={}))
        with pytest.raises(RelayFailed) as raised:
            requested(server.address, 3, 0, 0, silence_s=PATIENT_S)
        assert str(raised.value) == (
            f"the weights' server at {server.address} refused: {path} holds 10 bytes, its manifest"
            " has 12"
        )
    finally:
        server.close()
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(relay, "requested", lambda *_, silence_s: (ours, 11))
    agent = WeightAgent(server.address, SharedMemory(tmp_path), silence_s=PATIENT_S)
    file = BucketFile(tmp_path, 12)
    with theirs, pytest.raises(RelayFailed) as raised:
        agent._receive(3, 0, replace(ref, path=file.path))
    assert str(raised.value) == (
        f"bucket 0 of version 3 has 12 bytes, and the server at {server.address} has 11 from byte 0"
        " on"
    )
    agent.close()
    file.close()

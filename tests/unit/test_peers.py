"""A node that does not start notifies the nodes that wait for it, whatever the order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_async_rl.launch import peers as peers_module
from megatron_async_rl.launch.peers import Nodes, NodesError, PeerNodes
from tests.ports import free_ports

WHY = "config.yaml: 1 problem\nrun.steeps: unknown key"


@pytest.fixture
def node() -> Callable[[int], Nodes]:
    """`node(rank)`: of three."""
    (port,) = free_ports(1)
    return lambda rank: Nodes(3, rank, f"localhost:{port}")


def heard(peers: PeerNodes) -> str:
    deadline = time.monotonic() + 600
    while (error := peers.refusal()) is None:
        assert time.monotonic() < deadline
    return str(error)


def in_a_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_node_0_hears_a_node_that_spoke_before_it_listened_and_the_third_hears_it_from_node_0(node):
    first = in_a_thread(lambda: PeerNodes(node(1)).refuse(WHY, within_s=600))
    third = PeerNodes(node(2))
    assert third.refusal() is None
    zero = PeerNodes(node(0))
    said = heard(zero)
    assert said.startswith(f"node 1 ({socket.gethostname()})\n  does not start:\n")
    assert "\n    config.yaml: 1 problem\n    run.steeps: unknown key\n  fix: correct" in said
    passing_on = in_a_thread(lambda: zero.refuse(said, within_s=600))
    passed_on = heard(third)
    assert passed_on.startswith("node 0 (")
    assert "node 1 (" in passed_on
    for thread in (first, passing_on):
        thread.join(600)
        assert not thread.is_alive()
    third.close()


def test_a_node_that_nobody_waits_for_ends(node, monkeypatch):
    """The test uses a clock that only its own waits move."""
    waits = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(peers_module, "time", clock)
    for rank in (1, 0):
        before = sum(waits)
        PeerNodes(node(rank)).refuse(WHY, within_s=5)
        assert 5 <= sum(waits) - before < 6
    before = sum(waits)
    PeerNodes(Nodes()).refuse(WHY)
    assert sum(waits) == before


def test_what_a_stranger_sends_is_no_refusal_and_does_not_hide_one(node):
    zero = PeerNodes(node(0))
    for content in (b"GET / HTTP/1.1\r\n\r\n", b'{"node": 1}\n', b"\xff\n", b"[]\n", b""):
        with socket.create_connection(("localhost", node(0).port), 600) as stranger:
            stranger.sendall(content)
            assert zero.refusal() is None
    first = in_a_thread(lambda: PeerNodes(node(1)).refuse(WHY, within_s=600))
    assert "node 1 (" in heard(zero)
    first.join(600)
    zero.close()


def test_a_port_that_is_taken_is_said_and_one_that_was_given_back_is_free(node):
    zero = PeerNodes(node(0))
    with pytest.raises(
        NodesError, match=r"port \d+ is already in use on this machine\n  fix: name a free port"
    ):
        PeerNodes(node(0))
    waiting = PeerNodes(node(1))
    assert waiting.refusal() is None
    zero.close()
    later = PeerNodes(node(0))
    telling = in_a_thread(lambda: later.refuse(WHY, within_s=600))
    assert "node 0 (" in heard(waiting)
    later.close()
    telling.join(600)
    waiting.close()

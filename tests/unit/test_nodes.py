"""The machines of a run: their numbers, their addresses and the environment of their ranks."""

from __future__ import annotations

import socket

import pytest

from megatron_async_rl.launch.addresses import Nodes, NodesError, rank_address
from megatron_async_rl.launch.launcher import environment_of_ranks
from megatron_async_rl.plan.layout import PLANNED_DEVICE
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE

ENDPOINT = "node0:29500"


def test_ranks_listen_on_gloos_interface(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_ranks_want_in_their_environment_is_theirs_unless_somebody_has_set_it() -> None:
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for given, then in (({}, "1"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8")):
        ranks = environment_of_ranks(given, "id", wanted)
        assert (ranks["CUDA_DEVICE_MAX_CONNECTIONS"], ranks[RUN_ID_VARIABLE]) == (then, "id")


def test_ranks_on_a_cpu_see_no_gpu() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    on_cpu = environment_of_ranks(given, "id", {})
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    on_cuda = environment_of_ranks(given, "id", {PLANNED_DEVICE: "cuda"})
    assert on_cuda["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in environment_of_ranks({}, "id", {PLANNED_DEVICE: "cuda"})

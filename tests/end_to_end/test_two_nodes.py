"""A run over two machines, imitated on one, that goes well, and one in which a rank stops."""

from __future__ import annotations

import json
import socket

import pytest

from tests.end_to_end.conftest import SYNCHRONOUS_STEPS
from tests.end_to_end.two_nodes import PROCESSES, Ended, machines_of, run_on
from tests.end_to_end.workspace import Workspace

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]

TIMEOUT_S = 30
"""watchdog.timeout_s: longer than a busy machine takes for anything in it."""


@pytest.fixture(scope="module")
def standing_still(workspace: Workspace) -> Ended:
    config = workspace.config(
        "stopped",
        run={"dir": "runs/stopped", "steps": 100000},
        rollout={"unresponsive_s": TIMEOUT_S - 2},
        checkpoint={"every": 0},
        watchdog={"timeout_s": TIMEOUT_S},
    )
    return run_on(machines_of(workspace), config, stopped="rank 1")


def test_a_run_over_two_nodes_ends_well_on_both(over_two_nodes: Ended) -> None:
    assert over_two_nodes.codes == [0, 0], over_two_nodes.said
    lines = (over_two_nodes.directory / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == SYNCHRONOUS_STEPS
    assert over_two_nodes.left == []


def test_ranks_are_divided_and_what_shares_memory_with_rank_0_is_on_its_node(
    over_two_nodes: Ended,
) -> None:
    hosts = {name: state["host"] for name, state in over_two_nodes.states.items()}
    assert hosts.pop("rank 1") == "second"
    assert set(hosts.values()) == {socket.gethostname()}


def test_a_rank_that_stops_on_one_node_ends_the_run_on_both_and_is_named(
    standing_still: Ended,
) -> None:
    ended = standing_still
    assert ended.codes == [1, 1], ended.said
    pid = ended.states["rank 1"]["pid"]
    for said in ended.said:
        assert f"The run failed: Stalled: Nothing moved for {TIMEOUT_S} s" in said
        assert f"rank 1 (pid {pid} on second) is stopped (T)" in said
        for name in PROCESSES:
            assert (
                f"\n{name} (pid {ended.states[name]['pid']} on {ended.states[name]['host']}): "
                in said
            )
        assert " waits for " in said
        assert "on another machine" not in said
        assert "Traceback" not in said
        assert len(said[said.rfind("The run failed:") :].splitlines()) < 60
    assert json.loads((ended.directory / "status.json").read_text())["phase"] == "failed"
    stacks = (ended.directory / "stall.txt").read_text().partition("\nStacks\n")[2]
    assert stacks.count("most recent call first") >= len(PROCESSES) - 1
    assert ended.left == []

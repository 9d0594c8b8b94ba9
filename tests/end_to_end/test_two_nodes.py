"""A run over two machines, imitated on one, that goes well, and one in which a rank stops."""

from __future__ import annotations

import json
import re
import socket

import pytest

from megatron_async_rl.watchdog.events import read_events
from tests.end_to_end.conftest import SYNCHRONOUS_STEPS
from tests.end_to_end.two_nodes import PROCESSES, RELAY, Ended, machines_of, run_on
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


def test_ranks_and_engines_are_divided_and_an_agent_is_where_the_engine_is(
    over_two_nodes: Ended,
) -> None:
    first = socket.gethostname()
    assert {name: state["host"] for name, state in over_two_nodes.states.items()} == {
        "rank 0": first,
        "rank 1": "second",
        "controller": first,
        "engine-0": "second",
        "engine-0 EngineCore": "second",
        RELAY: "second",
    }


def test_every_version_reaches_the_engine_on_the_other_machine(over_two_nodes: Ended) -> None:
    """Synchronous: each step's tokens are sampled, and trained, under the version before."""
    rows = [json.loads(line) for line in (over_two_nodes.directory / "metrics.jsonl").open()]
    assert [row["lag/max"] for row in rows] == [0] * SYNCHRONOUS_STEPS
    assert [row["engine/versions"] for row in rows] == [[step] for step in range(SYNCHRONOUS_STEPS)]
    for row in rows:
        assert row["weights/relay_bytes"] >= row["weights/publish_bytes"]
        assert row["weights/relay_s"] > 0


def test_an_agent_that_is_killed_costs_a_restart_of_its_own_and_no_engine(
    over_two_nodes: Ended,
) -> None:
    (lost,) = [
        event.text for event in read_events(over_two_nodes.directory) if "lost" in event.text
    ]
    assert lost.startswith(f"{RELAY}, which brings weights to machine ")
    assert "is lost; restart 1 of 3 within an hour. Why: ProcessDied: " in lost
    rows = [json.loads(line) for line in (over_two_nodes.directory / "metrics.jsonl").open()]
    assert {row["engine/restarts"] for row in rows} == {0}


def test_a_rank_that_stops_on_one_node_ends_the_run_on_both_and_is_named(
    standing_still: Ended,
) -> None:
    ended = standing_still
    assert ended.codes == [1, 1], ended.said
    pid = ended.states["rank 1"]["pid"]
    for said in ended.said:
        still = (
            rf"The run failed: Stalled: Nothing moved for \d+ s \(watchdog.timeout_s: {TIMEOUT_S}\)"
        )
        assert re.search(still, said)
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

"""A run over two machines, imitated on one, that goes well. With a network between them, and going
badly: tests/network."""

from __future__ import annotations

import json
import socket

import pytest

from megatron_async_rl.watchdog.events import read_events
from tests.end_to_end.conftest import SYNCHRONOUS_STEPS
from tests.end_to_end.two_nodes import RELAY, Ended

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]


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

"""A run over three machines with a network between them, by the launcher that users have: the ranks
of a tensor-parallel policy on the first two, an engine on the third, the evaluation engine on the
first. Where machines cannot be imitated these are skipped, with the reason. What a machine that is
lost costs: tests/network."""

from __future__ import annotations

import json

import pytest

from megatron_async_rl.watchdog.events import read_events
from tests.end_to_end.conftest import RELAY, SYNCHRONOUS_STEPS, Ended
from tests.thorough import thorough

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow, thorough]


def test_a_run_over_three_machines_ends_well_on_all_of_them(over_machines: Ended) -> None:
    assert over_machines.codes == [0, 0, 0], over_machines.said
    lines = (over_machines.directory / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == SYNCHRONOUS_STEPS
    assert over_machines.left == []
    assert "machine 0's Ray has ended, and with it the work of machine 2" in over_machines.said


def test_ranks_and_engines_are_divided_and_an_agent_is_where_the_engine_is(
    over_machines: Ended,
) -> None:
    assert {name: state["host"] for name, state in over_machines.states.items()} == {
        "rank 0": "node0",
        "rank 1": "node1",
        "controller": "node0",
        "engine-0": "node2",
        "engine-0 EngineCore": "node2",
        "engine-1": "node0",
        RELAY: "node2",
    }


def test_what_is_not_ray_s_listens_at_the_private_address_alone(over_machines: Ended) -> None:
    """Ray itself listens at all addresses, and requests the token that the machines share."""
    zero, one, rank = over_machines.listeners
    assert zero == {"10.77.0.1"}, "the store of node 0's torchrun"
    assert one == set()
    assert rank == {"10.77.0.2"}, "gloo"
    assert "RAY_AUTH_TOKEN" not in over_machines.said


def test_ray_s_autoscaler_serves_no_metrics(over_machines: Ended) -> None:
    """It would without the token, and a run has no use for it."""
    assert 6379 in over_machines.ports
    assert 44217 not in over_machines.ports


def test_every_version_reaches_the_engine_on_the_other_machine(over_machines: Ended) -> None:
    """Synchronous: each step's tokens are sampled, and trained, under the version before."""
    rows = [json.loads(line) for line in (over_machines.directory / "metrics.jsonl").open()]
    assert [row["lag/max"] for row in rows] == [0] * SYNCHRONOUS_STEPS
    assert all(len(row["lag/histogram"]) == 1 for row in rows)
    # Megatron at TP=2, from a converted model, against vLLM, before the first and after each of
    # four weight updates, on every sampled token.
    assert all(0 < row["ratio/logp_diff_max"] < 1e-5 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert [row["engine/versions"] for row in rows] == [[step] for step in range(SYNCHRONOUS_STEPS)]
    for row in rows:
        assert row["weights/relay_bytes"] >= row["weights/publish_bytes"]
        assert row["weights/relay_s"] > 0


def test_an_agent_that_is_killed_costs_a_restart_of_its_own_and_no_engine(
    over_machines: Ended,
) -> None:
    (lost,) = [event.text for event in read_events(over_machines.directory) if "lost" in event.text]
    assert lost.startswith(f"{RELAY}, which copies weights to machine ")
    assert "is lost; restart 1 of 3 within an hour. Why: ProcessDied: " in lost
    rows = [json.loads(line) for line in (over_machines.directory / "metrics.jsonl").open()]
    assert {row["engine/restarts"] for row in rows} == {0}

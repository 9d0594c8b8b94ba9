"""A run over three machines with a network between them, by the launcher that users have: the ranks of
a tensor-parallel policy on the first two, an engine on the third. Where machines cannot be imitated
it is skipped, with the reason; their failures are in test_machines.py, which `make network-tests` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.network.runs import run_over

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

STEPS = 4


@dataclass
class Ended:
    hosts: dict[str, str]
    codes: list[int]
    left: list[str]
    rows: list[dict[str, Any]]
    said: str
    engines_said: str


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    with run_over(3, trainers=2, run={"dir": "run", "steps": STEPS}) as run:
        states = run.states_of("rank 0", "rank 1", "controller", "engine-0", "relay-0")
        hosts = {name: state["host"] for name, state in states.items()}
        codes, left = run.end()
        yield Ended(hosts, codes, left, run.metrics(), run.said(), run.machines.said(2))


def test_a_run_over_three_machines_ends_well_on_all_of_them(ended: Ended) -> None:
    assert ended.codes == [0, 0, 0], ended.said
    assert len(ended.rows) == STEPS
    assert ended.left == []
    assert "machine 0's Ray has ended, and with it the work of machine 2" in ended.engines_said


def test_ranks_are_divided_over_the_trainers_and_the_engine_is_on_the_third(ended: Ended) -> None:
    assert ended.hosts == {
        "rank 0": "node0",
        "rank 1": "node1",
        "controller": "node0",
        "engine-0": "node2",
        "relay-0": "node2",
    }


def test_the_engines_weights_come_over_the_network(ended: Ended) -> None:
    assert ended.rows[-1]["weights/relay_bytes"] > 0
    assert max(ended.rows[-1]["engine/versions"]) > 0

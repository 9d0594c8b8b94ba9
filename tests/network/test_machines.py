"""Failure tests of runs over several machines with a network between them: `make network-tests`.
The run that goes well is in tests/end_to_end/test_three_machines.py. Needs root, and Debian's
iproute2."""

from __future__ import annotations

import json
import re

import psutil

from tests.network.runs import run_over

STEPS = 200
"""More than a run makes while a test looks."""
STILL_S = 30
"""watchdog.timeout_s: longer than a busy machine takes for anything in it."""


def test_a_machine_that_is_cut_off_costs_its_engines_and_not_the_run() -> None:
    """Three machines: the policy is on the first, an engine on each of the others."""
    with run_over(
        3,
        trainers=1,
        run={"steps": 100000},
        checkpoint={"every": 0},
        rollout={"engines": 2, "unresponsive_s": 15},
    ) as run:
        run.wait_for_steps(3)
        states = run.states_of("rank 0", "rank 1", "engine-0", "engine-1")
        hosts = {name: state["host"] for name, state in states.items()}
        assert sorted(hosts.values()) == ["node0", "node0", "node1", "node2"]
        lost = next(name for name in ("engine-0", "engine-1") if hosts[name] == "node1")
        run.machines.cut(1)
        words = f"{lost} is lost and its requests are sent again"
        run.wait_until(lambda: words in run.machines.said(0), over=(1,))
        run.wait_for_steps(len(run.metrics()) + 10, over=(1,))
        run.launchers[0].terminate()
        assert run.launchers[0].wait(timeout=900) == 130


def test_a_machine_that_dies_and_returns_continues_from_the_checkpoint() -> None:
    with run_over(
        2,
        trainers=2,
        run={"steps": STEPS},
        checkpoint={"every": 5},
        watchdog={"timeout_s": 90},
    ) as run:
        run.wait_for_steps(6)
        run.machines.kill("node1")
        run.launchers[1].wait(timeout=900)
        words = "starts the run again from its last checkpoint"
        run.wait_until(lambda: words in run.machines.said(0), over=(1,))
        run.launchers[1] = run.start(1)
        codes, _ = run.end()
        assert codes == [0, 0], run.said()
        assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))


def test_a_rank_that_stops_on_one_machine_ends_the_run_on_both_and_is_named() -> None:
    names = ("rank 0", "rank 1", "controller", "engine-0", "engine-0 EngineCore")
    with run_over(
        2,
        trainers=2,
        settings={"RESTARTS": "0"},
        run={"steps": 100000},
        rollout={"unresponsive_s": STILL_S - 2},
        checkpoint={"every": 0},
        watchdog={"timeout_s": STILL_S},
    ) as run:
        run.wait_for_steps(1)
        states = run.states_of(*names)
        psutil.Process(states["rank 1"]["pid"]).suspend()
        codes, left = run.end()
        assert codes == [1, 1], run.said()
        assert left == []
        for said in map(run.machines.said, (0, 1)):
            still = rf"Stalled: Nothing moved for \d+ s \(watchdog.timeout_s: {STILL_S}\)"
            assert re.search(f"The run failed: {still}", said)
            assert f"rank 1 (pid {states['rank 1']['pid']} on node1) is stopped (T)" in said
            for name in names:
                assert f"\n{name} (pid {states[name]['pid']} on {states[name]['host']}): " in said
            assert " waits for " in said
            assert "on another machine" not in said
            assert "Traceback" not in said
            assert len(said[said.rfind("The run failed:") :].splitlines()) < 60
        directory = run.machines.folder / "run"
        assert json.loads((directory / "status.json").read_text())["phase"] == "failed"
        stacks = (directory / "stall.txt").read_text().partition("\nStacks\n")[2]
        assert stacks.count("most recent call first") >= len(names) - 1


def test_a_machine_whose_name_is_its_loopback_address_is_refused_with_what_to_set() -> None:
    """Debian writes such an /etc/hosts; the ranks would announce 127.0.1.1 to the others."""
    with run_over(2, trainers=2, hosts={"node1": "127.0.1.1"}) as run:
        codes, _ = run.end()
        assert codes == [2, 2], run.said()
        for said in map(run.machines.said, (0, 1)):
            words = (
                "node 1 (node1)\n  its ranks will listen at 127.0.1.1, which is every machine's own"
            )
            assert words in said.replace("\n    ", "\n")
            assert "set GLOO_SOCKET_IFNAME there to the network" in said
            assert "(such as eth0)" in said


def test_a_machine_that_does_not_reach_the_first_is_refused_with_the_address() -> None:
    with run_over(2, trainers=2, hosts={"node0": "10.77.0.99"}) as run:
        codes, _ = run.end()
        assert codes == [2, 2], run.said()
        for said in map(run.machines.said, (0, 1)):
            assert "node 1 (node1) does not reach node 0 at node0:29500: " in said
            assert "MASTER_ADDR" in said

"""Faults of a run over two machines, which are network namespaces (tests/network/machines.py): the
link between them is cut, or one of them dies.

Both machines have a rank. After the fault the link is mended and the same command is repeated on
both, until the run finishes.
"""

from __future__ import annotations

import random
import re
import time

from tests.chaos.invariants import FlowLaw, Violation, broken
from tests.network.machines import ip, namespace
from tests.network.runs import Run, run_over

KINDS = ("cut link between two machines", "death of one of two machines")
STEPS = 40
STALL_S = 90.0
STARTS = 4
NAMES = r"[Nn]ode 1|node1|machine"
"""Pattern of a message that names the other machine."""


def two_machine_fault(seed: int) -> tuple[str, list[Violation], float]:
    """Inject the fault of `seed` into a run over two machines; return its kind, the violations and
    the seconds. Needs root."""
    chance, started = random.Random(seed), time.monotonic()
    kind, step = chance.choice(KINDS), chance.randint(1, 6)
    found: list[Violation] = []
    with run_over(
        2,
        trainers=2,
        settings={"RESTARTS": "0"},
        run={"steps": STEPS},
        checkpoint={"every": 2},
        rollout={"unresponsive_s": STALL_S - 2},
        watchdog={"timeout_s": STALL_S},
    ) as run:
        run.wait_for_steps(step)
        if kind == KINDS[0]:
            run.machines.cut(1)
        else:
            run.machines.kill("node1")
        codes, left = run.end()
        if left:
            found.append(Violation("left over", f"{kind}: {left}"))
        # The machine that died has no output of its own.
        for number in (0, 1) if kind == KINDS[0] else (0,):
            output = run.machines.said(number)
            if codes[number] == 0:
                continue
            if not re.search(NAMES, output[output.rfind("The run failed:") :]):
                tail = " | ".join(output.strip().splitlines()[-4:])[:300]
                found.append(Violation("unnamed", f"{kind}, node {number}: {tail}"))
        _mend(run)
        found += _repeat(run, codes)
        found += _check(run)
    return kind, found, time.monotonic() - started


def _mend(run: Run) -> None:
    ip("-n", namespace("switch"), "link", "set", "port1", "up")


def _repeat(run: Run, codes: list[int]) -> list[Violation]:
    """Repeat the command on both machines until the run has finished."""
    for _ in range(STARTS):
        if codes == [0, 0]:
            return []
        run.launchers[:] = [run.start(0), run.start(1)]
        codes, left = run.end()
        if left:
            return [Violation("left over", f"after the end: {left}")]
    tail = " | ".join(run.machines.said(0).strip().splitlines()[-4:])[:300]
    return [] if codes == [0, 0] else [Violation("hung", f"exit codes {codes}: {tail}")]


def _check(run: Run) -> list[Violation]:
    law = FlowLaw(steps=STEPS, prompts_per_step=8, group_size=4, async_ratio=2)
    found = broken(run.directory, law)
    steps = [row["step"] for row in run.metrics()]
    if steps != list(range(1, STEPS + 1)):
        found.append(Violation("lost", f"metrics.jsonl has the steps {steps}"))
    return found

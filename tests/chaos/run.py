"""Chaos driver: injects faults by seed, checks the invariants, and records the counts.

    make chaos                                   100 component histories and 2 process faults
    MAR_CHAOS_HISTORIES=1000 MAR_CHAOS_FAULTS=0 make chaos
    python -m tests.chaos.run --faults 20 --record benchmarks/chaos.jsonl
    python -m tests.chaos.run --links 2          faults of runs over two machines; needs root
    python -m tests.chaos.run --history 123      one history again, with every violation
    python -m tests.chaos.run --table            the table of the record

Without a seed, the seeds after the recorded ones run, so that several sessions accumulate. Exit
code 1 if an invariant broke.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import record
from tests.chaos.histories import run_history
from tests.chaos.invariants import Violation

BATCH = 100
"""Component histories in one line of the record."""
SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.table:
        records = record.read(options.record or record.FILE)
        print(record.table(records))
        print("\nComponent faults by kind:", record.component_kinds(records))
        return 0
    if options.history is not None:
        result = run_history(options.history)
        print(f"{result.settings}\n{result.lives} lives; {dict(result.tried)}")
        print("\n".join(map(str, result.violations)) or "all invariants hold")
        return 1 if result.violations else 0
    # So that the runs, mounts and namespaces of an ended driver go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    deadline = time.monotonic() + 60 * options.minutes
    broken = _histories(options, deadline)
    if options.faults and time.monotonic() < deadline:
        # Imported late: component histories need neither psutil nor a model.
        from tests.chaos.campaign import run_faults

        broken += run_faults(options, deadline)
    if options.links and time.monotonic() < deadline:
        broken += _links(options, deadline)
    return 1 if broken else 0


def _links(options: argparse.Namespace, deadline: float) -> int:
    """Inject faults into runs over two machines, and return the number of broken invariants."""
    from tests.chaos.two_machines import two_machine_fault

    first, broken = options.seed or record.next_seed("link", options.record or record.FILE), 0
    for seed in range(first, first + options.links):
        if time.monotonic() > deadline:
            break
        kind, found, seconds = two_machine_fault(seed)
        print(f"fault {seed}: {kind}, {seconds:.0f} s", flush=True)
        for one in found:
            print(f"  {one}", flush=True)
        broken += len(found)
        if options.record is not None:
            record.append(
                record.FaultRecord(
                    layer="link",
                    first=seed,
                    last=seed,
                    date=time.strftime("%Y-%m-%d"),
                    command=f"python -m tests.chaos.run --seed {seed} --histories 0 --faults 0"
                    " --links 1",
                    tried={kind: 1},
                    found=record.counts(found),
                    details=[str(one) for one in found],
                    seconds=round(seconds, 1),
                ),
                options.record,
            )
    return broken


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def default(name: str, value: float) -> float:
        return float(os.environ.get(f"MAR_CHAOS_{name}", value))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(default("SEED", 0)), help="first seed")
    parser.add_argument("--histories", type=int, default=int(default("HISTORIES", 100)))
    parser.add_argument("--faults", type=int, default=int(default("FAULTS", 2)))
    parser.add_argument("--links", type=int, default=int(default("LINKS", 0)))
    parser.add_argument("--minutes", type=float, default=default("MINUTES", 30.0))
    parser.add_argument("--kinds", default=os.environ.get("MAR_CHAOS_KINDS", ""))
    parser.add_argument("--record", type=Path, default=os.environ.get("MAR_CHAOS_RECORD"))
    parser.add_argument("--model", type=Path, default=os.environ.get("MAR_CHAOS_MODEL"))
    parser.add_argument("--history", type=int, help="run one component history again")
    parser.add_argument("--table", action="store_true", help="print the table of the record")
    return parser.parse_args(arguments)


def _histories(options: argparse.Namespace, deadline: float) -> int:
    """Run component histories, and return the number of broken invariants."""
    first = options.seed or record.next_seed("component", options.record or record.FILE)
    end, total, broken = first + options.histories, Counter[str](), 0
    while first < end and time.monotonic() < deadline:
        started, tried, violations = time.monotonic(), Counter[str](), list[Violation]()
        details: list[str] = []
        last = min(first + BATCH, end) - 1
        for seed in range(first, last + 1):
            result = run_history(seed)
            tried.update(result.tried)
            violations += result.violations
            details += [f"seed {seed}: {one}" for one in result.violations]
        seconds = time.monotonic() - started
        print(
            f"histories {first} to {last}: {sum(tried.values())} faults,"
            f" {len(violations)} violations, {seconds:.0f} s",
            flush=True,
        )
        for line in details[:SHOWN]:
            print(f"  {line}", flush=True)
        if options.record is not None:
            record.append(
                record.FaultRecord(
                    layer="component",
                    first=first,
                    last=last,
                    date=time.strftime("%Y-%m-%d"),
                    command=f"python -m tests.chaos.run --seed {first} --histories"
                    f" {last + 1 - first} --faults 0",
                    tried=dict(tried),
                    found=record.counts(violations),
                    details=details[:SHOWN],
                    seconds=round(seconds, 1),
                ),
                options.record,
            )
        total.update(tried)
        broken += len(violations)
        first = last + 1
    if total:
        print("faults by kind:", ", ".join(f"{kind} {n}" for kind, n in total.most_common()))
    return broken


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # A history is a function of its seed only if sets of strings keep their order.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.chaos.run", *sys.argv[1:]])
    sys.exit(main())

"""Whole snapshots of stalled runs, and what the watchdog of each machine decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_async_rl.watchdog import stall
from megatron_async_rl.watchdog import watchdog as watchdog_module
from megatron_async_rl.watchdog.progress_monitor import ProcessState
from megatron_async_rl.watchdog.stall import HostSnapshot, ProcessSnapshot, Stall, suspects
from megatron_async_rl.watchdog.watchdog import Watchdog
from tests.stored_pages import require_page

STACK = """Thread 0x01 (most recent call first):
  File "/x/megatron_async_rl/train.py", line 7 in train
  File "/x/run.py", line 3 in <module>
"""


def process(
    name: str,
    condition: str | None = "sleeping",
    silent_s: float = 0.25,
    *,
    host: str = "",
    stack: str = "",
    progress: dict[str, tuple[int, float]] | None = None,
    facts: dict[str, Any] | None = None,
    **activities: Sequence[float],
) -> ProcessSnapshot:
    """Return a process; `activities`: ages in seconds by kind, the second of a kind with a
    deadline of 9 s."""
    listed = [
        {"kind": kind, "name": f"{kind} {at}", "since_s": s, "deadline_s": 9.0 if at == 1 else None}
        for kind, ages in activities.items()
        for at, s in enumerate(ages)
    ]
    state = ProcessState(
        name=name,
        pid=len(name),
        host=host or "h",
        time=0.0,
        activities=listed,
        progress=progress or {},
        facts=facts or {},
    )
    return ProcessSnapshot(
        state=state, condition=condition, silent_s=silent_s, host=host, stack=stack
    )


MARKS = {"phases": (3, 1.0), "loop": (4, 1.0), "steps": (7, 2.0), "samples": (9, 30.0)}
SHOWN = (
    process("rank 0", wait=[3, 1], work=[2], progress=MARKS, facts={"a": 1, "b": "two"}),
    process("rank 1", None, 12.5, host="n1", wait=[1] * 9, phase=[5, 6], stack=STACK),
    process("engine-0", "running", work=[1, 2, 3], phase=[1] * 4, facts={"in flight": 3}),
    process("engine-1", "running", work=[1] * 5, wait=[1] * 4, progress={"steps": (1, 0.0)}),
    process("core", wait=[1] * 5),
    process("controller", "stopped", 70.0, progress={"loop": (2, 9.0)}),
)
SETS = (
    (process("rank 0", "stopped"), process("rank 1", None), process("b", "tracing-stop")),
    (process("rank 0", None), process("rank 1", "disk-sleep"), process("b", None, 29.9)),
    (process("rank 0", None, 20.0), process("rank 1", "disk-sleep"), process("b", "running", 30)),
    (process("rank 0", None, 19.9), process("rank 1", "disk-sleep")),
    (process("rank 0", silent_s=5.0, stack=STACK), process("rank 1", silent_s=4.9)),
    (process("rank 0", work=[4.9]), process("rank 1", work=[5.0]), process("b", wait=[9])),
    (process("rank 0", work=[9.9], wait=[1]), process("rank 1", wait=[1]), process("b")),
    (process("rank 0", wait=[1], work=[1, 20.0]), process("b", stack=STACK, phase=[30])),
)


def test_every_snapshot_is_the_one_on_its_page() -> None:
    text = "".join(f"{line}\n" for one in SHOWN for line in stall._lines(one))
    for at, processes in enumerate(SETS):
        for still_s in (10.0, 60.0, 4.9, 5.0):
            text += f"$ set {at}, still for {still_s:g} s\n"
            text += "".join(f"{line}\n" for line in suspects(processes, still_s))
    require_page("stall/snapshots", text)


def test_a_process_that_has_ended_has_no_name() -> None:
    def gone() -> str:
        raise psutil.NoSuchProcess(3)

    assert stall._name(SimpleNamespace(name=gone)) == "a process"  # type: ignore[arg-type]
    assert stall._name(SimpleNamespace(name=lambda: "ray")) == "ray"  # type: ignore[arg-type]


def test_the_error_of_a_stall_has_its_kind_and_suspects() -> None:
    found = Stall(headline="Nothing moved.", suspects=("a waits.", "b waits."), text="")
    assert (found.error, found.consequence) == ("Stalled: Nothing moved. a waits. b waits.", False)


class Monitor:
    """Stands in for the progress of a run."""

    def __init__(self) -> None:
        self.states = [process("rank 0").state, process("rank 1").state]
        self.silent: dict[str, float] = {}
        self.still_s, self.allowed_s, self.last = 0.0, 0.0, "steps in rank 0"
        self.looks = 0

    def look_at_all(self) -> None:
        self.looks += 1

    def silent_s(self, name: str) -> float:
        return self.silent.get(name, 0.0)


class Watched:
    """A watchdog of node 0 of two, whose clock advances a second per look."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now, self.others = 100.0, list[HostSnapshot]()
        self.gathered: list[Any] = []
        self.published: list[Any] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(watchdog_module, "time", clock)
        monkeypatch.setattr(watchdog_module, "read_others", lambda run_dir: self.others)
        monkeypatch.setattr(watchdog_module, "of_run", lambda run_id: [run_id])
        monkeypatch.setattr(watchdog_module, "look_here", lambda *given: given)
        monkeypatch.setattr(watchdog_module, "publish", lambda *given: self.published.append(given))
        monkeypatch.setattr(watchdog_module, "gather", self.gather)
        known = {"timeout_s": 20.0, "start_s": 50.0, "ranks": 2, "node": 0, "nodes": 2}
        self.watchdog = Watchdog(run_dir, "id", **{**known, **settings})
        self.monitor: Any = Monitor()
        self.watchdog._monitor = self.monitor
        self.run_dir = run_dir

    def gather(self, run_dir: Path, headline: str, **how: Any) -> Stall:
        assert run_dir == self.run_dir
        assert (how.pop("others"), how.pop("ends_run")) == (["id"], True)
        self.gathered.append((headline, how))
        return Stall(headline=headline, suspects=(), text="")

    def look(self) -> Stall | None:
        self.now += 1.0
        return self.watchdog.look()


def test_a_run_stalls_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(tmp_path, monkeypatch, nodes=1)
    one.monitor.states = one.monitor.states[:1]
    one.monitor.still_s = 49.9
    assert one.look() is None
    assert one.watchdog.look() is None
    assert one.monitor.looks == 1, "once a second"
    one.monitor.still_s = 50.0
    assert one.look() is not None
    one.monitor.states *= 2
    for still_s, allowed_s, stalls in ((19.9, 0, 0), (20.0, 0.1, 0), (20.0, 0, 1)):
        one.monitor.still_s, one.monitor.allowed_s = still_s, allowed_s
        assert (one.look() is not None) == stalls
    one.monitor.states.clear()
    assert one.look() is not None, "the end of a rank does not restore the start's limit"
    last = " The last thing that did: steps in rank 0."
    running = f"Nothing moved for 20 s (watchdog.timeout_s: 20).{last}"
    assert one.gathered == [
        (
            f"Nothing moved for 50 s (rollout.start_timeout_s: 50).{last}",
            {"still_s": 50.0, "lost": []},
        ),
        *[(running, {"still_s": 20.0, "lost": []})] * 2,
    ]
    # The limit of a start is at least that of a wait.
    one = Watched(tmp_path, monkeypatch, start_s=5.0, nodes=1)
    one.monitor.states.clear()
    one.monitor.still_s = 19.0
    assert one.look() is None


def test_machines_answer_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(tmp_path, monkeypatch, nodes=1)
    one.others = [HostSnapshot(host="h1", processes=())]
    assert [one.look() for _ in range(3)] == [None] * 3
    assert one.published == [(tmp_path, (tmp_path, ["id"]))], "once"
    one.others.append(HostSnapshot(host="h2", processes=(), ends="It stalled."))
    found = one.look()
    assert found is not None
    assert one.gathered == [("It stalled.", {"still_s": 0.0, "lost": []})]


def test_a_launcher_that_ends_or_falls_silent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Watched(tmp_path, monkeypatch, nodes=3)
    there = [process(f"launcher {node}", host=f"h{node}").state for node in (1, 2)]
    ranks = one.monitor.states
    one.monitor.states = ranks + there
    one.monitor.silent = {"launcher 1": 19.9, "launcher 2": 9.9}
    assert one.look() is None
    one.monitor.silent["launcher 1"] = 20.0
    found = one.look()
    assert found is not None
    assert (found.kind, found.consequence) == ("Stalled", False)
    one.monitor.silent["launcher 2"] = 10.0
    one.monitor.states = ranks + there[1:]
    one.monitor.silent["launcher 1"] = 29.9
    assert one.look() is None
    one.monitor.silent["launcher 1"] = 30.0
    found = one.look()
    assert found is not None
    assert (found.kind, found.consequence) == ("NodeEnded", True)
    lost = "Node 1 (h1) has not reported for 20 s (watchdog.timeout_s: 20): the machine, or `mar"
    assert one.gathered == [
        (f"{lost} train` on it, is lost.", {"still_s": 0.0, "lost": []}),
        (
            "Node 1 (h1) ended 30 s ago, before the run did; its terminal shows the reason.",
            {"still_s": 0.0, "lost": ["Node 2 (h2) last reported 10 s ago."]},
        ),
    ]


def test_other_machines_are_waited_for_until_all_have_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["here", "h1", "h2"]
    states = [process(f"launcher {at}", host=host).state for at, host in enumerate(hosts)]
    states.append(process("rank 0", host="h3").state)
    monkeypatch.setattr(stall, "read_states", lambda run_dir: states)
    monkeypatch.setattr(stall.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(stall, "ANSWER_S", 3.0)

    def asked(answers: dict[str, tuple[float, str | None]], *, at_the_end: bool) -> Any:
        """Return the hosts that answered and the time. answers: time and reason by host."""
        now = 100.0

        def sleep(seconds: float) -> None:
            nonlocal now
            assert seconds == stall._POLL_S
            now += 0.5

        def read(run_dir: Path) -> list[HostSnapshot]:
            return [
                HostSnapshot(host=host, processes=(), ends=ends)
                for host, (at, ends) in answers.items()
                if now - 100.0 >= at
            ]

        monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        monkeypatch.setattr(stall, "read_others", read)
        found = stall.ask_other_machines(tmp_path, at_the_end=at_the_end)
        return [one.host for one in found], now - 100.0

    both: dict[str, tuple[float, str | None]] = {"h1": (0.0, None), "h2": (1.0, "ends")}
    assert asked(both, at_the_end=False) == (["h1", "h2"], 1.0)
    assert asked(both, at_the_end=True) == (["h1", "h2"], 3.0), "an earlier answer does not count"
    assert asked({"h1": (0.0, "x"), "h2": (2.0, "y")}, at_the_end=True) == (["h1", "h2"], 2.0)
    assert asked({"h1": (0.0, None)}, at_the_end=False) == (["h1"], 3.0)
    states[1:3] = []
    assert asked({}, at_the_end=False) == ([], 0.0)

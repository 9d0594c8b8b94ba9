"""One process of a node reads the state files of its processes; the others read what it found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_async_rl.watchdog import progress_monitor
from megatron_async_rl.watchdog.progress_monitor import FOLDER, STALE_S, ProgressMonitor


def aggregates(monitor: ProgressMonitor) -> bool:
    """True if the process published the summary at its last look."""
    return not monitor._followed


@dataclass
class Node:
    """A node's processes, each with a monitor; a second passes from one look to the next."""

    run_dir: Path
    host: str
    monkeypatch: pytest.MonkeyPatch
    monitors: dict[str, ProgressMonitor] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    beats: int = 0

    def add(self, *names: str) -> None:
        self.monkeypatch.setattr(progress_monitor.socket, "gethostname", lambda: self.host)
        self.monitors |= {name: ProgressMonitor(self.run_dir) for name in names}

    def beat(self, *moving: str, silent: tuple[str, ...] = ()) -> None:
        """Every process writes its state, `moving` ones with a step more, and then looks."""
        self.beats += 1
        self.steps.update(moving)
        for name in self.monitors:
            if name not in silent:
                state = {"name": name, "pid": 1, "host": self.host, "time": float(self.beats)}
                progress = {"progress": {"steps": [self.steps[name], 0.0]}}
                file = self.run_dir / FOLDER / f"{name}.json"
                file.write_text(json.dumps(state | progress))
        for name, monitor in self.monitors.items():
            if name not in silent:
                monitor.look()

    @property
    def aggregators(self) -> list[str]:
        return [name for name, monitor in self.monitors.items() if aggregates(monitor)]


@dataclass
class Clock:
    now: float = 1000.0

    def tick(self) -> None:
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_monitor.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., Node]:
    (tmp_path / FOLDER).mkdir()

    def make(host: str, *names: str) -> Node:
        node = Node(tmp_path, host, monkeypatch)
        node.add(*names)
        return node

    return make


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    reads: list[Path] = []
    read = progress_monitor._read_json

    def counting(path: Path) -> dict[str, object] | None:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(progress_monitor, "_read_json", counting)
    return reads


RANKS = tuple(f"rank {rank}" for rank in range(16))


def test_a_node_reads_two_files_a_process_and_second(
    make_node: Callable[..., Node], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node("a", "launcher 0", *RANKS)
    other = make_node("b", *(f"other {rank}" for rank in range(16)))
    node.beat()
    other.beat()
    clock.tick()
    reads = count_reads(monkeypatch)
    node.beat()
    assert len(reads) <= 2 * len(node.monitors) + 1
    assert not any(path.stem.startswith("other") for path in reads)
    assert (node.aggregators, other.aggregators) == (["launcher 0"], ["other 0"])


def test_what_moves_on_one_node_is_seen_by_every_process_of_the_other(
    make_node: Callable[..., Node], clock: Clock
) -> None:
    first, second = make_node("a", "launcher 0", "rank 0"), make_node("b", "rank 1", "rank 2")
    for _ in range(8):
        clock.tick()
        first.beat("rank 0")
        second.beat()
    stills = [node.still_s for node in (*first.monitors.values(), *second.monitors.values())]
    assert max(stills) <= 2
    for _ in range(6):
        clock.tick()
        first.beat()
        second.beat()
    stills = [node.still_s for node in (*first.monitors.values(), *second.monitors.values())]
    assert 5 <= min(stills) <= max(stills) <= 8
    assert all(monitor.last == "steps in rank 0" for monitor in second.monitors.values())


def test_a_dead_or_stopped_aggregator_is_replaced_and_yields_when_it_comes_back(
    make_node: Callable[..., Node], clock: Clock
) -> None:
    node, other = make_node("a", "launcher 0", *RANKS), make_node("b", "other 0")
    for _ in range(3):
        clock.tick()
        node.beat()
        other.beat()
    still_s = node.monitors["rank 3"].still_s
    assert node.aggregators == ["launcher 0"]
    for _ in range(int(STALE_S) + 1):
        clock.tick()
        node.beat(silent=("launcher 0",))
        other.beat()
    ranks = {name: node.monitors[name] for name in RANKS}
    assert [name for name, monitor in ranks.items() if aggregates(monitor)] == ["rank 0"]
    assert all(monitor.still_s >= still_s + STALE_S for monitor in ranks.values()), (
        "a new aggregator is no progress"
    )
    clock.tick()
    node.beat()
    assert node.aggregators == ["rank 0"]
    assert node.monitors["rank 5"].silent_s("launcher 0") < 2


def test_a_silent_process_is_silent_for_those_who_read_the_summary_too(
    make_node: Callable[..., Node], clock: Clock
) -> None:
    node = make_node("a", "launcher 0", "rank 0", "rank 1")
    node.beat()
    for _ in range(12):
        clock.tick()
        node.beat("rank 1", silent=("rank 0",))
    assert node.monitors["rank 1"].silent_s("rank 0") >= 11
    assert node.monitors["rank 1"].launcher_watches
    for _ in range(14):
        clock.tick()
        node.beat("rank 1", silent=("launcher 0",))
    assert not node.monitors["rank 1"].launcher_watches


def test_the_processes_of_a_node_without_an_aggregator_are_seen(
    make_node: Callable[..., Node], clock: Clock, tmp_path: Path
) -> None:
    node = make_node("a", "launcher 0", "rank 0")
    node.beat()
    for step in range(9):
        state = {"name": "engine-0", "pid": 7, "host": "c", "time": float(step)}
        (tmp_path / FOLDER / "engine-0.json").write_text(
            json.dumps(state | {"progress": {"samples": [step, 0.0]}})
        )
        clock.tick()
        node.beat()
    assert node.monitors["rank 0"].last == "samples in engine-0"
    assert node.monitors["rank 0"].still_s <= 1


def test_a_summary_that_is_not_one_is_passed_over(
    make_node: Callable[..., Node], clock: Clock, tmp_path: Path
) -> None:
    node = make_node("a", "rank 0")
    for text in ("", "[]", "{}", '{"states": 3}', '{"states": [], "host": "a"}'):
        (tmp_path / FOLDER / "a.summary").write_text(text)
        (tmp_path / FOLDER / "b.summary").write_text(text)
        clock.tick()
        node.beat()
        assert node.aggregators == ["rank 0"]


def test_a_follower_that_looks_at_all_nodes_reads_one_file_for_each(
    make_node: Callable[..., Node], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_node("h1", "rank 0", "rank 1"), make_node("h2", "rank 2")
    for _ in range(2):
        clock.tick()
        one.beat("rank 0")
        other.beat()
    follower = one.monitors["rank 1"]
    assert one.aggregators == ["rank 0"]
    assert [state.name for state in follower.states] == ["rank 0", "rank 1"]
    reads = count_reads(monkeypatch)
    follower.look_at_all()
    assert [state.name for state in follower.states] == ["rank 0", "rank 1", "rank 2"]
    assert sorted(path.name for path in reads) == ["h1.summary", "h2.summary"]
    clock.tick()
    other.beat()
    clock.tick()
    follower.look_at_all()
    assert follower.silent_s("rank 2") == 0.0
    assert follower.silent_s("unknown") == 0.0


def test_states_of_other_versions_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    state = {"name": "rank 0", "pid": 1, "host": "h", "time": 2.0}
    for name, content in (
        ("a", state | {"more": 1}),
        ("b", [state]),
        ("c", {"name": "rank 1"}),
        ("d", state),
        ("e", state | {"name": "left out"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "f.json").write_text("{")
    assert progress_monitor.read_states(tmp_path, {"e"}) == [
        progress_monitor.ProcessState(name="rank 0", pid=1, host="h", time=2.0)
    ]

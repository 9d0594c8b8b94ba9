"""The record of durations orders the files of each part of the tests, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collect_directory
from tests.durations import MIN_S, Recorder, longest_first, stored

FILES = [f"tests/{name}.py" for name in ("unit/a", "unit/b", "unit/c", "gpu/d", "gpu/e")]
SECONDS = {"tests/unit/b.py": 3.0, "tests/unit/c.py": 2.0, "tests/gpu/e.py": 99.0}


def order(scopes: dict[str, str], seconds: dict[str, float] = SECONDS) -> str:
    alone = {file: file for file in FILES}
    return "".join(file[-4] for file in longest_first(FILES, alone | scopes, seconds))


def test_the_longest_files_of_a_part_come_first_and_parts_keep_their_order():
    assert order({}) == "bcaed"
    assert order({}, {}) == "abcde"


def test_files_that_a_worker_takes_together_count_together():
    together = dict.fromkeys(("tests/unit/a.py", "tests/unit/c.py"), "together")
    assert order(together, SECONDS | {"tests/unit/a.py": 2.0}) == "acbed"
    assert order(together) == "baced"


def report(nodeid: str, seconds: float) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, duration=seconds)


def test_the_seconds_of_all_phases_of_a_file_are_written_once_all_tests_passed(tmp_path):
    recorder = Recorder(tmp_path / "durations.json")
    took = {"b.py::x[1]": 0.25, "b.py::y": 1.02, "a.py::x": 7.0, "c.py::x": 0.1}
    for nodeid, seconds in took.items():
        recorder.pytest_runtest_logreport(report(nodeid, seconds))
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    assert not (tmp_path / "durations.json").exists()
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    written = (tmp_path / "durations.json").read_text()
    assert written == '{\n"a.py": 7.0,\n"b.py": 1.3\n}\n'


def test_the_stored_record_holds_seconds_of_test_files():
    assert all(file.startswith("tests/") and s >= MIN_S for file, s in stored().items())


@pytest.mark.parametrize(("worker", "first"), [("gw0", "a"), ("gw1", "b"), ("gw2", "c")])
def test_each_worker_starts_its_collection_at_a_different_file(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
    first: str,
) -> None:
    for name in ("test_a.py", "test_b.py", "test_c.py", "program.py"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    folder = pytest_collect_directory(tmp_path, request.session)
    assert folder is not None
    names = "".join(one.name.removeprefix("test_")[0] for one in folder.collect())
    assert names == {"a": "abc", "b": "bca", "c": "cab"}[first]


def test_one_process_collects_files_in_their_order(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert pytest_collect_directory(tmp_path, request.session) is None

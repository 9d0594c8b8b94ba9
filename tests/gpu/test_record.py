"""docs/gpu.md shows the content of docs/gpu.json."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_async_rl.plan import doctor
from tests.gpu import page
from tests.gpu.conftest import FIRST, LAST, OVER, Recorder


def run(**changed):
    outcome = {"passed": 2, "failed": 1, "skipped": 0, "seconds": 1.5, "reasons": ["off by 3"]}
    return {
        "date": "2031-05-06",
        "device": "a chip",
        "cuda": "13.0",
        "versions": {"torch": "9.9"},
        "commit": "abc",
        "seconds": 200.4,
        "cut": 0,
        "tests": {"test_x.py::test_sums_repeat": outcome},
        "figures": [
            {
                "test": "test_x.py::test_sums_repeat",
                "name": "an error",
                "value": 0.00123456,
                "unit": "nats",
                "against": "float64",
                "at_most": 0.25,
            }
        ],
    } | changed


def test_the_page_is_made_from_the_stored_record():
    text = page.PAGE.read_text()
    assert text == page.page(text, json.loads(page.RECORD.read_text())), (
        "docs/gpu.md is not what docs/gpu.json says: python -m tests.gpu.page"
    )


def test_a_page_without_a_run_claims_none():
    text = page.page(page.PAGE.read_text(), None)
    assert page.NEVER in text
    assert " passed" not in text.partition(page.BEGIN)[2].partition(page.END)[0]


def test_a_page_of_a_run_shows_outcomes_and_figures():
    text = page.page(page.PAGE.read_text(), run())
    assert page.NEVER not in text
    assert "2031-05-06 at abc, one a chip, CUDA 13.0, in 200 s. torch 9.9." in text
    assert "| `test_x.py` | sums repeat | 2 passed, 1 failed (off by 3) |" in text
    assert "Not complete" not in text
    assert "| an error | 0.001235 nats | at most 0.25 | float64 |" in text


def test_a_page_of_a_run_that_was_cut_short_reports_it():
    text = page.page(page.PAGE.read_text(), run(cut=3))
    assert "**Not complete**: time ran out before 3 of the tests started." in text


def test_a_new_page_keeps_what_people_wrote_around_the_record():
    text = page.PAGE.read_text()
    before, after = text.partition(page.BEGIN)[0], text.partition(page.END)[2]
    new = page.page(text, run())
    assert new.startswith(before + page.BEGIN)
    assert new.endswith(page.END + after)


@pytest.mark.parametrize("bound", [{"at_most": 0.5}, {"at_least": 2.0}, {"at_most": float("nan")}])
def test_a_figure_outside_its_bound_fails(figure, bound):
    with pytest.raises(AssertionError):
        figure("a number", 1.0, against="nothing", **bound)
    with pytest.raises(AssertionError):
        figure("a number", float("nan"), against="nothing", at_most=1.0)
    figure("a number", 1.0, against="nothing", at_most=1.0, at_least=1.0)


def reported(test, when, outcome, longrepr=None, figures=()):
    return pytest.TestReport(
        f"tests/gpu/test_x.py::{test}",
        ("test_x.py", 1, test),
        {"gpu": 1},
        outcome,
        longrepr,
        when,
        user_properties=[
            *([] if "of_the_cpu" in test else [("marked", "gpu")]),
            *(("figure", each) for each in figures),
        ],
        duration=0.5,
    )


def test_a_run_is_recorded_by_test_with_reasons_and_figures(monkeypatch):
    written = []
    monkeypatch.setattr(page, "write", written.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    python = doctor.Finding("python", "ok", "3.12.9")
    monkeypatch.setattr(doctor, "examine", lambda: [python, doctor.Finding("memory", "ok", "9")])
    recorder = Recorder()
    figure = {"name": "n", "value": 1.0}
    for when in ("setup", "call", "teardown"):
        given = [figure] if when == "call" else []
        recorder.pytest_runtest_logreport(reported("test_a[1]", when, "passed", None, given))
    skipped = ("test_x.py", 1, "Skipped: needs two")
    recorder.pytest_runtest_logreport(reported("test_a[2]", "setup", "skipped", skipped))
    recorder.pytest_runtest_logreport(
        reported("test_a[3]@group", "call", "failed", "E: 3 > 2\nmore")
    )
    recorder.pytest_runtest_logreport(reported("test_of_the_cpu", "call", "passed", None, [figure]))
    for broken_off in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR):
        recorder.pytest_sessionfinish(None, broken_off)
    Recorder().pytest_sessionfinish(None, pytest.ExitCode.OK)
    worker = Recorder(writes=False)
    worker.pytest_runtest_logreport(reported("test_a[1]", "call", "passed"))
    worker.pytest_sessionfinish(None, pytest.ExitCode.OK)
    assert written == []
    recorder.pytest_sessionfinish(None, pytest.ExitCode.TESTS_FAILED)
    (record,) = written
    assert record["tests"] == {
        "test_x.py::test_a": {
            "passed": 1,
            "failed": 1,
            "skipped": 1,
            "seconds": 2.5,
            "reasons": ["needs two", "E: 3 > 2"],
        }
    }
    assert record["figures"] == [{"test": "test_x.py::test_a", **figure}]
    assert record["versions"] == {"python": "3.12.9"}
    assert record["cut"] == 0
    assert record["device"] == "a chip"


class Item:
    def __init__(self, path: Path) -> None:
        self.path, self.nodeid = path, f"{path.name}::test_x"
        self.groups: list[str] = []
        self.user_properties: list[tuple[str, str]] = []

    def get_closest_marker(self, name: str) -> bool:
        return name == "gpu" and self.path.name != "test_record.py"

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.groups.append(mark.args[0])


class Settings:
    """Replacement of a pytest.Config with or without pytest-xdist."""

    def __init__(self, *plugins: str) -> None:
        self.pluginmanager = self
        self.plugins = plugins

    def hasplugin(self, name: str) -> bool:
        return name in self.plugins


def test_tests_that_would_begin_too_late_are_skipped_and_counted(monkeypatch):
    recorder, item = Recorder(), Item(Path("test_x.py"))
    setup = recorder.pytest_runtest_setup(item)
    next(setup)
    monkeypatch.setattr(recorder, "begun", recorder.begun - 601.0)
    with pytest.raises(pytest.skip.Exception, match="600 s"):
        next(recorder.pytest_runtest_setup(item))
    skipped = ("test_x.py", 1, f"Skipped: {OVER}")
    recorder.pytest_runtest_logreport(reported("test_x", "setup", "skipped", skipped))
    recorder.pytest_runtest_logreport(
        reported("test_y", "setup", "skipped", ("test_x.py", 1, "Skipped: needs two"))
    )
    assert recorder.cut == 1


def test_workers_divide_the_tests_by_the_program_that_they_share():
    items = [Item(Path("test_fp8.py")), Item(Path("test_fp8.py")), Item(Path("test_x.py"))]
    items[1].callspec = SimpleNamespace(params={"recipe": "delayed"})
    Recorder().pytest_collection_modifyitems(Settings(), items)
    assert [item.groups for item in items] == [[], [], []]
    Recorder().pytest_collection_modifyitems(Settings("xdist"), items)
    assert [item.groups for item in items] == [["test_fp8-"], ["test_fp8-delayed"], ["test_x-"]]


def test_steps_and_layers_come_first_and_sweeps_of_gacs_kernels_last():
    folder = sorted(Path(__file__).parent.glob("test_*.py"))
    items = [Item(path) for path in folder]
    Recorder().pytest_collection_modifyitems(Settings(), items)
    names = [item.path.name for item in items]
    others = [path.name for path in folder if path.name not in (*FIRST, *LAST)]
    assert names[: -len(LAST)] == [*FIRST, *others]
    unmarked = [item.path.name for item in items if item.user_properties != [("marked", "gpu")]]
    assert unmarked == ["test_record.py"]
    assert set(names[-len(LAST) :]) == set(LAST)

"""Set up every test: one thread per process, since tests start several; no clock on properties,
since cores are shared; the same random numbers each time, whatever ran before; and, with workers of
pytest-xdist, the assignment of tests to workers.

A worker runs whole files, in the order of `testpaths`, so that the setup of a file runs once. Files
that share results stay together. Whole runs (tests/end_to_end, tests/network) go to one worker,
from the beginning: they wait a lot, for imports, for each other's processes and for watchdogs, so
they leave cores to other tests. That worker runs up to three at a time, and most of these wait
(tests/end_to_end/conftest.py); runs of two workers could miss their deadlines. The unit tests,
which are one process, run at the same time. Tests that start engines and ranks come last.

`make test` has three workers, also on two cores: with two, a core was idle for a tenth of the time.
Each worker imports all test files, so tests import vLLM inside functions: its import takes 6 s of
CPU time, and few files need it.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.cases import same_numbers
from tests.durations import Recorder, longest_first, stored
from tests.parallel.ranks import serve_workers
from tests.thorough import THOROUGH, examples

# A shell's background jobs ignore Ctrl-C, and those of nohup a hang-up. Programs that tests
# interrupt would inherit that, and never end. A handler, which no program inherits, ignores them
# here instead.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _interrupts = _number == signal.SIGINT
        signal.signal(
            _number, signal.default_int_handler if _interrupts else lambda number, frame: None
        )
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Collections of garbage took 5 to 8 % of the CPU time in a profile of the tests. The garbage of a
# file is also collected at its end (`_exempt_from_collection`).
gc.set_threshold(100_000)
os.environ.setdefault("RAY_worker_niceness", "0")  # as the launcher does
settings.register_profile(
    "shared-cores",
    max_examples=examples(100, 30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared-cores")


@functools.cache
def _built(app: typer.Typer, _commands: tuple[Any, ...]) -> Any:
    return typer.main.get_command(app)


# CliRunner builds all commands of `mar` at each call, which takes longer than most of them. The
# second argument distinguishes an app to which a test has added a command.
typer.testing._get_command = lambda app: _built(  # type: ignore[attr-defined]
    app, tuple(command.callback for command in app.registered_commands)
)


LAYOUTS = (
    "test_layout_invariance",
    "test_layout_objectives",
    "test_gac",
    "test_gradient_view",
    "test_routing_replay",
    "test_apex",
)
MODELS = ("test_checkpoint", "test_export", "test_logprob_parity", "test_model_loading")
"""Files of tests/parallel whose data is computed once, by tests/parallel/layouts.py and
models.py."""
ENGINES = (
    "test_rollout_engine",
    "test_through_updates",
    "test_controller_with_engines",
    "test_environments",
    "test_routed_experts",
    "test_workers",
)
"""Files of tests/engine that share one Ray and one server of engines, and some of them engines
(conftest.py there)."""


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment, which Ray and engines of later tests inherit. vLLM, for instance,
    adds libraries to LD_PRELOAD when a test makes a config of it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    same_numbers()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of each test file to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Recorder())
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        serve_workers()


class Rotated(pytest.Dir):
    """A folder whose collection starts at a different file in each worker of xdist."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        found = [*super().collect()]
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(found) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        return found[first:] + found[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Let each worker start at a different file.

    Each worker imports all files. The first to import a module in a fresh checkout compiles it for
    all workers, and workers with the same order would compile each module at the same moment."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    rotated: pytest.Dir = Rotated.from_parent(parent, path=path)
    return rotated


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that only `make test-all` runs (tests/thorough.py), and put long files first
    for xdist's workers (tests/durations.py)."""
    if not THOROUGH:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if hasattr(config, "workerinput"):
        place = {path: n for n, path in enumerate(config.getini("testpaths"))}
        # The same order on every worker, which collects in its own (`Rotated`).
        files = sorted(
            set(map(file_of, items)),
            key=lambda file: (place.get(str(Path(file).parent), len(place)), file),
        )
        scopes = {file: scope_of(file) for file in files}
        places = {file: n for n, file in enumerate(longest_first(files, scopes, stored()))}
        items.sort(key=lambda item: places[file_of(item)])


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.imported_at_collection = frozenset(sys.modules)  # type: ignore[attr-defined]
    _exempt_from_collection()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or file_of(nextitem) != file_of(item):
        _exempt_from_collection()


def _exempt_from_collection() -> None:
    """Exempt all live objects from Python's garbage collection.

    Each full collection would walk through the imported libraries, which cost a tenth of the unit
    tests, and through what earlier files left in caches. Megatron collects at every save: the
    tests in tests/loop took three times as long after the unit tests as alone.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    # At exit, libraries report what was not freed.
    gc.unfreeze()


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def scope_of(file: str) -> str:
    """Return the name of the unit that a worker runs at once: `file`, or the files that share
    results with it."""
    if file.startswith(("tests/end_to_end/", "tests/network/")):
        return "runs"
    for together in (LAYOUTS, MODELS, ENGINES):
        if Path(file).stem in together and file.startswith(("tests/parallel/", "tests/engine/")):
            return together[0]
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # this would sort them by their number of tests
    return FilesTogether(config, log)

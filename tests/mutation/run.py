"""Mutation test: edits one place of the package at a time and runs the nearest tests: unit tests by
the lines that they execute, and, if none fails, whole files with ranks, engines or commands.

    python -m tests.mutation.run                          a sample of the package
    python -m tests.mutation.run --seed 7 --count 100     another sample
    python -m tests.mutation.run --only flow/buffer.py    a sample of some files
    python -m tests.mutation.run --key _gather_bucket --tests tests/parallel/test_export.py
                                                          tests that start ranks or engines

Prints every mutant with `killed by TEST`, `killed by time or crash`, or `SURVIVED`, and fails if
more than `--limit` mutants survive that reviewed.txt does not list: those change the behaviour of
the package, and no nearby test notices.

Invariants:
- the checkout is never edited: mutants are in a copy of it in a temporary folder, which every
  process of a test imports;
- every mutant starts from a process that has imported third-party packages (which takes longer than
  most tests) but no module of the package;
- tests that fail, or do not run, without a mutant judge none;
- no process that a test started outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mutation.executed import PYTEST, RECORDER, ExecutedFunctions, among, recorded
from tests.mutation.mutants import Mutant, package_mutants, sample
from tests.mutation.nearest import FOLDERS, PROCESSES, ImportMap
from tests.parallel.ranks import SERVER

# Threads of libraries would not exist after a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

ROOT = Path(__file__).parents[2]
REVIEWED = Path(__file__).with_name("reviewed.txt")
PACKAGE = "megatron_async_rl"
SEED = 29
COUNT = 100
NEAREST = 6
WHOLE_LOOP = "tests/loop/test_loop.py"
"""Its tests execute much of the package: those that execute a mutant's lines run, too."""
DOCUMENTED = {
    f"{PACKAGE}/config/": "tests/unit/test_config.py::test_the_page_of_keys_is_up_to_date",
}
"""Beginning of a file -> the test that compares its values with a page of docs/. Such values are
read when a module is imported, so no test executes their lines."""
PROCESS_TESTS_S = 120.0
"""Total duration of the test files with processes that judge a mutant that the others leave; one
file may take longer."""
TESTS_S = 60.0
"""Total duration of the tests of one round that execute a mutant's lines."""
NAMED_TESTS_S = 900.0
FILE_S = 900.0
"""Longest time that the tests of one file may take without a mutant."""
OTHERS_S, ELSEWHERE_S = 15.0, 60.0
"""Total length of tests that may execute a mutant's lines unseen: in a fixture of an earlier test,
or in another process; the second if no test in this process executes them."""
FACTOR = 6.0
EXTRA_S = 60.0
"""A test with a mutant may take FACTOR times its usual duration plus EXTRA_S; longer is a hang."""

# The imports of tests/parallel/preloaded.py and of the unit tests; the third-party packages among
# them are imported before the first fork.
PRELOADED = f"""
import sys
import {PACKAGE}.cli, {PACKAGE}.launch.launcher, {PACKAGE}.plan.preflight
import {PACKAGE}.policy.policy, {PACKAGE}.weights.convert, {PACKAGE}.weights.export
import hypothesis.strategies, numpy.testing, transformers, ray, safetensors.torch
print(*sys.modules, sep="\\n")
"""


@dataclass
class Baseline:
    """A test file without a mutant. seconds, lines: of each test that passes; lines of the package
    as `file:line`. imported: lines that importing the file executes. elsewhere: functions that
    other processes of the tests execute (executed.py). digests: of the package's files in these."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def files(self) -> set[str]:
        """Return the files of the package that the tests execute."""
        places = [*self.imported, *self.elsewhere]
        for lines in self.lines.values():
            places += lines
        return {place.partition(":")[0] for place in places}


class LineRecorder:
    """A pytest plug-in that records the lines of the package that each test executes first."""

    TOOL = 4

    def __init__(self, root: Path) -> None:
        self._prefix = f"{root}/{PACKAGE}/"
        self._root = f"{root}/"
        self._now: set[str] = set()
        self._imported: set[str] = set()
        self._passed: dict[str, bool] = {}
        self.baseline = Baseline()
        sys.monitoring.use_tool_id(self.TOOL, "mutation")
        sys.monitoring.register_callback(self.TOOL, sys.monitoring.events.LINE, self._line)
        sys.monitoring.set_events(self.TOOL, sys.monitoring.events.LINE)

    def _line(self, code: Any, line: int) -> Any:
        if code.co_filename.startswith(self._prefix):
            self._now.add(f"{code.co_filename.removeprefix(self._root)}:{line}")
        return sys.monitoring.DISABLE  # until the next test

    def pytest_collection_finish(self) -> None:
        self._imported, self._now = self._now, set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._now = set()
        sys.monitoring.restart_events()
        start = time.monotonic()
        result = yield
        self.baseline.seconds[item.nodeid] = round(time.monotonic() - start, 3)
        self.baseline.lines[item.nodeid] = sorted(self._now)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        good = report.passed or (report.when != "call" and not report.failed)
        self._passed[report.nodeid] = self._passed.get(report.nodeid, True) and good

    def pytest_sessionfinish(self) -> None:
        sys.monitoring.set_events(self.TOOL, 0)
        for test, passed in self._passed.items():
            if not passed:
                del self.baseline.seconds[test], self.baseline.lines[test]
        self.baseline.imported = sorted(self._imported)


class ChosenTests:
    """A pytest plug-in that runs the tests named in `limits`, in that order, and records the first
    one to fail. Ends the process if a test takes longer than its limit, in seconds."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._order = {test: at for at, test in enumerate(limits)}
        self.failed = ""
        faulthandler.dump_traceback_later(EXTRA_S * FACTOR, exit=True)  # for imports

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        faulthandler.dump_traceback_later(self._limits[item.nodeid], exit=True)
        result = yield
        faulthandler.dump_traceback_later(EXTRA_S, exit=True)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"


class Workspace:
    """A copy of the checkout, in which tests run with one file replaced."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        # Where Python finds it at the start of each process: tests change PYTHONPATH.
        shutil.copy2(ROOT / RECORDER, self.root)
        self._output = folder / "output"
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", self.root / PACKAGE, self.root / "tests"],
            check=True,
        )
        # For the processes that tests start; ahead of an installed package. Byte code of a mutant
        # would outlive it, because it may have the size and the second of the original.
        os.environ["PYTHONPATH"] = str(self.root)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.root), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.chdir(self.root)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Any:
        path = self.root / mutant.file
        source = path.read_text(encoding="utf-8")
        before = path.stat()  # byte code is of one time of the source
        compiled = Path(importlib.util.cache_from_source(str(path)))
        kept = compiled.read_bytes()
        compiled.unlink()
        path.write_text(mutant.apply(source), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            compiled.write_bytes(kept)

    def run(self, act: Callable[[], Any], timeout: float) -> Any:
        return run_in_child(act, timeout, self._output)


def run_in_child(act: Callable[[], Any], timeout: float, output: Path) -> Any:
    """Return the result of `act` in a child process, converted by JSON; None if it takes longer
    than `timeout` or the child fails. Its output goes to a file. Ends all processes that the child
    started."""
    before = set(psutil.Process().children(recursive=True))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(target, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = 1
        with contextlib.suppress(BaseException):
            result = act()
            with open(write, "w", encoding="utf-8") as pipe:
                json.dump(result, pipe)
            status = 0
        os._exit(status)
    os.close(write)
    try:
        return _result(child, read, timeout)
    finally:
        _end_new_children(before)


def _result(child: int, read: int, timeout: float) -> Any:
    end: float | None = time.monotonic() + timeout
    process = os.pidfd_open(child)
    parts = []
    with open(read, "rb") as pipe:
        waiting: list[Any] = [pipe, process]
        while process in waiting:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, _, _ = select.select(waiting, [], [], left)
            if not ready:
                # A child that does not lead a group yet has started no process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.kill(child, signal.SIGKILL)
                end = None
            if pipe in ready:
                parts.append(os.read(pipe.fileno(), 1 << 16))
                if not parts[-1]:
                    waiting.remove(pipe)
            elif process in ready:
                waiting.remove(process)
    os.close(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # it is not reaped yet, so its id is not reused
    _, status = os.waitpid(child, 0)
    return json.loads(b"".join(parts)) if status == 0 else None


def _end_new_children(before: set[psutil.Process]) -> None:
    """End the processes that a test left; this process is their subreaper, so it gets orphans."""
    left = [one for one in psutil.Process().children(recursive=True) if one not in before]
    for orphan in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(left)


def _become_subreaper() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _preload() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", PRELOADED], capture_output=True, check=True, text=True
    )
    for name in listed.stdout.split():
        if name.split(".")[0] not in (PACKAGE, "__main__", "tests") and name not in sys.modules:
            with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _pytest(files: Iterable[str], plugin: Any, *options: str) -> int:
    """Run pytest in this process, in the copy."""
    return int(
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, *files], [plugin])
    )


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Judge:
    """Decides which mutants survive. Baselines are kept in `build/mutation` of the checkout, by a
    digest of the test file. A baseline is measured again if it executes the mutant's file and that
    file has changed since."""

    def __init__(self, workspace: Workspace, nearest: int) -> None:
        self._workspace = workspace
        self._nearest = nearest
        self._map = ImportMap(workspace.root)
        self._baselines: dict[str, Baseline] = {}
        self._cache = ROOT / "build" / "mutation"
        self._digests = {
            str(path.relative_to(workspace.root)): _digest_of(path)
            for path in (workspace.root / PACKAGE).rglob("*.py")
        }
        self._mutated = ""
        """File of the mutant that is judged."""
        self._executed = ExecutedFunctions(workspace.root, self._cache)

    def verdict(self, mutant: Mutant) -> str:
        """Return `survived`, or the reason why the mutant was killed."""
        self._mutated = mutant.file
        places = {f"{mutant.file}:{line}" for line in range(mutant.lines[0], mutant.lines[1] + 1)}
        near = self._map.nearest(mutant.file)[: self._nearest]
        # All others: a module that is found by its name, such as a loss, is imported by no test.
        far = [one for one in self._map.tests(FOLDERS) if one not in (*near, WHOLE_LOOP)]
        others: list[tuple[float, str]] = []
        executed = False
        # Most mutants only need the baseline of one file.
        for some in filter(None, (near[:1], near[1:3], near[3:], [WHOLE_LOOP, *far])):
            tests, more = self._tests(some, places, mutant.place, imports=some[0] in near)
            others += more
            executed = executed or bool(tests)
            if (killer := self._killer(mutant, self._within(tests, TESTS_S))) is not None:
                return killer
        length = OTHERS_S if executed else ELSEWHERE_S
        chosen = self._within([test for _, test in sorted(others)], length)
        for prefix, test in DOCUMENTED.items():
            passes = self._baseline(test.partition("::")[0]).seconds
            if mutant.file.startswith(prefix) and test in passes:
                chosen.append(test)
        return self._killer(mutant, chosen) or self._killer_in_processes(mutant) or "survived"

    def _killer_in_processes(self, mutant: Mutant) -> str | None:
        """The first test file with ranks, engines or commands that fails, or null. Whole files run,
        because functions executed in other processes are known by file."""
        near = self._map.nearest(mutant.file, PROCESSES)
        left_s = PROCESS_TESTS_S
        for file, seconds in self._executed.fastest_with(
            self._map.tests(PROCESSES), mutant.file, mutant.place, FILE_S, near
        ):
            if seconds > left_s and left_s < PROCESS_TESTS_S:
                break
            left_s -= seconds
            # Recorded files pass. A test that fails once may also fail without the mutant, on a
            # busy machine, and then kills none.
            if self.verdict_of(mutant, [file]) != "survived" and self._passes([file]):
                return file
        return None

    def verdict_of(self, mutant: Mutant, tests: list[str]) -> str:
        """Return `survived` or `killed` with the named tests, without a choice by their lines."""
        with self._workspace.mutated(mutant):
            return "survived" if self._passes(tests) else "named tests"

    def _passes(self, tests: list[str]) -> bool:
        """Return True if the tests pass with the present files."""

        # A process of its own: ranks and engines do not start from a fork of this one.
        def act() -> int:
            return subprocess.run([*PYTEST, *tests], check=False).returncode

        return bool(self._workspace.run(act, NAMED_TESTS_S) == 0)

    def _within(self, tests: list[str], seconds: float) -> list[str]:
        """Return the first tests whose total duration is at most `seconds`, but at least one."""
        total, chosen = 0.0, list[str]()
        for test in tests:
            total += self._baselines[test.partition("::")[0]].seconds[test]
            if total <= seconds or not chosen:
                chosen.append(test)
        return chosen

    def _tests(
        self, files: list[str], places: set[str], function: str, *, imports: bool
    ) -> tuple[list[str], list[tuple[float, str]]]:
        """Return tests that execute one of the lines, and others that may, as (seconds, test):
        tests of a file whose fixtures, imports (if `imports`) or other processes execute them."""
        first, others = [], []
        for file in files:
            baseline = self._baseline(file)
            hits = {test for test, lines in baseline.lines.items() if not places.isdisjoint(lines)}
            unseen = (
                bool(hits)
                or (imports and not places.isdisjoint(baseline.imported))
                or among(baseline.elsewhere, next(iter(places)).partition(":")[0], function)
            )
            for test, seconds in sorted(baseline.seconds.items(), key=lambda item: item[1]):
                if test in hits:
                    first.append(test)
                elif file != WHOLE_LOOP and unseen:
                    others.append((seconds, test))
        return first, others

    def _killer(self, mutant: Mutant, tests: list[str]) -> str | None:
        """Return the first of the tests that fails, `time or crash`, or None."""
        if not tests:
            return None
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        limits = {
            test: FACTOR * self._baselines[test.partition("::")[0]].seconds[test] + EXTRA_S
            for test in tests
        }

        def act() -> str | None:
            chosen = ChosenTests(limits)
            code = _pytest(files, chosen, "-x", "-p", "no:faulthandler")
            return (chosen.failed or "import") if code else ""

        with self._workspace.mutated(mutant):
            found = self._workspace.run(act, sum(limits.values()) + EXTRA_S * FACTOR)
        return "time or crash" if found is None else found or None

    def _baseline(self, file: str) -> Baseline:
        if file not in self._baselines:
            path = self._path_of(file)
            self._baselines[file] = (
                Baseline(**json.loads(path.read_text(encoding="utf-8")))
                if path.exists()
                else self._stored(file)
            )
        measured = self._baselines[file].digests.get(self._mutated)
        if measured is not None and measured != self._digests.get(self._mutated):
            self._baselines[file] = self._stored(file)
        return self._baselines[file]

    def _path_of(self, file: str) -> Path:
        # Named by the test file alone: an edit of the package changes few baselines.
        digest = hashlib.sha256((self._workspace.root / file).read_bytes()).hexdigest()
        return self._cache / f"{digest[:32]}.json"

    def _stored(self, file: str) -> Baseline:
        """Measure a test file, and store the result."""
        start, path = time.monotonic(), self._path_of(file)
        baseline = self._measured(file)
        baseline.digests = {one: self._digests[one] for one in baseline.files() & {*self._digests}}
        # A file that did not end, as on a busy machine, is measured again next time.
        if baseline.seconds:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(vars(baseline)), encoding="utf-8")
        count = len(baseline.seconds)
        print(f"  {file}: {count} tests in {time.monotonic() - start:.0f} s", flush=True)
        return baseline

    def _measured(self, file: str) -> Baseline:
        def act() -> dict[str, Any]:
            recorder = LineRecorder(self._workspace.root)
            with recorded(self._workspace.root, os.environ) as functions:
                _pytest([file], recorder)
            recorder.baseline.elsewhere = functions
            return vars(recorder.baseline)

        found = self._workspace.run(act, FILE_S)
        if found is None:
            print(f"  {file}: did not end within {FILE_S:.0f} s, or crashed: judges no mutant")
        return Baseline(**found) if found is not None else Baseline()


def reviewed() -> set[str]:
    """Return the keys of the mutants that were judged to change nothing that matters."""
    lines = REVIEWED.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation test of the package.")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MAR_MUTATION_SEED", SEED)))
    parser.add_argument("--count", type=int, default=int(os.environ.get("MAR_MUTANTS", COUNT)))
    parser.add_argument("--only", action="append", help="end of a file's path; repeatable")
    parser.add_argument("--key", help="only mutants whose key contains this text")
    parser.add_argument("--nearest", type=int, default=NEAREST, help="test files per mutant")
    parser.add_argument("--tests", nargs="+", help="these test files instead of the nearest ones")
    parser.add_argument("--limit", type=float, default=0.05, help="share of mutants to survive")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in package_mutants(ROOT / PACKAGE)
        if (not options.only or mutant.file.endswith(tuple(options.only)))
        and (not options.key or options.key in mutant.key)
    ]
    drawn = sample(mutants, options.count, options.seed)
    _become_subreaper()
    os.environ.pop("MAR_TESTS", None)  # the tests of the gate, without those marked `thorough`
    os.environ.pop(SERVER, None)  # the server has imported another checkout
    # A shell that starts this in the background has SIGINT ignored, and tests that press Ctrl-C
    # would wait forever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    survivors = []
    start = time.monotonic()
    known = reviewed()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        workspace = Workspace(Path(folder).resolve())
        _preload()
        judge = Judge(workspace, options.nearest)
        for at, mutant in enumerate(drawn, 1):
            begin = time.monotonic()
            named = options.tests
            found = judge.verdict_of(mutant, named) if named else judge.verdict(mutant)
            listed = " (reviewed)" if mutant.key in known else ""
            shown = f"SURVIVED{listed}" if found == "survived" else f"killed by {found}"
            place = f"{mutant.file}:{mutant.lines[0]}"
            print(f"{at:3} {place} {mutant.key}", flush=True)
            print(f"      {shown} ({time.monotonic() - begin:.0f} s)", flush=True)
            if found == "survived":
                survivors.append(mutant)
        os.chdir("/")
    unknown = [mutant for mutant in survivors if mutant.key not in known]
    for mutant in unknown:
        print(f"{mutant.file}:{mutant.lines[0]}\n{mutant.key}")
    print(
        f"seed {options.seed}: {len(drawn)} mutants, {len(drawn) - len(survivors)} killed,"
        f" {len(survivors) - len(unknown)} reviewed, {len(unknown)} survived,"
        f" {time.monotonic() - start:.0f} s"
    )
    return int(len(unknown) > options.limit * len(drawn))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # an orderly end would make triton list all that it leaked

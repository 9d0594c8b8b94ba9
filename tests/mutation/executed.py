"""Functions of the package that a test file executes in all its processes.

For files with ranks, engines or commands they are stored by name, in `build/mutation` of the
checkout, so an edit of the package does not invalidate them; an edit of the test file does.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
RECORDER = Path("benchmarks") / "call_recorder" / "sitecustomize.py"


@contextmanager
def recorded(root: Path, environment: MutableMapping[str, str]) -> Iterator[list[str]]:
    """Record, in Python processes that start with `environment` and import RECORDER, the calls of
    functions of the package in the checkout `root`. At the end the list has them as `file:qualified
    name`, sorted."""
    functions: list[str] = []
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        environment["MAR_CALLS"] = folder
        environment["MAR_CALLS_ONCE"] = "1"
        try:
            yield functions
        finally:
            environment["MAR_CALLS"] = ""
        calls = {
            line.partition(",")[2]
            for file in Path(folder).iterdir()
            for line in file.read_text(encoding="utf-8").splitlines()
        }
    for call in calls:
        path, function = json.loads(f"[{call}")
        name = function.replace(".<locals>", "")
        functions.append(f"{Path(path).relative_to(root)}:{name}")
    functions.sort()


def among(functions: Iterable[str], file: str, place: str) -> bool:
    """Return True if `functions` has `place` of `file` or a part of it. An import executes classes
    and modules."""
    begin = f"{file}:{place}"
    part = f"{begin}." if place else begin
    return any(name == begin or name.startswith(part) for name in functions)


@dataclass(frozen=True)
class Execution:
    """One run of a test file. functions: see `recorded`; empty if a test failed. digest: of the
    test file."""

    digest: str
    seconds: float
    functions: list[str]


class ExecutedFunctions:
    """Executions of test files in the checkout `root`, measured once and stored in `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._path = folder / "executed.json"
        self._found: dict[str, Execution] = {}
        if self._path.exists():
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            self._found = {file: Execution(**one) for file, one in stored.items()}

    def of(self, file: str, timeout_s: float) -> Execution:
        digest = hashlib.sha256((self._root / file).read_bytes()).hexdigest()
        if file not in self._found or self._found[file].digest != digest:
            start = time.monotonic()
            functions = self._record(file, timeout_s)
            seconds = time.monotonic() - start
            print(f"  {file}: {len(functions)} functions in {seconds:.0f} s", flush=True)
            self._found[file] = Execution(digest, round(seconds, 1), functions)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stored = {file: asdict(one) for file, one in sorted(self._found.items())}
            self._path.write_text(json.dumps(stored), encoding="utf-8")
        return self._found[file]

    def fastest_with(
        self,
        files: Sequence[str],
        file: str,
        place: str,
        timeout_s: float,
        near: Sequence[str] = (),
    ) -> list[tuple[str, float]]:
        """Return those of the test files `files` that execute `place` of `file`, with seconds: the
        fastest first, after the two nearest of `near`."""
        found = {test: self.of(test, timeout_s) for test in files}
        chosen = {
            test: one.seconds for test, one in found.items() if among(one.functions, file, place)
        }
        first = [test for test in near if test in chosen][:2]
        rest = sorted(chosen.keys() - set(first), key=lambda test: (chosen[test], test))
        return [(test, chosen[test]) for test in (*first, *rest)]

    def _record(self, file: str, timeout_s: float) -> list[str]:
        environment = dict(os.environ)
        try:
            with recorded(self._root, environment) as functions:
                done = subprocess.run(
                    [*PYTEST, file],
                    cwd=self._root,
                    env=environment,
                    capture_output=True,
                    check=False,
                    timeout=timeout_s,
                )
        except subprocess.TimeoutExpired:
            return []
        if done.returncode:
            print(done.stdout.decode(errors="replace")[-2000:], flush=True)
            return []
        return functions

"""Figures of the GPU tests, and the record of a run of them: docs/gpu.json, which docs/gpu.md
shows.

`make gpu-tests` is `pytest tests/gpu --record`: it refuses to run without a CUDA device, runs all
tests within `LIMIT_S`, and writes both files. Without `--record` figures are only compared with
their bounds.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_async_rl.plan import doctor
from tests.gpu import page

os.environ.setdefault("OMP_NUM_THREADS", "1")

LIMIT_S = 600.0
"""Time of a recorded run: tests that would begin later are skipped, with a reason."""
OVER = f"the {LIMIT_S:.0f} s of a recorded run were over"
FIRST = ("test_train_step.py", "test_parity.py", "test_layers.py")
LAST = ("test_gac_offload.py", "test_gac_kernels.py")
"""Files that a recorded run starts first and last: if the time runs out, the least important tests
are left out."""
SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FRAMEWORK": "pytorch"}
"""Default environment of the processes that the tests start."""


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "write docs/gpu.json and docs/gpu.md from this run, on a CUDA device"
    parser.addoption("--record", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--record"):
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--record: torch {torch.__version__} sees no CUDA device, and figures of docs/gpu.md"
            " are measured on one. Without it: pytest tests/gpu runs what a CPU can show, and"
            " MAR_GPU_TESTS=cpu the other tests' code"
        )
    if os.environ.get("MAR_GPU_TESTS"):
        raise pytest.UsageError("--record: unset MAR_GPU_TESTS, which moves the tests to the CPU")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Workers of pytest-xdist order and skip tests; the process that started them writes.
    writes = not hasattr(config, "workerinput")
    config.pluginmanager.register(Recorder(writes=writes), "gpu-record")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that compares a number with its bound, and records both."""

    def hold(
        name: str,
        value: float,
        *,
        against: str,
        at_most: float = math.inf,
        at_least: float = -math.inf,
        unit: str = "",
    ) -> None:
        kept = {"name": name, "value": float(value), "unit": unit, "against": against}
        bounds = {"at_most": at_most, "at_least": at_least}
        kept |= {key: bound for key, bound in bounds.items() if math.isfinite(bound)}
        record_property("figure", kept)
        assert at_least <= value <= at_most, kept

    return hold


class Recorder:
    """Collects the results of the tests marked `gpu`. writes: True if this process writes them."""

    def __init__(self, *, writes: bool = True) -> None:
        self.begun = time.monotonic()
        self.writes = writes
        self.tests: dict[str, dict[str, Any]] = {}
        self.figures: list[dict[str, Any]] = []
        self.cut = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        places = {name: place - len(FIRST) for place, name in enumerate(FIRST)}
        places |= dict.fromkeys(LAST, 1)
        items.sort(key=lambda item: places.get(item.path.name, 0))
        for item in items:
            if item.get_closest_marker("gpu"):
                item.user_properties.append(("marked", "gpu"))
        if config.pluginmanager.hasplugin("xdist"):
            # One worker runs all tests that share the result of a program (--dist loadgroup).
            for item in items:
                item.add_marker(pytest.mark.xdist_group(_program(item)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() - self.begun > LIMIT_S:
            pytest.skip(OVER)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Not by keywords, which contain the names of folders, too.
        if ("marked", "gpu") not in report.user_properties:
            return
        # pytest-xdist appends the group.
        test = re.split(r"[\[@]", report.nodeid.rpartition("/")[2])[0]
        found = self.tests.setdefault(
            test, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "reasons": []}
        )
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        if report.when != "call" and report.outcome == "passed":
            return
        found[report.outcome] += 1
        if report.outcome != "passed":
            reason = _reason(report)
            self.cut += reason == OVER
            found["reasons"] += [reason] if reason not in found["reasons"] else []
        self.figures += [
            {"test": test, **kept} for name, kept in report.user_properties if name == "figure"
        ]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record, but keep that of an earlier run if this one was not completed."""
        complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not (self.writes and self.tests and complete):
            return
        parts = {"python", *(part.distribution for part in doctor.PARTS)}
        page.write(
            {
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "device": torch.cuda.get_device_name(),
                "cuda": torch.version.cuda,
                "versions": {f.part: f.found for f in doctor.examine() if f.part in parts},
                "commit": _commit(),
                "seconds": round(time.monotonic() - self.begun, 1),
                "cut": self.cut,
                "tests": self.tests,
                "figures": self.figures,
            }
        )


def _program(item: pytest.Item) -> str:
    """Return the file, and the recipe of FP8 tests, whose programs are separate."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return f"{item.path.stem}-{parameters.get('recipe', '')}"


def _reason(report: pytest.TestReport) -> str:
    """Return the last line of a skip or a failure."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.strip().splitlines()[0][:200]


def _commit() -> str | None:
    """Return the commit; None if the tree is not a checkout."""
    ask = ["git", "-C", str(page.ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

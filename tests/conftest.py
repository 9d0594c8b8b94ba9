"""For every test: one thread per process, since tests start several; no clock on properties, since
cores are shared; and, where pytest-xdist is asked for workers, two lanes of tests.

Whole runs (tests/end_to_end) wait a lot, for imports, for each other's processes and for watchdogs,
so they leave a core to the other tests; two of them at a time would not, and could miss their
deadlines.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "runs" if nodeid.startswith("tests/end_to_end/") else "rest"

    return Lanes(config, log)

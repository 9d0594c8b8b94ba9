"""The tests and cases that only `make test-all` runs.

The gate runs every kind of test on cases that can each fail independently. `make test-all` adds
tests that take long and rarely find more: all pairs of layouts, methods and damages, whole runs
with other settings or lost engines, a controller whose engines join, leave and die, `mar eval` and
`mar convert` of the checkpoint of a run, training steps in bfloat16, programs of GPU tests on a
CPU, several machines, Slurm and the tables of studies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

THOROUGH = os.environ.get("MAR_TESTS") == "all"
"""True under `make test-all`, which sets MAR_TESTS=all."""
thorough = pytest.mark.thorough
"""Mark of a test, a module (`pytestmark`) or a case (`pytest.param(..., marks=thorough)`) that the
gate leaves out; tests/conftest.py deselects it."""


def chosen[Case](cases: Mapping[str, Case], *in_gate: str) -> dict[str, Case]:
    """Return all `cases`, or in the gate those named `in_gate`.

    For tables whose results are computed together, so that the gate does not compute the others.
    Raises ValueError in the gate if a name is in no case.
    """
    unknown = set(in_gate) - cases.keys()
    if unknown and not THOROUGH:
        raise ValueError(f"no case is named {sorted(unknown)}; the cases are {sorted(cases)}")
    return {name: case for name, case in cases.items() if THOROUGH or name in in_gate}


def examples(thorough: int, gate: int) -> int:
    """Return the number of examples that hypothesis tries for a property."""
    return thorough if THOROUGH else gate

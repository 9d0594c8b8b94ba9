"""Comparison of cases with their references, and display of the results.

Every case runs in float64. A float64 reference must match within 1e-6 absolute plus 1e-6 relative.
A float32 reference contains float32 rounding, which heavy tails enlarge. If the method runs per
micro-batch, such a case also runs in float32, and each number must match in one of the two runs
within 1e-5 absolute plus 1e-4 relative. For a sum, the relative part is at least 1e-5 of the sum of
its terms' magnitudes, because the sum contains the rounding errors of all terms.

Invariant: every case has a result, with a reason if it failed, and no failure prevents the cases
after it from running.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from megatron_async_rl.conform.methods import Case, CaseValues, Numbers, run_case

TOLERANCE = {"float64": (1e-6, 1e-6), "float32": (1e-5, 1e-4)}
"""dtype of the reference -> (absolute tolerance, relative tolerance)."""
OF_TERMS = 1e-5
"""Tolerance of a float32 sum, relative to the sum of its terms' magnitudes."""


@dataclass(frozen=True)
class CaseResult:
    """Result of one case. error: largest absolute difference; nan if the case could not run.
    reason: cause of the failure; empty if the case passed."""

    case: str
    method: str
    error: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return not self.reason


def judge(case: Case) -> CaseResult:
    """Run a case and compare its numbers with the reference. Raises no error of the case or of the
    method: the result has the reason."""
    method = f"{case.kind} {case.name}"
    try:
        return CaseResult(case.case, method, *_compare(case))
    # Handle ValidationError first, because it is a subclass of ValueError.
    except ValidationError as error:
        invalid = [
            f"params.{'.'.join(map(str, one['loc'])) or case.name}: {one['msg']}"
            for one in error.errors()
        ]
        return CaseResult(case.case, method, math.nan, "; ".join(invalid))
    except ValueError as error:
        return CaseResult(case.case, method, math.nan, _line(error))
    # Any other error of a method must fail only this case, too.
    except (
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        return CaseResult(case.case, method, math.nan, f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    """Return the first line of the error's message."""
    return (str(error).splitlines() or ["no message"])[0]


def _compare(case: Case) -> tuple[float, str]:
    """Return (largest error, reason); the reason describes the first key that does not match."""
    # Compare a float32 reference with two runs, because its rounding may match either of them.
    single = case.dtype == "float32"
    runs = [
        run_case(case, dtype)
        for dtype in ((torch.float64, torch.float32) if single else (torch.float64,))
    ]
    largest, reason = 0.0, ""
    for key, expected in case.expect.items():
        numbers = [
            (_value(case, key, computed), computed.scales.get(key, 0.0))
            for computed in runs
            if computed is not None
        ]
        # For each element, the run with the smaller error counts.
        errors = np.stack([_error(expected, value) for value, _ in numbers])
        allowed = np.stack([_allowed(case, expected, scale) for _, scale in numbers])
        wrong = np.asarray(~(errors <= allowed).any(axis=0) | ~np.isfinite(errors).all(axis=0))
        error = np.where(wrong, errors.max(axis=0), errors.min(axis=0))
        largest = max(largest, float(error.max(initial=0.0)))
        if wrong.any() and not reason:
            worst = int(errors.reshape(len(errors), -1).max(axis=1).argmax())
            reason = _reason(key, expected, numbers[worst][0], wrong, error)
    return largest, reason


def _value(case: Case, key: str, computed: CaseValues) -> Numbers:
    """Return the computed numbers for `expect.<key>`. Raises ValueError if the method does not
    compute them, or computes another shape."""
    if key not in computed.values:
        raise ValueError(
            f"expect.{key}: {case.kind} {case.name} computes only"
            f" {', '.join(sorted(computed.values))}"
        )
    # Compare shapes, because broadcasting would hide a method that reduces over the wrong axis.
    if computed.values[key].shape != case.expect[key].shape:
        shapes = [list(values.shape) for values in (case.expect[key], computed.values[key])]
        raise ValueError(f"expect.{key} has shape {shapes[0]}, but the result has {shapes[1]}")
    return computed.values[key]


def _error(expected: Numbers, computed: Numbers) -> Numbers:
    """Return the absolute error of each element; inf if one of the two numbers is not finite and
    differs from the other."""
    with np.errstate(invalid="ignore"):
        # Compare before subtracting: the difference of equal infinities is nan.
        difference = np.abs(computed - expected)
        difference = np.where(np.isnan(difference), np.inf, difference)
        return np.where(computed == expected, 0.0, difference)


def _allowed(case: Case, expected: Numbers, scale: float) -> Numbers:
    """Return the largest permitted error of each element. scale: sum of the magnitudes of the terms
    of a sum, else 0."""
    single = case.dtype == "float32"
    absolute, relative = TOLERANCE[case.dtype]
    # Expected values may be so close to the largest float that the product overflows.
    with np.errstate(over="ignore"):
        by_value = relative * np.abs(np.nan_to_num(expected))
        return np.asarray(
            absolute + (np.maximum(by_value, OF_TERMS * scale) if single else by_value)
        )


def _reason(
    key: str, expected: Numbers, computed: Numbers, wrong: NDArray[np.bool_], error: Numbers
) -> str:
    """Return the message for the element with the largest error among the `wrong` ones."""
    place = np.unravel_index(int(np.argmax(np.where(wrong, error, -1.0))), error.shape)
    index = "".join(f"[{i}]" for i in place)
    amount = f" ({int(wrong.sum())} of {wrong.size} differ)" if wrong.size > 1 else ""
    return f"{key}{index} is {computed[place]:.10g}, expected {expected[place]:.10g}{amount}"


def show(files: Mapping[Path, Sequence[Case]], console: Console) -> int:
    """Run every case and print its result under the name of its file. Return the exit code: 0 if
    every case passed, else 1."""
    total, failed = sum(map(len, files.values())), 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cases", total=total)
        for file, cases in files.items():
            console.print(Text(str(file), style="bold"), soft_wrap=True)
            for line, passed in _lines(cases):
                console.print(line, soft_wrap=True)
                failed += not passed
                progress.advance(task)
    if failed:
        console.print(Text(f"{failed} of {total} cases failed", style="red bold"))
        return 1
    console.print(Text(f"{total} of {total} cases passed", style="green bold"))
    return 0


def _lines(cases: Sequence[Case]) -> Iterator[tuple[Text, bool]]:
    """Run the cases of one file. Yield for each its line, and True if it passed."""
    case_width = max(len(case.case) for case in cases)
    method_width = max(len(f"{case.kind} {case.name}") for case in cases)
    for outcome in map(judge, cases):
        mark = ("pass", "green") if outcome.passed else ("FAIL", "red bold")
        error = (
            "largest error  -      "
            if math.isnan(outcome.error)
            else f"largest error {outcome.error:8.1e}"
        )
        text = Text.assemble(
            "  ",
            mark,
            f"  {outcome.case:{case_width}}  {outcome.method:{method_width}}  {error}  ",
            outcome.reason,
        )
        text.rstrip()
        yield text, outcome.passed

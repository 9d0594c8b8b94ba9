"""Judgement and display of cases.

Every case runs in float64. A float64 reference has to be met to 1e-6 absolute plus 1e-6 relative. A
reference of float32 numbers holds float32's rounding, which heavy tails enlarge: if the method runs
per micro-batch, the case runs in float32 too, and each number has to be met in one of the two, to
1e-5 absolute plus 1e-4 relative. A sum carries the rounding of its terms, so that 1e-5 of their
magnitudes is allowed where it is more.

Invariant: whatever a case holds, it ends as an outcome with a reason, and the cases after it are
still run.
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
"""dtype of the reference -> (absolute, relative)."""
OF_TERMS = 1e-5


@dataclass(frozen=True)
class CaseResult:
    """error: the largest absolute difference, nan where nothing could be compared. reason: why it
    failed, empty if it passed."""

    case: str
    method: str
    error: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return not self.reason


def judge(case: Case) -> CaseResult:
    method = f"{case.kind} {case.name}"
    try:
        return CaseResult(case.case, method, *_compare(case))
    # Before ValueError, whose subclass it is.
    except ValidationError as error:
        wrong = [
            f"params.{'.'.join(map(str, one['loc'])) or case.name}: {one['msg']}"
            for one in error.errors()
        ]
        return CaseResult(case.case, method, math.nan, "; ".join(wrong))
    except ValueError as error:
        return CaseResult(case.case, method, math.nan, _line(error))
    # Methods are user code when they are plug-ins: any of these ends one case only.
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
    return (str(error).splitlines() or ["no message"])[0]


def _compare(case: Case) -> tuple[float, str]:
    """(largest error, first reason to fail)."""
    # A float32 reference may carry rounding that the float64 run does not have, and vice versa.
    single = case.dtype == "float32"
    runs = [
        run_case(case, dtype)
        for dtype in ((torch.float64, torch.float32) if single else (torch.float64,))
    ]
    largest, reason = 0.0, ""
    for key, expected in case.expect.items():
        numbers = [
            (_value(case, key, found), found.scales.get(key, 0.0))
            for found in runs
            if found is not None
        ]
        # Element by element, the better of the two runs counts.
        errors = np.stack([_error(expected, value) for value, _ in numbers])
        allowed = np.stack([_allowed(case, expected, scale) for _, scale in numbers])
        wrong = np.asarray(~(errors <= allowed).any(axis=0) | ~np.isfinite(errors).all(axis=0))
        error = np.where(wrong, errors.max(axis=0), errors.min(axis=0))
        largest = max(largest, float(error.max(initial=0.0)))
        if wrong.any() and not reason:
            worst = int(errors.reshape(len(errors), -1).max(axis=1).argmax())
            reason = _reason(key, expected, numbers[worst][0], wrong, error)
    return largest, reason


def _value(case: Case, key: str, found: CaseValues) -> Numbers:
    if key not in found.values:
        raise ValueError(
            f"expect.{key}: {case.kind} {case.name} gives {', '.join(sorted(found.values))}"
        )
    # Broadcasting would hide a method that reduces over the wrong axis.
    if found.values[key].shape != case.expect[key].shape:
        shapes = [list(values.shape) for values in (case.expect[key], found.values[key])]
        raise ValueError(f"expect.{key} has shape {shapes[0]}, and {shapes[1]} came out")
    return found.values[key]


def _error(expected: Numbers, got: Numbers) -> Numbers:
    """Absolute; inf if one of the two is not finite and differs from the other."""
    with np.errstate(invalid="ignore"):
        # Equal infinities are equal; their difference would be nan.
        return np.where(got == expected, 0.0, np.nan_to_num(np.abs(got - expected), nan=np.inf))


def _allowed(case: Case, expected: Numbers, scale: float) -> Numbers:
    single = case.dtype == "float32"
    absolute, relative = TOLERANCE[case.dtype]
    # Expected values may be close to the largest float.
    with np.errstate(over="ignore"):
        by_value = relative * np.abs(np.nan_to_num(expected))
        return np.asarray(
            absolute + (np.maximum(by_value, OF_TERMS * scale) if single else by_value)
        )


def _reason(
    key: str, expected: Numbers, got: Numbers, wrong: NDArray[np.bool_], error: Numbers
) -> str:
    place = np.unravel_index(int(np.argmax(np.where(wrong, error, -1.0))), error.shape)
    index = "".join(f"[{i}]" for i in place)
    amount = f" ({int(wrong.sum())} of {wrong.size} differ)" if wrong.size > 1 else ""
    return f"{key}{index} is {got[place]:.10g}, expected {expected[place]:.10g}{amount}"


def show(files: Mapping[Path, Sequence[Case]], console: Console) -> int:
    """Judge every case and print it under its file. Return the exit code: 0 only if every case
    passed."""
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
    console.print(Text(f"all {total} cases passed", style="green bold"))
    return 0


def _lines(cases: Sequence[Case]) -> Iterator[tuple[Text, bool]]:
    width = max(len(case.case) for case in cases)
    wide = max(len(f"{case.kind} {case.name}") for case in cases)
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
            f"  {outcome.case:{width}}  {outcome.method:{wide}}  {error}  ",
            outcome.reason,
        )
        text.rstrip()
        yield text, outcome.passed

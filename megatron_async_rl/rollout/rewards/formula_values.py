"""Values of formulas at two points, in floating point. Two values agree by accident only rarely."""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable

from megatron_async_rl.rollout.rewards.formula import Formula

_NUMERIC: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "exp": cmath.exp,
    "abs": lambda x: complex(abs(x)),
    "floor": lambda x: complex(math.floor(x.real)),
    "ceil": lambda x: complex(math.ceil(x.real)),
    "opposite": lambda x: -x,
    "factorial": lambda x: complex(math.gamma(x.real + 1)),
}


def values(formula: Formula) -> tuple[complex, ...] | None:
    """Return the values at two fixed points; None if the formula has no finite value."""
    try:
        found = tuple(_value(formula, point) for point in (1.0, 2.0))
    except (ArithmeticError, ValueError, RecursionError):
        return None
    return found if all(cmath.isfinite(one) for one in found) else None


def _value(formula: Formula, point: float) -> complex:
    kind, value, args = formula
    if kind == "number":
        return complex(float(value[0]))
    if kind in ("symbol", "text"):
        # The point depends only on the name: every process computes the same values.
        place = functools.reduce(lambda seed, one: (seed * 31 + ord(one)) % 9973, value, 7)
        return complex(1.1 + (place * point * 0.618034) % 1.0)
    if kind == "constant":
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "infinity": complex("inf")}[
            value
        ]
    inside = [_value(one, point) for one in args]
    if kind == "sum":
        return sum(inside)
    if kind == "product":
        return value * math.prod(inside)
    if kind == "power":
        return complex(inside[0] ** inside[1])
    if kind == "function" and value == "log":
        return cmath.log(inside[0]) / cmath.log(inside[1])
    if kind == "function" and value == "binomial":
        # Log-gamma: factorials of large numbers would not fit into a float.
        above, below = inside[0].real, inside[1].real
        parts = (math.lgamma(one + 1) for one in (below, above - below))
        return complex(math.exp(math.lgamma(above + 1) - sum(parts)))
    if kind == "function" and value in ("max", "min"):
        return complex({"max": max, "min": min}[value](one.real for one in inside))
    if kind == "function" and value in _NUMERIC:
        return _NUMERIC[value](inside[0])
    if kind == "function":
        # An unknown function, f(x): any value that depends on its name and arguments will do.
        return _value(Formula("symbol", value), point) + sum(inside)
    raise ArithmeticError


def equal(one: Formula, other: Formula) -> bool:
    """True if the values agree to 6 digits. A percentage may lack its percent sign."""
    if one == other:
        return True
    first, second = values(one), values(other)
    if first is None or second is None:
        return False
    scales = (1.0, 100.0, 0.01) if one.kind == other.kind == "number" else (1.0,)
    return any(
        all(
            # The absolute tolerance is for values near 0, which have no relative one.
            abs(a * scale - b) <= max(1e-6 * abs(b), 1.1e-6 if scale == 1.0 else 0.0)
            for a, b in zip(first, second, strict=True)
        )
        for scale in scales
    )

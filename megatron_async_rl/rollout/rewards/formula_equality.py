"""Two tests for the equality of formulas.

`combination` returns the canonical form of a sum: sums that differ only in notation have equal
forms, and sums that differ by an operation that an answer must carry out have different forms.
`values` returns the values of a formula at two points in floating point, where different formulas
rarely agree.
"""

from __future__ import annotations

import cmath
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from megatron_async_rl.rollout.rewards.formula import ONE, Formula, number

MAX_RADICAND = 10**9
"""Largest radicand that is searched for square factors. A root of a larger number is not final."""


TermKey = tuple[int, frozenset[tuple[object, object]]]
"""A term without its coefficient: the number under its square root, and its bases with
exponents."""
Combination = frozenset[tuple[TermKey, Fraction]]
_NO_KEY: TermKey = (1, frozenset())


@functools.lru_cache(maxsize=4096)
def combination(formula: Formula) -> Combination:
    """Return the terms of an expression with their coefficients. Numbers are multiplied,
    distributed over a sum and collected; numeric square roots are simplified; products of sums are
    not expanded."""
    try:
        return frozenset(_terms(formula).items())
    except (ArithmeticError, ValueError):
        # Too large to simplify: one opaque term, which equals only itself.
        return frozenset({((1, frozenset({(formula, Fraction(1))})), Fraction(1))})


def _terms(formula: Formula) -> dict[TermKey, Fraction]:
    if formula.kind == "number":
        return {_NO_KEY: formula.value[0]} if formula.value[0] else {}
    if formula.kind == "sum":
        terms: dict[TermKey, Fraction] = {}
        for one in formula.args:
            for key, value in _terms(one).items():
                terms[key] = terms.get(key, Fraction(0)) + value
        return {key: value for key, value in terms.items() if value}
    if formula.kind in ("product", "power"):
        return _term(formula)
    if formula.kind == "function" and formula.value == "opposite":
        return {key: -value for key, value in _terms(formula.args[0]).items()}
    inside = tuple(combination(one) for one in formula.args)
    base = (formula.kind, formula.value, inside)
    return {(1, frozenset({(base, Fraction(1))})): Fraction(1)}


def _term(formula: Formula) -> dict[TermKey, Fraction]:
    factors = formula.args if formula.kind == "product" else (formula,)
    value = Fraction(formula.value if formula.kind == "product" else 1)
    inside, bases, exponents = Fraction(1), list[Formula](), list[object]()
    for one in factors:
        base, exponent = one.args if one.kind == "power" else (one, ONE)
        power = exponent.value[0] if exponent.kind == "number" else None
        if base.kind == "number" and power is not None and abs(power) <= 64:
            if power.denominator == 1:
                value *= base.value[0] ** int(power)
                continue
            if power.denominator == 2 and base.value[0] > 0:
                inside *= base.value[0] ** int(power * 2)
                continue
        if power is not None:
            exponents.append(power)
        else:
            exponents.append(combination(exponent))
        bases.append(base)

    # sqrt(p/q) = sqrt(pq)/q.
    under = inside.numerator * inside.denominator
    value /= inside.denominator
    if 1 < under <= MAX_RADICAND:
        for divisor in possible_roots(under, 2):
            # sqrt(12) becomes 2 sqrt(3).
            while under % (divisor * divisor) == 0:
                under //= divisor * divisor
                value *= divisor
    elif under > MAX_RADICAND:
        raise ArithmeticError

    sums = [one for one, power in zip(bases, exponents, strict=True) if one.kind == "sum"]
    if len(bases) == len(sums) == 1 and exponents[0] == 1:
        # Distribute a number or root over a single sum, so that 2(x + 1) equals 2x + 2.
        scaled: dict[TermKey, Fraction] = {}
        for (root, key), part in _terms(sums[0]).items():
            for other, factor in _terms(_root_product(root, under)).items():
                scaled[(other[0], key)] = part * value * factor
        return scaled

    collected: dict[object, object] = {}
    for base, exponent_ in zip(bases, exponents, strict=True):
        name: object = base
        if base.kind == "sum":
            terms = dict(_terms(base))
            first = min(terms, key=repr) if terms else None
            whole = isinstance(exponent_, Fraction) and exponent_.denominator == 1
            # (1 - x) and (x - 1) get the same base, and the sign moves into the coefficient.
            if whole and first is not None and terms[first] < 0:
                terms = {key: -part for key, part in terms.items()}
                value *= (-1) ** int(exponent_)  # type: ignore[call-overload]
            name = frozenset(terms.items())
        elif base.kind == "function":
            name = (base.kind, base.value, tuple(combination(one) for one in base.args))
        # x^a x^b equals x^(a+b).
        before = collected.get(name)
        if isinstance(before, Fraction) and isinstance(exponent_, Fraction):
            collected[name] = before + exponent_
        elif before is None:
            collected[name] = exponent_
        else:
            collected[name] = (before, exponent_)
    return {(under, frozenset(collected.items())): value}


def _root_product(one: int, other: int) -> Formula:
    """Return the square root of `one` times `other`."""
    half = number(Fraction(1, 2), "/")
    return Formula("power", None, (number(Fraction(one * other)), half))


def possible_roots(inside: int, degree: int) -> Iterator[int]:
    """Return the integers from 2 whose power `degree` is at most `inside`."""
    return itertools.takewhile(lambda base: base**degree <= inside, itertools.count(2))


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
    """Return the values at two fixed points, or None if a value is not finite."""
    try:
        results = tuple(_value(formula, point) for point in (1.0, 2.0))
    except (ArithmeticError, ValueError, RecursionError):
        return None
    return results if all(cmath.isfinite(one) for one in results) else None


def _value(formula: Formula, point: float) -> complex:
    kind, value, args = formula
    if kind == "number":
        return complex(float(value[0]))
    if kind in ("symbol", "text"):
        # Depends only on the name and the point, so that every process computes the same value.
        seed = functools.reduce(lambda before, one: (before * 31 + ord(one)) % 9973, value, 7)
        return complex(1.1 + (seed * point * 0.618034) % 1.0)
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
        # lgamma, because factorials of large numbers do not fit into a float.
        above, below = inside[0].real, inside[1].real
        parts = (math.lgamma(one + 1) for one in (below, above - below))
        return complex(math.exp(math.lgamma(above + 1) - sum(parts)))
    if kind == "function" and value in ("max", "min"):
        return complex({"max": max, "min": min}[value](one.real for one in inside))
    if kind == "function" and value in _NUMERIC:
        return _NUMERIC[value](inside[0])
    if kind == "function":
        # An unknown function f(x) gets a value that depends on its name and its arguments.
        return _value(Formula("symbol", value), point) + sum(inside)
    raise ArithmeticError


def equal(one: Formula, other: Formula) -> bool:
    """Return True if the values agree to 6 digits. A percentage may lack its percent sign."""
    if one == other:
        return True
    first, second = values(one), values(other)
    if first is None or second is None:
        return False
    scales = (1.0, 100.0, 0.01) if one.kind == other.kind == "number" else (1.0,)
    return any(
        all(
            # Near 0, the relative tolerance vanishes, so the absolute tolerance applies.
            abs(a * scale - b) <= max(1e-6 * abs(b), 1.1e-6 if scale == 1.0 else 0.0)
            for a, b in zip(first, second, strict=True)
        )
        for scale in scales
    )

"""Canonical form of sums: equal for sums that differ only in spelling, different for sums that
differ by an operation an answer has to carry out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from fractions import Fraction

from megatron_async_rl.rollout.rewards.formula import ONE, Formula, number

MAX_RADICAND = 10**9
"""Maximum number under a root that is searched for square factors; larger ones are not final."""


TermKey = tuple[int, frozenset[tuple[object, object]]]
"""One term without its coefficient: the number under its square root, and its bases with their
exponents."""
Combination = frozenset[tuple[TermKey, Fraction]]
_NO_KEY: TermKey = (1, frozenset())


@functools.lru_cache(maxsize=4096)
def combination(formula: Formula) -> Combination:
    """Return the terms of an expression with their coefficients. Numbers are multiplied,
    distributed over a sum and collected, and numeric square roots simplified; products of sums are
    not expanded."""
    try:
        return frozenset(_terms(formula).items())
    except (ArithmeticError, ValueError):
        # Too large to simplify: the formula counts as one opaque term, equal only to itself.
        return frozenset({((1, frozenset({(formula, Fraction(1))})), Fraction(1))})


def _terms(formula: Formula) -> dict[TermKey, Fraction]:
    if formula.kind == "number":
        return {_NO_KEY: formula.value[0]} if formula.value[0] else {}
    if formula.kind == "sum":
        found: dict[TermKey, Fraction] = {}
        for one in formula.args:
            for key, value in _terms(one).items():
                found[key] = found.get(key, Fraction(0)) + value
        return {key: value for key, value in found.items() if value}
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
        for place in places(under, 2):
            # sqrt(12) becomes 2 sqrt(3).
            while under % (place * place) == 0:
                under //= place * place
                value *= place
    elif under > MAX_RADICAND:
        raise ArithmeticError

    sums = [one for one, power in zip(bases, exponents, strict=True) if one.kind == "sum"]
    if len(bases) == len(sums) == 1 and exponents[0] == 1:
        # A number or root times one sum: distribute it, so that 2(x + 1) equals 2x + 2.
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
            # (1 - x) and (x - 1) get one base; the sign moves into the coefficient.
            if whole and first is not None and terms[first] < 0:
                terms = {key: -part for key, part in terms.items()}
                value *= (-1) ** int(exponent_)  # type: ignore[call-overload]
            name = frozenset(terms.items())
        elif base.kind == "function":
            name = (base.kind, base.value, tuple(combination(one) for one in base.args))
        # x^a x^b is x^(a+b).
        before = collected.get(name)
        if isinstance(before, Fraction) and isinstance(exponent_, Fraction):
            collected[name] = before + exponent_
        elif before is None:
            collected[name] = exponent_
        else:
            collected[name] = (before, exponent_)
    return {(under, frozenset(collected.items())): value}


def _root_product(one: int, other: int) -> Formula:
    """Return the root of `one` times `other`."""
    half = number(Fraction(1, 2), "/")
    return Formula("power", None, (number(Fraction(one * other)), half))


def places(inside: int, degree: int) -> Iterator[int]:
    return itertools.takewhile(lambda place: place**degree <= inside, itertools.count(2))

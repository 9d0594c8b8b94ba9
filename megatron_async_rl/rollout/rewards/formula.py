"""Formulas as they are written, without evaluation.

A computer algebra system evaluates expressions while it parses them, so its trees cannot show
whether an answer was computed. A `Formula` keeps every operation. The functions of this module
build formulas and unify only notation: the order of sums, products and sets, nested brackets,
signs, fractions and roots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

MAX_DIGITS = 300
"""Maximum exponent of a power of ten that becomes a single number, which limits memory."""


class Formula(NamedTuple):
    """Node of a formula. `kind` determines `value` and `args`:

    - number: value is (Fraction, notation); notation is "" (decimal digits), "/", "%", "mixed" or
      "e"
    - symbol, text: value is the name; constant: value is pi, e, i or infinity
    - sum: args are the terms; product: value is the sign, args are the factors
    - power: args are (base, exponent); function: value is the name, args are the arguments
    - relation: value has the operators, args the sides; set: args are the elements
    - sequence: value has the brackets, args the elements; matrix: value is the number of rows
    - operation on sets: value is the command, args the operands; base: value is (digits, base)
    """

    kind: str
    value: Any
    args: tuple[Formula, ...] = ()


CONTAINERS = ("relation", "set", "sequence", "matrix", "operation")
ONE = Formula("number", (Fraction(1), ""))


def number(value: Fraction, notation: str = "") -> Formula:
    return Formula("number", (value, notation))


def is_integer(formula: Formula) -> bool:
    return formula.kind == "number" and formula.value[0].denominator == 1 and not formula.value[1]


def unordered(elements: list[Formula]) -> Formula:
    """Return a set. Nested sets are flattened."""
    parts = [part for one in elements for part in (one.args if one.kind == "set" else (one,))]
    # Sorted by `repr`, a total order of all nodes, so that equal sets have equal trees.
    return Formula("set", None, tuple(sorted(set(parts), key=repr)))


def total(terms: list[Formula]) -> Formula:
    """Return a sum. Nested sums are flattened."""
    parts = [part for one in terms for part in (one.args if one.kind == "sum" else (one,))]
    return parts[0] if len(parts) == 1 else Formula("sum", None, tuple(sorted(parts, key=repr)))


def negative(formula: Formula) -> Formula:
    if formula.kind == "number":
        value, notation = formula.value
        return number(-value, notation)
    if formula.kind == "product":
        return Formula("product", -formula.value, formula.args)
    return Formula("product", -1, (formula,))


def opposite(formula: Formula) -> Formula:
    """Return `formula` with a minus sign. Before a negative formula, as in -(-2), the minus sign is
    an operation that remains."""
    if (formula.kind == "number" and formula.value[0] < 0) or (
        formula.kind == "product" and (formula.value < 0)
    ):
        return Formula("function", "opposite", (formula,))
    return negative(formula)


def product(factors: list[Formula]) -> Formula:
    """Return a product. Its sign is its value, a fraction becomes its numerator and its reciprocal
    denominator, and digits times a power of ten become one number."""
    sign, numeric, parts = 1, 0, list[Formula]()
    signed = False
    for place, one in enumerate(factors):
        factor_sign, factor_parts = _factors(one)
        sign *= factor_sign
        signed |= place > 0 and factor_sign < 0
        parts += factor_parts
        numeric += any(
            part.kind == "number" or (is_reciprocal(part) and part.args[0].kind == "number")
            for part in factor_parts
        )
    marks = [one.value[1] for one in parts if one.kind == "number"]
    if sorted(marks) == ["", "e"]:
        numbers = [one for one in parts if one.kind == "number"]
        parts = [one for one in parts if one.kind != "number"]
        parts.append(number(numbers[0].value[0] * numbers[1].value[0], "e"))
    # The factor 1 marks a multiplication that remains: 3 * pi/4 must differ from the fraction
    # 3 pi/4.
    elif numeric > 1 or signed:
        parts.append(ONE)
    if len(parts) == 1:
        return negative(parts[0]) if sign < 0 else parts[0]
    return Formula("product", sign, tuple(sorted(parts, key=repr)))


def _factors(formula: Formula) -> tuple[int, list[Formula]]:
    """Return the sign and the factors of a formula. The factors of a fraction are its numerator and
    the reciprocal of its denominator."""
    if formula.kind == "product":
        return formula.value, list(formula.args)
    if formula.kind == "number":
        value, notation = formula.value
        sign = -1 if value < 0 else 1
        if notation != "/":
            return sign, [number(abs(value), notation)]
        top = [number(Fraction(abs(value.numerator)))] if abs(value.numerator) != 1 else []
        return sign, [*top, _reciprocal(number(Fraction(value.denominator)))]
    return 1, [formula]


def _reciprocal(formula: Formula) -> Formula:
    return Formula("power", None, (formula, number(Fraction(-1))))


def is_reciprocal(formula: Formula) -> bool:
    return formula.kind == "power" and formula.args[1] == number(Fraction(-1))


def inverse(formula: Formula) -> Formula:
    if formula.kind == "product":
        inner = Formula(
            "product", 1, tuple(sorted((inverse(one) for one in formula.args), key=repr))
        )
        return negative(inner) if formula.value < 0 else inner
    if formula.kind == "power" and formula.args[1].kind == "number":
        return power(formula.args[0], negative(formula.args[1]))
    return _reciprocal(formula)


def quotient(top: Formula, bottom: Formula) -> Formula:
    if bottom.kind == "number" and bottom.value[0] < 0:
        return opposite(quotient(top, negative(bottom)))
    if is_integer(top) and is_integer(bottom) and bottom.value[0] > 0:
        above, below = int(top.value[0]), int(bottom.value[0])
        # Only a reduced fraction is a literal: in 4/6, an operation remains.
        if below > 1 and math.gcd(above, below) == 1:
            return number(Fraction(above, below), "/")
    sign, parts = _factors(top)
    # 1/x is x^-1. Any other factor 1 marks an operation.
    if parts == [ONE]:
        parts = []
    below_sign, below_parts = _factors(inverse(bottom))
    # In -2/-3, an operation remains.
    both = [ONE] if sign == below_sign == -1 else []
    factors = [*parts, *below_parts, *both]
    sign *= below_sign
    if len(factors) == 1:
        return negative(factors[0]) if sign < 0 else factors[0]
    return Formula("product", sign, tuple(sorted(factors, key=repr)))


def power(base: Formula, exponent: Formula) -> Formula:
    if base == number(Fraction(10)) and is_integer(exponent) and exponent.value[0] not in (0, -1):
        count = int(exponent.value[0])
        if abs(count) <= MAX_DIGITS:
            return number(Fraction(10) ** count, "e")
    return Formula("power", None, (base, exponent))


def root(inside: Formula, degree: Formula) -> Formula:
    return power(inside, quotient(ONE, degree))


def subformulas(formula: Formula) -> Iterator[Formula]:
    yield formula
    for one in formula.args:
        yield from subformulas(one)


def symbols(formula: Formula) -> set[str]:
    return {one.value for one in subformulas(formula) if one.kind == "symbol"}


def subexpressions(formula: Formula) -> Iterator[Formula]:
    """Yield every part of a formula, and every sum or product of some of its terms or factors."""
    for part in subformulas(formula):
        yield part
        if part.kind == "product" and len(part.args) == 2 and part.value < 0:
            yield negative(part)
        # Limited to 6 terms, because the number of subsets doubles with each term.
        if part.kind in ("sum", "product") and 2 < len(part.args) <= 6:
            for size in range(2, len(part.args)):
                for some in itertools.combinations(part.args, size):
                    yield _subexpression(part.kind, some)


def _subexpression(kind: str, args: tuple[Formula, ...]) -> Formula:
    top = [one for one in args if is_integer(one)]
    bottom = [one.args[0] for one in args if is_reciprocal(one) and is_integer(one.args[0])]
    if kind == "product" and len(args) == 2 and top and bottom:
        return quotient(top[0], bottom[0])
    return Formula(kind, 1 if kind == "product" else None, args)

"""Finished formulas: formulas in which no operation remains to be carried out."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from megatron_async_rl.rollout.rewards.formula import (
    Formula,
    is_integer,
    is_reciprocal,
    number,
    subformulas,
)
from megatron_async_rl.rollout.rewards.formula_equality import (
    MAX_RADICAND,
    combination,
    possible_roots,
    values,
)

TRIVIAL = (0, 1)
"""Numbers that do not prove a computation, and that a finished product never contains."""
_EVALUATED = ("factorial", "binomial", "abs", "floor", "ceil", "max", "min", "gcd", "lcm", "det")
"""Functions whose value for numbers must be computed."""


@functools.lru_cache(maxsize=4096)
def is_finished(formula: Formula) -> bool:
    """Return True if arithmetic, the laws of powers and the collection of terms leave the
    expression unchanged. A product of different sums is finished whether it is expanded or not."""
    if not all(is_finished(one) for one in formula.args):
        return False
    # Kinds without a rule, such as relations and text, are not finished.
    rule = {
        "number": lambda _: True,
        "symbol": lambda _: True,
        "constant": lambda _: True,
        "sum": _finished_sum,
        "product": _finished_product,
        "power": _finished_power,
        "function": _finished_function,
    }.get(formula.kind)
    return rule is not None and rule(formula)


def _finished_sum(formula: Formula) -> bool:
    """Return True if no terms can be collected and no sum in brackets can be expanded."""
    for term in formula.args:
        if term == number(Fraction(0)):
            return False
        factors = term.args if term.kind == "product" else (term,)
        if any(
            _is_sum_power(one) and _exponent(one) > 0 and _exponent(one).denominator == 1
            for one in factors
        ):
            return False
    # If there are fewer combined terms than written terms, some can still be collected.
    return len(combination(formula)) == len(formula.args)


def _finished_product(formula: Formula) -> bool:
    top = [one.value[0] for one in formula.args if one.kind == "number"]
    bottom = [one.args[0] for one in formula.args if is_reciprocal(one)]
    below = [one for one in bottom if one.kind == "number"]
    if len(top) > 1 or len(below) > 1 or any(one in TRIVIAL for one in top):
        return False
    if below and not is_integer(below[0]):
        return False
    denominator = int(below[0].value[0]) if below else 1
    # 4/6 can be reduced.
    if top and below and (top[0].denominator != 1 or math.gcd(int(top[0]), denominator) != 1):
        return False

    others = [
        one
        for one in formula.args
        if one.kind != "number" and not (is_reciprocal(one) and one.args[0].kind == "number")
    ]
    roots = [one for one in others if one.kind == "power" and one.args[0].kind == "number"]
    numeric_roots = [one for one in roots if one.args[1].kind == "number"]
    if len(numeric_roots) > 1 or not _is_reduced_root(top, denominator, numeric_roots):
        return False
    bases = [one.args[0] if one.kind == "power" else one for one in others]
    # x * x^2 can be collected.
    if len(set(bases)) != len(bases):
        return False
    return _are_primitive(others, denominator)


def _is_reduced_root(top: list[Fraction], denominator: int, roots: list[Formula]) -> bool:
    """Return False for a quotient such as 6/sqrt(2), which can still be reduced."""
    if not roots or roots[0].args[1].value[0] > 0:
        return True
    base, above = roots[0].args[0], top[0] if top else Fraction(1)
    return (
        is_integer(base)
        and above.denominator == 1
        and math.gcd(int(above), int(base.value[0])) == 1
    )


def _is_sum_power(formula: Formula) -> bool:
    base = formula.args[0] if formula.kind == "power" else formula
    return base.kind == "sum"


def _exponent(formula: Formula) -> Fraction:
    if formula.kind != "power":
        return Fraction(1)
    exponent = formula.args[1]
    return exponent.value[0] if exponent.kind == "number" else Fraction(1)


def _are_primitive(factors: list[Formula], denominator: int) -> bool:
    """Return True if no number or symbol can be factored out of the sums among `factors` and then
    be cancelled."""
    sums = [one for one in factors if _is_sum_power(one)]
    raised = [one for one in sums if _exponent(one) > 0]
    if not sums:
        return True
    alone = len(sums) == 1 and sums[0].kind == "sum"
    below = {
        one.args[0] for one in factors if one.kind == "power" and _exponent(one) < 0
    }  # For example, x in (x^2 + x)/x.
    numeric = [one for one in raised if not has_symbols(one)]
    if len(numeric) > 1 or (numeric and numeric[0].kind == "power"):
        return False
    for one in sums:
        base = one.args[0] if one.kind == "power" else one
        content, common = _content(base)
        if content is None:
            return False
        if alone and has_symbols(base):
            if math.gcd(content, denominator) != 1 or common & below:
                return False
        elif alone:
            if math.gcd(content, denominator) != 1:
                return False
        elif content != 1 or common:
            return False
    return True


def _content(formula: Formula) -> tuple[int | None, set[object]]:
    """Return the greatest common divisor of the coefficients of a sum, or None if a coefficient is
    a fraction, and the bases that all terms share."""
    form = combination(formula)
    coefficients = [value for _, value in form]
    content = (
        None
        if any(value.denominator != 1 for value in coefficients)
        else math.gcd(*(int(value) for value in coefficients))
    )
    bases = [{base for base, _ in key[1]} for key, _ in form]
    return content, bases[0].intersection(*bases[1:]) if bases else set()


def has_symbols(formula: Formula) -> bool:
    return any(
        one.kind in ("symbol", "text") or (one.kind == "function" and one.value.endswith("()"))
        for one in subformulas(formula)
    )


def _finished_power(formula: Formula) -> bool:
    base, exponent = formula.args
    if exponent.kind != "number":
        # e^log(x) can be simplified to x.
        logarithm = any(
            one.kind == "function" and one.value == "log" for one in subformulas(exponent)
        )
        return not logarithm and (has_symbols(exponent) or base == Formula("constant", "e"))
    value = exponent.value[0]
    whole = value.denominator == 1
    # x^0, x^1 and (x^a)^b can be simplified.
    if value in TRIVIAL or base.kind == "power":
        return False
    if base.kind == "number":
        return is_reciprocal(formula) or (not whole and _is_root(base, value))
    if base.kind == "constant":
        # Integer powers of i can be simplified to 1, i, -1 or -i.
        return base.value != "i" or not whole
    if base.kind == "product":
        numbers_ = [one for one in base.args if one.kind == "number"]
        rest = [one for one in base.args if one.kind != "number"]
        return (
            not whole
            and base.value > 0
            and all(_is_root(one, value) for one in numbers_)
            and all(0 < _exponent(one) < value.denominator for one in rest)
        )
    if base.kind == "sum":
        content, common = _content(base)
        if value == -1:
            return content is not None
        if whole:
            return has_symbols(base) and content == 1 and not common
        return content is not None and (content == 1 or _is_root(_integer(content), value))
    return True


def _integer(value: int) -> Formula:
    return number(Fraction(value))


def _is_root(base: Formula, exponent: Fraction) -> bool:
    """Return True for a root of a number that cannot be simplified."""
    value, notation = base.value
    if value <= 0 or abs(exponent.numerator) != 1 or notation not in ("", "/"):
        return False
    if notation == "" and value.denominator != 1:
        return False
    inside = value.numerator * value.denominator
    # The search for factors below takes up to sqrt(inside) steps.
    if inside == 1 or inside > MAX_RADICAND:
        return False
    degree = exponent.denominator
    if any(inside % place**degree == 0 for place in possible_roots(inside, degree)):
        return False
    # The fourth root of 9 can be simplified to a square root.
    return not any(
        round(inside ** (1 / order)) ** order == inside
        for order in range(2, degree + 1)
        if degree % order == 0
    )


def _finished_function(formula: Formula) -> bool:
    name, inside = formula.value, formula.args
    if has_symbols(formula):
        return name not in ("opposite", "det", "gcd", "lcm", "max", "min")
    if name in _EVALUATED or name == "opposite":
        return False
    # A function of a number is finished only if its value is irrational, such as log 2.
    results, argument = values(formula), values(inside[0])
    if results is None or argument is None:
        return False
    value = results[0]
    if abs(value.imag) > 1e-9:
        return False
    if name in ("sin", "cos", "tan", "cot", "sec", "csc"):
        # A plain number may be an angle in degrees, since the tokenizer removes degree signs.
        return not _is_rational(argument[0].real / math.pi, 12) and inside[0].kind != "number"
    if name.startswith("arc"):
        return not _is_rational(value.real / math.pi, 60)
    return not _is_rational(value.real, 12)


def _is_rational(value: float, largest: int) -> bool:
    near = Fraction(value).limit_denominator(largest)
    return abs(float(near) - value) < 1e-9

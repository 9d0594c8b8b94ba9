"""Final form: distinguish a computed answer from a copied or rearranged question.

An answer that equals the gold answer is final if one of four conditions holds:

1. Same form: its formula is identical to the formula of the gold answer.
2. Literal: it is a number, a reduced fraction, a mixed number, a percentage or digits times a power
   of ten, and the question does not contain the same number in the same notation.
3. Rewritten sum: no operation remains, and the answer differs from the gold answer only in the
   distribution of numbers over sums, in signs and in the position of numeric roots. The question
   does not contain an equal sum without remaining operations.
4. Other finished form: no operation remains. The answer has at most MORE_OPERATIONS operations more
   than the gold answer, no kind of function that the gold answer lacks, and a number, symbol,
   function or constant that the question lacks. No expression of the question has its value. (An
   answer that consists of parts of the question shows no computation.)

A set, tuple, interval or matrix is final if each of its elements is final relative to an equal
element of the gold answer. For an equation, the last side is the answer, and the other sides must
agree with it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from megatron_async_rl.rollout.rewards.finished_form import TRIVIAL, has_symbols, is_finished
from megatron_async_rl.rollout.rewards.formula import (
    CONTAINERS,
    Formula,
    negative,
    number,
    subexpressions,
    subformulas,
)
from megatron_async_rl.rollout.rewards.formula_equality import combination, equal
from megatron_async_rl.rollout.rewards.formula_parser import read, read_within
from megatron_async_rl.rollout.rewards.formula_tokens import prose_tokens, tokens

MORE_OPERATIONS = 3
"""Maximum number of operations that a finished form may have in excess of the gold answer."""

_COUNTS = {
    word: count
    for count, word in enumerate(
        re.findall(
            r"\w+",
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
            "fifteen sixteen seventeen eighteen nineteen twenty",
        )
    )
} | {"a": 1, "an": 1, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "hundred": 100}
_PARTS = {
    word: count
    for count, pair in enumerate(
        re.findall(
            r"\S+",
            "half,halves third,thirds fourth,fourths fifth,fifths sixth,sixths seventh,sevenths "
            "eighth,eighths ninth,ninths tenth,tenths",
        ),
        start=2,
    )
    for word in pair.split(",")
} | {"quarter": 4, "quarters": 4}
_FACTORS = {"twice": 2, "double": 2, "squared": 2, "square": 2, "triple": 3, "cubed": 3, "cube": 3}
_NAMES = {"sine": "sin", "cosine": "cos", "tangent": "tan", "logarithm": "log", "ln": "log"}
_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_KINDS = {
    "log": "exponential",
    **dict.fromkeys(_ANGLES, "angle"),
    **{f"arc{name}": "inverse angle" for name in _ANGLES},
}


@dataclass(frozen=True)
class QuestionContent:
    """Expressions, atoms and numbers that a question contains."""

    formulas: tuple[Formula, ...]
    atoms: frozenset[object]
    literals: frozenset[Formula]


@functools.lru_cache(maxsize=256)
def question_of(text: str) -> QuestionContent:
    """Return the content of a question: the expressions, numbers, symbols and functions in its
    formulas and in its prose, including numbers written as words."""
    formulas = dict.fromkeys(part for one in read_within(text) for part in subexpressions(one))
    prose = prose_tokens(text)
    names = [one[6:-1] if one.startswith("\\text{") else one for one in prose]
    atoms: set[object] = {atom for one in formulas for atom in _atoms(one)}
    for token in (*tokens(text), *prose):
        if (one := read(token)) is not None:
            atoms |= _atoms(one)
    for word in names:
        word = _NAMES.get(word.lstrip("\\"), word.lstrip("\\"))
        value = {**_COUNTS, **_PARTS, **_FACTORS}.get(word)
        atoms.add(word if value is None else Fraction(value))

    literals = {one for one in formulas if one.kind == "number"}
    for top, bottom in itertools.pairwise(names):
        # For example, "three quarters".
        if top in _COUNTS and bottom in _PARTS:
            literals.add(number(Fraction(_COUNTS[top], _PARTS[bottom]), "/"))
    literals |= {number(Fraction(_COUNTS[word])) for word in names if word in _COUNTS}
    # A changed sign proves no computation: it may come from a subtraction in the question.
    literals |= {number(-one.value[0], one.value[1]) for one in literals}
    compound = [one for one in formulas if one.args]
    return QuestionContent(tuple(compound[:MAX_FORMULAS]), frozenset(atoms), frozenset(literals))


MAX_FORMULAS = 400
"""Maximum number of a question's expressions to compare with, which limits the time per
response."""


def is_final(answer: Formula, gold: Formula, question: str) -> bool:
    """Return True if `answer` is in final form. The caller has checked that it equals `gold`."""
    content = question_of(question)
    if answer == gold:
        return True
    answer_side = _answer_of(answer, gold)
    gold_side = _answer_of(gold, answer)
    if answer_side is None or gold_side is None:
        return False
    if answer_side.kind not in CONTAINERS and gold_side.kind not in CONTAINERS:
        return _is_final_element(answer_side, gold_side, content)
    return _is_final_container(answer_side, gold_side, content)


def _answer_of(formula: Formula, other: Formula) -> Formula | None:
    """Return the last side of an equation, or None if its sides have different values. Return the
    formula itself if it is not an equation, or if `other` is a relation, too, and the first side of
    `formula` is more than a name."""
    if formula.kind != "relation" or set(formula.value) - {"=", "in"}:
        return formula
    if other.kind == "relation" and not _is_name(formula.args[0]):
        return formula
    *before, last = formula.args
    # "1 + 1 = 3 = 2" contradicts itself. Sides with unknowns cannot be compared.
    numeric = [one for one in before if one.kind not in CONTAINERS and not has_symbols(one)]
    return last if all(equal(one, last) for one in numeric) else None


def _is_name(formula: Formula) -> bool:
    """Return True for the name of a quantity: x, a_n, f(x), (x, y)."""
    return all(
        one.kind in ("symbol", "text", "sequence", "set")
        or (one.kind == "function" and one.value.endswith("()"))
        for one in subformulas(formula)
    ) or (formula.kind == "function" and formula.value.endswith("()"))


def _is_final_container(answer: Formula, gold: Formula, content: QuestionContent) -> bool:
    if answer == gold:
        return True
    operations = [one for one in subformulas(answer) if one.kind == "operation"]
    for one in operations:
        # A union of intervals is final, but a union of sets is an operation that remains.
        if set(one.value) != {"\\cup"} or any(part.kind == "set" for part in one.args):
            return False
    elements, gold_elements = list(_elements(answer)), list(_elements(gold))
    if answer.kind == gold.kind == "relation" and not all(
        any(equal(one, other) for other in gold_elements) for one in elements
    ):
        return _is_finished_relation(answer, gold, content)
    return all(
        _is_boundless(one)
        or any(
            equal(one, other) and _is_final_element(one, other, content) for other in gold_elements
        )
        for one in elements
    )


def _elements(formula: Formula) -> Iterator[Formula]:
    """Yield the elements of nested containers. For `x = 5`, yield only the value."""
    if formula.kind == "relation" and set(formula.value) <= {"=", "in"}:
        sides = formula.args[1:] if _is_name(formula.args[0]) else formula.args
    else:
        sides = formula.args
    if formula.kind in CONTAINERS:
        for one in sides:
            yield from _elements(one)
    else:
        yield formula


def _is_boundless(formula: Formula) -> bool:
    if formula.kind == "product" and len(formula.args) == 1:
        formula = formula.args[0]
    return formula.kind == "constant" and formula.value == "infinity"


def _is_final_element(answer: Formula, gold: Formula, content: QuestionContent) -> bool:
    if answer == gold:
        return True
    if answer.kind == "number":
        if not equal(answer, gold):
            return False
        # The digits of the gold answer are final even if the question contains the number.
        same_digits = _digits(answer) is not None and _digits(answer) == _digits(gold)
        return same_digits or answer not in content.literals
    if gold.kind == "number" or not is_finished(answer):
        return False
    # Condition 3 of the module, then condition 4.
    form = combination(answer)
    if form == combination(gold):
        return not any(combination(one) == form and is_finished(one) for one in content.formulas)
    return (
        equal(answer, gold)
        and _is_other_form(answer, gold, content)
        and not any(equal(one, gold) or equal(negative(one), gold) for one in content.formulas)
    )


def _is_other_form(answer: Formula, gold: Formula, content: QuestionContent) -> bool:
    return (
        operations(answer) <= operations(gold) + MORE_OPERATIONS
        and _kinds(answer) <= _kinds(gold)
        and not _atoms(answer) <= content.atoms
    )


def _is_finished_relation(answer: Formula, gold: Formula, content: QuestionContent) -> bool:
    """Return True for a final equation or inequality whose sides differ from those of the gold
    answer."""
    return (
        all(is_finished(one) for one in answer.args)
        and _is_other_form(answer, gold, content)
        and answer not in content.formulas
    )


def _digits(formula: Formula) -> Fraction | None:
    """Return the value of a number's decimal digits, 50 for 50%, or None for another notation."""
    if formula.kind != "number" or formula.value[1] not in ("", "%"):
        return None
    value: Fraction = formula.value[0]
    return value * 100 if formula.value[1] == "%" else value


def _atoms(formula: Formula) -> set[object]:
    """Return the numbers (except 0 and 1), symbols, functions and constants of a formula."""
    atoms: set[object] = set()
    for one in subformulas(formula):
        if one.kind == "number":
            value, notation = one.value
            parts = [abs(value), abs(value) * 100] if notation == "%" else [abs(value)]
            if notation in ("/", "mixed"):
                parts = [Fraction(abs(value.numerator)), Fraction(value.denominator)]
            atoms.update(part for part in parts if part not in TRIVIAL)
        elif one.kind in ("symbol", "function", "text", "constant") and one.value != "infinity":
            atoms.add(one.value)
    return atoms


def _kinds(formula: Formula) -> set[str]:
    """Return the kinds of functions in a formula. An answer must not add a kind: log(exp(x)) would
    hide a copied x."""
    kinds = set()
    for one in subformulas(formula):
        if one.kind == "function":
            kinds.add(_KINDS.get(one.value, one.value))
        elif one.kind == "power" and one.args[1].kind != "number":
            kinds.add("exponential")
        elif one.kind == "power" and one.args[1].value[0].denominator != 1:
            kinds.add("root")
    return kinds


def operations(formula: Formula) -> int:
    """Return the number of operations in a formula."""
    return sum(
        len(one.args) - 1 if one.kind in ("sum", "product", "relation") else 1
        for one in subformulas(formula)
        if one.args
    )

"""Final form: distinguish a computed answer from a copied or rearranged question.

An answer that equals the gold answer is final if one of four conditions holds:

1. Same form: its formula is that of the gold answer.
2. Literal: it is a number, a reduced fraction, a mixed number, a percentage or digits times a power
   of ten, and the question does not contain the same number in the same notation.
3. Rewritten sum: no operation is left to carry out, and it differs from the gold answer only in the
   distribution of numbers over sums, in signs and in the position of numeric roots. The question
   may contain it only with operations left.
4. Other finished form: no operation is left; it has about as few operations as the gold answer, no
   kind of function that the gold answer lacks, and a number, symbol, function or constant that the
   question lacks; and no expression of the question has its value. (An answer made only from parts
   of the question computed nothing.)

Sets, tuples, intervals and matrices are final if each element is final relative to an equal element
of the gold answer. An equation is an answer if its sides agree; its last side counts.
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
    runs,
    subformulas,
)
from megatron_async_rl.rollout.rewards.formula_equality import combination, equal
from megatron_async_rl.rollout.rewards.formula_parser import read, read_within
from megatron_async_rl.rollout.rewards.formula_tokens import prose_tokens, tokens

MORE_OPERATIONS = 3
"""Number of operations that a finished form may have in excess of the gold answer."""

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
    """Return every expression, number, symbol and function of a question, in formulas and in plain
    text, with spelled-out numbers."""
    formulas = dict.fromkeys(part for one in read_within(text) for part in runs(one))
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
        if top in _COUNTS and bottom in _PARTS:  # three quarters
            literals.add(number(Fraction(_COUNTS[top], _PARTS[bottom]), "/"))
    literals |= {number(Fraction(_COUNTS[word])) for word in names if word in _COUNTS}
    # The sign of a copied number proves nothing: it may be a subtraction of the question.
    literals |= {number(-one.value[0], one.value[1]) for one in literals}
    compound = [one for one in formulas if one.args]
    return QuestionContent(tuple(compound[:MAX_FORMULAS]), frozenset(atoms), frozenset(literals))


MAX_FORMULAS = 400
"""Maximum expressions of a question to compare with: bounds the work of one response."""


def is_final(answer: Formula, gold: Formula, question: str) -> bool:
    """Return True if `answer`, which the caller found equal to `gold`, is in final form."""
    requested = question_of(question)
    if answer == gold:
        return True
    single = _answer_of(answer, gold)
    wanted = _answer_of(gold, answer)
    if single is None or wanted is None:
        return False
    if single.kind not in CONTAINERS and wanted.kind not in CONTAINERS:
        return _is_final_element(single, wanted, requested)
    return _is_final_container(single, wanted, requested)


def _answer_of(formula: Formula, other: Formula) -> Formula | None:
    """Return the last side of an equation, or the formula if both are equations for unknowns; None
    if numbers on its sides disagree."""
    if formula.kind != "relation" or set(formula.value) - {"=", "in"}:
        return formula
    if other.kind == "relation" and not _is_name(formula.args[0]):
        return formula
    *before, last = formula.args
    # "1 + 1 = 3 = 2" contradicts itself; sides with unknowns cannot be compared.
    known = [one for one in before if one.kind not in CONTAINERS and not has_symbols(one)]
    return last if all(_same(one, last) for one in known) else None


def _same(one: Formula, other: Formula) -> bool:
    if one.kind in CONTAINERS and one.kind == other.kind and len(one.args) == len(other.args):
        return all(_same(a, b) for a, b in zip(one.args, other.args, strict=True))
    return equal(one, other)


def _is_name(formula: Formula) -> bool:
    """True for the name of a quantity: x, a_n, f(x), (x, y)."""
    return all(
        one.kind in ("symbol", "text", "sequence", "set")
        or (one.kind == "function" and one.value.endswith("()"))
        for one in subformulas(formula)
    ) or (formula.kind == "function" and formula.value.endswith("()"))


def _is_final_container(answer: Formula, gold: Formula, requested: QuestionContent) -> bool:
    if answer == gold:
        return True
    operations = [one for one in subformulas(answer) if one.kind == "operation"]
    for one in operations:
        # A union of intervals is a final form; a union of lists is an operation left to do.
        if set(one.value) != {"\\cup"} or any(part.kind == "set" for part in one.args):
            return False
    elements, wanted = list(_elements(answer)), list(_elements(gold))
    if answer.kind == gold.kind == "relation" and not all(
        any(_same(one, other) for other in wanted) for one in elements
    ):
        return _is_finished_relation(answer, gold, requested)
    return all(
        _is_boundless(one)
        or any(equal(one, other) and _is_final_element(one, other, requested) for other in wanted)
        for one in elements
    )


def _elements(formula: Formula) -> Iterator[Formula]:
    """Yield the elements of nested containers; of `x = 5`, the value."""
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


def _is_final_element(answer: Formula, gold: Formula, requested: QuestionContent) -> bool:
    if answer == gold:
        return True
    if answer.kind == "number":
        if not equal(answer, gold):
            return False
        # Digits equal to the gold answer's are final even where the question contains the number.
        same_digits = _digits(answer) is not None and _digits(answer) == _digits(gold)
        return same_digits or answer not in requested.literals
    if gold.kind == "number" or not is_finished(answer):
        return False
    # Condition 3 of the module, then condition 4.
    form = combination(answer)
    if form == combination(gold):
        return not any(combination(one) == form and is_finished(one) for one in requested.formulas)
    return (
        equal(answer, gold)
        and _is_other_form(answer, gold, requested)
        and not any(equal(one, gold) or equal(negative(one), gold) for one in requested.formulas)
    )


def _is_other_form(answer: Formula, gold: Formula, requested: QuestionContent) -> bool:
    return (
        operations(answer) <= operations(gold) + MORE_OPERATIONS
        and _kinds(answer) <= _kinds(gold)
        and not _atoms(answer) <= requested.atoms
    )


def _is_finished_relation(answer: Formula, gold: Formula, requested: QuestionContent) -> bool:
    """True for a final equation or inequality whose sides differ from the gold answer's."""
    return (
        all(is_finished(one) for one in answer.args)
        and _is_other_form(answer, gold, requested)
        and answer not in requested.formulas
    )


def _digits(formula: Formula) -> Fraction | None:
    """Value of the decimal digits of a number, with or without a percent sign."""
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
    """Return the kinds of functions. An answer must not add one: log(exp(x)) hides a copied x."""
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
    return sum(
        len(one.args) - 1 if one.kind in ("sum", "product", "relation") else 1
        for one in subformulas(formula)
        if one.args
    )

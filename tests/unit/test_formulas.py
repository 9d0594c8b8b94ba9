"""Formulas as the `math` reward reads them: a table of texts with their formulas, whether an
operation remains in them, their operations and values. To add a text, write its line in
tests/data/formulas.txt by hand and compare."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from megatron_async_rl.rollout.rewards.final_form import (
    _atoms,
    _kinds,
    is_final,
    operations,
    question_of,
)
from megatron_async_rl.rollout.rewards.finished_form import is_finished
from megatron_async_rl.rollout.rewards.formula import Formula
from megatron_async_rl.rollout.rewards.formula_equality import combination, equal, values
from megatron_async_rl.rollout.rewards.formula_parser import read, read_within
from tests.stored_pages import require_page

TABLE = Path(__file__).parents[1] / "data" / "formulas.txt"


def shown(formula: Formula | None) -> str:
    """Return a formula as an S-expression. A number is its fraction and its notation."""
    if formula is None:
        return "none"
    if formula.kind == "number":
        return str(formula.value[0]) + (f":{formula.value[1]}" if formula.value[1] else "")
    value = [] if formula.value is None else [str(formula.value).replace(" ", "")]
    return f"({' '.join([formula.kind, *value, *map(shown, formula.args)])})"


def facts(text: str) -> str:
    formula = read(text)
    if formula is None:
        return "none"
    at = values(formula)
    numbers = "-" if at is None else " ".join(f"{one.real:.5g}{one.imag:+.5g}j" for one in at)
    finished = "finished" if is_finished(formula) else "unfinished"
    return f"{shown(formula)}  {finished} {operations(formula)} {numbers}"


def terms(text: str) -> list[str]:
    """Return the collected terms of a formula: coefficient, radicand, bases with exponents."""
    formula = read(text)
    assert formula is not None

    def name(base: object) -> str:
        return shown(base) if isinstance(base, Formula) else str(base)

    return sorted(
        f"{coefficient} {root} {sorted(f'{name(base)}^{power}' for base, power in bases)}"
        for (root, bases), coefficient in combination(formula)
    )


def test_each_text_of_the_table_is_read_as_its_formula() -> None:
    rows = [row.split("  =>  ") for row in TABLE.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 150
    wrong = [(text, facts(text), row) for text, row in rows if facts(text) != row]
    assert wrong == []


def test_terms_are_collected_with_their_coefficients_and_roots() -> None:
    for text, expected in (
        (r"\sqrt{12}+x^2 x", ["1 1 ['(symbol x)^3']", "2 3 []"]),
        (r"\frac{6}{\sqrt{2}}", ["3 2 []"]),
        (r"\frac{1}{\sqrt{8}}", ["1/4 2 []"]),
        (r"\sqrt{18}\sqrt{1/2}", ["3 1 []"]),
        (r"\sqrt{72}\sqrt{50}", ["60 1 []"]),
        ("-(-2)x", ["2 1 ['(symbol x)^1']"]),
        ("0x+3-3", []),
        (r"\sqrt{-4}", ["1 1 ['-4^1/2']"]),
        (r"\sqrt{1000000000}", ["10000 10 []"]),
        (r"\sqrt{1000000001}", ["1 1 ['(power 1000000001 1/2:/)^1']"]),
        ("2^{64}", [f"{2**64} 1 []"]),
        ("2^{-64}", [f"1/{2**64} 1 []"]),
        ("2^{65}", ["1 1 ['2^65']"]),
        ("2^{1/3} 3", ["3 1 ['2^1/3']"]),
        (r"x^{1/2} x^{1/3} \pi", ["1 1 ['(constant pi)^1', '(symbol x)^5/6']"]),
    ):
        assert terms(text) == expected, text


def test_a_questions_numbers_are_read_in_formulas_and_in_words() -> None:
    content = question_of("Of three quarters and $x^2+2x$ take 50% and 1,200 twice; sine of -7")
    assert sorted(shown(one) for one in content.literals) == sorted(
        [
            *("2", "-2", "3", "-3", "3/4:/", "-3/4:/", "1/2:%", "-1/2:%", "7", "-7"),
            *("1200", "-1200"),
        ]
    )
    numbers = {str(one) for one in content.atoms if isinstance(one, Fraction)}
    assert numbers == {"2", "3", "4", "1/2", "50", "7", "1200"}
    assert {"x", "sin"} <= content.atoms
    assert {"(power (symbol x) 2)", "(product 1 2 (symbol x))"} <= {
        shown(one) for one in content.formulas
    }


def test_the_longest_formulas_are_found_in_prose() -> None:
    assert [shown(one) for one in read_within("a 3 + 4 = 7, but 2 x")] == [
        "(relation ('=',) (sum 4 (product 1 3 (symbol a))) 7)",
        "(product 1 2 (symbol b) (symbol t) (symbol u) (symbol x))",
        "(relation ('=',) (sum 4 (product 1 3 (symbol a))) 7)",
        "(product 1 2 (symbol x) (text but))",
    ]
    assert [shown(one) for one in read_within("x is 3 + and (2")] == [
        *("(symbol x)", "(product 1 3 (text is))", "2") * 2
    ]


BASES = (
    *("0", "1", "2", "-2", "4", "8", "-8", "72", r"\frac{1}{2}", r"\frac{4}{9}", "0.5", r"50\%"),
    *("x", "-x", "x^2", r"\sqrt{x}", "x^{1/3}", "xy", "x^2 y", "2x", "4x", "8x^3", "-4x", "e"),
    *(r"\pi", "i", r"2\pi", "(x+1)", "(2x+2)", "(x^2+x)", "(x-y)", "(4x+8y)", r"\sin(x)"),
    r"\log(x)",
)
EXPONENTS = (
    *("0", "1", "2", "3", "-1", "-2", "1/2", "-1/2", "1/3", "2/3", "3/2", "5/2", "0.5", "x", "-x"),
    *("2x", r"\log(x)", r"2\log(x)", r"\pi", "i"),
)


def test_every_power_sum_and_product_of_two_is_finished_or_not_as_on_its_page() -> None:
    text = ""
    for pattern, others in (
        ("A^{B}", EXPONENTS),
        ("A+B", BASES),
        ("A-B", BASES),
        (r"A \cdot B", BASES),
        (r"\frac{A}{B}", BASES),
        (r"\sqrt[B]{A}", ("2", "3", "4", "x")),
        (r"\sqrt{A B}", BASES),
    ):
        text += f"$ {pattern}\n"
        for one in BASES:
            formulas = {
                other: read(pattern.replace("A", one).replace("B", other)) for other in others
            }
            finished = [name for name, each in formulas.items() if each and is_finished(each)]
            text += f"{one}: {', '.join(finished)}\n"
            unread = [name for name, each in formulas.items() if each is None]
            text += f"  unread: {unread}\n" if unread else ""
    require_page("formulas/finished", text)


def test_what_a_final_answer_may_contain_is_on_its_page() -> None:
    questions = (
        *("What is 2+3?", "Simplify $x^2+2x$.", r"Solve $\sqrt{x} = 3$ for x.", "Half of 50%?"),
        *(r"Compute $\log(e^2)$.", r"Find $\frac{1}{2}+\frac{1}{3}$.", "Twelve or -7 of three"),
        *(r"Evaluate $\text{f}(2) = 4x$.", r"Give $1{,}200$ as $3 \frac{1}{2}$ of it.", ""),
    )
    answers = (
        *("5", "2+3", "x(x+2)", "x^2+2x", "9", "x=9", r"\sqrt{9}", r"25\%", r"\frac{1}{4}", "0.25"),
        *("2", r"\log(e^2)", r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}", "12", "-7", "3", "4x"),
        *("2^{x}", r"3\frac{1}{2}", "1200", "[2,3]", r"\{2,3\}", r"(2,3)", "x < 3", "3 > x"),
        *(r"x^2+2x=5", r"x=9=3^2", r"(-\infty,3)", r"\sqrt{x}", r"x^{1/3}", r"\sin(x)"),
    )
    formulas = {text: each for text in answers if (each := read(text)) is not None}
    assert list(formulas) == list(answers)
    text = ""
    for one, formula in formulas.items():
        atoms, kinds = sorted(map(str, _atoms(formula))), sorted(_kinds(formula))
        same = [name for name, other in formulas.items() if equal(formula, other)]
        text += f"{one}: atoms {atoms}, kinds {kinds}, {operations(formula)}, equal to {same}\n"
    for question in questions:
        content = question_of(question)
        text += f"$ {question}\n"
        for name in ("literals", "formulas"):
            text += f"  {name}: {sorted(shown(one) for one in getattr(content, name))}\n"
        text += f"  atoms: {sorted(map(str, content.atoms))}\n"
        for name, gold in formulas.items():
            final = [other for other, each in formulas.items() if is_final(each, gold, question)]
            # An answer is final for itself.
            text += f"  final for {name}: {final}\n" if final != [name] else ""
    require_page("formulas/final", text)

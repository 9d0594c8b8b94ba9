"""Formulas as the `math` reward reads them: a table of texts with their formulas, whether an
operation remains in them, their operations and values. To add a text, write its line in
tests/data/formulas.txt by hand and compare."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from megatron_async_rl.rollout.rewards.final_form import operations, question_of
from megatron_async_rl.rollout.rewards.finished_form import is_finished
from megatron_async_rl.rollout.rewards.formula import Formula
from megatron_async_rl.rollout.rewards.formula_equality import combination, values
from megatron_async_rl.rollout.rewards.formula_parser import read, read_within

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

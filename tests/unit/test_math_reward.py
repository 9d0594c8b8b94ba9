"""The `math` reward: answers in final form are right, copied or rearranged questions are wrong, and
the answers of data sets are read with their meaning."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from megatron_async_rl.rollout.rewards import mathematics
from megatron_async_rl.rollout.rewards.finished_form import is_finished
from megatron_async_rl.rollout.rewards.formula_equality import combination
from megatron_async_rl.rollout.rewards.formula_parser import read
from megatron_async_rl.rollout.rewards.math_answer import read_answer
from megatron_async_rl.rollout.rewards.mathematics import math
from megatron_async_rl.rollout.rewards.registry import RewardError, excerpt, validate_row
from megatron_async_rl.samples import Prompt
from tests.cases import looped
from tests.unit.math_cases import RIGHT, WRONG

QUESTION = "What is 9 - 7?"


def score(answer: Any, response: str, question: str = QUESTION, **settings: Any) -> float:
    prompt = Prompt(id="p7", text=question, token_ids=(1,), fields={"answer": answer})
    return math(prompt, response, **settings)


FINAL = [
    ("2", "2"),
    ("2", "The answer is 2."),
    ("2", "9 - 7 = 2"),
    ("2", r"9 - 7 = \boxed{2}"),
    ("2", "It is 3. No, it is 2."),
    ("2", "2.0"),
    (2.0, "2"),
    ("-3", r"$-3$"),
    ("0.75", r"\boxed{\frac{3}{4}}"),
    (r"\frac{3}{4}", "3/4"),
    (r"\frac{3}{4}", "0.75"),
    (r"1\frac{1}{2}", r"\boxed{1\frac{1}{2}}"),
    (r"2\sqrt{3}", r"$2\sqrt{3}$"),
    (r"\frac{1+\sqrt{5}}{2}", r"\boxed{\frac{1 + \sqrt5}{2}}"),
    (r"3\pi", r"$3\pi$"),
    ("x^2+3x+2", r"\boxed{2 + 3x + x^2}"),
    ("x=3", r"\boxed{x = 3}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    ("[0,1)", r"$[0, 1)$"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("9000", r"$9 \times 10^{3}$"),
    ("1000000", r"\boxed{10^6}"),
    ("-3", "\u22123"),
    (r"(-\infty,3) \cup (5,\infty)", r"\boxed{(-\infty,3)\cup(5,\infty)}"),
    ("50\\%", "50%"),
    ("2^{10}", r"\boxed{2^{10}}"),
    ("5!", r"\boxed{5!}"),
    (r"\binom{5}{2}", r"\boxed{\binom{5}{2}}"),
    ("east", r"\boxed{\text{east}}"),
    ("90^\\circ", r"\boxed{90^\circ}"),
]
"""(answer, response): the response is right and final."""

UNFINISHED = [
    ("2", "9 - 7 =", QUESTION),
    ("2", "9 - 7", QUESTION),
    ("2", "$9-7$", QUESTION),
    ("2", r"\boxed{9 - 7}", QUESTION),
    ("2", r"\boxed{-7 + 9}", QUESTION),
    ("2", r"\boxed{9 - 6 - 1}", QUESTION),
    ("2", r"\boxed{x = 9 - 7}", QUESTION),
    ("2", r"\boxed{2 = 9 - 7}", QUESTION),
    ("2", r"\boxed{(9) - (7)}", QUESTION),
    ("2", r"\boxed{\frac{18}{9}}", QUESTION),
    ("2", "4/2", QUESTION),
    ("2", r"\boxed{\sqrt{4}}", QUESTION),
    ("2", r"\boxed{\max(1, 2)}", QUESTION),
    ("2", r"\boxed{\log_2 4}", QUESTION),
    ("2", r"\boxed{\int_0^2 1 dx}", QUESTION),
    ("2", r"\boxed{\sum_{i=1}^{2} 1}", QUESTION),
    ("2", r"\boxed{\gcd(4, 6)}", QUESTION),
    ("1024", r"\boxed{2^{10}}", "What is 2^{10}?"),
    ("10", r"\boxed{\binom{5}{2}}", r"What is $\binom{5}{2}$?"),
    ("120", r"\boxed{5!}", "What is 5!?"),
    ("0.75", "3/4", "Write 3/4 as a decimal number."),
    ("0.75", r"\boxed{\frac{3}{4}}", r"Write $\frac{3}{4}$ as a decimal number."),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", r"Simplify $\sqrt{8}$."),
    ("x^2+3x+2", r"\boxed{(x+1)(x+2)}", "Expand (x+1)(x+2)."),
    ("x^2+3x+2", r"\boxed{(x+2)(x+1)}", "Expand $(x+1)(x+2)$."),
    ("5x", r"\boxed{2x + 3x}", "Simplify $2x + 3x$."),
    ("2x", r"\boxed{x + x}", "Simplify."),
    ("6x^2", r"\boxed{\frac{d}{dx}(2x^3)}", "Let $f(x)=2x^3$. Find $f'(x)$."),
    (r"\{1,2,3\}", r"\boxed{\{1,2\} \cup \{2,3\}}", r"Find $A\cup B$."),
    ("2", r"\boxed{4 \div 2}", "What is 4 divided by 2?"),
    ("(1,2)", r"\boxed{(1, 9-7)}", QUESTION),
    (r"\{1,2\}", r"\boxed{\{1, 9-7\}}", QUESTION),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\9-7\end{pmatrix}}", QUESTION),
]
"""(answer, response, question): the response has the right value, but is unfinished."""


def test_an_answer_in_its_final_form_is_right() -> None:
    wrong = [(answer, text) for answer, text in FINAL if score(answer, text) != 1.0]
    assert wrong == []


def test_an_unfinished_answer_is_wrong_unless_every_form_is_accepted() -> None:
    passed = [one for one in UNFINISHED if score(*one) != 0.0]
    assert passed == []
    equal = [one for one in UNFINISHED if score(*one, form="any") == 1.0]
    assert len(equal) >= len(UNFINISHED) - 2, "math-verify accepts nearly all of them as equal"


def _scored(rows: list[tuple[str, str, list[str]]]) -> dict[tuple[str, str, str], float]:
    return {
        (question, answer, response): score(answer, response, question)
        for question, answer, responses in rows
        for response in responses
    }


def test_realistic_right_answers_earn_the_reward() -> None:
    scored = _scored(RIGHT)
    assert len(scored) > 150
    assert [case for case, reward in scored.items() if reward != 1.0] == []


def test_copied_and_rearranged_questions_earn_nothing() -> None:
    scored = _scored(WRONG)
    assert len(scored) > 250
    assert [case for case, reward in scored.items() if reward != 0.0] == []


def test_the_question_its_numbers_and_punctuation_earn_nothing() -> None:
    question = "Ann has 12 apples, eats 5, and buys 3 * 4. What is 12 - 5 + 3 * 4?"
    numbers = ["12", "5", "3", "4", "12 5 3 4", "12, 5, 3, 4", "1 2 3 4 5 6 7 8 9 10"]
    nothing = ["", " ", "\n", ".", "...", "?!", "$", "$$", r"\boxed{}", "-", "=", "####", "$$$$"]
    copies = [question, question.rstrip("?") + " =", f"${question}$", "12 - 5 + 3 * 4 = ?"]
    earned = [one for one in [*numbers, *nothing, *copies] if score("19", one, question)]
    assert earned == []
    assert score("19", "12 - 5 + 3 * 4 = 19", question) == 1.0


def test_the_last_answer_counts_and_several_boxes_are_a_set() -> None:
    assert score("2", "2, 3") == 0.0
    assert score("3", "2, 3") == 1.0
    assert score("2", r"\boxed{2} or \boxed{3}") == 0.0
    assert score("2", r"\boxed{3}. Wait, \boxed{2}.") in (0.0, 1.0)


def test_a_long_box_costs_no_time_and_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify took 3 to 13 s of CPU time for each box."""
    item = Prompt(id="p", text="?", token_ids=(1,), fields={"answer": "5"})
    assert math(item, r"\boxed{5" + " " * 5000 + "}") == 1.0
    monkeypatch.setattr(
        mathematics, "_parse", lambda text: pytest.fail("math-verify reads the box")
    )
    assert math(item, r"\boxed{" + "x " * 5000 + "5}") == 0.0


def test_a_very_long_response_is_read() -> None:
    assert score("2", "so " * 20_000 + r"\boxed{2}") == 1.0
    assert score("2", "1 + " * 2_000 + "2") == 0.0


READ = [
    (r"\$18.90", "18.90"),
    ("$18.90", "18.90"),
    (r"\$32,\!348", "32348"),
    ("32{,}348", "32348"),
    ("1,200", "1200"),
    ("$1/2", "1/2"),
    ("$1/2$", "1/2"),
    (r"\(x+1\)", "x+1"),
    (r"\[x+1\]", "x+1"),
    ("$$7$$", "7"),
    ("20 $cm^{2}$", "20"),
    ("12 feet per second", "12"),
    (r"12 \text{ cm}", "12"),
    ("x = $5$", "x = 5"),
    ("Ann sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72.\n#### 72", "72"),
    ("He pays $5 and $7.\n#### $1,200", "1200"),
    (r"So the answer is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"First \boxed{1}, then \boxed{2}", "2"),
    ("27.0", "27.0"),
    ("1 1/2", r"1\frac{1}{2}"),
    ("1 000", "1000"),
    ("\u20ac5", "5"),
    ("72.", "72"),
    ("east", r"\text{east}"),
    (r"\text{Evelyn}", r"\text{Evelyn}"),
    ("B", "B"),
    ("5 km/h", "5"),
    ("9.8 m/s^2", "9.8"),
    (r"9.8 \text{ m/s}^2", "9.8"),
    (r"5\,\mathrm{cm}", "5"),
    ("45\u00b0", "45"),
    ("12cm", "12"),
    ("2ab+bc", "2ab+bc"),
    ("2c", "2c"),
    ("2:3", "2:3"),
    ("No", r"\text{No}"),
    (r"3\pm\sqrt{2}", r"3+\sqrt{2}, 3-\sqrt{2}"),
]


def test_an_answer_of_a_data_set_is_read_with_its_meaning() -> None:
    assert [(text, read_answer(text)) for text, _ in READ] == READ


def test_an_answer_that_is_read_earns_the_reward_itself() -> None:
    for _, answer, _ in RIGHT:
        validate_row("math", {}, {"answer": answer})
    for answer, _ in READ:
        validate_row("math", {}, {"answer": answer})


def test_a_plain_number_is_validated_without_math_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)  # Importing it raises ImportError.
    for answer in ("72", "1,200", "-3.5", "3/4", r"\frac{3}{4}", "50%", "#### 72", "5 km/h"):
        validate_row("math", {}, {"answer": answer})


@looped(
    ("text", "reason"),
    [
        ("5-7", "is a range or a difference: write the value"),
        ("5 \u2013 7", "is a range or a difference"),
        ("5 to 7", "is a range or a difference"),
        ("10:30", "is a time of day or a ratio: write a ratio as a fraction"),
        ("3:45 PM", "is a time of day or a ratio"),
        ("3 pm", "is a time of day or a ratio"),
        ("about 5", "has the word 'about': write the number or formula alone"),
        ("5 cm by 3 cm", "has the word 'by'"),
        ("5 dozen", "has a number and the word 'dozen'"),
        ("(C) 5", "is an option with its text"),
        ("Jan 5", "has the word 'Jan'"),
        ("0x1F", "cannot parse"),
        ("1/0", "cannot be parsed by math-verify"),
        ("0.333...", "does not earn the reward as"),
    ],
)
def test_an_ambiguous_answer_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(RewardError, match=re.escape(reason)):
        validate_row("math", {}, {"answer": text})


@looped(
    "text",
    [
        "Ann has 3 apples and 4 pears",
        "between 3 and 5 hours or so",
        "$3$ and $4$ and $5$",
        "3 of $4$ pears",
        "7 hours 30 minutes",
        "####",
        "$5 million",
        "5 dozen",
        "2\u221a3",
        "3\u00bd",
        "6.02e23",
        "2:00",
        "9^{9^{9^9}}",
        "{" * 3000,
        "7" * 200_000,
        r"\boxed{}",
        "$$",
    ],
)
def test_an_answer_that_would_have_to_be_guessed_is_refused(text: str) -> None:
    with pytest.raises(RewardError, match="write the final answer alone"):
        validate_row("math", {}, {"answer": text})


def test_an_amount_of_money_in_a_response_is_not_a_formula() -> None:
    assert score("18.90", r"It costs \$18.90") == 1.0
    assert score(r"\$18.90", "It costs $18.90") == 1.0
    assert score("32348", r"They pay \$32,\!348.") == 1.0
    assert score("12", "It costs $5 and then $7, so $12") == 1.0
    assert score("12", "It costs $5 and then $7, so $x = 12$") == 1.0


VALUES: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("arithmetic", {}, {"answer": 27.0}, True),
    ("arithmetic", {}, {"answer": "x"}, True),
    ("arithmetic", {}, {"answer": 10**400}, True),
    ("math", {}, {"answer": 1.5e-07}, True),
    ("code", {}, {"tests": {"inputs": None, "outputs": None}}, False),
    ("code", {}, {"tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, False),
    ("code", {}, {"tests": [{"input": "1", "output": " \n"}]}, False),
    ("code", {}, {"tests": ["# assert"]}, False),
    ("code", {}, {"tests": ["def f( assert"]}, False),
    *(
        (name, {}, {"answer": value}, False)
        for name in ("arithmetic", "math")
        for value in (None, "", " ", True, [46], {"a": 1}, float("nan"), float("inf"))
    ),
    ("math", {}, {"answer": 2.5}, True),
    ("countdown", {}, {"numbers": [3.0, 5], "target": 8.0}, True),
    ("countdown", {}, {"numbers": [3.5, 5], "target": 8}, False),
    ("countdown", {}, {"numbers": [], "target": 8}, False),
    ("countdown", {}, {"numbers": [3, 5], "target": "8.5"}, False),
    ("countdown", {}, {"numbers": [3, None], "target": 8}, False),
    ("code", {}, {"tests": []}, False),
    ("code", {}, {"tests": ""}, False),
    ("code", {}, {"tests": None}, False),
    ("code", {}, {"tests": [None]}, False),
    ("code", {}, {"tests": ["assert f(1) == 2"]}, True),
    ("code", {}, {"tests": ["assert f(1) == 2"], "entry_point": ["f"]}, False),
    ("judge", {"template": "{response} {rubric}"}, {"rubric": None}, False),
    ("judge", {"template": "{response} {rubric}"}, {"rubric": "short"}, True),
]


def test_every_built_in_reward_checks_the_values_of_its_columns() -> None:
    def accepted(name: str, settings: dict[str, Any], fields: dict[str, Any]) -> bool:
        try:
            validate_row(name, settings, fields)
        except RewardError as error:
            return not (error.what and error.fix)
        return True

    results = [(*one[:3], accepted(*one[:3])) for one in VALUES]
    assert [repr(one) for one in results] == [repr(one) for one in VALUES]


def test_text_such_as_27_0_is_a_whole_number() -> None:
    from megatron_async_rl.rollout.rewards.answers import arithmetic

    for answer in (27.0, "27.0", "27.00", 27):
        prompt = Prompt(id="p", text="?", token_ids=(1,), fields={"answer": answer})
        assert arithmetic(prompt, "27") == 1.0
    assert score(1.5e-07, r"\boxed{1.5 \times 10^{-7}}") == 1.0


def test_combined_terms_have_computed_numbers_and_simple_roots() -> None:
    def same(one: str, other: str) -> bool:
        found = [read(text) for text in (one, other)]
        return combination(found[0]) == combination(found[1])

    for one, other in (
        (r"\sqrt{4}", "2"),
        (r"\sqrt{9}", "3"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\sqrt{1/2}", r"\sqrt{2}/2"),
        (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}"),
        (r"\sqrt{2}(x+\sqrt{3})", r"\sqrt{2}x+\sqrt{6}"),
        ("x^2 x", "x^3"),
        ("(x-1)^2", "(1-x)^2"),
        ("(x-1)^3", "-(1-x)^3"),
        ("2^{64}", str(2**64)),
    ):
        assert same(one, other), (one, other)
    for one, other in (
        ("2^{65}", str(2**65)),  # A power this large may remain.
        ("(x-1)^3", "(1-x)^3"),
        ("x^2 x", "x^2"),
        ("x^a x^b", "x^a"),
        ("x^a x^b", "x^b"),
        (r"\sqrt{3}", "3"),
    ):
        assert not same(one, other), (one, other)


def test_only_integer_powers_of_i_are_unfinished_among_constants() -> None:
    for text, finished in (
        (r"\pi^2", True),
        ("e^2", True),
        (r"\sqrt{\pi}", True),
        (r"\sqrt{i}", True),
        ("i^2", False),
        ("i^3", False),
        (r"\pi^1", False),
    ):
        formula = read(text)
        assert formula is not None
        assert is_finished(formula) == finished, text


def test_a_product_is_finished_if_no_sum_in_it_has_a_fraction() -> None:
    for text, finished in (
        ("y(x+1)", True),
        (r"y(\frac{x}{2}+1)", False),
        (r"(y+1)(\frac{x}{2}+1)", False),
    ):
        formula = read(text)
        assert formula is not None
        assert is_finished(formula) == finished, text


def test_a_sum_is_finished_if_nothing_can_be_collected_or_expanded() -> None:
    for text, finished in (
        ("x+1", True),
        ("x+x", False),
        ("x+0", False),
        ("(x+1)^2+1", False),
        ("3(x+1)+y", False),
        ("(x+1)^{-1}+1", True),
        (r"\sqrt{x+1}+1", True),
    ):
        formula = read(text)
        assert formula is not None
        assert is_finished(formula) == finished, text


def test_signs_of_exponents_and_both_ends_of_brackets_are_read() -> None:
    assert read("x^+2") == read("x^2") != read("x^-2")
    for opening, closing, name in (
        (r"\lfloor", r"\rfloor", "floor"),
        (r"\lceil", r"\rceil", "ceil"),
        ("|", "|", "abs"),
    ):
        found = read(f"{opening} x {closing} + 1")
        assert found is not None
        assert name in {one.value for one in found.args}
        assert read(f"{opening} x + 1") is None


def test_a_value_in_a_message_is_short_and_visible() -> None:
    assert excerpt("a\u200bb") == repr("a\u200bb")
    assert excerpt("\u200b") == "'\\u200b'"
    assert excerpt("x" * 78) == f"'{'x' * 78}'"
    assert excerpt("x" * 79) == f"'{'x' * 76}..."
    assert excerpt(10**5000) == "a int that is too large to display"
    assert excerpt(0.5) == "0.5"

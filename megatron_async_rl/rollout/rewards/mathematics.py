"""The `math` reward: 1 if math-verify finds the prompt's `answer` in the response, else 0.

math-verify evaluates what it reads, so "9 - 7" equals 2, and a policy can earn the reward by copying
the question. `form: final` (the default) therefore also requires an answer in its final form:

- it has no operation that evaluation would carry out (9 - 7, 10/5, 2^10, x + x, a binomial), unless
  the prompt's `answer` has the same one;
- it does not repeat an expression of the question, in whatever order, unless `answer` is written in
  that form.

A dollar sign is a delimiter of LaTeX only around a formula; `\\$5` and `$5` are amounts of money.

math-verify has no time limit of its own here. A response such as 9^9^9^9 keeps the interpreter
inside one multiplication, so the limits on time and memory are those of the process that calls
this reward: a response that exceeds one is wrong.
"""

from __future__ import annotations

import functools
import logging
import math as numbers
import re
from collections.abc import Iterator
from typing import Any, Literal

from megatron_async_rl.rollout.rewards.registry import BuiltInReward, RewardError, text_field
from megatron_async_rl.samples.types import Prompt

Form = Literal["final", "any"]

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+"
_PERCENT = r"\s*(?:\\?%)?"
_FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(-?\d+)\}|(\d))|(\d+)\s*/\s*(\d+)"
)
_LITERAL = re.compile(
    rf"(?:{_NUMBER}){_PERCENT}|[-+]?\d*\s*\\frac\{{-?\d+\}}\{{-?\d+\}}|[-+]?\d+\s*/\s*\d+|[-+]?\d+\^\\circ"
)
_AMOUNT = re.compile(
    rf"({_NUMBER})\s+(?:(?:\\(?:text|mathrm)\{{[^}}]*\}}|[A-Za-z]{{2,}}\.?)[\s/]*)+"
)
_UNIT = re.compile(r"(?:[A-Za-z]{1,4}|\\(?:text|mathrm)\{[^}]*\}|\\circ)(?:\^\{?\d\}?)?")
_OPERATIONS = re.compile(
    r"\\(?:[dt]?binom|gcd|lcm|det|max|min|[lr]floor|[lr]ceil|sum|prod|i*int|lim|b?mod|pmod)(?![A-Za-z])"
)
"""Commands of LaTeX that math-verify evaluates while it reads them, or that await evaluation."""
_MULTIPLE = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|pairs?)\b", re.I)
_TOWER = re.compile(r"\^\s*\{?\s*\d*\s*\^|\^\s*\{?\s*\d{6,}|\d\s*\^\s*\{?\s*\d+\s*\^|\{{30,}")
"""Powers of powers of numbers, which no answer needs and which take for ever."""
_UNREAD = re.compile(
    "[\u221a\u00bc-\u00be\u2150-\u215e\u00b2\u00b3]|\\d[eE][-+]?\\d|\\d['\u2032]\\d"
)
MAX_SOLUTION, MAX_ANSWER = 100_000, 1_000
"""Characters of a solution, and of the answer in it."""
_PROSE = re.compile(r"[A-Za-z]{2,}[,;:]?\s+(?:[A-Za-z]+[,;:]?\s+)*[A-Za-z]{2,}")
_DOLLAR = re.compile(r"(?<!\\)\$")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|begin|end|operatorname|mathbf)\s*\{[^}]*\}"
)
_FUNCTIONS = {
    "arcsin",
    "arccos",
    "arctan",
    "cos",
    "cot",
    "csc",
    "exp",
    "ln",
    "log",
    "sec",
    "sin",
} | {*("sqrt", "tan", "pi", "or", "and", "frac", "infty")}


def math(prompt: Prompt, response: str, /, *, form: Form = "final") -> float:
    """`form`: `any` accepts every expression that evaluates to the answer, also a copied question."""
    from math_verify import parse, verify

    _quiet()
    answer, gold = _gold_of(prompt)
    try:
        found = parse(_without_amounts(response), parsing_timeout=None)
        if not found or not verify(gold, found, timeout_seconds=None):
            return 0.0
        return 1.0 if form == "any" or _is_final(found, answer, gold, prompt.text) else 0.0
    except (MemoryError, RecursionError, OverflowError):
        return 0.0


def read_answer(text: str) -> str:
    """The LaTeX of the one final answer in a data set's `answer`: the text behind `####` (GSM8K),
    in the last `\\boxed{}`, between delimiters, or all of it; an amount of money or of a unit as its
    number. Raises ValueError, with the reason, for what is not one answer."""
    found = text.strip()
    if len(found) > MAX_SOLUTION:
        raise ValueError(f"has {len(found)} characters, of at most {MAX_SOLUTION}")
    if "####" in found:
        found = found.rpartition("####")[2].strip()
    elif (boxed := _boxed(found)) is not None:
        found = boxed.strip()
    found = _without_delimiters(found).strip()
    # Thousands: 32,\!348 and 32{,}348.
    found = re.sub(r"(?<=\d)(?:,\\!|\{,\}|\\,)(?=\d{3}(?!\d))", ",", found.replace(r"\$", ""))
    if len(found) > 1 and found.endswith(".") and "\n" not in found:
        found = found[:-1]
    found = found.lstrip("€£")
    if amount := _AMOUNT.fullmatch(found):
        if multiple := _MULTIPLE.search(found):
            raise ValueError(f"has a number and the word {multiple.group()!r}")
        found = amount[1]
    if re.fullmatch(_NUMBER, found):
        found = found.replace(",", "")
    found = re.sub(r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", found)
    found = re.sub(r"(?<=\d)[ _](?=\d{3}(?:[ _]\d{3})*$)", "", found)
    if not found:
        raise ValueError("holds no answer")
    if len(found) > MAX_ANSWER or _TOWER.search(found):
        raise ValueError("is too large to compute")
    if unread := _UNREAD.search(found):
        raise ValueError(f"has {unread.group()!r}, which math-verify does not read")

    plain = _TEXT_COMMAND.sub(" ", found)
    words = [
        word
        for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
        if word.lower() not in _FUNCTIONS
    ]
    if "\\" not in found and not re.search(r"\d", found) and _is_word(found):
        return rf"\text{{{found}}}"
    if len(words) > 1:
        raise ValueError("is a sentence, in which any number could be meant")
    return found


def _is_word(text: str) -> bool:
    """True for words of text such as `east` or `Monday`, which math-verify would read as a product."""
    return re.fullmatch(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+){0,2}", text) is not None and (
        text.lower() not in _FUNCTIONS
    )


def _boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}`, whose braces may be nested."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len(r"\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place]
    return None


def _without_delimiters(text: str) -> str:
    for begin, end in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            return text[len(begin) : -len(end)]
    places = [one.start() for one in _DOLLAR.finditer(text)]
    if len(places) <= 1:  # an amount: a formula has two
        return _DOLLAR.sub("", text)
    if len(places) > 2:
        raise ValueError("holds several formulas")
    before, inside, after = (
        text[: places[0]].strip(),
        text[places[0] + 1 : places[1]].strip(),
        text[places[1] + 1 :].strip(),
    )
    if re.fullmatch(_NUMBER, before) and not after and _UNIT.fullmatch(inside):
        return before
    if before.endswith("="):
        return f"{before} {inside}" if not after else inside
    if re.search(r"\d", before + after):
        raise ValueError("holds numbers inside and outside of a formula")
    return inside


def _without_amounts(response: str) -> str:
    """`response` without the dollar signs that do not delimit a formula, and with ASCII minuses."""
    text = re.sub(r"[−–](?=\d)", "-", response.replace(r"\$", ""))
    pieces: list[str] = []
    rest = text
    while (found := re.search(r"\$\$?", rest)) is not None:
        mark = found.group()
        end = rest.find(mark, found.end())
        inside = rest[found.end() : end] if end >= 0 else ""
        if end < 0 or (mark == "$" and _PROSE.search(_TEXT_COMMAND.sub(" ", inside))):
            # No formula: the sign stands before an amount.
            pieces.append(rest[: found.start()])
            rest = rest[found.end() :]
        else:
            pieces.append(rest[: end + len(mark)])
            rest = rest[end + len(mark) :]
    joined = "".join([*pieces, rest])
    return re.sub(r"(?<=\d)(?:,\\!|\{,\}|\\,)(?=\d{3}(?!\d))", ",", joined)


@functools.lru_cache(maxsize=1024)
def _parsed(latex: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(f"${latex}$", parsing_timeout=None))


def _gold_of(prompt: Prompt) -> tuple[str, list[Any]]:
    """LaTeX of the prompt's `answer`, and what math-verify reads in it. Raises RewardError."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    gold = list(_parsed(answer))
    if not gold or any(str(one) in ("zoo", "nan") for one in gold):
        raise _unreadable(prompt, given, "is nothing that math-verify can read")
    return answer, gold


def _unreadable(prompt: Prompt, given: str, why: str) -> RewardError:
    return RewardError(
        f"prompt {prompt.id}",
        f"`answer` {given[:120]!r} {why}",
        "write the final answer alone: a number, LaTeX, or text that ends in `#### ANSWER`",
    )


def _is_final(found: list[Any], answer: str, gold: list[Any], question: str) -> bool:
    """True unless the answer found in a response has operations left that the gold answer does not
    have, or repeats an expression of the question."""
    text = next((one for one in reversed(found) if isinstance(one, str)), "")
    written, wanted = _normal(text), _normal(answer)
    if written == wanted:
        return True
    if not all(one in wanted for one in _OPERATIONS.findall(written)):
        return False
    for top, bottom in _fractions(written):
        if bottom in (0, 1) or numbers.gcd(top, bottom) != 1:
            return False

    expression, meant = found[0], gold[0]
    if isinstance(expression, str):
        return True
    if getattr(expression, "is_Number", False):
        # Evaluated while it was read, so the text shows whether there was anything to evaluate.
        if not _LITERAL.fullmatch(written) and not getattr(meant, "args", ()):
            return False
    elif _has_work_left(expression) and not _has_work_left(meant):
        return False
    if not getattr(expression, "args", ()) and re.fullmatch(_NUMBER, written):
        return True
    return not _repeats(expression, written, meant, question)


def _normal(text: str) -> str:
    """LaTeX without what does not change its meaning."""
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:!]|quad)(?![A-Za-z])|[\s~$]|\\ ", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:cdot|times)|×|·", "*", text).replace("−", "-")
    text = re.sub(r"\\div(?![A-Za-z])|÷", "/", text)
    return re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)


def _fractions(text: str) -> Iterator[tuple[int, int]]:
    for one in _FRACTION.finditer(text):
        top, bottom = (group for group in one.groups() if group is not None)
        yield abs(int(top)), abs(int(bottom))


def _has_work_left(expression: Any) -> bool:
    """True if evaluation would leave fewer operations, or fewer sums. A number times a power of ten is
    a way to write a number."""
    from sympy import (
        Add,
        Complement,
        Derivative,
        Integral,
        Intersection,
        Limit,
        Mul,
        Pow,
        Product,
        Sum,
        Union,
        count_ops,
    )
    from sympy.core.relational import Relational
    from sympy.matrices import MatrixBase
    from sympy.matrices.expressions import MatAdd, MatMul, MatPow, Transpose

    if isinstance(expression, Relational):
        return any(_has_work_left(side) for side in expression.args)
    if isinstance(expression, MatrixBase):
        return any(_has_work_left(one) for one in expression)
    if isinstance(expression, (MatAdd, MatMul, MatPow, Transpose)):
        return True
    if isinstance(expression, (Union, Intersection, Complement)):
        # Unions of intervals are final; those of lists of elements are work.
        return any(part.is_FiniteSet for part in expression.args)
    if getattr(expression, "has", None) and expression.has(
        Sum, Product, Integral, Limit, Derivative
    ):
        return True
    if isinstance(expression, Pow) and expression.base == 10:
        return not expression.exp.is_Integer
    if isinstance(expression, Mul) and len(expression.args) == 2:
        digits, power = expression.args
        if digits.is_Number and isinstance(power, Pow) and power.base == 10:
            return not power.exp.is_Integer
    if not getattr(expression, "args", ()):
        return False
    evaluated = _evaluated(expression)
    sums = [sum(len(n.args) - 1 for n in _nodes(one, Add)) for one in (expression, evaluated)]
    return bool(count_ops(evaluated) < count_ops(expression) or sums[1] < sums[0])


def _nodes(expression: Any, kind: type) -> Iterator[Any]:
    from sympy import preorder_traversal

    return (one for one in preorder_traversal(expression) if isinstance(one, kind))


def _evaluated(expression: Any) -> Any:
    """`expression` with every node built again, as sympy evaluates nodes when it builds them."""
    from sympy import UnevaluatedExpr

    if not getattr(expression, "args", ()) or isinstance(expression, UnevaluatedExpr):
        return expression
    return expression.func(*(_evaluated(one) for one in expression.args))


def _repeats(expression: Any, written: str, meant: Any, question: str) -> bool:
    """True if an expression with operations stands in the question, in this or another order, and
    the gold answer has another form."""
    form = _evaluated(expression)
    if form == _evaluated(meant):
        # The gold answer's own form, or a number that the response left unevaluated.
        if getattr(form, "free_symbols", None):
            return False
        if written not in _normal(question):
            return False
        return not _LITERAL.fullmatch(written) or "/" in written or "frac" in written
    if len(written) > 1 and written in _normal(question):
        return True
    return any(form == _evaluated(one) for one in _expressions(question))


def _expressions(question: str) -> Iterator[Any]:
    """Yield what math-verify reads in the formulas of a question, and in runs of plain text that have an
    operator."""
    formulas = re.findall(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", question, re.S)
    runs = [next(one for one in groups if one) for groups in formulas]
    runs += re.findall(r"[\w.()]+(?:\s*[-+*/^=]\s*[\w.()]+)+", question)
    for run in runs[:32]:
        found = _parsed(run.strip())
        if found and not isinstance(found[0], str):
            yield found[0]


def _quiet() -> None:
    # math-verify warns that nothing limits its time; the process does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _validate(prompt: Prompt, *, form: Form = "final") -> None:
    """A number is read without math-verify: most rows are, and data sets are large."""
    given = text_field(prompt, "answer")
    try:
        answer = read_answer(given)
    except ValueError as error:
        raise _unreadable(prompt, given, str(error)) from error
    if not _LITERAL.fullmatch(answer):
        _quiet()
        _gold_of(prompt)


REWARDS = {
    "math": BuiltInReward(
        function=math,
        required_fields=("answer",),
        validate=_validate,
        requires="math_verify",
        cpu_limit_s=5.0,
        memory_mib=4096,
    ),
}

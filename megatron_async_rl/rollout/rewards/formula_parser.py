"""Parser of formulas in LaTeX and plain text.

The grammar is a whitelist. Text with any other construct (integrals, derivatives, limits, unknown
commands) is not a formula.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from megatron_async_rl.rollout.rewards.formula import (
    MAX_DIGITS,
    Formula,
    negative,
    number,
    opposite,
    power,
    product,
    quotient,
    root,
    total,
    unordered,
)
from megatron_async_rl.rollout.rewards.formula_tokens import FUNCTIONS, prose_tokens, tokens

MAX_TOKENS = 600
MAX_DEPTH = 40
"""Limits of one formula, because the parser is recursive and a response may be any text."""


class NotAFormula(ValueError):
    """The text is not a formula of the grammar."""


_CONSTANTS = {"\\pi": "pi", "\\infty": "infinity", "\\imath": "i"}
_LETTERS = frozenset(
    re.findall(
        r"\S+",
        "\\alpha \\beta \\gamma \\delta \\epsilon \\theta \\lambda \\mu \\nu \\rho "
        "\\sigma \\tau \\phi \\varphi \\omega \\emptyset \\ell \\angle",
    )
)
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in"}
_SET_OPERATORS = ("\\cup", "\\cap", "\\setminus")
_APPLIED = "fghFGHPV"
"""Letters that name a function if a bracket follows."""


@functools.lru_cache(maxsize=512)
def read(text: str) -> Formula | None:
    """Return the formula that spans the whole text, or None if the text is not a formula."""
    sequence = tokens(text)
    while sequence and sequence[-1] in (".", ","):
        sequence.pop()
    try:
        # Both signs become a set.
        if "\\pm" in sequence:
            both = [
                _all_of([{"\\pm": sign, "\\mp": other}.get(one, one) for one in sequence])
                for sign, other in (("+", "-"), ("-", "+"))
            ]
            return unordered(both)
        return _all_of(sequence)
    except (NotAFormula, RecursionError, ArithmeticError, IndexError):
        return None


def read_within(text: str) -> list[Formula]:
    """Return the formulas in prose, the longest at each position."""
    formulas: list[Formula] = []
    # Parse twice, because letters may be a word or a product of variables.
    for sequence in (tokens(text), prose_tokens(text)):
        # Limited, because the parser may read up to MAX_TOKENS at each position.
        place, end = 0, min(len(sequence), 4 * MAX_TOKENS)
        while place < end:
            try:
                parser = _Parser(sequence[place : place + MAX_TOKENS])
                formulas.append(parser.chain())
                place += max(parser.place, 1)
            except (NotAFormula, RecursionError, ArithmeticError, IndexError):
                place += 1
    return formulas


def _all_of(sequence: list[str]) -> Formula:
    if not sequence or len(sequence) > MAX_TOKENS:
        raise NotAFormula
    parser = _Parser(sequence)
    formula = parser.listed()
    if parser.next() is not None:
        raise NotAFormula
    return formula


class _Parser:
    """Recursive-descent parser with one method per level of precedence."""

    def __init__(self, sequence: list[str]) -> None:
        self.tokens = sequence
        self.place = 0
        self.depth = 0
        self.bars = 0
        """Number of open absolute values. While it is positive, `|` closes an absolute value."""

    def next(self, ahead: int = 0) -> str | None:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def take(self, *expected: str) -> str:
        token = self.next()
        if token is None or (expected and token not in expected):
            raise NotAFormula
        self.place += 1
        return token

    def taken(self, *tokens_: str) -> bool:
        if self.next() in tokens_:
            self.place += 1
            return True
        return False

    def listed(self) -> Formula:
        """Parse relations or expressions. Several of them, separated by commas, are a set."""
        elements = self.elements()
        return elements[0] if len(elements) == 1 else unordered(elements)

    def elements(self) -> list[Formula]:
        elements = [self.chain()]
        while self.taken(","):
            while self.taken(","):  # `, and`
                pass
            elements.append(self.chain())
        return elements

    def chain(self) -> Formula:
        """Parse an expression or a relation. A relation with > or >= is reversed to < or <=."""
        sides, operators = [self.union()], list[str]()
        while self.next() in _RELATIONS:
            before = self.place
            operators.append(_RELATIONS[self.take()])
            try:
                sides.append(self.union())
            # The last side is missing, as in `9 - 7 = ?`.
            except NotAFormula:
                self.place = before
                operators.pop()
                break
        if not operators:
            return sides[0]
        if all(one in (">", ">=") for one in operators):
            sides.reverse()
            operators = [{">": "<", ">=": "<="}[one] for one in reversed(operators)]
        return Formula("relation", tuple(operators), tuple(sides))

    def union(self) -> Formula:
        operands, operators = [self.sum()], list[str]()
        while self.next() in _SET_OPERATORS:
            operators.append(self.take())
            operands.append(self.sum())
        if not operators:
            return operands[0]
        # Unions commute; differences do not.
        if set(operators) == {"\\cup"}:
            operands.sort(key=repr)
        return Formula("operation", tuple(operators), tuple(operands))

    def sum(self) -> Formula:
        if self.depth == MAX_DEPTH:
            raise NotAFormula
        self.depth += 1
        try:
            return total(self.terms())
        finally:
            self.depth -= 1

    def terms(self) -> list[Formula]:
        terms = [self.term()]
        while self.next() in ("+", "-"):
            before = self.place
            minus = self.take() == "-"
            try:
                term = self.term()
            except NotAFormula:  # prose may follow
                self.place = before
                break
            terms.append(opposite(term) if minus else term)
        return terms

    def term(self) -> Formula:
        minus = 0
        while self.next() in ("+", "-"):
            minus += self.take() == "-"
        result = self.factor()
        while True:
            before = self.place
            token = self.next()
            try:
                if token == "*":
                    self.take()
                    result = product([result, self.signed()])
                elif token == "/":
                    self.take()
                    result = quotient(result, self.signed())
                elif token is not None and self.starts(token):
                    result = product([result, self.factor()])
                else:
                    break
            except NotAFormula:
                self.place = before
                break
        # After the loop: a leading minus applies to the whole term, as in -x^2.
        for _ in range(minus):
            result = opposite(result)
        return result

    def signed(self) -> Formula:
        if self.taken("-"):
            return opposite(self.signed())
        self.taken("+")
        return self.factor()

    def starts(self, token: str) -> bool:
        """Return True if `token` can begin a factor of an implicit product."""
        if token == "|":
            return not self.bars
        return (
            token[0].isalnum()
            or token in ("(", "{", "[", "\\sqrt", "\\frac", "\\binom")
            or token in _CONSTANTS
            or token in _LETTERS
            or (token[:1] == "\\" and token[1:] in FUNCTIONS)
        )

    def factor(self) -> Formula:
        base = self.atom()
        while True:
            if self.taken("^"):
                base = power(base, self.exponent())
            elif self.taken("!"):
                base = Formula("function", "factorial", (base,))
            elif self.next() == "%" and base.kind == "number":
                self.take()
                base = number(base.value[0] / 100, "%")
            else:
                return base

    def exponent(self) -> Formula:
        if self.taken("-"):
            return negative(self.exponent())
        self.taken("+")
        return self.one()

    def one(self) -> Formula:
        """Parse an argument of a command: a group or a single token."""
        token = self.take()
        if token == "{":
            inside = self.sum()
            self.take("}")
            return inside
        if (
            token.isdigit()
            and len(token) > 1
            and self.tokens[self.place - 2] not in ("^", "-", "+")
        ):
            # In LaTeX, an argument without braces is one digit: `\frac12` is 1/2.
            self.tokens[self.place - 1 : self.place] = [token[0], token[1:]]
            token = token[0]
        self.place -= 1
        return self.atom()

    def atom(self) -> Formula:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self.digits(token)
        if token in ("(", "["):
            return self.sequence(token)
        if token in ("{", "\\{"):
            return self.braces(token)
        if token == "|":
            self.bars += 1
            inside = self.sum()
            self.take("|")
            self.bars -= 1
            return Formula("function", "abs", (inside,))
        if token in ("e", "i"):
            return Formula("constant", token)
        if token in _CONSTANTS:
            return Formula("constant", _CONSTANTS[token])
        if token == "\\mathbb":
            return Formula("symbol", f"set {self.name()}")
        if token.isalpha() or token in _LETTERS:
            return self.symbol(token)
        if token.startswith("\\text{"):
            return Formula("text", token[6:-1])
        if token == "\\frac":
            return quotient(self.one(), self.one())
        if token in ("\\binom", "\\choose"):
            return Formula("function", "binomial", (self.one(), self.one()))
        if token == "\\sqrt":
            degree = number(Fraction(2))
            if self.taken("["):
                degree = self.sum()
                self.take("]")
            return root(self.one(), degree)
        if token in ("\\lfloor", "\\lceil"):
            inside = self.sum()
            self.take("\\rfloor", "\\rceil")
            return Formula("function", "floor" if token == "\\lfloor" else "ceil", (inside,))
        if token.startswith("\\begin{"):
            return self.matrix(token)
        if token[:1] == "\\" and token[1:] in FUNCTIONS:
            return self.function(token[1:])
        raise NotAFormula

    def digits(self, token: str) -> Formula:
        # Limited, because the conversion of digits takes quadratic time.
        if len(token) > 4 * MAX_DIGITS:
            raise NotAFormula
        value = Fraction(token.replace(",", ""))
        if self.next() == "_":
            self.take()
            return Formula("base", (token, repr(self.one())))
        # A mixed number, such as 1\frac{1}{2}.
        if self.next() == "\\frac" and token.isdigit():
            before = self.place
            part = self.atom()
            if part.kind == "number" and part.value[1] == "/" and 0 < part.value[0] < 1:
                return number(value + part.value[0], "mixed")
            self.place = before
        return number(value)

    def name(self) -> str:
        if self.taken("{"):
            parts = []
            while self.next() not in ("}", None):
                parts.append(self.take())
            self.take("}")
            return "".join(parts)
        return self.take()

    def symbol(self, token: str) -> Formula:
        name = token
        if self.next() == "_":
            self.take()
            name = f"{token}_{self.name()}"
        while self.taken("'"):
            name += "'"
        inverse = ["^", "{", "-", "1", "}", "("]
        if token in _APPLIED and self.tokens[self.place : self.place + 6] == inverse:
            self.place += 5
            name += "^-1"
        if token in _APPLIED and self.next() == "(":
            self.take()
            inside = self.elements()
            self.take(")")
            return Formula("function", f"{name}()", tuple(inside))
        # A derivative without an argument.
        if name.endswith("'"):
            raise NotAFormula
        return Formula("symbol", name)

    def sequence(self, opening: str) -> Formula:
        # Inside brackets, `|` opens a new absolute value.
        bars, self.bars = self.bars, 0
        elements = self.elements()
        closing = self.take(")", "]")
        self.bars = bars
        if len(elements) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
            return elements[0]
        return Formula("sequence", opening + closing, tuple(elements))

    def braces(self, opening: str) -> Formula:
        if opening == "{":
            inside = self.chain()
            if self.taken("\\choose"):
                inside = Formula("function", "binomial", (inside, self.sum()))
            self.take("}")
            return inside
        if self.taken("\\}"):
            return Formula("symbol", "\\emptyset")
        elements = self.elements()
        self.take("\\}")
        return unordered(elements)

    def matrix(self, begin: str) -> Formula:
        environment = begin[len("\\begin{") : -1]
        if environment not in ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array"):
            raise NotAFormula
        # Skip the specification of columns.
        if environment == "array" and self.taken("{"):
            while not self.taken("}"):
                self.take("c", "l", "r", "|")
        rows, cells = 1, list[Formula]()
        while not self.taken(f"\\end{{{environment}}}"):
            if self.taken("\\\\"):
                rows += self.next() != f"\\end{{{environment}}}"
            elif not self.taken("&"):
                cells.append(self.chain())
        return Formula("matrix", rows, tuple(cells))

    def function(self, name: str) -> Formula:
        exponent: Formula | None = None
        base = Formula("constant", "e") if name == "ln" else number(Fraction(10))
        while self.next() in ("^", "_"):
            if self.take() == "^":
                exponent = self.exponent()
            else:
                base = self.one()
        if exponent == number(Fraction(-1)):
            name, exponent = f"arc{name}", None
        inside = self.argument()
        if name == "exp":
            result = power(Formula("constant", "e"), *inside[:1])
        elif name in ("ln", "log"):
            result = Formula("function", "log", (inside[0], base))
        else:
            result = Formula("function", name, tuple(inside))
        return result if exponent is None else power(result, exponent)

    def argument(self) -> list[Formula]:
        """Parse arguments in brackets, or, as in `\\sin 2x`, factors up to an operator or
        function."""
        if self.next() in ("(", "{", "["):
            opening = self.take()
            bars, self.bars = self.bars, 0
            inside = self.elements()
            self.take({"(": ")", "{": "}", "[": "]"}[opening])
            self.bars = bars
            return inside
        minus = self.taken("-")
        factors = [self.factor()]
        while (token := self.next()) is not None and (
            token == "/" or (self.starts(token) and token[1:] not in FUNCTIONS and token != "(")
        ):
            if token == "/":
                self.take()
                factors = [quotient(product(factors), self.factor())]
            else:
                factors.append(self.factor())
        inside_ = product(factors)
        return [negative(inside_) if minus else inside_]

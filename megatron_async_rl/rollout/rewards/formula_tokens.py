"""Tokenizer of formulas in LaTeX and plain text, alone or in prose."""

from __future__ import annotations

import re

FUNCTIONS = frozenset(
    re.findall(
        r"\S+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp abs floor "
        "ceil max min gcd lcm det",
    )
)
_SPELLINGS = {
    "\\tg": "\\tan",
    "\\lg": "\\log",
    "\\varepsilon": "\\epsilon",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\leqslant": "\\le",
    "\\geqslant": "\\ge",
    "\\neq": "\\ne",
    "\\lt": "<",
    "\\gt": ">",
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\varnothing": "\\emptyset",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\vert": "|",
    "\\backslash": "\\setminus",
    ":": "/",
    ";": ",",
}
SHORT_WORDS = frozenset(
    re.findall(r"\S+", "a to of is in at by no per the for are not if so be on an its was")
)
"""Short words. Any other sequence of up to three letters is a product of variables."""

_UNICODE = str.maketrans(
    {
        "×": "*",
        "·": "*",
        "∙": "*",
        "⋅": "*",
        "÷": "/",
        "−": "-",
        "–": "-",
        "²": "^2",
        "³": "^3",
        "√": "\\sqrt ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "±": "\\pm ",
        "°": "",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "θ": "\\theta ",
    }
)
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|quad|qquad|bigg?|Bigg?|bigl|bigr|limits)(?![A-Za-z])"
    r"|(?<!\\)\\[,;:!> ]|[~$]|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])"
)
_LISTED = re.compile(r"\s*(?:,\s*)?(?:,|\b(?:and|or)\b)\s*")
_SPOKEN = re.compile(r"\\?%|\\?\b(?:percent|pct)\b")
_TOKEN = re.compile(
    r"""(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)
    |(?P<text>\\(?:text\w*|mathrm|mbox|mathbf|operatorname)\s*\{[^{}]*\})
    |(?P<environment>\\(?:begin|end)\s*\{\w+\})
    |(?P<command>\\(?:[A-Za-z]+|.))
    |(?P<word>[A-Za-z]{2,})
    |(?P<other>\*\*|<=|>=|!=|\S)""",
    re.VERBOSE | re.DOTALL,
)


_WORD_IN_PROSE = re.compile(
    r"(?<![\\\w{])(?!(?:sin|cos|tan|cot|sec|csc|ln|log|exp|pi|sqrt)\b)(?:[A-Za-z]{2,}|[aAI])(?![\w}])"
)


def tokens(text: str) -> list[str]:
    """Return the tokens of a formula, or of prose with formulas. A word becomes `\\text{word}`."""
    # Replaced by a space, so that tokens on both sides of a layout command stay separate.
    text = _LAYOUT.sub(" ", text.translate(_UNICODE))
    text = re.sub(r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1", _SPOKEN.sub("%", text))
    # A line segment, such as AB.
    text = re.sub(r"\\overline\s*\{([A-Z]{2})\}", r"\1", text)
    # Mixed numbers, such as 1 1/2.
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3})", ",", text)
    result: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if match.lastgroup == "word":
            result += _word(token)
        elif match.lastgroup == "text":
            result += _text(token)
        else:
            token = {"**": "^", "<=": "\\le", ">=": "\\ge", "!=": "\\ne"}.get(token, token)
            result.append(_SPELLINGS.get(token, re.sub(r"\s", "", token)))
    return result


def _word(word: str) -> list[str]:
    if word in FUNCTIONS or word in ("pi", "sqrt", "infty", "frac"):
        return [f"\\{word}"]
    if word in ("or", "and"):
        return [","]
    # A name together with a variable, as in "2pir".
    for name in ("sqrt", "pi"):
        if word.startswith(name) and len(word) <= len(name) + 1:
            return [f"\\{name}", *word[len(name) :]]
    if len(word) <= 3 and word.lower() not in SHORT_WORDS:
        return list(word)
    return [f"\\text{{{word.lower()}}}"]


def _text(token: str) -> list[str]:
    inside = token[token.index("{") + 1 : -1].strip(" .:()")
    if inside in FUNCTIONS:
        return [f"\\{inside}"]
    if inside in ("or", "and", ", and", ", or"):
        return [","]
    if value := re.fullmatch(r"\s*(-?)(\d+(?:\.\d+)?)\s*", token[token.index("{") + 1 : -1]):
        return [one for one in value.groups() if one]
    # The label of an option is a symbol.
    if len(inside) == 1:
        return [inside]
    # Undo spellings of math-verify: "A , C" for "A and C", "\\inftyinite" for "infinite".
    inside = _LISTED.sub(", ", inside.replace("\\inftyinit", "infinit"))
    return [f"\\text{{{inside.lower()}}}"] if inside else []


def prose_tokens(text: str) -> list[str]:
    """Return the tokens of a text in which every sequence of letters is a word."""
    return tokens(_WORD_IN_PROSE.sub(r" \\text{\g<0>} ", text))

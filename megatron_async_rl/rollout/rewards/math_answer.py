"""Normalization of data-set answers: the number, formula or word without the surrounding text.

Text without exactly one unambiguous answer raises ValueError, because a guess would reward wrong
responses."""

from __future__ import annotations

import re

from megatron_async_rl.rollout.rewards.formula_parser import read
from megatron_async_rl.rollout.rewards.formula_tokens import SHORT_WORDS

NUMBER = r"[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+"
_UNITS = (
    "km|cm|mm|dm|nm|ft|yd|mi|kg|mg|lbs?|oz|ml|mL|kL|gal|hrs?|mins?|secs?|ms|mph|kph|rpm|Hz|kHz|kW|kJ|"
    "mol|Pa|cups?|days?|men|eggs?|cars?|bags?|box|pens?|cats?|dogs?|USD|in|sq|cu|per"
)
"""Units and counted objects. Other words of up to three letters are products of variables."""
_GAP = r"(?:\s|~|\\[,;:! ])*"
_UNIT_TEXT = r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}"
_UNIT_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_AMOUNT = re.compile(
    rf"({NUMBER}|-?\\[dt]?frac\{{\d+\}}\{{\d+\}}|\d+/\d+)"
    rf"((?:{_GAP}{_UNIT_TEXT}|\s*(?:{_UNITS})\b\.?|\s+[A-Za-z]{{4,}}\.?|\s+[mgshlL]\b|\s*(?:°\s?[CF]?|€))"
    rf"{_UNIT_POWER}"
    rf"(?:[\s/*]+(?:{_UNIT_TEXT}|[A-Za-z]{{2,}}\.?|(?<=[/*\s])[A-Za-z]\b){_UNIT_POWER}|{_UNIT_TEXT})*)"
)
"""A number and its unit: `12 feet per second`, `5 km/h`, `12 \\text{ cm}^2`."""
_TEXT_ALONE = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]{1,100})\}")
_MEASURE = re.compile(
    rf"((?=.*(?:\d|\\pi)).*[^\s\\,;:!]){_GAP}(\\(?:text|mathrm|mbox|textrm)"
    r"\s*\{[\s~]*[A-Za-z][A-Za-z ./]*\})"
    rf"{_UNIT_POWER}",
    re.S,
)
"""A formula and its unit: `25\\pi \\text{ square inches}`."""
_UNIT = re.compile(r"(?:[A-Za-z]{1,4}|\\(?:text|mathrm)\{[^}]*\}|\\circ)(?:\^\{?\d\}?)?")
_MULTIPLE = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|pairs?|or|to|and|[ap]\.?m\.?)\b",
    re.I,
)
"""Words after a number that change its value or introduce another number."""
_TOWER = re.compile(r"\^\s*\{?\s*\d*\s*\^|\^\s*\{?\s*\d{6,}|\d\s*\^\s*\{?\s*\d+\s*\^|\{{30,}")
"""Powers of powers and huge exponents. No answer needs them, and their evaluation would not end."""
_UNSUPPORTED = re.compile(
    "0[xX][\\da-fA-F]|[\u221a\u00bc-\u00be\u2150-\u215e\u00b2\u00b3]|\\d[eE][-+]?\\d|\\d['\u2032]\\d"
)
"""Notations that math-verify cannot parse."""
_RANGE = re.compile(r"\d+(?:\.\d+)?\s*(?:-|\u2013|\u2212|--|\bto\b)\s*\d+(?:\.\d+)?")
_TIME = re.compile(r"\d{1,2}:[0-5]\d(?::[0-5]\d)?(?:\s*[ap]\.?m\.?)?|\d{1,2}\s*[ap]\.?m\.?", re.I)
_OPTION = re.compile(r"\([A-H]\)\s*\S.*")
MAX_SOLUTION, MAX_ANSWER = 100_000, 1_000
"""Maximum characters of a solution, and of the answer in it."""
_DOLLAR = re.compile(r"(?<!\\)\$")
TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|begin|end|operatorname|mathbf)\s*\{[^}]*\}"
)
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "arcsin arccos arctan cos cot csc exp ln log sec sin sqrt tan pi or and frac infty",
    )
)


def read_answer(text: str) -> str:
    """Return the LaTeX of the final answer: the text after `####` (GSM8K), in the last
    `\\boxed{}`, between delimiters, or the whole text. A quantity with a unit becomes a number.
    Raises ValueError with the reason if the text does not have exactly one answer."""
    answer = text.strip()
    if len(answer) > MAX_SOLUTION:
        raise ValueError(f"has {len(answer)} characters; the limit is {MAX_SOLUTION}")
    if "####" in answer:
        answer = answer.rpartition("####")[2].strip()
    elif (boxed := boxed_in(answer)) is not None:
        answer = boxed.strip()
    answer = _without_delimiters(answer).strip()
    if (inside := _TEXT_ALONE.fullmatch(answer)) and _AMOUNT.fullmatch(inside[1].strip()):
        answer = inside[1].strip()
    # Thousands separators: 32,\!348 and 32{,}348.
    answer = re.sub(r"(?<=\d)(?:,\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))", ",", answer.replace(r"\$", ""))
    if len(answer) > 1 and answer.endswith(".") and "\n" not in answer:
        answer = answer[:-1]
    answer = answer.lstrip("€£")
    # Ambiguous: math-verify would read 3:45 as a quotient, and 5-7 as -2.
    if _TIME.fullmatch(answer):
        raise ValueError(
            "is a time of day or a ratio: write a ratio as a fraction, a time as one number"
        )
    if _OPTION.fullmatch(answer):
        raise ValueError("is an option with its text: write either the letter or the text")
    if _RANGE.fullmatch(answer):
        raise ValueError(
            "is a range or a difference: write the value of a difference, or [5, 7] for a range"
        )
    # The limit on the length also limits the backtracking of the patterns.
    if len(answer) <= MAX_ANSWER and (amount := _AMOUNT.fullmatch(answer)):
        if multiple := _MULTIPLE.search(amount[2]):
            raise ValueError(f"has a number and the word {multiple.group()!r}: write one number")
        answer = amount[1]
    elif (
        len(answer) <= MAX_ANSWER
        and (amount := _MEASURE.fullmatch(answer))
        and not _MULTIPLE.search(amount[2])
        and (value := read(amount[1])) is not None
        and value.kind != "set"
    ):
        answer = amount[1]
    # Write out both signs, which math-verify does not support everywhere.
    if "\\pm" in answer or "\\mp" in answer:
        answer = ", ".join(_with_sign(answer, *signs) for signs in ("+-", "-+"))
    if re.fullmatch(NUMBER, answer):
        # 1,000 is one number, not the set {1, 0}.
        answer = answer.replace(",", "")
    answer = re.sub(r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", answer)
    answer = re.sub(r"(?<=\d)[ _](?=\d{3}(?:[ _]\d{3})*$)", "", answer)
    answer = answer.replace(r"\varnothing", r"\emptyset")
    if not answer:
        raise ValueError("has no answer")
    if len(answer) > MAX_ANSWER or _TOWER.search(answer):
        raise ValueError("is too large to evaluate")
    if unsupported := _UNSUPPORTED.search(answer):
        raise ValueError(f"has {unsupported.group()!r}, which math-verify cannot parse")

    if "\\" not in answer and not re.search(r"\d", answer) and _is_word(answer):
        return rf"\text{{{answer}}}"
    plain = TEXT_COMMAND.sub(" ", answer)
    words = [one for one in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain) if _is_prose(one)]
    if len(words) > 1:
        raise ValueError("is a sentence, whose answer is ambiguous: write the answer alone")
    if words:
        raise ValueError(f"has the word {words[0]!r}: write the number or formula alone")
    return answer


def _with_sign(text: str, plus_minus: str, minus_plus: str) -> str:
    """Return the text with the signs `plus_minus` for \\pm and `minus_plus` for \\mp."""
    text = re.sub(r"\\pm(?![A-Za-z])", plus_minus, text)
    return re.sub(r"\\mp(?![A-Za-z])", minus_plus, text)


def _is_prose(word: str) -> bool:
    """Return True for a word. Up to three letters, such as `ab`, are a product of variables."""
    if word.lower() in _FUNCTIONS:
        return False
    name = re.fullmatch("[A-Z][a-z]{2}", word) is not None  # For example, Jan.
    return len(word) > 3 or name or word.lower() in SHORT_WORDS


def _is_word(text: str) -> bool:
    """Return True for text such as `east`, which math-verify would parse as a product."""
    word = re.fullmatch(r"(?:[A-Za-z]{3,}|no)(?:[ -][A-Za-z]+){0,2}", text, re.I) is not None
    return word and text.lower() not in _FUNCTIONS


def boxed_in(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, which may have nested braces, or None."""
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
    """Return the formula between delimiters, or the text. Raises ValueError for several
    formulas."""
    for begin, end in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            return text[len(begin) : -len(end)]
    places = [one.start() for one in _DOLLAR.finditer(text)]
    # A single dollar sign belongs to an amount; a formula has two.
    if len(places) <= 1:
        return _DOLLAR.sub("", text)
    if len(places) > 2:
        raise ValueError("has several formulas: write the final one alone")
    before, inside, after = (
        text[: places[0]].strip(),
        text[places[0] + 1 : places[1]].strip(),
        text[places[1] + 1 :].strip(),
    )
    if re.fullmatch(NUMBER, before) and not after and _UNIT.fullmatch(inside):
        return before
    if before.endswith("="):
        return f"{before} {inside}" if not after else inside
    # Either number could be the answer.
    if re.search(r"\d", before + after):
        raise ValueError("has numbers inside and outside of a formula: write the answer alone")
    return inside

"""Visible text. A text of characters without a glyph counts as empty, be it an answer, a test or a
question."""

from __future__ import annotations

import unicodedata

_BLANK_CATEGORIES = frozenset(("Cc", "Cf", "Co", "Cs", "Mc", "Me", "Mn", "Zl", "Zp", "Zs"))
"""Unicode categories: control, format, private-use, surrogate, combining mark and separator."""
_BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Hangul fillers and the empty Braille cell, which Unicode classifies as letters and symbols."""
_EDGES = "".join(
    chr(code)
    for first, last in (
        *((0x00, 0x20), (0x7F, 0xA0), (0xAD, 0xAD), (0x200B, 0x200F), (0x2028, 0x202F)),
        *((0x2060, 0x206F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    )
    for code in range(first, last + 1)
)
"""Characters without a meaning at either end of a text. Tags and variation selectors are excluded
because they end some emoji."""


def is_blank(text: str) -> bool:
    """Return True for a text without a visible character: an empty text, or only white space,
    zero-width characters, control characters and combining marks."""
    return all(map(_shows_nothing, text))


def stripped(text: str) -> str:
    """Return `text` without white space, control and zero-width characters at either end."""
    # White space may surround a control character, so strip it before and after.
    return text.strip().strip(_EDGES).strip()


def _shows_nothing(character: str) -> bool:
    # Categories also cover characters of future Unicode versions; the letters are exceptions.
    if character in _BLANK_LETTERS or unicodedata.category(character) in _BLANK_CATEGORIES:
        return True
    # Unicode reserves these code points for future format characters.
    code = ord(character)
    return code == 0x2065 or 0xFFF0 <= code <= 0xFFF8 or 0xE0000 <= code <= 0xE0FFF

"""Text that a reader can see: characters without a glyph make no answer, no test and no
question."""

from __future__ import annotations

import unicodedata

_BLANK_CATEGORIES = frozenset(("Cc", "Cf", "Co", "Cs", "Mc", "Me", "Mn", "Zl", "Zp", "Zs"))
"""Control, format and private characters, halves of pairs, marks without a letter, and spaces."""
_BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Fillers of Hangul and the empty cell of Braille, which Unicode counts as letters and symbols."""
_EDGES = "".join(
    chr(code)
    for first, last in (
        *((0x00, 0x20), (0x7F, 0xA0), (0xAD, 0xAD), (0x200B, 0x200F), (0x2028, 0x202F)),
        *((0x2060, 0x206F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    )
    for code in range(first, last + 1)
)
"""Characters that have no meaning at either end of a text. Tags and variation selectors, which end
some emoji, are not among them."""


def is_blank(text: str) -> bool:
    """Return True for a text without a visible character: an empty one, white space, zero-width and
    control characters, combining marks alone."""
    return all(map(_shows_nothing, text))


def stripped(text: str) -> str:
    """Return `text` without white space, control and zero-width characters at either end."""
    # White space may stand on both sides of a control character.
    return text.strip().strip(_EDGES).strip()


def _shows_nothing(character: str) -> bool:
    # Categories cover future versions of Unicode; the letters are exceptions to them.
    if character in _BLANK_LETTERS or unicodedata.category(character) in _BLANK_CATEGORIES:
        return True
    # Reserved for further format characters.
    code = ord(character)
    return code == 0x2065 or 0xFFF0 <= code <= 0xFFF8 or 0xE0000 <= code <= 0xE0FFF

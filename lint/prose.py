"""The words and the width of the prose: phrases that have plainer English, and lines to wrap.

Prose is in docstrings, comments and messages of Python, in the paragraphs of Markdown, and in the
comments and messages of scripts. Text between backticks is code.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

MAX_COLUMNS = 100

PHRASES = {
    "is no": "is not",
    "are no": "are not",
    "beside": "besides, with or next to",
    "one that": "the noun, or that",
    "by which": "a sentence with a verb",
    "of which": "whose, or a second sentence",
    "in the place of": "instead of, or for",
    "told": "reported, named or passed",
    "says": "reports, states or names",
    "said": "reported, stated or named",
    "standstill": "stall or hang",
    "stands still": "stalls or hangs",
    "stand still": "stall, hang or pause",
    "weights in 8 bits": "FP8 weights",
    "8-bit float": "FP8",
    "8-bit floats": "FP8",
    "borrow": "acquire",
    "borrows": "acquires",
    "borrowed": "acquired",
    "give back": "release or return",
    "gives back": "releases or returns",
    "given back": "released or returned",
    "walls": "isolation",
    "keeper": "subreaper",
    "in words": "as text",
    "for ever": "forever",
    "at the most": "at most",
    "at the least": "at least",
    "wants": "requests or needs",
    "none of its": "a sentence with a verb",
    "none of theirs": "a sentence with a verb",
    "none of them": "a sentence with a verb",
    "tell": "report, show or distinguish",
    "tells": "reports, shows or distinguishes",
    "ask": "request, call or query",
    "asks": "requests, calls or queries",
    "want": "request or need",
    "nobody": "nothing, no process or no user",
    "somebody": "a process or a user",
    "whoever": "the noun",
    "go on": "continue",
    "goes on": "continues",
    "went on": "continued",
    "going on": "continuing",
    "lend": "share or map",
    "lends": "shares or maps",
    "lent": "shared or mapped",
    "for good": "permanently",
    "in turns": "alternately, or one after another",
    "all the same": "nevertheless, or equal",
    "comes to": "reaches",
    "came to": "reached",
    "machine of engines": "rollout node",
    "machines of engines": "rollout nodes",
    "hear": "receive or learn",
    "hears": "receives or learns",
    "heard": "received",
    "is to be": "will be, must be, or a verb",
    "are to be": "will be, must be, or a verb",
    "to be had": "available",
    "anew": "again",
    "once more": "again",
    "stood still": "stalled, hung or paused",
    "of late": "recently",
    "is had": "a verb",
    "are had": "a verb",
    "the very": "the, or the same",
    "everybody": "all processes, ranks or users",
    "mistake of ours": "internal error",
    "in one go": "at once",
    "is through": "is complete",
    "are through": "are complete",
    "but for": "except",
    "lets go of": "releases",
    "finds room": "has room",
    "takes the place of": "replaces",
    "take the place of": "replace",
    "takes their place": "replaces them",
    "look whether": "check whether",
    "looks whether": "checks whether",
    "looks that": "checks that",
    "as ever": "as usual",
    "know nothing": "do not depend on",
    "knows nothing": "does not depend on",
    "nothing of it": "none of it",
    "check sum": "checksum",
    "as it lies": "a sentence with a verb",
    "as they lie": "a sentence with a verb",
    "as it stands": "unchanged",
    "as they stand": "unchanged",
    "goes by": "uses, or depends on",
    "what is there": "the noun",
    "what it holds": "its content",
    "what it held": "its content",
    "what they hold": "their content",
    "without end": "forever, or endless",
    "on the spot": "there, or at once",
    "takes no part": "is ignored, or does not take part",
    "sees nothing of": "does not receive",
}
"""A phrase, and the plain English for it."""

BEFORE = r"(?<![\w._-])(?<![Tt]here )"
AFTER = r"(?![\w_]| (?:longer|more|less|later|earlier|other)\b)"
"""Surroundings of a phrase. Names of keys, `there is no` and `is no longer` are plain English."""


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements of a file. Unlike ast.walk, this skips expressions, which are most nodes."""
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        for statement in blocks.pop():
            yield statement
            if isinstance(statement, ast.Expr | ast.Assign | ast.Return):
                continue
            for field in ("body", "orelse", "finalbody"):
                blocks += filter(None, [getattr(statement, field, None)])
            for field in ("handlers", "cases"):
                blocks += [one.body for one in getattr(statement, field, ())]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """String expressions that document a module, class, function or attribute."""
    for statement in statements(tree):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def phrases(source: str, tree: ast.Module, *, messages: bool) -> Iterator[tuple[int, str]]:
    """Line and message of each phrase of PHRASES in docstrings, comments and, with `messages`, all
    other strings. Text between backticks is code."""
    if not any(found_phrases(plain(source))):
        return  # Most files have none, and reading their tokens takes time.
    documented = {(one.lineno, one.col_offset) for one in docstrings(tree)}
    for line, text in _texts(source, documented, messages=messages):
        prose = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text))
        for phrase in found_phrases(prose):
            yield line, f"{phrase!r}: write {PHRASES[phrase]}"


def page_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each phrase of PHRASES in the paragraphs of a Markdown page. Blocks of
    code, text between backticks and the targets of links are not prose."""
    code = False
    paragraph: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if line.strip() and not code and not fence:
            paragraph.append(line.strip())
            continue
        # A phrase may continue on the next line, so a paragraph is one text.
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "`", " ".join(paragraph))
        for phrase in found_phrases(prose):
            yield number - len(paragraph), f"{phrase!r}: write {PHRASES[phrase]}"
        paragraph = []


COMMENT = re.compile(r"(?:^|\s)#+(?!!)(.*)")


def script_phrases(text: str, *, code: bool) -> Iterator[tuple[int, str]]:
    """Line and message of each phrase of PHRASES in a file with `#` comments: in the comments and,
    with `code`, in the messages and names around them. Comments on successive lines are one
    text."""
    comment: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = COMMENT.search(line)
        before = line[: found.start()] if found else line
        texts = []
        if found and not before.strip():
            comment.append(found[1].strip())
        else:
            texts += [(number - len(comment), " ".join(comment))]
            texts += [(number, found[1])] if found else []
            comment = []
        texts += [(number, before)] if code else []
        for first, prose in texts:
            for phrase in found_phrases(re.sub(r"`[^`]*`", "`", prose)):
                yield first, f"{phrase!r}: write {PHRASES[phrase]}"


def found_phrases(prose: str) -> Iterator[str]:
    """Phrases of PHRASES in a text, also at the beginning of a sentence."""
    lower = prose.lower()
    for phrase in PHRASES:
        if phrase in lower and re.search(
            f"{BEFORE}[{phrase[0]}{phrase[0].upper()}]{phrase[1:]}{AFTER}", prose
        ):
            yield phrase


def plain(source: str) -> str:
    """A Python file as one text, in which every phrase of its prose stands."""
    return " ".join(source.replace("#", " ").split())


STRINGS = (tokenize.STRING, tokenize.FSTRING_MIDDLE)
KEY = re.compile(r"[\"'][\w.]+[\"']")


def _texts(
    source: str, documented: set[tuple[int, int]], *, messages: bool
) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings and comments and, with `messages`, of all other strings. Comments
    on successive lines are one text."""
    comment: list[str] = []
    begins = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begins = begins if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
        elif comment and token.type != tokenize.NL:
            yield begins, " ".join(comment)
            comment = []
        text = token.start in documented or (messages and token.type in STRINGS)
        if text and not KEY.fullmatch(token.string):
            yield token.start[0], token.string


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each line of Markdown that is too long and could be wrapped."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        words = max((len(word) for word in line.split()), default=0)
        table = line.lstrip().startswith(("|", "#", "<"))
        code_of_list = line.startswith(" " * 8) or re.fullmatch(r" *`[^`]*`", line)
        if len(line) > MAX_COLUMNS and not (
            code or table or code_of_list or "](" in line or words > MAX_COLUMNS
        ):
            yield number, f"has {len(line)} columns, more than {MAX_COLUMNS}"

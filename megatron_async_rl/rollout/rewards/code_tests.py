"""Tests of the reward `code`, as data sets write them.

    "tests": [{"input": "1 2\\n", "output": "3\\n"}]     -> pairs of input and output
    "tests": "```python\\nassert f(1) == 2\\n```"        -> Python sources (code_asserts.py)

A value may also be JSON or a Python literal in a text, in a fence, and a list of such texts.

Invariants:
- what is read is all that the row has: a value that is not understood as a whole is refused, with
  the number of the test at fault;
- no test passes for a program that does nothing: the output of a pair is visible, and a source has
  an assertion that runs and depends on the code.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async_rl.config.visible_text import is_blank
from megatron_async_rl.rollout.rewards.code_asserts import UnfitTest, prepared
from megatron_async_rl.rollout.rewards.registry import ColumnError, shown
from megatron_async_rl.samples.types import Prompt

MAX_ENCODINGS = 3
"""Times that a value may be encoded as text in a text."""
KINDS = ("type", "testtype")
"""Keys of a pair for the way to run it, with the values of PROGRAMS for a program that reads."""
PROGRAMS = (None, "stdin", "stdin_stdout")
SETUP = ("test_imports", "test_setup_code")
"""Other columns with Python that each test with `assert` begins with."""
_FENCED = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.#-]*[ \t]*\n(.*?)\n?[ \t]*\1\s*", re.S)
_FORMS = (
    "write a list of {input, output}, both text, or Python with `assert`, as text or a list of"
    " texts"
)


def tests_of(prompt: Prompt) -> list[str] | list[tuple[str, str]]:
    """Return the prompt's tests: prepared sources with assertions, or pairs of input and output.
    Raises ColumnError."""
    given, where = prompt.fields.get("tests"), f"prompt {prompt.id}"
    try:
        return _read(given, entry_point_of(prompt), _setup_of(prompt))
    except UnfitTest as error:
        raise ColumnError(where, "tests", error.what, error.fix) from error


def entry_point_of(prompt: Prompt) -> str | None:
    """Return the name of the function that `check` is called with. Raises ColumnError for a name
    that the code's function cannot have."""
    name = prompt.fields.get("entry_point")
    if name is None:
        return None
    why = None
    if not isinstance(name, str) or is_blank(name) or not name.isidentifier():
        why = ", which is not the name of a function"
    elif keyword.iskeyword(name):
        why = ", a keyword of Python"
    elif hasattr(builtins, name):
        why = ", a name of Python's own, which the code cannot replace"
    elif name.startswith("_"):
        why = ": names that begin with _ are not taken from the code"
    elif unicodedata.normalize("NFKC", name) != name:
        why = ", which Python reads as another name"
    if why is not None:
        fix = "write the name that the code gives the tested function, or null"
        raise ColumnError(f"prompt {prompt.id}", "entry_point", f"is {shown(name)}{why}", fix)
    return str(name)


def _setup_of(prompt: Prompt) -> str:
    """Return what runs before each test with `assert`: the row's `test_imports` and
    `test_setup_code`, as MBPP has them. Raises ColumnError."""
    parts: list[str] = []
    for name in SETUP:
        given = prompt.fields.get(name)
        lines = list(given) if isinstance(given, list | tuple) else [given or ""]
        if not all(isinstance(one, str) for one in lines):
            fix = "write Python, as text or a list of texts, or null"
            raise ColumnError(f"prompt {prompt.id}", name, f"is {shown(given)}", fix)
        parts += [one for one in lines if not is_blank(one)]
    return "".join(f"{one}\n" for one in parts)


def _read(given: object, entry_point: str | None, setup: str) -> list[str] | list[tuple[str, str]]:
    found: Any = _decoded(given)
    if isinstance(found, Mapping):
        found = _rows(found)
    elif isinstance(found, str):
        found = [] if is_blank(found) else [found]
    if not isinstance(found, list | tuple) or not found:
        raise UnfitTest(f"is {shown(given)}", _FORMS)
    tests: list[Any] = [_decoded(one) for one in found]
    if all(isinstance(one, str) for one in tests):
        return [
            _numbered(place, tests, prepared, setup + one, entry_point)
            for place, one in each(tests)
        ]
    return [_numbered(place, tests, _pair, one) for place, one in each(tests)]


def each(tests: Sequence[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(tests, start=1))


def _numbered(place: int, tests: Sequence[Any], read: Any, *args: Any) -> Any:
    try:
        return read(*args)
    except UnfitTest as error:
        if len(tests) == 1:
            raise
        raise UnfitTest(f"{error.what} (test {place} of {len(tests)})", error.fix) from error


def _decoded(value: object) -> object:
    """Return the value that a text holds: the inside of a fence, JSON, or a list or dictionary as
    Python writes it; any other text as it is."""
    for _ in range(MAX_ENCODINGS):
        if not isinstance(value, str):
            return value
        if (fenced := _FENCED.fullmatch(value)) is not None:
            value = fenced[2]
        text = value.strip()
        if not text.startswith(("[", "{", "(", '"')):
            return value
        found = _literal(text)
        if found is None:
            return value
        value = found
    return value


def _literal(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return None if text.startswith('"') else ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _rows(tests: Mapping[str, Any]) -> list[Any]:
    """Return one {input, output} for each test of {inputs: [...], outputs: [...]}, or of one
    test."""
    if tests.get("fn_name") is not None:
        raise _of_function("fn_name", tests["fn_name"])
    for first, second in (("inputs", "outputs"), ("input", "output")):
        inputs, outputs = tests.get(first), tests.get(second)
        if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)):
            continue
        if len(inputs) != len(outputs):
            what = f"has {len(inputs)} {first} and {len(outputs)} {second}"
            raise UnfitTest(what, "give every input an output")
        return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    return [tests]


def _pair(test: object) -> tuple[str, str]:
    if not isinstance(test, Mapping):
        raise UnfitTest(f"holds {shown(test)}", _FORMS)
    if test.get("fn_name") is not None:
        raise _of_function("fn_name", test["fn_name"])
    for key in KINDS:
        if test.get(key) not in PROGRAMS:
            raise _of_function(key, test[key])
    given, expected = test.get("input"), test.get("output")
    for key, value in (("input", given), ("output", expected)):
        if not isinstance(value, str):
            raise UnfitTest(f"has an `{key}` that is {shown(value)}", _FORMS)
    assert isinstance(given, str)
    assert isinstance(expected, str)
    if is_blank(expected):
        # A program that prints nothing would pass it.
        what = f"has an `output` that shows nothing: {shown(expected)}"
        raise UnfitTest(what, "write what the program has to print, or leave the test out")
    return given, expected


def _of_function(key: str, value: object) -> UnfitTest:
    what = f"has `{key}` {shown(value)}: tests of a function, and only programs read an `input`"
    return UnfitTest(what, "write them as Python: assert NAME(INPUT) == OUTPUT")

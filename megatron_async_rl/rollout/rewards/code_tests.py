"""Tests of the reward `code`, in the formats of public data sets.

    "tests": [{"input": "1 2\\n", "output": "3\\n"}]     -> pairs of input and output
    "tests": "```python\\nassert f(1) == 2\\n```"        -> Python sources (code_asserts.py)

A value may also be text with JSON or a Python literal, fenced or not, or a list of such texts.

Invariants:
- a value is parsed as a whole or refused, with the number of the invalid test in the error:
  ignoring a test that cannot be parsed would reward wrong code;
- no test passes for a program that does nothing: a pair has visible output, and a source has an
  assertion that runs and depends on the code.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_async_rl.config.visible_text import is_blank
from megatron_async_rl.rollout.rewards.code_asserts import UnfitTest, prepared
from megatron_async_rl.rollout.rewards.registry import ColumnError, excerpt
from megatron_async_rl.samples.types import Prompt

MAX_ENCODINGS = 3
"""Maximum number of nested encodings of a text, such as JSON in a fence."""
KINDS = ("type", "testtype")
"""Keys of a pair that select how to run it. Only the values in PROGRAMS are supported."""
PROGRAMS = (None, "stdin", "stdin_stdout")
"""Values of KINDS for a program that reads standard input."""
SETUP = ("test_imports", "test_setup_code")
"""Columns with Python code that precedes each test with `assert`."""
_FENCED = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.#-]*[ \t]*\n(.*?)\n?[ \t]*\1\s*", re.S)
_FORMS = (
    "write a list of {input, output}, both text, or Python with `assert`, as text or a list of"
    " texts"
)


def tests_of(prompt: Prompt) -> list[str] | list[tuple[str, str]]:
    """Return the prompt's tests: prepared sources with assertions, or pairs (input, output). Raises
    ColumnError."""
    value, where = prompt.fields.get("tests"), f"prompt {prompt.id}"
    try:
        return _read(value, entry_point_of(prompt), _setup_of(prompt))
    except UnfitTest as error:
        raise ColumnError(where, "tests", error.what, error.fix) from error


def entry_point_of(prompt: Prompt) -> str | None:
    """Return the name of the function that `check` receives, or None. Raises ColumnError for a name
    that a function of the code cannot have."""
    name = prompt.fields.get("entry_point")
    if name is None:
        return None
    why = None
    if not isinstance(name, str) or is_blank(name) or not name.isidentifier():
        why = ", which is not the name of a function"
    elif keyword.iskeyword(name):
        why = ", a keyword of Python"
    elif hasattr(builtins, name):
        why = ", a built-in name of Python, which the code cannot replace"
    elif name.startswith("_"):
        why = ": names that begin with _ are not read from the code"
    elif unicodedata.normalize("NFKC", name) != name:
        why = ", which Python normalizes to another name"
    if why is not None:
        fix = "write the name that the tested function has in the code, or null"
        raise ColumnError(f"prompt {prompt.id}", "entry_point", f"is {excerpt(name)}{why}", fix)
    return str(name)


def _setup_of(prompt: Prompt) -> str:
    """Return the code that precedes each test with `assert`: the row's `test_imports` and
    `test_setup_code`, which are column names of MBPP. Raises ColumnError."""
    parts: list[str] = []
    for name in SETUP:
        value = prompt.fields.get(name)
        lines = list(value) if isinstance(value, list | tuple) else [value or ""]
        if not all(isinstance(one, str) for one in lines):
            fix = "write Python, as text or a list of texts, or null"
            raise ColumnError(f"prompt {prompt.id}", name, f"is {excerpt(value)}", fix)
        parts += [one for one in lines if not is_blank(one)]
    return "".join(f"{one}\n" for one in parts)


def _read(value: object, entry_point: str | None, setup: str) -> list[str] | list[tuple[str, str]]:
    decoded: Any = _decoded(value)
    if isinstance(decoded, Mapping):
        decoded = _rows(decoded)
    elif isinstance(decoded, str):
        decoded = [] if is_blank(decoded) else [decoded]
    if not isinstance(decoded, list | tuple) or not decoded:
        raise UnfitTest(f"is {excerpt(value)}", _FORMS)
    tests: list[Any] = [_decoded(one) for one in decoded]
    # Formats cannot be mixed: either all tests are sources, or all tests are pairs.
    if all(isinstance(one, str) for one in tests):
        return _each(tests, lambda one: prepared(setup + one, entry_point))
    return _each(tests, _pair)


def _each(tests: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    """Apply `read` to every test. Raises UnfitTest with the number of the invalid test."""
    results = []
    for place, one in enumerate(tests, start=1):
        try:
            results.append(read(one))
        except UnfitTest as error:
            if len(tests) == 1:
                raise
            raise UnfitTest(f"{error.what} (test {place} of {len(tests)})", error.fix) from error
    return results


def _decoded(value: object) -> object:
    """Return the value that a text encodes as a fenced block, as JSON, or as a Python list, tuple
    or dictionary. Any other text, and any value that is not text, is returned unchanged."""
    for _ in range(MAX_ENCODINGS):
        if not isinstance(value, str):
            return value
        if (fenced := _FENCED.fullmatch(value)) is not None:
            value = fenced[2]
        text = value.strip()
        # Any other text is source code: `1` and `null` must not become data.
        if not text.startswith(("[", "{", "(", '"')):
            return value
        decoded = _literal(text)
        if decoded is None:
            return value
        value = decoded
    return value


def _literal(text: str) -> object:
    """Return the value of JSON or of a Python literal, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # Text in quotes that is not JSON may be a source that begins with a docstring.
        return None if text.startswith('"') else ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _rows(tests: Mapping[str, Any]) -> list[Any]:
    """Return one {input, output} per test of {inputs: [...], outputs: [...]}. A single pair becomes
    a list of one pair."""
    if tests.get("fn_name") is not None:
        raise _of_function("fn_name", tests["fn_name"])
    for first, second in (("inputs", "outputs"), ("input", "output")):
        inputs, outputs = tests.get(first), tests.get(second)
        if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)):
            continue
        # Lists of different lengths would pair inputs with the wrong outputs.
        if len(inputs) != len(outputs):
            what = f"has {len(inputs)} {first} and {len(outputs)} {second}"
            raise UnfitTest(what, "write one output per input")
        return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    return [tests]


def _pair(test: object) -> tuple[str, str]:
    if not isinstance(test, Mapping):
        raise UnfitTest(f"has the test {excerpt(test)}", _FORMS)
    if test.get("fn_name") is not None:
        raise _of_function("fn_name", test["fn_name"])
    for key in KINDS:
        # As a program, a test of a function would fail every correct response.
        if test.get(key) not in PROGRAMS:
            raise _of_function(key, test[key])
    stdin, expected = test.get("input"), test.get("output")
    for key, value in (("input", stdin), ("output", expected)):
        if not isinstance(value, str):
            raise UnfitTest(f"has an `{key}` that is {excerpt(value)}", _FORMS)
    assert isinstance(stdin, str)
    assert isinstance(expected, str)
    if is_blank(expected):
        # A program that prints nothing would pass this test.
        what = f"has an `output` without a visible character: {excerpt(expected)}"
        raise UnfitTest(what, "write the expected output, or remove the test")
    return stdin, expected


def _of_function(key: str, value: object) -> UnfitTest:
    what = (
        f"has `{key}` {excerpt(value)}: the test is for a function, and only programs read `input`"
    )
    return UnfitTest(what, "write it as Python: assert NAME(INPUT) == OUTPUT")

"""Formats of tests for the reward `code`: every format of public data sets is read or refused, and
a test that would pass without testing the code is refused."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.rollout.rewards.code_asserts import UnfitTest, prepared
from megatron_async_rl.rollout.rewards.code_tests import tests_of as read_tests
from megatron_async_rl.rollout.rewards.registry import RewardError, validate_row
from megatron_async_rl.samples import Prompt

CHECK = "def check(candidate):\n  "


def parsed_or_error(tests: Any, entry_point: Any = None) -> Any:
    """Return the tests without the marks of assertions, or the message of the error."""
    fields = {"tests": tests, "entry_point": entry_point}
    try:
        read = read_tests(Prompt(id="p", text="?", token_ids=(1,), fields=fields))
    except RewardError as error:
        return str(error) if error.fix else "no fix"
    return [one.replace("; _mar_asserted()", "") if isinstance(one, str) else one for one in read]


PAIR = [("1", "2")]
ASSERT = ["assert f(1) == 2"]
FORMS: list[tuple[Any, Any]] = [
    ([{"input": "1", "output": "2"}], PAIR),
    ([{"input": "1", "output": "2", "testtype": "stdin", "explanation": "x"}], PAIR),
    ({"inputs": ["1"], "outputs": ["2"]}, PAIR),
    ({"input": ["1"], "output": ["2"], "fn_name": None}, PAIR),
    ({"input": "1", "output": "2"}, PAIR),
    ('[{"input": "1", "output": "2"}]', PAIR),
    ('{"inputs": ["1"], "outputs": ["2"]}', PAIR),
    ("[{'input': '1', 'output': '2'}]", PAIR),
    ("({'input': '1', 'output': '2'},)", PAIR),
    ('"[{\\"input\\": \\"1\\", \\"output\\": \\"2\\"}]"', PAIR),
    (['{"input": "1", "output": "2"}'], PAIR),
    ('```json\n[{"input": "1", "output": "2"}]\n```', PAIR),
    (ASSERT, ASSERT),
    (ASSERT[0], ASSERT),
    ("```python\nassert f(1) == 2\n```", ASSERT),
    ("```\nassert f(1) == 2```\n", ASSERT),
    ("~~~py\nassert f(1) == 2\n~~~", ASSERT),
    (["```python\nassert f(1) == 2\n```"], ASSERT),
    ('["assert f(1) == 2"]', ASSERT),
    ("['assert f(1) == 2']", ASSERT),
    ("('assert f(1) == 2',)", ASSERT),
    ("[a for a in [f(1)]]\nassert f(1) == 2", ["[a for a in [f(1)]]\nassert f(1) == 2"]),
]
REFUSED: list[tuple[Any, str]] = [
    ("Tests:\n```python\nassert f(1) == 2\n```", "is not Python"),
    ("['assert f(1) == 2'", "is not Python"),
    ("{}", "has an `input` that is None"),
    ([*ASSERT, {"input": "1", "output": "2"}], "has the test 'assert f(1) == 2'"),
    ([{"input": "1", "output": "2"}, {"input": 1, "output": "2"}], "is 1 (test 2 of 2)"),
    ({"inputs": ["1"], "outputs": []}, "has 1 inputs and 0 outputs"),
    ({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, "has `fn_name` 'f'"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], "has `testtype` 'functional'"),
    ([{"input": "1", "output": "2", "type": "function_call"}], "has `type` 'function_call'"),
    ([{"input": "1", "output": "2", "fn_name": "g"}], "has `fn_name` 'g'"),
    ([{"input": "1", "output": " \n"}], "has an `output` without a visible character"),
    ([["1", "2"]], "has the test ['1', '2']"),
    (float("nan"), "is nan"),
]


def test_every_format_of_data_sets_is_read_or_refused() -> None:
    assert [(given, parsed_or_error(given)) for given, _ in FORMS] == FORMS
    for given, message in REFUSED:
        assert message in parsed_or_error(given), given


def test_the_setup_of_a_row_runs_before_each_of_its_tests() -> None:
    def read(**fields: Any) -> Any:
        fields = {"tests": ["assert math.sqrt(f(x)) == 2"] * 2, **fields}
        return read_tests(Prompt(id="p", text="?", token_ids=(1,), fields=fields))

    tests = read(test_imports=["import math"], test_setup_code="x = 1\r\ny = 2")
    assert [one.splitlines()[:3] for one in tests] == [["import math", "x = 1", "y = 2"]] * 2
    assert read(test_imports=[], test_setup_code="import math") == read(
        test_imports=["import math"]
    )
    for fields in ({}, {"test_setup_code": "", "test_imports": None}, {"test_setup_code": "x = ("}):
        with pytest.raises(RewardError, match="`tests`"):
            read(**fields)
    with pytest.raises(RewardError, match="`test_imports` is"):
        read(test_imports=[1])


def test_an_entry_point_is_a_possible_name_of_a_function() -> None:
    for name in ("f", "_", "élan"):
        assert isinstance(parsed_or_error(ASSERT, name), list) == (name != "_"), name
    for name in ("class", "None", "lambda", "f()", "Solution().f", "", " f", "1f", "sum", "print"):
        assert "`entry_point` is" in parsed_or_error(ASSERT, name), name
    for value in (["f"], 1, True, float("nan"), "_f", "ｆ"):
        assert "`entry_point` is" in parsed_or_error(ASSERT, value), value


VACUOUS: list[tuple[str, str]] = [
    ("def helper():\n  assert f(1) == 2", "nothing calls `helper`"),
    ("def helper():\n  assert f(1) == 2\ndef other():\n  helper()", "nothing calls `helper`"),
    ("def test_a():\n  def inner():\n    assert f(1) == 2", "nothing calls `inner`"),
    ("def test_a():\n  return\n  assert f(1) == 2", "line 3 that never runs"),
    ("def test_a():\n  raise ValueError\n  assert f(1) == 2", "line 3 that never runs"),
    ("async def test_f():\n  assert f(1) == 2", "`test_f`, which is `async`"),
    ("def test_f():\n  assert f(1) == 2\n  yield", "`test_f`, which has a `yield`"),
    ("def test_f(x):\n  assert f(x) == 2", "`test_f(x)`, which is called with no argument"),
    ("class Suite:\n  def test_it(self): assert f(1) == 2", "nothing calls `Suite.test_it`"),
    ("class A:\n  def run(self): assert f(1) == 2\nA()", "nothing calls `run`"),
    ("if False:\n  assert f(1) == 2", "line 2 that never runs"),
    (
        "def helper():\n  assert f(1) == 2\ntry: g()\nexcept E:\n  if False: helper()",
        "nothing calls `helper`",
    ),
    ("if not True or 1 > 2:\n  assert f(1) == 2", "line 2 that never runs"),
    ("while 0:\n  assert f(1) == 2", "line 2 that never runs"),
    ("for x in []:\n  assert f(x) == 2", "line 2 that never runs"),
    ("assert True", "no `assert` that depends on the code: line 1 is assert True"),
    ("f(1)\nassert True", "no `assert` that depends on the code"),
    ("assert len('ab') == 2", "no `assert` that depends on the code"),
    ("x = 1\nassert x == 1", "no `assert` that depends on the code"),
    ("import math\nassert math.sqrt(4) == 2", "no `assert` that depends on the code"),
    ("def one():\n  return 1\nassert one() == 1", "no `assert` that depends on the code"),
    ("assert (f(1) == 2, 'message')", "no `assert` that depends on the code"),
    ("f(1) == 2", "has no `assert`"),
    ("# assert f(1) == 2", "has no `assert`"),
    ('"""assert f(1) == 2"""', "has no `assert`"),
    (f"{CHECK}candidate(1) == 2", "has no `assert`"),
    (f"{CHECK}return candidate(1) == 2\nassert True", "no `assert` that depends on the code"),
    ("def check():\n  assert f(1) == 2", "`check()`, which is called with the tested function"),
    ("import numpy as np\nassert f(1) == 2", "imports numpy"),
    ("from solution import f\nassert f(1) == 2", "imports solution"),
    ("from .program import f\nassert f(1) == 2", "imports program"),
    ("assert math.isclose(f(1), 2)", "uses `math` without importing it"),
    ("assert isclose(f(1), 2)", "uses `isclose` without importing it"),
    ("assert Counter(f(1)) == Counter([2])", "uses `Counter` without importing it"),
]


def test_a_test_that_would_pass_without_code_is_refused() -> None:
    for source, message in VACUOUS:
        assert message in parsed_or_error(source, "f"), source
        assert "(test 2 of 2)" in parsed_or_error([*ASSERT, source], "f"), source


SOUND = [
    "def helper():\n  assert f(1) == 2\ntry: g()\nexcept helper(): pass",
    "def helper():\n  assert f(1) == 2\nmatch f(1):\n  case 1 if helper(): pass",
    "assert set(f((3, 4), (5, 4))) == set((4, 5)), 'é'  # ü",
    f"METADATA = {{'author': 'x'}}\n{CHECK}assert candidate([1.0], 0.3) == True",
    "l = [2, 1]\nf(l)\nassert l == [1, 2]",
    "try: f(1)\nexcept KeyError: pass\nelse: assert 0",
    "try:\n  f(1)\n  assert False\nexcept KeyError:\n  if f(2): assert f(3) == 1\n  else: raise",
    "ok = False\ntry:\n  f(1)\nexcept ValueError:\n  ok = True\nassert ok",
    "r = []\nfor x in [1, 2]: r.append(f(x))\nassert r == [1, 4]",
    "def same(a, b):\n  assert a == b\nsame(f(1), 2)",
    "is_two = lambda x: f(x) == 2\nassert is_two(1)",
    "class T:\n  def run(self):\n    assert f(1) == 2\nT().run()",
    "class TestF:\n  def test_it(self):\n    assert f(1) == 2\nTestF().test_it()",
    "import asyncio\nasync def main():\n  assert f(1) == 2\nasyncio.run(main())",
    "if f(1) != 2:\n  assert False",
    "if f(1) == 2: pass\nelif f(1) == 3:\n  assert False",
    "for a, b in [(1, 2)]:\n  assert f(a) == b, f'{a}'",
    "def main():\n  assert f(1) == 2\nif __name__ == '__main__':\n  main()",
    "import sys\nif sys.version_info > (3, 0):\n  def test_a():\n    assert f(1) == 2",
    "def test_a(x=1):\n  assert f(x) == 2",
    "assert globals()['f'](1) == 2",
    "match f(1):\n  case 2: pass\n  case _: assert False",
    "s = S()\ns.x = 1\nassert s.total() == 1",
    "assert (f(1)\n  == 2); x = 1",
    "assert f(1) == \\\n  2\r\nassert f(2) == 3",
    f"{CHECK}def one():\n    assert candidate(1) == 2\n  one()",
    "try:\n\tf(1)\n\tassert 0\nexcept ValueError:\n\t@staticmethod\n\tdef g(): pass",
    "try:\n  import numpy\nexcept ImportError:\n  pass\nassert f(1) == 2",
    "assert Counter('aa') == {'a': 2}",
]


def test_sound_tests_are_accepted_and_marks_do_not_change_them() -> None:
    for source in SOUND:
        name = "Counter" if "Counter" in source else "f"
        marked = prepared(source, name)
        assert "_mar_" in marked, source

        class Unmarked(ast.NodeTransformer):
            def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
                return None if "_mar_" in ast.unparse(node) else node

        assert ast.unparse(Unmarked().visit(ast.parse(marked))) == ast.unparse(ast.parse(source))


def test_a_test_may_contain_megabytes_of_data() -> None:
    """The analysis reads only names and calls."""
    data = str([[one, [one] * 20] for one in range(2000)])
    source = f"{CHECK}for x, y in {data}:\n    assert candidate(x) == y"
    validate_row("code", {}, {"tests": source, "entry_point": "f"})
    with pytest.raises(RewardError, match="is not Python"):
        validate_row("code", {}, {"tests": "(" * 10**5})


@pytest.mark.parametrize("depth", [1_500, 10_000])
def test_a_test_that_is_nested_too_deeply_is_refused_as_such(depth: int) -> None:
    """The recursion of the analysis ends at the first depth, and that of Python's parser at the
    second."""
    for expression in ("f(1)" + ".x" * depth, "f(1) == " + "-" * depth + "1"):
        with pytest.raises(UnfitTest) as error:
            prepared(f"assert {expression}", "f")
        assert error.value.what == "is nested too deeply"


def test_each_source_of_the_table_is_marked_or_refused_as_listed() -> None:
    """The table has the marked source, or what is wrong with it and the fix."""
    table = Path(__file__).parents[1] / "data" / "code_tests.jsonl"
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 100
    wrong = []
    for row in rows:
        given = {name: row[name] for name in ("source", "entry_point") if name in row}
        try:
            result = {"prepared": prepared(row["source"], row.get("entry_point"))}
        except UnfitTest as error:
            result = {"refused": f"{error.what}; {error.fix}"}
        if given | result != row:
            wrong.append((row, result))
    assert wrong == []

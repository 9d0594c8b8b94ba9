"""The mutation tester (tests/mutation): which edits it makes, and how it runs tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutation.executed import RECORDER, among, recorded
from tests.mutation.mutants import Mutant, mutants_of, sample
from tests.mutation.nearest import ImportMap
from tests.mutation.run import run_in_child

ROOT = Path(__file__).parents[2]


def edits(source: str) -> set[tuple[str, str]]:
    return {(one.before, one.after) for one in mutants_of("m.py", source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {("a < b", "a <= b")}),
        ("x = a == b != c", {("a == b != c", "a != b != c"), ("a == b != c", "a == b == c")}),
        ("x = a is None", {("a is None", "a is not None")}),
        ("x = a and not b", {("a and (not b)", "a or not b"), ("not b", "b")}),
        ("x = a // b", {("a // b", "a * b")}),
        ("x = 3", {("3", "4")}),
        ("X = (3, y)", {("3", "4")}),
        ("def f(x=True): ...", {("True", "False")}),
        ("if a: b()", {("a", "not a"), ("b()", "pass")}),
        ("while True: break", {("break", "continue"), ("True", "False")}),
        ("self.x = y", {("self.x = y", "pass")}),
        ("x += y", {("x += y", "pass")}),
        ("def f():\n  return x", {("return x", "return None")}),
        ("def f():\n  return False", {("False", "True")}),
        ("raise Wrong('a', 1)", {("raise Wrong('a', 1)", "pass")}),
        ("x = [a for a in b if a]", {("a", "not a")}),
        ("x = y if z else w", {("z", "not z")}),
        ("class A:\n  x: Annotated[int, Field(ge=1)] = 2", {("1", "2"), ("2", "3")}),
    ],
)
def test_every_operator_edits_its_construct(source, expected):
    assert edits(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text 1."""',
        "x = f'{1 + 2}'",
        "x = f'{y}' + ('a' if z else 'b')",
        "x = f'{y}' if z else 'none'",
        "what = 'none' if z else 'one'",
        "x: Literal[1] = y",
        "def f(x: Literal[1]) -> Literal[2]: ...",
        "if TYPE_CHECKING:\n  x = 1",
        "class A:\n  def __repr__(self):\n    return 1 + 2",
        "log.warning('%d', 1 + 2)",
        "print(1 + 2)",
        "DEADLINE_S = 3.0",
        "ROOM = 256 * 2**20",
        "x = f(timeout=3, what=a or b)",
        "x = zip(a, b, strict=True)",
        "return_ = None",
        "def f():\n  return None",
    ],
)
def test_text_annotations_logs_and_durations_are_not_edited(source):
    assert edits(source) == set()


def test_an_edit_leaves_the_rest_of_the_file_as_it_is():
    source = "é = 'ü'; x = ('ö', a <\n  b)  # kept\ny = 1\n"
    first, second = mutants_of("m.py", source)
    assert first.apply(source) == "é = 'ü'; x = ('ö', (a <= b))  # kept\ny = 1\n"
    assert second.apply(source) == source.replace("1", "(2)")


def test_a_sample_and_its_keys_do_not_depend_on_lines_or_on_other_code():
    source = "".join(f"def f{at}(a):\n    return a + {at}\n" for at in range(40))
    before = sample(mutants_of("m.py", source), 10, seed=3)
    moved = sample(mutants_of("m.py", "import os\n\n" + source), 10, seed=3)
    assert [one.key for one in moved] == [one.key for one in before]
    assert len({one.place for one in before}) == 10, "one mutant a statement"
    other = sample(mutants_of("m.py", source), 10, seed=4)
    assert [one.key for one in other] != [one.key for one in before]


def test_equal_statements_of_a_function_have_different_keys():
    found: list[Mutant] = mutants_of("m.py", "def f():\n    a.b = 1\n    a.b = 1\n")
    assert len({one.key for one in found}) == len(found) == 4


def test_nearest_tests_have_the_modules_name_or_the_fewest_imports(tmp_path: Path):
    files = {
        "megatron_async_rl/flow/buffer.py": "",
        "megatron_async_rl/flow/user.py": "from megatron_async_rl.flow import buffer",
        "tests/helper.py": "import megatron_async_rl.flow.buffer",
        "tests/unit/test_buffer.py": "from tests import helper",
        "tests/unit/test_direct.py": "import megatron_async_rl.flow.buffer",
        "tests/unit/test_user.py": "from megatron_async_rl.flow.user import x",
        "tests/unit/test_other.py": "import os",
        "tests/parallel/test_ranks.py": "run_ranks(2, 'tests.parallel.program', [])",
        "tests/parallel/program.py": "import megatron_async_rl.flow.user",
        "tests/parallel/test_alone.py": "import megatron_async_rl.flow.buffer",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    near = ImportMap(tmp_path).nearest("megatron_async_rl/flow/buffer.py")
    assert near == [f"tests/unit/test_{name}.py" for name in ("buffer", "direct", "user")]
    near = ImportMap(tmp_path).nearest("megatron_async_rl/flow/buffer.py", ("tests/parallel",))
    assert near == [f"tests/parallel/test_{name}.py" for name in ("alone", "ranks")]


def test_a_child_that_hangs_or_fails_has_no_result(tmp_path: Path):
    output = tmp_path / "output"
    assert run_in_child(lambda: ["done", 1], 60.0, output) == ["done", 1]
    assert run_in_child(lambda: 1 / 0, 60.0, output) is None
    assert run_in_child(lambda: time.sleep(1000), 0.1, output) is None


def test_no_process_outlives_the_child_that_started_it(tmp_path: Path):
    read, write = os.pipe()

    def leave() -> None:
        subprocess.Popen(["sleep", "1000"], pass_fds=[write])

    assert run_in_child(lambda: leave() or 1, 60.0, tmp_path / "output") == 1
    os.close(write)
    assert os.read(read, 1) == b"", "every holder of the other end has ended"
    os.close(read)


def test_functions_are_recorded_in_every_process_by_name(tmp_path: Path):
    package = tmp_path / "megatron_async_rl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text(
        "import os\n"
        "class Part:\n"
        "    def act(self):\n"
        "        def inner(): return 1\n"
        "        return inner()\n"
        "    def idle(self): return 2\n"
        "def child(): return 3\n"
        "Part().act()\n"
        "if os.fork() == 0:\n"
        "    child()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    (tmp_path / RECORDER.name).write_bytes((ROOT / RECORDER).read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with recorded(tmp_path, environment) as functions:
        program = [sys.executable, "-c", "import megatron_async_rl.part"]
        subprocess.run(program, cwd=tmp_path, env=environment, check=True)
    file = "megatron_async_rl/part.py"
    assert functions == [f"{file}:Part.act", f"{file}:Part.act.inner", f"{file}:child"]
    for place in ("Part.act", "Part", "", "child"):
        assert among(functions, file, place), place
    for place in ("Part.idle", "Part.ac", "chil"):
        assert not among(functions, file, place), place
    assert not among(functions, "megatron_async_rl/other.py", "")

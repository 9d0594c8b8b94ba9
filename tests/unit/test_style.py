"""Each rule of lint/style.py rejects an example, and the repository follows all of them."""

import ast
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import thorough

FILE = Path(__file__).parents[2] / "lint" / "style.py"


@pytest.fixture(scope="module")
def style() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("style", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)
        spec.loader.exec_module(module)
    gc.disable()
    yield module
    gc.enable()


@pytest.fixture(scope="module")
def prose(style: Any) -> Any:
    return sys.modules["prose"]


@thorough  # `make lint` checks the same
def test_the_repository_follows_the_rules_of_style(style: Any) -> None:
    assert style.check() == []


def test_a_docstring_without_a_subject_is_rejected(style: Any) -> None:
    source = (
        'class A:\n    x: int = 0\n    """Of x."""\n    def f(self):\n        """Return x."""\n'
    )
    assert [line for line, _ in style.openers(ast.parse(source))] == [3]


def test_a_banned_phrase_is_rejected_in_docstrings_comments_and_messages(style: Any) -> None:
    source = (
        '"""The file says\nwhy."""\n# A run that is\n# no run.\nwhat = f"{1} is no number"\n'
        '# There is no file, and `x` is no more.\nkey = "beside"\n'
    )
    found = style.phrases(source, ast.parse(source), messages=True)
    assert [line for line, _ in found] == [1, 3, 5]
    found = style.phrases(source, ast.parse(source), messages=False)
    assert [line for line, _ in found] == [1, 3]


def test_a_banned_phrase_is_rejected_on_a_page_and_not_in_its_code(style: Any) -> None:
    page = (
        "# A page\n\nThe run goes\non. See\n`what it says`.\n\n- [A run](it_says.md)\n\n"
        "```\nThe file says why.\n```\nIt tells.\n"
    )
    assert [line for line, _ in style.page_phrases(page)] == [3, 12]


def test_a_banned_phrase_is_rejected_in_a_script(style: Any) -> None:
    script = (
        "#!/bin/bash\n# The run goes\n#   on. `tell` is code.\ntold=1 # it is\n# here\n"
        'echo "It wants $1" # A run that is no run.\n\n\n# The last says.\n'
    )
    assert [line for line, _ in style.script_phrases(script, code=True)] == [2, 4, 6, 6, 9]
    assert [line for line, _ in style.script_phrases(script, code=False)] == [2, 6, 9]
    data = "# The goal\nprompt: tell me # nobody reads\nurl: a#tell\n"
    assert [line for line, _ in style.script_phrases(data, code=False)] == [2]


def test_scripts_data_files_and_pages_of_each_folder_are_checked(
    style: Any, tmp_path: Path
) -> None:
    files = {
        "Dockerfile": "RUN echo 'it wants a'\n",
        "Dockerfile.cpu": "# It wants.\n",
        "Makefile": "# It wants.\n",
        ".ci/run": "# It wants.\n",
        "pyproject.toml": 'name = "it wants"\n',
        "launchers/a.sh": "# It wants.\n",
        "launchers/slurm/a.sbatch": "# It wants.\n",
        "launchers/kubernetes/a.yaml": "# It wants.\n",
        "examples/a.yaml": "prompt: it wants # but this nobody\n",
        "examples/recipes/run.sh": "# It wants.\n",
        "examples/stability/PLAN.md": "It wants.\n",
        "benchmarks/results.md": "It wants.\n",
        "tests/data/golden/README.md": "It wants.\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = [one for one in style.check(tmp_path) if "write " in one]
    assert sorted(one.split(":")[0] for one in found) == sorted(files)
    assert sum("nobody" in one for one in found) == 1

    wide = "word " * 21
    for path in ("benchmarks/results.md", f"{style.GENERATED_TABLES}quick/tables.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{wide}\n")
    (found,) = [one for one in style.check(tmp_path) if "105 columns" in one]
    assert found.startswith("benchmarks/results.md:1: ")


def test_every_banned_phrase_is_found_in_a_sentence(style: Any, prose: Any) -> None:
    for phrase in prose.PHRASES:
        for text in (f"It is {phrase} here.", f"{phrase.capitalize()} here."):
            assert phrase in style.found_phrases(text), phrase
    assert [*style.found_phrases("No more than it.tell, go on_exit, and there is no key.")] == []


def test_a_class_or_alias_with_the_name_of_another_is_rejected(style: Any) -> None:
    first = ast.parse("class Row: ...\nKey = tuple[str, ...]\nLIMIT = 1\n")
    second = ast.parse("class _Row: ...\ntype Key = str\nLIMIT = 1\n")
    found = list(style.repeated_names({"a.py": first, "b.py": second}))
    assert [one.split(": ")[0] for one in found] == ["b.py:1", "b.py:2"]


def test_a_file_with_the_name_of_another_is_rejected(style: Any) -> None:
    paths = ("p/a/errors.py", "p/b/errors.py", "p/config/batch.py", "p/a/batch.py", "p/b/one.py")
    assert style.repeated_stems(paths) == set()
    assert style.repeated_stems([*paths, "p/c/one.py"]) == {"p/b/one.py", "p/c/one.py"}


def test_lines_of_a_long_table_do_not_count_and_others_do(style: Any) -> None:
    rows = "".join(f"    {row}: 0,\n" for row in range(style.TABLE_LINES))
    for source, lines in (
        (f"ROWS = {{\n{rows}}}\n", 0),
        (f"ROWS: dict[int, int] = {{\n{rows}}}\nx = 1\n", 1),
        ("ROWS = {\n    1: 0,\n}\n", 3),
        (f"def rows():\n    return {{\n{rows}}}\n", style.TABLE_LINES + 3),
    ):
        assert style.lines_without_tables(source, ast.parse(source)) == lines


def test_an_import_cycle_is_rejected_where_one_import_is_of_types_alone(style: Any) -> None:
    first = ast.parse("from p import b\n")
    second = ast.parse("if TYPE_CHECKING:\n    from p.a import A\nelse:\n    import p.c\n")
    trees = {"p/a.py": first, "p/b.py": second, "p/c.py": ast.parse("import ast\n")}
    cycle = style.import_cycle(trees)
    assert sorted(cycle[1:]) == ["p.a", "p.b"]
    assert cycle[0] == cycle[-1]
    assert style.type_imports(trees) == ["p/b.py:2"]
    tried = ast.parse("try:\n    import p.b\nexcept ImportError:\n    from p.b import x\n")
    assert len(style.import_cycle({"p/b.py": second, "p/a.py": tried})) == 3
    # An import inside a function runs later, so it closes no cycle.
    later = ast.parse("def f():\n    import p.b\n")
    assert style.import_cycle({"p/b.py": second, "p/a.py": later}) == []


def test_too_many_imports_of_types_alone_are_rejected(style: Any, tmp_path: Path) -> None:
    (tmp_path / style.PACKAGE).mkdir()
    lines = "    import a\n" * 30
    (tmp_path / style.PACKAGE / "one.py").write_text(f"if TYPE_CHECKING:\n{lines}")
    (found,) = [one for one in style.check(tmp_path) if "TYPE_CHECKING" in one]
    assert found.startswith("30 imports under TYPE_CHECKING, and 29 are allowed")
    (tmp_path / style.PACKAGE / "one.py").write_text("from p import b\n")
    assert not [one for one in style.check(tmp_path) if "TYPE_CHECKING" in one]


def test_a_configuration_that_no_rule_checks_is_rejected(style: Any) -> None:
    source = (
        "class Config(Strict):\nConfig.model_validate(tree)\nRunConfig(dir=dir)\n"
        "return Config.model_validate_json(\nvalidated(tree)\nConfig(run=run)\n"
    )
    assert [*style.unchecked_configs(source)] == [2, 4, 6]


def test_an_import_of_vllm_outside_its_folder_is_rejected(style: Any, tmp_path: Path) -> None:
    source = (
        "import vllm_private\nfrom p.rollout.vllm import client\nimport torch, vllm.config\n"
        "def f():\n    with a:\n        from vllm import LLM\n"
        "if TYPE_CHECKING:\n    from vllm.outputs import CompletionOutput\n"
    )
    assert sorted(style.vllm_imports(ast.parse(source))) == [3, 6, 8]
    for folder in ("rollout/vllm", "weights"):
        (tmp_path / style.PACKAGE / folder).mkdir(parents=True)
        (tmp_path / style.PACKAGE / folder / f"{folder[0]}.py").write_text("import vllm\n")
    found = [one for one in style.check(tmp_path) if "imports vLLM" in one]
    assert [one.split(": ")[0] for one in found] == [f"{style.PACKAGE}/weights/w.py:1"]


def test_a_test_for_the_name_of_a_carrier_is_rejected_outside_its_own_file(style: Any) -> None:
    table = ast.parse("CARRIERS = {'tree': Capabilities(), 'mail': Capabilities()}")
    carriers = style.carrier_names(table)
    assert carriers == {"tree", "mail"}
    tree = ast.parse("name = 'tree'\nif name in ('mail', 'post'):\n    text = 'by mail'\n")

    def lines(path: str) -> list[int]:
        return [line for line, _ in style.named_carriers(path, tree, carriers)]

    assert lines("megatron_async_rl/plan/plan.py") == [1, 2]
    assert lines("megatron_async_rl/weights/tree.py") == [2]
    assert lines(style.CARRIERS) == []


def test_a_test_for_the_class_of_a_carrier_is_rejected(style: Any) -> None:
    source = (
        "from megatron_async_rl.weights.tree import Leaf, Root as Stem\n"
        "from megatron_async_rl.weights.staging import Staging\n"
        "isinstance(one, Staging)\n"
        "isinstance(one, (Staging, Stem))\n"
        "if isinstance(one, Leaf):\n    isinstance(Leaf(), Staging)\n"
    )
    assert [*style.carrier_types(ast.parse(source), {"tree"})] == [4, 5]
    assert [*style.carrier_types(ast.parse(source), {"mail"})] == []


def test_the_file_of_a_carrier_is_imported_in_weights_only(style: Any) -> None:
    source = (
        "import megatron_async_rl.weights.mail\n"
        "from megatron_async_rl.weights import agents, mail\n"
        "from megatron_async_rl.weights.mail import Letter\n"
        "from megatron_async_rl.weights.agents import Agent\n"
    )

    def found(path: str) -> list[tuple[int, str]]:
        return [*style.carrier_imports(path, ast.parse(source), {"mail", "tree"})]

    assert found("megatron_async_rl/flow/updates.py") == [(1, "mail"), (2, "mail"), (3, "mail")]
    assert found("megatron_async_rl/weights/transport.py") == []


def test_a_wide_line_of_a_page_is_rejected_except_in_tables_code_and_links(style: Any) -> None:
    wide = "word " * 21
    page = f"{wide}\n| {wide} |\n[{wide}](x.md)\n```\n{wide}\n```\n"
    assert [line for line, _ in style.long_lines(page)] == [1]


def test_an_exception_without_a_violation_is_rejected(style: Any) -> None:
    assert [*style.exceptions({"a"}, {"a"}, "is long")] == []
    assert len([*style.exceptions({"a"}, {"b"}, "is long")]) == 2

"""Import contracts, and the libraries that importing loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "megatron",
    "mbridge",
    "vllm",
    "ray",
    "transformers",
    "tensorflow",
    "matplotlib",
    "datasets",
    "pandas",
)


LIGHT = (
    "megatron_async_rl",
    "megatron_async_rl.config.load, megatron_async_rl.plan.plan, megatron_async_rl.config.docs",
    "megatron_async_rl.samples",
    "megatron_async_rl.data, megatron_async_rl.data.hub",
    "megatron_async_rl.flow, megatron_async_rl.flow.controller",
    "megatron_async_rl.metrics.log, megatron_async_rl.report.progress",
    "megatron_async_rl.metrics.sinks",
    "megatron_async_rl.watchdog.watch, megatron_async_rl.watchdog.logs",
    "megatron_async_rl.rollout, megatron_async_rl.rollout.spec",
    "megatron_async_rl.rollout.rewards.registry",
    "megatron_async_rl.cli, megatron_async_rl.study, megatron_async_rl.plan.preflight",
    "megatron_async_rl.plan.screen, megatron_async_rl.plan.doctor",
    "megatron_async_rl.launch.launcher",
)


def heavy_imports(*modules: str) -> str:
    """The first of `modules` with the heavy libraries that are loaded once it is imported."""
    program = "".join(
        f"import sys, {one}\n"
        f"if heavy := sorted(set({HEAVY}) & sys.modules.keys()): sys.exit(f'{one}: {{heavy}}')\n"
        for one in modules
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr.strip()


def test_only_the_report_loads_a_heavy_library_and_that_is_matplotlib():
    report = "megatron_async_rl.report.report"
    assert heavy_imports(*LIGHT, report) == f"{report}: ['matplotlib']"


def test_the_module_that_loads_a_heavy_library_is_named():
    assert heavy_imports("json", "ray._version, ray", "csv") == "ray._version, ray: ['ray']"


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = imports[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    behind = {module: reached(module) for module in imports}
    groups = {
        frozenset(other for other in behind[module] if module in behind[other])
        for module in imports
        if module in behind[module]
    }
    return sorted(sorted(group) for group in groups)


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph(
        "megatron_async_rl", exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert cycles(imports) == []


def test_a_cycle_is_found_and_a_diamond_is_none():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def forwarders(source: str) -> Iterator[str]:
    """Functions of a module that only hand their own parameters to another function."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr) else 0
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            continue
        takes = [one.arg for one in [*node.args.args, *node.args.kwonlyargs]]
        given = [*call.args, *(one.value for one in call.keywords)]
        gives = [one.id for one in given if isinstance(one, ast.Name)]
        through = isinstance(call.func, ast.Name) and call.func.id not in takes
        if through and takes and takes == gives and len(gives) == len(given):
            yield node.name


def test_no_function_of_a_module_only_forwards():
    package = ROOT / "megatron_async_rl"
    found = [
        f"{file.relative_to(package)}: {name}"
        for file in sorted(package.rglob("*.py"))
        for name in forwarders(file.read_text())
    ]
    assert found == []


def test_a_forwarder_is_found():
    source = 'def f(a, *, b):\n    """Does."""\n    return g(a, b=b)\ndef h(a): return g(a, 1)'
    assert list(forwarders(source)) == ["f"]


def test_collecting_the_tests_does_not_import_vllm(request: pytest.FixtureRequest) -> None:
    """Every worker of pytest-xdist imports all test files, and few of them need vLLM. The test
    proves this if it runs together with the other files."""
    assert "vllm" not in request.config.imported_at_collection

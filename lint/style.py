"""Check the style rules that ruff has no rule for; `make lint` runs it.

Rules:
- a docstring starts with a noun phrase or an imperative verb;
- docstrings, comments, messages, pages and scripts contain none of PHRASES (prose.py);
- a class or alias of the package has a name of its own, and so has a file;
- a file of the package has at most MAX_LINES lines, without its tables;
- modules of the package do not import each other in a circle, types included, and have fewer than
  MAX_TYPE_IMPORTS imports of types alone;
- only config/rules.py makes a Config, so that no configuration passes unchecked;
- only rollout/vllm/ imports vLLM, so that another version of vLLM concerns one folder;
- only the table of carriers and a carrier's own file have its name as a string, only weights/
  imports a carrier's file, and no file tests for a carrier's class: all other code tests for
  capabilities;
- Markdown has at most MAX_COLUMNS columns, except for tables, code and links.

The list of exceptions, LONG_PAGES, only shrinks: an entry without a violation is an error, too.
"""

from __future__ import annotations

import ast
import gc
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prose import (
    MAX_COLUMNS,
    docstrings,
    found_phrases,
    long_lines,
    page_phrases,
    phrases,
    plain,
    script_phrases,
    statements,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_async_rl"
FOLDERS = (PACKAGE, "tests", "benchmarks", "examples", "launchers", "lint")
MAX_LINES = 500
TABLE_LINES = 100
MAX_TYPE_IMPORTS = 30

OPENERS = (
    "Of",
    "Those",
    "Where",
    "What",
    "As",
    "By",
    "Whether",
    "Who",
    "Which",
    "Nobody",
    "For",
    "In",
    "With",
)
"""First words that leave a docstring without a subject and without an imperative verb."""

STARTS = re.compile(rf'["\']\s*(?:{"|".join(OPENERS)})\b')
"""Matches the text of every file with a bad docstring, and of some others."""

MAKES_CONFIG = re.compile(r"(?<![\w.])(?<!class )Config(\.model_(validate|construct)\w*)?\(")
CHECKS_CONFIG = f"{PACKAGE}/config/rules.py"

VLLM_FOLDER = f"{PACKAGE}/rollout/vllm/"
CARRIERS = f"{PACKAGE}/config/weights.py"
"""Table of the carriers of weights: name -> capabilities."""

SHARED_STEMS = {"__init__", "registry", "errors"}
"""Names of files that every folder may have."""

PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "tests/data/**/*.md")
"""Markdown whose prose and width are checked."""

SCRIPTS = (
    "Dockerfile*",
    "Makefile",
    ".ci/run",
    "launchers/**/*.sh",
    "launchers/**/*.sbatch",
    "examples/**/*.sh",
    "pyproject.toml",
)
"""Files whose comments, messages and names are checked."""

DATA = ("examples/**/*.yaml", "launchers/**/*.yaml", "site/*.yml")
"""Files whose comments alone are checked: a value may be a prompt."""

OTHER_PROSE = {"CHANGELOG.md", "docs/config.md", "docs/metrics.md"}
"""Pages whose phrases are not checked: history, and pages that are generated from checked code."""

GENERATED_TABLES = "examples/stability/results/"
"""Folder of pages that checked code has written, one line per note."""

LONG_PAGES = {
    "CHANGELOG.md",
    "README.md",
    "docs/stability.md",
    "examples/stability/page.md",
}
"""Pages that are still to be wrapped. The last one is the template of the one before it."""


def openers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and message of each docstring that starts with one of OPENERS."""
    for docstring in docstrings(tree):
        first = re.match(r"\w*", docstring.value.lstrip())
        if first is not None and first.group() in OPENERS:
            message = "a docstring starts with a noun or an imperative verb"
            yield docstring.lineno, f"{message}, not with {first.group()!r}"


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each class, and of each alias of a module. A leading underscore does not
    count."""
    for statement in statements(tree):
        if isinstance(statement, ast.ClassDef):
            yield statement.lineno, statement.name.lstrip("_")
    for statement in tree.body:
        if isinstance(statement, ast.TypeAlias):
            yield statement.lineno, statement.name.id.lstrip("_")
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id.lstrip("_")
            if name[:1].isupper() and not name.isupper():
                yield statement.lineno, name


def repeated_names(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """A message for each class or alias whose name an earlier file has."""
    places = defaultdict(list)
    for path, tree in trees.items():
        for line, name in names(tree):
            places[name].append(f"{path}:{line}")
    for name, found in places.items():
        for place in found[1:]:
            yield f"{place}: the name {name} stands for something else at {found[0]}"


def repeated_stems(paths: Iterable[str]) -> set[str]:
    """Files of the package whose base name another file has. A section of config/ may have the name
    of the folder or file that it configures."""
    places = defaultdict(list)
    for path in paths:
        one = Path(path)
        if one.stem not in SHARED_STEMS and one.parent.name != "config":
            places[one.stem].append(path)
    return {path for found in places.values() if len(found) > 1 for path in found}


def lines_without_tables(source: str, tree: ast.Module) -> int:
    """Lines of a file. A module's literal of more than TABLE_LINES lines is data and does not
    count: cutting it in two would help no reader."""
    tables = [
        one.end_lineno - one.lineno + 1
        for one in tree.body
        if isinstance(one, ast.Assign | ast.AnnAssign)
        and isinstance(one.value, ast.Dict | ast.List | ast.Set | ast.Tuple)
        and one.end_lineno is not None
    ]
    return source.count("\n") - sum(lines for lines in tables if lines > TABLE_LINES)


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports that run with the module, or under TYPE_CHECKING, and whether they are of the latter.
    Those inside functions run later."""
    blocks: list[tuple[list[ast.stmt], bool]] = [(tree.body, False)]
    while blocks:
        block, types = blocks.pop()
        for statement in block:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    yield statement, types
                case ast.If():
                    only = "TYPE_CHECKING" in ast.unparse(statement.test)
                    blocks += [(statement.body, types or only), (statement.orelse, types)]
                case ast.Try():
                    handlers = [one.body for one in statement.handlers]
                    inside = (statement.body, *handlers, statement.orelse, statement.finalbody)
                    blocks += [(one, types) for one in inside]
                case ast.With() | ast.ClassDef():
                    blocks.append((statement.body, types))


def import_cycle(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules of a circle of imports, the first one again at its end; empty without one."""
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in trees.items()
    }
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = graph.setdefault(module, set())
        for statement, _ in imports(tree):
            for alias in statement.names:
                if isinstance(statement, ast.ImportFrom):
                    inner = f"{statement.module}.{alias.name}"
                    named.add(inner if inner in modules else str(statement.module))
                else:
                    named.add(alias.name)
    try:
        graphlib.TopologicalSorter(
            {module: named & modules.keys() for module, named in graph.items()}
        ).prepare()
    except graphlib.CycleError as error:
        # The sorter lists them from the imported to the importing module.
        return [*reversed(error.args[1])]
    return []


def type_imports(trees: Mapping[str, ast.Module]) -> list[str]:
    """File and line of each import under TYPE_CHECKING."""
    return [
        f"{path}:{statement.lineno}"
        for path, tree in trees.items()
        for statement, types in imports(tree)
        if types
    ]


def unchecked_configs(source: str) -> Iterator[int]:
    """Line of each place that makes a Config without config/rules.py."""
    for number, line in enumerate(source.splitlines(), 1):
        if MAKES_CONFIG.search(line):
            yield number


def vllm_imports(tree: ast.Module) -> Iterator[int]:
    """Line of each import of vLLM, inside functions and under TYPE_CHECKING included."""
    for statement in statements(tree):
        match statement:
            case ast.Import():
                modules = [alias.name for alias in statement.names]
            case ast.ImportFrom():
                modules = [statement.module or ""]
            case _:
                continue
        if any(module.split(".")[0] == "vllm" for module in modules):
            yield statement.lineno


def carrier_names(tree: ast.Module) -> set[str]:
    """Keys of the table CARRIERS."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="CARRIERS")], value=ast.Dict(keys=keys)):
                return {key.value for key in keys if isinstance(key, ast.Constant)}
    raise ValueError(f"{CARRIERS} has no table CARRIERS")


def named_carriers(path: str, tree: ast.Module, carriers: set[str]) -> Iterator[tuple[int, str]]:
    """Line and message of each string that is the name of a carrier other than the file's own."""
    if path == CARRIERS:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as name) if name in carriers - {Path(path).stem}:
                yield node.lineno, f"{name!r}: test for a capability of {CARRIERS}"


def carrier_imports(path: str, tree: ast.Module, carriers: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each carrier whose file a module outside weights/ imports."""
    if path.startswith(f"{PACKAGE}/weights/"):
        return
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str() as module, names=aliases):
                imported = [module, *(f"{module}.{alias.name}" for alias in aliases)]
            case ast.Import(names=aliases):
                imported = [alias.name for alias in aliases]
            case _:
                continue
        for name in carriers:
            if f"{PACKAGE}.weights.{name}" in imported:
                yield node.lineno, name


def carrier_types(tree: ast.Module, carriers: set[str]) -> Iterator[int]:
    """Line of each `isinstance` that tests for a class of a carrier's file."""
    modules = {f"{PACKAGE}.weights.{name}" for name in carriers}
    classes = {
        alias.asname or alias.name
        for statement in statements(tree)
        if isinstance(statement, ast.ImportFrom) and statement.module in modules
        for alias in statement.names
    }
    if not classes:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, tested]):
                if classes & {one.id for one in ast.walk(tested) if isinstance(one, ast.Name)}:
                    yield node.lineno


def exceptions(found: set[str], allowed: set[str], what: str) -> Iterator[str]:
    """A message for each violation that is not in the list, and for each entry without one."""
    for path in sorted(found - allowed):
        yield f"{path}: {what}"
    for path in sorted(allowed - found):
        yield f"lint/style.py: remove {path} from the list of files that: {what}"


def read(root: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Path -> text of each file that matches a pattern."""
    files = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted(files)
    }


def check(root: Path = ROOT) -> list[str]:
    """All violations of the repository, one sentence each."""
    found = []
    trees: dict[str, ast.Module] = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            if file.is_symlink() or f"{PACKAGE}/share/" in file.as_posix():
                continue
            path, source = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
            if folder != PACKAGE and not (
                STARTS.search(source) or any(found_phrases(plain(source)))
            ):
                continue  # Parsing takes most of the time.
            tree = ast.parse(source)
            messages = folder not in ("tests", "lint")
            found += [
                f"{path}:{line}: {message}"
                for line, message in (*openers(tree), *phrases(source, tree, messages=messages))
            ]
            if folder == PACKAGE:
                trees[path] = tree
                if path != CHECKS_CONFIG:
                    found += [
                        f"{path}:{line}: make a Config by validated() of {CHECKS_CONFIG}"
                        for line in unchecked_configs(source)
                    ]
                if not path.startswith(VLLM_FOLDER):
                    found += [
                        f"{path}:{line}: only {VLLM_FOLDER} imports vLLM"
                        for line in vllm_imports(tree)
                    ]
                if lines_without_tables(source, tree) > MAX_LINES:
                    found.append(f"{path}: more than {MAX_LINES} lines")
    if CARRIERS in trees:
        names_of_carriers = carrier_names(trees[CARRIERS])
        found += [
            f"{path}:{line}: {message}"
            for path, tree in trees.items()
            for line, message in named_carriers(path, tree, names_of_carriers)
        ]
        found += [
            f"{path}:{line}: test for a capability, not for a class of a carrier"
            for path, tree in trees.items()
            for line in carrier_types(tree, names_of_carriers)
        ]
        found += [
            f"{path}:{line}: only weights/ imports the carrier {name}"
            for path, tree in trees.items()
            for line, name in carrier_imports(path, tree, names_of_carriers)
        ]
    found += repeated_names(trees)
    if cycle := import_cycle(trees):
        found.append(f"import cycle: {' -> '.join(cycle)}")
    if len(types := type_imports(trees)) >= MAX_TYPE_IMPORTS:
        found.append(
            f"{len(types)} imports under TYPE_CHECKING, and {MAX_TYPE_IMPORTS - 1} are allowed:"
            f" {', '.join(types)}"
        )
    found += [
        f"{path}: the base name is another file's, too" for path in sorted(repeated_stems(trees))
    ]
    texts = read(root, PAGES)
    found += [
        f"{path}:{line}: {message}"
        for path, text in texts.items()
        if path not in OTHER_PROSE
        for line, message in page_phrases(text)
    ]
    found += [
        f"{path}:{line}: {message}"
        for patterns, code in ((SCRIPTS, True), (DATA, False))
        for path, text in read(root, patterns).items()
        for line, message in script_phrases(text, code=code)
    ]
    pages = {
        path: [*long_lines(text)]
        for path, text in texts.items()
        if not path.startswith(GENERATED_TABLES)
    }
    wide = {path for path, lines in pages.items() if lines}
    found += [
        f"{path}:{line}: {message}"
        for path in sorted(wide - LONG_PAGES)
        for line, message in pages[path]
    ]
    found += exceptions(wide & LONG_PAGES, LONG_PAGES, f"lines of more than {MAX_COLUMNS} columns")
    return found


def main() -> int:
    gc.disable()  # Syntax trees have no cycles, and collecting takes a third of the time.
    found = check()
    print(*found, sep="\n", end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())

"""The test files nearest to a module: those that import it over the fewest steps."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

FOLDERS = ("tests/unit", "tests/loop")
PROGRAM = re.compile(r"tests\.\w+\.\w+")
PROCESSES = ("tests/parallel", "tests/engine", "tests/faults", "tests/end_to_end")
"""Folders of tests that start ranks, engines or commands."""


class ImportMap:
    """Imports among the package, the tests and their helpers in the checkout `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = {
            str(path.relative_to(root))
            for folder in ("megatron_async_rl", "tests", "examples", "benchmarks")
            for path in (root / folder).rglob("*.py")
        }
        self._imports = cache(self._read_imports)
        self._tree = cache(self._read_tree)

    def nearest(self, file: str, folders: tuple[str, ...] = FOLDERS) -> list[str]:
        """Return the test files in `folders` that import `file`, nearest first: files named after
        the module, then by the number of imports between them, by the number of uses of the
        module's names, and by how few other modules they import."""
        name = Path(file).stem if Path(file).stem != "__init__" else Path(file).parent.name
        ranked = []
        for test in self.tests(folders):
            distance = self._distance(test, file)
            if distance is not None:
                named = Path(test).stem.removeprefix("test_") == name
                uses = self._uses(test, file)
                ranked.append((not named, distance, -uses, len(self._imports(test)), test))
        ranked.sort()
        return [test for *_, test in ranked]

    def tests(self, folders: tuple[str, ...]) -> list[str]:
        return [
            one
            for one in sorted(self._files)
            if one.startswith(folders) and Path(one).name.startswith("test_")
        ]

    def _uses(self, test: str, file: str) -> int:
        """Return how often `test` uses names that it imports from `file`."""
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = self._tree(test)
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if module in (node.module, f"{node.module}.{alias.name}")
        }
        return sum(isinstance(node, ast.Name) and node.id in names for node in ast.walk(tree))

    def _distance(self, start: str, goal: str) -> int | None:
        seen, ahead, steps = {start}, [start], 0
        while ahead:
            steps += 1
            ahead = [near for one in ahead for near in self._imports(one) if near not in seen]
            if goal in ahead:
                return steps
            seen.update(ahead)
        return None

    def _read_tree(self, file: str) -> ast.Module:
        return ast.parse((self._root / file).read_text(encoding="utf-8"))

    def _read_imports(self, file: str) -> frozenset[str]:
        found = set()
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {f"{node.module}.{one.name}" for one in node.names} | {node.module}
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and PROGRAM.fullmatch(node.value)
            ):
                # The module that ranks or other processes run.
                found.add(node.value)
        return frozenset(
            candidate
            for name in found
            for candidate in (
                f"{name.replace('.', '/')}.py",
                f"{name.replace('.', '/')}/__init__.py",
            )
            if candidate in self._files
        )

"""Mutants of the package: small edits of its source. Some test should fail for each.

A mutant is one edit of one node of the syntax tree, applied to the text of its file, so that all
other lines stay in place. Text is never edited, because no test should depend on the wording of a
message. Annotations are not edited either (apart from calls in them, such as pydantic's `Field`),
nor log and warning calls, arguments of exceptions, `__repr__`, constants that name one number
(`WINDOW = 50`; tests use the name), and durations (`*_S`, `timeout=`), since tests may not depend
on a clock.

Invariant: the key of a mutant contains its function and the text of its statement, not its line or
file, so that a sample and the list of reviewed mutants survive edits elsewhere.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
LOGGERS = ("log", "logger", "logging", "warnings")
MESSAGES = (
    *("what", "fix", "where", "help", "description", "message", "title", "examples", "doc"),
    "highlight",
)
DURATIONS = ("timeout", "seconds", "patience", "interval")


@dataclass(frozen=True)
class Mutant:
    """`file` with `text` instead of the characters from `start` to `end`.

    lines: first and last line of the statement, or of the header of a block. place: qualified name
    of the function. statement: its text. before, after: texts of the edited node.
    """

    file: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str
    place: str
    statement: str
    before: str
    after: str
    copy: int = 0

    @property
    def key(self) -> str:
        """The mutant's name in lists. `copy` counts equal statements of one function."""
        again = f" #{self.copy + 1}" if self.copy else ""
        return f"{self.place}: {self.statement}{again} | {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return the mutants of the file named `file`, in the order of its lines."""
    finder = _Finder(file, source)
    finder.block(ast.parse(source).body, "")
    return finder.found


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants drawn uniformly from the statements that have any, one per statement.

    Statements are ordered by a digest of the seed and their text, so an edit of the package changes
    only the draw of the edited statements.
    """
    statements: dict[tuple[str, str, str, int], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        statements[mutant.file, mutant.place, mutant.statement, mutant.copy].append(mutant)
    drawn = [
        min(group, key=lambda mutant: _digest(seed, mutant.key)) for group in statements.values()
    ]
    drawn.sort(
        key=lambda mutant: _digest(seed, f"{mutant.place}: {mutant.statement} {mutant.copy}")
    )
    return drawn[:count]


def package_mutants(package: Path) -> list[Mutant]:
    root = package.parent
    return [
        mutant
        for path in sorted(package.rglob("*.py"))
        if "share" not in path.relative_to(package).parts  # links to files that are not code
        for mutant in mutants_of(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    ]


def _digest(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed} {text}".encode()).digest()


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._source = source
        # The tree counts columns in bytes.
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._bytes = source.encode()
        self._seen: Counter[tuple[str, str]] = Counter()

    def block(self, body: Sequence[ast.stmt], place: str) -> None:
        for statement in body:
            self._statement(statement, place)

    def _statement(self, node: ast.stmt, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in ("__repr__", "__str__"):
                return
            inside = f"{place}.{node.name}" if place else node.name
            if not isinstance(node, ast.ClassDef):
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                self._edits(node, inside, [one for one in defaults if one is not None])
            self.block(node.body, inside)
            return
        header, blocks = _parts(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            return
        self._edits(node, place, header)
        for body in blocks:
            self.block(body, place)

    def _edits(self, node: ast.stmt, place: str, header: Sequence[ast.expr]) -> None:
        """Add the mutants of one statement, without those of the blocks in it."""
        edits = [*_of_statement(node), *(edit for one in header for edit in _of(one))]
        if not edits:
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = f"def {node.name}"
        else:
            text = ast.unparse(node).splitlines()[0]
        copy = self._seen[place, text]
        self._seen[place, text] += 1
        last = max((one.end_lineno or one.lineno for one in header), default=node.lineno)
        if isinstance(node, ast.Raise | ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
            last = node.end_lineno or node.lineno
        for old, new in edits:
            start = self._offset(old.lineno, old.col_offset)
            end = self._offset(old.end_lineno or 0, old.end_col_offset or 0)
            after = new if isinstance(new, str) else ast.unparse(new)
            statement = isinstance(old, ast.stmt)
            self.found.append(
                Mutant(
                    file=self._file,
                    lines=(node.lineno, last),
                    start=start,
                    end=end,
                    text=after if statement else f"({after})",
                    place=place,
                    statement=text,
                    before=" ".join(ast.unparse(old).split()),
                    after=" ".join(after.split()),
                    copy=copy,
                )
            )

    def _offset(self, line: int, column: int) -> int:
        """Return the position in the text, in characters."""
        return len(self._bytes[: self._lines[line - 1] + column].decode())


def _parts(node: ast.stmt) -> tuple[list[ast.expr], list[list[ast.stmt]]]:
    """Return the expressions of a statement's header that may be edited, and its blocks."""
    match node:
        case ast.If() | ast.While():
            return [node.test], [node.body, node.orelse]
        case ast.For() | ast.AsyncFor():
            return [node.iter], [node.body, node.orelse]
        case ast.With() | ast.AsyncWith():
            return [one.context_expr for one in node.items], [node.body]
        case ast.Try():
            handlers = [handler.body for handler in node.handlers]
            return [], [node.body, *handlers, node.orelse, node.finalbody]
        case ast.Match():
            guards = [case.guard for case in node.cases if case.guard is not None]
            return [node.subject, *guards], [case.body for case in node.cases]
        case ast.AnnAssign():
            calls = [one for one in ast.walk(node.annotation) if isinstance(one, ast.Call)]
            duration = isinstance(node.target, ast.Name) and _is_duration(node.target.id)
            value = [node.value] if node.value is not None and not duration else []
            return [*calls, *value], []
        case ast.Assign():
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
            if any(_is_duration(name) or name in MESSAGES for name in names):
                return [], []
            if any(name.isupper() for name in names) and _is_one_number(node.value):
                return [], []
            return [node.value], []
        case ast.AugAssign() | ast.Expr():
            return [node.value], []
        case ast.Return() if node.value is not None:
            return [node.value], []
    return [], []  # raise, assert, import, pass, del, type


def _is_duration(name: str) -> bool:
    return name.endswith(("_S", "_MS", "_s", "_ms")) or any(
        word in name.lower() for word in DURATIONS
    )


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST | str]]:
    match node:
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"
        case ast.Raise():
            yield node, "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_log(node.value):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield node, "pass"
        case ast.AugAssign():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not _is_none_or_false(value):
            yield node, "return None"
        case ast.If() | ast.While() if not _is_true(node.test):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _of(node: ast.expr) -> Iterator[tuple[ast.AST, ast.AST | str]]:
    """Yield edits of an expression and of those in it."""
    match node:
        case ast.JoinedStr() | ast.Lambda(body=ast.Constant()):
            return
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other) if isinstance(
            one, ast.JoinedStr
        ) or isinstance(other, ast.JoinedStr):
            return  # a message in two parts, or one of two messages
        case ast.Call() if _is_log(node):
            return
        case ast.Compare():
            for at, operator in enumerate(node.ops):
                operators = [*node.ops]
                operators[at] = COMPARISONS[type(operator)]()
                yield node, ast.Compare(node.left, operators, node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node, node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
            yield node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.IfExp():
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, ast.Constant(value + 1)
    for name, child in ast.iter_fields(node):
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, ast.comprehension):
                yield from _of(one.iter)
                for condition in one.ifs:
                    yield condition, ast.UnaryOp(ast.Not(), condition)
                    yield from _of(condition)
            elif isinstance(one, ast.keyword):
                # `strict` of zip is an assertion.
                if one.arg not in (*MESSAGES, "strict") and not _is_duration(one.arg or ""):
                    yield from _of(one.value)
            elif isinstance(one, ast.expr) and name != "annotation":
                yield from _of(one)


def _is_log(node: ast.AST) -> bool:
    """Return True for a call of a logger, `print` or `warn`."""
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    root: ast.expr = node.func
    names = []
    while isinstance(root, ast.Attribute):
        names.append(root.attr)
        root = root.value
    if isinstance(root, ast.Name):
        names.append(root.id)
    return names[-1:] == ["print"] or any(one.strip("_") in LOGGERS for one in names[1:])


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(one, ast.JoinedStr)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
        for one in (node.left, node.right)
    )


def _is_one_number(node: ast.expr) -> bool:
    return not any(
        isinstance(one, ast.Name | ast.Call | ast.Tuple | ast.List | ast.Dict | ast.Set)
        or (isinstance(one, ast.Constant) and isinstance(one.value, bool | str))
        for one in ast.walk(node)
    )


def _is_none_or_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, False)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True

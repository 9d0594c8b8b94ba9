"""Static analysis of Python tests with `assert`: find the assertions that run and depend on the
code.

The tester (code_stubs.py) runs a source, calls its functions `test...()` without arguments, and
calls its `check(candidate)` with the entry point. A source that reaches no assertion passes for
every response, even for an empty one, and must be refused before anything starts.

Static analysis cannot decide this for every source, so there are two stages:
- `prepared` refuses a source without a reachable assertion that may depend on the code. If in
  doubt, it accepts the source: a name depends on the code unless it is known to be constant;
- `prepared` returns the source with marks after the assertions. At run time, the marks show the
  tester that a test passed without an assertion. code.py refuses such a test, and a test that
  passes without code.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence

ASSERTED, RAISED = "_mar_asserted", "_mar_raised"
"""Names of the functions that marks call: ASSERTED after an assertion, RAISED after an exception of
the code."""
COMPARISONS = frozenset(("isclose", "approx", "allclose", "array_equal", "deepcopy", "Counter"))
"""Functions that tests use for comparisons. If a test does not import them, the code defines
them."""
_DYNAMIC = frozenset(("globals", "locals", "vars", "eval", "exec"))
"""Functions that can access a name of the code that the source does not contain."""
LIBRARIES = frozenset((*sys.stdlib_module_names, "np", "numpy", "pd", "pandas", "pytest"))
"""Names of modules that a test must import if it uses them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef
Branch = ast.If | ast.While | ast.For | ast.AsyncFor | ast.Try | ast.TryStar | ast.Match
_BINDERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_FOLDED = (
    *(ast.Constant, ast.UnaryOp, ast.Not, ast.USub, ast.BoolOp, ast.And, ast.Or, ast.Compare),
    *(ast.cmpop, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Load),
)
"""Node types of expressions that are constant and cheap to evaluate."""


class UnfitTest(ValueError):
    """A test cannot be used. `what`: predicate of a sentence whose subject is the column."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix


@functools.lru_cache(maxsize=64)
def prepared(source: str, entry_point: str | None) -> str:
    """Return `source` with marks after the assertions that depend on the code. Raises UnfitTest."""
    # ast also ends a line at a carriage return, and marks are placed by its line numbers.
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        analysis = _Analysis(_tree_of(source), entry_point)
        analysis.require_calls()
        analysis.require_imports()
        analysis.require_assertion()
        return _marked(source, analysis)
    # Python's parser raises either of them.
    except (RecursionError, MemoryError) as error:
        raise UnfitTest("is nested too deeply", "write it as several statements") from error


def _tree_of(source: str) -> ast.Module:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        what = f"has {source[:60]!r}, which is not Python: {error}"
        raise UnfitTest(what, "write it as Python with `assert`") from error
    small = _small(tree)
    assert isinstance(small, ast.Module)
    return small


class _Analysis:
    """Analysis of a source: the names that depend on the code, and the statements that may run."""

    def __init__(self, tree: ast.Module, entry_point: str | None) -> None:
        self.tree, self.entry_point = tree, entry_point
        nodes = list(ast.walk(tree))
        self.scopes = [one for one in nodes if isinstance(one, Scope)]
        self._inner = {
            id(inner)
            for scope in self.scopes
            for inner in ast.walk(scope)
            if inner is not scope and isinstance(inner, Scope)
        }
        self.asserts = [one for one in nodes if isinstance(one, ast.Assert)]
        self.imported = {
            (alias.asname or alias.name).partition(".")[0]
            for one in nodes
            if isinstance(one, ast.Import | ast.ImportFrom)
            for alias in one.names
        }
        self._bindings = [*_bindings(nodes)]
        self._data = {name for names, _ in self._bindings for name in names}
        bound = self._data | self.imported | {one.name for one in self.scopes}
        bound |= {one.arg for one in nodes if isinstance(one, ast.arg)}
        # The code must define every name that the source does not bind.
        self.free = {
            one.id for one in nodes if isinstance(one, ast.Name) and one.id not in bound
        } - set(dir(builtins))
        # An argument may be a value of the code, like the argument of `check`.
        self.dependent = (
            self.free | _DYNAMIC | {one.arg for one in nodes if isinstance(one, ast.arg)}
        )
        # The exception that a handler binds may come from the code.
        self.dependent |= {
            one.name for one in nodes if isinstance(one, ast.ExceptHandler) if one.name
        }
        self._spread(nodes)
        # Under a condition that depends on the code, even `assert False` tests the code.
        self.guarded = {
            id(inner)
            for one in nodes
            if isinstance(one, Branch) and self.depends(_decisions(one))
            for inner in ast.walk(one)
            if isinstance(inner, ast.Assert)
        }
        self.running = self._reach()

    def depends(self, nodes: Iterable[ast.AST]) -> bool:
        return any(
            isinstance(one, ast.Name) and one.id in self.dependent
            for node in nodes
            for one in ast.walk(node)
        )

    def tests_code(self, node: ast.Assert) -> bool:
        """Return True if the result of the assertion may depend on the code."""
        if isinstance(node.test, ast.Tuple) and node.test.elts:
            return False  # `assert (x, y)` never fails.
        return id(node) in self.guarded or self.depends([node.test])

    def _spread(self, nodes: Sequence[ast.AST]) -> None:
        """Add to `dependent` the names that are assigned from dependent names, up to a fixed
        point."""
        sources: list[tuple[set[str], list[ast.AST]]] = list(self._bindings)
        sources += [({one.name}, [*one.body, *one.decorator_list]) for one in self.scopes]
        for node in nodes:
            # A call may change its arguments.
            if isinstance(node, ast.Call):
                sources.append((_names([node]) & self._data, [node]))
            elif isinstance(node, Branch):
                inside = [one for names, _ in _bindings(ast.walk(node)) for one in names]
                sources.append((set(inside), [*_decisions(node)]))
        reads = [(names, _names(of)) for names, of in sources if names]
        size = -1
        # Loops and functions run assignments in any order, so one pass does not suffice.
        while size < len(self.dependent):
            size = len(self.dependent)
            for names, read in reads:
                if not names <= self.dependent and read & self.dependent:
                    self.dependent |= names

    def called(self, scope: Scope) -> bool:
        """Return True for a function that the tester calls and whose body runs in that call."""
        plain = isinstance(scope, ast.FunctionDef) and not _is_generator(scope)
        return plain and self.is_test(scope)

    def is_test(self, scope: Scope) -> bool:
        """Return True for a function that the tester calls."""
        if not isinstance(scope, Function) or id(scope) in self._inner:
            return False
        has_entry = scope.name == "check" and self.entry_point is not None
        return scope.name.startswith("test") or has_entry

    def _reach(self) -> set[int]:
        """Return the ids of the statements that may run: statements of the module, of classes, and
        of functions that the tester calls or that a running statement names."""
        running: set[int] = set()
        named: set[str] = set()
        entered: set[int] = set()
        bodies: list[list[ast.stmt]] = [self.tree.body]
        while bodies:
            for statement in (one for body in bodies for one in _taken(body)):
                running.add(id(statement))
                for one in (inner for part in _own(statement) for inner in ast.walk(part)):
                    if isinstance(one, ast.Name):
                        named.add(one.id)
                    elif isinstance(one, ast.Attribute):
                        named.add(one.attr)
            bodies = []
            # A function that no statement names does not run, except special methods.
            for scope in self.scopes:
                if id(scope) not in running or id(scope) in entered:
                    continue
                runs = isinstance(scope, ast.ClassDef) or self.called(scope)
                if runs or scope.name in named or scope.name.startswith("__"):
                    entered.add(id(scope))
                    bodies.append(scope.body)
        return running

    def require_calls(self) -> None:
        """Raise UnfitTest for a test that is never called, or whose body does not run in a call."""
        entered = {id(one) for one in self.scopes if id(one.body[0]) in self.running}
        for scope in self.scopes:
            if isinstance(scope, ast.ClassDef):
                uncalled = [
                    one.name
                    for one in scope.body
                    if isinstance(one, Function)
                    and one.name.startswith("test")
                    and id(one) not in entered
                ]
                if uncalled:
                    what = f"has a class of tests, and nothing calls `{scope.name}.{uncalled[0]}`"
                    fix = "write the tests as functions test...(), or as plain `assert`"
                    raise UnfitTest(what, fix)
        for scope in self.scopes:
            if not isinstance(scope, Function) or id(scope) in self._inner:
                continue
            if scope.name == "check" and self.entry_point is None and id(scope) not in entered:
                what = "defines check(candidate), and the row has no `entry_point` to call it with"
                raise UnfitTest(what, "write the name of the tested function as `entry_point`")
            if not self.is_test(scope):
                continue
            if id(scope) not in entered and not self.called(scope):
                kind = "is `async`" if isinstance(scope, ast.AsyncFunctionDef) else "has a `yield`"
                what = f"has the test `{scope.name}`, which {kind}: a call does not run it"
                raise UnfitTest(what, "write it as a plain function")
            count = 1 if scope.name == "check" else 0
            if not _takes(scope.args, count):
                passed = "the tested function as its only argument" if count else "no argument"
                what = (
                    f"has `{scope.name}({ast.unparse(scope.args)})`, which is called with {passed}"
                )
                raise UnfitTest(what, "change its parameters, or write plain `assert`")

    def require_imports(self) -> None:
        """Raise UnfitTest for an import that fails in the tester, and for a library that the source
        uses without importing it: the code could define the library and decide the comparison."""
        for one in _imports(self.tree):
            name = one.names[0].name if isinstance(one, ast.Import) else one.module or ""
            if (isinstance(one, ast.ImportFrom) and one.level) or (
                name.partition(".")[0] not in sys.stdlib_module_names
            ):
                what = f"imports {name or '.'}, but the sandbox has only Python's standard library"
                fix = "remove the import; functions of the code are available by name"
                raise UnfitTest(what, fix)
        used = {
            one.value.id
            for one in ast.walk(self.tree)
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
        }
        missing = (self.free & ((used & LIBRARIES) | COMPARISONS)) - {self.entry_point}
        if missing:
            name = min(missing)
            what = f"uses `{name}` without importing it, so the code could define it"
            raise UnfitTest(what, f"import {name} in the test")

    def require_assertion(self) -> None:
        """Raise UnfitTest unless an assertion that runs depends on the code."""
        running = [one for one in self.asserts if id(one) in self.running]
        if any(self.tests_code(one) for one in running):
            return
        fix = "compare what the code returns: assert NAME(INPUT) == OUTPUT"
        if not self.asserts:
            raise UnfitTest("has no `assert`", fix)
        if running:
            line = ast.unparse(running[0])
            what = (
                f"has no `assert` that depends on the code: line {running[0].lineno} is {line:.60}"
            )
            raise UnfitTest(what, fix)
        first = self.asserts[0]
        owner = next((one for one in reversed(self.scopes) if first in ast.walk(one)), None)
        what = f"has an `assert` in line {first.lineno} that never runs"
        if owner is not None and id(owner.body[0]) not in self.running:
            what += f": nothing calls `{owner.name}`"
        raise UnfitTest(what, "write it as a plain statement, or in a function test...()")


def _marked(source: str, analysis: _Analysis) -> str:
    """Return `source` with marks after each assertion that depends on the code, before each
    statement that decides to fail (`if f(1) != 2: raise ...`), and in handlers of an expected
    exception."""
    # Column offsets of ast nodes are offsets in UTF-8 bytes.
    lines = [line.encode() for line in source.split("\n")]
    marks: dict[tuple[int, int], bytes] = {}
    for node in ast.walk(analysis.tree):
        if isinstance(node, ast.Assert) and analysis.tests_code(node):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            marks[node.end_lineno, node.end_col_offset] = f"; {ASSERTED}()".encode()
        elif isinstance(node, ast.If | ast.Match) and analysis.depends(_decisions(node)):
            # No statement can precede an `elif`, so the mark before its `if` covers both.
            is_elif = lines[node.lineno - 1].startswith(b"elif", node.col_offset)
            if not is_elif and any(_fails(block) for block in _blocks(node)):
                _mark_before(marks, lines, node, ASSERTED)
        elif isinstance(node, ast.Try):
            block = (*node.body, *node.orelse)
            if _fails(one for part in block for one in ast.walk(part)):
                for handler in node.handlers:
                    _mark_before(marks, lines, handler.body[0], RAISED)
    # From the end of the source, so that earlier positions stay valid.
    for (line, column), text in sorted(marks.items(), reverse=True):
        marked = lines[line - 1]
        lines[line - 1] = marked[:column] + text + marked[column:]
    return b"\n".join(lines).decode()


def _mark_before(
    marks: dict[tuple[int, int], bytes], lines: Sequence[bytes], node: ast.stmt, name: str
) -> None:
    decorators = getattr(node, "decorator_list", [])
    line = min(one.lineno for one in (node, *decorators))
    before = lines[line - 1][: node.col_offset]
    # On a separate line if possible, because a compound statement cannot follow `;`.
    ends = b"\n" + before if not before.strip() else b"; "
    key = (line, node.col_offset)
    marks[key] = f"{name}()".encode() + ends + marks.get(key, b"")


def _fails(nodes: Iterable[ast.AST]) -> bool:
    """Return True if one of the statements always fails: `raise` or `assert False`."""
    return any(
        isinstance(one, ast.Raise) or (isinstance(one, ast.Assert) and _folded(one.test) is False)
        for one in nodes
    )


def _blocks(node: ast.If | ast.Match) -> list[list[ast.stmt]]:
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    return [case.body for case in node.cases]


def _small(node: ast.AST) -> ast.AST:
    """Return the tree with every container of constants replaced by its truth value. A test may
    have megabytes of constants, and the analysis reads only names and calls."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            value[:] = [_small(one) if isinstance(one, ast.AST) else one for one in value]
        elif isinstance(value, ast.AST):
            setattr(node, name, _small(value))
    if isinstance(node, _CONTAINERS):
        inside = ast.iter_child_nodes(node)
        if all(isinstance(one, ast.Constant | ast.Load) for one in inside):
            filled = bool(node.keys if isinstance(node, ast.Dict) else node.elts)
            return ast.copy_location(ast.Constant(filled), node)
    return node


def _bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[set[str], list[ast.AST]]]:
    """Yield the names that a node assigns, and the expressions assigned to them."""
    for node in nodes:
        targets: list[ast.expr] = []
        sources: list[ast.AST] = []
        match node:
            case ast.Assign():
                targets, sources = node.targets, [node.value]
            case ast.AugAssign():
                targets, sources = [node.target], [node.value, node.target]
            case ast.AnnAssign(value=ast.expr() as value):
                targets, sources = [node.target], [value]
            case ast.NamedExpr():
                targets, sources = [node.target], [node.value]
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                targets, sources = [node.target], [node.iter]
            case ast.withitem(optional_vars=ast.expr() as target):
                targets, sources = [target], [node.context_expr]
            case ast.Match():
                patterns = [one for case in node.cases for one in ast.walk(case.pattern)]
                names = {
                    one.name
                    for one in patterns
                    if isinstance(one, ast.MatchAs | ast.MatchStar) and one.name
                }
                yield names, [node.subject]
                continue
            case ast.ExceptHandler(name=str() as name):
                yield {name}, [node]
                continue
            case _:
                continue
        # `a[0] = x` and `a.b = x` also change `a`, so yield every name in the target.
        yield (
            {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)},
            sources,
        )


def _decisions(node: Branch) -> list[ast.AST]:
    """Return the expressions that decide which statements inside `node` run."""
    match node:
        case ast.If() | ast.While():
            return [node.test]
        case ast.For() | ast.AsyncFor():
            return [node.iter]
        case ast.Match():
            return [node.subject]
        case ast.Try() | ast.TryStar():
            return [*node.body]


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement that run with it, without nested statements."""
    if isinstance(statement, Function):
        yield from (*statement.decorator_list, *statement.args.defaults)
        return
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.ExceptHandler | ast.match_case):
            yield from (one for one in ast.iter_child_nodes(part) if not isinstance(one, ast.stmt))
        elif not isinstance(part, ast.stmt):
            yield part


def _taken(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of its nested blocks that may run."""
    for statement in body:
        yield statement
        match statement:
            case ast.If() | ast.While():
                value = _folded(statement.test)
                yield from _taken(statement.body if value is not False else [])
                yield from _taken(statement.orelse if value is not True else [])
            case ast.For() | ast.AsyncFor():
                yield from _taken(statement.body if _folded(statement.iter) is not False else [])
                yield from _taken(statement.orelse)
            case ast.With() | ast.AsyncWith():
                yield from _taken(statement.body)
            case ast.Try() | ast.TryStar():
                for block in (statement.body, statement.orelse, statement.finalbody):
                    yield from _taken(block)
                for handler in statement.handlers:
                    yield from _taken(handler.body)
            case ast.Match():
                for case in statement.cases:
                    yield from _taken(case.body)
            # Statements that follow in this block never run.
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return


def _folded(node: ast.expr) -> bool | None:
    """Return the truth value of a constant expression; None for any other expression."""
    # Without names, calls and powers, `eval` can neither reach code nor take long.
    if not all(isinstance(one, _FOLDED) for one in ast.walk(node)):
        return None
    try:
        return bool(eval(compile(ast.Expression(node), "test", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that must succeed, which are those outside of any `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_generator(function: Function) -> bool:
    """Return True if the function itself has a `yield`."""
    rest: list[ast.AST] = [*function.body]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, _BINDERS):
            rest.extend(ast.iter_child_nodes(node))
    return False


def _takes(parameters: ast.arguments, count: int) -> bool:
    """Return True if a function with these parameters accepts `count` positional arguments."""
    positional = len(parameters.posonlyargs) + len(parameters.args)
    required = positional - len(parameters.defaults)
    keywords = any(default is None for default in parameters.kw_defaults)
    fits = required <= count and (count <= positional or parameters.vararg is not None)
    return fits and not keywords

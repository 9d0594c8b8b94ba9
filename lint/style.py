"""Check the style rules that ruff has no rule for; `make lint` runs it.

Rules:
- a docstring starts with a noun phrase or an imperative verb;
- docstrings, comments, messages and pages contain none of PHRASES;
- a class or alias of the package has a name of its own, and so has a file;
- a file of the package has at most MAX_LINES lines, without its tables;
- modules of the package do not import each other in a circle, types included, and have fewer than
  MAX_TYPE_IMPORTS imports of types alone;
- only config/rules.py makes a Config, so that no configuration passes unchecked;
- only rollout/vllm/ imports vLLM, so that another version of vLLM concerns one folder;
- only the table of carriers and a carrier's own file have its name as a string, and no file tests
  for a carrier's class: all other code tests for capabilities;
- Markdown has at most MAX_COLUMNS columns, except for tables, code and links.

The list of exceptions, LONG_PAGES, only shrinks: an entry without a violation is an error, too.
"""

from __future__ import annotations

import ast
import gc
import graphlib
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_async_rl"
FOLDERS = (PACKAGE, "tests", "benchmarks", "examples", "launchers", "lint")
MAX_LINES = 500
TABLE_LINES = 100
MAX_COLUMNS = 100
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

PHRASES = {
    "is no": "is not",
    "are no": "are not",
    "beside": "besides, with or next to",
    "one that": "the noun, or that",
    "by which": "a sentence with a verb",
    "of which": "whose, or a second sentence",
    "in the place of": "instead of, or for",
    "told": "reported, named or passed",
    "says": "reports, states or names",
    "said": "reported, stated or named",
    "standstill": "stall or hang",
    "stands still": "stalls or hangs",
    "stand still": "stall, hang or pause",
    "weights in 8 bits": "FP8 weights",
    "8-bit float": "FP8",
    "8-bit floats": "FP8",
    "borrow": "acquire",
    "borrows": "acquires",
    "borrowed": "acquired",
    "give back": "release or return",
    "gives back": "releases or returns",
    "given back": "released or returned",
    "walls": "isolation",
    "keeper": "subreaper",
    "in words": "as text",
    "for ever": "forever",
    "at the most": "at most",
    "at the least": "at least",
    "wants": "requests or needs",
    "none of its": "a sentence with a verb",
    "none of theirs": "a sentence with a verb",
    "none of them": "a sentence with a verb",
    "tell": "report, show or distinguish",
    "tells": "reports, shows or distinguishes",
    "ask": "request, call or query",
    "asks": "requests, calls or queries",
    "want": "request or need",
    "nobody": "nothing, no process or no user",
    "somebody": "a process or a user",
    "whoever": "the noun",
    "go on": "continue",
    "goes on": "continues",
    "went on": "continued",
    "going on": "continuing",
    "lend": "share or map",
    "lends": "shares or maps",
    "lent": "shared or mapped",
    "for good": "permanently",
    "in turns": "alternately, or one after another",
    "all the same": "nevertheless, or equal",
    "comes to": "reaches",
    "came to": "reached",
    "machine of engines": "rollout node",
    "machines of engines": "rollout nodes",
    "hear": "receive or learn",
    "hears": "receives or learns",
    "heard": "received",
    "is to be": "will be, must be, or a verb",
    "are to be": "will be, must be, or a verb",
    "to be had": "available",
    "anew": "again",
    "once more": "again",
    "stood still": "stalled, hung or paused",
    "of late": "recently",
    "is had": "a verb",
    "are had": "a verb",
    "the very": "the, or the same",
    "everybody": "all processes, ranks or users",
    "mistake of ours": "internal error",
    "in one go": "at once",
    "is through": "is complete",
    "are through": "are complete",
    "but for": "except",
    "lets go of": "releases",
    "finds room": "has room",
    "takes the place of": "replaces",
    "take the place of": "replace",
    "takes their place": "replaces them",
    "look whether": "check whether",
    "looks whether": "checks whether",
    "looks that": "checks that",
    "as ever": "as usual",
    "know nothing": "do not depend on",
    "knows nothing": "does not depend on",
    "nothing of it": "none of it",
    "check sum": "checksum",
    "as it lies": "a sentence with a verb",
    "as they lie": "a sentence with a verb",
    "as it stands": "unchanged",
    "as they stand": "unchanged",
    "goes by": "uses, or depends on",
    "what is there": "the noun",
    "what it holds": "its content",
    "what it held": "its content",
    "what they hold": "their content",
    "without end": "forever, or endless",
    "on the spot": "there, or at once",
    "takes no part": "is ignored, or does not take part",
    "sees nothing of": "does not receive",
}
"""A phrase, and the plain English for it."""

BEFORE = r"(?<![\w._-])(?<![Tt]here )"
AFTER = r"(?![\w_]| (?:longer|more|less|later|earlier|other)\b)"
"""Surroundings of a phrase. Names of keys, `there is no` and `is no longer` are plain English."""

MAKES_CONFIG = re.compile(r"(?<![\w.])(?<!class )Config(\.model_(validate|construct)\w*)?\(")
CHECKS_CONFIG = f"{PACKAGE}/config/rules.py"

VLLM_FOLDER = f"{PACKAGE}/rollout/vllm/"
CARRIERS = f"{PACKAGE}/config/weights.py"
"""Table of the carriers of weights: name -> capabilities."""

SHARED_STEMS = {"__init__", "registry", "errors"}
"""Names of files that every folder may have."""

OTHER_PROSE = {"CHANGELOG.md", "docs/config.md", "docs/metrics.md"}
"""Pages whose phrases are not checked: history, and pages that are generated from checked code."""

LONG_PAGES = {
    "CHANGELOG.md",
    "README.md",
    "docs/stability.md",
}
"""Pages that are still to be wrapped."""


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements of a file. Unlike ast.walk, this skips expressions, which are most nodes."""
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        for statement in blocks.pop():
            yield statement
            if isinstance(statement, ast.Expr | ast.Assign | ast.Return):
                continue
            for field in ("body", "orelse", "finalbody"):
                blocks += filter(None, [getattr(statement, field, None)])
            for field in ("handlers", "cases"):
                blocks += [one.body for one in getattr(statement, field, ())]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """String expressions that document a module, class, function or attribute."""
    for statement in statements(tree):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def openers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and message of each docstring that starts with one of OPENERS."""
    for docstring in docstrings(tree):
        first = re.match(r"\w*", docstring.value.lstrip())
        if first is not None and first.group() in OPENERS:
            message = "a docstring starts with a noun or an imperative verb"
            yield docstring.lineno, f"{message}, not with {first.group()!r}"


def phrases(source: str, tree: ast.Module, *, messages: bool) -> Iterator[tuple[int, str]]:
    """Line and message of each phrase of PHRASES in docstrings, comments and, with `messages`, all
    other strings. Text between backticks is code."""
    if not any(found_phrases(_plain(source))):
        return  # Most files have none, and reading their tokens takes time.
    documented = {(one.lineno, one.col_offset) for one in docstrings(tree)}
    for line, text in _texts(source, documented, messages=messages):
        prose = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text))
        for phrase in found_phrases(prose):
            yield line, f"{phrase!r}: write {PHRASES[phrase]}"


def page_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each phrase of PHRASES in the paragraphs of a Markdown page. Blocks of
    code, text between backticks and the targets of links are not prose."""
    code = False
    paragraph: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if line.strip() and not code and not fence:
            paragraph.append(line.strip())
            continue
        # A phrase may continue on the next line, so a paragraph is one text.
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "`", " ".join(paragraph))
        for phrase in found_phrases(prose):
            yield number - len(paragraph), f"{phrase!r}: write {PHRASES[phrase]}"
        paragraph = []


def found_phrases(prose: str) -> Iterator[str]:
    """Phrases of PHRASES in a text, also at the beginning of a sentence."""
    lower = prose.lower()
    for phrase in PHRASES:
        if phrase in lower and re.search(
            f"{BEFORE}[{phrase[0]}{phrase[0].upper()}]{phrase[1:]}{AFTER}", prose
        ):
            yield phrase


def _plain(source: str) -> str:
    return " ".join(source.replace("#", " ").split())


STRINGS = (tokenize.STRING, tokenize.FSTRING_MIDDLE)
KEY = re.compile(r"[\"'][\w.]+[\"']")


def _texts(
    source: str, documented: set[tuple[int, int]], *, messages: bool
) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings and comments and, with `messages`, of all other strings. Comments
    on successive lines are one text."""
    comment: list[str] = []
    begins = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begins = begins if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
        elif comment and token.type != tokenize.NL:
            yield begins, " ".join(comment)
            comment = []
        text = token.start in documented or (messages and token.type in STRINGS)
        if text and not KEY.fullmatch(token.string):
            yield token.start[0], token.string


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


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Line and message of each line of Markdown that is too long and could be wrapped."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        words = max((len(word) for word in line.split()), default=0)
        table = line.lstrip().startswith(("|", "#", "<"))
        code_of_list = line.startswith(" " * 8) or re.fullmatch(r" *`[^`]*`", line)
        if len(line) > MAX_COLUMNS and not (
            code or table or code_of_list or "](" in line or words > MAX_COLUMNS
        ):
            yield number, f"has {len(line)} columns, more than {MAX_COLUMNS}"


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
                STARTS.search(source) or any(found_phrases(_plain(source)))
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
    texts = {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    }
    found += [
        f"{path}:{line}: {message}"
        for path, text in texts.items()
        if path not in OTHER_PROSE
        for line, message in page_phrases(text)
    ]
    pages = {path: [*long_lines(text)] for path, text in texts.items()}
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

"""Texts and paths survive every locale: files are UTF-8, and output never fails."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.thorough import thorough
from tests.written_run import write_run

ROOT = Path(__file__).parents[2]
PROMPT = "数学 é ∑ 😀"
IN_TEXT_MODE = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile")
PREPARED = """
import sys
from pathlib import Path
from megatron_async_rl.config.load import load
from megatron_async_rl.config.yaml_tree import read_tree
from megatron_async_rl.launch.launcher import _prepare_directory

config = load(Path(sys.argv[1]))
for _ in range(2):  # the second pass reads the output of the first
    _prepare_directory(config)
written = config.run.dir / "config.yaml"
assert load(written) == config
print(ascii(read_tree(written.read_text(encoding="utf-8"))[0]["data"]["system_prompt"]))
"""


def without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls that read or write text in the encoding of the locale. Ruff's PLW1514 finds only
    calls on objects whose type it can infer."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if "encoding" in given:
            continue
        flags = [given.get(flag, call) for flag in ("text", "universal_newlines")]
        if (
            name in ("getoutput", "popen")
            or any(ast.unparse(flag) == "True" for flag in flags)
            or (name == "read_text" and not call.args)
            or (name == "write_text" and len(call.args) < 2)
            or (name in IN_TEXT_MODE and _in_text_mode(call, name, given.get("mode")))
        ):
            yield call


def _in_text_mode(call: ast.Call, name: str, mode: ast.expr | None) -> bool:
    """Return True if the call certainly opens text; False for `open` of other objects and for a
    computed mode."""
    place, default = (0, "b")
    if name == "fdopen" or isinstance(call.func, ast.Name):
        place, default = (1, "r")
    given = mode or (call.args[place] if len(call.args) > place else ast.Constant(default))
    value = getattr(given, "value", None)
    return isinstance(value, str) and set(value) <= set("rwaxt+")


@pytest.mark.parametrize("folder", ["megatron_async_rl", "examples", "launchers"])
def test_every_text_file_and_pipe_names_its_encoding(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "share" not in file.parts
        for call in without_encoding(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_the_rule_finds_each_kind_of_call() -> None:
    for text in (
        "file.read_text()",
        "x.write_text(y)",
        "x.read_text(errors='replace')",
        "open(p)",
        "open(p, 'w')",
        "p.open('a')",
        "os.fdopen(1, 'w')",
        "tempfile.NamedTemporaryFile('w')",
        "subprocess.run(x, text=True)",
        "subprocess.Popen(x, universal_newlines=True)",
    ):
        assert list(without_encoding(ast.parse(text))), text
    for text in (
        "file.read_text('utf-8')",
        "x.write_text(y, 'utf-8')",
        "open(p, 'rb')",
        "open(p, mode)",
        "p.open('a', encoding='utf-8')",
        "os.open(p, 0)",
        "tempfile.TemporaryFile()",
    ):
        assert not list(without_encoding(ast.parse(text))), text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_run(tmp_path_factory.mktemp("locale"))
    text = file.read_text(encoding="utf-8")
    prompt = json.dumps(PROMPT, ensure_ascii=False)
    changed = text.replace("data:\n", f"data:\n  as_chat: false\n  system_prompt: {prompt}\n")
    file.write_text(changed, encoding="utf-8")
    return file


def in_ascii(*command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python with ASCII as the default encoding of files, names and output."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        timeout=600,
    )


def test_a_config_passes_through_a_locale_that_lacks_its_characters(config: Path) -> None:
    done = in_ascii("-c", PREPARED, str(config))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").strip() == ascii(PROMPT)


@pytest.mark.parametrize(
    "encoding", ["", pytest.param("gbk:strict", marks=thorough), "latin-1:strict"]
)
def test_output_that_the_locale_lacks_is_replaced(config: Path, encoding: str) -> None:
    override = f"data.prompt_key={PROMPT}" if encoding else "data.prompt_key=nothing"
    command = ["-m", "megatron_async_rl", "plan", str(config), override]
    variables = {"PYTHONIOENCODING": encoding, "LC_ALL": "C.UTF-8"} if encoding else {}
    done = in_ascii(*command, **variables)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"prompt_key" in done.stdout
    if encoding:
        assert b"?" in done.stdout


def test_a_path_that_the_locale_lacks_is_refused(config: Path) -> None:
    for key, value in (("run.dir", "/x/é"), ("data.train", "数.jsonl")):
        file = config.with_name(f"{key}.yaml")
        lines = [
            f"  {key.partition('.')[2]}: {value}" if f"  {key.partition('.')[2]}:" in line else line
            for line in config.read_text(encoding="utf-8").splitlines()
        ]
        file.write_text("\n".join(lines), encoding="utf-8")
        done = in_ascii("-m", "megatron_async_rl", "plan", str(file))
        assert done.returncode == 2, done.stderr
        assert b"Traceback" not in done.stderr
        assert key.encode() in done.stderr
        assert b"C.UTF-8" in done.stderr

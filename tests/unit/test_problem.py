"""Messages, durable files, visible text and digests of named code."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from megatron_async_rl.config import durable, problem
from megatron_async_rl.config.durable import (
    file_digest,
    publish,
    reading,
    require_folder,
    write_file,
)
from megatron_async_rl.config.problem import (
    DataError,
    Problem,
    UserError,
    number_of,
    shipped,
    suggestion,
)
from megatron_async_rl.config.settings_model import code_digests
from megatron_async_rl.config.visible_text import is_blank, stripped


def test_a_shipped_file_is_relative_only_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(problem, "SHARE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert shipped("docs/a.md") == "docs/a.md"
    monkeypatch.chdir(tmp_path / "docs")
    assert shipped("docs/a.md") == "a.md"
    assert shipped("other/a.md") == str(tmp_path / "other/a.md")


def test_counts_and_suggestions_are_sentences() -> None:
    assert number_of("rank", 1, "does", "do") == "1 rank does"
    assert number_of("rank", 2, "does", "do") == "2 ranks do"
    assert [number_of("batch", count) for count in (0, 1, 2)] == [
        "0 batches",
        "1 batch",
        "2 batches",
    ]
    assert suggestion("mth", ["math", "code"]) == "did you mean 'math'? "
    assert suggestion("x", ["math"]) == ""


def test_an_error_shows_its_first_problems_and_survives_pickling() -> None:
    one = Problem(key="k", what="w", fix="f", where="a:1")
    assert str(one) == "k  (a:1)\n  w\n  fix: f"
    shown = "k\n  w\n  fix: f"
    for count, more in ((1, ""), (6, ""), (7, "\n... and 1 more"), (9, "\n... and 3 more")):
        error = UserError("file", [Problem(key="k", what="w", fix="f")] * count)
        noun = "problem" if count == 1 else "problems"
        body = "\n".join([shown] * min(count, 6))
        assert str(error) == f"file: {count} {noun}\n{body}{more}"
        copied = pickle.loads(pickle.dumps(error))
        assert (str(copied), copied.problems) == (str(error), error.problems)
    assert str(UserError.of("k", "w", "f")) == shown
    assert str(UserError.of("k", "w", "f", source="s")) == f"s: 1 problem\n{shown}"
    for line, place in ((None, "a"), (3, "a:3")):
        data = pickle.loads(pickle.dumps(DataError(Path("a"), line, "w", "f")))
        assert (data.path, data.line, data.what, data.fix) == (Path("a"), line, "w", "f")
        assert str(data) == f"{place}: w\n  fix: f"
        assert data.problem("key") == Problem(key="key", what=f"{place}: w", fix="f")


def test_a_folder_must_be_one_that_can_be_listed_and_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_folder(tmp_path, "fix")
    assert not require_folder(tmp_path / "none", "fix")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")

    def refused(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            require_folder(folder, "make it")
        return str(error.value).replace(str(tmp_path), "HERE")

    assert refused(tmp_path / "file") == (
        "HERE/file\n  cannot be read as a folder: Not a directory\n  fix: make it"
    )
    assert refused(tmp_path / "link") == (
        "HERE/link\n  is a link to nowhere, which does not exist\n  fix: make it"
    )

    # Root may enter every folder, so the system refuses here.
    def stat(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(durable.os, "stat", stat)
    assert "cannot be read as a folder: Permission denied" in refused(tmp_path)


def test_errors_of_reading_name_the_reason_without_the_file(tmp_path: Path) -> None:
    def refused(error: Exception) -> str:
        with pytest.raises(UserError) as raised:
            fail(tmp_path / "a", error)
        return str(raised.value).replace(str(tmp_path), "HERE")

    text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    fix = f"fix: {durable.FIX}"
    assert refused(text) == f"HERE/a\n  cannot be read: it is not UTF-8 text\n  {fix}"
    assert refused(OSError(5, "Input/output error", "x")).splitlines()[1] == (
        "  cannot be read: Input/output error"
    )
    assert refused(OSError("odd")).splitlines()[1] == "  cannot be read: odd"
    with pytest.raises(FileNotFoundError):
        fail(tmp_path, FileNotFoundError())
    with pytest.raises(KeyError):
        fail(tmp_path, KeyError())


def fail(path: Path, error: Exception) -> None:
    with reading(path):
        raise error


def test_folders_are_synced_before_their_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    monkeypatch.setattr(durable, "sync", lambda path: done.append(str(path.relative_to(tmp_path))))
    monkeypatch.setattr(durable.os, "rename", renamed)
    (tmp_path / "new" / "inner").mkdir(parents=True)
    (tmp_path / "new" / "inner" / "file").touch()
    publish(tmp_path / "new", tmp_path / "final")
    assert sorted(done[:3]) == ["new", "new/inner", "new/inner/file"]
    assert done[3:] == ["rename", "."]
    assert (tmp_path / "final" / "inner" / "file").exists()


def test_files_have_text_or_bytes_and_leave_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for content in ("é", b"\xff"):
        write_file(tmp_path / "a", content)
        expected = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "a").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(os.listdir("/proc/self/fd")) == files
    (tmp_path / "a").write_bytes(bytes(range(256)) * 3)
    whole = file_digest(tmp_path / "a")
    monkeypatch.setattr(durable, "READ_BYTES", 5)
    assert file_digest(tmp_path / "a") == whole == durable.digest(bytes(range(256)) * 3)
    assert len(whole) == 32


def test_text_without_a_glyph_is_blank_and_its_edges_are_removed() -> None:
    blank = ["", " ", "\n", "\u200b", "\u3164", "\u0301", "\ue000", "\u2065", "\ufff0", "\ufff8"]
    blank += ["\U000e0000", "\U000e0fff", "\ud800", "\u2028", "\u20e3"]
    for text in blank:
        assert is_blank(text), repr(text)
        assert not is_blank(f"{text}a{text}"), repr(text)
    for text in ("a", "\u2064a", "\uffef1", "\ufffd", "\U000dffff1", "\U0001f600", "0"):
        assert not is_blank(text), repr(text)
    edges = ["\x00", " ", "\x7f", "\xa0", "\xad", "\u200b", "\u200f", "\u2028", "\u202f"]
    edges += ["\u2060", "\u206f", "\u3000", "\ufeff", "\x1f", "\x85"]
    for edge in edges:
        assert stripped(f"{edge} {edge}a{edge}b{edge} {edge}") == f"a{edge}b", repr(edge)
    for kept in ("!", "~", "\xa1", "\xae", "\u200a!", "\u2010", "\u2070", "\ufefe", "\ufe0f"):
        assert stripped(f"{kept}a{kept}").strip("\u200a") == f"{kept}a{kept}".strip("\u200a")


def test_digests_of_code_are_those_of_every_named_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    other = tmp_path / "other"
    monkeypatch.setenv("PYTHONPATH", str(other))
    for name in ("own.py", "package/__init__.py", "package/inner.py", "other/far.py", "odd.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    tree = {
        "a": ["own:f", "package:C", {"deep": ("package.inner:C.method", "far:f", 3, None)}],
        "own:as_a_key": "text: more",
        "none": "absent:f",
        "no": "own",
    }
    found = {path: tmp_path / path for path in ("own.py", "package/__init__.py")}
    found |= {path: tmp_path / path for path in ("package/inner.py", "other/far.py")}
    expected = {str(path): file_digest(path) for path in found.values()}
    assert code_digests(tree) == expected
    assert list(code_digests({"x": "own:f"})) == [str(tmp_path / "own.py")]

    def unreadable(path: Path) -> str:
        raise OSError

    monkeypatch.setattr("megatron_async_rl.config.settings_model.file_digest", unreadable)
    assert code_digests(tree) == {}

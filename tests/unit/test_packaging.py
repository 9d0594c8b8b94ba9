"""The images and the wheel hold what they need: built from exactly the files that the Dockerfiles
copy."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from megatron_async_rl.config.problem import shipped
from megatron_async_rl.plan import doctor
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_{0} as build; build(sys.argv[1])"


IMAGES = ("Dockerfile", "Dockerfile.cpu")
PYTEST = {canonicalize_name(name) for name in ("iniconfig", "pluggy", "pytest")}


def copied(image: str = "Dockerfile") -> list[str]:
    """Paths that an image's file copies into the directory that it installs from."""
    _, _, package = (ROOT / image).read_text().partition("WORKDIR ")
    instructions = re.findall(r"^COPY (.+)$", package, re.MULTILINE)
    return [source for one in instructions for source in one.split()[:-1]]


def locked(*files: str) -> dict[NormalizedName, str]:
    """Versions by name, of files in requirements/; the last file's word holds."""
    text = "\n".join((ROOT / "requirements" / file).read_text() for file in files)
    found = re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def unfulfilled(asked: Iterable[Requirement], versions: Mapping[NormalizedName, str]) -> list[str]:
    found = [(one, versions.get(canonicalize_name(one.name))) for one in asked]
    return [
        f"{one}: the lock has {version}"
        for one, version in found
        if version is None or not one.specifier.contains(version)
    ]


def build(what: str, folder: Path, out: Path) -> Path:
    out.mkdir()
    command = [sys.executable, "-c", BUILD.format(what), str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the package, installed from a wheel of a source archive of the image's files."""
    tmp = tmp_path_factory.mktemp("packaging")
    image = tmp / "image"
    image.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, image / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(ROOT / name, image / name)

    archive = build("sdist", image, tmp / "archive")
    with tarfile.open(archive) as file:
        file.extractall(tmp / "source", filter="data")
    (source,) = (tmp / "source").iterdir()
    wheel = build("wheel", source, tmp / "wheel")

    target = tmp / "installed"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, timeout=600)
    return target


def test_the_image_and_the_source_archive_hold_all_that_setup_reads(installed: Path) -> None:
    inside, checkout = installed / "megatron_async_rl", ROOT / "megatron_async_rl"
    modules = {file.relative_to(inside) for file in inside.rglob("*.py")}
    own = {file for file in modules if file.parts[0] != "share"}
    assert own == {file.relative_to(checkout) for file in checkout.rglob("*.py")}
    assert (inside / "py.typed").is_file()


def test_mar_runs_from_the_installed_wheel(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    where = "import megatron_async_rl as package; print(package.__file__)"
    for command, words in (
        ([sys.executable, "-c", where], str(installed)),
        ([sys.executable, str(installed / "bin" / "mar"), "--help"], "Asynchronous RL"),
    ):
        done = subprocess.run(
            command, env=environment, cwd=installed, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


NAMED = re.compile(
    r"(?<![\w/.-])(?:docs|examples|launchers|tests|benchmarks|requirements)(?:/[\w.-]*\w)*/?(?=\W|$)|Dockerfile|Makefile"
)
"""A file or a folder of the repository, in a text."""
WRITES_PAGES = ("config/docs.py", "metrics/catalogue.py")


def said(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Strings of a module besides its docstrings, and whether `shipped` is given them."""
    documents = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    found = {
        id(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call.func.id == shipped.__name__
    }
    for one in ast.walk(tree):
        if (
            isinstance(one, ast.Constant)
            and id(one) not in documents
            and isinstance(one.value, str)
        ):
            yield one.value, id(one) in found


def test_a_file_that_a_message_names_comes_with_the_wheel(installed: Path) -> None:
    inside = installed / "megatron_async_rl"
    told = [
        (text, is_path)
        for file in inside.rglob("*.py")
        if not file.is_relative_to(inside / "share")
        if str(file.relative_to(inside)) not in WRITES_PAGES
        for text, is_path in said(ast.parse(file.read_text()))
    ]
    assert [text for text, is_path in told if is_path]
    for text, is_path in told:
        for name in NAMED.findall(text):
            if "/" in name or not name.islower():
                assert (inside / "share" / name).exists(), text
                assert is_path or "`mar examples`" in text, text


def test_what_the_pages_of_the_wheel_name_comes_with_it(installed: Path) -> None:
    share = installed / "megatron_async_rl" / "share"
    missing = {
        name
        for page in (*share.glob("docs/*.md"), *share.glob("examples/**/*.*"))
        if page.suffix in (".md", ".yaml", ".py", ".sh")
        for name in NAMED.findall(page.read_text())
        if name.startswith(("docs/", "examples/", "launchers/")) and "generated" not in name
        if not (share / name).exists()
    }
    assert missing == {"launchers/setup.sh"}, "it sets up a checkout"
    assert not [file for file in share.rglob("*") if file.is_symlink() or "generated" in file.parts]


def test_the_wheel_prints_paths_that_exist_and_copies_them_out(
    installed: Path, tmp_path: Path
) -> None:
    def mar(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(installed / "bin" / "mar"), *arguments],
            env=os.environ | {"PYTHONPATH": str(installed)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )

    assert mar("examples").returncode == 0
    share = installed / "megatron_async_rl" / "share"
    for file in share.rglob("*.*"):
        assert file.suffix == ".pyc" or (tmp_path / file.relative_to(share)).exists()
    assert mar("examples").returncode == 2, "nothing is written over"
    done = mar("conform", "examples/arithmetic_cpu.yaml")
    (path,) = re.findall(r"see (\S+) for the format", done.stderr)
    assert Path(path).is_file()
    assert Path(path).is_relative_to(installed)


def test_what_the_builder_is_sent_is_what_the_dockerfiles_copy() -> None:
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    sources = {source for image in IMAGES for source in copied(image)}
    assert sorted(sent) == sorted(sources - {"tests/data/golden"}), "tests has it"
    assert {"tests", *copied("Dockerfile.cpu")} == {*sources}
    # What an example generated in the checkout would belong to root in the image.
    last = (ROOT / ".dockerignore").read_text().split()[-1]
    assert last == "examples/*/generated"


def test_the_gpu_image_has_one_cudnn_and_builds_against_its_headers() -> None:
    """The libraries that a process then loads: tests/unit/test_libraries.py."""
    text = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert base.startswith("nvidia/cuda:")
    assert "-devel-" in base, "vLLM and Triton compile kernels at run time"
    assert "cudnn" not in base
    places = {line.partition("==")[0] for line in locked("nvidia.txt")}
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= places
    folders = re.findall(r'CPATH="(\S+)"', text)
    assert folders == ["$PWD/nvidia/cudnn/include:$PWD/nvidia/nccl/include"]
    assert text.count("&& python -m megatron_async_rl.plan.libraries\n") == 1
    installed = re.search(r"apt-get install .+?\n    &&", text, re.DOTALL)
    assert installed is not None
    rdma = {"libibverbs1", "ibverbs-providers", "librdmacm1"}
    assert rdma <= set(installed[0].split()), "NCCL would use TCP"


def imports(file: Path) -> Iterator[tuple[str, Path]]:
    """Names of modules that a file imports anywhere, and where one of the repository's would be."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            yield name, (ROOT / name.replace(".", "/")).with_suffix(".py")


def imported_by_the_gpu_tests() -> set[Path]:
    """Files of tests/gpu and of other tests that these import."""
    found, left = set[Path](), [*(ROOT / "tests" / "gpu").glob("*.py")]
    while left:
        file = left.pop()
        found.add(file)
        own = {at for name, at in imports(file) if name.startswith("tests.") and at.is_file()}
        left += own - found
    return found


def test_the_gpu_image_can_run_the_gpu_tests_as_any_user() -> None:
    """The GPU tests need only pytest of the test dependencies."""
    text = (ROOT / "Dockerfile").read_text()
    assert "'^(iniconfig|pluggy|pytest)==' requirements/dev.txt" in text
    assert locked("dev.txt").keys() >= PYTEST
    assert "chmod -R a+rwX /home/mar docs" in text, "caches, and the record of the tests"
    assert "\nENV HOME=/home/mar USER=mar\n" in text
    assert {"Makefile", "tests"} <= set(copied())
    of_tests = locked("dev.txt").keys() - locked("gpu.txt").keys() - PYTEST
    there = importlib.metadata.packages_distributions()
    names = {name for file in imported_by_the_gpu_tests() for name, _ in imports(file)}
    asked = {
        canonicalize_name(one) for name in names for one in there.get(name.partition(".")[0], ())
    }
    assert {"torch", "pytest"} <= asked
    assert not asked & of_tests


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_any_user_and_checks_its_health(image: str) -> None:
    text = (ROOT / image).read_text()
    before, user, after = re.split(r"^USER (.+)$", text, flags=re.MULTILINE)
    assert user == "10001" or (user == "${RUN_AS}" and "\nARG RUN_AS=10001\n" in before)
    assert "useradd --uid 10001 --create-home mar" in text
    assert re.search(r'^HEALTHCHECK .* CMD \["mar", "doctor"\]$', after, re.MULTILINE)
    assert "LABEL org.opencontainers.image.title=" in text


def test_the_cpu_image_is_set_up_by_the_lock_and_for_the_python_that_the_package_asks_for() -> None:
    text = (ROOT / "Dockerfile.cpu").read_text()
    wanted = re.search(r'python_requires=">=([\d.]+),', (ROOT / "setup.py").read_text())
    assert wanted is not None
    assert f"\nARG BASE=python:{wanted[1]}-slim-" in text
    assert re.search(r"^RUN .*launchers/setup\.sh$", text, re.MULTILINE)
    assert not re.search(r"==\d", text), "versions are in requirements/"
    for path in re.findall(r"(?:^RUN |&& )(launchers/\S+)", text, re.MULTILINE):
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("file", ["requirements/gpu.txt", "Dockerfile"])
def test_a_gpu_version_is_the_same_wherever_it_is_named(file: str) -> None:
    named = dict(re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", (ROOT / file).read_text()))
    tried = {part.distribution: part.version for part in doctor.PARTS}
    tried["transformer-engine-cu13"] = tried["transformer-engine-torch"]
    common = tried.keys() & named.keys()
    assert "transformer-engine-torch" in common or "transformer-engine-cu13" in common
    assert {name: named[name] for name in common} == {name: tried[name] for name in common}


def test_locked_versions_lie_in_the_ranges_that_the_wheel_asks_for(installed: Path) -> None:
    (metadata,) = installed.glob("megatron_async_rl-*.dist-info")
    asked = [Requirement(one) for one in importlib.metadata.Distribution.at(metadata).requires]
    assert not unfulfilled(asked, locked("gpu.txt", "dev.txt", "tasks.txt", "cpu.txt"))


def test_a_package_of_the_cpu_lock_finds_there_what_it_asks_for() -> None:
    """Set-up installs with --no-deps. Not torch's own wishes: its standard build has more."""
    versions = locked("cpu.txt")
    asked = [
        Requirement(line)
        for name in versions.keys() - {"torch"}
        for line in importlib.metadata.distribution(name).requires or ()
    ]
    there = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    not_for_text = {"torchvision", "torchaudio", "torchcodec"}
    assert not unfulfilled([one for one in there if one.name not in not_for_text], versions)


@thorough
def test_the_versions_of_the_gpu_image_resolve_together() -> None:
    """The test resolves with uv, because pip fetches whole wheels (2 GB) to read their
    requirements."""
    pytest.importorskip("uv")
    resolve = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-cache"]
    only = ["--python", sys.executable, "--reinstall", "--only-binary", ":all:"]
    done = subprocess.run(
        [*resolve, *only, "--requirement", "requirements/gpu.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 2:  # 1: there is no solution
        pytest.skip(f"no package index is reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "nm"))), reason="needs a C compiler and binutils"
)
@pytest.mark.parametrize("lacking", ["", "cublasLtNewest"])
def test_the_gpu_image_is_not_made_where_cublas_lacks_a_function(
    tmp_path: Path, lacking: str
) -> None:
    """The step of the Dockerfile, over libraries of one function each."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    (step,) = (line.removeprefix("RUN ") for line in lines if line.startswith("RUN nm "))
    calls = " ".join(f"{name}();" for name in ("cublasOld", "cublasLtOld", lacking) if name)
    library = calls.replace("cublas", "void cublas") + f" void layer() {{ {calls} }}"
    for path, code in {
        "transformer_engine/wheel_lib/libtransformer_engine.so": library,
        "nvidia/cu13/lib/libcublas.so.13": "void cublasOld() {}",
        "nvidia/cu13/lib/libcublasLt.so.13": "void cublasLtOld() {}",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        compile_ = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
        subprocess.run(compile_, cwd=tmp_path, input=code, text=True, check=True, timeout=600)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step.replace("/tmp/", f"{tmp_path}/")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == bool(lacking), done.stderr
    message = f"cuBLAS lacks functions that Transformer Engine calls: {lacking}\n"
    assert done.stderr == (message if lacking else "")


def test_apex_is_built_from_one_commit() -> None:
    assert re.search(r"^ARG APEX_REF=[0-9a-f]{40}$", (ROOT / "Dockerfile").read_text(), re.M)

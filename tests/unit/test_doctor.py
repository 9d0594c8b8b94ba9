"""`mar doctor` fails for missing parts that this machine requires, and advises on the others."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.plan import doctor
from megatron_async_rl.plan.machine import GIB, Gpu, Machine
from megatron_async_rl.policy.families import EXPECTED, FAMILIES, REFUSED, unsupported
from megatron_async_rl.rollout.isolation.sandbox import SandboxError
from tests.cases import looped
from tests.stored_pages import RecordedConsole, require_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
LAPTOP = Machine(cores=2, memory=16 * GIB, shared_memory=2 * GIB, gpus=())
NODE = Machine(cores=64, memory=512 * GIB, shared_memory=64 * GIB, gpus=(Gpu("A", 80 * GIB),))


@pytest.fixture(autouse=True)
def without_importing_torch(monkeypatch):
    """Importing torch takes seconds; the end-to-end tests do it."""
    monkeypatch.setattr(doctor, "_torch", lambda path: ([], None))


def states(machine: Machine) -> dict[str, str]:
    return {finding.part: finding.state for finding in doctor.examine(machine)}


def exit_code(machine: Machine) -> int:
    return doctor.show(doctor.examine(machine), Console(quiet=True))


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that these versions, and no other parts, are installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


TESTED = {part.distribution: part.version for part in doctor.PARTS if part.version}


def test_the_locked_environment_is_ready_on_a_cpu():
    assert exit_code(LAPTOP) == 0


def test_a_cpu_needs_no_gpu_part(monkeypatch):
    install(
        monkeypatch,
        **{
            name: version
            for name, version in TESTED.items()
            if name not in ("vllm", "transformer-engine-torch")
        },
    )
    assert exit_code(LAPTOP) == 0
    assert states(LAPTOP)["transformer-engine-torch"] == "note"
    assert "vllm" not in states(LAPTOP)


def test_a_gpu_needs_the_gpu_build_of_the_engine(monkeypatch):
    install(monkeypatch, **{name: version for name, version in TESTED.items() if name != "vllm"})
    assert states(NODE)["vllm"] == "missing"
    assert exit_code(NODE) == 1


def test_another_version_of_a_needed_part_fails(monkeypatch):
    install(monkeypatch, **TESTED | {"torch": "2.14.0+cpu"})
    assert states(LAPTOP)["torch"] == "missing"
    install(monkeypatch, **TESTED | {"torch": "2.13.0+cpu"})
    assert states(LAPTOP)["torch"] == "ok"


def test_an_untested_version_in_the_supported_range_is_a_note(monkeypatch):
    declared = ["torch<2.14,>=2.13; extra == 'cpu'", "torch<9; extra == 'gpu'", "numpy"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    install(monkeypatch, **TESTED | {"torch": "2.13.1+cpu"})
    assert states(LAPTOP)["torch"] == "note"
    assert exit_code(LAPTOP) == 0
    install(monkeypatch, **TESTED | {"torch": "2.14.0"})
    assert states(LAPTOP)["torch"] == "missing"
    assert states(NODE)["torch"] == "note"


def test_nothing_suggests_the_apex_of_pypi():
    """NVIDIA's Apex is available from its repository only."""
    root = DOCS.parent
    files = [root / "README.md", root / "setup.py", *root.glob("Dockerfile*")]
    for folder, pattern in (
        ("docs", "*.md"),
        ("megatron_async_rl", "**/*.py"),
        ("launchers", "**/*"),
        ("requirements", "*"),
    ):
        files += [one for one in (root / folder).glob(pattern) if one.is_file()]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            named = re.search(r"pip install.*[\s'\"]apex\b|^apex *([=<>~]=|$)", line, re.I)
            assert not named, f"{file}: {line}"


FAILING_HOST = Machine(cores=1, memory=2 * GIB, shared_memory=64 * 2**20, gpus=())
FAILING_NODE = Machine(
    cores=1,
    memory=2 * GIB,
    shared_memory=64 * 2**20,
    gpus=(Gpu("old", 80 * GIB, capability=(7, 0)),),
)
WITHOUT_FIX = {
    "old processor": {"AVX-512", "torch CPU code"},
    "no GPU": {"transformer-engine-torch", "apex", "CUDA", "NCCL"},
}


@pytest.fixture
def broken_installation(monkeypatch):
    """Make every check fail that does not depend on the machine."""

    def refused(source: str) -> None:
        raise SandboxError("no namespaces")

    install(monkeypatch)
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(doctor, "run", refused)
    answer = "none|False|not built|not built|DEFAULT"
    monkeypatch.setattr(doctor, "_torch", lambda path: doctor._torch_findings(answer, path))


def test_findings_on_torch_name_what_it_was_built_with():
    findings, built = doctor._torch_findings("13.0|True|built|not built|AVX512", "cpu")
    assert built == "13.0"
    assert {one.part: (one.state, one.found) for one in findings} == {
        "CUDA": ("ok", "torch built for CUDA 13.0, usable"),
        "gloo": ("ok", "built"),
        "NCCL": ("note", "not built"),
        "torch CPU code": ("ok", "AVX512"),
    }


@pytest.mark.parametrize("machine", [FAILING_HOST, FAILING_NODE], ids=["cpu", "gpu"])
def test_every_finding_has_a_fix_unless_the_hardware_lacks_it(machine, broken_installation):
    findings = doctor.examine(machine)
    assert {one.part for one in findings if one.state == "ok"} <= {"GPUs"}
    without = {one.part for one in findings if one.state != "ok" and not one.fix}
    assert without == WITHOUT_FIX["old processor"] | (
        set() if machine.gpus else WITHOUT_FIX["no GPU"]
    )
    assert all(one.advice or one.found for one in findings)

    console = Console(width=140, record=True, file=StringIO())
    assert doctor.show(findings, console, fix_hints=True) == 1
    printed = console.export_text()
    assert all(f"    {one.fix}\n" in printed for one in findings if one.fix)
    missing = [one for one in findings if one.state == "missing"]
    assert all(f"\n{one.part}: {one.advice}\n" in printed for one in missing)
    names = ", ".join(one.part for one in missing)
    assert " ".join(printed.split()).endswith(f"not ready: {names}.")


@pytest.mark.parametrize("checkout", [True, False])
def test_fixes_of_a_checkout_use_make(checkout, broken_installation, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKOUT", checkout)
    fixes = {one.part: one.fix for one in doctor.examine(FAILING_HOST)}
    setup = f"make -C {doctor.ROOT} setup"
    pip = f"pip install --extra-index-url {doctor.WHEELS}/cpu 'ray=={TESTED['ray']}'"
    assert fixes["ray"] == (setup if checkout else pip)
    on_gpu = {one.part: one.fix for one in doctor.examine(FAILING_NODE)}
    assert on_gpu["vllm"] == f"pip install 'vllm=={TESTED['vllm']}'", (
        "the lock file has CPU builds only"
    )
    assert ("-e" in fixes["engine plugin"]) == checkout


def test_findings_can_be_printed_as_json():
    console = Console(file=StringIO())
    assert doctor.show(doctor.examine(FAILING_HOST), console, as_json=True) == 1
    (memory,) = [one for one in json.loads(console.file.getvalue()) if one["part"] == "memory"]
    assert memory["state"] == "note"
    assert memory["fix"].startswith("set rollout.kv_cache_gib")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=16384"),
        ("user/max_user_namespaces", "9", "docker run --security-opt seccomp=unconfined"),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named(tmp_path, monkeypatch, name, value, hint):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(doctor, "KERNEL", tmp_path)
    assert hint in doctor._namespace_fix()


def test_a_machine_without_bubblewrap_gets_the_command_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = doctor._sandbox()
    assert "bubblewrap (the program bwrap) is not installed" in found.advice
    assert found.fix == "sudo apt-get install bubblewrap"


def test_too_little_shared_memory_fails_because_weights_pass_through_it():
    small = Machine(cores=2, memory=16 * GIB, shared_memory=64 * 2**20, gpus=())
    assert states(small)["shared memory"] == "missing"
    assert exit_code(small) == 1


@pytest.mark.parametrize(
    ("body", "state", "found"),
    [("", "ok", "yes"), ("raise ImportError('undefined symbol: x')", "missing", "symbol: x")],
)
def test_an_installed_transformer_engine_must_import_where_there_is_a_gpu(
    tmp_path, monkeypatch, body, state, found
):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(body)
    (tmp_path / "torch.py").write_text(
        "class backends:\n  class cudnn:\n    version = lambda: 92000"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def findings_with(**changes) -> list[doctor.Finding]:
        findings = doctor.examine(replace(NODE, **{"transformer_engine": "2.12.0"} | changes))
        return [each for each in findings if each.part == "import transformer_engine"]

    (finding,) = findings_with()
    assert finding.state == state
    assert found in finding.found
    assert findings_with(gpus=()) == findings_with(transformer_engine=None) == []


def test_apex_from_pypi_is_not_reported_as_nvidias(monkeypatch):
    """PyPI's project of this name is of no use here."""
    install(monkeypatch, **TESTED | {"apex": "0.9.10.dev0"})

    def apex(machine: Machine) -> doctor.Finding:
        (found,) = (one for one in doctor.examine(machine) if one.part == "apex")
        return found

    assert (apex(NODE).state, "another project" in apex(NODE).advice) == ("note", True)
    assert apex(NODE).fix.startswith("pip uninstall --yes apex; APEX_CPP_EXT=1")
    assert "git+https://github.com/NVIDIA/apex" in apex(NODE).fix
    assert apex(LAPTOP).fix == "pip uninstall --yes apex"
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert (apex(NODE).state, apex(NODE).fix) == ("ok", "")


def test_the_tested_versions_are_those_of_the_lock_file():
    with (Path(__file__).parents[2] / "requirements" / "cpu.txt").open() as lock:
        locked = dict(line.split(" ;")[0].strip().split("==") for line in lock if "==" in line)
    for part in doctor.PARTS:
        if "cpu" in part.on:
            assert locked[part.distribution].split("+")[0] == part.version


def test_the_models_are_listed_on_one_screen_from_the_checks_that_refuse_them():
    console = Console(width=100, record=True, file=StringIO())
    doctor.show_families(console)
    lines = console.export_text().splitlines()
    assert "\n".join(line.rstrip() for line in lines) in (DOCS / "models.md").read_text()
    assert len(lines) <= 50
    assert max(len(line.rstrip()) for line in lines) <= 100
    printed = " ".join(" ".join(lines).split())
    for name in (*FAMILIES, *REFUSED):
        assert name in printed
    bound = [EXPECTED, *(family.only for family in FAMILIES.values())]
    for key, (_, words) in ((key, rule) for rules in bound for key, rule in rules.items()):
        assert f"{key}: {words}" in printed or f"{key} {words}" in printed


@looped("model_type", REFUSED)
def test_a_refused_family_is_refused_with_the_reason_that_is_listed(model_type):
    found = unsupported({"model_type": model_type})
    assert found is not None
    assert found.key == "model_type"
    assert REFUSED[model_type] in found.supported


def test_every_finding_is_the_one_on_its_page(monkeypatch, tmp_path):
    """On several machines and installations."""
    monkeypatch.setattr(doctor, "ROOT", Path("/checkout"))
    monkeypatch.setattr(doctor, "CHECKOUT", True)
    monkeypatch.setattr(doctor, "run", lambda source: None)
    monkeypatch.setattr(sys, "version_info", (3, 12, 9))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    declared = ["torch<2.14,>=2.13; extra == 'cpu'", "torch<9; extra == 'gpu'", "ray>=2"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    gpu = Gpu("H100", 80 * GIB, capability=(9, 0))
    hopper = replace(NODE, gpus=(gpu, gpu), transformer_engine="2.9.0")
    edge = Machine(cores=2, memory=6 * GIB, shared_memory=GIB // 2, gpus=())
    below = replace(edge, cores=1, memory=6 * GIB - 1, shared_memory=GIB // 2 - 1)
    exact = {**TESTED, "torch": "2.13.0+cpu", "apex": "1"}
    cases = {
        "edge": (edge, exact, "none|False|built|not built|AVX512", {"avx512f", "avx512_bf16"}),
        "below": (
            below,
            exact | {"torch": "2.13.5"},
            "none|False|not built|not built|DEFAULT",
            set(),
        ),
        "hopper": (hopper, exact | {"torch": "3.0"}, "13.0|True|built|built|AVX2", {"amx_bf16"}),
        "older CUDA": (hopper, {"ray": "1.0"}, "12.0|False|built|not built|AVX2", {"avx512f"}),
        "no CUDA": (hopper, {}, "none|False|built|not built|AVX2", set()),
    }
    text = ""
    for name, (machine, versions, answer, flags) in cases.items():
        install(monkeypatch, **versions)
        monkeypatch.setattr(
            doctor, "_torch", lambda path, answer=answer: doctor._torch_findings(answer, path)
        )
        monkeypatch.setattr(doctor, "_query_output", lambda code: ("", "it failed"))
        findings = doctor.examine(replace(machine, cpu_flags=frozenset(flags)))
        for settings in ({}, {"fix_hints": True}, {"as_json": True}):
            console = RecordedConsole()
            code = doctor.show(findings, console, **settings)
            text += f"$ {name} {settings} {code}\n{console.text}\n"
    console = RecordedConsole()
    fine = [doctor.Finding("a", "ok", "1", "b")]
    text += f"{doctor.show(fine, console, fix_hints=True)}\n{console.text}"
    require_page("doctor", text)


def test_probes_report_the_last_line_of_their_output(monkeypatch, tmp_path):
    assert doctor._query_output("print('a'); print('b ')") == ("b", "")
    assert doctor._query_output("pass") == ("", "")
    assert doctor._query_output("raise ImportError('x')") == ("", "ImportError: x")
    assert doctor._query_output("raise SystemExit(3)") == ("", "exit code 3")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.0)
    assert doctor._query_output("pass") == ("", "took more than 0 s")


def test_torch_that_cannot_be_imported_is_one_finding(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_query_output", lambda code: ("", "no libc10.so"))
    (found,), cuda = doctor._torch("cpu")
    assert (found.part, found.state, found.found, cuda) == (
        "import torch",
        "missing",
        "no libc10.so",
        None,
    )
    assert found.fix.startswith("pip install --force-reinstall --no-deps --index-url")
    monkeypatch.setattr(doctor, "_query_output", lambda code: ("13.0|True|built|built|AVX2", ""))
    findings, cuda = doctor._torch("cuda")
    assert ([one.state for one in findings], cuda) == (["ok"] * 4, "13.0")


def test_metadata_that_cannot_be_read_gives_no_ranges(monkeypatch):
    for error in (importlib.metadata.PackageNotFoundError("x"), doctor.InvalidRequirement("y")):

        def requires(name: str, error: Exception = error) -> list[str]:
            raise error

        monkeypatch.setattr(importlib.metadata, "requires", requires)
        assert doctor._ranges("cpu") == {}


def test_a_sandbox_that_cannot_be_tried_is_a_note(monkeypatch):
    def broken(source: str) -> None:
        raise OSError("no fork")

    monkeypatch.setattr(doctor, "run", broken)
    assert doctor._sandbox() == doctor.Finding("sandbox", "note", "not tested", "no fork")

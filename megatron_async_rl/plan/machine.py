"""Resources of this machine, read from the operating system: cores, memory, shared memory, GPUs.
Loads no GPU library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megatron_async_rl.config.policy import version_of
from megatron_async_rl.policy.families import PINNED
from megatron_async_rl.watchdog.host_memory import free_bytes, total_bytes

GIB = 2**30
MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
NVIDIA_SMI_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A model of GPU on its SXM board, according to NVIDIA's data sheet. Per second: floating-point
    operations of dense GEMMs in bfloat16 and in FP8 (null: unsupported), bytes of its own memory.
    `sizes`: GiB of memory with which it is sold."""

    name: str
    sizes: tuple[float, ...]
    capability: tuple[int, int]
    bfloat16: float
    fp8: float | None
    memory_rate: float


# Data sheets give dense rates; sparse ones are twice as high and never reached.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="h100",
            sizes=(80,),
            capability=(9, 0),
            bfloat16=989e12,
            fp8=1979e12,
            memory_rate=3.35e12,
        ),
        Chip(
            name="h200",
            sizes=(141,),
            capability=(9, 0),
            bfloat16=989e12,
            fp8=1979e12,
            memory_rate=4.8e12,
        ),
        Chip(
            name="b200",
            sizes=(180, 192),
            capability=(10, 0),
            bfloat16=2250e12,
            fp8=4500e12,
            memory_rate=7.7e12,
        ),
        Chip(
            name="a100",
            sizes=(80, 40),
            capability=(8, 0),
            bfloat16=312e12,
            fp8=None,
            memory_rate=2.04e12,
        ),
    )
}
"""GPUs whose speed a plan can estimate. If a machine is described by its memory alone, the first
GPU with that memory is assumed."""
ON_A_CARD = re.compile(r"PCIe|NVL|MIG", re.IGNORECASE)
"""Matches the names of slower variants of these GPUs."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Memory in bytes."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; null if unknown."""
    used: int = 0
    """Bytes of `memory` in use by all processes."""
    index: str = ""
    """Index of the GPU in nvidia-smi."""
    users: tuple[str, ...] = ()
    """Descriptions of the processes on it, as far as they are visible: not from inside a
    container."""


@dataclass(frozen=True)
class Machine:
    """`memory` and `shared_memory` in bytes: the total that may be used, and the free part of
    /dev/shm (0: there is none). `described`: True if it was described on the command line, so that
    only its GPUs are known and no files are. `transformer_engine`: its version, null if it is
    not installed; for a described machine that of requirements/gpu.txt.

    `nodes`: number of machines like this one with ranks, each with equally many; the first has the
    engines that get their weights by shared memory. `engine_nodes`: further machines like this one,
    with engines alone.
    """

    cores: int
    memory: int
    shared_memory: int
    gpus: tuple[Gpu, ...]
    nodes: int = 1
    engine_nodes: int = 0
    described: bool = False
    transformer_engine: str | None = None
    free_memory: int | None = None
    """Bytes of `memory` that no other program holds; null if unknown."""


def size(count: int) -> str:
    """Return a text for a number of bytes, in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def described_machine(
    *,
    gpus: int,
    gpu_memory_gib: float,
    nodes: int,
    engine_nodes: int = 0,
    chip: Chip | None = None,
) -> Machine:
    """Return `nodes` machines with ranks and `engine_nodes` without, of `gpus` GPUs each, without
    further details."""
    # chip_of finds the chip again by this name.
    name = chip.name.upper() if chip is not None else "GPU"
    gpu = Gpu(
        f"{name} of {gpu_memory_gib:g} GiB",
        int(gpu_memory_gib * GIB),
        chip.capability if chip is not None else None,
    )
    return Machine(
        cores=0,
        memory=0,
        shared_memory=0,
        gpus=(gpu,) * gpus,
        nodes=nodes,
        engine_nodes=engine_nodes,
        described=True,
        # The version that requirements/gpu.txt installs on such a machine.
        transformer_engine=PINNED,
    )


def chip_of(machine: Machine) -> Chip | None:
    """Return the model of the machine's GPUs: by name or, if they are described by their memory
    alone, the model with that memory. Null: not in CHIPS."""
    # PCIe, NVL and MIG variants are slower than the data sheet of the SXM board.
    if not machine.gpus or ON_A_CARD.search(machine.gpus[0].name):
        return None
    gpu = machine.gpus[0]
    named = [chip for chip in CHIPS.values() if re.search(rf"\b{chip.name}\b", gpu.name, re.I)]
    # Memory alone identifies a GPU only if a user described it so.
    if named or not machine.described:
        return named[0] if named else None
    alike = (
        chip
        for chip in CHIPS.values()
        if any(abs(gpu.memory / GIB - sold) < 0.05 * sold for sold in chip.sizes)
    )
    return next(alike, None)


def this_machine(nodes: int = 1, engine_nodes: int = 0) -> Machine:
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Machine(
        cores=usable_cores(),
        memory=total_bytes(),
        free_memory=free_bytes(),
        shared_memory=shared,
        gpus=gpus_here(os.environ.get("CUDA_VISIBLE_DEVICES")),
        nodes=nodes,
        engine_nodes=engine_nodes,
        transformer_engine=_transformer_engine(),
    )


def _transformer_engine() -> str | None:
    """Return the version of Transformer Engine if it is installed with its part for torch. It loads
    that part as a file by its path: next to the package, in it, or in its `wheel_lib`, depending on
    how it was built."""
    found = find_spec("transformer_engine")
    places = found.submodule_search_locations if found is not None else None
    if not any(
        any(folder.glob("transformer_engine_torch*.so"))
        for place in map(Path, places or ())
        for folder in (place.parent, place, place / "wheel_lib")
    ):
        return None
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        # Its parts alone cannot be imported: they require the version of this package, too.
        return "not known"


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the
    container's quota."""
    # Not os.cpu_count(), which ignores affinity.
    cores = len(os.sched_getaffinity(0))
    try:
        # Containers limit time instead of cores.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def gpus_here(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in their present state: those that CUDA would show with `visible` as
    CUDA_VISIBLE_DEVICES, null for all."""
    # CUDA's two ways of hiding every GPU.
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    rows = _query_output(
        command, "--query-gpu=index,uuid,name,memory.total,compute_cap,memory.used"
    )
    if visible is not None:
        wanted = [one.strip() for one in visible.split(",")]
        # In the order of the variable, which is the order of CUDA's device numbers.
        rows = [row for one in wanted for row in rows if one == row[0] or row[1].startswith(one)]
    users = _users(command) if any(row[5].isdigit() and int(row[5]) for row in rows) else {}
    return tuple(
        Gpu(
            row[2],
            int(row[3]) * MIB,
            version_of(row[4]),
            used=int(row[5]) * MIB if row[5].isdigit() else 0,
            index=row[0],
            users=tuple(users.get(row[1], ())),
        )
        for row in rows
        # nvidia-smi prints [N/A] for a value that a driver does not report.
        if row[3].isdigit()
    )


def _users(command: str) -> dict[str, list[str]]:
    """Return the processes with memory on a GPU, by its uuid."""
    users: dict[str, list[str]] = {}
    query = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
    for gpu, pid, used, name in _query_output(command, query):
        memory = f", {int(used) * MIB / GIB:.1f} GiB" if used.isdigit() else ""
        users.setdefault(gpu, []).append(f"pid {pid} ({Path(name).name}{memory})")
    return users


def _query_output(command: str, query: str) -> list[list[str]]:
    """Return the rows of nvidia-smi's answer. None if the tool exists without a working driver:
    there is no usable GPU, and `mar doctor` reports it."""
    try:
        answer = subprocess.run(
            [command, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    # The last field, a process name, may contain commas.
    commas = query.count(",")
    lines = [line for line in answer.splitlines() if line.count(",") >= commas]
    return [[cell.strip() for cell in line.split(",", commas)] for line in lines]

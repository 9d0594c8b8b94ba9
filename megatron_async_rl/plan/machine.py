"""Resources of a machine: cores, memory, shared memory and GPUs, from the operating system or from
the command line. Loads no GPU library."""

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
    """GPU model on its SXM board, from NVIDIA's data sheet."""

    name: str
    sizes: tuple[float, ...]
    """Memory sizes that are sold, in GiB."""
    capability: tuple[int, int]
    """CUDA's compute capability."""
    bfloat16: float
    """FLOP/s of dense GEMMs in bfloat16."""
    fp8: float | None
    """FLOP/s of dense GEMMs in FP8; null if unsupported."""
    memory_rate: float
    """HBM bandwidth in bytes per second."""

    @property
    def fp8_speed(self) -> float:
        """Peak of FP8 relative to that of bfloat16; 1 if FP8 is unsupported."""
        return 1.0 if self.fp8 is None else self.fp8 / self.bfloat16


# Dense rates: the sparse rates of data sheets are twice as high, and training does not use them.
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
"""GPUs whose speed a plan can estimate. For a machine described by its GPU memory alone, the plan
assumes the first GPU with that memory."""
SLOWER_VARIANTS = re.compile(r"PCIe|NVL|MIG", re.IGNORECASE)
"""Matches the names of variants that are slower than the SXM board."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Memory in bytes."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; null if unknown."""
    used: int = 0
    """Bytes of `memory` that all processes use."""
    index: str = ""
    """Index of the GPU in nvidia-smi."""
    users: tuple[str, ...] = ()
    """Descriptions of the processes on it; empty inside a container, where they are not
    visible."""


@dataclass(frozen=True)
class Machine:
    """One of the equal machines of a run, and their number."""

    cores: int
    memory: int
    """Host memory that the run may use, in bytes; 0 if unknown."""
    shared_memory: int
    """Free bytes of /dev/shm; 0 if it does not exist."""
    gpus: tuple[Gpu, ...]
    nodes: int = 1
    """Number of machines with ranks, each with the same number of ranks. Engines that receive
    weights through shared memory run on the first one."""
    engine_nodes: int = 0
    """Number of further machines, with engines only."""
    described: bool = False
    """True if the command line describes the machine: its cores and files are then unknown."""
    transformer_engine: str | None = None
    """Installed version of Transformer Engine, null if there is none; for a described machine, the
    version in requirements/gpu.txt."""
    free_memory: int | None = None
    """Bytes of `memory` that no other program holds; null if unknown."""
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets of the CPU, by Linux's names for x86; empty if unknown."""

    @property
    def lacks_bfloat16(self) -> bool:
        """True if the CPU is known to have no instructions that multiply bfloat16 numbers."""
        return bool(self.cpu_flags) and not self.cpu_flags & {"avx512_bf16", "amx_bf16"}


def size(count: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def described_machine(
    *,
    gpus: int,
    gpu_memory_gib: float,
    nodes: int,
    engine_nodes: int = 0,
    chip: Chip | None = None,
) -> Machine:
    """Return the description of `nodes` machines with ranks and `engine_nodes` without, with `gpus`
    GPUs each."""
    # chip_of finds the chip by this name.
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
    """Return the model of the machine's GPUs by their name, or by their memory if the command line
    describes only that. None if the model is not in CHIPS."""
    # CHIPS has the rates of the SXM board, which its PCIe, NVL and MIG variants do not reach.
    if not machine.gpus or SLOWER_VARIANTS.search(machine.gpus[0].name):
        return None
    gpu = machine.gpus[0]
    named = [chip for chip in CHIPS.values() if re.search(rf"\b{chip.name}\b", gpu.name, re.I)]
    # Memory identifies a model only in a description: real GPUs of other models have it, too.
    if named or not machine.described:
        return named[0] if named else None
    matching = (
        chip
        for chip in CHIPS.values()
        if any(abs(gpu.memory / GIB - sold) < 0.05 * sold for sold in chip.sizes)
    )
    return next(matching, None)


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
        cpu_flags=_cpu_flags(),
    )


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))


def _transformer_engine() -> str | None:
    """Return the version of Transformer Engine; None unless its extension for torch is
    installed."""
    # The extension is next to the package, in it, or in its wheel_lib, depending on the build.
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
        # Parts without the package itself: the import fails, and `mar doctor` reports it.
        return "not known"


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's CPU
    quota."""
    # os.cpu_count() ignores the affinity.
    cores = len(os.sched_getaffinity(0))
    try:
        # A container limits CPU time per period; it does not hide cores.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def gpus_here(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows if CUDA_VISIBLE_DEVICES is `visible` (None: unset), with
    their memory in use now."""
    # Both values hide every GPU from CUDA.
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    rows = _query_output(
        command, "--query-gpu=index,uuid,name,memory.total,compute_cap,memory.used"
    )
    if visible is not None:
        names = [one.strip() for one in visible.split(",")]
        # CUDA numbers its devices in the order of the variable.
        rows = [row for one in names for row in rows if one == row[0] or row[1].startswith(one)]
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
        # nvidia-smi prints [N/A] for a value that the driver does not report.
        if row[3].isdigit()
    )


def _users(command: str) -> dict[str, list[str]]:
    """Return descriptions of the processes with memory on each GPU, by the GPU's UUID."""
    users: dict[str, list[str]] = {}
    query = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
    for gpu, pid, used, name in _query_output(command, query):
        memory = f", {int(used) * MIB / GIB:.1f} GiB" if used.isdigit() else ""
        users.setdefault(gpu, []).append(f"pid {pid} ({Path(name).name}{memory})")
    return users


def _query_output(command: str, query: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; empty if it fails."""
    # It fails without a working driver. Then there is no usable GPU, as `mar doctor` reports.
    try:
        output = subprocess.run(
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
    lines = [line for line in output.splitlines() if line.count(",") >= commas]
    return [[cell.strip() for cell in line.split(",", commas)] for line in lines]

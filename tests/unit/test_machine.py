"""Resources of a machine: its cores by affinity and quota, and its GPUs by nvidia-smi."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatron_async_rl.plan import machine
from megatron_async_rl.plan.machine import (
    CHIPS,
    GIB,
    MIB,
    Gpu,
    Machine,
    chip_of,
    described_machine,
    gpus_here,
    this_machine,
    usable_cores,
)


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        (None, 6),
        ("max 100000\n", 6),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("900000 100000\n", 6),
        ("strange\n", 6),
    ],
)
def test_cores_are_those_of_affinity_and_quota(
    content: str | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path, encoding: str) -> str:
        assert (str(path), encoding) == ("/sys/fs/cgroup/cpu.max", "utf-8")
        if content is None:
            raise FileNotFoundError(path)
        return content

    # 0 is this process.
    monkeypatch.setattr(os, "sched_getaffinity", {0: range(6)}.__getitem__)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert usable_cores() == cores


LISTED = """\
0, GPU-aa1, NVIDIA H100 80GB HBM3, 81559, 9.0, 0
1, GPU-ab2, NVIDIA H100 80GB HBM3, 81559, 9.0, 1024
2, GPU-cc3, Odd, [N/A], 7.5, 3
3, GPU-dd4, T4, 15360, [N/A], [N/A]
broken line
"""
USED = """\
GPU-ab2, 17, 2048, /usr/bin/python, -m x
GPU-ab2, 18, [N/A], vllm
GPU-zz9, 19, 1, other
"""
FIRST = Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, (9, 0), index="0")
SECOND = Gpu(
    "NVIDIA H100 80GB HBM3",
    81559 * MIB,
    (9, 0),
    used=1024 * MIB,
    index="1",
    users=("pid 17 (python, -m x, 2.0 GiB)", "pid 18 (vllm)"),
)
FOURTH = Gpu("T4", 15360 * MIB, None, index="3")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program nvidia-smi that prints LISTED and USED."""
    path = tmp_path / "nvidia-smi"
    used = f"cat <<'END'\n{USED}END\n"
    path.write_text(
        '#!/bin/sh\n[ "$2" = --format=csv,noheader,nounits ] || exit 3\n'
        f"case \"$1\" in --query-compute-apps*)\n{used};;\n*)\ncat <<'END'\n{LISTED}END\n;;\nesac\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def test_gpus_are_those_that_cuda_shows_in_its_order(program: Path) -> None:
    for visible, gpus in (
        (None, (FIRST, SECOND, FOURTH)),
        ("", ()),
        (" -1 ", ()),
        ("3, 0", (FOURTH, FIRST)),
        ("GPU-a", (FIRST, SECOND)),
        ("GPU-ab", (SECOND,)),
        ("2", ()),
        ("7", ()),
    ):
        assert gpus_here(visible) == gpus, visible


def test_a_machine_whose_nvidia_smi_fails_has_no_gpu(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_here(None) == ()
    program.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(machine, "NVIDIA_SMI_TIMEOUT_S", 0.01)
    assert gpus_here(None) == ()
    program.unlink()
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert gpus_here(None) == ()


def test_processes_are_looked_up_only_for_memory_in_use(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    query = machine._query_output

    def counted(command: str, text: str) -> list[list[str]]:
        queries.append(text)
        return query(command, text)

    monkeypatch.setattr(machine, "_query_output", counted)
    gpus_here("0,3")
    assert len(queries) == 1
    gpus_here("1")
    assert queries[2] == "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"


def test_this_machine_counts_what_a_run_may_use(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name, value in (("usable_cores", 3), ("total_bytes", 7), ("free_bytes", 5)):
        monkeypatch.setattr(machine, name, lambda value=value: value)
    monkeypatch.setattr(machine, "_transformer_engine", lambda: "2.9")
    monkeypatch.setattr(machine, "_cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    expected = Machine(
        cores=3,
        memory=7,
        shared_memory=0,
        gpus=(FOURTH,),
        nodes=2,
        engine_nodes=1,
        transformer_engine="2.9",
        free_memory=5,
        cpu_flags=frozenset({"avx2"}),
    )
    assert this_machine(2, 1) == expected
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert this_machine().shared_memory > 0


def test_a_chip_is_recognised_by_its_memory_only_in_a_description() -> None:
    for memory, name in ((80, "h100"), (83.9, "h100"), (84.1, None), (76.1, "h100"), (75.9, None)):
        machine = described_machine(gpus=2, gpu_memory_gib=memory, nodes=1)
        found = chip_of(machine)
        assert (found.name if found else None) == name, memory
    b200 = described_machine(
        gpus=3, gpu_memory_gib=180, nodes=2, engine_nodes=4, chip=CHIPS["b200"]
    )
    gpu = Gpu("B200 of 180 GiB", 180 * GIB, (10, 0))
    assert b200.gpus == (gpu,) * 3
    assert (b200.nodes, b200.engine_nodes, b200.described, b200.cores) == (2, 4, True, 0)
    real = Machine(cores=1, memory=1, shared_memory=0, gpus=(Gpu("Other", 80 * GIB),))
    assert chip_of(real) is None
    assert chip_of(Machine(cores=1, memory=1, shared_memory=0, gpus=())) is None
    for name in ("NVIDIA H100 PCIe", "H100 NVL", "NVIDIA A100 MIG 1g.5gb"):
        slower = Machine(cores=1, memory=1, shared_memory=0, gpus=(Gpu(name, 80 * GIB),))
        assert chip_of(slower) is None


def test_flags_of_the_cpu_are_read_where_the_system_lists_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(text: str) -> frozenset[str]:
        monkeypatch.setattr(Path, "read_text", lambda *given, **options: text)
        return machine._cpu_flags()

    assert read("processor: 0\nflags\t\t: fpu avx2\nflags\t\t: other\n") == {"fpu", "avx2"}
    assert read("Features: neon\n") == set()

    def missing(*given: object, **options: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert machine._cpu_flags() == set()

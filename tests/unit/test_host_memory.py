"""Exhausted host memory is distinguished from a device's, with who holds it and what helps."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray.exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from rich.console import Console

from megatron_async_rl import train
from megatron_async_rl.config.load import load
from megatron_async_rl.flow.errors import EngineMemoryOut, FlowError
from megatron_async_rl.launch.ending import explain_failure
from megatron_async_rl.plan.fit import HostMemoryOut, memory_ran_out
from megatron_async_rl.plan.host import free_memory_problems
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.rollout.vllm import client
from megatron_async_rl.rollout.vllm.client import EngineDied
from megatron_async_rl.watchdog import host_memory
from megatron_async_rl.watchdog.events import failure_of, out_of_memory
from megatron_async_rl.watchdog.host_memory import KillCount, LoggedKill, kills_in
from megatron_async_rl.watchdog.logs import PRIMARY, SECONDARY
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.watch import KilledForMemory, ProcessDied, answer_of, ray_get
from tests.cases import looped
from tests.written_run import write_run

FROM_RAY = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.7, \
ID: e23bf5) was 22.41GB used / 23.54GB limit (0.952)
OOM kill reason: Memory usage 24062869504B exceeded threshold of 24012685312B (95.0%)
Object store memory usage: [- objects spillable: 0
Eviction Stats:
(global lru) capacity: 104857600]
Ray killed 1 worker(s) based on the killing policy
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
16631\t11.50\tpython another_program.py
17562\t6.19\tray::RolloutEngine.submit
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io ...
"""
FROM_TORCH = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 4096000000000 bytes. Error code 12 (Cannot allocate memory)"
)


class Kernel:
    """Count of the kernel's kills, in this process's cgroup where `own`; its log, where that can be
    read; and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, own: bool = True) -> None:
        self.kills = 0
        self.seconds = 1000.0
        self.log: list[LoggedKill] | None = None
        kills = host_memory.KernelKills(
            lambda: KillCount(self.kills, own), lambda: self.seconds, lambda: self.log
        )
        monkeypatch.setattr(host_memory, "_kills", kills)


class Call:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __await__(self) -> Any:
        raise self._error
        yield


def answered(error: Exception) -> ProcessDied:
    async def body() -> None:
        await answer_of(Call(error))

    with pytest.raises(ProcessDied) as caught:
        asyncio.run(body())
    return pickle.loads(pickle.dumps(caught.value))  # type: ignore[no-any-return]


def test_rays_memory_monitor_ends_an_engine_for_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = answered(ray.exceptions.OutOfMemoryError(FROM_RAY))
    assert str(died) == (
        "Ray's memory monitor ended it, as host memory was nearly out: node 192.0.2.7 had 22.41GB"
        " used / 23.54GB; largest processes: pid 16631 11.50 GB python another_program.py; pid"
        " 17562 6.19 GB ray::RolloutEngine.submit"
    )
    assert out_of_memory(died) == "host"
    assert failure_of(died, Path("log")).kind == PRIMARY

    def get(ref: object, timeout: float) -> None:
        raise ray.exceptions.OutOfMemoryError("another version's words\nmore")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(KilledForMemory, match=r"waited for a report.*another version's words;"):
        ray_get(object(), "a report", 1.0)


def test_kills_by_the_kernel_are_distinguished_from_other_deaths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = answered(ray.exceptions.ActorDiedError())
    assert out_of_memory(died) is None
    assert failure_of(died, Path("log")).kind == SECONDARY
    kernel = Kernel(monkeypatch)
    kernel.kills += 2
    killed = answered(ray.exceptions.ActorDiedError())
    assert out_of_memory(killed) == "host"
    assert killed.outside
    assert "has ended 2 processes" in str(killed)
    assert "largest processes: pid " in str(killed)
    assert out_of_memory(answered(ray.exceptions.ActorDiedError())) == "host"
    third = answered(ray.exceptions.ActorDiedError())
    assert out_of_memory(third) is None, "two kills explain two deaths"
    assert not third.outside


def test_an_old_kill_of_the_kernel_explains_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    kernel.kills += 1
    kernel.seconds += 2.0

    async def answers() -> None:
        await answer_of(asyncio.sleep(0))

    asyncio.run(answers())
    kernel.seconds += host_memory.RECENT_S + 1.0
    assert out_of_memory(answered(ray.exceptions.ActorDiedError())) is None


def actor(pid: int, address: str = "127.0.0.1") -> ray.exceptions.ActorDiedError:
    cause = ActorDiedErrorContext(
        error_message="The actor died.",
        actor_id=bytes(16),
        class_name="RolloutEngine",
        pid=pid,
        node_ip_address=address,
    )
    return ray.exceptions.ActorDiedError(cause)


def test_the_kernels_log_names_the_death_that_a_kill_explains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    kernel.kills += 1  # of another program, whatever counts it
    kernel.log = [LoggedKill(66, "chrome", at=995.0), LoggedKill(7, "python", at=900.0)]
    died = answered(actor(7))
    assert (out_of_memory(died), died.outside) == (None, False)
    assert "kernel" not in str(died)
    spec: Any = SimpleNamespace(name="engine-0", log_dir=tmp_path, log=tmp_path / "engine-0.log")
    monkeypatch.setattr(client, "_vllm_processes", frozenset({8, 9}))
    assert out_of_memory(EngineDied(spec, "it worked")) is None

    kernel.log = [
        LoggedKill(7, "ray::RolloutEng", at=995.0),
        LoggedKill(9, "VLLM::Worker", at=999.0),
    ]
    killed = answered(actor(7))
    assert (out_of_memory(killed), killed.outside) == ("host", True)
    assert "The kernel has ended pid 7 (ray::RolloutEng) for lack of host memory;" in str(killed)
    assert "may be the cause" not in str(killed)
    error = pickle.loads(pickle.dumps(EngineDied(spec, "it worked")))
    assert (out_of_memory(error), error.outside) == ("host", True)
    assert "pid 9 (VLLM::Worker)" in str(error)


def test_a_count_of_the_whole_machine_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, own=False)
    kernel.kills += 1
    for _ in range(2):
        died = answered(actor(7))
        assert (out_of_memory(died), died.outside) == (None, False)
        assert "This may be the cause, or concern another process: In the last 1 s" in str(died)
        assert failure_of(died, Path("log")).kind == SECONDARY


def test_a_death_of_no_known_process_is_possibly_a_kill_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Kernel(monkeypatch).log = [LoggedKill(66, "chrome", at=995.0)]
    died = answered(ray.exceptions.ActorDiedError())
    assert out_of_memory(died) is None
    assert "may be the cause, or concern another process: The kernel has ended pid 66" in str(died)


def test_kills_are_read_from_the_kernels_records() -> None:
    records = (
        "6,811,10932565486,-;python[2332]: segfault at 0\n SUBSYSTEM=x\n"
        "3,812,10933000001,-;Memory cgroup out of memory: Killed process 17 (VLLM::Engine(0)) "
        "total-vm:8kB, anon-rss:4kB\n"
        "3,813,10934000000,c;Out of memory: Killed process 18 (python) total-vm:8kB\n"
    )
    assert kills_in(records) == [
        LoggedKill(17, "VLLM::Engine(0)", 10933.000001),
        LoggedKill(18, "python", 10934.0),
    ]
    assert host_memory.logged_kills() is None or isinstance(host_memory.logged_kills(), list)


@pytest.mark.parametrize(("address", "memory"), [("127.0.0.1", "host"), ("192.0.2.7", None)])
def test_this_machines_kernel_explains_no_death_on_another_one(
    address: str, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernel(monkeypatch).kills += 1
    assert out_of_memory(answered(actor(7, address))) == memory


def test_vllms_process_ended_by_the_kernel_is_no_requests_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = SimpleNamespace(name="engine-0", log_dir=tmp_path, log=tmp_path / "engine-0.log")
    kernel = Kernel(monkeypatch)
    died = EngineDied(spec, "it worked on 7 responses")
    assert (died.outside, out_of_memory(died)) == (False, None)
    kernel.kills += 1
    errors = [EngineDied(spec, "it worked on 7 responses") for _ in range(2)]
    kernel.seconds += host_memory.RECENT_S + 1.0  # the reader's kernel ended none
    for error in errors:
        read = pickle.loads(pickle.dumps(error))
        assert (read.outside, out_of_memory(read)) == (True, "host")
        assert str(read) == str(error)
        assert "has ended a process of this container" in str(read)
    later = EngineDied(spec, "it worked on 7 responses")
    assert (later.outside, out_of_memory(later)) == (False, None)


def test_the_launcher_reports_that_the_kernel_ended_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    killed = (
        "  rank      : 1 (local_rank: 1)\n  traceback : Signal 9 (SIGKILL) received by PID 77\n"
    )
    (tmp_path / "logs" / "torchrun.log").write_text(killed)

    def explained() -> str:
        written = io.StringIO()
        explain_failure(tmp_path, Console(file=written, width=200))
        return written.getvalue()

    kernel = Kernel(monkeypatch)
    kernel.log = [LoggedKill(66, "chrome", at=995.0)]
    assert "for lack of host memory" not in explained()
    kernel.log = [LoggedKill(77, "python", at=995.0)]
    assert "The kernel has ended pid 77 (python) for lack of host memory" in explained()
    Kernel(monkeypatch).kills += 1
    assert "rank 1: Signal 9 (SIGKILL) received by PID 77" in explained()
    assert "the kernel has ended a process of this container" in explained()


@looped(
    ("error", "memory"),
    [
        (MemoryError(), "host"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (RuntimeError(FROM_TORCH), "host"),
        (RuntimeError("did not start: RuntimeError: ... MemoryError: no room"), "host"),
        (ray.exceptions.OutOfMemoryError(FROM_RAY), "host"),
        (EngineMemoryOut("no engine is left", "generate", "host"), "host"),
        (EngineMemoryOut("no engine is left", "generate"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (RuntimeError("torch.OutOfMemoryError: CUDA out of memory"), "device"),
        (ValueError("Free memory on device cuda:0 is less than desired"), "device"),
        (FlowError("a prompt holds: out of memory"), None),
        (OSError(28, "No space left on device"), None),
    ],
)
def test_the_memory_that_ran_out_is_named(error: Exception, memory: str | None) -> None:
    assert out_of_memory(error) == memory
    later = FlowError("the run ends")
    later.__cause__ = error
    assert out_of_memory(later) == memory


def test_a_host_error_lists_processes_and_keys_of_the_device_in_use(tmp_path: Path) -> None:
    config = load(write_run(tmp_path), ["rollout.engines=2"])
    error = EngineMemoryOut("no engine is left: Ray's memory monitor ended it", "generate", "host")
    on_cpu = memory_ran_out(error, config, "train", dict, on_cpu=True)
    assert isinstance(on_cpu, HostMemoryOut)
    assert "host memory ran out in phase generate" in str(on_cpu)
    assert "largest processes: pid " in str(on_cpu)
    assert "rollout.kv_cache_gib: 0.5" in on_cpu.fix
    assert "rollout.engines: 1" in on_cpu.fix
    assert "gpu_memory_utilization" not in on_cpu.fix
    assert "rollout.tensor" not in on_cpu.fix
    on_gpu = memory_ran_out(error, config, "train", dict, on_cpu=False)
    assert isinstance(on_gpu, HostMemoryOut)
    assert "checkpoint.asynchronous: false" in on_gpu.fix
    assert "kv_cache_gib" not in on_gpu.fix
    vllm = RuntimeError("No available memory for the cache blocks.")
    assert isinstance(memory_ran_out(vllm, config, "train", dict, on_cpu=True), HostMemoryOut)


def test_a_rank_whose_device_answers_nothing_reports_the_error_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, int]:
        raise RuntimeError("the device does not answer")

    config, error = load(write_run(tmp_path)), RuntimeError("CUDA error: out of memory")
    trainer: Any = SimpleNamespace(devices=SimpleNamespace(current="train"), held=broken)
    assert train._explained(error, config, trainer, "cuda") is error
    assert "RuntimeError: the device does not answer" in capsys.readouterr().err
    trainer.held = lambda: {"gradients": 3 * GIB}
    explained = train._explained(error, config, trainer, "cuda")
    assert "in phase train; this rank's holds gradients 3.0 GiB" in str(explained)
    no_memory = RuntimeError(FROM_TORCH)
    assert isinstance(train._explained(no_memory, config, trainer, "cpu"), HostMemoryOut)
    other = ValueError("no")
    assert train._explained(other, config, trainer, "cpu") is other


def test_a_run_without_free_memory_is_refused_before_it_starts(tmp_path: Path) -> None:
    config = load(write_run(tmp_path))
    roomy = Machine(cores=2, memory=64 * GIB, shared_memory=8 * GIB, gpus=(), free_memory=32 * GIB)
    plan = preflight(config, all_data=False, machine=roomy)

    def problems(machine: Machine) -> list[Any]:
        return free_memory_problems(config, machine, plan.device, plan.hosts)

    assert problems(roomy) == problems(replace(roomy, free_memory=None)) == []
    (problem,) = problems(replace(roomy, free_memory=GIB // 2))
    assert problem.key == "host memory"
    assert "0.5 GiB are free; largest processes: pid " in problem.what
    assert "end other programs" in problem.fix
    # A quarter of the estimated parts may not be needed.
    (host,) = plan.hosts
    least = host.certain + (host.total - host.certain) * 3 // 4
    assert problems(replace(roomy, free_memory=least + 1)) == []
    assert problems(replace(roomy, free_memory=least - 1)) != []


def test_every_machine_of_ranks_has_a_launcher(tmp_path: Path) -> None:
    config = load(write_run(tmp_path), ["policy.parallel.ranks=2"])
    machine = Machine(cores=2, memory=64 * GIB, shared_memory=8 * GIB, gpus=(), nodes=2)
    hosts = preflight(config, all_data=False, machine=machine).hosts
    launchers = [
        (host.first, host.count) for host in hosts for part in host.parts if part.name == "launcher"
    ]
    assert launchers == [(0, 1), (1, 1)]


def test_the_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cgroup"
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", own)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    inner, root = tmp_path / "job" / "task", tmp_path
    inner.mkdir(parents=True)
    own.write_text("0::/job/task\n")
    (inner / "memory.max").write_text("max\n")
    (root / "job" / "memory.max").write_text(f"{GIB}\n")
    (root / "job" / "memory.current").write_text(f"{3 * GIB // 4}\n")
    (root / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 8}\n")
    (inner / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert host_memory.total_bytes() == GIB
    assert host_memory.free_bytes() == GIB // 4 + GIB // 8
    assert host_memory.kernel_kills() == KillCount(3, own=True)
    old = tmp_path / "memory" / "task"
    old.mkdir(parents=True)
    own.write_text("9:cpu:/\n4:memory:/task\n0::/\n")
    (old / "memory.limit_in_bytes").write_text(f"{GIB // 2}\n")
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert host_memory.total_bytes() == GIB // 2
    assert host_memory.kernel_kills() == KillCount(7, own=True)


@looped("old", [False, True])
@looped("inner_limit", [None, 64, 2])
def test_free_memory_is_that_of_the_tightest_nested_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, inner_limit: int | None
) -> None:
    own = tmp_path / "cgroup"
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", own)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    memory = SimpleNamespace(total=128 * GIB, available=128 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)
    own.write_text("4:memory:/job/step/task\n" if old else "0::/job/step/task\n")
    job = (tmp_path / "memory" if old else tmp_path) / "job"
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if old
        else ("memory.max", "memory.current")
    )
    none = f"{2**63 - 4096}\n" if old else "max\n"
    step, task = job / "step", job / "step" / "task"
    task.mkdir(parents=True)
    (job / limit).write_text(f"{8 * GIB}\n")
    (job / used).write_text(f"{7 * GIB}\n")
    cached = f"inactive_file 0\ntotal_inactive_file {GIB // 4}\n"
    (job / "memory.stat").write_text(cached if old else f"inactive_file {GIB // 4}\n")
    (step / limit).write_text(none)
    (step / used).write_text(f"{7 * GIB}\n")
    (task / limit).write_text(none if inner_limit is None else f"{inner_limit * GIB}\n")
    (task / used).write_text(f"{GIB if inner_limit == 2 else GIB // 4}\n")
    (task / "memory.stat").write_text("inactive_file 0\n")
    assert host_memory.free_bytes() == (GIB if inner_limit == 2 else GIB + GIB // 4)


def test_the_largest_processes_are_listed_with_their_memory() -> None:
    lines = host_memory.largest_processes(10**6)
    sizes = [float(line.split(" ", 3)[2]) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert any(line.startswith(f"pid {os.getpid()} ") for line in lines)
    assert len(host_memory.largest_processes()) <= host_memory.SHOWN


def test_without_a_container_the_count_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, dict[str, int]] = {"/proc/vmstat": {"oom_kill": 7}}
    folders = [Path("/inner"), Path("/outer")]
    monkeypatch.setattr(host_memory, "_folders", lambda: iter(folders))
    monkeypatch.setattr(host_memory, "_parse", lambda file: counts.get(str(file), {}))
    assert host_memory.kernel_kills() == KillCount(7, own=False)
    counts["/outer/memory.oom_control"] = {"oom_kill": 5}
    assert host_memory.kernel_kills() == KillCount(5, own=False)
    counts["/outer/memory.events"] = {"oom_kill": 4}
    assert host_memory.kernel_kills() == KillCount(4, own=False)
    counts["/inner/memory.events"] = {"oom_kill": 3}
    assert host_memory.kernel_kills() == KillCount(3, own=True)
    assert host_memory.KillCount(0, own=False) == KillCount(0, own=False)


def test_the_kernels_log_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    record = b"6,1,%d,-;Out of memory: Killed process %d (mar) total-vm:1kB\n"
    reads: list[Any] = [record % (2_500_000, 7), BrokenPipeError(), record % (3_000_000, 8)]
    closed: list[int] = []
    number = host_memory._INITIAL_PIDS

    def read(descriptor: int, size: int) -> bytes:
        assert (descriptor, size) == (99, 8192)
        if isinstance(found := left.pop(0), Exception):
            raise found
        return bytes(found)

    monkeypatch.setattr(
        host_memory,
        "os",
        SimpleNamespace(
            stat=lambda path: SimpleNamespace(st_ino=number),
            open=lambda path, flags: 99,
            O_RDONLY=os.O_RDONLY,
            O_NONBLOCK=os.O_NONBLOCK,
            read=read,
            close=closed.append,
        ),
    )
    left = [*reads, BlockingIOError()]
    assert host_memory.logged_kills() == [
        LoggedKill(pid=7, name="mar", at=2.5),
        LoggedKill(pid=8, name="mar", at=3.0),
    ]
    left = [*reads, PermissionError()]
    assert host_memory.logged_kills() is None
    assert closed == [99, 99]
    number += 1
    assert host_memory.logged_kills() is None
    number -= 1

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(host_memory.os, "open", refuse)
    assert host_memory.logged_kills() is None
    assert closed == [99, 99]


def test_processes_that_end_or_hide_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Any:
        raise psutil.NoSuchProcess(1)

    def one(pid: int, gib: float, command: str = "", **changes: Any) -> Any:
        known = {
            "memory_info": lambda: SimpleNamespace(rss=int(gib * GIB)),
            "cmdline": command.split,
            "name": lambda: f"name-{pid}",
            "environ": lambda: {RUN_ID_VARIABLE: "id"} if pid == 4 else {},
        }
        return SimpleNamespace(pid=pid, **{**known, **changes})

    listed = [
        *(one(1, 1.0, "a b"), one(2, 9.0, memory_info=gone), one(3, 8.0, cmdline=gone)),
        *(one(4, 2.0, "c " * 40), one(5, 3.0, environ=gone), one(6, 0.5, "d" * 60)),
        one(7, 0.25),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(listed))
    monkeypatch.setenv(RUN_ID_VARIABLE, "id")
    long = ("c " * 40)[:57]
    assert host_memory.largest_processes(5) == [
        "pid 5 3.0 GiB name-5",
        f"pid 4 2.0 GiB {long}... (this run)",
        "pid 1 1.0 GiB a b",
        f"pid 6 0.5 GiB {'d' * 60}",
    ]
    monkeypatch.delenv(RUN_ID_VARIABLE)
    assert host_memory.largest_processes(3)[1:] == [f"pid 4 2.0 GiB {long}..."]
    assert len(host_memory.largest_processes()) == 4

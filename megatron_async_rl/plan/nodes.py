"""Problems of a run's machines that can be found before anything starts on them: GPUs that other
programs use, and machines of the Ray cluster that cannot run engines.

`query_cluster` joins the cluster in a child process (`print_report`), because a launcher must not
load Ray.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import carriers
from megatron_async_rl.plan.layout import device_of, engines_elsewhere, gpus_required
from megatron_async_rl.plan.machine import GIB, Gpu, Machine, gpus_here
from megatron_async_rl.rollout.cluster import (
    join_ray,
    prepare_environment,
    software,
    software_differences,
)
from megatron_async_rl.watchdog.watch import remote_cause

OCCUPIED_BYTES = 2 * GIB
"""Used memory above which a GPU counts as occupied. A display or a monitoring process uses less."""
RELEASE_TIMEOUT_S = 20.0
"""Time limit for a run that was just killed to release its GPUs."""
POLL_S = 0.5
DEVICES, DEVICE = Path("/dev"), "nvidia[0-9]*"
"""Folder and name pattern of the driver's device files, one per GPU."""
CONNECT_TIMEOUT_S = 10.0
SETTINGS = b"\x04"
"""Type of HTTP/2's SETTINGS frame."""
PROGRAM = "from megatron_async_rl.plan import nodes; nodes.print_report({0}, {1}, {2})"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """State of one machine of the Ray cluster."""

    host: str
    software: dict[str, str] = field(default_factory=dict)
    gpus: Sequence[Gpu] = ()
    """GPUs of the machine; empty if trainer ranks may use some of them."""
    unreached: str = ""
    """Reason why it cannot connect to rank 0's machine; empty if it can."""
    silent: str = ""
    """Reason why it did not report; empty if it did."""


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """State of the machines of the Ray cluster."""

    address: str = ""
    """Address of rank 0's machine, for Ray and engines."""
    nodes: Sequence[NodeReport] = ()
    """All machines that may get engines, without rank 0's."""
    occupied: int = 0
    """Number of GPUs that Ray has assigned."""
    missing: int = 0
    """Number of expected machines that did not join in time."""
    error: str = ""
    """Reason why the cluster could not be queried; empty if it was."""


def occupied_gpus(config: Config, machine: Machine, node: int) -> list[Problem]:
    """Return problems of GPUs that the run requires on this machine, number `node`, and that other
    programs use."""
    if device_of(config, machine) != "cuda":
        return _unlisted_gpus(config)
    count = gpus_required(config, machine, node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = until_free(lambda: gpus_here(visible)[:count], RELEASE_TIMEOUT_S)
    return [_occupied(gpu, socket.gethostname()) for gpu in gpus if gpu.used > OCCUPIED_BYTES]


def _unlisted_gpus(config: Config) -> list[Problem]:
    """Return the problem of GPUs that `policy.device: auto` would leave idle because nvidia-smi
    does not list them; or none."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if config.policy.device != "auto" or hidden or not (found := sorted(DEVICES.glob(DEVICE))):
        return []
    what = f"auto selects the CPU, because nvidia-smi lists no GPU; but {found[0]} exists"
    fix = (
        "repair nvidia-smi (in a container: docker run --gpus all with the driver capability"
        " `utility`), or set policy.device: cpu"
    )
    return [Problem(key="policy.device", what=what, fix=fix)]


def until_free(read: Callable[[], Sequence[Gpu]], gpu_wait_s: float) -> Sequence[Gpu]:
    """Call `read` until it returns free GPUs only, for at most `gpu_wait_s`. Return its last
    result."""
    # The driver releases the GPUs of a killed run some seconds later.
    deadline = time.monotonic() + gpu_wait_s
    while True:
        gpus = read()
        if all(gpu.used <= OCCUPIED_BYTES for gpu in gpus) or time.monotonic() >= deadline:
            return gpus
        time.sleep(POLL_S)


def _occupied(gpu: Gpu, host: str) -> Problem:
    users = f": {', '.join(gpu.users)}" if gpu.users else ", by processes that are not visible here"
    return Problem(
        key=f"GPU {gpu.index} of {host}",
        what=f"{gpu.used / GIB:.1f} of its {gpu.memory / GIB:.0f} GiB are in use{users}",
        fix="end these processes, or select other GPUs with CUDA_VISIBLE_DEVICES there",
    )


def query_cluster(config: Config, machine: Machine, joining: int) -> ClusterReport:
    """Query the machines of the Ray cluster that may get engines, after `joining` of them have
    joined or rollout.start_timeout_s has passed. The report is empty if all engines run on rank 0's
    machine; raises UserError if machines were expected nevertheless."""
    if config.rollout is None or not engines_elsewhere(config, machine):
        if joining:
            raise UserError.of(
                "--engine-nodes",
                f"{joining}, but all engines of this config run on rank 0's machine",
                f"set weights.transport to {carriers(other_machines=True)}, and RAY_ADDRESS to a"
                " cluster of those machines",
            )
        return ClusterReport()
    timeout_s = config.rollout.start_timeout_s
    # Checked here, because Ray retries an unreachable address for minutes without a message.
    if why := _unreached(os.environ.get("RAY_ADDRESS", "")):
        return ClusterReport(error=why)
    on_gpus = device_of(config, machine) == "cuda"
    environment = dict(os.environ)
    prepare_environment(environment)
    done = subprocess.run(
        # In a child: joining a cluster starts threads, and the launcher forks later.
        [sys.executable, "-c", PROGRAM.format(joining, timeout_s, on_gpus)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return ClusterReport(error=message)
    return _parse_report(json.loads(lines[-1]))


def _unreached(address: str) -> str:
    """Return the reason why Ray cannot be reached at HOST:PORT; empty if there is none, and for any
    other form of address."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()) or "/" in host:
        return ""
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    except OSError as error:
        return f"{address} cannot be reached from {socket.gethostname()}: {error}"
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0" or _is_grpc(connection):
            return ""
    return f"the server at {address} is not Ray"


def _is_grpc(connection: socket.socket) -> bool:
    """Return True if the server answers with HTTP/2 settings, as every gRPC server does."""
    try:
        # HTTP/2's connection preface and an empty SETTINGS frame (RFC 9113, section 3.4).
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5))
        answer = connection.recv(4)
    except OSError:
        return False
    return answer[3:] == SETTINGS


def cluster_problems(report: ClusterReport, *, waited: bool) -> list[Problem]:
    """Return problems that prevent engines from running on machines of the cluster. `waited`: the
    query waited for machines to join, so a machine that does not answer is a problem."""
    if report.error:
        fix = "start Ray there in this environment, open the port, or correct RAY_ADDRESS"
        return [Problem(key="RAY_ADDRESS", what=report.error, fix=fix)]
    found = []
    if report.missing and not report.nodes:
        found.append(
            Problem(
                key="--engine-nodes",
                what=f"none of {report.missing} machines joined the Ray cluster at"
                f" {report.address}",
                fix="start the launcher on them, and open RAY_PORT between the machines",
            )
        )
    # Engines never get a GPU that Ray has already assigned, so that many may be in use.
    used = [(node, gpu) for node in report.nodes for gpu in node.gpus if gpu.used > OCCUPIED_BYTES]
    if len(used) > report.occupied:
        found += [_occupied(gpu, node.host) for node, gpu in used]
    for node in report.nodes:
        # A machine that joined earlier may be lost by now. The run continues without its engines.
        if node.silent and not waited:
            continue
        if node.silent:
            what = f"did not answer: {node.silent}"
            fix = "open all ports between the machines, and install this package there"
            found.append(Problem(key=node.host, what=what, fix=fix))
        elif differs := software_differences(node.software, software()):
            what = f"has other versions than rank 0's machine: {differs}"
            fix = "install the same environment on all machines"
            found.append(Problem(key=node.host, what=what, fix=fix))
        if node.unreached:
            what = f"cannot connect to rank 0's machine at {report.address}: {node.unreached}"
            fix = (
                "open all ports between the machines, or start Ray here with a --node-ip-address in"
                " a network that they share"
            )
            found.append(Problem(key=node.host, what=what, fix=fix))
    return found


def _parse_report(tree: dict[str, Any]) -> ClusterReport:
    nodes = [
        NodeReport(**{**node, "gpus": [Gpu(**gpu) for gpu in node["gpus"]]})
        for node in tree.pop("nodes")
    ]
    return ClusterReport(**tree, nodes=nodes)


def print_report(joining: int, timeout_s: float, on_gpus: bool) -> None:
    """Print the report on the cluster as one line of JSON, after any output of Ray."""
    print(json.dumps(asdict(_query(joining, timeout_s, on_gpus))))  # noqa: T201


def report_here(host: str, address: str, port: int, gpu_wait_s: float) -> NodeReport:
    """Return the report on the machine that this task runs on."""
    unreached = ""
    try:
        socket.create_connection((address, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        unreached = str(error)
    # None instead of CUDA_VISIBLE_DEVICES, which Ray empties for a task that requests no GPU.
    gpus = until_free(lambda: gpus_here(None), gpu_wait_s)
    return NodeReport(host=host, software=software(), gpus=gpus, unreached=unreached)


def _query(joining: int, timeout_s: float, on_gpus: bool) -> ClusterReport:
    import ray

    def others() -> list[dict[str, Any]]:
        # Ray lists dead nodes, too.
        living = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        return [node for node in living if node["Resources"].get("GPU") or not on_gpus]

    try:
        join_ray(quiet=True)
    except RuntimeError as error:  # join_ray's, or Ray's own if the cluster has other versions
        return ClusterReport(error=" ".join(str(error).split()))
    here, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    deadline = time.monotonic() + timeout_s
    while (missing := joining - len(there := others())) > 0 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    total, free = (
        resources.get("GPU", 0)
        for resources in (ray.cluster_resources(), ray.available_resources())
    )
    return ClusterReport(
        address=address,
        nodes=_reports(there, address, timeout_s, 0.0 if total > free else RELEASE_TIMEOUT_S),
        occupied=round(total - free),
        missing=max(0, missing),
    )


def _reports(
    nodes: Sequence[dict[str, Any]], address: str, timeout_s: float, gpu_wait_s: float
) -> list[NodeReport]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not nodes:
        return []
    # num_cpus=0: a node without free cores must answer, too. max_retries=0: with retries the query
    # would wait for a lost node several times.
    task = ray.remote(num_cpus=0, max_retries=0)(report_here)
    found = []
    with socket.create_server((address, 0), backlog=len(nodes) + 1) as listener:
        port = listener.getsockname()[1]
        answers = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(node["NodeManagerHostname"], address, port, gpu_wait_s)
            for node in nodes
        ]
        answered, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
        for node, answer in zip(nodes, answers, strict=True):
            host, offered = node["NodeManagerHostname"], node["Resources"].get("GPU", 0)
            report = NodeReport(host=host, silent=f"no report within {timeout_s:g} s")
            if answer in answered:
                try:
                    report = ray.get(answer)
                except Exception as error:  # noqa: BLE001 - any error is reported for its machine
                    lines = str(remote_cause(error)).strip().splitlines()
                    report = replace(report, silent=(lines or [type(error).__name__])[-1])
            # GPUs that the cluster does not have may be in use by trainer ranks.
            found.append(report if len(report.gpus) == offered else replace(report, gpus=()))
    return found

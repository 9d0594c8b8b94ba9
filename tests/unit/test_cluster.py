"""Ray assigns the trainer's GPUs to no other job, on a cluster that the run started and on an
existing cluster. The tests need no GPU: they configure Ray with four GPUs on one machine and two on
another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray

from megatron_async_rl.config.load import load
from megatron_async_rl.flow import trainer_rank
from megatron_async_rl.flow.batches import controller_spec
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.rollout import cluster
from megatron_async_rl.rollout import engine as engine_module
from megatron_async_rl.rollout.cluster import (
    CONNECTIONS,
    FILES,
    ClusterNotJoined,
    OtherDevices,
    OtherSoftware,
    digest_of,
    inherited,
    join_ray,
    place_of_engine,
    prepare_environment,
    require_software,
    software,
    software_differences,
)
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.spec import EngineSpec
from tests.cases import looped
from tests.thorough import thorough
from tests.unit.fake_engine import specs
from tests.written_run import write_run

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, socket, sys, tempfile, time
from dataclasses import replace
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.rollout import cluster
from megatron_async_rl.rollout.cluster import OtherDevices, TrainerDevicesTaken
from megatron_async_rl.rollout.cluster import join_ray, require_gpus
from megatron_async_rl.rollout.engine import RolloutEngine
from tests.unit.fake_engine import specs

store = {"object_store_memory": 80 * 2**20}
machines = Cluster(initialize_head=True, head_node_args={"num_gpus": 4, "num_cpus": 2, **store})
machines.add_node(num_gpus=2, num_cpus=0, **store)
ray.init(address=machines.address, log_to_driver=False, namespace="other job")
first = ray.get_runtime_context().get_node_id()
RANKS = {"first": ["0", "1"], "second": ["0", "1"], "not in the cluster": ["0", "1"]}

nodes = ray.nodes
ray.nodes = lambda: [
    node | {"NodeManagerHostname": "first" if node["NodeID"] == first else "second"}
    for node in nodes()
]

class Holder:
    def gpus(self):
        return sorted(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def refused(self, ranks):
        try:
            require_gpus("engine-0", {socket.gethostname(): ranks})
        except OtherDevices as error:
            return str(error)

def hold(count):
    here = NodeAffinitySchedulingStrategy(first, soft=False)
    holder = ray.remote(Holder).options(
        num_cpus=0, num_gpus=count, scheduling_strategy=here).remote()
    return holder, ray.get(holder.gpus.remote(), timeout=600)

def free():
    return ray.available_resources().get("GPU", 0)

def outcome(taken):
    holders = [hold(taken)[0]] if taken else []
    try:
        holders += join_ray(RANKS)
        engine, gpus = hold(2)
        holders.append(engine)
        return {"engine": gpus, "left": free()}
    except TrainerDevicesTaken as error:
        return {"error": str(error)}
    finally:
        for holder in holders:
            ray.kill(holder)

ray.init = lambda **settings: None
os.environ["RAY_ADDRESS"] = machines.address
found = {}
for taken in map(int, sys.argv[1:]):
    cluster.RESERVE_S = 600.0 if taken <= 2 else 2.0  # 3 of 4: two are never free
    found[taken] = outcome(taken)
    deadline = time.monotonic() + 600
    while free() < 6:
        assert time.monotonic() < deadline, "Ray did not get its GPUs back"
        time.sleep(0.05)
engine, given = hold(2)
found["colocated"] = {
    name: ray.get(engine.refused.remote(ranks)) for name, ranks in
    {"own": given, "more": [*given, "9"], "one": given[:1]}.items()
}
ray.kill(engine)
with tempfile.TemporaryDirectory() as logs:
    spec = replace(specs(1)[0], gpus={"second": ["0"]}, log_dir=Path(logs))
    engine = ray.remote(RolloutEngine).options(num_cpus=0, num_gpus=1).remote(spec)
    try:
        ray.get(engine.start.remote(), timeout=600)
    except OtherDevices as error:
        found["colocated"]["none"] = str(error)
print(json.dumps(found))
ray.shutdown()
machines.shutdown()
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    """Outcomes of a trainer with two ranks, by the number of GPUs that other jobs hold. One Ray
    cluster runs them one after another."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0", "1", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@thorough
def test_an_engine_gets_none_of_the_gpus_that_ranks_use_on_any_machine(
    outcomes: dict[str, dict[str, object]],
) -> None:
    assert outcomes["0"] == {"engine": ["2", "3"], "left": 0}


@thorough
@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        ("1", "of first, and Ray has assigned some of them to other jobs; free GPUs: 1, 2"),
        ("3", "no 2 free GPUs on first"),
    ],
)
def test_a_trainer_does_not_start_while_other_jobs_hold_its_gpus(
    outcomes: dict[str, dict[str, object]], taken: str, reason: str
) -> None:
    assert reason in str(outcomes[taken]["error"])


@thorough
def test_a_colocated_engine_does_not_start_on_a_gpu_without_a_rank(
    outcomes: dict[str, dict[str, object]],
) -> None:
    refused = outcomes["colocated"]
    assert (refused["own"], refused["more"]) == (None, None)
    host = socket.gethostname()
    assert f"Ray placed engine-0 on GPU 1 of {host}, which no rank uses" in str(refused["one"])
    assert f"of {host}, which no rank uses; the ranks use GPU 0 of second" in str(refused["none"])


@looped(
    ("assigned", "ranks", "refused"),
    [
        (["0", "1"], {"here": ["1", "0"]}, ""),
        (["0"], {}, ""),
        (["1"], {"here": ["0"]}, "engine-0 on GPU 1 of here, which no rank uses; the ranks use"),
        (["0"], {"second": ["0"]}, "of here, which no rank uses; the ranks use GPU 0 of second"),
    ],
)
def test_a_colocated_engine_on_a_gpu_without_a_rank_is_refused_before_vllm_starts(
    assigned: list[str],
    ranks: dict[str, list[str]],
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    async def start(engine: RolloutEngine) -> None:
        started.append(engine.spec.name)

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(cluster, "assigned_gpus", lambda: assigned)
    monkeypatch.setattr(RolloutEngine, "_start", start)
    watch = SimpleNamespace(phase=lambda *_: nullcontext(), fact=lambda *_: None)
    monkeypatch.setattr(engine_module, "watch", watch)
    # The constructor would replace the output, the name and the watchdog of this process.
    engine = object.__new__(RolloutEngine)
    engine.spec = replace(specs(1)[0], gpus=ranks)
    with pytest.raises(OtherDevices, match=refused) if refused else nullcontext():
        asyncio.run(engine.start())
    assert started == ([] if refused else ["engine-0"])


def test_colocated_engines_receive_the_gpus_of_the_ranks(tmp_path: Path) -> None:
    config, ranks = load(write_run(tmp_path)), {"a": ["0"], "b": ["3"]}
    assert config.rollout is not None

    def gpus_of_first(engines: int, placement: str) -> object:
        changes = {"engines": engines, "placement": placement}
        rollout = config.rollout.model_copy(update=changes)  # type: ignore[union-attr]
        spec = controller_spec(config.model_copy(update={"rollout": rollout}), "cuda", ranks)
        return spec.engines[0].gpus

    assert gpus_of_first(2, "colocated") == ranks
    # With more engines than ranks, some engines need other GPUs.
    assert (gpus_of_first(3, "colocated"), gpus_of_first(2, "disaggregated")) == ({}, {})


def test_a_checkout_and_its_wheel_have_one_digest_and_an_edited_one_another(
    tmp_path: Path,
) -> None:
    checkout, wheel = tmp_path / "checkout", tmp_path / "wheel"
    for package in (checkout, wheel):
        (package / "share").mkdir(parents=True)
        (package / "train.py").write_text("1")
    (wheel / "share" / "prepare.py").write_text("2")  # a link in the checkout
    assert digest_of(checkout) == digest_of(wheel)
    (wheel / "train.py").write_text("3")
    assert digest_of(checkout) != digest_of(wheel)


def test_a_cluster_of_the_run_does_not_see_the_trainers_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    assert join_ray({socket.gethostname(): ["3", "1"], "elsewhere": ["0", "2"]}) == []
    join_ray({}, shared=["1", "0"])
    assert seen == ["0,2", "1,0"], "GPUs that ranks do not use; GPUs that ranks and engines share"


def test_a_cluster_of_the_run_does_not_inherit_the_single_queue_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(CONNECTIONS, "1")
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ.get(CONNECTIONS)))
    join_ray()
    assert (seen, os.environ[CONNECTIONS]) == ([None], "1")


def test_the_error_of_an_unreachable_cluster_names_the_address_and_the_token_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", refuses)
    named = r"RAY_ADDRESS=10\.0\.0\.1:6379\. .* RAY_AUTH_MODE=token"
    with pytest.raises(ClusterNotJoined, match=named):
        join_ray()


def test_engines_keep_the_priority_of_the_run() -> None:
    given, own = {"RAY_worker_niceness": "5"}, dict[str, str]()
    prepare_environment(given)
    prepare_environment(own)
    assert (given["RAY_worker_niceness"], own["RAY_worker_niceness"]) == ("5", "0")


def test_the_runs_module_path_precedes_the_clusters_own() -> None:
    variables = inherited({"PYTHONPATH": "/lib:own::/run", "HOME": "/root"}, "/run")
    assert variables == {"PYTHONPATH": "/run:/lib:/run/own:${PYTHONPATH}"}
    assert inherited({}, "/run") == {"PYTHONPATH": "/run:${PYTHONPATH}"}


class Nodes:
    """Cluster with the machines `alive` and `dead`; the first of `alive` is rank 0's machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alive: str, dead: str = "") -> None:
        nodes = [{"NodeID": node * 56, "Alive": node not in dead} for node in alive + dead]
        context = SimpleNamespace(get_node_id=lambda: alive[0] * 56)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    def of(self, spec: EngineSpec, **changes: str) -> str:
        place = place_of_engine(replace(spec, **changes))  # type: ignore[arg-type]
        return place if isinstance(place, str) else f"only {place.node_id[0]}"


def test_engines_that_read_shared_memory_are_on_rank_0s_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes(monkeypatch, "bac")
    assert [nodes.of(spec) for spec in specs(3)] == ["only b"] * 3
    assert [nodes.of(spec, device="cuda") for spec in specs(3)] == ["only b"] * 3
    cuda_ipc = {"transport": "cuda_ipc", "device": "cuda"}
    assert [nodes.of(spec, **cuda_ipc) for spec in specs(3)] == ["only b"] * 3


@pytest.mark.parametrize("transport", ["relay", "collective"])
def test_engines_of_other_carriers_are_distributed_over_the_machines_alive(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch, "bac", dead="d")
    relayed = [nodes.of(spec, transport=transport) for spec in specs(4)]
    assert relayed == ["only a", "only c", "only b", "only a"]
    assert nodes.of(specs(1)[0], transport=transport, device="cuda") == "SPREAD"


def test_an_engine_on_a_machine_with_other_versions_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = software()
    require_software(expected)
    require_software({})
    require_software(expected | {FILES: "edited since"})
    monkeypatch.setattr(cluster, "software", lambda: expected | {"torch": "2.12.0"})
    differs = rf"torch 2\.12\.0 here and {re.escape(expected['torch'])} there"
    with pytest.raises(OtherSoftware, match=rf"{socket.gethostname()} has other .*: {differs}\."):
        require_software(expected)


def test_software_is_compared_by_versions_and_by_this_packages_files() -> None:
    here = software()
    assert {"Python", "megatron-async-rl", "torch", "megatron-core", "ray"} <= here.keys()
    assert software_differences(here, dict(here)) == ""
    edited = here | {FILES: "0"}
    assert software_differences(here, edited) == f"{FILES} {here[FILES]} here and 0 there"
    older = {name: version for name, version in here.items() if name != "ray"}
    assert software_differences(here, older) == f"ray {here['ray']} here and unknown there"


def test_rank_0_knows_the_gpus_of_all_ranks_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    others = [("a", "4"), ("b", "0"), ("b", "1")]
    layout = SimpleNamespace(
        rank=0, device_type="cuda", gathered=lambda mine: [others[0], mine, *others[1:]]
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(trainer_rank, "Rank0", lambda config: Mock())
    config = SimpleNamespace(eval=None, colocated=False)
    rank = TrainerRank(config, layout)  # type: ignore[arg-type]
    rank.begin(0, None, oldest=0)
    gpus = rank.rank0.open.call_args.kwargs["gpus"]  # type: ignore[attr-defined]
    assert gpus == {"a": ["4", "5"], "b": ["0", "1"]}

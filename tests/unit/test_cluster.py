"""The trainer's GPUs are handed to nobody else, by a Ray of our own and on a cluster that was there
before. Without a GPU: a Ray that is told it has four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from megatron_async_rl.rollout.cluster import (
    ClusterNotJoined,
    inherited,
    join_ray,
    place_of_engine,
    prepare_environment,
)
from megatron_async_rl.rollout.spec import EngineSpec
from tests.unit.fake_engine import specs

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys, time
import ray
from megatron_async_rl.rollout import cluster
from megatron_async_rl.rollout.cluster import TrainerDevicesTaken, join_ray

ray.init(address="local", num_gpus=4, num_cpus=2, include_dashboard=False, log_to_driver=False,
         object_store_memory=80 * 2**20, namespace="other job")

class Holder:
    def gpus(self):
        return sorted(ray.get_runtime_context().get_accelerator_ids()["GPU"])

def hold(count):
    holder = ray.remote(Holder).options(num_cpus=0, num_gpus=count).remote()
    return holder, ray.get(holder.gpus.remote(), timeout=600)

def free():
    return ray.available_resources().get("GPU", 0)

def outcome(taken):
    holders = [hold(1)[0] for _ in range(taken)]
    try:
        holders.append(join_ray(2))
        engine, gpus = hold(2)
        holders.append(engine)
        return {"engine": gpus, "left": free()}
    except TrainerDevicesTaken as error:
        return {"error": str(error)}
    finally:
        for holder in holders:
            ray.kill(holder)

address = ray.get_runtime_context().gcs_address
ray_init, ray.init = ray.init, lambda **settings: None
os.environ |= {"RAY_ADDRESS": address, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
found = {}
for taken in map(int, sys.argv[1:]):
    cluster.RESERVE_S = 600.0 if taken <= 2 else 2.0  # they are never free: no use to wait
    found[taken] = outcome(taken)
    deadline = time.monotonic() + 600
    while free() < 4:
        assert time.monotonic() < deadline, "Ray did not get its GPUs back"
        time.sleep(0.05)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    """What became of a trainer with two ranks, by the number of GPUs that others had taken before,
    one after the other in one Ray."""
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


def test_an_engine_gets_none_of_the_gpus_that_the_trainers_ranks_use(
    outcomes: dict[str, dict[str, object]],
) -> None:
    assert outcomes["0"] == {"engine": ["2", "3"], "left": 0}


@pytest.mark.parametrize(("taken", "reason"), [("1", "free are 1, 2"), ("3", "no 2 free GPUs")])
def test_a_trainer_whose_gpus_others_have_does_not_start(
    outcomes: dict[str, dict[str, object]], taken: str, reason: str
) -> None:
    assert reason in str(outcomes[taken]["error"])


def test_a_ray_of_our_own_sees_none_of_the_trainers_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    assert join_ray(2) is None
    assert seen == ["0,2"]


def test_a_cluster_that_lets_nobody_in_is_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", refuses)
    named = r"RAY_ADDRESS=10\.0\.0\.1:6379 .* RAY_AUTH_MODE=token"
    with pytest.raises(ClusterNotJoined, match=named):
        join_ray(0)


def test_engines_keep_the_priority_of_the_run() -> None:
    given, own = {"RAY_worker_niceness": "5"}, dict[str, str]()
    prepare_environment(given)
    prepare_environment(own)
    assert (given["RAY_worker_niceness"], own["RAY_worker_niceness"]) == ("5", "0")


def test_what_the_run_can_import_can_be_imported_on_the_cluster_before_what_is_there() -> None:
    handed = inherited({"PYTHONPATH": "/lib:own::/run", "HOME": "/root"}, "/run")
    assert handed == {"PYTHONPATH": "/run:/lib:/run/own:${PYTHONPATH}"}
    assert inherited({}, "/run") == {"PYTHONPATH": "/run:${PYTHONPATH}"}


class Nodes:
    """A cluster of three machines, of which the first of `alive` is rank 0's."""

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


@pytest.mark.parametrize("transport", ["relay", "collective"])
def test_elsewhere_engines_are_divided_over_the_machines_that_live(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch, "bac", dead="d")
    relayed = [nodes.of(spec, transport=transport) for spec in specs(4)]
    assert relayed == ["only a", "only c", "only b", "only a"]
    assert nodes.of(specs(1)[0], transport=transport, device="cuda") == "SPREAD"

"""A cluster that was there before is joined, and the trainer's GPUs are handed to nobody else, by it
or by a Ray of our own. Without a GPU: a Ray that is told it has four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from megatron_async_rl.rollout.cluster import join_ray, prepare_environment

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, subprocess, sys, time
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
    return holder, ray.get(holder.gpus.remote(), timeout=60)

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
assert os.environ.pop("RAY_AUTH_MODE") == "token", "this Ray asks nobody for a token"
joined = subprocess.run(
    [sys.executable, "-c", os.environ["JOINING"]],
    env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True
)
ray_init, ray.init = ray.init, lambda **settings: None
os.environ |= {"RAY_ADDRESS": address, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
found = {"joined": joined.stdout[-2000:] + joined.stderr[-2000:]}
for taken in map(int, sys.argv[1:]):
    if taken > 2:  # they are never free: no use to wait
        cluster.RESERVE_S = 2.0
    found[taken] = outcome(taken)
    deadline = time.monotonic() + 60
    while free() < 4:
        assert time.monotonic() < deadline, "Ray did not get its GPUs back"
        time.sleep(0.05)
print(json.dumps(found))
"""
JOINING = """
import os
from megatron_async_rl.rollout.cluster import join_ray, prepare_environment
prepare_environment(os.environ)
join_ray(0)
import ray
print("CPUs:", ray.cluster_resources()["CPU"])
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What became of a trainer with two ranks, by the number of GPUs that others had taken before,
    one after the other in one Ray."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0", "1", "3"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | {"HOME": str(tmp_path_factory.mktemp("home")), "JOINING": JOINING},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_cluster_that_asks_for_a_token_is_joined(outcomes: dict[str, dict[str, object]]) -> None:
    assert str(outcomes["joined"]).startswith("CPUs: 2")


def test_ray_reads_what_nobody_has_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"RAY_worker_niceness": "5", "RAY_ADDRESS": "10.0.0.1:6379"}
    prepare_environment(given)
    assert (given["RAY_worker_niceness"], "RAY_AUTH_MODE" in given) == ("5", False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    own: dict[str, str] = {}
    prepare_environment(own)
    assert (own["RAY_worker_niceness"], "RAY_AUTH_MODE" in own) == ("0", False)
    prepare_environment(given)
    assert given["RAY_AUTH_MODE"] == "token"


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

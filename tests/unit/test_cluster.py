"""On a Ray cluster that was there before, the trainer's GPUs are handed to nobody else. Without a
GPU: a Ray that is told it has four."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
import ray
from megatron_async_rl.rollout import cluster
from megatron_async_rl.rollout.cluster import TrainerDevicesTaken, join_ray

taken = json.loads(sys.argv[1])
if taken > 2:  # they are never free: no use to wait
    cluster.RESERVE_S = 2.0
ray.init(address="local", num_gpus=4, num_cpus=2, include_dashboard=False, log_to_driver=False,
         object_store_memory=80 * 2**20, namespace="other job")

class Holder:
    def gpus(self):
        return sorted(ray.get_runtime_context().get_accelerator_ids()["GPU"])

def hold(count):
    holder = ray.remote(Holder).options(num_cpus=0, num_gpus=count).remote()
    return holder, ray.get(holder.gpus.remote(), timeout=60)

before = [hold(1) for _ in range(taken)]
address = ray.get_runtime_context().gcs_address
ray_init, ray.init = ray.init, lambda **settings: None
os.environ |= {"RAY_ADDRESS": address, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
try:
    reserved = join_ray(2)
except TrainerDevicesTaken as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
engine, gpus = hold(2)
print(json.dumps({"engine": gpus, "left": ray.available_resources().get("GPU", 0)}))
"""


def outcome(taken: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(taken)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_engine_gets_none_of_the_gpus_that_the_trainers_ranks_use() -> None:
    assert outcome(0) == {"engine": ["2", "3"], "left": 0}


@pytest.mark.parametrize(("taken", "reason"), [(1, "free are 1, 2"), (3, "no 2 free GPUs")])
def test_a_trainer_whose_gpus_others_have_does_not_start(taken: int, reason: str) -> None:
    assert reason in str(outcome(taken)["error"])

"""Work of each rank that stages a version, over 1, 2 and 4 ranks that hold the weights; and the
speed of a digest relative to a memory copy.

A random model, of 100 million parameters unless asked otherwise, divided over tensor- and
data-parallel ranks of this machine. Every figure is processor time, so that ranks may share a core;
the largest of the ranks', medians over the rounds after the second, whose pages are there.

    bytes        that a rank writes, over the model's
    stage        a rank's time for its digests and copies, and for meeting the others, over the time
                 in which one rank copies the model once
    digest       the time of the whole model's digests over that of the copy, on one rank
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import random_model
import torch

LAYOUTS = {
    "1": {"ranks": 1},
    "2, tensor": {"ranks": 2, "tensor": 2},
    "2, data": {"ranks": 2},
    "4, tensor x data": {"ranks": 4, "tensor": 2},
}
SKIPPED = 2


def timed(call: Any) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def rank(model: Path, dtype: str, settings: dict[str, Any], rounds: int) -> None:
    """One rank; rank 0 prints what all of them measured."""
    from megatron_async_rl.config.policy import ParallelConfig, PolicyConfig
    from megatron_async_rl.config.schema import ModelConfig
    from megatron_async_rl.policy import device
    from megatron_async_rl.policy.model import build_model
    from megatron_async_rl.policy.parallel import initialise
    from megatron_async_rl.weights.digest import partial_digest
    from megatron_async_rl.weights.export import WeightExporter, WeightShards
    from megatron_async_rl.weights.shared_memory import SharedMemory
    from megatron_async_rl.weights.staging import Staging

    parallel = ParallelConfig(**settings)
    layout = initialise(parallel, device.install("cpu"), timeout_s=600)
    torch.set_num_threads(1)
    config = ModelConfig(path=model, dtype=dtype)
    policy = build_model(config, PolicyConfig(parallel=parallel), layout)
    staging = Staging(SharedMemory(), layout)
    exporter = WeightExporter(policy.bridge, policy.chunks)
    shards = WeightShards(exporter, staging.reached, random_model.BUCKET_BYTES)
    own = sum(part.tensor.nbytes for part in shards.parts())
    total = sum(layout.gathered(own))
    parameters = [parameter.detach() for chunk in policy.chunks for parameter in chunk.parameters()]
    targets = [torch.empty_like(tensor) for tensor in parameters]

    found: dict[str, list[float]] = {"stage": [], "copy": [], "digest": []}
    for version in range(rounds + SKIPPED):
        for tensor in parameters:
            tensor.mul_(1.0)  # as an optimizer leaves them
        layout.barrier()
        parts = shards.parts()
        found["stage"].append(timed(lambda: staging.stage(version, shards.buckets, parts)))  # noqa: B023
        if layout.world_size == 1:
            pairs = list(zip(targets, parameters, strict=True))
            found["copy"].append(timed(lambda: [to.copy_(tensor) for to, tensor in pairs]))  # noqa: B023
            found["digest"].append(timed(lambda: [partial_digest(t) for t in parameters]))
    medians = {name: statistics.median(times[SKIPPED:] or [0.0]) for name, times in found.items()}
    everyone = layout.gathered({**medians, "bytes": own / total})
    if layout.rank == 0:
        largest = {name: max(one[name] for one in everyone) for name in everyone[0]}
        sys.stdout.write(json.dumps({**largest, "mib": total / 2**20}) + "\n")
    layout.barrier()
    staging.close()
    layout.shutdown()


def measure(model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    found = {}
    for name, settings in LAYOUTS.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={settings['ranks']}", __file__, "--rank", str(model)]
        command += [json.dumps(settings), "--dtypes", dtype, "--rounds", str(rounds)]
        run = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        found[name] = json.loads(run.stdout.splitlines()[-1])
    copy = found["1"]["copy"]
    return {
        "dtype": dtype,
        "mib": round(found["1"]["mib"], 1),
        "copy_ms": round(1e3 * copy, 1),
        "digest": round(found["1"]["digest"] / copy, 2),
        "ranks": {
            name: {"bytes": round(one["bytes"], 3), "stage": round(one["stage"] / copy, 2)}
            for name, one in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100, choices=list(random_model.SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        model, settings = args.rank
        rank(Path(model), args.dtypes[0], json.loads(settings), args.rounds)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as made:
            model = random_model.save(Path(made), args.millions, dtype)
            results.append({"millions": args.millions, **measure(model, dtype, args.rounds)})
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

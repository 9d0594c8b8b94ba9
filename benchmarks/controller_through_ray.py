"""Cost of the controller per sample through Ray: the real actor and engine actors that answer at
once.

Prints, at each number of prompts in flight: processor time of the controller's process per sample,
that of the same controller without Ray (`controller_load.py`, the same settings), and the share of
the whole that the latter is. The difference is Ray: calls, and samples and requests made into bytes
and back, batches for the trainer included. `garbage`: objects per sample that only Python's
collector frees. Settings as in `controller_load.py`; `--batch` is the largest number of responses
in a report.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from controller_load import (
    MANIFEST,
    WARM_UP,
    Prompts,
    Timers,
    add_arguments,
    measure_once,
    spec_of,
)

from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.rollout.cluster import join_ray
from megatron_async_rl.rollout.engine_process import Engine, RemoteEngine
from megatron_async_rl.rollout.spec import EngineSpec


class Launch:
    """Engine actors that run already."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    async def __call__(self, spec: EngineSpec, *, again: bool) -> Engine:
        return cast(Engine, RemoteEngine(self.actors[spec.index]))


def _processor_s(controller: Any) -> float:
    import time

    return time.process_time()


def _garbage(controller: Any) -> int:
    import gc

    return gc.collect()


def measure(in_flight: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One controller and its engines, from start to end; figures are after the first batches."""
    remote = ray.remote(num_cpus=0, max_concurrency=1000)(Timers)
    engines = [
        remote.remote(arguments.batch, seed, arguments.tokens) for seed in range(arguments.engines)
    ]
    with tempfile.TemporaryDirectory() as folder:
        spec = replace(spec_of(in_flight, arguments), run_dir=Path(folder))
        actor = ray.remote(num_cpus=0, max_concurrency=1000)(Controller)
        controller = actor.remote(Prompts(), spec, Launch(engines))
        ray.get(controller.start.remote())
        ray.get(controller.staged.remote(0, MANIFEST))
        version = samples = before = 0
        began = 0.0
        while version <= WARM_UP or samples < before + arguments.responses:
            if version == WARM_UP:
                ray.get(controller.__ray_call__.remote(_garbage))
                before = ray.get(controller.stats.remote())["samples"]
                began = ray.get(controller.__ray_call__.remote(_processor_s))
            ray.get(controller.next_batch.remote(version))
            version += 1
            ray.get(controller.staged.remote(version, MANIFEST))
            samples = ray.get(controller.stats.remote())["samples"]
        used = ray.get(controller.__ray_call__.remote(_processor_s)) - began
        garbage = ray.get(controller.__ray_call__.remote(_garbage))
        for actor in (controller, *engines):
            ray.kill(actor)
    return {
        "prompts_in_flight": in_flight,
        "responses": samples - before,
        "processor_us_per_sample": used / (samples - before) * 1e6,
        "garbage_per_sample": garbage / (samples - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    join_ray(quiet=True)
    best: dict[int, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for in_flight in arguments.in_flight:
            row = measure(in_flight, arguments)
            row["processor_us_without_ray"] = measure_once(in_flight, arguments)[
                "processor_us_per_response"
            ]
            best[in_flight] = min(
                row, best.get(in_flight, row), key=lambda one: one["processor_us_per_sample"]
            )
    ray.shutdown()
    for row in best.values():
        row["share_without_ray"] = row["processor_us_without_ray"] / row["processor_us_per_sample"]
    print(json.dumps({"settings": vars(arguments), "figures": list(best.values())}, indent=2))


if __name__ == "__main__":
    main()

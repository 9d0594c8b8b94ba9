"""The controller under load: engines that are timers, up to 10,000 prompts in flight, on one
asyncio loop.

Prints, at each number of prompts in flight: responses per second, of the wall and of the processor
without what the timers take of it, the ratio of the latter to that with the fewest in flight,
processor time per response, reports per second, and the most memory that the process had; of
`--rounds` through all numbers, the best of each, because what else runs on the machine takes the
caches and only ever slows down. Engines answer `--batch` responses a report after a random delay,
as fast as the controller takes them in: what is measured is the controller. The timers' own work (a
heap, making samples) is clocked and subtracted; what they take of the caches cannot be. With
`--capacity` groups are served in order, as by real engines: the last of a batch is waited for while
later ones finish. `--selection` chooses what the scheduler has to decide. `--profile` shows where
time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import heapq
import json
import pstats
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import ControllerSpec
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Prompt, Request, Sample
from megatron_async_rl.watchdog.processes import collect_rarely
from megatron_async_rl.weights.manifest import Manifest

GROUP = 8
WARM_UP = 3
"""Batches after which everything is in flight and memory grows no longer."""


class Timers:
    """An engine whose responses end in random order, `batch` of them each time it is asked; it
    waits for nothing."""

    machine = HERE

    def __init__(self, batch: int, seed: int, tokens: int = 1) -> None:
        self.version = 0
        self.own_s = 0.0
        """Processor time of the timers, which is not the controller's."""
        self.reports = 0
        self._batch = batch
        self._tokens = tokens
        self._chance = random.Random(seed)
        self._due: list[tuple[float, str]] = []
        self._requests: dict[str, Request] = {}
        self._clock = 0.0
        self._news = asyncio.Event()

    async def submit(self, requests: Sequence[Request]) -> None:
        began = time.process_time()
        for request in requests:
            self._requests[request.id] = request
            heapq.heappush(
                self._due, (self._clock + self._chance.lognormvariate(0.0, 1.0), request.id)
            )
        self._news.set()
        self.own_s += time.process_time() - began

    async def abort(self, ids: Sequence[str]) -> None:
        """Unused: no response is aborted here."""

    async def update(self, version: int, manifest: Manifest) -> dict[str, str]:
        self.version = version
        return dict(manifest.digests)

    async def stop(self) -> None:
        """There is nothing to stop."""

    def kill(self) -> None:
        """Nor to kill."""

    async def until_ended(self) -> None:
        """Nor to wait for."""

    async def report(self, timeout_s: float) -> EngineReport:
        if not self._requests:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        else:
            await asyncio.sleep(0)
        began = time.process_time()
        finished: list[Sample] = []
        while self._due and len(finished) < self._batch:
            self._clock, one = heapq.heappop(self._due)
            request = self._requests.pop(one, None)
            if request is not None:
                finished.append(self._sample(request))
        self.reports += 1
        columns = batch_of(finished, [int(one.id.partition("-")[0]) for one in finished])
        self.own_s += time.process_time() - began
        return EngineReport(
            finished=columns,
            aborted=(),
            state="running",
            version=self.version,
            running=len(self._requests),
            tokens=0,
            busy_s=0.0,
            silent_s=0.0,
        )

    def _sample(self, request: Request) -> Sample:
        return Sample(
            id=request.id,
            prompt=request.prompt,
            response_ids=np.ones(self._tokens, dtype=np.int32),
            behavior_logprobs=np.zeros(self._tokens, dtype=np.float32),
            versions=np.full(self._tokens, self.version, dtype=np.int32),
            loss_mask=np.ones(self._tokens, dtype=np.uint8),
            text="",
            finish_reason="stop",
            reward=float(request.k % 2),
        )


class Prompts:
    """An infinite source of prompts."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> Prompt:
        self._count += 1
        return Prompt(id=f"p{self._count}", text="", token_ids=(1,))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Any) -> None:
        return


def flow_of(in_flight: int, arguments: argparse.Namespace) -> FlowConfig:
    return FlowConfig(
        prompts_per_step=in_flight // 2,
        group_size=GROUP,
        async_ratio=arguments.ratio,
        selection=arguments.selection,
    )


def capacity_of(in_flight: int, arguments: argparse.Namespace) -> int:
    return int(arguments.capacity) or -(-2 * in_flight * GROUP // arguments.engines)


def spec_of(in_flight: int, arguments: argparse.Namespace) -> ControllerSpec:
    rollout = RolloutConfig.model_validate(
        {"sampling": {"max_tokens": 8}, "reward": {"name": "arithmetic"}}
    )
    engines = [
        EngineSpec(
            index=index,
            model_path=Path(),
            dtype="float32",
            rollout=rollout,
            seed=0,
            device="cpu",
            log_dir=Path(),
            transport="shared_memory",
            first_version=-1,
        )
        for index in range(arguments.engines)
    ]
    fleet = FleetSettings(capacity=capacity_of(in_flight, arguments), max_paused=1.0)
    return ControllerSpec(
        flow=flow_of(in_flight, arguments),
        engines=engines,
        fleet=fleet,
        timeout_s=60.0,
        steps=None,
        fresh_steps=0,
        seed=0,
    )


MANIFEST = Manifest(buckets=(), digests={})


async def measure(
    in_flight: int, responses: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """`in_flight` prompts: at async_ratio 1 that is two batches."""
    engines = [Timers(arguments.batch, seed, arguments.tokens) for seed in range(arguments.engines)]

    async def launch(spec: EngineSpec, *, again: bool) -> Any:
        return engines[spec.index]

    controller = Controller(Prompts(), spec_of(in_flight, arguments), launch)
    await controller.start()
    await controller.staged(0, MANIFEST)
    version = 0
    wall = processor = own = 0.0
    before = reports = 0
    while version <= WARM_UP or controller.stats()["samples"] < before + responses:
        if version == WARM_UP:
            before = controller.stats()["samples"]
            reports = sum(engine.reports for engine in engines)
            wall, processor, own = (
                time.perf_counter(),
                time.process_time(),
                sum(engine.own_s for engine in engines),
            )
        await controller.next_batch(version)
        version += 1
        await controller.staged(version, MANIFEST)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    count = controller.stats()["samples"] - before
    own = sum(engine.own_s for engine in engines) - own
    await controller.close()
    return {
        "prompts_in_flight": in_flight,
        "responses": count,
        "responses_per_s": count / wall,
        "responses_per_processor_s": count / (processor - own),
        "processor_us_per_response": (processor - own) / count * 1e6,
        "reports_per_s": (sum(engine.reports for engine in engines) - reports) / wall,
        "most_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument(
        "--responses", type=int, default=160_000, help="at each number in flight, at least"
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--capacity", type=int, default=0, help="requests that one engine holds at most; 0: all fit"
    )
    parser.add_argument("--batch", type=int, default=1, help="responses in one report, at most")
    parser.add_argument("--tokens", type=int, default=1, help="in each response")
    parser.add_argument("--selection", default="oldest_first")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)


def measure_once(in_flight: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure once, after the garbage of earlier measurements is collected, with the
    garbage-collector settings of the controller's process."""
    collect_rarely()
    return asyncio.run(measure(in_flight, arguments.responses, arguments))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    best: dict[int, dict[str, float]] = {}
    memory: dict[int, float] = {}
    for _ in range(1 if arguments.profile else arguments.rounds):
        for in_flight in sorted(arguments.in_flight):
            with cProfile.Profile() if arguments.profile else contextlib.nullcontext() as profile:
                row = measure_once(in_flight, arguments)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            best[in_flight] = min(
                row, best.get(in_flight, row), key=lambda one: one["processor_us_per_response"]
            )
            # The maximum of the process so far: only in the first round, which ascends, it is
            # that of this number.
            memory.setdefault(in_flight, row["most_memory_mib"])
            best[in_flight]["most_memory_mib"] = memory[in_flight]
    rows = list(best.values())
    for row in rows:
        row["ratio_to_fewest"] = (
            row["responses_per_processor_s"] / rows[0]["responses_per_processor_s"]
        )
    print(json.dumps({"settings": vars(arguments), "figures": rows}, indent=2))


if __name__ == "__main__":
    main()

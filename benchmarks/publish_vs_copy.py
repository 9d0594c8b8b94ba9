"""A publish of new weights to one engine against a plain memory copy of the same bytes.

`stage`: what the trainer waits for, from Megatron's parameters. `publish`: until the engine samples
with the new weights, which it proved; the trainer trains on meanwhile; `parts_ms`: where it goes.
Medians over the rounds after the first, whose new pages of shared memory are `first_stage_ms`.
`cuda_ipc`: the same by that carrier, whose device is the CPU here, in buckets of 32 MiB.
`collective`: by that one; `brought`: to the engine's memory, while it samples.
Random models; one engine behind Ray, idle; ratios = ours / copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import publish_phases
import random_model

IPC_BUCKET_BYTES = 32 * 2**20


class Cutting:
    """Takes the parts of a version; `seconds` of it."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts = parts
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            part = next(self._parts, None)
            self.seconds += time.perf_counter() - started
            if part is None:
                return
            yield part


def measure(model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    import ray
    import torch

    policy, shards = random_model.policy(model, dtype)
    parameters = [parameter.detach() for chunk in policy.chunks for parameter in chunk.parameters()]
    size = sum(tensor.nbytes for tensor in parameters)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    copies, stages, publishes, pauses, parts = [], [], [], [], []
    spec = random_model.spec(model, dtype, model / "logs")
    spec.log_dir.mkdir()
    handle = (
        ray.remote(publish_phases.TimedEngine)
        .options(num_cpus=0, max_concurrency=1000)
        .remote(spec)
    )
    try:
        ray.get(handle.start.remote(), timeout=300)
        publisher = random_model.Publisher(handle, shards.buckets)
        first = publisher.publish(1, shards.parts())
        for version in range(2, rounds + 2):
            for parameter in parameters:
                parameter.mul_(1.0)  # as an optimizer leaves them
            started = time.perf_counter()
            target.copy_(source)
            copies.append(time.perf_counter() - started)
            ray.get(handle.take_times.remote(), timeout=60)
            publish_phases.taken()
            cutting = Cutting(shards.parts())
            report = publisher.publish(version, cutting)
            stages.append(report.staged_s)
            publishes.append(report.seconds)
            pauses.append(report.paused_s)
            engine = ray.get(handle.take_times.remote(), timeout=60)
            parts.append(
                publish_phases.parts(
                    cutting.seconds,
                    report.staged_s,
                    report.seconds,
                    publish_phases.taken(),
                    engine,
                )
            )
        ray.get(handle.read_as.remote("cuda_ipc"), timeout=60)
        buckets = random_model.shards_of(shards._exporter, IPC_BUCKET_BYTES)
        versions = iter(range(rounds + 2, 4 * rounds))
        published = [publisher.publish_on_demand(next(versions), buckets) for _ in range(rounds)][
            1:
        ]
        ray.get(handle.read_as.remote("shared_memory"), timeout=60)
        publisher.connect(spec.log_dir)
        collective = [publisher.publish(next(versions), shards.parts()) for _ in range(rounds)]
        collective = collective[2:]  # whose two slots are new pages, too
        publisher.close()
    finally:
        ray.wait([handle.stop.remote()], timeout=15)
        ray.kill(handle)
    copy_s, stage_s, publish_s, pause_s = (
        statistics.median(times) for times in (copies, stages, publishes, pauses)
    )
    return {
        "dtype": dtype,
        "mib": round(size / 2**20, 1),
        "copy_ms": round(1e3 * copy_s, 2),
        "stage_ms": round(1e3 * stage_s, 2),
        "publish_ms": round(1e3 * publish_s, 2),
        "pause_ms": round(1e3 * pause_s, 2),
        "first_stage_ms": round(1e3 * first.staged_s, 2),
        "stage_ratio": round(stage_s / copy_s, 2),
        "publish_ratio": round(publish_s / copy_s, 2),
        "parts_ms": publish_phases.medians_ms(parts),
        "cuda_ipc": {
            "buckets": len(buckets.buckets),
            "stage_ms": _median_ms(published, "staged_s"),
            "publish_ms": _median_ms(published, "seconds"),
            "publish_ratio": round(_median_ms(published, "seconds") / (1e3 * copy_s), 2),
        },
        "collective": {
            f"{what}_ms": _median_ms(collective, name)
            for what, name in (
                ("brought", "brought_s"),
                ("publish", "seconds"),
                ("pause", "paused_s"),
            )
        },
    }


def _median_ms(published: list[Any], name: str) -> float:
    return float(round(1e3 * statistics.median(getattr(one, name) for one in published), 2))


if __name__ == "__main__":
    publish_phases.time_trainer()
    random_model.measure_all(measure, __doc__)

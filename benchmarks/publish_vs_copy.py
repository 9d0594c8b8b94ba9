"""A publish of new weights to one engine against a plain memory copy of the same bytes.

`stage`: what the trainer waits for. `publish`: until the engine samples with the new weights, which it proved; the trainer
trains on meanwhile. Medians over the rounds after the first, whose new pages of shared memory are `first_stage_ms`.
Random models made on the spot; one engine behind Ray, idle; ratios = ours / copy.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import random_model


def measure(model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    import torch

    from megatron_async_rl.rollout.actor import start_engines, stop_engines
    from megatron_async_rl.weights.publish import Publisher, RayEngine

    tensors = random_model.weights(model)
    size = sum(tensor.nbytes for tensor in tensors.values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    copies, stages, publishes, pauses = [], [], [], []
    handles = start_engines([random_model.spec(model, dtype, model / "logs")])
    try:
        publisher = Publisher([RayEngine("engine-0", handles[0])], timeout_s=300)
        first = publisher.publish(1, random_model.buckets(tensors))
        for version in range(2, rounds + 2):
            for tensor in tensors.values():
                tensor.mul_(1.0)  # as an optimizer leaves them
            started = time.perf_counter()
            target.copy_(source)
            copies.append(time.perf_counter() - started)
            report = publisher.publish(version, random_model.buckets(tensors))
            stages.append(report.staged_s)
            publishes.append(report.seconds)
            pauses.append(report.paused_s)
        publisher.close()
    finally:
        stop_engines(handles, timeout_s=15)
    copy_s, stage_s, publish_s, pause_s = (statistics.median(times) for times in (copies, stages, publishes, pauses))
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
    }


if __name__ == "__main__":
    random_model.measure_all(measure, __doc__)

"""How long a publish keeps an engine from sampling, against vLLM's own pause, reload and resume of
the same weights.

In the same engine, alternately: ours through Ray from another process, with a digest of every
tensor compared before the engine continues; vLLM's `pause_generation`, `reload_weights` from
safetensors in memory, `resume_generation`, called next to it, without proof. `bare`: the same
without the 20 ms that vLLM sleeps when it pauses. Medians; ratios = ours / vLLM's.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import random_model

from megatron_async_rl.rollout.engine import RolloutEngine


class BenchedEngine(RolloutEngine):
    async def reload(self, model: str) -> tuple[float, float]:
        """Seconds in all, and without the sleep in vLLM's pause."""
        llm: Any = self._llm
        started = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        bare_pause = time.perf_counter() - paused
        reloading = time.perf_counter()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        await llm.resume_generation()
        ended = time.perf_counter()
        return paused - started + ended - reloading, bare_pause + ended - reloading


def measure(model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    import ray

    from megatron_async_rl.weights.transport import ShardSlice, TensorSpec

    tensors = random_model.weights(model)
    engine = random_model.spec(model, dtype, model / "logs")
    engine.log_dir.mkdir()
    handle = ray.remote(BenchedEngine).options(num_cpus=0, max_concurrency=1000).remote(engine)
    ours, whole, bare = [], [], []
    try:
        ray.get(handle.start.remote(), timeout=300)
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
        publisher = random_model.Publisher(handle, [specs])
        for version in range(1, rounds + 3):
            parts = (ShardSlice.whole(name, tensor) for name, tensor in tensors.items())
            pause_s = publisher.publish(version, parts).paused_s
            with_sleep, without = ray.get(handle.reload.remote(str(model)), timeout=300)
            if version > 2:
                ours.append(pause_s)
                whole.append(with_sleep)
                bare.append(without)
        publisher.close()
    finally:
        ray.wait([handle.stop.remote()], timeout=15)
        ray.kill(handle)
    ours_s, whole_s, bare_s = (statistics.median(times) for times in (ours, whole, bare))
    return {
        "dtype": dtype,
        "ours_ms": round(1e3 * ours_s, 1),
        "vllm_ms": round(1e3 * whole_s, 1),
        "bare_ms": round(1e3 * bare_s, 1),
        "ratio": round(ours_s / whole_s, 2),
        "ratio_to_bare": round(ours_s / bare_s, 2),
    }


if __name__ == "__main__":
    random_model.measure_all(measure, __doc__, directory="/dev/shm")

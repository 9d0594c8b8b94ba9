"""A checkpoint of a random model with Adam's state, float32, one rank, against what its bytes cost
without us: a memory copy for what the step waits for, writing the bytes to the same disk (synced)
for the rest, reading them for a load. Medians of the rounds after the first, which makes the pages.

    step_waits   `save` with a background: until the next step may begin, over the copy
    background   until that checkpoint is complete, over the plain write
    alone        `save` without a background, over the plain write
    load         into a model that has Adam's state, over the plain read (from the page cache)
    peaks        resident memory above what was resident at the call, over the checkpoint's bytes

Every large allocation is a mapping of its own, so that resident memory is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_model

MALLOC = "MALLOC_MMAP_THRESHOLD_"
PIECE = 64 * 2**20


def resident(key: str) -> int:
    """Bytes. key: VmRSS, or VmHWM for the peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and bytes of the peak above what was resident."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, began = resident("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - began, resident("VmHWM") - before


def write_plainly(path: Path, held: Any) -> None:
    with open(path, "wb") as file:
        for start in range(0, len(held), PIECE):
            file.write(held[start : start + PIECE])
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path, into: Any) -> None:
    with open(path, "rb", buffering=0) as file:
        view = memoryview(into)
        for start in range(0, len(into), PIECE):
            file.readinto(view[start : start + PIECE])


def measure(folder: Path, millions: int, rounds: int) -> dict[str, Any]:
    import torch

    from megatron_async_rl.config.policy import OptimizerConfig, PolicyConfig
    from megatron_async_rl.config.schema import ModelConfig
    from megatron_async_rl.policy import checkpoint
    from megatron_async_rl.policy.adam_view import adam_names, adam_shards
    from megatron_async_rl.policy.background import Background
    from megatron_async_rl.policy.model import build_model
    from megatron_async_rl.policy.optimizer import build_optimizer, wrap_for_gradients

    path = random_model.save(folder / "model", millions, "float32")
    policy = PolicyConfig(optimizer=OptimizerConfig(lr=1e-3))
    layout = random_model.one_rank()
    model = build_model(ModelConfig(path=path, dtype="float32"), policy, layout)
    optimizer = build_optimizer(wrap_for_gradients(model.chunks, policy), policy, torch.float32)
    state = [shard for name in adam_names(model) for shard in adam_shards(optimizer, name)]
    weights = [parameter.detach() for chunk in model.chunks for parameter in chunk.parameters()]
    size = sum(tensor.nbytes for tensor in [*state, *weights])
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    background = Background("checkpoint")
    made: dict[str, list[tuple[float, int]]] = {}
    saved = iter(range(1, 1_000_000))

    def save(background: Background | None) -> None:
        checkpoint.save(
            folder / "checkpoint",
            next(saved),
            model=model,
            optimizer=optimizer,
            state={},
            parameter_state={},
            layout=layout,
            keep=1,
            background=background,
        )

    def load() -> None:
        checkpoint.load(folder / "checkpoint", model=model, optimizer=optimizer, layout=layout)

    def take(name: str, work: Callable[[], Any]) -> None:
        made.setdefault(name, []).append(measured(work))

    for _ in range(rounds + 1):
        take("copy", lambda: target.copy_(source))
        take("write", lambda: write_plainly(folder / "plain", source.numpy()))
        take("read", lambda: read_plainly(folder / "plain", target.numpy()))
        began = time.perf_counter()
        take("step_waits", lambda: save(background))
        take("rest", background.finish)
        made.setdefault("background", []).append((time.perf_counter() - began, made["rest"][-1][1]))
        take("alone", lambda: save(None))
        take("load", load)
    seconds = {
        name: statistics.median(second for second, _ in each[1:]) for name, each in made.items()
    }
    peaks = {name: max(peak for _, peak in each[1:]) for name, each in made.items()}
    limits = {"step_waits": "copy", "background": "write", "alone": "write", "load": "read"}
    return {
        "parameters": sum(tensor.numel() for tensor in weights),
        "gigabytes": round(size / 1e9, 3),
        "ratios": {name: round(seconds[name] / seconds[to], 2) for name, to in limits.items()},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "peaks": {name: round(peaks[name] / size, 3) for name in limits},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=100, choices=list(random_model.SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: of temporary files"
    )
    args = parser.parse_args()
    if MALLOC not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, MALLOC: "65536"})
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(Path(folder), args.millions, args.rounds), indent=2))


if __name__ == "__main__":
    main()

"""Rank 0 takes longer over something than any other collective may: a batch, an evaluation, one that a checkpoint waits for."""

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.flow.eval_schedule import EvalSchedule
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.train import Run

DEADLINE_S = 2.0
STEPS = 4

device.install("cpu")
layout = initialise(ParallelConfig(ranks=2, tensor=2), "cpu", timeout_s=DEADLINE_S)


def slowly() -> str:
    time.sleep(1.5 * DEADLINE_S)
    return "the batch"


class SlowFeed:
    """Hands out no batch, as after a stop."""

    def next_batch(self, version: int) -> None:
        return None

    def evaluate(self, version: int) -> None:
        slowly()

    def evaluated(self, *, wait: bool) -> list[Any]:
        if wait:
            slowly()
        return []

    def position(self) -> None:
        return None


class Saving(Exception):
    """Every rank has come to the checkpoint."""


def save_policy(*args: object, **settings: object) -> None:
    layout.barrier()
    raise Saving


class EvaluatingRun(Run):
    """Of a run only what leads from an evaluation to the checkpoint, which is collective."""

    def __init__(self, version: int, folder: Path) -> None:
        sections = {
            "run": SimpleNamespace(steps=STEPS),
            "model": SimpleNamespace(path="m"),
            "checkpoint": SimpleNamespace(keep=1),
        }
        self.config: Any = SimpleNamespace(**sections, rollout=None, watchdog=SimpleNamespace(timeout_s=60.0))
        self.directory, self.layout, self.version, self.saved_version = folder, layout, version, -1
        self.schedule = EvalSchedule(every=0, steps=STEPS, means={})
        if layout.rank == 0:
            self.schedule.begin(0)
        self.feed: Any = SlowFeed() if layout.rank == 0 else None
        self.policy: Any = SimpleNamespace(save=save_policy)
        self.log = self.eval_log = self.timeline = None


assert layout.from_rank_zero(slowly) == "the batch"
sys.stdout.write(f"rank {layout.rank} has it\n")
with tempfile.TemporaryDirectory() as name:
    for version in (1, STEPS):
        try:
            EvaluatingRun(version, Path(name)).train()
        except Saving:
            sys.stdout.write(f"rank {layout.rank} saves version {version}\n")
layout.shutdown()

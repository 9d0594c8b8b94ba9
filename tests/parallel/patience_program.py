"""Rank 0 takes longer over something than any other collective may: a batch, an evaluation, one that a stop finds under way."""

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
    time.sleep(2 * DEADLINE_S)
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


class Saving(Exception):
    """Every rank has come to the checkpoint."""


class EvaluatingRun(Run):
    """Of a run only what leads from an evaluation to the checkpoint, which is collective."""

    def __init__(self, version: int, folder: Path) -> None:
        self.config: Any = SimpleNamespace(run=SimpleNamespace(steps=STEPS), rollout=None)
        self.directory, self.layout, self.version = folder, layout, version
        self.schedule = EvalSchedule(every=0, steps=STEPS, means={0: 0.5})
        self.feed: Any = SlowFeed() if layout.rank == 0 else None
        self.log = self.eval_log = self.timeline = None

    def save(self) -> None:
        self.layout.barrier()
        raise Saving


assert layout.from_rank_zero(slowly) == "the batch"
sys.stdout.write(f"rank {layout.rank} has it\n")
with tempfile.TemporaryDirectory() as name:
    for version in (1, STEPS):
        try:
            EvaluatingRun(version, Path(name)).train()
        except Saving:
            sys.stdout.write(f"rank {layout.rank} saves version {version}\n")
layout.shutdown()

"""Rank 0 takes longer over something than any other collective may: a batch, an evaluation, and an
evaluation before a checkpoint."""

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.flow.evaluation import EvalSchedule
from megatron_async_rl.flow.rank0 import OtherRank, Rank0
from megatron_async_rl.flow.spec import DataState
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import initialise

DEADLINE_S = 6.0
"""Longer than a rank on a busy machine comes after the other."""
STEPS = 4

device.install("cpu")
layout = initialise(ParallelConfig(ranks=2, tensor=2), "cpu", timeout_s=DEADLINE_S)


def slowly() -> str:
    time.sleep(1.5 * DEADLINE_S)
    return "the batch"


class SlowBatches:
    """Hands out no batch, as after a stop."""

    def next_batch(self, version: int) -> None:
        return None

    def evaluate(self, version: int) -> None:
        slowly()

    def evaluated(self, *, wait: bool) -> list[Any]:
        if wait:
            slowly()
        return []

    def state(self) -> DataState:
        return DataState(state={})


def unasked(batches: object) -> tuple[float, int]:
    raise AssertionError("an engine evaluates")


def rank_of_a_run(version: int, folder: Path) -> OtherRank:
    """Rank of a run between an evaluation and the checkpoint."""
    config: Any = SimpleNamespace(
        run=SimpleNamespace(dir=folder, steps=STEPS),
        model=SimpleNamespace(path="m"),
        rollout=None,
        eval=None,
        supervised=False,
        model_dump=lambda **_: {},
    )
    rank = (Rank0 if layout.rank == 0 else OtherRank)(config, layout)
    rank.version, rank.schedule = version, EvalSchedule(every=0, steps=STEPS, means={})
    if isinstance(rank, Rank0):
        rank.schedule.begin(0)
        rank._batches = SlowBatches()  # type: ignore[assignment]
        rank._log = SimpleNamespace(sync=lambda: None)  # type: ignore[assignment]
    return rank


assert layout.from_rank_zero(slowly) == "the batch"
sys.stdout.write(f"rank {layout.rank} has it\n")
with tempfile.TemporaryDirectory() as name:
    for version in (1, STEPS):
        rank = rank_of_a_run(version, Path(name))
        rank.evaluate(unasked)
        rank.state()
        layout.barrier()
        sys.stdout.write(f"rank {layout.rank} saves version {version}\n")
layout.shutdown()

"""Rank 0 takes long over something while the other rank waits: a batch, an evaluation, and an
evaluation before a checkpoint.

Arguments: a directory, and `wait` to take longer than any other collective may. Without `wait`,
rank 0 takes until the other rank has entered the next collective, whose group must have the timeout
LONG_WAIT_TIMEOUT.
"""

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.flow.batches import RolloutBatches
from megatron_async_rl.flow.controller_spec import DataState
from megatron_async_rl.flow.evaluation import EvalSchedule
from megatron_async_rl.flow.rank0 import Rank0
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.policy import device
from megatron_async_rl.policy.parallel import LONG_WAIT_TIMEOUT, initialise

DEADLINE_S = 6.0
"""Longer than a rank on a busy machine comes after the other."""
STEPS = 4
FOLDER, REALLY = Path(sys.argv[1]), sys.argv[2:] == ["wait"]
COLLECTIVES = ("broadcast_object_list", "all_gather_object", "barrier", "all_reduce", "broadcast")

device.install("cpu")
layout = initialise(
    ParallelConfig(ranks=2, tensor=2), "cpu", timeout_s=DEADLINE_S if REALLY else 600.0
)
entered = 0
"""Collectives of this rank so far; both enter the same ones."""


def announced(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def enter(*args: Any, **kwargs: Any) -> Any:
        global entered
        entered += 1
        group = kwargs.get("group") or dist.group.WORLD
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        if layout.rank == 1:
            write_file(FOLDER / str(entered), str(timeout == LONG_WAIT_TIMEOUT).encode())
        return collective(*args, **kwargs)

    return enter


for name in COLLECTIVES:
    setattr(dist, name, announced(getattr(dist, name)))


def slowly() -> str:
    if REALLY:
        time.sleep(1.5 * DEADLINE_S)
        return "the batch"
    while not (waiting := FOLDER / str(entered + 1)).exists():
        time.sleep(0.01)
    patient = waiting.read_text()
    assert patient == "True", f"the other rank waits in collective {entered + 1} with a deadline"
    return "the batch"


class SlowBatches(RolloutBatches):
    """Hands out no batch, as after a stop."""

    def __init__(self) -> None: ...

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


def rank_of_a_run(version: int, folder: Path) -> TrainerRank:
    """Rank of a run between an evaluation and the checkpoint."""
    config: Any = SimpleNamespace(
        run=SimpleNamespace(dir=folder, steps=STEPS, last_step=STEPS),
        model=SimpleNamespace(path="m", dtype="float32"),
        engine_dtype="float32",
        policy=SimpleNamespace(lora=None, fp8=None),
        rollout=None,
        eval=None,
        supervised=False,
        colocated=False,
        model_dump=lambda **_: {},
    )
    rank = TrainerRank(config, layout)
    rank.version, rank.schedule = version, EvalSchedule(every=0, steps=STEPS, means={})
    if isinstance(rank.rank0, Rank0):
        rank.rank0.version, rank.rank0.schedule = version, rank.schedule
        rank.schedule.begin(0)
        rank.rank0._batches = SlowBatches()
        rank.rank0._log = SimpleNamespace(sync=lambda: None)  # type: ignore[assignment]
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

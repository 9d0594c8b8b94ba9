"""One rank of the tests of reduction beside the backward pass; arguments as those of
layout_program.

Layouts named `expert...` run the model with experts, the others the untied dense one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_async_rl.config.schema import ParallelConfig
from megatron_async_rl.policy import optimizer
from tests.parallel.layout_program import Rank, run_each, save

BUCKET = 4000
"""Parameters of a bucket, at the least; Megatron's own would hold the whole model."""


class Watched:
    """Bucket groups whose reduction began while the schedule ran, of the step under way."""

    def __init__(self) -> None:
        self.early = 0
        self._inside = False
        start = _ParamAndGradBucketGroup.start_grad_sync

        def counted(group, *args, **kwargs):
            self.early += self._inside
            return start(group, *args, **kwargs)

        _ParamAndGradBucketGroup.start_grad_sync = counted

    def watch(self, schedule) -> None:
        accumulate = schedule.accumulate

        def inside(*args):
            self._inside = True
            accumulate(*args)
            self._inside = False

        schedule.accumulate = inside


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    optimizer.DistributedDataParallelConfig = partial(
        DistributedDataParallelConfig, bucket_size=BUCKET
    )
    watched = Watched()
    mixture = output.stem.startswith("expert")
    model, a, b = ("mixture", "mixture_a", "mixture_b") if mixture else ("untied", "a", "b")
    results: dict = {}
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    for overlap in (False, True):
        rank.parallel = parallel.model_copy(update={"overlap_grad_reduce": overlap})
        policy = rank.policy(model)
        watched.watch(policy.schedule)
        early, steps = [], []
        for name in (a, b):
            watched.early = 0
            steps += rank.train(policy, [name])["steps"]
            early.append(watched.early)
        everyone: list = [None] * rank.layout.world_size
        dist.all_gather_object(everyone, early)
        results[overlap] = {"steps": steps, "weights": rank.weights(policy), "early": everyone}
    save(rank, results, [results[overlap]["steps"] for overlap in (False, True)], output)


if __name__ == "__main__":
    run_each(run_layout)

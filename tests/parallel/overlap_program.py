"""One rank of the tests of reduction during the backward pass, and of gathering weights during the
forward pass; arguments as those of layout_program.

Layouts named `expert...` run the model with experts, the others the untied dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ReferenceConfig
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import optimizer
from tests.parallel.layout_program import Rank, run_each, save

BUCKET = 1000
"""Smallest number of parameters of a bucket: the output layer has one to itself. Megatron's own
would hold the whole model."""


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


class Gathers:
    """Buckets of weights whose gathering began: during the schedule's passes, or at once. left:
    those that nothing had waited for when a schedule's passes were through."""

    def __init__(self) -> None:
        self.beside = self.at_once = self.left = 0
        start = _ParamAndGradBucketGroup.start_param_sync

        def counted(group, force_sync=False):
            waits = force_sync or not group.ddp_config.overlap_param_gather
            self.beside, self.at_once = self.beside + (not waits), self.at_once + waits
            return start(group, force_sync=force_sync)

        _ParamAndGradBucketGroup.start_param_sync = counted

    def watch(self, schedule) -> None:
        accumulate = schedule.accumulate

        def watched(*args):
            accumulate(*args)
            for chunk in schedule.chunks:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    self.left += group.param_gather_handle is not None

        schedule.accumulate = watched


FOLLOWED = ObjectiveConfig(
    minibatches=2, proximal="ewma", kl=KlConfig(coef=0.1), reference=ReferenceConfig(ema=0.9)
)
"""Weights are scored and averaged between two steps of a batch, too."""


def gathered(rank: Rank, model: str, names: Sequence[str], gathers: Gathers) -> dict:
    """Two batches of two steps each: weights gathered after each step, during the next forward
    pass, and so without the wait at a batch's end."""
    found = {}
    whole = rank.parallel
    for objective, how in product(("plain", "followed"), ("at_once", "beside", "unawaited")):
        if (objective, how) == ("followed", "unawaited"):
            continue
        rank.parallel = whole.model_copy(
            update={"overlap_grad_reduce": True, "overlap_param_gather": how != "at_once"}
        )
        settings = ObjectiveConfig(minibatches=2) if objective == "plain" else FOLLOWED
        policy = rank.policy(model, objective=settings)
        if how == "unawaited":
            policy.schedule.gather_weights = lambda: None
        gathers.beside = gathers.at_once = gathers.left = 0
        gathers.watch(policy.schedule)
        trained = rank.train(policy, names)
        counts = [None] * rank.layout.world_size
        dist.all_gather_object(counts, (gathers.beside, gathers.at_once, gathers.left))
        found[objective, how] = {**trained, "gathers": counts}
    rank.parallel = whole
    return found


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    optimizer.DistributedDataParallelConfig = partial(
        DistributedDataParallelConfig, bucket_size=BUCKET
    )
    watched, gathers = Watched(), Gathers()
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
    if parallel.distributed_optimizer:
        results["gathered"] = gathered(rank, model, (a, b), gathers)
    save(rank, results, [results[overlap]["steps"] for overlap in (False, True)], output)


if __name__ == "__main__":
    run_each(run_layout)

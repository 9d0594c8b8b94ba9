"""One rank of the recomputation tests; arguments as those of layout_program.

Layouts named `mixture...` or `expert...` run the model with experts, the others the tied dense one.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from megatron_async_rl.config.controls import GacControl
from megatron_async_rl.config.policy import ParallelConfig
from megatron_async_rl.policy import attention
from megatron_async_rl.policy.megatron_private import gradient_buffers
from tests.parallel.layout_program import Rank, received, run_each, save

KINDS = ("none", "selective", "full")


class LiveBytes:
    """Bytes that autograd keeps for backward passes, storages counted once, parameters not at all.
    `peak`: the most at any time."""

    def __init__(self, parameters) -> None:
        self._not_counted = {p.untyped_storage().data_ptr() for p in parameters}
        self._held: dict[int, list[int]] = {}
        self.now = self.peak = 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: Kept(self, tensor), lambda kept: kept.tensor)

    def take(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._not_counted:
            return
        entry = self._held.setdefault(storage.data_ptr(), [0, storage.nbytes()])
        self.now += entry[1] if entry[0] == 0 else 0
        entry[0] += 1
        self.peak = max(self.peak, self.now)

    def leave(self, tensor: torch.Tensor) -> None:
        entry = self._held.get(tensor.untyped_storage().data_ptr())
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            self.now -= entry[1]
            del self._held[tensor.untyped_storage().data_ptr()]


class Kept:
    """A saved tensor, counted as long as autograd has it."""

    def __init__(self, counter: LiveBytes, tensor: torch.Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        counter.take(tensor)

    def __del__(self) -> None:
        self.counter.leave(self.tensor)


def steps(rank: Rank, kind: str, model: str, names: list[str], dtype: str) -> dict:
    policy = rank.policy(model, recompute=kind, controls=(GacControl(),), dtype=dtype, budget=160)
    live = LiveBytes(policy.model.chunks[0].parameters())
    found, shapes = [], set()
    policy.model.chunks[0].register_forward_pre_hook(
        lambda _, given: shapes.add(tuple(given[0].shape))
    )
    with live.hooks():
        for name in names:
            metrics = policy.train_step(received(policy, rank.batches[name]))
            found.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    buffers = [buffer.clone() for buffer in gradient_buffers(policy.schedule.chunks)]
    return {
        "steps": found,
        "peak": live.peak,
        "left": live.now,
        # Rows and length of the micro-batch with the most tokens.
        "largest": max(shapes, key=math.prod),
        "buffers": buffers,
        "weights": [p.detach().clone() for c in policy.model.chunks for p in c.parameters()],
    }


def same(one: dict, other: dict) -> bool:
    return one["steps"] == other["steps"] and all(
        torch.equal(mine, theirs)
        for what in ("buffers", "weights")
        for mine, theirs in zip(one[what], other[what], strict=True)
    )


def run_layout(material: Path, parallel: ParallelConfig, output: Path) -> None:
    # Attention as of longer rows, which keeps more than its inputs in bfloat16, too. That of short
    # rows is recomputed in tests/gpu/test_train_step.py, in bfloat16 in `make test-all`.
    attention.SHORT_KEYS = 0
    rank = Rank(material, parallel, output.with_suffix(".scratch"))
    mixture = output.stem.startswith(("mixture", "expert"))
    model = "mixture" if mixture else "tied"
    names = [f"{model}_a", f"{model}_b"] if mixture else ["a", "b"]
    results: dict = {}
    for dtype in ("float32", "bfloat16"):
        by_kind = {kind: steps(rank, kind, model, names, dtype) for kind in KINDS}
        mine = {
            kind: {
                "same": same(found, by_kind["none"]),
                **{name: found[name] for name in ("peak", "left", "largest")},
            }
            for kind, found in by_kind.items()
        }
        everyone: list = [None] * rank.layout.world_size
        dist.all_gather_object(everyone, mine)
        results[dtype] = {"ranks": everyone, "steps": by_kind["none"]["steps"]}
    save(rank, results, [result["steps"] for result in results.values()], output)


if __name__ == "__main__":
    run_each(run_layout)

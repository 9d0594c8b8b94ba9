"""Cost of a batch on its way from rank 0 to many ranks: the real division and the real `receive`,
over gloo, between as many processes of this machine.

Prints, at each number of ranks: processor time that rank 0 takes to divide a batch and make bytes
of it, to hand it out in all, and that another rank takes to have it; the bytes that every rank gets
(the numbers of all samples) and that one rank also gets (the tokens of its own samples); and the
most memory that rank 0 had. Of `--rounds` batches the median, after a first round that opens the
connections. Seconds of the wall say nothing: all ranks share this machine's cores. Ranks are forks
of one process, so that hundreds fit into its memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from controller_load import GROUP

from megatron_async_rl.policy.batch_shares import receive, split
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.samples.columns import NUMERIC, as_stream, batch_of
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt, Sample


def batch_of_size(samples: int, tokens: int) -> TrainBatch:
    """Lengths from half of `tokens` to one and a half."""
    lengths = np.random.default_rng(0).integers(tokens // 2, 3 * tokens // 2, size=samples)
    made = [
        Sample(
            id=f"{index // GROUP}-{index % GROUP}",
            prompt=Prompt(id=f"p{index // GROUP}", text="", token_ids=tuple(range(64))),
            response_ids=np.ones(length, dtype=np.int32),
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.zeros(length, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
            text="",
            finish_reason="stop",
            reward=float(index % 2),
        )
        for index, length in enumerate(lengths.tolist())
    ]
    groups = [index // GROUP for index in range(samples)]
    return TrainBatch(version=0, samples=batch_of(made, groups, NUMERIC))


def layout_of(rank: int, ranks: int, tensor: int) -> Any:
    """The part of a Layout that the way of a batch reads."""
    size = min(tensor, ranks)
    own: Any = SimpleNamespace(
        rank=rank,
        world_size=ranks,
        tp_size=size,
        cp_size=1,
        dp_size=ranks // size,
        dp_rank=rank // size,
        cpu_group=dist.group.WORLD,
        patient_group=dist.group.WORLD,
    )
    own.dp_rank_of = lambda other: Layout.dp_rank_of(own, other)
    own.from_rank_zero = lambda make: Layout.from_rank_zero(own, make)
    return own


def as_rank(
    rank: int, ranks: int, batch: TrainBatch, folder: Path, args: argparse.Namespace
) -> None:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layout = layout_of(rank, ranks, args.tensor)
    took = []
    for _ in range(args.rounds + 1):
        began = time.process_time()
        received = receive(lambda: batch, layout)
        took.append((time.process_time() - began) * 1e3)
        assert received is not None
        assert len(received) == args.samples
    if rank in (0, ranks - 1):
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {"ms": statistics.median(took[1:]), "memory_mib": maximum}
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def measure(ranks: int, batch: TrainBatch, args: argparse.Namespace) -> dict[str, float]:
    data_parallel = ranks // min(args.tensor, ranks)
    began = time.process_time()
    everyones, parts = split(batch, data_parallel)
    numbers, *tokens = (len(as_stream(part)) for part in (everyones, *parts))
    divided = (time.process_time() - began) * 1e3
    del everyones, parts
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    as_rank(rank, ranks, batch, folder, args)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        assert not failed, f"{len(failed)} ranks failed"
        first, last = (
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in (0, ranks - 1)
        )
    return {
        "ranks": ranks,
        "data_parallel": data_parallel,
        "divide_ms": divided,
        "rank_0_ms": first["ms"],
        "other_rank_ms": last["ms"],
        "mib_to_every_rank": numbers / 2**20,
        "mib_to_one_rank": max(tokens) / 2**20,
        "rank_0_memory_mib": first["memory_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--tensor", type=int, default=8, help="ranks that take the same tokens")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="mean, of a response")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    batch = batch_of_size(args.samples, args.tokens)
    figures = [measure(ranks, batch, args) for ranks in args.ranks]
    print(json.dumps({"settings": vars(args), "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
